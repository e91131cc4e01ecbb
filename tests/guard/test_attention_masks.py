"""An attention mask that is 1 where the padding is."""

from types import SimpleNamespace

import torch
from torch import nn
from trainworthy.guard.measures.models.attention_masks import Masks

from tests.guard.guarding import SCRIPTS, guard


class Net(nn.Module):
    def __init__(self, known: bool = True):
        super().__init__()
        self.config = SimpleNamespace(**({"model_type": "bert"} if known else {}))


def found(mask, *, known: bool = True, calls: int = 4) -> bool:
    draw, one = torch.Generator().manual_seed(0), Masks()
    for _ in range(calls):
        ids = torch.randint(1, 100, (8, 12), generator=draw)
        ids[:4, 7:] = 0
        one.call(Net(known), (), {"input_ids": ids, "attention_mask": mask(ids)})
    return one.fault() is not None


def test_only_a_mask_that_hides_the_tokens_is_a_fault():
    assert found(lambda ids: (ids == 0).long())
    assert not found(lambda ids: (ids != 0).long())
    assert not found(lambda ids: torch.ones_like(ids))
    assert not found(lambda ids: torch.zeros_like(ids).float())  # an additive mask
    assert not found(lambda ids: ids == 0, known=False)  # own models may want True for padding
    assert not found(lambda ids: (ids != ids.max()).long())


def test_guard_names_the_inverted_mask(tmp_path):
    source = (SCRIPTS / "ninth" / "hf_modules.py").read_text()
    assert "(ids != PAD).long()" in source
    verdicts, output, _ = guard(
        source.replace("(ids != PAD).long()", "(ids == PAD).long()"), tmp_path, **{"--only": "dependency"}
    )
    assert verdicts["dependency"].blocks, output
    assert "the mask is inverted" in output
