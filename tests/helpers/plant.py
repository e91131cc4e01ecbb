"""What a planted bug and a healthy variant are."""

from dataclasses import dataclass

from tests.conftest import Hunk


@dataclass(frozen=True)
class Plant:
    """One bug: `old` -> `new` in the recipe, what must stop it and with which words."""

    id: str
    gate: str
    row: str
    old: str
    new: str
    words: tuple[str, ...]
    """All of them must occur in the gate's measured, needed and remedy (case does not matter)."""
    source: str = ""
    before: tuple[str, ...] = ()
    """Gates that may fail before `gate`, for the reason in `why`."""
    why: str = ""
    harm: str = ""
    argv: tuple[str, ...] = ()
    recipe: str = "vision/classify"
    batch: bool = False
    """The gate must leave the batch and its picture."""
    missed: str = ""
    """Why the gates do not catch it yet; the test is then a strict xfail."""

    @property
    def hunk(self) -> Hunk:
        return self.old, self.new


@dataclass(frozen=True)
class Healthy:
    """A healthy variant of a recipe, and what a naive detector would say."""

    id: str
    argv: tuple[str, ...] = ()
    hunk: Hunk | None = None
    naive: str = ""
    recipe: str = "vision/classify"
    may_skip: tuple[str, ...] = ("terms", "init", "fabricated", "smoothing")
    """Gates that have nothing to judge here."""
    alarm: str = ""
    """Why a gate cries wolf today; the test is then a strict xfail."""


def padded_right(ends: str, most: str) -> str:
    """A user's own generation from the prompts `inputs`, in place of the one of recipes/shared: answers continue the padding."""
    return f"""        pad, width = tokenizer.pad_token_id, max(map(len, inputs))
        ids = torch.tensor([a + [pad] * (width - len(a)) for a in inputs], device=run.device)
        mask = torch.tensor([[1] * len(a) + [0] * (width - len(a)) for a in inputs], device=run.device)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens={most}, do_sample=False, eos_token_id={ends},
                             pad_token_id=pad)
        found = [([t for t in row if t not in {ends}], True) for row in out[:, width:].tolist()]
"""
