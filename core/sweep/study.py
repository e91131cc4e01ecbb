"""The study that several processes and machines share: which trials there are, who works on one, and who takes over.

Optuna keeps the trials (a journal file, SQLite, or any storage by URL). A trial's number decides its settings, unless the Bayesian
sampler was asked for. A trial whose worker was killed keeps its number and its settings: the next worker goes on with it.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainworthy.core.base.errors import UserError
from trainworthy.core.base.locks import fcntl, held
from trainworthy.core.sweep.space import Space

DECLARED = "declared"


def optuna() -> Any:
    """Import Optuna without its log messages. UserError: it is not installed."""
    try:
        import optuna as library
    except ModuleNotFoundError:
        raise UserError("a sweep needs the package 'optuna'", next="pip install 'trainworthy[sweep]'") from None
    library.logging.set_verbosity(library.logging.WARNING)
    return library


def storage(where: str) -> Any:
    """Return the storage: a URL unchanged, a path ending in .db as SQLite, any other path as a journal file for several processes."""
    if "://" in where:
        return where
    if where.endswith((".db", ".sqlite", ".sqlite3")):
        return f"sqlite:///{where}"
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    lock = JournalLock(where) if fcntl is not None else None
    return JournalStorage(JournalFileBackend(str(Path(where).absolute()), lock_obj=lock))


class JournalLock:
    """The lock on a journal file, one that ends with its process. Optuna's own are files that a killed process leaves behind: others
    wait 30 seconds, or for ever where the path is relative (seen with Optuna 5.0)."""

    def __init__(self, where: str):
        self.journal = Path(where).absolute()

    def acquire(self) -> bool:
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.journal.with_name(self.journal.name + ".lock"), "a")  # noqa: SIM115
        fcntl.lockf(self.file, fcntl.LOCK_EX)
        with open(self.journal, "r+b") as file:  # a line that a killed process wrote half is no record
            whole = file.read()
            end, record = whole.rfind(b"\n") + 1, b'{"op_code"'
            if len(whole) > end and (whole[end:].startswith(record) or record.startswith(whole[end:])):
                file.truncate(end)
        return True

    def release(self) -> None:
        self.file.close()


def distributions(space: Space) -> dict[str, Any]:
    """Return the space as Optuna's distributions."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, Any] = {name: CategoricalDistribution(values) for name, values in space.scientific}
    for r in space.nuisance:
        if r.values:
            found[r.name] = CategoricalDistribution(r.values)
        elif r.whole:
            found[r.name] = IntDistribution(int(r.low), int(r.high), log=r.log)
        else:
            found[r.name] = FloatDistribution(r.low, r.high, log=r.log)
    return found


def sampler(space: Space, *, trials: int, bayes: bool) -> Any:
    """Quasi-random points by the trial's number. `bayes`: after the first third (at least eight) the tree-structured Parzen
    estimator chooses the nuisance settings; scientific values go on taking turns."""
    library = optuna()
    every = distributions(space)
    tuned = {r.name: every[r.name] for r in space.nuisance}
    first = max(8, trials // 3) if bayes else trials
    estimator = library.samplers.TPESampler(multivariate=True, constant_liar=True) if bayes else None

    class Sampler(library.samplers.BaseSampler):  # type: ignore[name-defined]  # optuna is imported only for a sweep
        known = every

        def infer_relative_search_space(self, study, trial):
            return every

        def sample_relative(self, study, trial, search_space):
            point = space.point(trial.number)
            if trial.number >= first and tuned and estimator:
                point |= estimator.sample_relative(study, trial, tuned)
            return point

        def sample_independent(self, study, trial, name, distribution):
            return space.point(trial.number)[name]

    return Sampler()


def open_study(where: str, name: str, declared: dict[str, Any], space: Space) -> Any:
    """The study, made or joined. UserError: it was made with other settings, or cannot be opened."""
    library = optuna()
    try:
        study = library.create_study(
            storage=storage(where), study_name=name, load_if_exists=True,
            direction="maximize" if declared["higher_is_better"] else "minimize",
            sampler=sampler(space, trials=declared["trials"], bayes=declared["bayes"]),
        )  # fmt: skip
        before = study.user_attrs.get(DECLARED)
    except UserError:
        raise
    except Exception as error:  # of any database's driver
        raise UserError(f"the study in {where} cannot be opened", got=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
                        needed="a file or database that Optuna wrote, or a new name", next="another --storage, or another --name",
                        ) from None  # fmt: skip
    if before is None:
        if study.get_trials(deepcopy=False):
            what = f"the study '{name}' in {where} was not made by `trainworthy sweep`"
            raise UserError(what, needed="another --name")
        study.set_user_attr(DECLARED, declared)
    elif {**before, "trials": 0} != {**json.loads(json.dumps(declared)), "trials": 0}:
        raise UserError(f"the study '{name}' was made with other settings", got="; ".join(differences(before, declared)),
                        needed="the same: trials of one study must be comparable", next="the old settings, or another --name")  # fmt: skip
    elif declared["trials"] > before["trials"]:  # a point depends on its trial's number: the sequence continues
        study.set_user_attr(DECLARED, {**before, "trials": declared["trials"]})
    return study


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs from the declaration with which the study was created."""
    now = json.loads(json.dumps(now))
    names = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k) and k != "trials"]
    return [f"{k}: {now.get(k)} instead of {before.get(k)}" for k in names]


# ---------------------------------------------------------------------------------------------------------------- locks
def wait_until_free(folder: Path, arrived: list[str]) -> None:
    """Wait for a run that continues although its sweep was killed, or until a signal has arrived."""
    while (folder / ".lock").exists() and not arrived:
        with held(folder / ".lock", wait=False) as free:
            if free:
                return
        time.sleep(0.2)


@contextlib.contextmanager
def next_trial(study: Any, home: Path, trials: int) -> Iterator[Any]:
    """A trial for this process, locked while it works on it: one that a killed worker left, else a new one; None if there is none
    left. The lock file of the study makes sure that no two processes take one, and that there are never too many."""
    from optuna.trial import Trial, TrialState

    with contextlib.ExitStack() as stack:
        chosen = None
        with held(home / ".study.lock"):
            every = study.get_trials(deepcopy=False)
            for old in every:
                mine = old.user_attrs.get("host", socket.gethostname()) == socket.gethostname()
                if old.state == TrialState.RUNNING and (mine or folder_of(home, old.number).exists()):
                    attempt = contextlib.ExitStack()
                    if attempt.enter_context(held(folder_of(home, old.number) / ".worker", wait=False)):
                        stack.enter_context(attempt)
                        chosen = Trial(study, old._trial_id)
                        break
                    attempt.close()
            if chosen is None and len(every) < trials:
                chosen = study.ask(study.sampler.known)
                if chosen.number >= trials:  # another machine, which shares no lock with us, was faster
                    study.tell(chosen, state=TrialState.FAIL)
                    chosen = None
                else:
                    stack.enter_context(held(folder_of(home, chosen.number) / ".worker"))
                    chosen.set_user_attr("host", socket.gethostname())
                    chosen.set_user_attr("process", os.getpid())
        yield chosen


def folder_of(home: Path, number: int) -> Path:
    """Return the folder with the runs of a trial, one for each seed."""
    return home / "trials" / f"{number:04d}"
