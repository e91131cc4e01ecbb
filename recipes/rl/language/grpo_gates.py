"""Gates of GRPO: the reward function, the answers, which tokens are scored, the loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.adapters.hosted import Hosted
from trainworthy.core.base import seeds
from trainworthy.core.base.modes import in_mode
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import formula, gate
from trainworthy.core.gates.gate import Gate, Proof
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.optim import exact
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.monitoring.monitors import Monitor, monitor
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.gates.chat import backbone, heard
from trainworthy.recipes.rl.language import problems
from trainworthy.recipes.rl.language.problems import Asker, Problems, Reward

FAR = 6.0  # standard deviations between what was sampled and what the policy would sample
TRIED = 24  # questions whose answers a reward is tried on
STEPS = (-0.5, -0.1, 0.0, 0.1, 0.5)  # log-ratios to the older policy: inside the clip and outside, on both sides

History = list[dict[str, float]]


@dataclass
class Subject:
    """What the gates of a stage ask about."""

    cfg: Any
    asker: Asker
    reward: Reward
    """The one that is declared."""


@dataclass
class Unit:
    """Answers of the untrained policy to two questions of different lengths, made by the trainer as in training, by row."""

    run: Run
    stage: Hosted
    rows: list[dict]
    batch: dict[str, Tensor]
    ids: list[tuple[list[int], list[int]]]
    """(prompt, answer) without padding."""


def gates(s: Subject) -> list[Gate]:
    """All of them."""
    return [
        rewards(s),
        questions(s),
        samples(s),
        advantages(s),
        scored(s),
        objective(s),
        formula_gate(s),
        prompts(s),
        judge(s),
    ]


def unit(s: Subject, proof: Proof) -> Unit:
    """Made once for all gates."""

    def make() -> Unit:
        run, stage = proof.look()
        rows = [dict(r) for r in stage.ask(0)]
        for row in rows[
            s.cfg.num_generations :
        ]:  # a longer prompt: whoever pads on the wrong side loses the shorter ones
            row["prompt"] = s.asker.put(f"{rows[0]['question']} {rows[0]['answer']}\n{row['question']}")
        seeds.seed_global(proof.cfg.run.seed, "unit")
        with in_mode(stage.model, training=True), torch.no_grad(), run.autocast():
            batch = stage.trainer._generate_and_score_completions(rows)
        sides = [[ids[mask.bool()].tolist() for ids, mask in zip(batch[f"{k}_ids"], batch[f"{k}_mask"], strict=True)]
                 for k in ("prompt", "completion")]  # fmt: skip
        return Unit(run, stage, rows, {k: v for k, v in batch.items() if v.dim()}, list(zip(*sides, strict=True)))

    return proof.once("unit", make)


def alone(u: Unit, temperature: float) -> list[Tensor]:
    """Log-probabilities (tokens, vocabulary) of each answer's tokens, read alone, without padding, from plain logits."""

    def read(before: list[int], after: list[int]) -> Tensor:
        ids = torch.tensor([before + after], device=u.run.device)
        logits = u.stage.model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1]
        return (exact(logits) / temperature).log_softmax(-1)

    with evaluating(u.stage.model), u.run.autocast():
        return [read(*row) for row in u.ids]


# --------------------------------------------------------------------------------------------------------------- reward
def rewards(s: Subject) -> Gate:
    title = "the reward prefers right answers, and for their content"

    @gate("rewards", rows="R1", title=title, reads="data")
    def prove(proof: Proof) -> Finding:
        """What the declared function gives right answers, those of other questions of the same length, none at all and long wrong
        ones; alone, in a batch and in another order."""
        rows = proof.look()[1].data["questions"].rows[: 20 * TRIED]
        tried = [(r, o) for r in rows[:TRIED] for o in rows if len(o["answer"]) == len(r["answer"])
                 and problems.differ(o["answer"], r["answer"])]  # fmt: skip
        pairs = list({id(r): (r, o["answer"]) for r, o in tried}.values())
        if not pairs:
            raise Skip("no two answers are of one length")

        def ask(texts: list[str], order: list[int] | None = None) -> list[float]:
            order = order or list(range(len(texts)))
            chosen = [pairs[i] for i in order]
            found = s.reward(prompts=[s.asker.put(r["prompt"]) for r, _ in chosen], completions=[texts[i] for i in order],
                             answer=[r["answer"] for r, _ in chosen])  # fmt: skip
            return [found[order.index(i)] for i in range(len(order))]

        texts = {
            "right": [r["answer"] for r, _ in pairs],
            "wrong, of the same length": [other for _, other in pairs],
            "one digit off": [problems.one_digit_off(r["answer"]) or other for r, other in pairs],
            "empty": ["" for _ in pairs],
            "long and wrong": [f"{other} " * 6 for _, other in pairs],
        }
        seen = {k: ask(v) for k, v in texts.items()}
        mean = {k: sum(v) / len(v) for k, v in seen.items()}
        right, _, _, empty, long = mean.values()
        all_of_it = {v for values in seen.values() for v in values}
        turned = ask(texts["right"], list(reversed(range(len(pairs)))))
        single = [s.reward(prompts=[s.asker.put(r["prompt"])], completions=[r["answer"]], answer=[r["answer"]])[0]
                  for r, _ in pairs]  # fmt: skip
        faults = []
        if len(all_of_it) == 1:
            faults.append(f"a constant reward: {right:g} whatever is answered")
        elif seen["right"] == seen["wrong, of the same length"]:
            faults.append(
                f"right and wrong answers of one length earn the same ({right:g}), the empty one {empty:g}, long ones "
                f"{long:g}: it depends on length alone"
            )
        else:
            better = sum(a > b for a, b in zip(seen["right"], seen["wrong, of the same length"], strict=True))
            if better < 0.9 * len(pairs):
                faults.append(f"only {better} of {len(pairs)} right answers earn more than a wrong one of their length")
            near = [
                (a, b, t) for a, b, t in zip(seen["right"], seen["one digit off"], texts["one digit off"], strict=True)
            ]
            same = [(pairs[i][0]["answer"], t) for i, (a, b, t) in enumerate(near) if b >= a]
            if len(same) > 0.1 * len(pairs):
                faults.append(f"{len(same)} of {len(pairs)} answers with one digit changed earn as much as the right one, e.g. "
                              f"{same[0][1]!r} for {same[0][0]!r}")  # fmt: skip
            if empty >= right:
                faults.append(f"the empty answer earns {empty:g}, a right one {right:g}")
            if long >= right:
                faults.append(f"a long wrong answer earns {long:g}, a right one {right:g}")
        if not seen["right"] == turned == single:
            faults.append("an answer earns something else among other answers, in another order or when asked again")
        told = ", ".join(f"{k} {v:.3g}" for k, v in mean.items())
        return Finding(
            not faults, "; ".join(faults) or f"{len(pairs)} questions: {told}",
            "right answers earn more than wrong ones of their length, than long ones and than none, whatever text surrounds them",
            "a constant, or a function of the length: there is nothing to learn from it, or the wrong thing\n"
            "the function reads another column, or another part of the answer, than the one that is right\n"
            "it reads the last number alone, where an answer is a fraction or a formula: compare with math-verify\n"
            "it draws at random, keeps a state, or mixes up the order of its batch",
            evidence={"mean": mean},
        )  # fmt: skip

    return prove


def questions(s: Subject) -> Gate:
    title = "no held-out question is in the training set or in the prompt's examples"

    @gate("questions", rows="C6", title=title, reads="data")
    def prove(proof: Proof) -> Finding:
        """Prompts and sources of both splits, whatever the case and the spaces; and the solved questions before each prompt."""
        data = proof.look()[1].data

        def sets(rows: list[dict[str, str]]) -> list[set[str]]:
            return [{" ".join(r[k].casefold().split()) for r in rows} for k in ("prompt", "source")]

        learnt, held_out = sets(data["questions"].rows), sets(data["val"].rows)
        shown = sets(s.asker.solved)[0] & held_out[0]
        both = [sorted(a & b) for a, b in zip(learnt, held_out, strict=True)]
        wrong = [
            f"{len(b)} {k} in both splits, e.g. {b[0]!r}"
            for k, b in zip(("prompts", "sources"), both, strict=True)
            if b
        ]
        wrong += [f"{len(shown)} held-out questions appear solved in every prompt"] * bool(shown)
        return Finding(
            not wrong, "; ".join(wrong) or f"{len(learnt[0]):,} questions to learn from, {len(held_out[0])} held out",
            "no prompt and no source in both splits",
            "split by source: one that was put in two ways is one question\nthe file of held-out questions is a part of the other",
        )  # fmt: skip

    return prove


# -------------------------------------------------------------------------------------------------------------- samples
def samples(s: Subject) -> Gate:
    title = "training uses the policy's own answers, up to their end token"

    @gate("samples", rows="L1 L3", title=title, reads="data model loss train", explains=True)
    def prove(proof: Proof) -> Finding:
        """The log-probability of what was sampled, read alone without padding, against what the same distributions give on
        average (their entropy), by prompt length; and where each answer ends."""
        u, wrong = unit(s, proof), []
        told = []
        for start in range(0, len(u.rows), s.cfg.num_generations):
            group = slice(start, start + s.cfg.num_generations)
            excess, variance = 0.0, 1e-2
            for (_, after), p in zip(u.ids[group], alone(u, s.cfg.temperature)[group], strict=True):
                h = -(p.exp() * p).sum(-1)
                nll = -p.gather(-1, torch.tensor(after, device=p.device)[:, None])[:, 0]
                excess += (nll - h).sum().item()
                variance += ((p.exp() * p.square()).sum(-1) - h.square()).sum().item()
            far, n = excess / variance**0.5, len(u.ids[start][0])
            told.append(f"{far:+.1f} sd after {n} tokens")
            if abs(far) > FAR:
                wrong.append(f"answers after {n} tokens are not this policy's: {excess:+.0f} nats, {far:+.1f} sd")
        most, cut = s.cfg.max_new_tokens, 0
        for _, after in u.ids:
            ends = [i for i, t in enumerate(after) if t in s.asker.ends]
            cut += not ends
            if ends and ends[0] < len(after) - 1:
                wrong.append(f"{len(after) - 1 - ends[0]} tokens after the end of an answer belong to it")
            if not ends and len(after) < most:
                wrong.append(f"an answer of {len(after)} of {most} tokens is without the token that ends it")
        return Finding(
            not wrong, "; ".join(dict.fromkeys(wrong)) or f"{', '.join(told)}; {len(u.ids) - cut} of {len(u.ids)} answers end",
            f"within {FAR:g} sd of what the policy samples on average; each answer up to the token that ends it, that one included",
            "prompts padded on the right for generation: the answer then continues the padding\n"
            "another temperature, or a top-k, than the loss knows of; weights that are not the policy's\n"
            "the end token is masked because it is also the pad: mask by length, never by id (the model then never stops)",
            evidence={"told": told, "cut": cut},
        )  # fmt: skip

    return prove


def advantages(s: Subject) -> Gate:
    title = "an answer's advantage is its reward relative to its group"

    @gate("advantages", rows="R1", title=title, reads="data model loss train", explains=True)
    def prove(proof: Proof) -> Finding:
        """The declared reward of each answer, asked alone, less its group's mean and over its standard deviation."""
        u = unit(s, proof)
        said = [s.asker.tokenizer.decode(after, skip_special_tokens=True) for _, after in u.ids]
        own = [
            s.reward(prompts=[r["prompt"]], completions=[c], answer=[r["answer"]])[0]
            for r, c in zip(u.rows, said, strict=True)
        ]
        groups = torch.tensor(own, dtype=torch.float64).view(-1, s.cfg.num_generations)
        got = u.batch["advantages"].cpu().double().view(-1, s.cfg.num_generations)
        still = int((groups.std(1) == 0).sum())
        due = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        asked = [{r["question"] for r in u.rows[i : i + s.cfg.num_generations]}
                 for i in range(0, len(u.rows), s.cfg.num_generations)]  # fmt: skip
        if mixed := [len(q) for q in asked if len(q) > 1]:
            return Finding(
                False, f"{len(mixed)} of {len(asked)} groups hold answers to {max(mixed)} questions",
                f"{s.cfg.num_generations} answers to one question in each group",
                "the answers of a group belong to different questions: advantages compare questions, not answers. The order of the "
                "rows is question by question, not round by round (two loops in the other order, a sampler, a shuffle)",
                evidence={"questions": [sorted(q) for q in asked]},
            )  # fmt: skip
        if still == len(groups):
            raise Skip(f"in all {still} groups every answer earns {own[0]:g}: nothing to compare, nothing to learn yet")
        gap, centre = (got - due).abs().max().item(), got.mean(1).abs().max().item()
        wrong = [f"advantages are not centred: a group's mean is {centre:.3g}"] if centre > 1e-3 else []
        if gap > 1e-3 and not wrong:
            at = int((got - due).abs().flatten().argmax())
            wrong.append(f"{said[at].strip()!r} earns {own[at]:g} alone, an advantage of {due.flatten()[at]:.3g} in its group, and "
                         f"gets {got.flatten()[at]:.3g}")  # fmt: skip
        return Finding(
            not wrong, "; ".join(wrong) or f"{len(own)} answers, rewards {groups.mean():.3g} on average, {still} of {len(groups)} "
            "groups without a difference", "(reward - mean) / standard deviation of its group, within 1e-3",
            "rewards belong to other answers than those they were given for (shuffled, another order)\n"
            "advantages are rewards as they are, or measured against another group or the whole batch\n"
            "--shuffle-rewards, the control, is switched on",
            evidence={"rewards": own, "got": got.flatten().tolist(), "due": due.flatten().tolist()}, batch=u.batch,
        )  # fmt: skip

    return prove


# ----------------------------------------------------------------------------------------------------------------- loss
def scored(s: Subject) -> Gate:
    title = "the answer and the token that ends it are scored, and nothing else"

    @gate("scored", rows="L2 L3", title=title, reads="data model loss train", explains=True)
    def prove(proof: Proof) -> Finding:
        """Where the loss has a gradient with respect to the last hidden states: a state answers for the token that follows it."""
        u, wrong, states = unit(s, proof), [], []
        picked = [0, len(u.rows) - 1]  # a padded prompt and one that is not
        batch = {k: v[picked] for k, v in u.batch.items()}
        batch["advantages"] = torch.ones_like(batch["advantages"])

        def keep(_module, _args, out) -> None:
            if out.last_hidden_state.requires_grad:  # a reference's do not
                states.append(out.last_hidden_state)

        hook = backbone(u.stage.model).register_forward_hook(keep)
        try:
            with in_mode(u.stage.model, training=True), u.run.autocast():
                total = sum(u.stage.loss(u.stage.model, batch).values())
            grads = torch.autograd.grad(total, states, allow_unused=True)  # nothing is left on the weights
        finally:
            hook.remove()
        felt = sum(g.abs().sum(-1) for g in grads if g is not None) > 0  # (rows, T)
        width = batch["prompt_ids"].shape[1]
        for row, i in enumerate(picked):
            n = len(u.ids[i][1])
            due, got = set(range(width - 1, width - 1 + n)), set(felt[row].nonzero().flatten().tolist())
            if extra := got - due:
                where = "of the prompt" if min(extra) < width - 1 else "after its end"
                wrong.append(f"answer {i} scores {len(extra)} tokens {where}")
            if lost := due - got:
                end = ", the one that ends it among them" * (max(due) in lost)
                wrong.append(f"answer {i} leaves {len(lost)} of {n} tokens unscored{end}")
        shown = " | ".join(repr(s.asker.tokenizer.decode(u.ids[i][1])) for i in picked)
        return Finding(
            not wrong, "; ".join(wrong) or f"of {width} + {batch['completion_ids'].shape[1]} tokens: {shown}",
            "a gradient at the answer and the token that ends it alone",
            "prompts are scored: the mask is the attention mask\n"
            "the end token is masked because it is also the pad: mask by length, never by id (the model then never stops)",
            batch=batch,
        )  # fmt: skip

    return prove


def objective(s: Subject) -> Gate:
    title = "the loss is the declared one, with each answer computed alone"

    @gate("objective", rows="R1 L1", title=title, reads="data model loss train", explains=True)
    def prove(proof: Proof) -> Finding:
        """With advantages and an older policy that are made up, so that every branch of the clip is taken: the recipe's loss of a
        padded batch against the formula from log-probabilities of each answer read alone, without padding, from plain logits.
        Before anything is trained the reference's must be the policy's."""
        u = unit(s, proof)
        mask = exact(u.batch["completion_mask"])
        plain, wrong = torch.zeros_like(mask), []
        for row, ((_, after), p) in enumerate(zip(u.ids, alone(u, s.cfg.temperature), strict=True)):
            said = p.gather(-1, torch.tensor(after, device=p.device)[:, None])[:, 0]
            plain[row, mask[row].bool()] = said
        apart = torch.tensor(STEPS, dtype=mask.dtype, device=mask.device)
        steps = apart[torch.arange(mask.numel(), device=mask.device).view_as(mask) % len(STEPS)]
        given = torch.linspace(-1.5, 1.5, len(mask), dtype=mask.dtype, device=mask.device)
        made = {"advantages": given.float(), "old_per_token_logps": (plain - steps).float()}
        ratio, a = steps.exp(), given[:, None]
        each = -torch.min(ratio * a, ratio.clamp(1 - s.cfg.epsilon, 1 + s.cfg.epsilon) * a)
        if s.cfg.beta:
            limit = 1e-3 if u.run.precision == "fp32" else 5e-2
            off = ((exact(u.batch["ref_per_token_logps"]) - plain) * mask).abs().max().item()
            wrong += [f"before training the reference is {off:.3g} nats from the policy"] if off > limit else []
            made["ref_per_token_logps"] = (plain + steps.flip(1)).float()
            over = steps.flip(1)
            # Schulman's k3 (2020), weighed by the ratio: of older samples its gradient is else not that of the KL (DeepSeek-V3.2).
            each = each + s.cfg.beta * ratio * (over.exp() - over - 1)
        due = ((each * mask).sum() / mask.sum()).item()
        with in_mode(u.stage.model, training=True), torch.no_grad(), u.run.autocast():
            batch = {**u.batch, **made}
            got = (sum(u.stage.loss(u.stage.model, batch).values()) / sum(u.stage.counts(batch).values())).item()
        limit, gap = 1e-4 if u.run.precision == "fp32" else 5e-2, abs(got - due) / max(1.0, abs(due))
        wrong += [f"the loss is {got:.6f}, by the formula {due:.6f}"] if gap > limit else []
        kl = f", and beta {s.cfg.beta:g} times ratio x KL" if s.cfg.beta else ""
        return Finding(
            not wrong, "; ".join(wrong) or f"{got:.6f}, by the formula {due:.6f} ({int(mask.sum())} tokens)",
            f"the mean over tokens of -min(ratio A, clip(ratio) A), clip {s.cfg.epsilon:g}{kl}, within {limit:g}",
            "prompts padded on the right, no attention mask, or position ids that count the padding: each answer is then read "
            "after another prompt\nthe prompt or the padding counts, or a mean over answers instead of tokens\n"
            "the ratio is upside down, not clipped, or clipped on one side; another sign\n"
            "the reference is another model: loaded again by name, or not taken after --init-from",
            evidence={"got": got, "due": due, "gap": gap},
        )  # fmt: skip

    return prove


def formula_gate(s: Subject) -> Gate:
    @gate("formula", rows="R1 L1", title=formula.TITLE, reads="data model loss train", explains=True)
    def prove(proof: Proof) -> Finding:
        """Answers of the last rehearsed iteration, at the weights that it has left, with advantages and an older policy that are made
        up as in `objective`: the loss of each answer, and the gradient of all. A gradient of the wrong sign changes no value."""
        run, stage, record = rehearsed(proof)
        if not record.batch:
            raise Skip("the loop updates by itself: no batch was seen (see wiring)")
        batch = _few(record.batch)
        batch["advantages"] = torch.linspace(-1.5, 1.5, len(batch["prompt_ids"]), device=run.device)
        said = [_said(stage, run, batch, i, s.cfg.temperature) for i in range(len(batch["prompt_ids"]))]
        mask = batch["completion_mask"].bool()
        apart = torch.tensor(STEPS, device=run.device).repeat(mask.numel())[: mask.numel()].view_as(mask)
        old, over = apart.new_zeros(mask.shape), apart.flip(1)
        beta = stage.state["controller"].value if s.cfg.target_kl else s.cfg.beta
        for i, one in enumerate(said):
            old[i, mask[i]] = one.detach().float()
        batch["old_per_token_logps"] = old - apart
        if s.cfg.beta:
            batch["ref_per_token_logps"] = old + over

        def state() -> formula.Statements:
            rows = [_said(stage, run, batch, i, s.cfg.temperature) for i in range(len(said))]
            forms = [_forms(s.cfg, beta, new, (old - apart)[i, mask[i]], (old + over)[i, mask[i]], batch["advantages"][i])
                     for i, new in enumerate(rows)]  # fmt: skip
            right, wrong = ({k: torch.stack([one[j][k] for one in forms]) for k in forms[0][j]} for j in (0, 1))
            return {"loss": formula.Statement(right, wrong)}

        one, exact = formula.compared(run, stage, batch, state, training=True), formula.limit(run, 1e-4)
        return Finding(
            not one.wrong, "; ".join(one.wrong) or f"{one.samples} answers: {', '.join(one.said)}",
            f"the formula within {exact:g}, its gradient within {10 * exact:g}",
            "\n".join([*dict.fromkeys(one.causes), "a detach() in the loss, or a sign that it hides", formula.ON_PURPOSE]),
            evidence={"compared": one.said},
        )  # fmt: skip

    return prove


def _few(batch: dict) -> dict[str, Tensor]:
    """The first and the last two answers."""
    rows = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.dim()}
    n = len(rows["prompt_ids"])
    picked = sorted({0, 1, n - 2, n - 1} & set(range(n)))
    return {k: v[picked].clone() for k, v in rows.items()}


def _said(stage: Hosted, run: Run, batch: dict[str, Tensor], i: int, temperature: float) -> Tensor:
    """Log-probabilities (tokens,) of an answer's tokens, read alone, without padding, from plain logits."""
    before, after = (batch[f"{k}_ids"][i][batch[f"{k}_mask"][i].bool()] for k in ("prompt", "completion"))
    with in_mode(stage.model, training=False), run.autocast():
        logits = stage.model(input_ids=torch.cat([before, after])[None], use_cache=False).logits[
            0, len(before) - 1 : -1
        ]
    return (exact(logits) / temperature).log_softmax(-1).gather(-1, after[:, None])[:, 0]


def _forms(
    cfg: Any, beta: float, new: Tensor, old: Tensor, ref: Tensor, gain: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """({name: sum over an answer's tokens} of the declared loss, the same of known mistakes)."""
    ratio, low, high = (new - old).exp(), 1 - cfg.epsilon, 1 + cfg.epsilon
    kl = ratio * ((ref - new).exp() - (ref - new) - 1) if beta else torch.zeros_like(ratio)
    surrogate = torch.min(ratio * gain, ratio.clamp(low, high) * gain)
    right = {"the clipped surrogate": (-surrogate + beta * kl).sum()}
    wrong = {
        "the ratio is 1 everywhere: the new log-probability is divided by itself": -(new - new.detach()).exp() * gain,
        "the ratio is missing: log-probability times advantage": -new * gain,
        "the ratio upside down: old minus new": -torch.min(
            (old - new).exp() * gain, (old - new).exp().clamp(low, high) * gain
        ),
        "the maximum instead of the minimum": -torch.max(ratio * gain, ratio.clamp(low, high) * gain),
        "the ratio is not clipped": -ratio * gain,
        "the clipped ratio alone": -ratio.clamp(low, high) * gain,
    }
    return right, {k: v.sum() for k, v in wrong.items()}


# ----------------------------------------------------------------------------------------------------------- evaluation
def prompts(s: Subject) -> Gate:
    title = "evaluation prompts equal training prompts, in a batch and alone"

    @gate("prompts", rows="L1 L8", title=title, reads="data model loss evaluate")
    def prove(proof: Proof) -> Finding:
        """What enters the embedding while `evaluate` generates, against the prompt that was trained on; and greedy answers to three
        prompts of different lengths at once and alone."""
        u, wrong = unit(s, proof), []
        rows = [{**u.rows[0], "prompt": u.rows[0]["question"]}, u.stage.data["val"].rows[0]]
        rows.append({**rows[1], "prompt": f"{rows[0]['prompt']} {rows[0]['answer']}\n{rows[1]['prompt']}"})
        with heard(u.stage.model) as asked:
            u.run.measure(u.stage, View(Problems(rows), range(len(rows))))
        trained = u.ids[0][0]
        if trained not in [row[-len(trained) :] for ids in asked for row in ids.tolist()]:
            wrong.append(
                f"training asks after {s.asker.tokenizer.decode(trained[-24:])!r}; no prompt of the evaluation ends so"
            )

        def said(some: list[dict]) -> list[str]:
            with evaluating(u.stage.model), u.run.autocast():
                return [t.caption for t in u.stage.predict(u.stage.model, Problems(some).collate(some))]

        together, single = said(rows), [said([r])[0] for r in rows]
        differ = [(a, b) for a, b in zip(together, single, strict=True) if a != b]
        wrong += [f"answers differ: {differ[0][0]!r} in a batch, {differ[0][1]!r} alone"] if differ else []
        return Finding(
            not wrong, "; ".join(wrong) or f"{len(rows)} answers the same, e.g. {together[0]!r}",
            "every prompt that is generated from ends as in training; equal answers",
            "prompts padded on the right for generation: the answer then continues the padding\n"
            "a template, a BOS or solved questions that one of the two paths adds and the other does not",
            evidence={"together": together, "alone": single},
        )  # fmt: skip

    return prove


def judge(s: Subject) -> Gate:
    title = "known answers get the right accuracy"

    @gate("judge", rows="R1", title=title, reads="data evaluate metric")
    def prove(proof: Proof) -> Finding:
        """`evaluate` with a policy that gives answers written beforehand: right, right after some working, taken back, none."""
        run, stage = proof.look()
        rows = stage.data["val"].rows[:8]
        wrong = {
            r["answer"]: next((o["answer"] for o in rows if problems.differ(o["answer"], r["answer"])), "")
            for r in rows
        }
        kinds = [lambda a, o: (a, 1), lambda a, o: (o, 0), lambda a, o: ("", 0)]
        if problems.number(rows[0]["answer"]) is not None:
            worked = lambda a, o: (f"{o} and so {a}", 1)  # noqa: E731
            # More of these than of answers taken back: who reads the first number must not come out even.
            kinds = [kinds[0], worked, worked, lambda a, o: (f"{a}, no, {o}", 0), kinds[2]]
        told = [kinds[i % len(kinds)](r["answer"], wrong[r["answer"]]) for i, r in enumerate(rows)]
        waiting = [s.asker.answer(text) for text, _ in told]

        def written(input_ids: Tensor, **_) -> Tensor:
            now = [waiting.pop(0) for _ in input_ids]
            width = max(map(len, now))
            pad = s.asker.tokenizer.pad_token_id
            return torch.cat(
                [input_ids, torch.tensor([a + [pad] * (width - len(a)) for a in now], device=input_ids.device)], 1
            )

        stage.model.generate = written
        try:
            got = run.measure(stage, View(Problems(rows), range(len(rows))))[stage.metric.name]
        finally:
            del stage.model.generate
        due = sum(right for _, right in told) / len(told)
        shown = ", ".join(repr(text) for text, _ in told[: len(kinds)])
        return Finding(
            abs(got - due) < 1e-6, f"{stage.metric.name} {got:.3f} of answers of which {due:.3f} are right, such as {shown}",
            f"{due:.3f}: the last number counts",
            "the first number is read, which is working and not the answer\nwhat follows the end of an answer is read, too\n"
            "questions and answers are out of step",
            evidence={"answers": [text for text, _ in told], "got": got, "due": due},
        )  # fmt: skip

    return prove


# ------------------------------------------------------------------------------------------------------------- monitors
AGAIN = 2  # evaluations in a row that end a run
CERTAIN = 0.02  # of the first entropy
GROWN, FAR_OFF = 3.0, 5.0  # times the first length, times the first KL
NEAR, LOST = 1.2, 4.0  # times --target-kl


def monitors(cfg: Any, held_out: int) -> list[Monitor]:
    """What only a whole run shows; each ends the run where it is sure (--no-stop-hacked: it only tells)."""
    noise = 2 * (0.5 / held_out) ** 0.5  # two standard errors of a difference at one half
    found = [hacked(held_out), still_groups, lengths(noise), decided(noise)]
    found += [clipped] * (cfg.num_iterations > 1) + [drift(noise, cfg.target_kl)] * (cfg.beta > 0)
    return found if cfg.stop_hacked else [replace(m, judge=_telling(m)) for m in found]


def _telling(one: Monitor) -> Callable[[History], Finding]:
    """What it finds, without an end of the run."""

    def judged(history: History) -> Finding:
        found = one.judge(history)
        return replace(found, evidence={k: v for k, v in found.evidence.items() if k != "stop"})

    return judged


def logged(history: History, name: str) -> list[float]:
    """What the trainer logged, a mean over the units of each evaluation."""
    return [row[f"train/trainer/{name}"] for row in history if f"train/trainer/{name}" in row]


def lately(values: list[float], wrong: Callable[[float], bool]) -> bool:
    """Was it wrong at the last evaluations, and not at the first?"""
    return len(values) > AGAIN and all(map(wrong, values[-AGAIN:]))


def unpaid(history: History, noise: float) -> bool:
    """Are held-out answers right no more often than at the first evaluation, and not nearly always?"""
    right = [row["val/accuracy"] for row in history]
    return right[-1] - right[0] <= noise and right[-1] < 0.9


def hacked(held_out: int) -> Monitor:
    """The training reward also rises where answers only become surer: held-out answers, given greedily, must follow."""
    noise = 2 * (0.5 / held_out) ** 0.5  # two standard errors of a difference at one half

    @monitor("reward", rows="R1", title="answers with higher reward are right more often")
    def judged(history: History) -> Finding:
        earned, right = logged(history, "reward"), [row["val/accuracy"] for row in history]
        fell = max(right) - right[-1] > noise
        top = right.index(max(right))
        before = logged(history[: top + 1], "reward")[-1:] or earned[:1]
        stop = lately(right, lambda value: max(right) - value > noise) and earned[-1] > before[0]
        told = f"reward {earned[0]:.3g} -> {earned[-1]:.3g} while training; held-out accuracy {right[0]:.3f} -> {right[-1]:.3f}"
        return Finding(
            not fell, f"{told}, at best {max(right):.3f}", f"held-out accuracy within {noise:.2f} of its best",
            "the reward has a hole: read what earns most; a lower --optim.lr, --beta above 0, the best weights (--run.export best)",
            evidence={"reward": earned, "accuracy": right}
            | ({"stop": "the reward pays for something else than right answers"} if stop else {}),
        )  # fmt: skip

    return judged


@monitor("groups", rows="R1", title="rewards differ within groups")
def still_groups(history: History) -> Finding:
    """Groups whose answers all earn the same: counted, for they teach nothing."""
    share = logged(history, "frac_reward_zero_std")
    stop = len(share) >= AGAIN and min(share[-AGAIN:]) >= 0.999 and history[-1]["val/accuracy"] < 0.9
    return Finding(
        share[-1] <= 0.8, f"{share[0]:.0%} of the groups without a difference at first, {share[-1]:.0%} at last", "at most 80%",
        "questions that are all too easy or all too hard: other ones, a larger --num-generations, a higher --temperature",
        evidence={"share": share} | ({"stop": "no group's rewards differ: there is no gradient, nothing is learnt"} if stop else {}),
    )  # fmt: skip


def lengths(noise: float) -> Monitor:
    """Answers that grow, or are cut, and are right no more often."""

    @monitor("lengths", rows="L3", title="answers end by themselves, and do not grow")
    def judged(history: History) -> Finding:
        """The share that is cut at the limit, and the mean length."""
        cut, mean = logged(history, "completions/clipped_ratio"), logged(history, "completions/mean_length")
        endless = cut[0] < 0.5 and lately(cut, lambda value: value > 0.9)
        stop = unpaid(history, noise) and (endless or lately(mean, lambda value: value > GROWN * mean[0]))
        return Finding(
            cut[-1] <= 0.5 and mean[-1] <= GROWN * mean[0], f"{cut[0]:.0%} cut at the limit at first, {cut[-1]:.0%} at last; "
            f"{mean[0]:.1f} tokens, then {mean[-1]:.1f}", "at most half of them cut, at most three times as long",
            "a larger --max-new-tokens; a reward that pays for length",
            evidence={"cut": cut, "mean": mean} | ({"stop": "a reward that pays for length"} if stop else {}),
        )  # fmt: skip

    return judged


def decided(noise: float) -> Monitor:
    """A policy that is sure of its answers before they are right."""

    @monitor("entropy", rows="R1", title="the policy keeps exploring while it learns")
    def judged(history: History) -> Finding:
        """Entropy of a token (nats). Gone early, nothing new is tried."""
        seen, share = logged(history, "entropy"), logged(history, "frac_reward_zero_std")
        gone = seen[-1] < CERTAIN * seen[0] and history[-1]["val/accuracy"] < 0.9
        stop = gone and unpaid(history, noise) and lately(seen, lambda value: value < CERTAIN * seen[0])
        return Finding(
            not gone, f"{seen[0]:.3g} nats a token, then {seen[-1]:.3g}", "2% of what it was, or nearly all answers right",
            "a lower --optim.lr, --beta above 0, a higher --temperature",
            evidence={"entropy": seen, "zero_variance": share}
            | ({"stop": "a rate that is too high, or a reward that one answer gets for every question"} if stop else {}),
        )  # fmt: skip

    return judged


@monitor("clip", rows="R1", title="an iteration's updates stay within the clipping range")
def clipped(history: History) -> Finding:
    """Share of the tokens at the clip."""
    share = logged(history, "clip_ratio/region_mean")
    return Finding(max(share) <= 0.3, f"{max(share):.0%} of the tokens at the clip at most", "30%",
                   "a lower --optim.lr, fewer --num-iterations", evidence={"share": share})  # fmt: skip


def drift(noise: float, target: float) -> Monitor:
    """A policy that leaves its reference and is right no more often. With a `target` the KL must end near it."""

    @monitor("kl", rows="R2", title="the policy stays near its reference")
    def judged(history: History) -> Finding:
        """KL to the reference, nats a token."""
        seen, beta = logged(history, "kl"), logged(history, "beta")
        tail = seen[-max(1, len(seen) // 3) :]
        last, limit = (sum(tail) / len(tail), NEAR * target) if target else (max(seen), 1.0)
        stop = unpaid(history, noise) and lately(
            seen, lambda value: value > (LOST * target if target else max(1.0, FAR_OFF * seen[0]))
        )
        moved = f"; the coefficient {beta[0]:.3g}, then {beta[-1]:.3g}" if beta else ""
        return Finding(
            last <= limit, f"KL {seen[0]:.3g} nats a token at first, {seen[-1]:.3g} at the end, {max(seen):.3g} at most{moved}",
            f"{NEAR:g} x {target:g} or less over the last third" if target else "1 nat a token",
            "a higher --beta or --kl-coef-rate, a lower --optim.lr" if target else "a higher --beta, --target-kl, a lower --optim.lr",
            evidence={"kl": seen, "beta": beta}
            | ({"stop": "--beta is too low for this rate and this reward"} if stop else {}),
        )  # fmt: skip

    return judged
