"""Further processes for the gates (`--gates.jobs`). Each is a `check` with the same settings, which takes gates that no other process has
(`core.gates.claims`) and ends when there are none."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from trainworthy.core.base.machine import cores
from trainworthy.core.gates.claims import Claims
from trainworthy.core.session.multi_seed import devices
from trainworthy.core.session.on_end import RANKS
from trainworthy.core.session.session import Session

FOLDER = "TRAINWORTHY_GATES"
"""Variable of a helper's environment: the folder of the claims."""
GRACE = 10.0  # seconds that a helper has to end


def is_helper() -> bool:
    return FOLDER in os.environ


@contextlib.contextmanager
def shared(session: Session, words: list[str]) -> Iterator[Claims | None]:
    """Start the helpers and yield the claims of all stages (`of_stage`); yields None if one process runs all gates. In a helper: yield
    those of the process that started it. `words`: what the command has besides the settings (--only, --stage, --deep)."""
    s, count = session, session.cfg.gates.jobs - 1
    if is_helper():
        parent = os.getppid()
        yield Claims(Path(os.environ[FOLDER]), main=False, goes_on=lambda: os.getppid() == parent)
        return
    if count < 1 or not s.cfg.gates.enabled or s.recipe.fallbacks:  # `check` lacks a fallback's weights
        yield None
        return
    threads, each = torch.get_num_threads(), max(1, cores().allowed // (count + 1))
    with tempfile.TemporaryDirectory(prefix="trainworthy-gates-", ignore_cleanup_errors=True) as name:
        helpers = [_start([s.recipe.target, *s.argv[1:], *words], Path(name), i + 1, each) for i in range(count)]
        torch.set_num_threads(min(threads, each))
        try:
            yield Claims(Path(name), main=True, goes_on=lambda: any(h.poll() is None for h in helpers))
        finally:
            torch.set_num_threads(threads)
            for helper in helpers:
                helper.terminate()
            for helper in helpers:
                try:
                    helper.wait(GRACE)
                except subprocess.TimeoutExpired:
                    helper.kill()
                    helper.wait()


def of_stage(claims: Claims | None, name: str, evidence: Path) -> Claims | None:
    """Return the claims of one stage. `evidence`: this process's folder of the stage."""
    if claims is None:
        return None
    (folder := claims.folder / "stages" / name).mkdir(parents=True, exist_ok=True)
    return replace(claims, folder=folder, evidence=evidence, others_sources={})


def _start(argv: list[str], folder: Path, number: int, threads: int) -> subprocess.Popen:
    own = {k: v for k, v in os.environ.items() if k not in RANKS and not k.startswith(("TORCHELASTIC_", "MASTER_"))}
    own.pop("TRAINWORTHY_EXIT", None)
    own |= {
        FOLDER: str(folder),
        "TRAINWORTHY_FOLDER": str(folder / str(number)),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    places = devices(1)
    own |= {"CUDA_VISIBLE_DEVICES": places[number % len(places)]} if places else {}
    with open(folder / f"{number}.log", "w") as log:
        return subprocess.Popen([sys.executable, "-m", "trainworthy.launch", "check", *argv], stdout=log, stderr=subprocess.STDOUT,
                                env=own, start_new_session=True)  # fmt: skip
