"""Settings from the command line and from files; presets are functions of the recipe."""

import contextlib
import dataclasses
import difflib
import io
import json
import math
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal

from trainworthy.core.base import as_json, masking
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.settings import Config, GateSettings, Loader, Optim, Phase, RunSettings, Train
from trainworthy.core.base.settings_file import check_recipe, laid_over, read_settings

__all__ = ["Config", "GateSettings", "Loader", "Optim", "Phase", "RunSettings", "Train"]

PRESETS = ("tiny", "small", "full")  # functions of a recipe; most have no `small`
ELSEWHERE = {
    "batch-size": "train.batch-size", "bf16": "train.precision bf16", "dataloader-num-workers": "loader.workers", "fp16": "train.precision fp16",
    "gradient-accumulation-steps": "train.accumulate", "gradient-clip-val": "optim.clip", "learning-rate": "optim.lr", "log-dir": "run.out",
    "logging-steps": "run.log-every", "lr-scheduler-type": "optim.schedule", "max-epochs": "train.epochs", "max-grad-norm": "optim.clip",
    "num-epochs": "train.epochs", "num-train-epochs": "train.epochs", "num-workers": "loader.workers", "optim": "optim.name",
    "output-dir": "run.out", "per-device-eval-batch-size": "train.eval-batch-size",
    "per-device-train-batch-size": "train.batch-size (samples of an optimiser step, over all processes and micro-batches)",
    "report-to": "track", "save-total-limit": "run.keep-checkpoints", "torch-compile": "train.compile", "warmup-ratio": "optim.warmup",
}  # fmt: skip
"""Names of settings in transformers, TRL, Lightning and torchvision's references -> ours."""
MAY_CHANGE = re.compile(
    r"loader\.\w+|run\.(shard|threads|log_every|tensorboard|check_memory|save_\w+|keep_\w+)"
    r"|\w+\.(accumulate|eval_batch_size|save_every|gradient_checkpointing)"
)
"""Names of settings that `resume` may change."""


def to_dict(cfg: Config) -> dict[str, Any]:
    """Return the settings as nested plain values, as args.json holds them."""
    return as_json.finite(dataclasses.asdict(cfg))


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested plain settings by their names on the command line: {"optim.lr": 0.003, ...}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def from_dict(cls: type, values: dict[str, Any], *, where: str, prefix: str = "") -> Any:
    """Build a `cls` from nested plain values. An unknown name raises an error that suggests the nearest known one."""
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
                what = f"{prefix}{name} in {where} is a group of settings"
                raise UserError(what, got=repr(value), needed="an object")
            filled[name] = from_dict(hints[name], value, where=where, prefix=f"{prefix}{name}.")
        else:
            filled[name] = _coerce(value, kind, f"{prefix}{name} in {where}")
    return cls(**filled)


def _coerce(value: Any, kind: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if value == masking.HIDDEN:  # `complete` asks for the secret again
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _coerce(value, next(a for a in args if a is not type(None)), where)
    if origin is Literal:
        if value not in args:
            needed = " | ".join(map(str, args))
            raise UserError(f"{where} has a value that is not offered", got=repr(value), needed=needed)
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(value)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:  # to_dict writes infinity as "inf"
            return float(value)
        except ValueError:
            pass
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise UserError(f"{where} has the wrong type", got=repr(value), needed=getattr(kind, "__name__", str(kind)))


def renamed(old: str, names: typing.Collection[str]) -> str | None:
    """Return the current name of a setting of version 0.1, if it is among `names`: "envs" -> "num_envs"."""
    return next((table[old] for table in of_recipes("renamed").values() if table.get(old) in names), None)


def of_recipes(table: str) -> dict[str, Any]:
    """Return recipes/<table>.json: what core asks of the recipes without knowing their names."""
    return json.loads((Path(__file__).resolve().parents[2] / "recipes" / f"{table}.json").read_text())


def unknown(what: str, name: str, known: typing.Iterable[str], *, prefix: str = "", **more: Any) -> UserError:
    """Build the error for an unknown name: all known names if they are few, else the most similar ones, each behind `prefix`."""
    known, off = sorted(known), f"{name.removeprefix('no-')}.no-enabled"
    alike = [k for k in known if k == off or k.split(".")[-1] == name.split(".")[-1]]
    near = alike + difflib.get_close_matches(name, known, n=3, cutoff=0.4) if len(known) > 6 else []
    names = ", ".join(dict.fromkeys(prefix + one for one in near or known))
    return UserError(f"unknown {what}", needed=f"a known name, such as {names}" if near else f"one of: {names}", **more)


def phases(cfg: Config) -> dict[str, Phase]:
    """Return {stage: its own settings} of a recipe with several stages."""
    return {f.name: p for f in dataclasses.fields(cfg) if isinstance(p := getattr(cfg, f.name), Phase)}


def of_stage(cfg: Config, name: str, index: int) -> Config:
    """Return `cfg` as the stage `name` sees it: its own settings fill cfg.train, cfg.optim and cfg.run. `--init-from`
    applies to the first stage; a later stage starts from the one before."""
    if name not in (known := phases(cfg)):
        raise UserError(f"the stage '{name}' has no settings of its own", got=", ".join(known) or "none of type Phase",
                        needed=f"`{name}: Phase` in Config: the function of a stage and its settings have one name")  # fmt: skip
    own = {k: v for k, v in vars(known[name]).items() if v is not None}
    groups: dict[str, Any] = {g: dataclasses.replace(value, **{k: v for k, v in own.items() if k in vars(value)})
              for g, value in (("train", cfg.train), ("optim", cfg.optim), ("run", cfg.run))}  # fmt: skip
    return dataclasses.replace(cfg, **groups, init_from=cfg.init_from if index == 0 else None)


def _idle(cfg: Config, words: list[str], stages: list[str]) -> None:
    """Raise if a setting of the whole recipe has no effect, because every stage sets its own value."""
    own = {name.replace("_", "-"): p for name, p in phases(cfg).items() if name in stages}
    common = [w for w in words if w.startswith(("--train.", "--optim.", "--run."))]
    for word in (w[2:].split("=")[0].replace("_", "-") for w in common):
        name = word.split(".")[1].replace("-", "_")
        if own and all(getattr(p, name, None) is not None for p in own.values()):
            raise UserError(f"--{word} does nothing here", got="every stage sets its own",
                            needed=" or ".join(f"--{stage}.{name.replace('_', '-')}" for stage in own))  # fmt: skip


def flags(cls: type, prefix: str = "") -> list[str]:
    """Return every `--group.name` that `cls` accepts, without the dashes."""
    hints = typing.get_type_hints(cls)
    found = []
    for f in dataclasses.fields(cls):
        kind, name = hints[f.name], prefix + f.name.replace("_", "-")
        if dataclasses.is_dataclass(kind):
            found += flags(hints[f.name], name + ".")
        else:
            found.append(name)
            if kind is bool:
                found.append(prefix + "no-" + f.name.replace("_", "-"))
    return found


def parse(module: types.ModuleType, argv: list[str], *, prog: str, options: str = "") -> tuple[Config, str]:
    """Parse a recipe module's settings from the command line: (config, preset name). `options`: help of those that are no
    settings."""
    presets = {name: getattr(module, name) for name in PRESETS if hasattr(module, name)}
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
    if file:
        check_recipe(values, module.__name__, file)
        # It may name some settings only: the others are those of the preset.
        default = from_dict(module.Config, laid_over(to_dict(default), values.get("settings", values)), where=file)
    argv, start = take([w.replace("--init_from", "--init-from", 1) for w in argv], "--init-from")
    if start is not None:
        default.init_from = str(Path(start).absolute())  # a resume may run from another folder
        if not file:  # fine-tuning: a 5 to 10 times lower rate; the command line overrides it
            default.optim.lr, default.optim.warmup = float(f"{default.optim.lr / 7:.2g}"), 0.03

    purpose = re.sub(r"\n(?=\w+  )", "\n\n", (module.__doc__ or "").strip())  # the help joins the lines of a paragraph
    text = f"{purpose}\n\nPresets: --preset {' | '.join(presets)} (default tiny). --config FILE reads settings: "
    text += f"an args.json, or a file of `trainworthy config` (YAML or JSON).\n\n{options}"
    where = file or "the command line"
    return _from_command_line(module, default, argv, prog=prog, where=where, help_text=text.rstrip()), preset


def _from_command_line(
    module: types.ModuleType, default: Config, argv: list[str], *, prog: str, where: str, help_text: str = ""
) -> Config:
    """Return the settings of `default`, changed as the command line says."""
    known = flags(module.Config)
    if "max-steps" not in known:
        argv = [re.sub(r"^--max[-_]steps(?==|$)", "--train.max-steps", w) for w in argv]
    if "shard" not in known:
        argv = [re.sub(r"^--shard(?==|$)", "--run.shard", w) for w in argv]
    assert_known(argv, {*known, "help"}, prog=prog, settings=known)
    import tyro

    if {"-h", "--help"} & {*argv}:
        from trainworthy.core.base.setting_help import join_lines

        join_lines(module.Config)
        tyro.cli(module.Config, default=default, args=argv, prog=prog, description=help_text)  # prints and exits
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
            cfg = tyro.cli(module.Config, default=default, args=argv, prog=prog)
    except SystemExit:
        raise _not_read(shown.getvalue(), prog) from None
    _idle(cfg, argv, [make.__name__ for make in module.STAGES])
    return complete(cfg, where=where, command=prog)


def _not_read(box: str, prog: str) -> UserError:
    """Return the error for words that the parser cannot read. `box`: what it prints, a frame around a sentence and the help."""
    lines = [line.strip("│| ") for line in box.splitlines()]
    rules = [i for i, line in enumerate(lines) if re.match("[╭+]?[─-]{3}", line)]
    what = " ".join(lines[slice(*[*rules, len(lines)][:2])][1:])  # from the frame to the first line across it
    next_ = f"{prog} --help"
    if found := re.match(r"Unrecognized options: (.*)", what):
        return UserError("words that belong to no setting", got=found[1], needed="each value behind its --setting; several gates of --only "
                         "are joined by commas: --only data,overfit", next=next_)  # fmt: skip
    if found := re.match(r"invalid choice (.*) for argument '(--\S+)'. Expected one of \((.*?),?\)", what):
        return UserError(
            f"{found[2]} has a value that is not offered",
            got=found[1],
            needed=found[3].replace("', '", "' | '"),
            next=next_,
        )
    if found := re.match(r"Missing value for argument '(--\S+)'", what):
        return UserError(f"{found[1]} needs a value", got="none", next=next_)
    if found := re.match(r"Error parsing (--\S+): (.*)", what):
        return UserError(f"{found[1]} cannot be read", got=found[2], needed="see its line in the help", next=next_)
    return UserError("the settings cannot be read", got=what, next=next_)


def assert_known(
    argv: list[str], known: typing.Collection[str], *, prog: str, settings: typing.Collection[str]
) -> None:
    """Raise UserError for a word `--name` whose name is not `known`. The message names one of the `settings`."""
    for word in argv:
        name = word[2:].split("=")[0].replace("_", "-")
        if not word.startswith("--") or name in known:
            continue
        fields = {k.replace("-", "_") for k in settings}
        olds = (old.replace("-", "_") for old in (name, name.removeprefix("no-")))
        if now := next((new for old in olds if (new := renamed(old, fields))), None):
            raise UserError(f"--{name} has a new name", needed=masking.flag(now), next="docs/migration.md")
        ours = ELSEWHERE.get(name.split(".")[-1], "")
        if ours.split(" ")[0] in settings:
            raise UserError(f"unknown setting --{name}", needed=f"--{ours}", next=f"{prog} --help")
        raise unknown(f"setting --{name}", name, settings, prefix="--", next=f"{prog} --help")


def changed(module: types.ModuleType, cfg: Config, argv: list[str], *, prog: str) -> Config:
    """Return the settings of a continued run with those of `argv`. Raises UserError for a setting on which the samples, the
    weights or the curves depend by more than rounding."""
    new = _from_command_line(module, cfg, argv, prog=prog, where="the command line")
    before, after = flat(to_dict(cfg)), flat(to_dict(new))
    wrong = [name for name, value in after.items() if value != before.get(name) and not MAY_CHANGE.fullmatch(name)]
    if wrong:
        raise UserError("a continued run cannot change these settings", got=", ".join(masking.flag(n) for n in wrong),
                        needed="those that change speed, memory or files only: --train.accumulate, --train.eval-batch-size, --shard, "
                        "--loader.*, --run.threads, --run.save-*, --run.keep-*, --run.log-every, -n",
                        next="a new run; --init-from takes the weights of this one")  # fmt: skip
    return new


def complete(cfg: Config, *, where: str, command: str, secrets: dict[str, str] | None = None) -> Config:
    """Fill the given secrets ({"hub.api_key": value}) into `cfg`. Raises UserError if a secret that a file hides is
    still missing."""
    for name, value in (secrets or {}).items():
        *groups, last = name.split(".")
        owner: Any = cfg
        for group in groups:
            owner = getattr(owner, group, None)
        if not hasattr(owner, last):
            raise unknown(f"setting {masking.flag(name)}", masking.flag(name)[2:], flags(type(cfg)), prefix="--")
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


def assert_whole(cfg: Config, command: str) -> None:
    """Raise UserError for a command that measures the whole model in each process."""
    if cfg.run.shard != "none":
        raise UserError(f"trainworthy {command} does not shard", got=f"--shard {cfg.run.shard}",
                        needed="--shard none: it measures the whole model in each process")  # fmt: skip


def take_number(argv: list[str], flag: str, least: int = 1) -> tuple[list[str], int | None]:
    """Return `argv` without `flag N`, and the number. Raises UserError below `least`."""
    rest, value = take(argv, flag)
    if value is not None and (not value.isdigit() or int(value) < least):
        raise UserError(f"{flag} needs a number", got=value, needed=f"{least} or more")
    return rest, None if value is None else int(value)


def take_float(argv: list[str], flag: str, *, most: float = math.inf) -> tuple[list[str], float | None]:
    """Return `argv` without `flag X`, and the finite number X. Raises UserError unless it is above 0 and at most `most`."""
    rest, value = take(argv, flag)
    try:
        number = None if value is None else float(value)
    except ValueError:
        number = math.nan
    if number is not None and not (0 < number <= most and number < math.inf):
        needed = "above 0" + (f", up to {most:g}" if most < math.inf else "")
        raise UserError(f"{flag} needs a number", got=value, needed=needed)
    return rest, number


def take(argv: list[str], flag: str) -> tuple[list[str], str | None]:
    """Return `argv` without `flag VALUE` or `flag=VALUE`, and the value."""
    for i, word in enumerate(argv):
        if word == flag:
            if i + 1 == len(argv):
                raise UserError(f"{flag} needs a value")
            return argv[:i] + argv[i + 2 :], argv[i + 1]
        if word.startswith(flag + "="):
            return argv[:i] + argv[i + 1 :], word.split("=", 1)[1]
    return argv, None
