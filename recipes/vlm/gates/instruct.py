"""Gates of vision-language models: which parts learn in which stage and at what rate (X1, X3), the language model's inputs (X2),
a position for every feature and scores for answers only (X4), answers that depend on the image (X5).

They require: a model with three parts `encoder`, `projector` and `language`; data of questions.Questions.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, Proof, fetch, pick
from trainworthy.core.gates.learning import OVERFIT_SAMPLES, overfitted, skill
from trainworthy.core.loop.run import Plan, Run, evaluating
from trainworthy.core.recipe.stage import Stage, View
from trainworthy.recipes.vlm.data import questions, rows

TOWERS = ("encoder", "projector", "language")
STEPS, BATCH = 3, 16
FASTEST, SLOWEST = 0.05, 1e-6  # of a tower's weights in one step: more tears down what it knew, less is no learning
PRIOR = 0.8  # who knows the questions alone must be wrong more often than in one of five
PAIRS = 4
HELD_OUT = 200
EXACT = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}  # of a decoder


LEARN = {
    "align": ("projector",),
    "instruct": ("projector", "language"),
    "unfreeze": ("encoder", "projector", "language"),
}
"""Towers that train in each stage: said here, not taken from the rates that a fork may have changed."""


def gates(stage: str, towers: tuple[str, ...], *, first: bool) -> list[Gate]:
    """Those of a stage by its name, of one that a fork has named by the `towers` it trains. `first`: none stands before it."""
    learn = LEARN.get(stage, towers)
    found = [towers_gate(learn), rates, places, answers_alone, spoken]
    found = [*found, prior] if first else [aligned, *found]
    return found if learn == ("projector",) else [*found, pairs]


# ---------------------------------------------------------------------------------------------------------------- towers
@dataclass
class Watched:
    """A few steps of the recipe's own `train()` at the peak rate, tower by tower."""

    run: Run
    stage: Stage
    share: dict[str, list[float]] = field(default_factory=dict)
    """Of each tower and step, |change of its weights| / |its weights as they came|, frozen ones included."""
    training: list[bool] = field(default_factory=list)
    """Was any module of the encoder in train mode at a forward that learns?"""


def watched(proof: Proof) -> Watched:
    """Rehearsed once for several gates."""

    def rehearse() -> Watched:
        run, stage = proof.build(
            Plan(steps=STEPS, batch_size=max(BATCH, 4 * proof.accelerator.num_processes), peak=True)
        )
        found, mine = Watched(run, stage), {t: _of(stage.parameters(), t) for t in TOWERS}
        before = {t: _flat(ps) for t, ps in mine.items() if ps}
        every = dict(stage.model.named_parameters())
        size = {t: _flat(_of(every, t)).norm() for t in before}  # adapters are small; what they are added to is not
        # Qwen's projector lies within the encoder and is none of it; what has no weights there is in the mode of what holds both.
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
    """Does this stage train those towers and no other?"""

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
    """The table of groups, and how far a step at the peak rate moves each tower's weights."""
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
    reads="data model evaluate metric",
)
def aligned(proof: Proof) -> Finding:
    """Before the first step here, answers must follow the picture: on held-out samples where the stage before has run, on the eight
    it was rehearsed with where it has not."""
    run, stage = proof.build(Plan(steps=1))
    if proof.follows == "none":
        raise Skip("no stage before this one")
    name = "val" if proof.follows == "trained" else "train"
    data, n = stage.data[name], HELD_OUT if name == "val" else OVERFIT_SAMPLES
    found = skill(run, stage, data, pick(data, min(n, len(data)), proof.cfg.run.seed), proof.cfg.run.seed)
    return Finding(
        found.clear, f"{stage.metric.name} before the first step {found} on {min(n, len(data))} samples",
        f"better with its own picture than with another's by more than {found.needed:.3f}",
        "the stage before was skipped, or ended before its projector learnt anything (--align.epochs)\n"
        "its projector was not loaded here: other names under strict=False, or a new one made afterwards\n"
        "it was trained for another encoder or language model",
        evidence={"own": found.own, "others": found.others, "needed": found.needed},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- places, answers
def _through(stage: Stage, run: Run, batch: dict, module: nn.Module) -> Tensor:
    """(.., d): gradient of the loss with respect to what a module gives out."""
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
    """Places counted in every row of the data set and of collated batches, and the features that the loss really reads."""
    run, stage, wrong, cut = *proof.build(Plan(steps=1)), [], []
    data = stage.data["train"]
    grad = _through(stage, run, fetch(data, [0], None, run.device), stage.model.projector)
    each = grad.flatten(0, -2).shape[0] // data.pictures(0)  # of a picture, by the model
    for name, data in stage.data.items():
        needed = [data.places(i) if data.varied else each * data.pictures(i) for i in range(len(data))]
        odd = [i for i in range(len(data)) if int((data.peek(i, "ids") == rows.IMAGE).sum()) != needed[i]]
        dumb = [i for i in range(len(data)) if _answers(data.peek(i, "labels")) != len(data.source.asked(data.kept[i]))]
        picked = pick(data, min(16, len(data)), proof.cfg.run.seed)
        batch = fetch(data, picked, None, run.device)
        found = (batch["ids"] == rows.IMAGE).sum(1).tolist()
        short = sum(n != needed[i] for n, i in zip(found, picked, strict=True))
        mute = sum(
            _answers(row) != int((kinds >= 0).sum()) for row, kinds in zip(batch["labels"], batch["kind"], strict=True)
        )
        for many, what in (
            (odd, f"without {needed[(odd or [0])[0]]} places"),
            (dumb, "with a question whose answer is cut"),
        ):
            if many:
                wrong.append(f"{name}: {len(many):,} of {len(data):,} samples {what}, e.g. sample {many[0]}")
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
    told = (
        f"a place for each feature ({each} of the first picture) in all {sum(map(len, stage.data.values())):,} samples"
    )
    return Finding(
        not wrong, "; ".join(wrong) or "; ".join([told, *cut]),
        "as many places as features in every row, an answer to every question",
        "a row was cut to a length: leave long samples out whole, and count them\n"
        "rows are cut in collate(), and the features with them\nthe encoder gives another number of features than rows have",
        evidence={"features": each}, batch=batch if wrong else None,
    )  # fmt: skip


def _answers(labels: Tensor) -> int:
    """How many answers of a row (T,) are scored."""
    return int(rows.numbered(labels[1:]).max())  # what is first in a row has nothing before it to be told from


@gate("answers", rows="X4 L2", title="the loss scores the answers, all of them and nothing else", reads="data loss")
def answers_alone(proof: Proof) -> Finding:
    """Read off the loss itself: where its gradient with respect to the logits is not zero, the next token is scored. Those tokens
    must be the answers with their ends, as the data set asks them."""
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
        asked = data.source.asked(data.kept[index])
        needed = "".join(words.decode(rows.tokens(words, a.answer), **EXACT) + data.end for a in asked)
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


@gate("spoken", rows="C12 X5", title="accuracy is measured on the model's own generated answers")
def spoken(proof: Proof) -> Finding:
    """Evaluation judges every token behind the right ones before it. Here the model that has learnt eight samples is given their
    questions alone, and `generate` of transformers says what it answers: each verdict must be the same."""
    run, stage, _ = overfitted(proof)
    data, said = stage.data["train"], []
    with evaluating(stage.model), torch.no_grad(), run.autocast():
        for i in pick(data, min(OVERFIT_SAMPLES, len(data)), proof.cfg.run.seed):
            batch = fetch(data, [i], None, run.device)
            right, number = rows.right(stage.model(batch), batch)[0], rows.numbered(batch["labels"][0])
            for q in range(1, int(number.max()) + 1):
                first = int((number == q).nonzero()[0])
                before = (torch.arange(len(number), device=number.device) < first) & (
                    (batch["segment"][0] == 0) | (batch["segment"][0] == batch["segment"][0, first]))  # fmt: skip
                if (batch["ids"][0, ~before] == rows.IMAGE).any():
                    continue  # a picture that is shown later would be among the pictures now
                answer = batch["labels"][0, number == q]
                heard = stage.model.speak({**batch, **{k: batch[k][:, before] for k in rows.FILL}}, len(answer))
                said.append((bool(right[q - 1]), answer.tolist() == heard.tolist(), data.tokenizer.decode(heard)))
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
    """Who says the commonest answer to each question of the training set, asked about the held-out pictures."""
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
    """Four pairs, each one scene with and without a change, learnt through the recipe's own `train()`: that can only close through
    the picture. Then each is shown its counterfactual instead: no answer of a pair may stay."""
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
    """Positions of the first pairs, both of each side by side."""
    where: dict[int, list[int]] = {}
    for i in range(len(data)):
        for one in data.source.asked(data.kept[i]):
            if one.pair >= 0:
                where.setdefault(one.pair, []).append(i)
        if sum(len(two) == 2 for two in where.values()) == PAIRS:
            break
    return [i for two in where.values() if len(two) == 2 for i in two]


def _paired(run: Run, stage: Stage, view: View) -> float:
    """Share of right answers among the questions that tell pairs apart."""
    batch = fetch(view, list(range(len(view))), None, run.device)
    with evaluating(stage.eval_model), run.autocast():
        found = questions.verdicts(stage.eval_model(batch), batch)
    return found[found[:, 2] >= 0, 0].double().mean().item()
