"""What gates hold in memory: bytes of live floating-point tensors at every gate, and when the full run is built.

    python bench/gate_memory.py RECIPE [settings of `trainworthy run`] [--json FILE] [--who [GATE,...]] [--only ID,...] [--host] [--stand-in FOLDER]

Runs the real command in this process, on the CPU, until the recipe's `train()` has ended, and counts there. How: a dispatch mode sees
the output of every operation, a weak reference to its storage tells when that is freed; the number of bytes is a sum of storages,
each once, so it is the same on every machine. Python's cyclic collector is off except where the code asks for it (`gc.disable()`):
what waits for the collector counts as alive. Left out: integers (pictures as bytes, tokens: the data set), file-backed storages
(the system may page them out), the snapshot that a checkpoint's writer takes on the host, fake tensors (an export's trace), and
temporary memory inside one kernel. Weights that gates keep on the host count as on an accelerator: not at all, and nothing can
compute with them until they are back. With `--host` they count, as on a CPU.

The unit of all columns is the model's parameters in their own precision. Training with AdamW takes four (weights, gradient, two
moments) and its activations. `training` is the peak of the full run, from its build to the end of the recipe's `train()`, with its
evaluations. `--only` leaves out all gates but these. `--who` lists the lines of code that made what is alive at the peak of the
highest gate (or of each GATE), and when the full run is built. `--stand-in` replaces large models by the smoke tests' tiny ones, which
are written into FOLDER; their weights are random, so a gate that fails counts and stops nothing.
"""

import argparse
import collections
import contextlib
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from trainworthy.core import launch
from trainworthy.core.base.live_bytes import LiveBytes
from trainworthy.core.gates import order, runner
from trainworthy.core.loop import checkpoint
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Stage
from trainworthy.core.session import stages

gate = importlib.import_module("trainworthy.core.gates.gate")  # the package has a function of this name


class Attributed(LiveBytes):
    """Also knows, with `who`, which lines of this project made the storages that are alive."""

    def __init__(self, who: bool):
        super().__init__()
        self.who, self.at_peak = who, collections.Counter()
        self._sites: dict[int, str] = {}
        self._shot = 0

    def count(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor) or not isinstance(tensor.untyped_storage().nbytes(), int):
            return
        before = self.live
        super().count(tensor)
        if not self.who or self.live == before:
            return
        frame, lines = sys._getframe(1), []
        while frame is not None and len(lines) < 5:
            name = frame.f_code.co_filename
            if ("/core/" in name or "/recipes/" in name) and not name.endswith("live_bytes.py"):
                lines.append(f"{'/'.join(Path(name).parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        self._sites[id(tensor.untyped_storage())] = " < ".join(lines)
        if self.live >= max(self.peak, 1.01 * self._shot):
            self._shot, self.at_peak = self.live, self.sites()

    def sites(self) -> collections.Counter:
        """Bytes alive by the lines that made them."""
        found: collections.Counter = collections.Counter()
        for key, (_, size) in self.sizes.items():
            found[self._sites.get(key, "?")] += size
        return found

    def restart(self) -> int:
        self._shot, self.at_peak = 0, collections.Counter()
        return super().restart()


def in_file(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory is a part of a file (safetensors maps the files that it reads; torch does not know)."""
    place, maps = tensor.data_ptr(), Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.is_file() else ():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= place < end:
            return len(line.split()) > 5 and line.split()[5].startswith("/")
    return False


class Ended(BaseException):
    """The recipe's `train()` has ended: all is measured."""


class Parked:
    """Stands for `gate.move` on an accelerator: weights on the host are not counted, and have no entries here."""

    def __init__(self):
        self.contents: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, stage: Stage, device: torch.device) -> None:
        for net in gate.changing_models(stage):
            for tensor in (*net.parameters(), *net.buffers()):
                if hasattr(tensor, gate.SHARED):
                    continue
                if device == gate.HOST and id(tensor) not in self.contents:
                    with torch.utils._python_dispatch._disable_current_modes():
                        self.contents[id(tensor)] = (tensor, tensor.detach().clone())
                        tensor.data = torch.empty(0, dtype=tensor.dtype)
                elif device != gate.HOST and id(tensor) in self.contents:
                    tensor.data = self.contents.pop(id(tensor))[1].clone()


@contextlib.contextmanager
def counted(
    found: dict, *, who: bool = False, only: tuple[str, ...] = (), host: bool = False, random: bool = False
) -> Iterator[LiveBytes]:
    """Fill `found`: {"weights", "gates": {id: (live before, peak)}, "start": live when the full run is built, "training"}, in
    bytes. `random`: the weights are, so gates may fail."""
    memory = Attributed(who)
    found |= {"gates": {}, "who": {}}
    check, make, end, snapshot = runner._check, stages.StageSpec.build, Run.end, checkpoint.snapshot
    every, build = order.of_stage, gate.build

    def judged(one, context) -> Any:
        before = memory.restart()
        verdict = check(one, context)
        found["gates"][f"{context.stage}/{one.id}"] = (before, memory.peak)
        found["who"][f"{context.stage}/{one.id}"] = memory.at_peak
        if random and verdict.verdict == "fail":
            verdict.verdict, verdict.reason = "skip", f"random weights: {verdict.measured}"
        return verdict

    def built(spec: stages.StageSpec, run: Run, previous: Stage | None) -> Stage:
        if run.rehearsal is not None:
            return make(spec, run, previous)
        if "start" not in found:
            found["start"], found["who"]["start"] = memory.restart(), memory.sites()
        stage = make(spec, run, previous)
        found["weights"] = sum(p.numel() * p.element_size() for p in stage.model.parameters())
        return stage

    def rehearsed(run: Run, make: Callable[[Run], Stage]) -> Stage:
        stage = build(run, make)
        for tensor in (stage.pretrained or {}).values():
            if in_file(tensor):
                memory.forget(tensor)
        return stage

    def ended(run: Run, stage: Stage) -> None:
        if memory.peak > found.get("training", 0):
            found["training"], found["who"]["training"] = memory.peak, memory.at_peak
        end(run, stage)
        if run.folder == run.home:
            raise Ended

    def chosen(stage: Stage, **how: Any) -> list:
        return [one for one in every(stage, **how) if not only or one.id in only]

    def uncounted(call: Callable) -> Callable:
        def quiet(tree: Any) -> Any:
            with torch.utils._python_dispatch._disable_current_modes():
                return call(tree)

        return quiet

    with (
        mock.patch.object(runner, "_check", judged),
        mock.patch.object(stages.StageSpec, "build", built),
        mock.patch.object(gate, "build", rehearsed),
        mock.patch.object(Run, "end", ended),
        mock.patch.object(order, "of_stage", chosen),
        mock.patch.object(checkpoint, "snapshot", uncounted(snapshot)),
        mock.patch.multiple(gate, **({} if host else {"HOST": torch.device("meta"), "move": Parked()})),
        memory,
    ):
        gc.collect()
        gc.disable()
        try:
            yield memory
        finally:
            gc.enable()


def measure(argv: list[str], **how: Any) -> dict:
    """`trainworthy run` of these words, counted."""
    found: dict = {}
    with counted(found, **how):
        try:
            code, message, _ = launch.outcome(["run", *argv])
        except Ended:
            code, message = 0, ""
    return found | {"code": code, "message": message}


def stand_in(recipe: str, folder: Path) -> list[str]:
    """The smoke tests' settings for a recipe: tiny models in place of large ones; of several stages, some steps each."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.helpers import settings, smoke

    folder.mkdir(parents=True, exist_ok=True)
    words = list(smoke.STAND_INS.get(recipe, lambda home: ())(folder))
    several = recipe in ("diffusion/latent", "distill/logits", "distill/whisper", "vlm/instruct")
    return [*(settings.SHORT.get(recipe, ()) if several else ("--train.max-steps", "6")), *words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", metavar="ID,...")
    parser.add_argument("--who", nargs="?", const="highest", metavar="GATE,...")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--stand-in", type=Path)
    args, settings = parser.parse_known_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if args.stand_in:
        settings = [*stand_in(args.recipe, args.stand_in.absolute()), *settings]
    found = measure([args.recipe, *settings], who=bool(args.who), only=tuple(filter(None, args.only.split(","))),
                    host=args.host, random=bool(args.stand_in))  # fmt: skip
    who = found.pop("who")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    if found["code"]:
        sys.exit(found["message"])
    unit = found["weights"]
    print(f"\n{args.recipe}: weights {unit / 1e6:.1f} MB; in units of them")
    for name, (before, peak) in found["gates"].items():
        print(f"  {name:<32} alive before {before / unit:6.2f}   peak {peak / unit:6.2f}")
    print(f"  {'alive when the full run is built':<32}              {found['start'] / unit:6.2f}")
    print(f"  {'training, peak':<32}                                {found['training'] / unit:6.2f}")
    if not found["gates"]:
        return
    worst = max(found["gates"], key=lambda name: found["gates"][name][1])
    print(f"  highest of the gates over training: {found['gates'][worst][1] / found['training']:.2f} ({worst})")
    if args.who:
        for name in (*(worst if args.who == "highest" else args.who).split(","), "start", "training"):
            print(f"\n{name}")
            for site, size in who[name].most_common(25):
                print(f"  {size / unit:8.2f}  {site}")


if __name__ == "__main__":
    main()
