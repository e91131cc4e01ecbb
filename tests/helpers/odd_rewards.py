"""Rewards that a gate must stop."""


def constant(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.5] * len(completions)


def undefined(prompts: list[str], completions: list[str]) -> list[float]:
    return [c.count("e") / len(c) if c else float("nan") for c in completions]


def one(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(sum(c.count("e") for c in completions))]


def raises(prompts: list[str], completions: list[str]) -> list[float]:
    return [c.count("e") / len(c) for c in completions]  # an empty one divides by zero


def empty(prompts: list[str], completions: list[str]) -> list[float]:
    return [-float(c.count("e")) for c in completions]


def neighbours(prompts: list[str], completions: list[str]) -> list[float]:
    most = max(1, *map(len, completions))
    return [c.count("e") + len(c) / most for c in completions]


def letters(prompts: list[str], completions: list[str]) -> list[float]:
    """A healthy one, which random weights can be judged by, too."""
    return [sum(x in "aeiou" for x in c.lower()) / max(1, len(c)) for c in completions]


def near(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """A healthy one for random weights, which are never right: a little for the answer's letters, so that a group differs."""
    pairs = zip(completions, answer, strict=True)
    return [10.0 * (c.strip() == a) + sum(x in c for x in set(a)) - 0.01 * len(c) for c, a in pairs]
