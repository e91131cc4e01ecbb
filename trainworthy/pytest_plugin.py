"""The fixture `trainworthy_check`: the gates on a script of your own, in your own test suite. Loading it imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import Trainer

    from trainworthy.guard.adapters.script import Result, Script


@pytest.fixture
def trainworthy_check(tmp_path: Path) -> Callable[..., "Result"]:
    """`trainworthy_check(factory, only=..., waive={id: why}, seed=0)`: fails the test with the gates that failed, what they
    measured and needed and the likely causes; evidence lies under `tmp_path/trainworthy`. Returns the result."""

    def run(factory: Callable[[], "Script | Trainer"], **options) -> "Result":
        from trainworthy.guard.adapters.script import check

        result = check(factory, **{"folder": tmp_path / "trainworthy", **options, "raises": False})
        if not result.ok:
            evidence = f"\n\nevidence: {result.folder}" if result.folder else ""
            counted = f"{len(result.failed)} of {len(result.verdicts)} gates failed"
            pytest.fail(f"{counted}\n\n{result.table(result.failed)}{evidence}", pytrace=False)
        return result

    return run
