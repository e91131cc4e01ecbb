"""`--shard` by the real command: what sharded processes train, what stops them, what they save and what is refused."""

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from trainworthy.core.loop import shard as sharding

from tests.helpers import namespaces
from tests.helpers.commands import BIN, assert_refused, execute, holds, run_folder, trainworthy
from tests.vision.planted_classify import LOOP, UPDATE

QUICK = ("--gates.no-enabled", "--run.no-tensorboard", "--run.log-every", "1", "--optim.lr", "3e-4")
"""At its own rate of 3e-3, rounding differences of vision/classify reach percents in 50 steps."""
SHOW = """        if step.index == run.started:
            mine = [getattr(p, "_local_tensor", p).numel() for p in stage.model.parameters()]
            kinds = {type(p).__name__ for p in stage.model.parameters()}
            print(f"rank {run.rank}: {kinds}, {sum(mine)}", flush=True)
"""
STOP = """        if Path("stops").exists() and step.index + 1 == {0: 12, 12: 24}.get(run.started):
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)
"""
"""In a folder with a file `stops`, a run stops after step 12 and, continued, after step 24, as a scheduler stops it."""
SMALL = {
    "vision/classify": ("--ema", "0.9", "--train.batch-size", "30"),
    "llm/pretrain": ("--hidden-size", "32", "--num-hidden-layers", "2", "--data.context", "64", "--data.stride", "32"),
    "diffusion/pixel": (
        "--widths",
        "8",
        "16",
        "--sampling.num-inference-steps",
        "3",
        "--sampling.scales",
        "1",
        "2",
        "--train.batch-size",
        "16",
    ),
}


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "step_metrics.jsonl").read_text().splitlines()]


def assert_equal_to_rounding(folder: Path, other: Path, *, loss: float = 1e-4, norm: float = 2e-2) -> None:
    """Loss, gradient norm and rate of each step, and the last evaluation. With another number of processes sums are taken in another
    order. Over 50 steps of vision/classify that was 2e-5 of the loss and 4e-3 of the norm, with whole copies as with shards."""
    ours, theirs = rows(folder), rows(other)
    assert [r["step"] for r in ours] == [r["step"] for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for key, within in (("step/loss", loss), ("step/grad_norm", norm), ("step/lr", 1e-6)):
            assert a[key] == pytest.approx(b[key], rel=within, abs=1e-6), (a["step"], key)
    assert ours[0]["step/loss"] == pytest.approx(theirs[0]["step/loss"], rel=1e-6)
    one, two = (json.loads((f / "summary.json").read_text())["metrics"] for f in (folder, other))
    assert one.keys() == two.keys()
    some = {k for k in one if "perplexity" in k or k in ("nll", "bits_per_byte", "denoised")}
    assert some
    for key in some:
        assert one[key] == pytest.approx(two[key], rel=1e-2), key


# -------------------------------------------------------------------------------------------------- what it trains
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "shard", "processes"),
    [
        pytest.param("vision/classify", "full", 2, marks=pytest.mark.verify),  # make test: test_gates_in_processes.py
        pytest.param("vision/classify", "grad", 2, marks=pytest.mark.verify),
        pytest.param("vision/classify", "full", 4, marks=pytest.mark.verify),
        pytest.param("llm/pretrain", "full", 2, marks=pytest.mark.verify),
        pytest.param("llm/pretrain", "grad", 4, marks=pytest.mark.verify),
        pytest.param("diffusion/pixel", "full", 2, marks=pytest.mark.verify),
    ],
)
def test_sharded_processes_train_what_one_trains(recipe: str, shard: str, processes: int, fork, tmp_path: Path):
    """Fifty steps with accumulation and clipping, the evaluation, and an export that a process without shards reads. As many
    processes with whole copies do the same arithmetic."""
    update = UPDATE if recipe != "llm/pretrain" else UPDATE.replace("run.update", "means = run.update")
    fork((update, SHOW + update), recipe=recipe)
    how = ("run", "mine.py", *SMALL[recipe], "--max-steps", 50, "--train.accumulate", 2, *QUICK)
    alone = trainworthy(*how, "--run.out", "one", cwd=tmp_path)
    copies = trainworthy(*how, "-n", processes, "--run.out", "copies", cwd=tmp_path)
    done = trainworthy(*how, "-n", processes, "--shard", shard, "--run.out", "cut", cwd=tmp_path)
    assert alone.returncode == copies.returncode == done.returncode == 0, alone.stderr + done.stdout + done.stderr
    one, ddp, cut = (run_folder(tmp_path, f"{name}/*/2*") for name in ("one", "copies", "cut"))
    assert f"shard {shard}" in done.stdout
    shown = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if line.startswith("rank ")]
    kinds, counts = zip(*(line.rsplit(", ", 1) for line in shown), strict=True)
    assert set(kinds) == {"{'DTensor'}"}
    assert len(counts) == processes
    total = json.loads((one / "summary.json").read_text())["parameters"]
    assert sum(map(int, counts)) == total  # no process holds what another one has
    assert max(map(int, counts)) < 1.5 * total / processes
    assert len(rows(cut)) == 50
    assert_equal_to_rounding(cut, one)
    assert_equal_to_rounding(cut, ddp, loss=1e-6, norm=1e-5)
    files = [sorted((f / "export").rglob("*.safetensors"), key=lambda p: p.stat().st_size)[-1] for f in (one, cut)]
    whole, gathered = map(load_file, files)
    assert {k: v.shape for k, v in whole.items()} == {k: v.shape for k, v in gathered.items()}
    far = sum((whole[k].double() - gathered[k].double()).square().sum().item() for k in whole) ** 0.5
    assert far < 0.02 * sum(v.double().square().sum().item() for v in whole.values()) ** 0.5
    assert len(load_file(next(cut.glob("checkpoints/*/best_val_*")) / "model.safetensors")) >= len(whole) - 2


# ------------------------------------------------------------------------------------------------------------ gates
ALONE = (
    UPDATE
    + """        import torch.distributed as dist
        from trainworthy.core.base.dtensor import local

        for p in stage.model.parameters():
            if run.world > 1 and local(p).numel():
                local(p.data).mul_(1 - 1e-2 * local(p.data).norm())
"""
)
"""A loop that shrinks each tensor by its norm: of a whole tensor on each process it does as it says, of a part it does not."""


@pytest.mark.slow
def test_the_gates_of_a_sharded_run_are_quiet_on_a_healthy_recipe(launch):
    done = launch(
        "check",
        "vision/classify",
        "-n",
        "2",
        "--shard",
        "full",
        "--ema",
        "0.9",
        "--only",
        "wiring,sharding,resume",
        code=0,
    )
    assert "on the whole model in each process; the gate `sharding` compares" in done.stdout
    assert [(v["id"], v["verdict"]) for v in done.verdicts()] == [(k, "pass") for k in ("wiring", "resume", "sharding")]
    assert "parameters on 2 processes" in done.verdicts()[-1]["measured"]


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.parametrize("recipe", list(SMALL))
def test_all_gates_of_a_sharded_run_are_quiet_on_a_healthy_recipe(recipe: str, launch):
    done = launch("check", recipe, "-n", "2", "--shard", "full", timeout=900, code=0)
    assert {v["id"]: v["verdict"] for v in done.verdicts()}["sharding"] == "pass"


@pytest.mark.slow
def test_a_loop_that_is_right_for_whole_weights_alone_is_stopped(fork, launch):
    fork((UPDATE, ALONE))
    done = launch("check", "mine.py", "-n", "2", "--shard", "full", "--only", "sharding", code=3)
    (verdict,) = done.verdicts()
    assert "weights differ by" in verdict["measured"]
    holds(done.stdout, "likely causes", "the local shard")


@pytest.mark.slow
@pytest.mark.verify
def test_a_planted_bug_is_stopped_in_a_sharded_run(fork, launch):
    fork((UPDATE, UPDATE.replace("step.batches", "step.batches[:1]")))
    done = launch("check", "mine.py", "-n", "2", "--shard", "full", "--only", "wiring,accumulation,sharding", code=3)
    assert "accumulation" in {v["id"] for v in done.verdicts() if v["verdict"] == "fail"}


# ------------------------------------------------------------------------------------------------------ checkpoints
@pytest.mark.slow
@pytest.mark.parametrize(
    "processes",
    [
        (2, 1, 2),
        pytest.param((2, 2, 2), marks=pytest.mark.verify),
        pytest.param((1, 2, 4), marks=pytest.mark.verify),
        pytest.param((4, 2, 1), marks=pytest.mark.verify),
    ],
)
def test_a_sharded_run_goes_on_with_any_number_of_processes(processes: tuple[int, ...], fork, tmp_path: Path):
    """Stopped by a signal after 12 and after 24 of 36 steps. With the same number of processes: bitwise."""
    fork((LOOP, LOOP + STOP))
    how = ("run", "mine.py", "--ema", "0.9", "--max-steps", 36, "--train.batch-size", 32, "--shard", "full", *QUICK)
    done = trainworthy(*how, "-n", processes[0], "--run.out", "straight", cwd=tmp_path, code=0)
    (tmp_path / "stops").touch()
    done = trainworthy(*how, "-n", processes[0], "--run.out", "stopped", cwd=tmp_path, code=5)
    straight, folder = (run_folder(tmp_path, f"{name}/*/2*") for name in ("straight", "stopped"))
    saved = folder / "checkpoints" / "classify" / "latest"
    if processes[0] > 1:
        named = json.loads((saved / "manifest.json").read_text())["files"]
        assert {".metadata", "info.json", "state.pt", *(f"__{r}_0.distcp" for r in range(processes[0]))} == named.keys()
        parts = [named[f"__{r}_0.distcp"]["bytes"] for r in range(processes[0])]
        assert max(parts) < 1.5 * min(parts)
    for n, code in zip(processes[1:], (5, 0), strict=True):
        done = trainworthy("resume", folder, "-n", n, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        assert "resumed from step-" in done.stdout
    assert_equal_to_rounding(folder, straight)
    ours, theirs = (load_file(f / "export" / "model.safetensors") for f in (folder, straight))
    if len(set(processes)) == 1:
        assert [r["step/loss"] for r in rows(folder)] == [r["step/loss"] for r in rows(straight)]
        assert all(v.equal(theirs[k]) for k, v in ours.items())
    else:
        far = sum((ours[k].double() - theirs[k].double()).square().sum().item() for k in ours) ** 0.5
        assert far < 0.02 * sum(v.double().square().sum().item() for v in theirs.values()) ** 0.5


@pytest.mark.slow
@pytest.mark.verify
def test_a_run_with_whole_copies_goes_on_with_another_number_too(fork, tmp_path: Path):
    """DDP: two processes, one, two."""
    fork((LOOP, LOOP + STOP))
    how = ("run", "mine.py", "--max-steps", 36, "--train.batch-size", 32, *QUICK)
    trainworthy(*how, "--run.out", "straight", cwd=tmp_path, code=0)
    (tmp_path / "stops").touch()
    trainworthy(*how, "-n", 2, "--run.out", "stopped", cwd=tmp_path, code=5)
    straight, folder = (run_folder(tmp_path, f"{name}/*/2*") for name in ("straight", "stopped"))
    trainworthy("resume", folder, "-n", 1, cwd=tmp_path, code=5)
    done = trainworthy("resume", folder, cwd=tmp_path, code=0)
    assert "2 x cpu" in done.stdout
    assert_equal_to_rounding(folder, straight)


@pytest.mark.slow
@pytest.mark.verify
def test_more_processes_than_samples_of_a_batch_are_refused(fork, tmp_path: Path):
    fork((LOOP, LOOP + STOP))
    (tmp_path / "stops").touch()
    done = trainworthy("run", "mine.py", "--max-steps", 36, "--train.batch-size", 2, *QUICK, cwd=tmp_path, code=5)
    done = trainworthy("resume", run_folder(tmp_path), "-n", 3, cwd=tmp_path, code=2)
    holds(done.stderr, "--train.batch-size is smaller than the number of micro-batches", "2 samples for 3 process(es)")


@pytest.mark.slow
@pytest.mark.verify
def test_settings_of_speed_may_change_when_a_run_goes_on_and_no_others(fork, tmp_path: Path):
    """From whole copies with one micro-batch to shards with two, on other loaders."""
    fork((LOOP, LOOP + STOP))
    how = ("run", "mine.py", "--max-steps", 24, "--train.batch-size", 32, "-n", 2, *QUICK)
    trainworthy(*how, "--run.out", "straight", cwd=tmp_path, code=0)
    (tmp_path / "stops").touch()
    trainworthy(*how, "--run.out", "stopped", cwd=tmp_path, code=5)
    (tmp_path / "stops").unlink()
    straight, folder = (run_folder(tmp_path, f"{name}/*/2*") for name in ("straight", "stopped"))
    done = trainworthy("resume", folder, "--optim.lr", "1e-3", "--train.accumulate", 2, cwd=tmp_path, code=2)
    holds(done.stderr, "a continued run cannot change these settings", "--optim.lr")
    assert not (folder / "summary.json").exists()
    more = (
        "--train.accumulate",
        2,
        "--shard",
        "full",
        "--loader.threads",
        2,
        "--run.save-steps",
        2,
        "--run.keep-every",
        5,
    )
    done = trainworthy("resume", folder, *more, cwd=tmp_path, code=0)
    assert "shard full" in done.stdout
    assert_equal_to_rounding(folder, straight)
    saved = sorted(int(p.name.removeprefix("step-")) for p in folder.glob("checkpoints/*/step-*"))
    assert saved == [12, 16, 20, 22, 24]  # the last two, and the first in each five steps


@pytest.mark.slow
@pytest.mark.verify
def test_a_damaged_shard_is_passed_over_by_all_processes(fork, tmp_path: Path):
    """Each process hashes a part of the files; what one finds, all pass over. A rank that is slow changes nothing."""
    slow = "        if run.rank == 1:\n            import time\n\n            time.sleep(0.05)\n"
    fork((LOOP, LOOP + STOP + slow))
    how = (
        "run",
        "mine.py",
        "--max-steps",
        24,
        "--train.batch-size",
        32,
        "--run.save-steps",
        4,
        "-n",
        2,
        "--shard",
        "full",
        *QUICK,
    )
    trainworthy(*how, "--run.out", "straight", cwd=tmp_path, code=0)
    (tmp_path / "stops").touch()
    trainworthy(*how, "--run.out", "stopped", cwd=tmp_path, code=5)
    straight, folder = (run_folder(tmp_path, f"{name}/*/2*") for name in ("straight", "stopped"))
    shard = (folder / "checkpoints" / "classify" / "latest").resolve() / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = trainworthy("resume", folder, cwd=tmp_path, code=0)
    assert f"skipped checkpoint {shard.parent.name}: __1_0.distcp does not match its hash" in done.stdout
    assert "resumed from step-8" in done.stdout
    assert [r["step/loss"] for r in rows(folder)] == [r["step/loss"] for r in rows(straight)]


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.skipif(not namespaces.can(), reason="needs root and mount namespaces")
def test_a_full_disk_ends_all_processes_with_the_cause(fork, tmp_path: Path):
    """A disk of a megabyte and a half, on which the threads of two processes write shards."""
    fork()
    words = ("run", "mine.py", "--max-steps", "60", "--run.save-steps", "5", "--run.keep-checkpoints", "9", "-n", "2", "--shard", "full",
             "--run.out", "/mnt/runs", *QUICK)  # fmt: skip
    script = f"mount -t tmpfs -o size=1500k none /mnt && exec {shlex.join([str(BIN / 'trainworthy'), *words])}"
    done = execute("unshare", "-m", "sh", "-c", script, cwd=tmp_path)
    assert done.returncode not in (0, 124), done.stdout
    holds(done.stderr + done.stdout, "the disk is full", "free some space")
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize("free", [2**10, 2**40])
def test_errors_of_torch_while_shards_are_written_or_read(free: int, tmp_path: Path, monkeypatch):
    """CheckpointException is a BaseException. On a full disk its text may say only that a position is unexpected."""
    (tmp_path / "state.pt").write_bytes(b"")

    def fail(*_, **__):
        raise dcp.api.CheckpointException("both", {0: (RuntimeError("unexpected pos 704 vs 598"), None)})

    monkeypatch.setattr(dcp, "save", fail)
    monkeypatch.setattr(dcp, "load", fail)
    monkeypatch.setattr(torch, "load", lambda *_, **__: {})
    monkeypatch.setattr(dcp.FileSystemReader, "read_metadata", lambda _: SimpleNamespace(state_dict_metadata={}))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    problem, entries = sharding._write(tmp_path, {}, None, 0)
    assert not entries
    assert ("No space left" if free < 2**20 else "unexpected pos") in problem
    empty = SimpleNamespace(model=torch.nn.Linear(1, 1), state={}, optimizers={})
    with pytest.raises(RuntimeError, match=r"cannot read the checkpoint .*unexpected pos"):
        sharding.load(tmp_path, empty)


# ---------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("recipe", "more", "words"),
    [
        ("rl/ppo", (), ("rl/ppo cannot be sharded", "calls its model as often as each process needs it")),
        ("vision/classify", ("--optim.name", "sgd"), ("does not work with --optim.name sgd", "adamw")),
        ("vision/classify", ("--train.precision", "fp16"), ("does not work with --train.precision fp16", "bf16")),
        ("vision/classify", ("--train.compile",), ("does not work with --train.compile", "--train.no-compile")),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_reason(
    recipe: str, more: tuple, words: tuple, launch, tmp_path: Path
):
    assert_refused(launch("run", recipe, "--shard", "full", *more), *words)
    assert not (tmp_path / "runs").exists()


def test_one_process_has_nothing_to_shard_and_says_so(launch):
    done = launch("run", "vision/classify", "--shard", "full", "--max-steps", "3", *QUICK, code=0)
    assert "one process, so nothing to shard" in done.stdout


def test_a_list_of_blocks_may_have_gaps():
    """diffusers puts None where a block has no attention."""
    from torch import nn
    from trainworthy.core.recipe.stage import rows as blocks

    block = nn.Sequential(nn.Linear(2, 2))
    model = nn.ModuleDict({"attentions": nn.ModuleList([None]), "resnets": nn.ModuleList([None, block])})
    assert blocks(model) == [block]
