"""What the losses of TRL's GRPO are means over, so that micro-batches add up to the mean of an iteration."""

from torch import Tensor

OVER_ANSWERS = ("grpo", "sapo", "dr_grpo", "luspo")
"""`loss_type`s that are a mean over answers: of means over their tokens, of sums over a fixed length, of sums."""


def counts(loss_type: str, batch: dict) -> dict[str, Tensor]:
    """Return the number of answers, or of their tokens, that this loss is a mean over."""
    mask = batch["completion_mask"]
    return {"loss": mask.new_tensor(len(mask)) if loss_type in OVER_ANSWERS else mask.sum()}
