"""Secrets in settings: the values of settings such as `--api-key` are used, and never written or printed.

What is written in their place is HIDDEN. A run that is resumed, or started from such a file, asks for the value again.
"""

import re
from collections.abc import Iterable
from typing import Any

from trainworthy.core.base.errors import UserError

HIDDEN = "[hidden]"
SECRET = re.compile(
    r"\b(hf_|gh[pousr]_|github_pat_|sk-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{12,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
"""What looks like an access token, whatever its name."""
_WORDS = (
    r"(?:secret|password|passwd|passphrase|credentials?|bearer|(?:api|access|private|secret|signing|encryption)[_-]?key"
    r"|(?<!bos[_-])(?<!eos[_-])(?<!pad[_-])(?<!unk[_-])(?<!sep[_-])(?<!cls[_-])(?<!end[_-])(?<!mask[_-])(?<!stop[_-])"
    r"(?<!start[_-])(?<!image[_-])(?<!special[_-])token)"
)
NAME = re.compile(rf"(?:^|[._-]){_WORDS}$", re.I)
"""Names of settings whose values are secrets. A special token of a tokenizer is none."""
_ASSIGNED = re.compile(rf"(\b[\w.-]*?{_WORDS}[\"']?\s*(?::[^=\"'\n]*)?[=:]\s*[\"'])([^\"'\n]+)([\"'])", re.I)
SHORTEST = 6
"""Characters from which on a value is also replaced inside other text; a shorter one would garble words."""

_values: set[str] = set()


def is_secret(name: str) -> bool:
    """Does the name of a setting (`hub.api_key`, `--api-key`) mean a secret?"""
    return bool(NAME.search(name.lstrip("-")))


def keep(settings: dict[str, Any]) -> None:
    """Remember the secrets among real settings, so that `hide` finds them in this process's texts."""
    _values.update(v for _, v in _secrets(settings) if len(v) >= SHORTEST and v != HIDDEN)


def hide(text: str) -> str:
    """`text` without the secrets of this process's settings."""
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def source(text: str) -> str:
    """Source text (a diff) without secrets: those of the settings, what looks like a token, and string literals that are assigned
    to a secret's name."""
    return _ASSIGNED.sub(rf"\g<1>{HIDDEN}\g<3>", SECRET.sub(HIDDEN, hide(text)))


def settings(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested plain settings with secret values replaced. Numbers, switches and empty values stay: they are none."""
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
    """The words of a command line with secret values replaced: `--api-key VALUE`, `--api-key=VALUE`."""
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
    """Names (`hub.api_key`) of the settings whose value is not there because it was hidden."""
    return [name for name, value in _secrets(values) if value == HIDDEN]


def flag(name: str) -> str:
    """The setting `hub.api_key` as it is given on a command line."""
    return "--" + name.replace("_", "-")


def needed(names: list[str], *, where: str, command: str) -> UserError:
    """The error for secrets that have to be given again."""
    return UserError(
        f"{where} does not hold the value of {', '.join(map(flag, names))}: secrets are used and never written",
        got=HIDDEN, needed="the value again", next=" ".join([command, *(f"{flag(n)} VALUE" for n in names)]),
    )  # fmt: skip


def defaults(values: dict[str, Any], argv: list[str]) -> dict[str, str]:
    """{name: value} of the secrets that a recipe's own file sets (from the environment, say) and that `argv` did not."""
    told = {word.partition("=")[0].replace("_", "-") for word in argv}
    return {name: value for name, value in _secrets(values) if flag(name) not in told}


def given(argv: list[str]) -> dict[str, str]:
    """{name: value} of a command line that holds secret settings alone; any other word is refused."""
    found, rest = {}, list(argv)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or not is_secret(name):
            raise UserError("resume takes one run folder, and no settings but secrets that were not kept", got=name,
                            needed="the settings that the run was started with")  # fmt: skip
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{name} needs a value")
            value = rest.pop(0)
        found[name[2:].replace("-", "_")] = value
    return found


def filled(argv: list[str], secrets: dict[str, str], *, where: str, command: str) -> list[str]:
    """The words of a command line whose hidden values are those of `secrets` again. UserError: one is not among them."""
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
    """(name, value) of every secret that is a text."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _secrets(value, f"{prefix}{name}.")
        elif is_secret(prefix + name):
            yield from (
                (prefix + name, v) for v in (value if isinstance(value, list) else [value]) if isinstance(v, str) and v
            )
