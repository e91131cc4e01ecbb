"""Fine-tuning starts from the weights it was given, and from nothing else: files, folders, names, rates, resume."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop import init_from
from trainworthy.recipes.vision import classify

from tests.helpers.commands import QUICK, assert_refused, read
from tests.vision.planted_classify import LOOP


def net() -> nn.Module:
    """Two layers whose weights are tied, and one that is not."""
    made = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    made[1].weight = made[0].weight
    return made


# ---------------------------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "model.encoder."])
def test_a_prefix_is_taken_off_or_put_before(prefix: str):
    tensors = net().state_dict()
    off = init_from.match(net(), {prefix + k: v for k, v in tensors.items()})
    assert (sorted(off.pairs), off.missing, off.unexpected) == (["0.weight", "2.bias", "2.weight"], [], [])
    assert prefix in off.prefix
    inner = nn.ModuleDict({"encoder": net(), "head": nn.Linear(2, 3)})
    before = init_from.match(inner, tensors)
    assert "encoder." in before.prefix
    assert sorted(before.missing) == ["head.bias", "head.weight"]


def test_a_name_that_fits_is_never_renamed():
    tensors = net().state_dict() | {"module." + k: v + 1 for k, v in net().state_dict().items()}
    found = init_from.match(net(), tensors)
    assert (found.prefix, len(found.unexpected)) == ("", 4)
    assert torch.equal(found.pairs["2.bias"], tensors["2.bias"])


def test_tied_weights_count_once_and_other_shapes_are_named():
    tensors = {k: v for k, v in net().state_dict().items() if k != "0.weight"} | {"2.bias": torch.zeros(7)}
    found = init_from.match(net(), tensors)  # the file keeps the tied weight under its other name
    assert sorted(found.pairs) == ["0.weight", "2.weight"]
    assert found.mismatched == ["2.bias (2,), there (7,)"]
    assert found.missing == []


# ---------------------------------------------------------------------------------------------------------------- files
def test_shards_are_read_together(tmp_path: Path):
    tensors = {"a.weight": torch.ones(3), "b.weight": torch.zeros(2)}
    for i, (name, tensor) in enumerate(tensors.items(), 1):
        save_file({name: tensor}, tmp_path / f"model-{i}-of-2.safetensors")
    where = {"weight_map": {name: f"model-{i}-of-2.safetensors" for i, name in enumerate(tensors, 1)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(where))
    assert init_from.read_weights(tmp_path, trust_pickle=False).tensors.keys() == tensors.keys()
    (tmp_path / "model-2-of-2.safetensors").unlink()
    init_from.read_weights.cache_clear()
    with pytest.raises(UserError, match="cannot be read"):
        init_from.read_weights(tmp_path, trust_pickle=False)


def test_a_trusted_pickle_gives_the_model_not_the_optimiser(tmp_path: Path):
    torch.save({"epoch": 3, "model": net().state_dict(), "optimizer": {"state": {0: torch.ones(1)}}}, tmp_path / "a.pt")
    torch.save(net(), tmp_path / "b.pt")
    for name in ("a.pt", "b.pt"):
        found = init_from.read_weights(tmp_path / name, trust_pickle=True)
        assert found.tensors.keys() == net().state_dict().keys()


def test_bad_files_are_told_apart(quick_run: Path, tmp_path: Path, launch):
    whole = (quick_run / "export" / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    torch.save(load_file(quick_run / "export" / "model.safetensors"), tmp_path / "model.pt")
    wide = {
        k: torch.zeros([2 * n for n in v.shape])
        for k, v in load_file(quick_run / "export" / "model.safetensors").items()
    }
    save_file(wide, tmp_path / "wide.safetensors")
    both = "blocks.0.conv1.weight (32, 32, 6, 6)  blocks.0.conv1.weight (16, 16, 3, 3)"
    said = {
        "cut.safetensors": "cut off",
        "model.pt": "--trust-pickle",
        "wide.safetensors": both,
        "nowhere": "no such file",
    }
    for name, words in said.items():
        assert_refused(launch("run", "vision/classify", "--init-from", name), words)
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------------------------------- settings
def test_the_rate_is_smaller_unless_it_was_given(tmp_path: Path):
    def parse(*argv: str) -> config.Optim:
        return config.parse(classify, list(argv), prog="test")[0].optim

    scratch, tuned = parse(), parse("--init-from", "x")
    assert 5 <= scratch.lr / tuned.lr <= 10
    assert tuned.warmup == 0.03
    assert parse("--init_from=x").lr == tuned.lr
    given = parse("--init-from", "x", "--optim.lr", "0.002", "--optim.warmup", "0.2")
    assert (given.lr, given.warmup) == (0.002, 0.2)
    (tmp_path / "args.json").write_text(json.dumps({"settings": config.to_dict(classify.Config(optim=scratch))}))
    assert parse("--config", str(tmp_path / "args.json"), "--init-from", "x") == scratch


# -------------------------------------------------------------------------------------------------------- the real thing
def test_fine_tuning_from_a_run_folder(quick_run: Path, tmp_path: Path, launch):
    done = launch("run", "vision/classify", *QUICK, "--init-from", str(quick_run), "--optim.lr", "1e-9", code=0)
    assert "100.0% of the parameters loaded" in done.stdout
    args = read(done.folder() / "args.json")
    assert (args["start"]["share"], args["settings"]["optim"]["warmup"]) == (1.0, 0.03)
    old, new = (load_file(f / "export" / "model.safetensors") for f in (quick_run, done.folder()))
    assert all(torch.allclose(old[k], new[k], atol=1e-6) for k in old)
    card = (done.folder() / "card.md").read_text()
    assert "100.0%" in card
    assert args["start"]["sha256"][:12] in card


def test_the_gate_sees_what_train_does_to_the_weights_and_resume_goes_on(quick_run: Path, tmp_path: Path, launch, fork):
    save_file(
        {"module." + k: v for k, v in load_file(quick_run / "export" / "model.safetensors").items()},
        tmp_path / "m.safetensors",
    )
    argv = ("--init-from", "m.safetensors", "--only")
    fine = launch("check", "vision/classify", *argv, "init,resume", code=0)
    assert "prefix 'module.' taken off" in fine.stdout
    fork((LOOP, "    stage.model.stem.reset_parameters()\n" + LOOP))
    lost = launch("check", "mine.py", *argv, "init", code=3)
    assert "stem.weight" in lost.verdicts()[0]["measured"]
    assert "initialised again" in lost.verdicts()[0]["remedy"]
    body = "    for m in stage.model.blocks[0].modules():\n        getattr(m, 'reset_parameters', list)()\n"
    fork((LOOP, body + LOOP))
    part = launch("check", "mine.py", *argv, "init", code=3)
    assert part.verdicts()[0]["remedy"].startswith("nothing of 'blocks.0' was loaded: its names differ"), part.shown
