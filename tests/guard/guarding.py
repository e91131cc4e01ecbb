"""Guards many scripts from one process: torch is imported once, every rehearsal is a fork."""

import contextlib
import io
import os
import shutil
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


STEPS = """
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in torch.utils.data.DataLoader([(torch.randn(4), i % 2) for i in range(64)], 8, shuffle=True):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
"""Eight steps of the smallest training, for scripts whose point is elsewhere; torch is imported."""


def guard(source: str, folder: Path, *argv: str, interventions: bool = True, seed: int | None = None, **values: str):
    """(verdicts by id, what was printed, seconds) of a script's text, run from `folder`."""
    from trainworthy.core.base.console import Console
    from trainworthy.guard.commands.guard import FLAGS
    from trainworthy.guard.rehearsals import rehearsal
    from trainworthy.guard.verdicts import Guard

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(source)
    home, began = os.getcwd(), time.monotonic()
    os.chdir(folder)
    work = Path(tempfile.mkdtemp())
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            settings = {**FLAGS, "--seconds": "2", **({} if seed is None else {"--seed": str(seed)}), **values}
            one = Guard(
                rehearsal.locate(["train.py", "--", *argv]), settings, interventions, Console(), work, folder / "out"
            )
            verdicts = one.run()
    finally:
        os.chdir(home)
        shutil.rmtree(work, ignore_errors=True)
    return {v.id: v for v in verdicts}, printed.getvalue(), time.monotonic() - began


def assert_named(source: str, folder: Path, check: str, cause: str) -> None:
    """Guard a script by one check alone: it stops it, and its cause is printed."""
    verdicts, output, _ = guard(source, folder, **{"--only": check})
    assert verdicts[check].blocks, output
    assert cause in output
