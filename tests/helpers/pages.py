"""`python -m tests.helpers.pages` writes docs/commands.md from what the commands print for --help; a test holds them together."""

import re
from pathlib import Path

from trainworthy.core import cli

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "commands.md"


def commands() -> list[str]:
    """Every command that the help names, in its order."""
    return list(dict.fromkeys(re.findall(r"^  trainworthy ([a-z]+)\b", cli.HELP, re.M)))


def page() -> str:
    """The page: the overview, then each command."""
    parts = ["# Commands", "", "Written from the commands' own help by `python -m tests.helpers.pages`.", "",
             "```", cli.HELP, "```"]  # fmt: skip
    for name in commands():
        parts += ["", f"## {name}", "", "```", cli.page(name).strip(), "```"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(PAGE).write_text(page())
