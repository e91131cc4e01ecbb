"""Gate on a preference loss: it equals the declared one, relative to the initial weights (L9)."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.adapters import hosted
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding
from trainworthy.core.data.texts import cut_at
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.learning import overfitted
from trainworthy.core.gates.gate import Gate, GateContext, Skip, fetch, pick
from trainworthy.core.loop.run import evaluating
from trainworthy.core.loop.update import training_modes
from trainworthy.core.monitoring.monitors import monitor
from trainworthy.core.recipe.stage import Data, Metric, Probe, Stage, View
from trainworthy.recipes.llm.data.pairs import Chat, plain_tokens
from trainworthy.recipes.llm.evaluation.calibration import preferred
from trainworthy.recipes.llm.gates import marks, turned_pairs
from trainworthy.recipes.llm.gates.chat import reference

PAIRS = 2
# nats per token that chosen answers may lose; healthy runs lose less and gain more elsewhere (see the page)
SUNK = 1.0
# share of pairs whose preferred answer has more (or fewer) tokens from which length alone solves the task
ONE_SIDED = 0.9


def _won(over: Tensor, beta: float) -> Tensor:
    """Return the implicit reward of the chosen answer minus that of the rejected one, (B,)."""
    return beta * (over[:, 0] - over[:, 1])


def _robust(over: Tensor, sizes: Tensor, beta: float, flipped: float) -> Tensor:
    kept, turned = F.softplus(-_won(over, beta)), F.softplus(_won(over, beta))
    return ((1 - flipped) * kept - flipped * turned) / (1 - 2 * flipped)


def _exo(over: Tensor, sizes: Tensor, beta: float, flipped: float) -> Tensor:
    log_probs, due = (beta * over).log_softmax(1), over.new_tensor([1 - flipped, flipped]).log()
    return (log_probs.exp() * (log_probs - due)).sum(1)


def _discopop(over: Tensor, sizes: Tensor, beta: float, flipped: float) -> Tensor:
    won, share = _won(over, beta), (_won(over, beta) / 0.05).sigmoid()
    return (1 - share) * F.softplus(-won) + share * (-won).exp()


LOSSES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    # (log-probability ratios to the reference (B, 2) of chosen and rejected in nats, tokens (B, 2), beta, flipped) -> loss (B,)
    "sigmoid": lambda over, sizes, beta, _: F.softplus(-_won(over, beta)),
    "sigmoid_norm": lambda over, sizes, beta, _: F.softplus(-_won(over / sizes, beta)),
    "hinge": lambda over, sizes, beta, _: F.relu(1 - _won(over, beta)),
    "ipo": lambda over, sizes, beta, _: (_won(over / sizes, 1.0) - 1 / (2 * beta)) ** 2,
    "robust": _robust,
    "exo_pair": _exo,
    "nca_pair": lambda over, sizes, beta, _: F.softplus(-beta * over[:, 0]) + F.softplus(beta * over).mean(1),
    "bco_pair": lambda over, sizes, beta, _: F.softplus(-beta * over[:, 0]) + F.softplus(beta * over[:, 1]),
    "sppo_hard": lambda over, sizes, beta, _: ((over - over.new_tensor([0.5, -0.5]) / beta) ** 2).sum(1),
    "apo_zero": lambda over, sizes, beta, _: (-beta * over[:, 0]).sigmoid() + (beta * over[:, 1]).sigmoid(),
    "apo_down": lambda over, sizes, beta, _: (beta * over[:, 0]).sigmoid() + (-_won(over, beta)).sigmoid(),
    "discopop": _discopop,
}
"""DPO (Rafailov 2023, equation 7), the same per token, SLiC (Zhao 2023), IPO (Azar 2023, equation 17, means over tokens as its
authors said to TRL), robust DPO (Chowdhury 2024), EXO (Ji 2024, equation 16), NCA (Chen 2024), BCO without its shift (Jung 2024),
SPPO with hard labels (Wu 2024), APO (D'Oosterlinck 2024, equations 7 and 8), DiscoPOP (Lu 2024, equation 5)."""

DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    # (log-probability ratios in nats, coefficient of alpha) -> derivative of the divergence at the ratio
    "reverse_kl": lambda over, _: over,
    "forward_kl": lambda over, _: 1 - (-over).exp(),
    "js_divergence": lambda over, _: math.log(2) - F.softplus(-over),
    "alpha_divergence": lambda over, a: ((a - 1) * over).expm1() / (a - 1) if a != 1 else over,
}
"""f-DPO (Wang 2023): what stands in the place of the log-ratios."""
OF_MARGINS = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop")
"""Losses in which TRL puts the divergence's derivative in their place."""

FLOORS = {"nca_pair": 1.5 * math.log(3) - math.log(2)}
"""Lowest loss of a pair, if not zero: NCA's minimum is at implicit odds of two. (`robust` falls without end, more slowly for small
`--label-smoothing`.)"""


def first_loss(loss: str, beta: float, flipped: float = 0.0) -> float:
    """Return the loss of a policy that equals its reference: ln 2 for DPO."""
    return LOSSES[loss](torch.zeros(1, 2), torch.ones(1, 2), beta, flipped).item()


def mixture(trainer: Any, cfg: Any) -> dict[str, float]:
    """Return the weight of each loss that TRL's trainer adds up (`loss_type` and `loss_weights`); of a single loss the name is that of the
    settings."""
    names = dict(zip(trainer.loss_types, trainer.loss_weights, strict=True))
    return names if len(names) > 1 or names.keys() - LOSSES.keys() else {cfg.loss: trainer.loss_weights[0]}


def untrained(trainer: Any, cfg: Any) -> float | None:
    """Return the loss of a policy that equals its reference; None if it also depends on the model, as that of the chosen answers and
    the weights of pairs do."""
    weights = mixture(trainer, cfg)
    if weights.keys() - LOSSES.keys() or trainer.args.use_weighting:
        return None
    return sum(weight * first_loss(name, cfg.beta, cfg.label_smoothing) for name, weight in weights.items())


def floor(trainer: Any, cfg: Any) -> float:
    """Return the lowest loss of a pair."""
    return sum(weight * FLOORS.get(name, 0.0) for name, weight in mixture(trainer, cfg).items())


def known_floor(trainer: Any) -> bool:
    """Return whether the loss falls to its floor about as fast as DPO's. A divergence that is bounded above does not."""
    args = trainer.args
    return args.f_divergence_type == "reverse_kl" and not args.use_weighting and not hosted.own_loss(trainer)


def named(weights: dict[str, float]) -> str:
    """Return a mixture as text: `sigmoid`, or `0.8 sigmoid + 0.2 bco_pair`."""
    return " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in weights.items())


def begins(loss: float | None) -> str:
    """Return what is known of the loss before training."""
    return "" if loss is None else f"; {loss:.4f} before training"


def declared(trainer: Any, cfg: Any, over: Tensor, own: Tensor, sizes: Tensor, likely: Tensor) -> float:
    """Return the mean loss of pairs by the formulas that the trainer's arguments name.

    Args:
        over: log-probability ratios (B, 2) to the reference, in nats.
        own: the policy's log-probabilities (B, 2), for a loss that trains on the chosen answers as in fine-tuning (a mean over their tokens).
        sizes: tokens of the answers (B, 2).
        likely: the weight of each answer (B, 2) if pairs are weighted by how likely they are (WPO, Zhou 2024)."""
    args, total = trainer.args, 0.0
    moved = DIVERGENCES[args.f_divergence_type](over, args.f_alpha_divergence_coef)
    for name, weight in mixture(trainer, cfg).items():
        if name == "sft":
            each = -own[:, 0].sum() / sizes[:, 0].sum()
        else:
            each = LOSSES[name](moved if name in OF_MARGINS else over, sizes, cfg.beta, cfg.label_smoothing)
        total += weight * (each * likely.prod(1) if args.use_weighting else each).mean().item()
    return total


class Answer(NamedTuple):
    """Tokens of an answer under a model."""

    log_probs: Tensor
    """(tokens,) nats."""
    likely: Tensor
    """Geometric mean of the tokens' probabilities, each relative to the sum of squares of its distribution (WPO, equation 2)."""

    def sum(self, shared: int, rest: float | None) -> Tensor:
        """Return the log-probability; tokens after the first `shared`, the length of the pair's shorter answer, count `rest` times
        (LD-DPO, Liu 2024)."""
        if rest is None:
            return self.log_probs.sum()
        return self.log_probs[:shared].sum() + rest * self.log_probs[shared:].sum()


CHOICE = "which of two answers is the preferred one?"


def metric(cfg: Any) -> Metric:
    """Return the metric that selects the best checkpoint."""
    if cfg.metric == "loss":
        best = FLOORS.get(cfg.loss, 0.0)
        return Metric("loss", "the loss on held-out pairs", first_loss(cfg.loss, cfg.beta, cfg.label_smoothing), best,
                      higher_is_better=False)  # fmt: skip
    if cfg.metric == "margin":
        return Metric("margin", "by how much is the preferred answer favoured?", 0.0, math.inf)
    return Metric(cfg.metric, CHOICE, floor=0.5, ceiling=1.0)


def probe(cfg: Any, evaluate: Callable[[nn.Module, Data], dict[str, float]]) -> Probe | None:
    """Return the gates' metric if the stage's has no known best value: the share of preferred answers."""
    return (
        Probe(Metric("accuracy", CHOICE, floor=0.5, ceiling=1.0), evaluate)
        if cfg.metric in ("loss", "margin")
        else None
    )


NO_REFERENCE = "the evaluation's margin (and its accuracy) leaves out the reference: it counts what the initial model preferred already"


def without_reference(margin: float | None, beta: float, policy: Tensor, reference: Tensor, near: float) -> str:
    """Compare an evaluation's margin with beta times the difference of log-probabilities (B, 2: chosen, rejected), with and without those of the
    reference. "" unless it is the latter alone."""
    bare, due = ((x[:, 0] - x[:, 1]).mean().item() for x in (policy, policy - reference))
    if margin is None or abs(margin - beta * bare) > near * max(1, abs(margin)) or abs(bare - due) < 0.1:
        return ""
    return f"the evaluation's margin is {margin:.4f}, that of the policy alone; against the reference it is {beta * due:.4f}"


def preference(chat: Chat, cfg: Any) -> Gate:
    title = "the loss is the declared one, with the initial weights as reference"

    def one(model: nn.Module, prompt: str, answer: str, device: torch.device) -> Answer:
        """Return an answer, computed alone, without padding, from plain logits."""
        before, after = reference(chat, prompt, answer)
        ids = torch.tensor([before + after], device=device)
        log_probs = to_double(model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1]).log_softmax(-1)
        each = log_probs.gather(-1, ids[0, len(before) :, None].cpu())[:, 0]
        return Answer(each, (each - (2 * log_probs).logsumexp(-1)).mean().exp())

    @gate("preference", rows="L9", title=title, reads="data model loss train", explains=True, compares_loss=True)
    def check(context: GateContext) -> Finding:
        """Compares the loss of two pairs, before training and after eight pairs were memorised, with the formula. Its log-probabilities come
        from each answer alone, for the policy and for the reference, which is the initial model built again."""
        _, start = context.look()
        weights, args = mixture(start.trainer, cfg), start.trainer.args
        if unknown := weights.keys() - {*LOSSES, "sft"}:
            raise Skip(f"no formula is known for the loss {', '.join(sorted(unknown))}")
        run, learnt, found = overfitted(context)
        data = View(start.data["train"], found["indices"][:PAIRS])
        rows = [data.get(i, None) for i in range(len(data))]
        references = [[(r["prompt"], r[k]) for k in ("chosen", "rejected")] for r in rows]

        def read(model: nn.Module, rest: float | None = args.ld_alpha) -> tuple[Tensor, Tensor, Tensor]:
            """Return the log-probabilities of the answers, their numbers of tokens, and their weights, (B, 2)."""
            with evaluating(model), run.autocast():
                found = [[one(model, *a, run.device) for a in pair] for pair in references]
            lengths = torch.tensor([[len(a.log_probs) for a in pair] for pair in found])
            sums = [[a.sum(min(n), rest) for a in pair] for pair, n in zip(found, lengths.tolist(), strict=True)]
            return torch.tensor(sums), lengths, torch.tensor([[a.likely for a in pair] for pair in found])

        def lost(stage: Stage, batch: dict) -> float:
            with torch.no_grad(), run.autocast():
                terms, counts = stage.loss(stage.model, batch), stage.counts(batch)
            return sum(float(v) / float(counts.get(k, counts.get("*"))) for k, v in terms.items())

        begun, sizes, _ = read(start.model)
        gaps, measured, moved = [], [], 0.0
        for name, stage in (("before", start), ("after", learnt)):
            own, _, likely = read(stage.model)
            over = own - begun
            due = declared(start.trainer, cfg, over, own, sizes, likely)
            batch = fetch(data, list(range(len(data))), context.cfg.run.seed, run.device)
            with evaluating(stage.model):
                got = lost(stage, batch)
            gaps.append(abs(got - due) / max(1.0, abs(due)))
            margins = ", ".join(f"{m:+.1f}" for m in (over[:, 0] - over[:, 1]).tolist())
            measured.append(f"{name} training {got:.4f}, by the formula {due:.4f} (margins {margins} nats)")
            if stage is start:  # in the training mode: policy and reference must not differ by dropout
                training_modes(stage)
                moved = lost(stage, batch) - got
        metrics, rough = run.measure(learnt, data), 1e-3 if run.precision == "fp32" else 5e-2
        whole, at_first = read(learnt.model, None)[0], begun if args.ld_alpha is None else read(start.model, None)[0]
        due_of = dict(zip(("chosen", "rejected"), whole.mean(0).tolist(), strict=True))
        evaluated = {k: abs(metrics[k] - v) / max(1.0, abs(v)) for k, v in due_of.items() if k in metrics}
        if off := [k for k, gap in evaluated.items() if gap > rough]:
            measured.append(
                f"the evaluation's log-probability of {off[0]} answers is {metrics[off[0]]:.4f}, computed alone {due_of[off[0]]:.4f}"
            )
        if bare := without_reference(metrics.get("margin"), cfg.beta, whole, at_first, rough):
            measured.append(bare)
        one_way, unturned = turned_pairs.astray(run, learnt, data, metrics, rough)
        measured += [one_way] * bool(one_way)
        # Sums of log-probabilities have a rounding error of about 1e-5; an attention mask that was not passed changed a loss by 2.4e-4.
        limit = 1e-4 if run.precision == "fp32" else 5e-2
        if abs(moved) > limit:
            measured.append(f"in train mode {moved:+.4f}")
        return Finding(
            max(*gaps, abs(moved)) <= limit and not (off or one_way or bare), "; ".join(measured),
            f"{named(weights)} at beta {cfg.beta:g}, within {limit:g}{begins(untrained(start.trainer, cfg))}",
            "the reference is another model: loaded again by name, left at zero, or not taken after --init-from\n"
            "the reference is trained, or follows the policy\n"
            "policy and reference differ by dropout (attention's dropout is an argument, not a module)\n"
            "log-probabilities are averaged over tokens, or count the prompt or the padding\n"
            "chosen and rejected are exchanged, or beta has another value\n"
            "the evaluation reads each token's probability at another position than the loss",
            evidence={"gaps": gaps, "in_train_mode": moved, "shown": measured},
            cause="the loss is right, the evaluation is not: it reads log-probabilities at other positions, or counts other tokens"
            if off and max(*gaps, abs(moved)) <= limit else NO_REFERENCE if bare else unturned,
        )  # fmt: skip

    return check


FEATURES: dict[str, Callable[[str, str], float]] = {
    "shares more words with its prompt": lambda prompt, text: len({*_words(text)} & {*_words(prompt)}),
    "is longer": lambda prompt, text: len(text),
    "has more different words": lambda prompt, text: len({*_words(text)}),
    "has longer words": lambda prompt, text: len(text) / max(1, len(text.split())),
    "has more lines": lambda prompt, text: text.count("\n"),
    "has more digits": lambda prompt, text: sum(c.isdigit() for c in text),
}
CERTAIN, READ = 5.0, 2000  # standard errors on each side; pairs per split


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


@gate("sides", rows="L9 R1", title="held-out pairs prefer what training pairs prefer", reads="data")
def sides(context: GateContext) -> Finding:
    """Compares simple properties of the preferred answer between the splits. If it clearly has more of something in training and clearly
    less in validation, the two answers are exchanged in one of the splits."""
    data, table, wrong = context.look()[1].data, {}, []
    for split in ("train", "val"):
        rows = [data[split].get(i, None) for i in data[split].representative(min(READ, len(data[split])))]
        for name, of in FEATURES.items():
            more = [of(r["prompt"], r["chosen"]) - of(r["prompt"], r["rejected"]) for r in rows]
            up, down = sum(m > 0 for m in more), sum(m < 0 for m in more)
            table[split, name] = (up, up + down, (up - down) / math.sqrt(max(1, up + down)))
    strongest = max(FEATURES, key=lambda k: abs(table["train", k][2]))
    for name in FEATURES:
        (a, n, here), (b, m, there) = table["train", name], table["val", name]
        if abs(here) > CERTAIN and abs(there) > CERTAIN and here * there < 0:
            wrong.append(
                f"the preferred answer {name} in {a / n:.0%} of {n} training pairs and in {b / m:.0%} of {m} held-out pairs"
            )
    a, n, _ = table["train", strongest]
    b, m, _ = table["val", strongest]
    measured = f"the preferred answer {strongest} in {a / max(1, n):.0%} of the training pairs, {b / max(1, m):.0%} of the held-out ones"
    return Finding(
        not wrong, "; ".join(wrong) or measured, f"no property is preferred in one split and rejected in the other ({CERTAIN:g} standard errors)",
        "chosen and rejected are exchanged in one of the splits\n"
        "the splits come from different people or different questions: split one source instead",
        evidence={f"{split}, {name}": row for (split, name), row in table.items()},
    )  # fmt: skip


def lengths(chat: Chat) -> Gate:
    title = "the preferred answer is not simply the longer one, or the one with a mark"

    @gate("lengths", rows="R1", title=title, reads="data")
    def check(context: GateContext) -> Finding:
        """Counts the pairs that the number of tokens alone would rank correctly, those that a single mark would (a full stop, a quote), and
        the answers that end at one number of tokens."""
        _, stage = context.look()
        data, cause = stage.data["train"], ""
        pairs = [data.get(i, None) for i in pick(data, 1000, context.cfg.run.seed)]
        sizes = {k: plain_tokens(tuple(r[k] for r in pairs), chat) for k in ("chosen", "rejected")}
        share = preferred(torch.tensor([a - b for a, b in zip(*sizes.values(), strict=True)]))
        measured = f"the preferred answer has more tokens in {share:.1%} of {len(pairs)} training pairs"
        if mark := marks.given_away((r["chosen"], r["rejected"]) for r in pairs):
            side, character, n, of = mark
            measured += f"; the {side} answer has more {character!r} than the other in {n} of the {of} pairs whose numbers differ"
            cause = f"one mark decides, whatever the answers say: the {side} one has more {character!r}. Write both answers in one form"
        for name, found in sizes.items():
            if cut := cut_at([r[name] for r in pairs], found):
                measured += f"; {cut[1]} {name} answers have {cut[0]} tokens, the most of all"
                cause = (
                    cause
                    or f"{name} answers were cut at {cut[0]} tokens when they were generated, or before they were stored"
                )
        return Finding(
            1 - ONE_SIDED < share < ONE_SIDED and not cause, measured,
            f"between {1 - ONE_SIDED:.0%} and {ONE_SIDED:.0%}; otherwise counting tokens solves the task; no mark that "
            "decides; no answers that end at a limit",
            "rejected answers are cut, or come from another model with another length limit\n"
            "use pairs of nearly equal length, or leave out the longest\n"
            "if raters were asked for length: --gates.waive lengths --gates.because ...",
            evidence={"share": share}, cause=cause,
        )  # fmt: skip

    return check


@monitor("likelihood", rows="L9", title="preferred answers do not become less likely")
def likelihood(history: list[dict[str, float]]) -> Finding:
    """Both answers usually lose log-probability. It is a fault if the chosen ones lose much, and nearly as much as the rejected ones."""
    last = history[-1]
    lost = {k: last[f"val/reference/{k}"] - last[f"val/{k}"] for k in ("chosen", "rejected")}  # nats per answer
    each = lost["chosen"] / last["val/tokens"]  # nats per token
    sunk = each > SUNK and lost["chosen"] > 0.5 * lost["rejected"]
    return Finding(
        not sunk,
        f"log-probability of held-out chosen answers {-lost['chosen']:+.1f} nats ({-each:+.2f} per token), of rejected ones "
        f"{-lost['rejected']:+.1f}",
        f"chosen ones lose at most {SUNK:g} nat per token, or less than half of what the rejected lose",
        "a lower --optim.lr, a higher --beta, fewer epochs; fine-tune on the chosen answers first",
        evidence=lost,
    )


@monitor("reference", rows="L9", title="the reference does not change during the run")
def moved_reference(history: list[dict[str, float]]) -> Finding:
    """Compares the reference's log-probabilities of the same validation answers at the first and the last evaluation."""
    first, last = ({k: row[f"val/reference/{k}"] for k in ("chosen", "rejected")} for row in (history[0], history[-1]))
    gap = max(abs(first[k] - last[k]) / max(1.0, abs(first[k])) for k in first)
    return Finding(
        gap <= 1e-4, f"chosen {first['chosen']:.4f} early, {last['chosen']:.4f} late",
        "equal within 1e-4", "the reference is trained or follows the policy, so margins have no fixed reference",
        evidence={"gap": gap},
    )  # fmt: skip
