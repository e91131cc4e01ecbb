"""Combinations of settings that cannot work."""

import math
from collections.abc import Callable

from trainworthy.core.base.config import Config, of_recipes
from trainworthy.core.base.errors import UserError

RANGES: dict[str, Callable[[float], bool]] = {
    "0 to 1": lambda x: 0 <= x <= 1,
    "0 or more": lambda x: x >= 0,
    "1 or more": lambda x: x >= 1,
    "more than 0": lambda x: x > 0,
}
"""The ranges of settings are in recipes/ranges.json: a name means the same in every recipe that has it."""


def check_ranges(cfg: Config) -> None:
    """Raise for a recipe's own setting outside the range that its name implies: gates would blame what follows from it."""
    for needed, names in of_recipes("ranges").items():
        for name in names:
            value = getattr(cfg, name, None)
            if isinstance(value, int | float) and not RANGES[needed](value):
                raise UserError(f"--{name.replace('_', '-')} is out of range", got=value, needed=needed)


def check_values(cfg: Config, *, processes: int) -> None:
    """Raise for combinations of settings that cannot work, before anything is built."""
    t, o, r, g = cfg.train, cfg.optim, cfg.run, cfg.gates
    check_ranges(cfg)
    positive = {"train.epochs": t.epochs, "train.batch-size": t.batch_size, "train.accumulate": t.accumulate,
                "train.eval-every": t.eval_every, "train.eval-batch-size": t.eval_batch_size, "run.save-every": r.save_every,
                "optim.lr": o.lr, "optim.clip": o.clip}  # fmt: skip
    rules = [
        *((value > 0, f"--{name} must be positive", value, "> 0") for name, value in positive.items()),
        (t.batch_size >= processes * t.accumulate, "--train.batch-size is smaller than the number of micro-batches",
         f"{t.batch_size} samples for {processes} process(es) x {t.accumulate} micro-batch(es)", f"at least {processes * t.accumulate}"),
        *((not math.isinf(positive[k]), f"--{k} must be finite", positive[k], "a number") for k in ("train.epochs", "optim.lr")),
        (r.save_steps >= 0 and 0 <= r.save_minutes < math.inf, "--run.save-steps and --run.save-minutes must not be negative",
         (r.save_steps, r.save_minutes), "0 (off) or more"),
        (t.max_steps >= 0, "--train.max-steps must not be negative", t.max_steps, "0 (off) or more"),
        (t.patience >= 0, "--train.patience must not be negative", t.patience, "0 (off) or epochs"),
        (0 < o.layer_decay <= 1, "--optim.layer-decay is a factor from layer to layer", o.layer_decay, "(0, 1]"),
        (min(r.log_every, r.keep_best, r.max_nonfinite_steps) >= 1,
         "--run.log-every, --run.keep-best and --run.max-nonfinite-steps must be at least 1",
         (r.log_every, r.keep_best, r.max_nonfinite_steps), None),
        (r.keep_checkpoints >= 2, "--run.keep-checkpoints is too small", r.keep_checkpoints,
         ">= 2, so that one good checkpoint always remains"),
        (g.jobs >= 1, "--gates.jobs must be at least 1", g.jobs, None),
        (g.jobs == 1 or processes == 1 or r.shard == "none", "--gates.jobs is for a model that one device holds",
         f"--gates.jobs {g.jobs} and --run.shard {r.shard}", "one of them: gates of a sharded model use all processes together"),
        (0 <= o.min_lr_ratio < 1, "--optim.min-lr-ratio is a share of the peak", o.min_lr_ratio, "[0, 1)"),
        (0 <= o.warmup < 1 and 0 <= o.decay <= 1, "--optim.warmup and --optim.decay are shares of the run", (o.warmup, o.decay), "[0, 1)"),
    ]  # fmt: skip
    for holds, problem, got, needed in rules:
        if not holds:
            raise UserError(problem, got=got, needed=needed)
    if g.waive and not g.because.strip():
        raise UserError("a waived gate needs a reason", got=f"--gates.waive {' '.join(g.waive)}", needed='--gates.because "..."',
                        cause="the reason is printed in the report and on the card")  # fmt: skip
