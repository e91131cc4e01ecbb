"""What a trainer of transformers or TRL gets from its model: outputs of all rows, answers as long as the labels, a reference of its own.

Trainers are known by their attributes: this room imports no library of trainers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainworthy.core.base.modes import in_mode
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.trainers.at_work import spread

LIBRARIES = ("transformers", "trl")
ROWS, READ = 8, 64  # of which the outputs are made; whose labels are read
MOST_CUT = 0.5  # of the labels


def evaluated(trainer: Any, most: int) -> tuple[list[Any], Callable]:
    """Return some rows of the evaluation, or of the training if there is none, and what collates them."""
    data = trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset
    collate = trainer.data_collator
    data = next(iter(data.values()), None) if isinstance(data, Mapping) else data
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or not len(data):
        return [], collate
    named = hasattr(data, "column_names")
    rows = trainer._remove_unused_columns(data, "evaluation") if named else data
    return spread(rows, most)[:most], collate if named else trainer._get_collator_with_removed_columns(collate)


def lost_rows(trainer: Any) -> Fault | None:
    """A `compute_loss` of the user's returns bare logits as outputs. The Trainer leaves out the first entry of outputs that are no dictionary
    (the loss of a tuple), and that is the first row of each batch (transformers#34278)."""
    if type(trainer).compute_loss.__module__.split(".")[0] in LIBRARIES:
        return None
    rows, collate = evaluated(trainer, ROWS)
    if len(rows) < 3:
        return None
    with in_mode(trainer.model, training=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        _, logits, labels = trainer.prediction_step(trainer.model, dict(collate(rows)), prediction_loss_only=False)
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or not logits.dim() or not labels.dim():
        return None
    if len(logits) != len(labels) - 1:
        return None
    return (
        f"prediction_step() gives the outputs of {len(logits)} rows for a batch of {len(labels)}",
        "compute_loss(return_outputs=True) returns bare logits, and the Trainer drops the first entry of outputs that are no dictionary: return "
        "(loss, outputs) with the model's own outputs, or {'logits': logits}",
    )


def cut_short(trainer: Any) -> Fault | None:
    """Most labels are longer than the answers that `generate` is allowed to give."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = getattr(trainer.args, "generation_config", None) or getattr(model, "generation_config", None)
    if not getattr(trainer.args, "predict_with_generate", False) or not hasattr(config, "max_length"):
        return None
    given = getattr(trainer, "_gen_kwargs", None) or {}
    new = given.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    # Of `max_length` one token is the decoder's first
    total = given.get("max_length") or getattr(trainer.args, "generation_max_length", None) or config.max_length
    most, name = (new, f"max_new_tokens={new}") if new else ((total or 0) - 1, f"max_length={total}")
    rows, _ = evaluated(trainer, READ)
    if (not total and not new) or not rows or not isinstance(rows[0], Mapping) or "labels" not in rows[0]:
        return None
    pad = getattr(model.config, "pad_token_id", None)
    # The end token need not be generated to be right
    lengths = [sum(t >= 0 and t != pad for t in np.asarray(row["labels"]).tolist()) - 1 for row in rows]
    cut = sum(n > most for n in lengths)
    if cut <= MOST_CUT * len(rows):
        return None
    return (
        f"{cut} of {len(rows)} labels have more tokens (up to {max(lengths)} without the last one) than generation may give ({name})",
        "answers are cut off before their end: raise max_new_tokens or generation_max_length above the length of the labels",
    )


def shared_reference(trainer: Any) -> Fault | None:
    """The reference model holds the tensors that train."""
    reference = getattr(trainer, "ref_model", None)
    if not isinstance(reference, nn.Module) or not isinstance(trainer.model, nn.Module):
        return None
    trained = {p.data_ptr(): name for name, p in trainer.model.named_parameters() if p.requires_grad and p.numel()}
    both = [name for name, p in reference.named_parameters() if p.numel() and p.data_ptr() in trained]
    if not both:
        return None
    return (
        f"{len(both)} tensors of the reference model are those that train ({both[0]}, ...)",
        "the reference moves with the policy: copy the weights (copy.deepcopy, load_state_dict without assign=True) or pass ref_model=None",
    )
