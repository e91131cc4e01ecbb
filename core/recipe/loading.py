"""Loads a recipe file, ours or a fork by path, and identifies its version."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from trainworthy.core.base import config, masking
from trainworthy.core.base.errors import UserError
from trainworthy.core.recipe.registry import HOME, Entry, find

READS = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()\s*["'](\w+)["']""")
LAUNCHERS = re.compile(
    r"(LOCAL_)?RANK$|(LOCAL_)?WORLD_SIZE$|MASTER_|TORCHELASTIC_|ACCELERATE_|SLURM_|CUDA_VISIBLE_DEVICES$"
)
NEEDED = ("STAGES", "Config", "tiny", "train")
PACKAGES = ("torch", "torchvision", "accelerate", "transformers", "trl", "peft", "diffusers", "datasets", "safetensors",
            "bitsandbytes", "numpy", "scikit-learn", "gymnasium")  # fmt: skip


@dataclass
class Recipe:
    """A loaded recipe: its module and its origin."""

    entry: Entry
    module: ModuleType
    fallbacks: tuple[str, ...] = ()
    """Fallbacks so far; the last is this recipe's only stage (`core/session/fallbacks.py`)."""
    start: str = ""
    """Hash of the weights from which a fallback continues."""

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def slug(self) -> str:
        """Folder name of its runs."""
        return self.id.replace("/", "-")

    @property
    def target(self) -> str:
        """What the user types for it."""
        return self.id if HOME in self.entry.path.parents else str(self.entry.path)


def load(name: str) -> Recipe:
    """Import the recipe `name` (id or path). A file that is no recipe raises one clear message."""
    entry = find(name)
    path = entry.path
    try:
        tree = ast.parse(path.read_text(), str(path))
    except SyntaxError as error:
        raise UserError(f"{path} is not valid Python", got=f"line {error.lineno}: {error.msg}: {(error.text or '').strip()}",
                        needed="a recipe that compiles") from None  # fmt: skip
    assert_new_names(tree, path)
    ours = HOME in path.parents
    module_name = f"trainworthy.recipes.{path.parent.name}.{path.stem}" if ours else f"trainworthy_fork_{path.stem}"
    if not ours and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # a fork may import neighbouring files; last, so that they shadow nothing
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # the file exists
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise not_found(entry, error) from None
    except Exception as error:
        frame = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(path)), None)
        raise UserError(f"{path} cannot be imported", got=f"{type(error).__name__}: {error}",
                        cause=f"line {frame.lineno}: {frame.line}" if frame else "") from None  # fmt: skip
    missing = [n for n in NEEDED if not hasattr(module, n)]
    if missing or not module.STAGES:
        raise UserError(f"{path} is not a recipe", got="nothing in STAGES" if not missing else f"no {', '.join(missing)}",
                        needed=", ".join(NEEDED) + " at the top level",
                        next=f"trainworthy guard {path}    # for a plain training script; a recipe begins with `trainworthy fork`")  # fmt: skip
    return Recipe(entry, module)


def not_found(entry: Entry, error: ModuleNotFoundError) -> UserError:
    """Return the message about a module that the recipe imports and that is not there."""
    path, name = entry.path, error.name
    if HOME in path.parents:
        return UserError(f"{entry.id} needs the package '{name}', which is not installed",
                         next=f"pip install 'trainworthy[{path.parent.name}]'")  # fmt: skip
    return UserError(f"{entry.id} needs the package '{name}', which is not installed", got=f"no {name} in {path.parent} either",
                     cause=f"{name}.py stood next to the file and was not moved or copied with it, or a package is missing",
                     next=f"put {name}.py into {path.parent}; for a package of a recipe: pip install 'trainworthy[all]'")  # fmt: skip


def assert_new_names(tree: ast.Module, path: Path) -> None:
    """Raise UserError for a fork of version 0.1, with the new name of an import, field or function."""
    renamed = config.of_recipes("renamed")
    fields, names = renamed["fields"], renamed["names"]
    for node in ast.walk(tree):
        now = ""
        if isinstance(node, ast.Import) and "core" in (a.name for a in node.names) and "core.Stage" in path.read_text():
            now = "`import core` is `from trainworthy import core`"
        elif isinstance(node, ast.ImportFrom):
            package = "" if node.level else (node.module or "").split(".")[0]
            own = any((folder / package).exists() for folder in (path.parent, Path.cwd()))
            if package in ("core", "recipes") and not own:
                now = f"`from {node.module}` is `from trainworthy.{node.module}`, and modules moved into rooms"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("Stage", "Expect", "Tile"):
            now = ", ".join(f"{k.arg}= is {fields[k.arg]}=" for k in node.keywords if k.arg in fields)
        elif isinstance(node, ast.Attribute) and (old := ast.unparse(node)) in names:
            now = f"`{old}` is `{names[old]}`"
        if now:
            got = f"line {getattr(node, 'lineno', 1)}: {now}"
            raise UserError(f"{path} is written for version 0.1", got=got, next="docs/migration.md")


def sources(recipe: Recipe) -> dict[str, str]:
    """Return {file: hash} of the recipe, of what it imports from its own folder or from recipes/, and of core."""
    files = {recipe.entry.path, *(Path(__file__).resolve().parents[1].rglob("*.py"))}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or not os.path.isabs(file):  # torch.ops reports "_ops.py"
            continue
        if folder := _near(os.path.dirname(file), recipe.entry.path.parent):
            files.add(folder / os.path.basename(file))
    return {str(p): _hash(p) for p in sorted(files)}


def late(recipe: Recipe, before: dict[str, str]) -> dict[str, str]:
    """Return {file: hash} of sources imported since `before` (an earlier result of `sources`), by path relative to the
    recipe, so that a moved folder is the same recipe."""
    home = recipe.entry.path.parent
    return {os.path.relpath(k, home): v for k, v in sources(recipe).items() if k not in before}


def unchanged(recipe: Recipe, found: dict[str, str]) -> bool:
    """Return whether the files in a result of `late` are unchanged."""
    return not changed({str(recipe.entry.path.parent / name): mark for name, mark in found.items()})


def changed(before: dict[str, str]) -> list[str]:
    """Return paths of `before` whose content on disk differs. It reads files, since late imports may not be loaded
    yet."""
    out = []
    for name, mark in before.items():
        try:
            now = _hash(Path(name))
        except OSError:
            now = ""
        if now != mark:
            out.append(name)
    return out


def _hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()


@cache
def _near(folder: str, own: Path) -> Path | None:
    """Return the resolved folder if its files are part of a recipe in `own`."""
    path = Path(folder).resolve()
    beside = (path == own or own in path.parents) and "site-packages" not in path.parts
    return path if path == HOME or HOME in path.parents or beside else None


def versions() -> dict[str, str]:
    """Return the installed versions of packages that affect results."""
    found = {"python": sys.version.split()[0]}
    return found | {name: known for name in PACKAGES if (known := version(name))}


def version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def variables(recipe: Recipe) -> dict[str, str]:
    """Return {name: four digits of a hash of its value} of the environment variables that a recipe's own files read: a fork may take a
    setting from there. Secrets and what a launcher sets are left out."""
    own = {recipe.entry.path, *(p for p in map(Path, sources(recipe)) if HOME not in p.parents and p.is_file())}
    core = Path(__file__).resolve().parents[1]
    texts = [p.read_text(errors="replace") for p in own if core not in p.parents]
    names = sorted({name for text in texts for name in READS.findall(text)})
    values = {n: os.environ.get(n, "") for n in names if not LAUNCHERS.match(n) and not masking.is_secret(n)}
    return {name: hashlib.blake2b(value.encode(), digest_size=2).hexdigest() for name, value in values.items()}


@cache
def installed() -> list[str]:
    """Return all installed packages with their versions: any of them can change what a gate measures."""
    return sorted({f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions()})


def _number(text: str) -> float:
    """Return a number of JSON, as an int if it is whole."""
    value = float(text)
    return int(value) if value.is_integer() else value


def fingerprint(recipe: Recipe, cfg: config.Config, data: str, **more: object) -> str:
    """Hash everything that a gate's verdict depends on; equal fingerprints need no second run of the gates."""
    settings = masking.settings(config.to_dict(cfg))  # a changed API key does not change the training
    settings.pop("gates")
    settings["run"] = {"seed": cfg.run.seed}
    if "precision" in more:  # the type itself, where a resumed run's args.json has replaced "launcher"
        settings["train"] = settings["train"] | {"precision": more["precision"]}
    settings = json.loads(json.dumps(settings, default=str), parse_float=_number)  # 5 of a preset is 5.0 in args.json
    files = {Path(k).name + v: "" for k, v in sources(recipe).items()}  # a moved folder is the same recipe
    everything = [sorted(files), settings, data, sys.version, installed(), recipe.start, variables(recipe), more]
    text = json.dumps(everything, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
