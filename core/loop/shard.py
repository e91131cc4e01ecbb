"""Shards the full run over its processes with torch's FSDP2 (`fully_shard`): each process holds a part of every
parameter, of its gradient and of its optimiser state.

A model is built whole, then cut before the optimiser has any state. Gradients are reduced as SUMS, like those of one
process: the loss is divided over the global batch before the backward pass. What a checkpoint holds is written with
torch.distributed.checkpoint, so that another number of processes can read it.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainworthy.core.base import config
from trainworthy.core.base.dtensor import is_sharded, like, local
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop import checkpoint
from trainworthy.core.recipe.stage import Stage

if TYPE_CHECKING:
    from trainworthy.core.loop.run import Run

NONE = "none"
METADATA = ".metadata"  # torch.distributed.checkpoint writes this file last
PLACEHOLDER = "in the shards: "  # replaces a sharded tensor in state.pt; its name follows
OPTIMIZERS = ("adamw",)  # torch 2.14 cannot shard fused SGD; Adafactor and Muon need whole matrices


# ------------------------------------------------------------------------------------------------------------ settings
def assert_supported(recipe: str, stages: Sequence[Stage], cfg: config.Config, *, precision: str) -> None:
    """Raise UserError if `--shard` is set and this recipe, or another of its settings, cannot be trained so."""
    if cfg.run.shard == NONE:
        return
    whole = "--shard none, which needs a device that holds the whole model"
    for stage in stages:
        if stage.shard_units is None or len(stages) > 1:
            why = (
                "it has several stages"
                if len(stages) > 1
                else "its stage does not say what to shard (Stage.shard_units)"
            )
            raise UserError(f"{recipe} cannot be sharded", got=f"--shard {cfg.run.shard}",
                            needed="a recipe of one stage with a loop and a plain module of its own: llm/pretrain, vision/classify, "
                            "diffusion/pixel, or a fork of one", cause=why, next=whole)  # fmt: skip
    for wrong, flag, needed in (
        (cfg.optim.name not in OPTIMIZERS, f"--optim.name {cfg.optim.name}", " or ".join(OPTIMIZERS)),
        (precision == "fp16", "--train.precision fp16", "bf16 or fp32: each process would skip other overflowed steps"),
        (cfg.train.compile, "--train.compile", "--train.no-compile"),
    ):
        if wrong:
            raise UserError(f"--shard {cfg.run.shard} does not work with {flag}", got=flag, needed=needed, next=whole)


def mode(cfg: config.Config, world: int, *, rehearses: bool = False) -> str:
    """Return how a run shards its model. A single process has nothing to cut, and gates rehearse the whole model unless
    they ask for the sharded one."""
    return cfg.run.shard if world > 1 and not rehearses else NONE


# ------------------------------------------------------------------------------------------------------------- sharding
def apply(stage: Stage, run: "Run") -> None:
    """Shard the stage's model and its EMA, and give the optimisers the shards. Units move to the device one by one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    assert stage.shard_units is not None
    names = {id(p): n for n, p in stage.model.named_parameters()}
    for kind, optimizer in stage.optimizers.items():
        foreign = sum(id(p) not in names for g in optimizer.param_groups for p in g["params"])
        if foreign or optimizer.state:
            raise UserError(f"the optimiser '{kind}' cannot be sharded",
                            got=f"{foreign} tensors that are no part of the model" if foreign else "state of earlier steps",
                            needed="a fresh optimiser over parameters of Stage.model")  # fmt: skip
    _assert_equal(stage.model, run)
    mesh = init_device_mesh(run.device.type, (run.world,))
    models = [stage.model] if stage.ema_model is None else [stage.model, stage.ema_model]
    for model in models:
        # The EMA has no backward pass that would free what its forward gathered.
        again = run.shard == "full" or model is not stage.model
        units = {id(unit) for unit in (*stage.shard_units(model), model)}
        for module in reversed([*model.modules()]):  # a unit inside another comes first
            if id(module) in units:
                fully_shard(module, mesh=mesh, reshard_after_forward=again)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo lacks the reduction that divides
        model.to(run.device)
    now = dict(stage.model.named_parameters())
    for optimizer in stage.optimizers.values():
        for group in optimizer.param_groups:
            group["params"] = [now[names[id(p)]] for p in group["params"]]


@torch.no_grad()
def _assert_equal(model: nn.Module, run: "Run") -> None:
    """Raise UserError if ranks built different weights: DDP would take rank 0's, shards would mix them."""
    norms = torch.stack([p.double().norm().float() for p in model.parameters()]).to(run.device)
    every = [torch.empty_like(norms) for _ in range(run.world)]
    dist.all_gather(every, norms)
    other = next(
        (r for r, theirs in enumerate(every) if not theirs.allclose(every[0], rtol=1e-5, equal_nan=True)), None
    )
    if other is not None:
        raise UserError("the processes hold different weights, which cannot be sharded", got=f"rank {other} and rank 0 differ",
                        needed="the same initial weights in each process",
                        cause="a random start without the run's seed, or a file that one process alone has",
                        next="build the model from the run's seed alone")  # fmt: skip


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward pass has gathered."""
    for module in model.modules():
        if callable(free := getattr(module, "reshard", None)):
            free()


@torch.no_grad()
def clip(grads: Iterable[Tensor], most: float) -> Tensor:
    """As `optim.clip`, over the gradients' shards on all processes."""
    parts = [part for part in map(local, grads) if part.numel()]
    device = parts[0].device if parts else torch.device("cpu")
    squares = (
        torch.stack([n.square() for n in torch._foreach_norm(parts)]).sum() if parts else torch.zeros((), device=device)
    )
    dist.all_reduce(squares)
    norm = squares.sqrt()
    if parts and most != float("inf"):
        torch._foreach_mul_(parts, (most / (norm + 1e-6)).clamp_max(1.0))
    return norm


def even_cut(n: int, rank: int, world: int, size: int) -> list[int]:
    """Return the sizes of a rank's evaluation batches of its part of `n` samples. Each forward gathers parameters from
    all processes, so all need the same number of batches; none has more than `size` samples."""
    mine = (rank + 1) * n // world - rank * n // world
    count = math.ceil(math.ceil(n / world) / size)
    if n // world < count:
        raise UserError("a sharded model needs more samples for an evaluation", got=f"{n} over {world} processes",
                        needed="a batch for each process: more samples, or --train.eval-batch-size 2 or more")  # fmt: skip
    return [mine // count + (i < mine % count) for i in range(count)]


# ----------------------------------------------------------------------------------------------------------- whole again
class Gathered:
    """Whole tensors of a sharded module on the host, as its state dict. Processes other than rank 0 hold none."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors

    def state_dict(self) -> dict[str, Tensor]:
        """As `nn.Module.state_dict`."""
        return self._tensors


def gathered(module: nn.Module, *, keep: bool) -> Gathered:
    """Gather one tensor after the other, so that a device holds at most one whole. Every rank calls this; those with
    `keep` store the result."""
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}  # tied parameters stay one tensor
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            whole = tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()
            seen[id(tensor)] = whole.to("cpu", copy=True) if keep else torch.empty(0)
        if keep:
            found[name] = seen[id(tensor)]
    return Gathered(found)


def gathered_stage(stage: Stage, built: Stage) -> Stage:
    """Return a stage that was built without sharding, with the gathered weights of a sharded one. Every rank calls it
    and then holds a whole model."""
    pairs = [(stage.model, built.model)]
    if stage.ema_model is not None and built.ema_model is not None:
        pairs.append((stage.ema_model, built.ema_model))
    for sharded, whole in pairs:
        whole.load_state_dict(gathered(sharded, keep=True).state_dict())
    return built


# ----------------------------------------------------------------------------------------------------------- checkpoints
def split(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the nested state with placeholders, {name: sharded tensor})."""
    found: dict[str, Tensor] = {}

    def apart(name: str, leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        found[name] = leaf.detach()
        return PLACEHOLDER + name

    return checkpoint.swap(tree, apart), found


def weights(module: nn.Module, without: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """As `weights.weights`, without a look at memory addresses, which differ between ranks."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in without:
            continue
        if id(tensor) in seen:
            aliases[name] = seen[id(tensor)]
        else:
            seen[id(tensor)] = name
            tensors[name] = tensor.detach()
    return tensors, aliases


def save(
    run: "Run",
    stage: Stage,
    state: dict[str, Any],
    info: dict[str, Any],
    on_rank_0: Callable[[Callable[[], None]], None],
) -> None:
    """Save a complete state. Each process writes and hashes its own part; rank 0 adds the rest and the manifest, then
    renames the folder. Training waits for it. `on_rank_0` runs a job there, and raises its error on every rank."""
    checkpoints, step = run.checkpoints, run.step
    assert checkpoints is not None
    model, aliases = weights(stage.model, stage.not_saved)
    rest, parts = split({"model": model, **state})
    on_rank_0(lambda: checkpoints.begin(step))
    folder = checkpoints.unfinished(step)
    problem = _write(folder, parts)
    mine = {} if problem else {p.name: checkpoint.entry(p) for p in folder.glob(f"__{run.rank}_*.distcp")}
    every: list[Any] = [None] * run.world
    dist.all_gather_object(every, (problem, mine))
    known = {name: one for _, files in every for name, one in files.items()}
    first = next((wrong for wrong, _ in every if wrong), "")

    def finish() -> None:
        checkpoints.complete(step, {**rest, "aliases": aliases}, {**info, "processes": run.world}, known, problem=first)

    on_rank_0(finish)


def _write(folder: Path, parts: dict[str, Tensor]) -> str:
    """Write this process's part; return what went wrong, or an empty string. torch raises it on every rank."""
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(parts, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True))
    except Exception as error:  # torch wraps the errors of all ranks in one
        said = re.sub(r"\s+", " ", str(error))
        return ("No space left on device" if "No space left" in said or "Errno 28" in said else said)[-300:]
    return ""


def is_in(folder: Path) -> bool:
    """Return whether the checkpoint in `folder` was written by sharded processes."""
    return (folder / METADATA).is_file()


def load(folder: Path, stage: Stage) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (model state dict, state) of a sharded checkpoint, cut as the stage is now: into another number of shards,
    or whole. Every rank calls this and reads what it needs."""
    import torch.distributed.checkpoint as dcp

    rest = torch.load(folder / "state.pt", weights_only=True)
    known: dict[str, Any] = dict(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    near: dict[str, Tensor] = {}  # name -> a tensor of this stage that is cut in the same way

    def noted(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            near[name] = leaf
        return leaf

    checkpoint.swap(
        {"model": stage.model.state_dict(), "stateful": {k: s.state_dict() for k, s in stage.state.items()}}, noted
    )
    targets: dict[str, Tensor] = {}
    for name, meta in known.items():
        own = near.get(name)
        if name.startswith("optimizers."):
            own = _parameter(stage, name)
        dtype = meta.properties.dtype
        if own is not None and own.shape == meta.size:
            targets[name] = torch.empty_like(own.detach(), dtype=dtype)
        else:
            targets[name] = torch.empty(meta.size, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single process is told that it is one
        dcp.load(targets, storage_reader=dcp.FileSystemReader(folder))

    def back(_: str, leaf: Any) -> Any:
        return (
            targets[leaf.removeprefix(PLACEHOLDER)] if isinstance(leaf, str) and leaf.startswith(PLACEHOLDER) else leaf
        )

    tree = checkpoint.swap(rest, back)
    model = tree.pop("model")
    return model | {name: model[target] for name, target in tree.pop("aliases").items()}, tree


def _parameter(stage: Stage, name: str) -> Tensor | None:
    """Return the parameter whose state has this name: optimizers.<optimiser>.state.<number>.<kind>."""
    found = re.fullmatch(r"optimizers\.(.+)\.state\.(\d+)\.\w+", name)
    if found is None:
        return None
    return [p for g in stage.optimizers[found[1]].param_groups for p in g["params"]][int(found[2])]


def optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimiser's state dict of whole tensors, cut as its parameters are."""
    params = [p for g in optimizer.param_groups for p in g["params"]]

    def cut(i: int, value: Any) -> Any:
        return like(value, params[i]) if isinstance(value, Tensor) and value.shape == params[i].shape else value

    return {**state, "state": {i: {k: cut(i, v) for k, v in of.items()} for i, of in state["state"].items()}}


def stateful_state(state: Any, own: Any) -> Any:
    """Return nested state of whole tensors, cut as the tensors of `own` are."""
    if isinstance(state, dict) and isinstance(own, dict):
        return {k: stateful_state(v, own.get(k)) for k, v in state.items()}
    return like(state, own) if isinstance(state, Tensor) and isinstance(own, Tensor) else state
