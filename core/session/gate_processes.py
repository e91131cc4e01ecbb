"""Further processes for the gates (`--gates.jobs`). Each is a `check` with the same settings, which takes gates that no other process has
(`core.gates.claims`) and ends when there are none. Of several ranks, the first one starts them."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from trainworthy.core.base.config import Config, phases
from trainworthy.core.base.machine import cores
from trainworthy.core.gates.claims import Claims
from trainworthy.core.session.multi_seed import devices
from trainworthy.core.session.on_end import RANKS
from trainworthy.core.session.session import Session

FOLDER, TOGETHER = "TRAINWORTHY_GATES", "TRAINWORTHY_GATES_RANKS"
"""Variables of a helper's environment: the folder of the claims, and the processes of the training."""
OF_RANKS = (*RANKS, "TRAINWORTHY_EXIT", "TRAINWORTHY_PROCESSES")
"""Variables that a helper must not inherit: it is a single process."""
GRACE = 10.0  # seconds that a helper has to end


def is_helper() -> bool:
    return FOLDER in os.environ


@contextlib.contextmanager
def shared(session: Session, words: list[str]) -> Iterator[Claims | None]:
    """Start the helpers and yield the claims of all stages (`of_stage`); yields None if one process runs all gates. In a helper: yield
    those of the process that started it. `words`: what the command has besides the settings (--only, --stage, --deep)."""
    s, count, ranks = session, session.cfg.gates.jobs - 1, session.accelerator.num_processes
    if is_helper():
        parent = os.getppid()
        own, together = Path(os.environ[FOLDER]), int(os.environ[TOGETHER])
        yield Claims(own, main=False, goes_on=lambda: os.getppid() == parent, ranks=together)
        return
    if count < 1 or not s.cfg.gates.enabled or s.recipe.fallbacks:  # `check` lacks a fallback's weights
        yield None
        return
    threads, each = torch.get_num_threads(), max(1, cores().allowed // (count + ranks))
    with tempfile.TemporaryDirectory(prefix="trainworthy-gates-", ignore_cleanup_errors=True) as name:
        argv = [s.recipe.target, *s.argv[1:], *micro_batches(s.cfg, ranks), *words]
        helpers = [_start(argv, Path(name), i + 1, each, ranks) for i in range(count if s.main else 0)]
        torch.set_num_threads(min(threads, each))
        try:
            yield Claims(Path(name), main=True, goes_on=lambda: any(h.poll() is None for h in helpers), ranks=ranks)
        finally:
            torch.set_num_threads(threads)
            for number, helper in enumerate(helpers, 1):
                if helper.poll():
                    lines = (Path(name) / f"{number}.log").read_text(errors="replace").splitlines()
                    why = next((x for x in reversed(lines) if "error" in x.lower()), f"exit code {helper.returncode}")
                    s.console.say(f"       a further process of --gates.jobs ended early: {why}", style="yellow")
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


def micro_batches(cfg: Config, ranks: int) -> list[str]:
    """Return the settings with which one process takes micro-batches of the size that each of several ranks takes."""
    own = {f"{name}.accumulate": phase.accumulate for name, phase in phases(cfg).items()}
    every = {"train.accumulate": cfg.train.accumulate, **own}
    return [w for k, v in every.items() if v and ranks > 1 for w in (f"--{k}", str(v * ranks))]


def _start(argv: list[str], folder: Path, number: int, threads: int, ranks: int) -> subprocess.Popen:
    own = {k: v for k, v in os.environ.items() if k not in OF_RANKS and not k.startswith(("TORCHELASTIC_", "MASTER_"))}
    own |= {
        FOLDER: str(folder),
        TOGETHER: str(ranks),
        "TRAINWORTHY_FOLDER": str(folder / str(number)),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    places = devices(1)
    own |= {"CUDA_VISIBLE_DEVICES": places[number % len(places)]} if places else {}
    with open(folder / f"{number}.log", "w") as log:
        return subprocess.Popen([sys.executable, "-m", "trainworthy.launch", "check", *argv], stdout=log, stderr=subprocess.STDOUT,
                                env=own, start_new_session=True)  # fmt: skip
