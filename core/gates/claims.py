"""Lets several processes share the gates of a stage: each claims the next gate that no other process has, and writes its verdict to a
file. Files work for processes that start at different times, and a claim outlives a process that is killed."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainworthy.core.base.files import write_whole
from trainworthy.core.base.verdict import Verdict

WAIT = 0.05  # seconds between two looks for a verdict


@dataclass
class Claims:
    """The view that one process has of one stage. `folder` is common to all of them."""

    folder: Path
    main: bool
    """Whether this process started the others, and collects their verdicts."""
    goes_on: Callable[[], bool]
    """Of the main process: whether another one works. Of the others: whether the main one does."""
    ranks: int = 1
    """Processes of the training. If there are several, the main process is all of them: they run each gate that they take together, and
    gates with `compares_ranks` are theirs."""
    evidence: Path = Path()
    """This process's folder of the stage, where gates write evidence and plots."""
    sources: Callable[[], dict[str, str]] = dict
    """Returns {file: hash} of what this process's gates have imported, because remembered verdicts depend on it."""
    others_sources: dict[str, str] = field(default_factory=dict)

    def take(self, gate: str, *, of_ranks: bool = False) -> bool:
        """Claim a gate. Returns False if another process has it, or if nobody would read the verdict. `of_ranks`: it compares ranks."""
        if self.ranks > 1 and of_ranks:
            return self.main
        if not self.main and not self.goes_on():
            return False
        try:
            os.close(os.open(self.folder / f"{gate}.claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def put(self, verdict: Verdict) -> None:
        """Store the verdict of a gate that this process has claimed."""
        if not self.main:
            row = {"verdict": asdict(verdict), "sources": self.sources(), "evidence": str(self.evidence.absolute())}
            write_whole(self.folder / f"{verdict.id}.json", json.dumps(row, default=str))

    def get(self, gate: str) -> Verdict | None:
        """Return another process's verdict, if it is there, and copy its evidence to this process's folder."""
        path = self.folder / f"{gate}.json"
        if not path.exists():
            return None
        row = json.loads(path.read_text())
        self.others_sources |= row["sources"]
        for part in (f"gates/{gate}", "plots"):
            if (theirs := Path(row["evidence"]) / part).is_dir():
                shutil.copytree(theirs, self.evidence / part, dirs_exist_ok=True)
        return Verdict(**row["verdict"])

    def wait(self, gate: str) -> Verdict | None:
        """Return another process's verdict; None if all of them have ended without it."""
        while True:
            works = self.goes_on()  # before `get`, which then sees the last verdict of a process that has ended since
            if (verdict := self.get(gate)) or not works:
                return verdict
            time.sleep(WAIT)
