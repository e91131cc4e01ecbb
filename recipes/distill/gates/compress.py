"""Gates of compression: copied layers, the teacher's transcripts and outputs, both terms of the loss."""

import re
from collections.abc import Callable

import torch
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.checks import formula
from trainworthy.core.gates.gate import GateContext, fetch, own_size, pick, split_evenly
from trainworthy.core.loop.run import Rehearsal, Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.distill.gates import token_forms
from trainworthy.recipes.distill.gates.whisper import read, vocabulary
from trainworthy.recipes.shared import whisper

LISTENED = 16  # recordings that are transcribed again
SAME = 0.95  # share of the label's ids that must be the teacher's most likely ones, given the ids before
MOVED = 1e-5  # relative rounding error of a loss that is computed twice
NEAR = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}  # relative difference of the loss from the formula
LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")


def teacher_of(context: GateContext) -> whisper.Whisper:
    return whisper.load(context.cfg.data.teacher, context.cfg.data.seconds)


# ------------------------------------------------------------------------------------------------------------ the student
@gate(
    "copied",
    rows="C14",
    title="the student starts as its teacher's own layers, evenly spaced, and learns to do without the others",
    reads="model",
)
def copied(context: GateContext) -> Finding:
    """Searches every layer of the untrained student among the teacher's layers, bit for bit. All other tensors must be the teacher's. A side
    that lacks layers must train."""
    if context.cfg.init_from:
        raise Skip("it starts from --init-from")
    _, stage = context.build(Rehearsal(steps=1))
    ours, theirs = _by_layer(stage.model.state_dict()), _by_layer(stage.frozen_modules["teacher"].state_dict())
    found, needed, wrong, unchanged = [], [], [], []
    learns = {
        LAYER.search(name)[1] for name, p in stage.model.named_parameters() if p.requires_grad and LAYER.search(name)
    }
    for side in ("encoder", "decoder"):
        n, kept = (sum(k[0] == side for k in layers) for layers in (theirs, ours))
        even = [round(i * (n - 1) / max(1, kept - 1)) for i in range(kept)]
        same = [next((j for j in range(n) if _equal(ours[side, i], theirs[side, j])), None) for i in range(kept)]
        found.append(f"{side} {', '.join('no layer' if j is None else str(j) for j in same)} of {n}")
        needed.append(f"{side} {', '.join(map(str, even))}")
        wrong += [side] * (not _spaced(same, even))
        unchanged += [f"the {side} lacks {n - kept} of {n} layers and is frozen"] * (kept < n and side not in learns)
    others = [k for k, v in theirs["", 0].items() if not torch.equal(v, ours["", 0].get(k, v.new_zeros(0)))]
    wrong += others
    rest = f"; {len(others)} other tensors are not the teacher's, e.g. {others[0]}" if others else ""
    return Finding(
        not wrong and not unchanged, "; ".join(["copied from layers: " + "; ".join(found) + rest, *unchanged]),
        "; ".join(needed) + ", or the layers next to them; all other tensors equal the teacher's; a side that lacks layers trains",
        "layers are initialised again, or were loaded under strict=False, so that nothing of the teacher is left\n"
        "the first layers were copied instead of evenly spaced ones from first to last\n"
        "embeddings, norms or convolutions were not copied", evidence={"found": found, "others": others[:20]},
        cause=f"{unchanged[0]}: what is left never learns to do without them" if unchanged and not wrong else "",
    )  # fmt: skip


def _spaced(layers: list[int | None], even: list[int]) -> bool:
    """Return whether layers are the evenly spaced ones, or each the one before or after it in growing order (every second layer, as in
    DistilBERT). The first ones alone are not."""
    if None in layers or layers == [*range(len(layers))] != even:
        return False
    return all(abs(a - b) <= 1 for a, b in zip(layers, even, strict=True)) and sorted({*layers}) == layers


def _by_layer(tensors: dict[str, Tensor]) -> dict[tuple[str, int], dict[str, Tensor]]:
    """Return {(side, number): {name within the layer: tensor}}; tensors outside layers have the key ("", 0)."""
    out: dict[tuple[str, int], dict[str, Tensor]] = {("", 0): {}}
    for name, value in tensors.items():
        at = LAYER.search(name)
        place = (at[1], int(at[2])) if at else ("", 0)
        out.setdefault(place, {})[name[at.end() :] if at else name] = value
    return out


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ------------------------------------------------------------------------------------------------------------- the labels
@gate(
    "labels",
    rows="W6",
    title="labels are the teacher's transcripts, only of recordings that it transcribed well",
    reads="data",
)
def labels(context: GateContext) -> Finding:
    """Computes the word error rate of every training label against the spoken text, and transcribes some samples again from their own sound."""
    run, stage = context.build(Rehearsal(steps=1))
    data, most, teacher = stage.data["train"], context.cfg.data.max_wer, teacher_of(context)
    pairs = [(data.peek(i, "truth"), data.peek(i, "text")) for i in range(len(data))]
    rates = [whisper.word_error_rate([spoken], [label]) for spoken, label in pairs]
    worst = max(range(len(data)), key=rates.__getitem__)
    over = sum(rate > most + 1e-9 for rate in rates)
    batch = fetch(data, pick(data, LISTENED, context.cfg.run.seed), None, run.device)
    with torch.no_grad():
        again = teacher.write(teacher.encode(batch["mel"]), at_most=batch["ids"].shape[1] + 8)
    other = [(a, b) for a, b in zip(batch["text"], again, strict=True) if whisper.normalise(a) != whisper.normalise(b)]
    allowed = len(again) // 16  # rounding may change a word
    example = f", e.g. '{other[0][1]}' for '{other[0][0]}'" if other else ""
    return Finding(
        not over and len(other) <= allowed,
        f"{over} of {len(data)} labels have more than {most:.0%} of their words wrong (worst {rates[worst]:.0%}: "
        f"'{pairs[worst][1]}' for '{pairs[worst][0]}'); the teacher transcribes {len(other)} of {len(again)} differently from the same "
        f"sound{example}",
        f"none, and at most {allowed}",
        order_causes(
            (over > 0 and len(other) <= allowed, "labels were not filtered by their word error rate (--data.max-wer), or were compared "
             "with other transcripts"),
            (len(other) > allowed, "labels belong to other recordings, to another teacher, or to another sound than the student gets")),
        evidence={"over": over, "otherwise": other[:10]}, batch=batch,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- the loss
@gate(
    "divergence",
    rows="C1 W2 C4",
    title="both loss terms do what their formulas do, over text and end token only",
    reads="loss counts",
    explains=True,
)
def divergence(context: GateContext) -> Finding:
    """Compares both terms for four recordings with formulas in double precision, each recording alone and without padding; then with other
    padding. A term of another form passes if it does what its formula does (see token_forms)."""
    run, stage = context.build(Rehearsal(steps=1))
    cfg, seed, teacher = context.cfg, context.cfg.run.seed, teacher_of(context)
    batch = fetch(stage.data["train"], pick(stage.data["train"], 4, seed), seed, run.device)
    found, near = read(run, stage, batch), NEAR[run.precision]
    each = [read(run, stage, formula.row(batch, i)) for i in range(len(batch["ids"]))]
    with evaluating(stage.model):
        stated = token_forms.stated(stage, batch, teacher, cfg)
    compared = token_forms.compare(run, stage, batch, stated, found, each, start=len(teacher.prompt), near=near)
    more = torch.full((len(batch["ids"]), 5), teacher.end, device=run.device)
    more[:, 1:] = batch["ids"][:, 2:3]  # real tokens at padded positions
    padded = read(run, stage, {**batch, "ids": torch.cat([batch["ids"], more], 1)})
    moved = abs(sum(padded.values()) - sum(found.values())) / abs(sum(found.values()))
    wrong = [*compared.wrong, *([f"with other pads the loss changes by {moved:.1%}"] if moved > near else [])]
    terms = ", ".join(f"{k} {v:.3f}" for k, v in found.items())
    return Finding(
        not wrong, "; ".join(wrong) or f"{terms} nats per token; {', '.join(compared.remarks)}; other pads change the loss by {moved:.0e}",
        f"within {near:g} of sum over the vocabulary p (ln p - ln q) T^2 (teacher p, student q), and of -ln q(word); no pads. Another form "
        "of a term: minimal at the teacher's scores, or pulls each token to its word",
        "\n".join([*compared.causes, "a mean over the vocabulary instead of a sum, T is not squared, or student and teacher are exchanged",
                   "pads or the prompt are counted in a term", "labels are shifted twice, or not at all",
                   "the reverse divergence on purpose: name its term reverse_kl"]),
        evidence={"found": found, "formula": compared.formula, "padded": padded}, batch=batch,
    )  # fmt: skip


@gate(
    "teacher",
    rows="V1 C12",
    title="the teacher gets the same input without augmentation, and wrote the labels",
    reads="data loss",
    explains=True,
)
def teacher(context: GateContext) -> Finding:
    """Records the teacher while the loss is computed: its most likely ids against the labels, the modes of its modules, and the loss of one
    batch under different random draws, the student in eval mode."""
    run, stage = context.build(Rehearsal(steps=1))
    own, data, start = stage.frozen_modules["teacher"], stage.data["train"], len(teacher_of(context).prompt)
    losses, right = [0.0, 0.0], []
    for part in split_evenly(pick(data, LISTENED, context.cfg.run.seed), own_size(run)):
        batch, choices = fetch(data, part, None, run.device), []
        heard = own.proj_out.register_forward_hook(
            lambda _module, _args, out, choices=choices: choices.append(out.argmax(-1))
        )
        with heard, evaluating(stage.model):
            for draws in range(2):
                seeds.seed_global(draws)
                losses[draws] += sum(v.item() for v in _loss(run, stage)(stage.model, batch).values())
        if not choices:
            return Finding(
                False,
                "the loss never calls the teacher",
                "teacher logits for every token",
                "targets come from elsewhere",
            )
        place = torch.arange(1, batch["ids"].shape[1], device=run.device)
        scored = (place >= start) & (place < batch["words"][:, None])
        right.append((choices[0][:, : scored.shape[1]] == batch["ids"][:, 1:])[scored])
    same = to_double(torch.cat(right)).mean().item()
    change = abs(losses[0] - losses[1]) / max(abs(losses[0]), 1e-8)
    training = sum(m.training for m in own.modules())
    return Finding(
        same >= SAME and change <= MOVED and not training,
        f"{same:.1%} of the labels' ids are the teacher's most likely ones; computed twice, a batch's loss differs by {change:.0e}; "
        f"{training} of the teacher's modules are in train mode", f"at least {SAME:.0%}, at most {MOVED:g}, none",
        order_causes(
            (same < SAME and change <= MOVED and not training, "the teacher gets another recording than the student, or a spectrogram of "
             "another scale"),
            (same < SAME and change <= MOVED and not training, "labels of another teacher, or ids of another tokenizer"),
            (change > MOVED or training > 0, "the teacher is in train mode, or dropout is applied to its output: it changes from call to "
             "call")),
        batch=batch,
    )  # fmt: skip


def _loss(run: Run, stage: Stage) -> Callable:
    def loss(model: torch.nn.Module, batch: dict) -> dict[str, Tensor]:
        with run.autocast():
            return stage.loss(model, batch)

    return loss


ALL = [copied, vocabulary, labels, divergence, teacher]
