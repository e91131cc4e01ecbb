"""The code in a run's card, run by someone who has the export alone."""

import sys
from pathlib import Path

from tests.helpers.commands import environment, execute

ALONE = "\nimport sys\nassert not [m for m in sys.modules if m.split('.')[0] in ('trainworthy', 'core', 'recipes')]\n"


def code_of(run: Path) -> str:
    """The code of the section "Use", which card.md and the export's README have alike."""
    found = [
        (run / name).read_text().partition("## Use\n\n```python\n")[2].partition("\n```")[0]
        for name in ("card.md", "export/README.md")
    ]
    assert found[0] == found[1] != ""
    return found[0]


def printed(run: Path, cwd: Path, **arguments: str) -> str:
    """What that code prints in a fresh process without this project's folder on its path. `arguments`: {its example: what takes its place}."""
    code = code_of(run)
    for example, value in ({"export": str(run / "export")} | arguments).items():
        assert f'"{example}"' in code
        code = code.replace(f'"{example}"', repr(value))
    env = environment(PYTHONPATH="", HF_HUB_OFFLINE="1")
    return execute(sys.executable, "-c", code + ALONE, cwd=cwd, code=0, env=env).stdout
