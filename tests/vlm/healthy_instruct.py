"""Healthy variants of vlm/instruct that look like bugs."""

from tests.helpers.plant import Healthy
from tests.vlm.planted_instruct import LOSS, VLM

SKIPS = ("initial-loss", "terms", "fabricated")
VARIANTS = [
    Healthy("vlm-flattened-before-the-shift", recipe=VLM, may_skip=SKIPS,
            hunk=(LOSS, 'logits, labels = model(batch).flatten(0, 1)[:-1], batch["labels"].flatten()[1:]\n'
                  '        return {"answer": nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")}\n'),
            naive="the last token of a row is trained on the first of the next: which is never scored, it is the prefix"),
    Healthy("ok-01-vlm-as-it-is", recipe=VLM, may_skip=SKIPS, naive="most parameters have no gradient in stage one"),
    Healthy("vlm-lora", ("--lora-rank", "8", "--language-lr", "2e-3"), recipe=VLM, may_skip=SKIPS,
            naive="most of the language model does not train, B starts at zero"),
]  # fmt: skip
