"""Settings: typed dataclasses, a docstring per field is its help, presets are functions of the recipe."""

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainworthy.core.base import masking
from trainworthy.core.base.errors import UserError


@dataclass
class Train:
    """How long, and how the global batch is cut."""

    epochs: float = 10.0
    """Passes over the training set; fractions are fine."""
    batch_size: int = 64
    """Samples per optimiser step, over ALL processes and micro-batches. The result does not depend on the division."""
    max_steps: int = 0
    """Train at most this many steps in each stage; the schedule fits them. 0: no limit. `--max-steps` is short for it."""
    accumulate: int = 1
    """Micro-batches each process cuts its share of the batch into (less memory, the same gradient)."""
    eval_every: float = 1.0
    """Epochs between two evaluations; the last step is always evaluated."""
    patience: float = 0.0
    """Epochs without a new best evaluation after which the run ends; 0: never. `--run.export best` chooses in retrospect, without
    stopping."""
    eval_batch_size: int = 256
    """Samples per forward when evaluating; no metric may depend on it (a gate checks)."""
    precision: Literal["launcher", "fp32", "bf16", "fp16"] = "launcher"
    """Autocast type of the forward; `launcher` takes what `accelerate launch --mixed_precision` says, else fp32."""
    compile: bool = False
    """torch.compile the loss in the full run; the gates prove it uncompiled (a compilation each would cost minutes)."""


@dataclass
class Optim:
    """Optimiser and schedule; everything is counted in optimiser steps."""

    name: Literal["adamw", "sgd", "adafactor", "muon"] = "adamw"
    """AdamW; SGD with Nesterov momentum; Adafactor (least memory); Muon for the matrices of numbered layers, AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 1e-4
    """Decoupled weight decay; never applied to norms and biases."""
    layer_decay: float = 1.0
    """Each layer below the last learns at this factor of the rate of the one above it (fine-tuning: 0.65-0.9); 1: one rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""
    momentum: float = 0.9
    """SGD's Nesterov momentum."""
    clip: float = 1.0
    """Largest global gradient norm; the norm is logged before clipping. `inf` switches clipping off."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """After the warm-up: cosine to zero, warmup-stable-decay, linear to zero, or constant."""
    warmup: float = 0.06
    """Share of all steps spent in linear warm-up (from scratch 0.05-0.10, fine-tuning 0.02-0.05)."""
    decay: float = 0.2
    """Share of all steps that `wsd` spends decaying to zero."""


@dataclass
class Phase:
    """What one of several stages sets for itself; what is left out (None) is the whole recipe's --train.*, --optim.* or --run.*."""

    epochs: float | None = None
    """--train.epochs of this stage; 0 leaves the stage out."""
    batch_size: int | None = None
    """--train.batch-size of this stage."""
    accumulate: int | None = None
    """--train.accumulate of this stage."""
    eval_every: float | None = None
    """--train.eval-every of this stage."""
    eval_batch_size: int | None = None
    """--train.eval-batch-size of this stage."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """--train.precision of this stage."""
    lr: float | None = None
    """--optim.lr of this stage."""
    weight_decay: float | None = None
    """--optim.weight-decay of this stage."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] | None = None
    """--optim.schedule of this stage."""
    warmup: float | None = None
    """--optim.warmup of this stage."""
    save_every: float | None = None
    """--run.save-every of this stage."""
    hand_on: Literal["final", "best"] = "final"
    """Which of its weights the next stage starts from: those of the last step, or of the best evaluation."""


@dataclass
class Loader:
    """Reading the data; none of these changes what is trained on, only how fast it arrives."""

    workers: int = 0
    """Worker processes; 0 reads in the training process (best for data in memory)."""
    eval_workers: int = 0
    """Worker processes while evaluating; worth it where reading a sample costs more than a forward (pictures in files)."""
    pin_memory: bool = True
    """Page-locked host memory for faster copies; only used with an accelerator."""
    prefetch: int = 4
    """Batches each worker keeps ready."""
    threads: int = 0
    """Threads that read files ahead in the training process, where there are no workers: for samples that wait for a slow disk or a
    network, of data that says how one is read (`Data.read`)."""
    window: int = 64
    """Samples that the threads have in hand, read or being read; memory is bounded by it."""

    def __post_init__(self):
        if self.threads and self.window < self.threads:
            raise UserError("--loader.window holds fewer samples than there are threads to read them", got=self.window,
                            needed=f"{self.threads} or more")  # fmt: skip


@dataclass
class RunSettings:
    """Seeds, files and safety."""

    seed: int = 0
    """Every random draw is a pure function of it."""
    threads: int = 0
    """CPU threads of torch; 0 leaves its default. Results are bitwise repeatable only at one number of threads."""
    out: Path = Path("runs")
    """Folder in which the run folder is made."""
    save_every: float = 1.0
    """Epochs between two full checkpoints; one is always saved at the end."""
    save_steps: int = 0
    """Also save after every so many optimiser steps; 0: by epochs alone."""
    save_minutes: float = 0.0
    """Also save when so many minutes have passed since the last checkpoint; 0: by epochs alone."""
    keep_checkpoints: int = 2
    """Complete checkpoints kept (at least 2: the last good one is never deleted)."""
    keep_best: int = 3
    """Weights-only copies of the best evaluations kept."""
    export: Literal["final", "best"] = "final"
    """Weights that are exported and reported: `final` is not chosen on the validation set, `best` is."""
    max_nonfinite_steps: int = 10
    """Stop with exit 4 after this many non-finite steps in a row."""
    stop_outside_band: bool = False
    """Stop with exit 4 where the metric falls clearly behind the healthy runs of the recipe, or of the one it was forked from."""
    tensorboard: bool = True
    """Write TensorBoard files under tb/."""
    log_every: int = 10
    """Steps whose metrics are read back together (on an accelerator: one sync). A single process with slow steps reads them every
    five seconds."""


@dataclass
class GateSettings:
    """What must be proved before the full run."""

    enabled: bool = True
    """Run the gates; off is for debugging and shows on the card."""
    waive: tuple[str, ...] = ()
    """Ids of gates whose failure is accepted; needs --gates.because."""
    because: str = ""
    """The reason for the waiver; printed in the report and on the card."""
    remember: bool = True
    """Take passes of an identical recipe, data and environment from the ledger instead of proving them again."""


@dataclass
class Config:
    """Settings every recipe has; a recipe's own Config adds its fields."""

    train: Train = field(default_factory=Train)
    optim: Optim = field(default_factory=Optim)
    loader: Loader = field(default_factory=Loader)
    run: RunSettings = field(default_factory=RunSettings)
    gates: GateSettings = field(default_factory=GateSettings)
    init_from: str | None = None
    """Start from these weights (a .safetensors file, a run folder, a folder with model.safetensors): weights only, a fresh
    optimiser and schedule. Without --optim.lr a seventh of the preset's peak rate, without --optim.warmup 0.03."""
    trust_pickle: bool = False
    """Let --init-from open a .pt, .pth or .bin file; a pickle runs code when it is opened."""
    track: str = ""
    """Also log to these, beside our own files: wandb, mlflow, trackio (several with commas)."""


def to_dict(cfg: Config) -> dict[str, Any]:
    """Nested plain values, as written to args.json."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        unwritable = isinstance(value, float) and not math.isfinite(value)  # JSON has no infinity
        return str(value) if unwritable or isinstance(value, Path) else value

    return plain(dataclasses.asdict(cfg))


def from_dict(cls: type, values: dict[str, Any], *, where: str, prefix: str = "") -> Any:
    """A `cls` filled from nested plain values; an unknown name is fatal and gets the nearest one."""
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    filled = {}
    for name, value in values.items():
        if name not in names:
            now = renamed(prefix + name, {prefix + n for n in names})
            if now is None:
                raise unknown(f"setting {prefix + name} in {where}", name, names)
            name = now.removeprefix(prefix)
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, dict):
                raise UserError(
                    f"{prefix}{name} in {where} is a group of settings", got=repr(value), needed="an object"
                )
            filled[name] = from_dict(kind, value, where=where, prefix=f"{prefix}{name}.")
        else:
            filled[name] = _coerce(value, kind, f"{prefix}{name} in {where}")
    return cls(**filled)


def _coerce(value: Any, kind: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if value == masking.HIDDEN:  # asked for again where the settings are complete
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _coerce(value, next(a for a in args if a is not type(None)), where)
    if origin is Literal:
        if value not in args:
            raise UserError(
                f"{where} has a value that is not offered", got=repr(value), needed=" | ".join(map(str, args))
            )
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(value)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:  # "inf" is written as the word
            return float(value)
        except ValueError:
            pass
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise UserError(f"{where} has the wrong type", got=repr(value), needed=getattr(kind, "__name__", str(kind)))


def renamed(old: str, names: typing.Collection[str]) -> str | None:
    """Which of `names` a setting of version 0.1 is now: "envs" -> "num_envs"."""
    tables = json.loads((Path(__file__).resolve().parents[2] / "recipes" / "renamed.json").read_text())
    return next((table[old] for table in tables.values() if table.get(old) in names), None)


def unknown(what: str, name: str, known: typing.Iterable[str], **more: Any) -> UserError:
    """The error for a name nobody knows, with the nearest ones that exist."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    tail = [k for k in known if k.split(".")[-1] == name.split(".")[-1]]
    return UserError(
        f"unknown {what}", needed="one of: " + ", ".join(list(dict.fromkeys(tail + near)) or known), **more
    )


def phases(cfg: Config) -> dict[str, Phase]:
    """{stage: what it sets for itself} of a recipe with several stages."""
    return {f.name: p for f in dataclasses.fields(cfg) if isinstance(p := getattr(cfg, f.name), Phase)}


def of_stage(cfg: Config, name: str, index: int) -> Config:
    """`cfg` as the stage `name` sees it: its own settings in cfg.train, cfg.optim and cfg.run. Weights given by --init-from are the
    first stage's; a later one starts from the one before."""
    if name not in (known := phases(cfg)):
        raise UserError(f"the stage '{name}' has no settings of its own", got=", ".join(known) or "none of type Phase",
                        needed=f"`{name}: Phase` in Config: the function of a stage and its settings have one name")  # fmt: skip
    own = {k: v for k, v in vars(known[name]).items() if v is not None}
    groups = {g: dataclasses.replace(value, **{k: v for k, v in own.items() if k in vars(value)})
              for g, value in (("train", cfg.train), ("optim", cfg.optim), ("run", cfg.run))}  # fmt: skip
    return dataclasses.replace(cfg, **groups, init_from=cfg.init_from if index == 0 else None)


def _idle(cfg: Config, words: list[str], stages: list[str]) -> None:
    """A setting of the whole recipe that every stage sets for itself would do nothing: refused."""
    own = {name.replace("_", "-"): p for name, p in phases(cfg).items() if name in stages}
    for word in (
        w[2:].split("=")[0].replace("_", "-") for w in words if w.startswith(("--train.", "--optim.", "--run."))
    ):
        name = word.split(".")[1].replace("-", "_")
        if own and all(getattr(p, name, None) is not None for p in own.values()):
            raise UserError(f"--{word} does nothing here", got="every stage sets its own",
                            needed=" or ".join(f"--{stage}.{name.replace('_', '-')}" for stage in own))  # fmt: skip


def flags(cls: type, prefix: str = "") -> list[str]:
    """Every `--group.name` that `cls` accepts, without the dashes."""
    hints = typing.get_type_hints(cls)
    found = []
    for f in dataclasses.fields(cls):
        kind, name = hints[f.name], prefix + f.name.replace("_", "-")
        if dataclasses.is_dataclass(kind):
            found += flags(kind, name + ".")
        else:
            found.append(name)
            if kind is bool:
                found.append(prefix + "no-" + f.name.replace("_", "-"))
    return found


def parse(module: types.ModuleType, argv: list[str], *, prog: str) -> tuple[Config, str]:
    """Settings of a recipe module from the command line: (config, preset name)."""
    presets = {name: getattr(module, name) for name in ("tiny", "full") if hasattr(module, name)}
    argv, preset = take(argv, "--preset")
    argv, file = take(argv, "--config")
    if preset and file:
        raise UserError("--preset and --config were both given", needed="one of them", next=f"{prog} --help")
    values = read_settings(Path(file)) if file else {}
    named = values.get("preset")
    preset = preset or (named if isinstance(named, str) and named in presets else "tiny")
    if preset not in presets:
        raise unknown(f"preset '{preset}'", preset, presets)
    default = presets[preset]()
    if file:  # a file may name some settings only: the others are the preset's
        default = from_dict(module.Config, laid_over(to_dict(default), values.get("settings", values)), where=file)
    argv, start = take([w.replace("--init_from", "--init-from", 1) for w in argv], "--init-from")
    if start is not None:
        default.init_from = str(Path(start).absolute())  # a resume may stand in another folder
        if not file:  # fine-tuning: 5 to 10 times less than from scratch; the command line still wins
            default.optim.lr, default.optim.warmup = float(f"{default.optim.lr / 7:.2g}"), 0.03

    known = flags(module.Config)
    if "max-steps" not in known:
        argv = [re.sub(r"^--max[-_]steps(?==|$)", "--train.max-steps", w) for w in argv]
    for word in argv:
        name = word[2:].split("=")[0].replace("_", "-")
        if word.startswith("--") and name != "help" and name not in known:
            now = renamed(name.removeprefix("no-").replace("-", "_"), {k.replace("-", "_") for k in known})
            if now is not None:
                raise UserError(
                    f"--{name} has a new name", needed=f"--{now.replace('_', '-')}", next="docs/migration.md"
                )
            raise unknown(f"setting --{name}", name, known, next=f"{prog} --help")
    import tyro

    presets_help = f"Presets: --preset {' | '.join(presets)} (default tiny). --config FILE reads settings: an args.json, or a file of "
    help_text = f"{(module.__doc__ or '').strip()}\n\n{presets_help}`trainworthy config` (YAML or JSON)."
    cfg = tyro.cli(module.Config, default=default, args=argv, prog=prog, description=help_text)
    _idle(cfg, argv, [make.__name__ for make in module.STAGES])
    return complete(cfg, where=file or "the command line", command=prog), preset


def complete(cfg: Config, *, where: str, command: str, secrets: dict[str, str] | None = None) -> Config:
    """`cfg` with these secrets ({"hub.api_key": value}) in place. UserError: one that was hidden in a file is still missing."""
    for name, value in (secrets or {}).items():
        *groups, last = name.split(".")
        owner = cfg
        for group in groups:
            owner = getattr(owner, group, None)
        if not hasattr(owner, last):
            raise unknown(f"setting {masking.flag(name)}", masking.flag(name)[2:], flags(type(cfg)))
        setattr(owner, last, value)
    settings = to_dict(cfg)
    if names := masking.missing(settings):
        raise masking.needed(names, where=where, command=command)
    masking.keep(settings)
    return cfg


def read_args(path: Path, cls: type) -> Any:
    """Read the settings from an earlier run's args.json, or from a file with settings alone."""
    values = read_settings(path)
    return from_dict(cls, values.get("settings", values), where=str(path))


def read_settings(path: Path) -> dict[str, Any]:
    """What a file of settings holds: YAML by its ending (.yaml, .yml), else JSON."""
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    try:
        text = path.read_text(encoding="utf-8")
        values = read_yaml(text) if is_yaml else json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the settings in {path}", got=error,
                        needed="an args.json of an earlier run, or a file of `trainworthy config RECIPE`") from None  # fmt: skip
    if not isinstance(values, dict) or not isinstance(values.get("settings", {}), dict):
        got = type(values if not isinstance(values, dict) else values["settings"]).__name__
        raise UserError(f"cannot read the settings in {path}", got=got, needed="a JSON object or a YAML mapping")
    return values


def read_yaml(text: str) -> Any:
    """YAML without its constructors. ValueError: it is none."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def laid_over(under: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Nested `values` over the nested plain settings `under`; names that `under` lacks stay, for `from_dict` to refuse."""
    both = dict(under)
    for name, value in values.items():
        below = under.get(name)
        both[name] = laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def check_values(cfg: Config, *, processes: int) -> None:
    """Combinations that cannot work, told before anything is built."""
    t, g = cfg.train, cfg.gates
    if t.batch_size < processes * t.accumulate:
        raise UserError(
            "--train.batch-size is too small to be cut",
            got=f"{t.batch_size} samples for {processes} process(es) x {t.accumulate} micro-batch(es)",
            needed=f"at least {processes * t.accumulate}",
        )
    for name, value in (
        ("train.epochs", t.epochs),
        ("train.batch-size", t.batch_size),
        ("train.accumulate", t.accumulate),
        ("train.eval-every", t.eval_every),
        ("train.eval-batch-size", t.eval_batch_size),
        ("run.save-every", cfg.run.save_every),
        ("optim.lr", cfg.optim.lr),
        ("optim.clip", cfg.optim.clip),
    ):
        if not value > 0:
            raise UserError(f"--{name} must be positive", got=value, needed="> 0")
    if cfg.run.save_steps < 0 or not 0 <= cfg.run.save_minutes < math.inf:
        raise UserError("--run.save-steps and --run.save-minutes must not be negative",
                        got=(cfg.run.save_steps, cfg.run.save_minutes), needed="0 (off) or more")  # fmt: skip
    if t.max_steps < 0:
        raise UserError("--train.max-steps must not be negative", got=t.max_steps, needed="0 (off) or more")
    if t.patience < 0:
        raise UserError("--train.patience must not be negative", got=t.patience, needed="0 (off) or epochs")
    if not 0 < cfg.optim.layer_decay <= 1:
        raise UserError(
            "--optim.layer-decay is a factor from layer to layer", got=cfg.optim.layer_decay, needed="(0, 1]"
        )
    if cfg.run.log_every < 1 or cfg.run.keep_best < 1 or cfg.run.max_nonfinite_steps < 1:
        raise UserError(
            "--run.log-every, --run.keep-best and --run.max-nonfinite-steps must be at least 1",
            got=(cfg.run.log_every, cfg.run.keep_best, cfg.run.max_nonfinite_steps),
        )
    if cfg.run.keep_checkpoints < 2:
        raise UserError(
            "--run.keep-checkpoints is too small",
            got=cfg.run.keep_checkpoints,
            needed=">= 2, so that one good checkpoint always remains",
        )
    if not 0 <= cfg.optim.warmup < 1 or not 0 <= cfg.optim.decay <= 1:
        raise UserError(
            "--optim.warmup and --optim.decay are shares of the run",
            got=(cfg.optim.warmup, cfg.optim.decay),
            needed="[0, 1)",
        )
    if g.waive and not g.because.strip():
        raise UserError(
            "a waived gate needs a reason",
            got=f"--gates.waive {' '.join(g.waive)}",
            needed='--gates.because "..."',
            cause="the reason is printed in the report and on the card",
        )


def take(argv: list[str], flag: str) -> tuple[list[str], str | None]:
    """`argv` without `flag VALUE` or `flag=VALUE`, and the value."""
    for i, word in enumerate(argv):
        if word == flag:
            if i + 1 == len(argv):
                raise UserError(f"{flag} needs a value")
            return argv[:i] + argv[i + 2 :], argv[i + 1]
        if word.startswith(flag + "="):
            return argv[:i] + argv[i + 1 :], word.split("=", 1)[1]
    return argv, None
