"""`--init-from` loads the weights that match by name and shape, never an optimiser, and reports the fraction that
matched."""

import functools
import hashlib
import json
import pickle
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from trainworthy.core.base.console import list_names
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.assets import sha256
from trainworthy.core.loop.checkpoint import MANIFEST
from trainworthy.core.loop.weights import load_weights, weights
from trainworthy.core.recipe.stage import Stage

# Files with weights in a folder, in order of preference: a hub snapshot or a checkpoint, then a run folder.
PLACES = ("model.safetensors", "model.safetensors.index.json", "export/model.safetensors",
          "checkpoints/*/best_val_*/model.safetensors", "checkpoints/*/latest/model.safetensors", "*.safetensors",
          "pytorch_model.bin")  # fmt: skip
NOTHING = 0.01  # fraction of matching parameters below which the file is from another architecture


@dataclass
class Weights:
    """A file's tensors by name, and the hash of its bytes."""

    file: Path
    tensors: dict[str, Tensor]
    sha256: str


@dataclass
class Match:
    """Result of matching a state dict to a model by name and shape; tied parameters count once."""

    pairs: dict[str, Tensor] = field(default_factory=dict)
    """The model's name -> the file's tensor with that name and shape."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    """Names with both shapes."""
    prefix: str = ""
    """The change made to the file's names, for display."""


@dataclass
class Start:
    """The weights that a model started from, as args.json stores them."""

    file: str
    sha256: str
    share: float
    """Fraction of the parameters, by elements."""
    missing: list[str]
    kept: list[str]
    """Parameters that are not in the file, but that the recipe had loaded before."""
    unexpected: list[str]
    mismatched: list[str]
    prefix: str

    def describe(self) -> str:
        text = f"init   {self.file} (sha256 {self.sha256[:12]}): {self.share:.1%} of the parameters loaded"
        text += f"; {self.prefix}" if self.prefix else ""
        for what, names in (("left fresh, of another shape", self.mismatched), ("left fresh, not in the file", self.missing),
                            ("not in the file, as the recipe loaded them", self.kept),
                            ("in the file, not used", self.unexpected)):  # fmt: skip
            if names:
                text += f"\n       {what}: {list_names(names)}"
        return text


def locate(path: Path) -> Path:
    """Return the file of weights for `path` (a file, a run folder, a checkpoint, a hub snapshot)."""
    if not path.exists():
        raise UserError(f"--init-from {path}: no such file or folder",
                        needed="a .safetensors file, a run folder, or a folder with model.safetensors")  # fmt: skip
    if path.is_file():
        return path
    for place in PLACES:
        if found := sorted(path.glob(place)):
            return found[-1]
    raise UserError(f"--init-from {path}: no weights in this folder", needed=", ".join(PLACES[:3]) + " or a checkpoint")


@functools.lru_cache(maxsize=1)
def read_weights(path: Path, *, trust_pickle: bool) -> Weights:
    """Return the tensors in `path`, read once per process."""
    file = locate(path)
    parts = [file]
    try:
        if file.name.endswith(".index.json"):
            parts = [file.parent / n for n in sorted(set(json.loads(file.read_text())["weight_map"].values()))]
        if file.suffix in (".safetensors", ".json"):
            tensors = {k: v for part in parts for k, v in load_weights(part).items()}
        else:
            tensors = _unpickle(file, trust_pickle)
        hashes = [sha256(part) for part in parts]
        manifest = file.parent / MANIFEST  # of a checkpoint
        saved = json.loads(manifest.read_text())["files"] if manifest.is_file() else {}
        if file.name in saved and saved[file.name]["sha256"] != hashes[0]:
            raise ValueError(f"it does not match its hash in {MANIFEST}")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"--init-from {file} cannot be read", got=f"{type(error).__name__}: {error}",
                        needed="a whole file of weights", cause="a download or copy that was cut off",
                        next="fetch the file again") from None  # fmt: skip
    whole = hashes[0] if len(parts) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return Weights(file, tensors, whole)


def _unpickle(file: Path, trusted: bool) -> dict[str, Tensor]:
    if not trusted:
        raise UserError(f"--init-from {file}: a pickle is loaded only with --trust-pickle", got=f"a {file.suffix} file",
                        needed="safetensors", cause="a pickle runs code when it is opened",
                        next="convert it to .safetensors, or add --trust-pickle if you know who made it")  # fmt: skip
    try:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            loaded = torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:  # a foreign pickle can raise anything
        raise ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    tree = loaded.state_dict() if isinstance(loaded, nn.Module) else loaded
    # Trainers also store optimiser and counters: the state dict is the largest dict of tensors.
    dicts = [d for d in ([tree, *tree.values()] if isinstance(tree, dict) else []) if isinstance(d, dict)]
    found = [{k: v for k, v in d.items() if isinstance(v, Tensor)} for d in dicts]
    best = max(found, key=lambda d: sum(t.numel() for t in d.values()), default={})
    if not best:
        raise ValueError("no tensors by name in it")
    return best


def match(model: nn.Module, tensors: dict[str, Tensor]) -> Match:
    """Match the names. If most differ only by a prefix, the prefix is removed or added."""
    own, aliases = weights(model)
    kept = {name: name for name in own} | aliases  # every name -> the name of its tied parameter
    strip, add = _prefix(list(tensors), set(kept))
    found = Match()
    if strip or add:
        found.prefix = f"prefix '{strip}' taken off" if strip else f"prefix '{add}' put before its names"
    for name, tensor in tensors.items():
        here = kept.get(add + name.removeprefix(strip)) if name.startswith(strip) else None
        if here is None:
            found.unexpected.append(name)
        elif own[here].shape == tensor.shape:
            found.pairs[here] = tensor
        else:
            found.mismatched.append(f"{here} {tuple(own[here].shape)}, there {tuple(tensor.shape)}")
    wrong = {m.split(" ")[0] for m in found.mismatched}
    found.missing = [n for n in own if n not in found.pairs and n not in wrong]
    return found


def _prefix(names: list[str], known: set[str]) -> tuple[str, str]:
    """Return the prefixes (to remove, to add) with which most of the file's or the model's names match; usually
    neither."""
    needed = min(len(names), len(known)) / 2

    def common(words: Iterable[str]) -> list[str]:
        counts = Counter(word[: i + 1] for word in words for i, letter in enumerate(word) if letter == ".")
        return [prefix for prefix, n in counts.items() if n >= needed]

    def hits(change: tuple[str, str]) -> int:
        strip, add = change
        return sum(n.startswith(strip) and add + n.removeprefix(strip) in known for n in names)

    changes = [("", ""), *((p, "") for p in common(names)), *(("", p) for p in common(known))]
    best = max(changes, key=hits)
    return best if hits(best) >= needed else ("", "")


def equal(model: nn.Module, pairs: dict[str, Tensor], *, fresh: tuple[str, ...] = ()) -> tuple[float, list[str]]:
    """Return (fraction of the parameters, by elements, that equal the file's bitwise; names in the file whose values
    differ).

    Buffers do not count, since statistics may be the recipe's own. Integers do not count either, since they encode
    other numbers (4-bit weights); the recipe's own gate checks those. `fresh`: name prefixes that are new on purpose.
    """
    total = same = 0
    changed = []
    for name, p in model.named_parameters():
        if name.startswith(fresh) or not p.is_floating_point():
            continue
        total += p.numel()
        if name in pairs:
            if torch.equal(p.detach(), pairs[name].to(p)):
                same += p.numel()
            else:
                changed.append(name)
    return same / max(total, 1), changed


def start_from(stage: Stage, path: Path, *, trust_pickle: bool) -> None:
    """Copy the matching weights into the stage's model and store them in `stage.pretrained`. Raises if nothing
    matches."""
    found = read_weights(path, trust_pickle=trust_pickle)
    fits = match(stage.model, found.tensors)
    own, _ = weights(stage.model)
    trainable = {n: p.numel() for n, p in stage.model.named_parameters()}  # buffers do not count
    if sum(trainable.get(n, 0) for n in fits.pairs) < NOTHING * sum(trainable.values()):
        raise _misfit(found, {n: own[n] for n in trainable})
    with torch.no_grad():
        for name, tensor in fits.pairs.items():
            own[name].copy_(tensor)
    # Weights that the recipe loaded stay unchanged if the file (an adapter's) does not contain them.
    stage.pretrained = found.tensors if stage.pretrained is None else {**stage.pretrained, **fits.pairs}


def _misfit(found: Weights, own: dict[str, Tensor]) -> UserError:
    def column(tensors: dict[str, Tensor]) -> list[str]:
        return [f"{n} {tuple(t.shape)}" for n, t in sorted(tensors.items())[:6]]

    left, right = ["the file:", *column(found.tensors)], ["this model:", *column(own)]
    width = max(map(len, left))
    rows = [f"{a:<{width}}  {b}" for a, b in zip(left + [""] * 7, right, strict=False)]
    beneath = any(name.endswith(f".{n}") for n in found.tensors for name in own)
    return UserError(
        f"--init-from {found.file}: nothing in it fits this model\n    " + "\n    ".join(rows),
        got=f"{len(found.tensors)} tensors", needed=f"names and shapes of the model's {len(own)}",
        cause="a whole model where what is trained is added to one (adapters)" if beneath else
              "weights of another architecture, or the model's settings (widths, depth) differ",
        next="give the export of that run as the model (--model RUN/export), or train every weight" if beneath else "",
    )  # fmt: skip


def report(stage: Stage, path: Path, *, trust_pickle: bool) -> Start:
    """Return what `start_from` did to a stage that was just built."""
    found = read_weights(path, trust_pickle=trust_pickle)
    fits = match(stage.model, found.tensors)
    share, _ = equal(stage.model, fits.pairs)
    loaded = stage.pretrained or {}
    kept = [n for n in fits.missing if n in loaded]
    missing = [n for n in fits.missing if n not in loaded]
    file, share = str(found.file), round(share, 6)
    return Start(file, found.sha256, share, missing, kept, fits.unexpected, fits.mismatched, fits.prefix)


def holds_state(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the kinds of state (exp_avg, momentum_buffer, ...) with non-zero values. Before its first step, an
    optimiser can have them only from another run."""
    values = [(k, v) for s in optimizer.state.values() for k, v in s.items() if isinstance(v, (Tensor, int, float))]
    return sorted({k for k, v in values if torch.as_tensor(v).any()})
