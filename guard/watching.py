"""Observes a whole real run: `trainworthy watch train.py` and `with trainworthy.watch():`.

Nothing is redirected, cut or restarted. The first steps are measured in full, later ones two in two hundred. Loss and
rate of every step go to step_metrics.jsonl. `tests/guard/test_guard.py` measures the overhead.
"""

import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.errors import Stop
from trainworthy.core.base.verdict import Verdict
from trainworthy.core.monitoring.metrics import MetricsTracker
from trainworthy.guard.checks import run_checks
from trainworthy.guard.checks.results import verdict
from trainworthy.guard.hooks import events, patches
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.measures.records import Pass
from trainworthy.guard.observing.observer import Observer

FULL, EVERY, PAIR = 24, 200, 2
LATER = 32  # losses are read together: one by one they would wait for the device
COUNTED = -1  # a model call that is counted and not looked at
BAD = 3  # non-finite losses in a row


class Light(Observer):
    """An observer that measures only some steps."""

    def __init__(self, tracker: MetricsTracker | None = None, *, stop: bool = False, say: Any = print):
        super().__init__()
        self.tracker, self.stop, self.say = tracker, stop, say
        self.close = True
        self.pending: list[tuple[int, list[Tensor], float]] = []
        self.parts: list[Tensor] = []
        self.bad = self.reported = 0
        self.verdicts: list[Verdict] = []
        self.epoch: Pass | None = None  # the pass over training data that goes on
        self.epochs_done, self.rate = 0, 0.0
        self.sums = {"train": [0.0, 0], "val": [0.0, 0]}  # sums of losses since the epoch began, and their number
        self.calm: list[Tensor] = []  # losses without gradients, not read yet

    def meet(self) -> None:
        """Take in the optimisers that exist already: a program may build them long before the block."""
        for one in gc.get_objects():
            if issubclass(type(one), torch.optim.Optimizer) and hasattr(one, "param_groups"):
                self.optimizer(one)

    def release(self) -> None:
        """Let go of batches and tensors, so that the memory of a notebook's cell is free after it."""
        for one in self.passes:
            one.recent.clear()
        for kept in (self.snap, self.plain, self.leaves, self.others, self.roots, self.called):
            kept.clear()
        self.points, self.last_root, self._last, self.recent, self.in_use = [], None, [], [], []
        self.epoch, self.calm = None, []

    def schedule(self, it: Any, *, placed: bool = False) -> None:
        self.scheduler(it)  # unless it is known: it may be older than the block
        super().schedule(it, placed=placed)

    def before_root(self, module: nn.Module, args: tuple, kwargs: dict) -> int | None:
        first = 3 if len(self.passes) <= FULL else 0
        known = self.recent[-1].calls > first if self.recent else torch.is_grad_enabled() or len(self.gaps[-1]) > 3
        if not self.close and known:
            return None if next(parameters_of(module), None) is None else COUNTED
        return super().before_root(module, args, kwargs)

    def root(self, module: nn.Module, args: tuple, kwargs: dict, out: Any, token: int | None) -> None:
        if token == COUNTED:
            for one in self.recent:
                one.calls += 1
            return
        super().root(module, args, kwargs, out, token)

    def new_pass(self, loader: Any, source: Any) -> Pass:
        for old in self.passes[2:-4]:  # a long run has many: what no check reads any more is let go
            old.order, old.source = [], None
            old.recent.clear()
        return super().new_pass(loader, source)

    def batch(self, one: Pass, batch: Any) -> Any:
        batch = super().batch(one, batch)
        if not self.close:  # kept batches would raise the script's peak of memory
            one.recent.clear()
        return batch

    def loss(self, name: str, input: Any, target: Any, out: Any, kwargs: dict) -> None:
        if not torch.is_grad_enabled() and isinstance(out, Tensor) and out.numel() == 1 and self.epoch is not None:
            self.calm.append(out.detach())
            if len(self.calm) >= LATER:
                self._read_calm()
        if self.close or len(self.calls) + len(self.eval_calls) < FULL:
            super().loss(name, input, target, out, kwargs)

    def difference(self, a: Tensor, b: Tensor, out: Tensor, name: str = "a difference") -> None:
        if self.close:
            super().difference(a, b, out, name)

    def _score(self, *_: Any) -> None:
        """Compute nothing again in a real run."""

    def before_backward(self, tensors: Any) -> None:
        roots = [t for t in ([tensors] if isinstance(tensors, Tensor) else list(tensors)) if isinstance(t, Tensor)]
        one = self.recent[-1] if self.recent else None
        if one is not None and one is not self.epoch and not one.backwards:
            self.end_epoch()
            self.epoch = one
        self.parts += [t.detach() for t in roots if t.numel() == 1]
        if self.close:
            super().before_backward(tensors)

    def backward(self) -> None:
        if self.close:
            return super().backward()
        self.backwards += 1
        self.since += 1
        for group in self.groups.values():
            group.backwards += 1
        for one in self.recent:
            one.backwards += 1
        return None

    def before_step(self, it: torch.optim.Optimizer, closure: Any) -> None:
        if self.close:
            super().before_step(it, closure)

    def clip(self, parameters: list[Tensor]) -> None:
        if self.close:  # it reads gradients, for which an accelerator would have to wait
            super().clip(parameters)

    def step(self, it: torch.optim.Optimizer) -> None:
        if id(it) not in self.groups:
            self.optimizer(it)
        rate = self.rate = float(it.param_groups[0].get("lr", 0.0))
        self.pending.append((self.steps, self.parts, rate))
        self.parts = []
        if len(self.pending) >= LATER:
            self.flush()
        if self.close:
            super().step(it)
        else:
            group = self.groups[id(it)]
            group.steps += 1
            group.backwards, group.consumed = 0, False
            group.rates.append(rate)
            self.steps += 1
            self.since, self.since_step, self._last = 0, True, []
            if self.gaps[-1]:
                self.gaps.append([])
            for one in self.recent:
                one.steps += 1
        if self.steps == FULL:
            self.evidence.close()
        self.close = self.steps < FULL or self.steps % EVERY < PAIR
        if len(self.gaps) > 400:
            del self.gaps[1:200]

    def flush(self) -> None:
        """Read the losses of the last steps, write their rows, check that they are finite."""
        rows, self.pending = self.pending, []
        for step, parts, rate in rows:
            loss = sum(float(x) for x in parts) if parts else None
            if self.tracker is not None:
                self.tracker.log_step(step + 1, **({} if loss is None else {"loss": loss}), lr=rate)
            if loss is not None and loss - loss == 0:
                self.sums["train"][0] += loss
                self.sums["train"][1] += 1
            self.bad = self.bad + 1 if loss is not None and loss - loss != 0 else 0
            if self.bad == BAD:
                self._alarm(f"the loss of {BAD} steps in a row is not finite, last step {step + 1}")

    def _read_calm(self) -> None:
        values = [x for x in (float(v) for v in self.calm) if x - x == 0]
        self.sums["val"][0] += sum(values)
        self.sums["val"][1] += len(values)
        self.calm = []

    def end_epoch(self) -> None:
        """Write the mean losses of a pass over the training data, and of the evaluation after it."""
        if self.epoch is None:
            return
        self.flush()
        self._read_calm()
        means = {k: {"loss": total / n} if n else {} for k, (total, n) in self.sums.items()}
        self.sums = {"train": [0.0, 0], "val": [0.0, 0]}
        self.epochs_done += 1
        if self.tracker is not None and (means["train"] or means["val"]):
            extra = {"global_step": self.steps, "lr": self.rate}
            self.tracker.log_epoch(epoch=self.epochs_done, train=means["train"], val=means["val"], extra=extra)

    def _alarm(self, text: str) -> None:
        self.reported += 1
        if self.reported <= 3:
            self.say(f"  watch: {text}")
        if self.stop:
            raise Stop(f"stopped by trainworthy watch: {text}")


@contextmanager
def watch(folder: str | Path | None = None, *, stop: bool = False, say: Any = print) -> Iterator[Light]:
    """Observe the training inside the block; at its end the checks run and are printed, and written where a `folder` is given.
    `stop`: raise when the loss stays non-finite. In a rehearsal of `trainworthy guard` the block has no verdicts."""
    out = None if folder is None else Path(folder)
    if patches.rehearsal is not None:
        patches.rehearsal("trainworthy.watch is left out in rehearsals, which observe the whole script")
        yield Light(None, stop=False, say=say)
        return
    if patches.watched_script is not None:
        patches.watched_script("trainworthy.watch() in the script is left out: `trainworthy watch` observes all of it")
        yield Light(None, stop=False, say=say)
        return
    tracker = None if out is None else MetricsTracker(out, use_tensorboard=False)
    seen = Light(tracker, stop=stop, say=say)
    seen.meet()
    events.install(seen, losses=True)
    began, why = time.monotonic(), "the run ended"
    try:
        yield seen
    except SystemExit as leave:
        why = "the run ended" if leave.code in (0, None) else f"the script ended itself: exit {leave.code}"
        raise
    except KeyboardInterrupt:
        why = "it was interrupted"
        raise
    except BaseException as error:
        why = str(error) if isinstance(error, Stop) else f"it raised {type(error).__name__}: {error}"[:300]
        raise
    finally:
        events.remove()
        try:
            seen.flush()
            seen.end_epoch()
        finally:
            if tracker is not None:
                tracker.close()
        seen.verdicts = verdicts(seen, say) if seen.steps or seen.backwards else []
        if not seen.steps:
            say(f"  watch: no optimiser made a step inside the block, {seen.backwards:,} backward() calls were seen")
        seen.release()
        if out is not None:
            from trainworthy.guard.page import write

            write(
                out,
                seen.verdicts,
                seconds=round(time.monotonic() - began, 1),
                script=sys.argv[0],
                command="watch",
                watched={
                    "steps": seen.steps,
                    "backwards": seen.backwards,
                    "evaluations": sum(bool(p.calls) and not p.backwards and p.started > 0 for p in seen.passes),
                    "passes": len(seen.passes),
                    "why": why,
                },
            )


def verdicts(seen: Light, say: Any) -> list[Verdict]:
    """The checks of `guard` that need no second rehearsal, on the run that was; advice, never a block."""
    from trainworthy.guard.rehearsals.control import Plan

    found = run_checks.check(seen, Plan("watch"))["findings"]
    for one in found:
        if not one.get("ok", True):
            say(f"  watch: {one['id']}: {one['measured']}\n         likely cause: {one['cause'].splitlines()[0]}")
    return [verdict(one, "advice") for one in found]


def summary(found: list[Verdict]) -> str:
    """Return how many checks failed, passed and did not apply."""
    counts = Counter(v.verdict for v in found)
    bad = counts["advice"]
    failed = f"{bad} check{'s' if bad > 1 else ''} failed" if bad else "no check failed"
    return f"{failed}, {counts['pass']} passed, {counts['skip']} skipped"
