"""Checks that the files of an export hold the trained weights, for recipes that do not declare how users load it
(`Stage.exported`). Tensors are found by their names."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from trainworthy.core.base.processes import agreed
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.fingerprints import fingerprint, tensors
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.recipe.stage import PARTS, Stage

BIGGEST = 300_000_000  # parameters; a larger model is not written to disk just to be read again
SAME = {torch.float32: 1e-5, torch.float64: 1e-5}  # relative; of files in half precision:
HALF = 1e-2


def wanted(stage: Stage) -> bool:
    """Return whether no other gate reads this stage's export. A gate that lists no parts counts as none: it reads all."""
    return stage.export is not None and not stage.exported and not any(
        "export" in g.reads and tuple(g.reads) != PARTS for g in stage.gates)  # fmt: skip


def export_to(stage: Stage, folder: Path) -> str:
    """Export into `folder`. Return how export() changed the model in memory, "" if it did not. It may be the cause of a difference, and is no
    fault by itself: nothing of a run's last stage is evaluated after the export."""

    def read() -> dict[str, tuple[torch.dtype, int]]:
        every = tensors(stage, ()).items()
        return {n: (t.dtype, int(fingerprint(t).item())) for n, t in every if t.numel()}

    before = read()
    stage.export(folder)
    after = read()
    changed = [n for n, was in before.items() if after.get(n, was) != was]
    if not changed:
        return ""
    (was, _), (now, _) = before[changed[0]], after[changed[0]]
    how = f" from {was} to {now}".replace("torch.", "") if now != was else ""
    return (f"export() changes the model in memory: {len(changed)} of {len(before)} tensors{how}, e.g. {changed[0]}; the files are "
            "not what was evaluated: convert or merge a copy, or export what was evaluated")  # fmt: skip


def plain(name: str) -> str:
    """A parameter's name without what wrappers and adapters put into it."""
    for part in (".default", "_orig_mod.", "module."):
        name = name.replace(part, "")
    return name


def stored(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """{name: (file, tensor)} of all safetensors files. The model may be divided over several files and subfolders."""
    from safetensors.torch import load_file

    found: dict[str, tuple[str, Tensor]] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[plain(name)] = (str(path.relative_to(folder)), tensor)
    return found


def paired(trained: dict[str, Tensor], files: dict[str, tuple[str, Tensor]]) -> dict[str, tuple[str, Tensor, Tensor]]:
    """{parameter: (file, its tensor there, its own value)}: the same name, or a name that ends in the file's and is the only
    one that does."""
    out = {}
    for key, (file, tensor) in files.items():
        ends = [n for n in trained if plain(n) == key] or [n for n in trained if plain(n).endswith("." + key)]
        if len(ends) == 1 and tensor.is_floating_point() and tensor.shape == trained[ends[0]].shape:
            out[ends[0]] = (file, tensor, trained[ends[0]])
    return out


def difference(a: Tensor, b: Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()


@gate(
    "exported-weights",
    rows="C18",
    title="the files of the export hold the trained weights",
    reads="model export optimizers state loss counts train",
)
def exported_weights(context: GateContext) -> Finding:
    """Export the rehearsed model, whose weights have moved, and compare each trained tensor with the one of its name in the files."""
    run, stage, _ = rehearsed(context)
    if sum(p.numel() for p in stage.model.parameters()) > BIGGEST:
        raise Skip("the model is too large to be saved and loaded before each run")

    def compare() -> Finding | None:
        moving = {id(p) for p in stage.parameters().values()}
        names = {n for n, p in stage.model.named_parameters() if id(p) in moving}
        trained = {n: p.detach() for n, p in stage.eval_model.named_parameters() if n in names}
        with tempfile.TemporaryDirectory() as name:
            changed = export_to(stage, Path(name))
            found = paired(trained, stored(Path(name)))
        if not found:
            return None
        limit = lambda n: SAME.get(found[n][1].dtype, HALF)  # noqa: E731
        gaps = {n: difference(one, own) for n, (_, one, own) in found.items()}
        wrong = {n: gap for n, gap in gaps.items() if gap > limit(n)}
        where = {found[n][0] for n in wrong}
        fresh = dict(context.look()[1].eval_model.named_parameters()) if wrong else {}
        raw = dict(stage.model.named_parameters()) if wrong and stage.ema_model is not None else {}

        def holds(net: dict[str, Tensor]) -> bool:
            """Return whether all tensors that differ are those of `net`."""
            return bool(wrong) and all(n in net and difference(found[n][1], net[n].detach()) <= limit(n) for n in wrong)

        because = (
            "the export holds the weights that training began with\n" if holds(fresh) else
            "the export holds the raw weights instead of their average\n" if holds(raw) else
            "the export holds another net than the one that is trained: an earlier stage's, a control's, or one built anew\n"
        )  # fmt: skip
        worst = max(wrong, key=wrong.get, default="")
        return Finding(
            not wrong,
            f"{len(wrong)} of {len(gaps)} trained tensors differ in {', '.join(sorted(where))}, e.g. {worst} by {wrong[worst]:.2g}"
            if wrong else f"{len(gaps)} of {len(trained)} trained tensors are in the files by name, all equal",
            "each equals the trained tensor up to rounding", because + "export() keeps a reference to another variable of that name\n"
            "on purpose (the export folds, merges or averages weights under the same names): declare `exported`, or "
            '--gates.waive exported-weights --gates.because "..."', evidence={"gaps": gaps}, cause=changed if wrong else "",
        )  # fmt: skip

    finding = agreed(run.accelerator, compare() if run.rank == 0 else None)
    if finding is None:
        raise Skip("no exported file has tensors with names of the model's tensors")
    return finding
