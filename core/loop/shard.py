"""Shards the full run over its processes with torch's FSDP2 (`fully_shard`): each process holds a part of every
parameter, of its gradient and of its optimiser state.

A model is built whole, then cut before the optimiser has any state. Gradients are reduced as SUMS, like those of one
process: the loss is divided over the global batch before the backward pass. What a checkpoint holds is written with
torch.distributed.checkpoint, so that another number of processes can read it.
"""

import contextlib
import math
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from trainworthy.core.base import config
from trainworthy.core.base.dtensor import is_sharded, like, local
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.loader import cut
from trainworthy.core.loop import checkpoint
from trainworthy.core.loop.weights import frozen_digest, weights
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
        quantised = [n for n, p in stage.model.named_parameters() if not p.is_floating_point()]
        if stage.shard_units is None or quantised:
            raise UserError(f"{recipe} cannot be sharded", got=f"--shard {cfg.run.shard}",
                            needed="parameters in fp32 or 16 bits" if quantised else "a stage whose processes call its model "
                            "equally often",
                            cause=f"quantised weights, e.g. {quantised[0]}" if quantised else f"the loop of '{stage.name}' calls its "
                            "model as often as each process needs it (Stage.shard_units is None), and a sharded model is gathered "
                            "from all processes in every call", next=whole)  # fmt: skip
    for wrong, flag, needed in (
        (cfg.optim.name not in OPTIMIZERS, f"--optim.name {cfg.optim.name}", " or ".join(OPTIMIZERS)),
        (precision == "fp16", "--train.precision fp16", "bf16 or fp32: each process would skip other overflowed steps"),
        (cfg.train.compile, "--train.compile", "--train.no-compile"),
    ):
        if wrong:
            raise UserError(f"--shard {cfg.run.shard} does not work with {flag}", got=flag, needed=needed, next=whole)


def mode(cfg: config.Config, world: int, *, rehearses: bool = False) -> str:
    """Return how a run shards its model. A single process has nothing to shard, and gates rehearse the whole model unless
    their plan sets `shard`."""
    return cfg.run.shard if world > 1 and not rehearses else NONE


# ------------------------------------------------------------------------------------------------------------- sharding
def apply(stage: Stage, run: "Run") -> None:
    """Shard the stage's model and its EMA, and give the optimisers the shards. Units move to the device one by one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    assert stage.shard_units is not None
    frozen_digest(run, stage)  # of whole weights: of their parts it would depend on the number of processes
    names = {id(p): n for n, p in stage.model.named_parameters()}
    for kind, optimizer in stage.optimizers.items():
        foreign = sum(id(p) not in names for g in optimizer.param_groups for p in g["params"])
        if foreign or optimizer.state:
            raise UserError(f"the optimiser '{kind}' cannot be sharded",
                            got=f"{foreign} tensors that are no part of the model" if foreign else "state of earlier steps",
                            needed="a fresh optimiser over parameters of Stage.model")  # fmt: skip
    _assert_equal(stage.model, run)
    mesh = init_device_mesh(run.device.type, (run.world,))
    frozen = [stage.frozen_modules[name] for name in stage.shard_frozen]
    models = [stage.model] if stage.ema_model is None else [stage.model, stage.ema_model]
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for model in [*models, *frozen]:
        # What is not trained has no backward pass that would free what its forward gathered.
        again = run.shard == "full" or model is not stage.model
        units = {id(unit) for unit in (*stage.shard_units(model), model)}
        for module in reversed([*model.modules()]):  # a unit inside another comes first
            if id(module) in units:
                policy = (
                    half if module is not model and gathers_halves(stage, run.precision) else MixedPrecisionPolicy()
                )
                fully_shard(module, mesh=mesh, reshard_after_forward=again, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo lacks the reduction that divides
            if hasattr(module, "generate"):
                owner: Any = module
                owner._is_fsdp_managed_module = True  # transformers: generate until the last process has ended
        if hasattr(model, "generate"):  # a model with adapters calls a part of itself there
            register_fsdp_forward_method(model, "generate")
        model.to(run.device)
        root: Any = model
        root._get_fsdp_state()._lazy_init()  # else a part that a loss calls by itself becomes a second root
    now = dict(stage.model.named_parameters())
    for optimizer in stage.optimizers.values():
        for group in optimizer.param_groups:
            group["params"] = [now[names[id(p)]] for p in group["params"]]


NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
"""Layers of torch that refuse inputs in fp32 with weights in bf16."""


def gathers_halves(stage: Stage, precision: str) -> bool:
    """Return whether units are gathered in bf16, the type to which autocast converts their weights. In fp32, each process would
    keep autocast's bf16 copies of all weights until the backward pass. Weights that autocast leaves in fp32 (of norms) are rounded,
    too. Parameters outside the units stay fp32, and so does the residual stream. Loops that make their own samples are excluded:
    they generate outside of autocast."""
    return (
        precision == "bf16" and "train" in stage.data and not any(isinstance(m, NORMS) for m in stage.model.modules())
    )


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


def under_trainer(trainer: Any, model: nn.Module, world: int) -> None:
    """Let a trainer of transformers take a sharded model as it is. Such trainers undo the average over processes that DDP
    takes, so gradients are averaged here, too."""
    from torch.distributed.fsdp import FSDPModule

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)  # type: ignore[operator]  # FSDP's
        yield
        model.set_requires_gradient_sync(True)  # type: ignore[operator]

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(world)
    model.no_sync = no_sync  # type: ignore[assignment]  # accelerate calls it before all micro-batches but the last
    trainer.accelerator.prepare_model = lambda model, **_: model
    trainer.accelerator.clip_grad_norm_ = lambda parameters, most, **_: clip(
        [p.grad for p in parameters if p.grad is not None], most
    )


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward pass has gathered."""
    for module in model.modules():
        if callable(free := getattr(module, "reshard", None)):
            free()


@torch.no_grad()
def clip(grads: Iterable[Tensor], most: float) -> Tensor:
    """As `optim.clip`, over the gradients' shards on all processes."""
    shards = [shard for shard in map(local, grads) if shard.numel()]
    squares = torch.stack([n.square() for n in torch._foreach_norm(shards)]).sum() if shards else torch.zeros(())
    dist.all_reduce(squares)
    norm = squares.sqrt()
    if shards and most != float("inf"):
        torch._foreach_mul_(shards, (most / (norm + 1e-6)).clamp_max(1.0))
    return norm


def even_cut(n: int, rank: int, world: int, size: int) -> list[int]:
    """Return the sizes of a rank's evaluation batches of its part of `n` samples. Each forward gathers parameters from
    all processes, so all need the same number of batches; none has more than `size` samples."""
    mine = (rank + 1) * n // world - rank * n // world
    count = math.ceil(math.ceil(n / world) / size)
    if n // world < count:
        raise UserError("a sharded model needs more samples for an evaluation", got=f"{n} over {world} processes",
                        needed="a batch for each process: more samples, or --train.eval-batch-size 2 or more")  # fmt: skip
    return cut(mine, count)


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

    def take_out(name: str, leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        found[name] = leaf.detach()
        return PLACEHOLDER + name

    return checkpoint.swap(tree, take_out), found


def save(run: "Run", stage: Stage, state: dict[str, Any], info: dict[str, Any]) -> None:
    """Save a complete state while training goes on. Each process copies its part to the host; its thread writes and hashes it.
    Rank 0's adds the rest and the manifest, then renames the folder."""
    checkpoints, step = run.checkpoints, run.step
    assert checkpoints is not None
    model, aliases = weights(stage.model, without=stage.not_saved, sharded=True)
    rest, shards = split({"model": model, **state})
    run.wait_for_checkpoints()
    run.on_rank_0(lambda: checkpoints.begin(step))
    shards = _staged(shards, run.world)
    rest = checkpoint.snapshot({**rest, "aliases": aliases} if run.rank == 0 else {})
    folder, rank, world = checkpoints.unfinished(step), run.rank, run.world
    group: Any = checkpoints.group or dist.new_group(backend="gloo")  # threads must not use training's
    checkpoints.group = group

    def job() -> None:
        every: list[Any] = [None] * world
        dist.all_gather_object(every, _write(folder, shards, group, rank), group=group)
        first = [next((problem for problem, _ in every if problem), "")]
        if rank == 0 and not first[0]:
            entries = {name: one for _, files in every for name, one in files.items()}
            try:
                checkpoints.complete(step, rest, {**info, "processes": world}, entries)
            except (OSError, RuntimeError) as error:
                first = [str(error)]
        dist.broadcast_object_list(first, src=0, group=group)
        if first[0]:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise RuntimeError(first[0])

    checkpoints.write_later(job)


def _staged(shards: dict[str, Tensor], world: int) -> dict[str, Tensor]:
    """Copy sharded tensors to the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (world,))
    return {
        name: DTensor.from_local(local(t).to("cpu", copy=True), mesh, t.placements, run_check=False,  # type: ignore[attr-defined]
                                 shape=t.shape, stride=t.stride())
        for name, t in shards.items()
    }  # fmt: skip


def _write(folder: Path, shards: dict[str, Tensor], group: Any, rank: int) -> tuple[str, dict[str, dict]]:
    """Write this process's part; return (what went wrong or "", the manifest's entries). torch raises it on every rank, as a
    CheckpointException, which is no Exception."""
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=True)
            dcp.save(shards, storage_writer=writer, process_group=group)
        return "", {p.name: checkpoint.entry(p) for p in folder.glob(f"__{rank}_*.distcp")}
    except (Exception, dcp.api.CheckpointException) as error:
        return "No space left on device" if checkpoint.is_full(error, folder) else _one_line(error), {}


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))[-300:]


def is_in(folder: Path) -> bool:
    """Return whether the checkpoint in `folder` was written by sharded processes."""
    return (folder / METADATA).is_file()


def load(folder: Path, stage: Stage) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (model state dict, state) of a sharded checkpoint, cut as the stage is now: into another number of shards,
    or whole. Every rank calls this and reads what it needs."""
    import torch.distributed.checkpoint as dcp

    rest = torch.load(folder / "state.pt", weights_only=True)
    known: dict[str, Any] = dict(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    alike: dict[str, Tensor] = {}  # name -> a tensor of this stage that is cut in the same way

    def note(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            alike[name] = leaf
        return leaf

    checkpoint.swap(
        {"model": stage.model.state_dict(), "stateful": {k: s.state_dict() for k, s in stage.state.items()}}, note
    )
    targets: dict[str, Tensor] = {}
    for name, meta in known.items():
        own = _parameter(stage, name) if name.startswith("optimizers.") else alike.get(name)
        dtype = meta.properties.dtype
        if own is not None and own.shape == meta.size:
            targets[name] = torch.empty_like(own.detach(), dtype=dtype)
        else:
            targets[name] = torch.empty(meta.size, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is a single process
        try:
            dcp.load(targets, storage_reader=dcp.FileSystemReader(folder))
        except dcp.api.CheckpointException as error:  # no Exception: nothing above would catch it
            raise RuntimeError(f"cannot read the checkpoint {folder}: {_one_line(error)}") from None

    def fill(_: str, leaf: Any) -> Any:
        is_placeholder = isinstance(leaf, str) and leaf.startswith(PLACEHOLDER)
        return targets[leaf.removeprefix(PLACEHOLDER)] if is_placeholder else leaf

    tree = checkpoint.swap(rest, fill)
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

    def of_parameter(i: int, value: Any) -> Any:
        return like(value, params[i]) if isinstance(value, Tensor) and value.shape == params[i].shape else value

    return {**state, "state": {i: {k: of_parameter(i, v) for k, v in of.items()} for i, of in state["state"].items()}}


def stateful_state(state: Any, own: Any) -> Any:
    """Return nested state of whole tensors, cut as the tensors of `own` are."""
    if isinstance(state, dict) and isinstance(own, dict):
        return {k: stateful_state(v, own.get(k)) for k, v in state.items()}
    return like(state, own) if isinstance(state, Tensor) and isinstance(own, Tensor) else state
