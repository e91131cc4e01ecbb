"""Hides secrets in settings: values such as that of `--api-key` are used, but never written or printed.

Files hold HIDDEN instead. A run that is resumed, or started from such a file, asks for the value again.
"""

import re
from collections.abc import Iterable
from typing import Any

from trainworthy.core.base.errors import UserError

HIDDEN = "[hidden]"
SECRET = re.compile(
    r"\b(hf_|gh[pousr]_|github_pat_|sk-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{12,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
"""Pattern of access tokens, under whatever name."""
_WORDS = (
    r"(?:secret|password|passwd|passphrase|credentials?|bearer|(?:api|access|private|secret|signing|encryption)[_-]?key"
    r"|(?<!bos[_-])(?<!eos[_-])(?<!pad[_-])(?<!unk[_-])(?<!sep[_-])(?<!cls[_-])(?<!end[_-])(?<!mask[_-])(?<!stop[_-])"
    r"(?<!start[_-])(?<!image[_-])(?<!special[_-])token)"
)
NAME = re.compile(rf"(?:^|[._-]){_WORDS}$", re.I)
"""Names of settings whose values are secrets. A tokenizer's special token is no secret."""
_ASSIGNED = re.compile(rf"(\b[\w.-]*?{_WORDS}[\"']?\s*(?::[^=\"'\n]*)?[=:]\s*[\"'])([^\"'\n]+)([\"'])", re.I)
SHORTEST = 6
"""Least length of a value that is also replaced inside other text; a shorter one would garble words."""

_values: set[str] = set()


def is_secret(name: str) -> bool:
    """Return whether the name of a setting (`hub.api_key`, `--api-key`) denotes a secret."""
    return bool(NAME.search(name.lstrip("-")))


def keep(settings: dict[str, Any]) -> None:
    """Remember the secrets among real settings, so that `hide` finds them in this process's texts."""
    _values.update(v for _, v in _secrets(settings) if len(v) >= SHORTEST and v != HIDDEN)


def hide(text: str) -> str:
    """Return `text` without the secrets of this process's settings."""
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def source(text: str) -> str:
    """Return source text (a diff) without secrets: values of the settings, strings that look like tokens, and string
    literals assigned to a secret's name."""
    return _ASSIGNED.sub(rf"\g<1>{HIDDEN}\g<3>", SECRET.sub(HIDDEN, hide(text)))


def settings(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested plain settings with secrets replaced. Numbers, switches and empty values are no secrets."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found[name] = settings(value, f"{prefix}{name}.")
        elif is_secret(prefix + name) and isinstance(value, str) and value:
            found[name] = HIDDEN
        elif is_secret(prefix + name) and isinstance(value, list):
            found[name] = [HIDDEN if isinstance(v, str) and v else v for v in value]
        else:
            found[name] = value
    return found


def words(argv: Iterable[str]) -> list[str]:
    """Return the words of a command line with secrets replaced: `--api-key VALUE`, `--api-key=VALUE`."""
    found: list[str] = []
    secret = False
    for word in map(str, argv):
        name, equals, _ = word.partition("=")
        if word.startswith("--"):
            secret = is_secret(name)
            found.append(f"{name}={HIDDEN}" if secret and equals else word)
        else:
            found.append(HIDDEN if secret else word)
    return found


def missing(values: dict[str, Any]) -> list[str]:
    """Return the names (`hub.api_key`) of settings whose value was hidden."""
    return [name for name, value in _secrets(values) if value == HIDDEN]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def needed(names: list[str], *, where: str, command: str) -> UserError:
    """Return the error for secrets that must be given again."""
    return UserError(
        f"{where} does not hold the value of {', '.join(map(flag, names))}: secrets are used and never written",
        got=HIDDEN, needed="the value again", next=" ".join([command, *(f"{flag(n)} VALUE" for n in names)]),
    )  # fmt: skip


def defaults(values: dict[str, Any], argv: list[str]) -> dict[str, str]:
    """Return {name: value} of secrets that a recipe's own file sets (from the environment, for example) and `argv` does
    not."""
    flags = {word.partition("=")[0].replace("_", "-") for word in argv}
    return {name: value for name, value in _secrets(values) if flag(name) not in flags}


def given(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return ({name: value} of the secret settings of a command line, its other words)."""
    found, others, rest = {}, [], list(argv)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or not is_secret(name):
            others.append(name + equals + value)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{name} needs a value")
            value = rest.pop(0)
        found[name[2:].replace("-", "_")] = value
    return found, others


def filled(argv: list[str], secrets: dict[str, str], *, where: str, command: str) -> list[str]:
    """Return the words of a command line with hidden values filled in from `secrets`. Raises UserError if one is
    missing."""
    found: list[str] = []
    for i, word in enumerate(argv):
        if not word.endswith(HIDDEN):
            found.append(word)
            continue
        name, equals, _ = (word if word.startswith("--") else argv[i - 1]).partition("=")
        value = secrets.get(name[2:].replace("-", "_"))
        if value is None:
            raise needed([name[2:]], where=where, command=command)
        found.append(f"{name}={value}" if equals else value)
    return found


def _secrets(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield (name, value) of every secret string."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _secrets(value, f"{prefix}{name}.")
        elif is_secret(prefix + name):
            values_ = value if isinstance(value, list) else [value]
            yield from ((prefix + name, v) for v in values_ if isinstance(v, str) and v)
