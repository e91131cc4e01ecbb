"""States that a model gets in part, because they have other names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from trainworthy.guard.measures.losses.supervision import class_weights
from trainworthy.guard.measures.models.partial_loads import LIBRARY, fault
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


def loaded(net: nn.Module, state: dict, trained: bool = True):
    own = dict(net.named_parameters())
    return fault(
        net, own, state, net.load_state_dict(state, strict=False), {id(p) for p in own.values()} if trained else ()
    )


@pytest.mark.parametrize(("change", "trained", "found"), [
    ("body.", True, "trained tensors as they were"),  # the same shapes under other names
    ("body.", False, ""),  # weights of an encoder, loaded before the training
    ("", True, ""),
    ("all", True, "none of the parameters"),
])  # fmt: skip
def test_names_of_what_was_saved(change: str, trained: bool, found: str):
    net = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), "head": nn.Linear(8, 2)})
    state = {(name.replace("encoder", "body") if change else name): p.clone() for name, p in net.state_dict().items()}
    state = {f"module.{name}": p for name, p in state.items()} if change == "all" else state
    wrong = loaded(net, state, trained)
    assert (found in wrong[0]) if found else wrong is None


def test_a_part_that_the_state_lacks_is_meant():
    net = nn.ModuleDict({"encoder": nn.Linear(4, 8), "adapter": nn.Linear(8, 8), "head": nn.Linear(8, 2)})
    assert loaded(net, {k: v.clone() for k, v in net.state_dict().items() if "adapter" in k}) is None


@pytest.mark.parametrize(("model", "wrong"), [
    (ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, **SMALL)), True),
    (BertForSequenceClassification(BertConfig(vocab_size=99, **SMALL)), False),
])  # fmt: skip
def test_a_checkpoint_of_transformers_with_older_names(model: PreTrainedModel, wrong: bool, tmp_path: Path):
    """Whichever names the installed version writes: a fault exactly where a load without renaming leaves tensors out."""
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    left = {*dict(model.named_parameters())} - {*state}
    found = loaded(model, state)
    assert (found is not None) == bool(left)
    assert found is None or found[1] == LIBRARY
    assert not left or wrong


@pytest.mark.parametrize(("power", "fault_found"), [(1.0, True), (2.0, True), (-1.0, False), (0.0, False)])
def test_weights_of_each_batch_by_its_own_frequencies(power: float, fault_found: bool):
    rows, draw = [], torch.Generator().manual_seed(0)
    for _ in range(20):
        counts = torch.multinomial(
            torch.tensor([0.7, 0.2, 0.08, 0.02]), 100, replacement=True, generator=draw
        ).bincount(minlength=4)
        weight = torch.where(counts > 0, counts.double().clamp_min(1) ** power, 0.0)
        rows.append({"weight": weight.tolist(), "counts": counts.tolist(), "classes": 4})
    assert (class_weights(rows) is not None) == fault_found
