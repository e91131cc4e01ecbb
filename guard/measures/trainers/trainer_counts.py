"""Whether a trainer of transformers divides its micro-batches by anything, and how many rows TRL left out.

Trainers are known by their attributes: this room imports no library of trainers.
"""

from typing import Any

import torch
from trainworthy.core.base.modes import in_mode

MOST_DROPPED = 0.1  # of the rows; the few longest prompts of a data set may be dropped on purpose


def dropped(trainer: Any) -> tuple[str, str] | None:
    """TRL drops rows whose answer is cut off, with no more than a progress bar."""
    for what, before, after in getattr(trainer, "dropped_rows", ()):
        if before - after > MOST_DROPPED * before:
            return (f"{before - after:,} of {before:,} rows are left out ({what[0].lower()}{what[1:]})",
                    f"max_length={getattr(trainer.args, 'max_length', None)} is too short for these prompts with their answers")  # fmt: skip
    return None


def undivided(trainer: Any) -> tuple[str, str] | None:
    """The micro-batches of a step are added, although each loss is a mean: the trainer leaves the division to a model that takes keyword
    arguments, and the loss is the same for any `num_items_in_batch` (most heads of transformers 5.23: huggingface/transformers#47688)."""
    parts = trainer.args.gradient_accumulation_steps
    if parts == 1 or getattr(trainer, "loss_is_scaled_for_ga", None) is not None:
        return None  # TRL's trainers declare who divides
    rows = trainer.train_dataset
    rows = trainer._remove_unused_columns(rows, "training") if hasattr(rows, "column_names") else rows
    batch = trainer._prepare_inputs(trainer.data_collator([rows[i] for i in range(min(2, len(rows)))]))
    items = trainer._get_num_items_in_batch([batch], trainer.args.device)
    if items is None:
        return None
    with in_mode(trainer.model, training=False), torch.no_grad():
        one, twice = (
            trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=items * k).item() for k in (1, 2)
        )
    if one != twice:
        return None
    own = trainer.compute_loss_func is not None
    fix = "set `model.accepts_loss_kwargs = False` before the Trainer is built"
    if own:
        fix = "divide a sum by num_items_in_batch in compute_loss_func"
    return (
        f"{parts} micro-batches are added undivided: the loss is {one:.4g} for {int(items)} items and for {2 * int(items)}",
        f"the loss is a mean that ignores num_items_in_batch, and the Trainer divides by nothing else: {fix}",
    )
