"""Runs that several test files of the core read."""

from pathlib import Path

import pytest

from tests.helpers.commands import QUICK, run_folder, trainworthy


@pytest.fixture(scope="session")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of twenty steps without a stop, gates off. Tests must not change it."""
    cwd = tmp_path_factory.mktemp("quick")
    trainworthy("run", "vision/classify", *QUICK, cwd=cwd, code=0)
    return run_folder(cwd)
