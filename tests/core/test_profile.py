"""The verdict of a profile: right on planted bottlenecks, and through the real command."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainworthy.core.commands import profile

from tests.helpers.commands import trainworthy

TINY = ("--train.batch-size", "16", "--gates.no-enabled", "--run.no-tensorboard", "--steps", "4")


def profiled(step: Callable[[], None], waited: float = 0.0) -> dict:
    """The verdict on a planted step."""
    watch = profile.Watch(3, torch.device("cpu"), None)
    for n in range(1, profile.WARM + 7):
        step()
        watch.waited += waited
        if watch(None, n):
            break
    return profile.judge(watch.measured())


def test_planted_bottlenecks_get_their_names():
    """Sizes are such that the right share is far ahead on any processor."""
    square, flat, few = torch.randn(768, 768), torch.randn(4_000_000), torch.randn(4)

    def tiny() -> None:
        x = few
        for _ in range(2000):
            x = x + 1

    def traffic() -> None:
        for _ in range(4):
            flat.add(1.0)

    assert profiled(lambda: [square @ square for _ in range(4)])["verdict"] == "compute-bound"
    assert profiled(tiny)["verdict"] == "overhead-bound"
    assert profiled(traffic)["verdict"] == "memory-bound"
    assert profiled(lambda: time.sleep(0.02), waited=0.02)["verdict"] == "input-bound"


def test_a_slow_loader_is_said_with_the_setting_to_try(fork, tmp_path: Path):
    path = fork(("        image = self.images[index].float() / 255\n",
                 "        import time\n        time.sleep(0.005)\n        image = self.images[index].float() / 255\n"))  # fmt: skip
    done = trainworthy("profile", path, *TINY, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)
    assert found["verdict"] == "input-bound", found
    assert found["waited"] > 16 * 0.005
    assert "--loader.workers" in found["try"]
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    (trace,) = tmp_path.glob("runs/*/checks/*/trace.json.gz")
    assert trace.stat().st_size > 1000
    assert (trace.parent / "profile.json").is_file()
    assert found["operations"][0]["seconds"] >= found["operations"][1]["seconds"]
    again = trainworthy("profile", trace.parent, "--steps", 2, cwd=tmp_path)  # a run folder: its recipe, its settings
    assert again.returncode == 0, again.stdout + again.stderr
    assert "input-bound: " in again.stdout
    assert "try first" in again.stdout


@pytest.mark.parametrize("text", [None, "", '{"recipe": 3}', '{"recipe": "vision/cl'])
def test_a_foreign_or_partial_folder_is_one_message(text: str | None, tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    if text is not None:
        (tmp_path / "theirs" / "args.json").write_text(text)
    done = trainworthy("profile", "theirs", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "is not a run folder of trainworthy" in done.stderr
