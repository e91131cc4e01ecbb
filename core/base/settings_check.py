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
    t, g = cfg.train, cfg.gates
    check_ranges(cfg)
    if t.batch_size < processes * t.accumulate:
        raise UserError(
            "--train.batch-size is too small to be cut",
            got=f"{t.batch_size} samples for {processes} process(es) x {t.accumulate} micro-batch(es)",
            needed=f"at least {processes * t.accumulate}",
        )
    for name, value in (
        ("train.epochs", t.epochs),
        ("train.batch-size", t.batch_size),
        ("train.accumulate", t.accumulate),
        ("train.eval-every", t.eval_every),
        ("train.eval-batch-size", t.eval_batch_size),
        ("run.save-every", cfg.run.save_every),
        ("optim.lr", cfg.optim.lr),
        ("optim.clip", cfg.optim.clip),
    ):
        if not value > 0:
            raise UserError(f"--{name} must be positive", got=value, needed="> 0")
        if math.isinf(value) and name in ("train.epochs", "optim.lr"):
            raise UserError(f"--{name} must be finite", got=value, needed="a number")
    if cfg.run.save_steps < 0 or not 0 <= cfg.run.save_minutes < math.inf:
        raise UserError("--run.save-steps and --run.save-minutes must not be negative",
                        got=(cfg.run.save_steps, cfg.run.save_minutes), needed="0 (off) or more")  # fmt: skip
    if t.max_steps < 0:
        raise UserError("--train.max-steps must not be negative", got=t.max_steps, needed="0 (off) or more")
    if t.patience < 0:
        raise UserError("--train.patience must not be negative", got=t.patience, needed="0 (off) or epochs")
    if not 0 < cfg.optim.layer_decay <= 1:
        raise UserError(
            "--optim.layer-decay is a factor from layer to layer", got=cfg.optim.layer_decay, needed="(0, 1]"
        )
    if cfg.run.log_every < 1 or cfg.run.keep_best < 1 or cfg.run.max_nonfinite_steps < 1:
        raise UserError(
            "--run.log-every, --run.keep-best and --run.max-nonfinite-steps must be at least 1",
            got=(cfg.run.log_every, cfg.run.keep_best, cfg.run.max_nonfinite_steps),
        )
    if cfg.run.keep_checkpoints < 2:
        raise UserError(
            "--run.keep-checkpoints is too small",
            got=cfg.run.keep_checkpoints,
            needed=">= 2, so that one good checkpoint always remains",
        )
    if not 0 <= cfg.optim.warmup < 1 or not 0 <= cfg.optim.decay <= 1:
        raise UserError(
            "--optim.warmup and --optim.decay are shares of the run",
            got=(cfg.optim.warmup, cfg.optim.decay),
            needed="[0, 1)",
        )
    if g.waive and not g.because.strip():
        raise UserError(
            "a waived gate needs a reason",
            got=f"--gates.waive {' '.join(g.waive)}",
            needed='--gates.because "..."',
            cause="the reason is printed in the report and on the card",
        )
