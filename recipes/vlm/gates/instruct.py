"""Gates of vision-language models: which parts learn in which stage and at what rate (X1, X3), the language model's inputs (X2),
a position for every feature and scores for answers only (X4), the language model's own chat template (L8), answers that depend
on the image (X5).

They require: a model with three parts `encoder`, `projector` and `language`; data of questions.Questions.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, Proof, fetch, pick
from trainworthy.core.gates.learning import OVERFIT_SAMPLES, overfitted
from trainworthy.core.loop.run import Plan, Run, evaluating
from trainworthy.core.recipe.stage import Stage, View
from trainworthy.recipes.llm.gates.chat import heard
from trainworthy.recipes.vlm.data import questions, rows, turns

TOWERS = ("encoder", "projector", "language")
STEPS, BATCH = 3, 16
# relative change of a tower's weights in one step: more destroys what it has learnt, less is no learning
FASTEST, SLOWEST = 0.05, 1e-6
PRIOR = 0.8  # largest accuracy of an answerer that sees the questions only
PAIRS = 4
HELD_OUT = 200
LOOKED_AT = 2000  # samples of a split whose rows are counted
OTHERS = 4  # other images that a sample is tried with
ERRORS, LEAST = 3.0, 1e-3  # standard errors, and share of the loss, by which a sample's own image must be better
EXACT = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}  # decoder options


LEARN = {
    "align": ("projector",),
    "instruct": ("projector", "language"),
    "unfreeze": ("encoder", "projector", "language"),
}
"""Towers that train in each stage, stated here independently of the rates, which a fork may have changed."""


def gates(stage: str, towers: tuple[str, ...], *, first: bool) -> list[Gate]:
    """Return the towers of a stage by its name; for a stage that a fork has named, by its own `towers`. `first`: no stage comes before it."""
    learn = LEARN.get(stage, towers)
    found = [towers_gate(learn), rates, places, per_place, template, answers_alone, prompts, spoken]
    found = [*found, prior] if first else [aligned, *found]
    return found if learn == ("projector",) else [*found, pairs]


# ---------------------------------------------------------------------------------------------------------------- towers
@dataclass
class Watched:
    """Records a few steps of the recipe's own `train()` at the peak rate, per tower."""

    run: Run
    stage: Stage
    share: dict[str, list[float]] = field(default_factory=dict)
    """For each tower and step, |change of the weights| / |initial weights|, frozen weights included."""
    training: list[bool] = field(default_factory=list)
    """Whether any module of the encoder was in train mode in a training forward pass."""


def watched(proof: Proof) -> Watched:
    """Rehearse once for several gates."""

    def rehearse() -> Watched:
        run, stage = proof.build(
            Plan(steps=STEPS, batch_size=max(BATCH, 4 * proof.accelerator.num_processes), peak=True)
        )
        found, mine = Watched(run, stage), {t: _of(stage.parameters(), t) for t in TOWERS}
        before = {t: _flat(ps) for t, ps in mine.items() if ps}
        every = dict(stage.model.named_parameters())
        # adapters are small; the weights that they are added to are not
        size = {t: _flat(_of(every, t)).norm() for t in before}
        # Qwen's projector is inside the encoder module but does not belong to it; modules without weights there share the mode of both.
        projector, encoder = {*stage.model.projector.modules()}, [*stage.model.encoder.modules()]
        if not projector.isdisjoint(encoder):
            encoder = [m for m in encoder if projector.isdisjoint(m.modules()) and [*m.parameters()]]

        def look(*_) -> None:
            if torch.is_grad_enabled():
                found.training.append(any(m.training for m in encoder))

        def compare(*_) -> None:
            for tower, old in before.items():
                new = _flat(mine[tower])
                found.share.setdefault(tower, []).append(((new - old).norm() / size[tower].clamp_min(1e-12)).item())
                before[tower] = new

        hooks = [stage.model.encoder.register_forward_pre_hook(look)]
        hooks += [o.register_step_post_hook(compare) for o in stage.optimizers.values()]
        try:
            proof.train(proof.cfg, run, stage)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    return proof.once("vlm towers", rehearse)


def _of(parameters: dict[str, nn.Parameter], tower: str) -> list[nn.Parameter]:
    return [p for n, p in parameters.items() if n.split(".")[0] == tower]


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in parameters]).clone()


def towers_gate(learn: tuple[str, ...]) -> Gate:
    """Checks that exactly the stage's towers train."""

    @gate(
        "towers",
        rows="X1",
        title="only the parts that this stage trains learn",
        reads="model optimizers train",
    )
    def towers(proof: Proof) -> Finding:
        found = watched(proof)
        counts = {t: (sum(p.numel() for p in _of(found.stage.parameters(), t)),
                      sum(p.numel() for p in _of(dict(found.stage.model.named_parameters()), t))) for t in TOWERS}  # fmt: skip
        wrong = [f"the {t} trains {n:,} of its {total:,} parameters and should be frozen" for t, (n, total) in counts.items()
                 if n and t not in learn]  # fmt: skip
        wrong += [
            f"the {t} should learn and trains nothing of its {counts[t][1]:,} parameters"
            for t in learn
            if not counts[t][0]
        ]
        if 0 < counts["projector"][0] < counts["projector"][1]:
            wrong.append("a part of the projector is frozen: {} of {} parameters train".format(*counts["projector"]))
        if any(found.training) and "encoder" not in learn:
            wrong.append("the encoder learns nothing and is not in eval mode: its dropout and statistics move")
        shown = ", ".join(f"{t} {n:,} of {total:,}" for t, (n, total) in counts.items())
        return Finding(
            not wrong, "; ".join([*wrong, shown] if wrong else [shown]),
            f"{' and '.join(learn)} {'learn' if len(learn) > 1 else 'learns'}, everything else frozen and in eval mode",
            "requires_grad set on the parent of several towers, or by a list of names that misses one\n"
            "the optimiser was built before the towers were frozen\nmodel.train() on the whole model in the loop",
            evidence={"trained": {t: n for t, (n, _) in counts.items()}},
        )  # fmt: skip

    return towers


@gate(
    "rates",
    rows="X3",
    title="each part has its own learning rate, none too high",
    reads="model optimizers expect train",
)
def rates(proof: Proof) -> Finding:
    """Reads the optimiser's groups, and how far a step at the peak rate moves each tower's weights."""
    found = watched(proof)
    names = {id(p): n.split(".")[0] for n, p in found.stage.model.named_parameters()}
    groups = [g for o in found.stage.optimizers.values() for g in o.param_groups if g["params"]]
    table = [(names[id(g["params"][0])], g.get("name", ""), float(g.get("peak_lr", g["lr"])), sum(p.numel() for p in g["params"]))
             for g in groups]  # fmt: skip
    mixed = [g.get("name", "") for g in groups if len({names[id(p)] for p in g["params"]}) > 1]
    share = {t: max(moved) for t, moved in found.share.items()}
    wrong = [f"group '{name}' holds several towers" for name in mixed]
    peaks = {t: {rate for tower, _, rate, _ in table if tower == t} for t in share}
    if len(share) > 1 and len(set().union(*peaks.values())) == 1:
        wrong.append(f"one rate, {table[0][2]:g}, for {' and '.join(share)}: one was trained before, the other was not")
    wrong += [f"a step moves the {t} by {s:.1%} of its weights" for t, s in share.items() if s > FASTEST]
    wrong += [f"a step moves the {t} by {s:.1e} of its weights: nothing" for t, s in share.items() if s < SLOWEST]
    shown = ", ".join(f"{name} {rate:g} ({n:,})" for _, name, rate, n in table)
    shown += "; a step moves " + ", ".join(f"{t} {s:.2%}" for t, s in share.items())
    return Finding(
        not wrong, "; ".join([*wrong, shown] if wrong else [shown]),
        f"a rate for each tower that learns, a step that moves none by more than {FASTEST:.0%} of its weights",
        "one optimiser group over all towers\na rate for a new projector used on a language model that was trained before\n"
        "the rate of LoRA adapters used on full weights",
        evidence={"groups": [{"tower": t, "group": n, "peak_lr": r, "parameters": k} for t, n, r, k in table], "moved": share},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ what is handed on
@gate(
    "aligned",
    rows="X2",
    title="this stage starts from a trained projector",
    reads="data model loss",
)
def aligned(proof: Proof) -> Finding:
    """Before the first step of this stage, the right answers must be likelier with a sample's own image than with another's: on validation
    samples if the previous stage was trained, else on the eight it was rehearsed with. It uses the loss per sample, which shows what a
    projector has learnt long before whole answers are right."""
    run, stage = proof.build(Plan(steps=1))
    if proof.follows == "none":
        raise Skip("no stage before this one")
    name = "val" if proof.follows == "trained" else "train"
    data, most = stage.data[name], HELD_OUT if name == "val" else OVERFIT_SAMPLES
    indices = pick(data, min(most, len(data)), proof.cfg.run.seed)
    n = len(indices)
    own = _nats(run, stage, View(data, indices))
    shifts = sorted({1 + k * (n - 1) // OTHERS for k in range(OTHERS)} - {n}) if n > 1 else []
    if not shifts:
        raise Skip("one sample: there is no other's picture")
    others = torch.stack(
        [_nats(run, stage, View(data, indices, swap=[(i + k) % n for i in range(n)])) for k in shifts]
    ).mean(0)
    gain = others - own
    spread = (gain.std() / n**0.5).item()
    mean, needed = gain.mean().item(), max(ERRORS * spread, LEAST * own.mean().item())
    return Finding(
        mean > needed, f"the answers cost {own.mean():.3f} nats a token before the first step, {mean:+.3f} (+- {spread:.3f}) with "
        f"another's picture, on {n} samples",
        f"more with another's picture than with their own, by over {needed:.3f}",
        "the stage before was skipped, or ended before its projector learnt anything (--align.epochs)\n"
        "its projector was not loaded here: other names under strict=False, or a new one made afterwards\n"
        "it was trained for another encoder or language model",
        evidence={"own": own.mean().item(), "gain": mean, "needed": needed},
    )  # fmt: skip


def _nats(run: Run, stage: Stage, view: View) -> Tensor:
    """Return the loss per token of each sample's answers in nats, (N,)."""
    found = []
    with evaluating(stage.eval_model), run.autocast():
        for start in range(0, len(view), BATCH):
            batch = fetch(view, list(range(start, min(start + BATCH, len(view)))), None, run.device)
            lost, tokens = questions.surprise(stage.eval_model(batch), batch["labels"]).double().unbind(1)
            found.append((lost / tokens).cpu())
    return torch.cat(found)


# ------------------------------------------------------------------------------------------------------- places, answers
def _through(stage: Stage, run: Run, batch: dict, module: nn.Module) -> Tensor:
    """Return the gradient of the loss with respect to a module's output, (.., d)."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple, out: Tensor) -> None:
        kept.append(out)
        out.retain_grad()

    hook = module.register_forward_hook(keep)
    try:
        with evaluating(stage.model), torch.enable_grad(), run.autocast():
            sum(stage.loss(stage.model, batch).values()).backward()
    finally:
        hook.remove()
        stage.model.zero_grad()
    return kept[0].grad


@gate(
    "places",
    rows="X4",
    title="every image feature has its position, every question its answer",
    reads="data model loss",
)
def places(proof: Proof) -> Finding:
    """Counts image places in every row of the data set and in collated batches, and compares them with the features that the loss really
    uses."""
    run, stage, wrong, cut = *proof.build(Plan(steps=1)), [], []
    data = stage.data["train"]
    grad = _through(stage, run, fetch(data, [0], None, run.device), stage.model.projector)
    each = grad.flatten(0, -2).shape[0] // data.pictures(0)  # per image, from the model
    looked = 0
    for name, data in stage.data.items():
        some = range(len(data)) if len(data) <= questions.EVERY else [*dict.fromkeys(data.representative(LOOKED_AT))]
        looked += len(some)
        picked = pick(data, min(16, len(data)), proof.cfg.run.seed)
        needed = {i: data.places(i) if data.varied else each * data.pictures(i) for i in {*some, *picked}}
        odd = [i for i in some if int((data.peek(i, "ids") == rows.IMAGE).sum()) != needed[i]]
        dumb = [i for i in some if _answers(data.peek(i, "labels")) != len(data.source.asked(data.kept[i]))]
        batch = fetch(data, picked, None, run.device)
        found = (batch["ids"] == rows.IMAGE).sum(1).tolist()
        short = sum(n != needed[i] for n, i in zip(found, picked, strict=True))
        mute = sum(
            _answers(row) != int((kinds >= 0).sum()) for row, kinds in zip(batch["labels"], batch["kind"], strict=True)
        )
        for many, what in (
            (odd, f"without {needed[(odd or picked)[0]]} places"),
            (dumb, "with a question whose answer is cut"),
        ):
            if many:
                wrong.append(f"{name}: {len(many):,} of {len(some):,} samples {what}, e.g. sample {many[0]}")
        if short or mute:
            wrong.append(
                f"{name}: {short} of {len(found)} collated rows without a place for each feature, {mute} unanswered"
            )
        cut += [f"{name}: {note}" for note in data.notes.values() if "left out" in note]
    if not wrong:
        grad = _through(stage, run, batch, stage.model.projector).flatten(0, -2)
        read = int((grad.abs().amax(-1) > 0).sum())
        if read != sum(found):
            wrong.append(f"the loss reads {read} of {sum(found)} features of {len(found)} samples")
    told = f"a place for each feature ({each} of the first picture) in all {looked:,} samples"
    return Finding(
        not wrong, "; ".join(wrong) or "; ".join([told, *cut]),
        "as many places as features in every row, an answer to every question",
        "a row was cut to a length: leave long samples out whole, and count them\n"
        "rows are cut in collate(), and the features with them\nthe encoder gives another number of features than rows have",
        evidence={"features": each}, batch=batch if wrong else None,
    )  # fmt: skip


@gate(
    "per-place",
    rows="X4",
    title="what enters a place of the row comes from one place of the picture",
    reads="data model",
    explains=True,
)
def per_place(proof: Proof) -> Finding:
    """One feature of the encoder is changed: of the embeddings that the language model reads, one must move. A reshape where a
    transposition is meant keeps every shape, and mixes places."""
    run, stage = proof.look()
    model, data = stage.model, stage.data["train"]
    if not hasattr(model, "embedded"):
        raise Skip("the model does not show its embeddings (a whole model of the hub)")
    batch, out, change = fetch(data, [0], None, run.device), [], [None]

    def altered(_module: nn.Module, _args: tuple, features: Tensor) -> Tensor:
        out[:] = [features.shape]
        if change[0] is not None:
            features = features.clone()
            features[0, change[0]] = features[0, change[0]] + 3 * features.std() * torch.randn(
                features.shape[-1:], generator=draws
            ).to(features)
        return features

    def read(place: int | None) -> Tensor:
        change[0] = place
        with evaluating(model), torch.no_grad(), run.autocast():
            return model.embedded(batch)[0].float()

    draws, hook = torch.Generator().manual_seed(0), model.encoder.register_forward_hook(altered)
    try:
        own = read(None)
        places = (batch["ids"][0] == rows.IMAGE).nonzero().flatten().tolist()
        n = out[0][1] if len(out[0]) == 3 else 0
        if n < 2 or len(places) < n:
            raise Skip("features are not a row of places (B, n, width), or the projector joins several")
        moved = [(read(k) - own).norm(dim=-1) for k in (0, n // 2, n - 1)]
    finally:
        hook.remove()
    hit = [[i for i, p in enumerate(places) if m[p] > 1e-3 * m.max()] for m in moved]
    wrong = [
        f"feature {k} of {n} moves {len(h)} embeddings"
        for k, h in zip((0, n // 2, n - 1), hit, strict=True)
        if len(h) != 1
    ]
    return Finding(
        not wrong, "; ".join(wrong) or f"features 0, {n // 2} and {n - 1} of {n} each move one embedding", "one each",
        "features are transposed and reshaped: view() or reshape() where transpose() or permute() is meant\n"
        "a softmax, a norm or a mean over places, or over the pictures of a batch\n"
        "on purpose (a resampler that reads all places): --gates.waive per-place --gates.because \"...\"",
        evidence={"moved": hit}, batch=batch if wrong else None,
    )  # fmt: skip


def _answers(labels: Tensor) -> int:
    """Return the number of scored answers in a row (T,)."""
    return int(rows.numbered(labels[1:]).max())  # the first token of a row has none before it


@gate("answers", rows="X4 L2", title="the loss scores the answers, all of them and nothing else", reads="data loss")
def answers_alone(proof: Proof) -> Finding:
    """Reads scored tokens from the loss's gradient with respect to the logits: where it is not zero, the next token is scored. Those tokens
    must be the answers with their ends, as the data set has them."""
    run, stage = proof.build(Plan(steps=1))
    data = stage.data["train"]
    indices = pick(data, min(8, len(data)), proof.cfg.run.seed)
    batch = fetch(data, indices, None, run.device)
    grad = _through(stage, run, batch, stage.model)
    scored = grad.abs().amax(-1) > 0  # (B, T)
    wrong, words, shown = [], data.tokenizer, ""
    for row, index in enumerate(indices):
        ids = batch["ids"][row].tolist()
        found = [ids[i + 1] if i + 1 < len(ids) else -1 for i in scored[row].nonzero().flatten().tolist()]
        needed = "".join(
            words.decode(words.encode(a, add_special_tokens=False), **EXACT) for a in data.wanted(data.kept[index])
        )
        said = words.decode([t for t in found if t >= 0], **EXACT) or "nothing"
        shown = shown or f"sample {index}: {said}"
        if rows.IMAGE in found or "".join(said.split()) != "".join(needed.split()):
            image = sum(t == rows.IMAGE for t in found)
            wrong.append(f"sample {index}: scored are {len(found)} tokens, {image} of them the picture's places"
                         f" ({said[:60]}); its answers are {needed[:60]}")  # fmt: skip
    return Finding(
        not wrong, wrong[0] if wrong else shown, "the tokens of every answer and its end",
        "labels = ids with only the padding masked: mask the picture's places and the questions, too\n"
        "the row was cut, or labels are shifted twice\nthe end of an answer is masked with the padding",
        evidence={"wrong": wrong}, batch=batch if wrong else None,
    )  # fmt: skip


@gate("template", rows="L8", title="the language model's chat template is applied exactly once", reads="data")
def template(proof: Proof) -> Finding:
    """Compares the ids of a few rows, without image places, with the tokenizer's own rendering of the same turns; scored text is marked."""
    _, stage = proof.look()
    data = stage.data["train"]
    if not data.tokenizer.chat_template or data.varied:
        raise Skip(
            "rows are the processor's own" if data.varied else "no chat template: questions and answers in lines"
        )
    chat, wrong, shown = turns.chat(data.tokenizer), [], ""
    for i in pick(data, min(8, len(data)), proof.cfg.run.seed):
        row, k = {key: data.peek(i, key) for key in ("ids", "labels", "segment")}, data.kept[i]
        asked, system = data.source.asked(k), data.source.system(k) if data.talks else ""
        alone = [(system, asked)] if data.talks else [("", [turns.placed(one)]) for one in asked]
        for q, (before, some) in enumerate(alone, 1):
            mine = (row["segment"] == 0) | (row["segment"] == q)
            text = "".join(piece for piece, _ in turns.parts(chat, before, some))
            due = [t for piece in text.split(rows.PLACE) for t in chat.ids(piece)]
            got = [t for t in row["ids"][mine].tolist() if t != rows.IMAGE]
            same = data.tokenizer.decode(got, **EXACT) == data.tokenizer.decode(due, **EXACT)
            if not same:  # some tokenizers merge characters across turns: then the texts must agree
                at = next(
                    (n for n, (a, b) in enumerate(zip(got, due, strict=False)) if a != b), min(len(got), len(due))
                )
                here, there = (data.tokenizer.decode(x[max(0, at - 4) : at + 8], **EXACT) for x in (got, due))
                wrong.append(f"sample {i} differs from token {at} on: {here!r}, the template gives {there!r}")
            shown = shown or _marked(data.tokenizer, row["ids"][mine].tolist(), row["labels"][mine].tolist())
    return Finding(
        not wrong, "; ".join(wrong[:2]) or f"rows as the template renders them, what is scored in brackets: {shown!r}",
        "the tokenizer's own apply_chat_template of the same turns, with the pictures in their places",
        "questions and answers joined by hand, without the roles that the model was trained on\n"
        "special tokens added to a text that has them (a second BOS), or the template applied twice",
        evidence={"example": shown},
    )  # fmt: skip


def _marked(tokenizer: Any, ids: list[int], labels: list[int]) -> str:
    """Return a row as text: <image> for image features, scored text in [[double brackets]]."""
    text, inside = "", False
    for n, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if (label != rows.IGNORE) != inside:
            text += "]]" if inside else "[["
            inside = not inside
        if token != rows.IMAGE:
            text += tokenizer.decode([token], **EXACT)
        elif not n or ids[n - 1] != rows.IMAGE:
            text += rows.PLACE
    return text + "]]" * inside


@gate(
    "prompts",
    rows="L8 L1",
    title="answers are generated behind the very text that they are trained behind",
    reads="data model evaluate",
)
def prompts(proof: Proof) -> Finding:
    """Compares the ids that `evaluate` generates from with each question's training row up to its answer."""
    run, stage = proof.look()
    data, wrong, due = stage.data["train"], [], []
    indices = pick(data, min(3, len(data)), proof.cfg.run.seed)
    batch = fetch(data, indices, None, torch.device("cpu"))
    net = stage.model.net[0] if data.varied else stage.model.language
    with heard(net) as ids:
        run.measure(stage, View(data, indices), probe=True)
    if not any(one.shape[1] == 1 for one in ids):
        raise Skip("the evaluation generates nothing")
    for b, i in enumerate(indices):
        number = rows.numbered(batch["labels"][b])
        for q in range(1, int(number.max()) + 1):
            before = questions.prompt(batch, b, q, number)
            if (batch["ids"][b, ~before] == rows.IMAGE).any():
                continue  # later images: the rows differ in the number of image places only
            due.append((i, batch["ids"][b, before].tolist()))
    drop = {0, rows.IMAGE, *([stage.model.image] if data.varied else [])}  # padding and image places
    ends = [[t for t in row.tolist() if t not in drop] for one in ids for row in one]
    for i, text in due:
        plain = [t for t in text if t not in drop]
        if not any(row[-len(plain) :] == plain for row in ends):
            wrong.append(
                f"sample {i} is trained behind {data.tokenizer.decode(plain[-24:], **EXACT)!r}; no prompt of the evaluation ends so"
            )
    return Finding(
        not wrong, wrong[0] if wrong else f"{len(due)} prompts end alike, token for token",
        "every prompt that is generated from ends as its training row does before the answer",
        "no generation prompt (the assistant's header) in one of them\n"
        "prompts padded on the right for generation: the answer then continues the padding\n"
        "a template or BOS that one of the two paths applies and the other does not",
        evidence={"prompts": len(due)},
    )  # fmt: skip


@gate("spoken", rows="C12 X5", title="accuracy is measured on the model's own generated answers")
def spoken(proof: Proof) -> Finding:
    """Evaluation scores each token after the right tokens before it. This gate gives the model that memorised eight samples their questions
    alone, generates with transformers' `generate`, and compares the verdicts."""
    run, stage, _ = overfitted(proof)
    data, said = stage.data["train"], []
    with evaluating(stage.model), torch.no_grad(), run.autocast():
        for i in pick(data, min(OVERFIT_SAMPLES, len(data)), proof.cfg.run.seed):
            batch = fetch(data, [i], None, run.device)
            right, number = rows.right(stage.model(batch), batch)[0], rows.numbered(batch["labels"][0])
            for q in range(1, int(number.max()) + 1):
                before = questions.prompt(batch, 0, q, number)
                if (batch["ids"][0, ~before] == rows.IMAGE).any():
                    continue  # an image of a later turn would be among the images now
                answer = batch["labels"][0, number == q]
                alone = {**batch, **{k: batch[k][:, before] for k in rows.FILL}}
                told = stage.model.speak(alone, len(answer), data.ends)[0]
                said.append((bool(right[q - 1]), answer.tolist() == told.tolist(), data.tokenizer.decode(told)))
    if not said:
        raise Skip("every answer has pictures behind it")
    differ = [s for s in said if s[0] != s[1]]
    return Finding(
        len(differ) <= (0 if run.precision == "fp32" else len(said) // 8),
        f"{len(said)} answers: {sum(s[0] for s in said)} count as right, {sum(s[1] for s in said)} are said when asked"
        + (f"; e.g. {differ[0][2]!r} is said" if differ else ""),
        "the same verdicts" + " but for one in eight in half precision" * (run.precision != "fp32"),
        "a token sees those behind it (a mask that is not causal), or the answer stands in its question\n"
        "positions or a start token that `generate` does not use", evidence={"said": said},
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- from the picture
@gate("prior", rows="X5", title="questions alone do not predict the answers", reads="data")
def prior(proof: Proof) -> Finding:
    """Scores the most common training answer to each question on the validation images."""
    _, stage = proof.build(Plan(steps=1))
    guess = questions.majority(stage.data["train"].source)
    share = questions.blindly(stage.data["val"].source, guess)
    kinds = ", ".join(f"{k}: {g}" for k, g in list(zip(stage.data["train"].source.kinds, guess, strict=True))[:6])
    return Finding(
        share <= PRIOR, f"the commonest answers ({kinds}) are right in {share:.1%}", f"at most {PRIOR:.0%}",
        "the questions were not balanced: ask each about pictures with different answers, best about counterfactual pairs",
        evidence={"share": share},
    )  # fmt: skip


@gate("pairs", rows="X5", title="the model learns counterfactual pairs, and its answers depend on the image")
def pairs(proof: Proof) -> Finding:
    """Trains on four pairs, each one scene with and without a change, with the recipe's own `train()`. The loss can only close through the
    image. Then each sample gets its counterfactual image: no answer that differs within a pair may stay."""
    _, probe = proof.build(Plan(steps=1))
    data = probe.data["train"]
    indices = _some_pairs(data)
    if not indices:
        raise Skip("no counterfactual pairs in the data")
    found: dict = {"curve": []}

    def closed(stage: Stage, step: int) -> bool:
        if step % 10:
            return False
        found["curve"].append((step, run.measure(stage, View(data, indices)).get("pairs", 0.0)))
        return found["curve"][-1][1] == 1.0

    steps = 2 * probe.expect.overfit_steps
    run, stage = proof.build(
        Plan(steps=steps, samples=indices, fixed=True, peak=True, batch_size=len(indices), watch=closed)
    )
    proof.train(proof.cfg, run, stage)
    partner = [i ^ 1 for i in range(len(indices))]
    own, swapped = (_paired(run, stage, View(data, indices, swap=swap)) for swap in (None, partner))
    done = found["curve"][-1][0]
    return Finding(
        own == 1.0 and swapped <= 0.25, f"{PAIRS} pairs in {done} steps: {own:.0%} of the answers that tell them apart are right, "
        f"{swapped:.0%} with each other's picture", "100%, and at most 25%: the answer follows the picture",
        "the picture does not reach the language model: a projector that is frozen or not loaded, places that are cut\n"
        "all features of a picture are alike (pooled, or an encoder that sees nothing)\n"
        "the answer reaches the model by another way", evidence=found,
    )  # fmt: skip


def _some_pairs(data: questions.Questions) -> list[int]:
    """Return the positions of the first pairs, both members of each next to each other."""
    where: dict[int, list[int]] = {}
    for i in range(len(data)):
        for one in data.source.asked(data.kept[i]):
            if one.pair >= 0:
                where.setdefault(one.pair, []).append(i)
        if sum(len(two) == 2 for two in where.values()) == PAIRS:
            break
    return [i for two in where.values() if len(two) == 2 for i in two]


def _paired(run: Run, stage: Stage, view: View) -> float:
    """Return the accuracy on the questions that differ within pairs."""
    batch = fetch(view, list(range(len(view))), None, run.device)
    with evaluating(stage.eval_model), run.autocast():
        found = questions.verdicts(stage.eval_model(batch), batch)
    return found[found[:, 2] >= 0, 0].double().mean().item()
