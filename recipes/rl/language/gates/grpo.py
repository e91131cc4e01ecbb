"""Gates of GRPO: the reward, the questions, sampled answers and their advantages, the evaluation; those of the loss are in grpo_objective.py."""

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.gates import fresh_export
from trainworthy.recipes.llm.gates.chat import heard
from trainworthy.recipes.rl.language.data import problems
from trainworthy.recipes.rl.language.data.problems import Problems
from trainworthy.recipes.rl.language.gates.grpo_answers import Subject, Unit, alone, one_answer, truncated, unit
from trainworthy.recipes.rl.language.gates.grpo_objective import formula_gate, objective, scored

DRAWN, DRAWN_16 = (
    1e-3,
    0.1,
)  # total variation distance, in fp32 and in 16 bits: rounding of a cache, of padding and of batched kernels
FAR = 6.0  # standard deviations between the sampled answers' log-probability and the policy's average
NEVER = -100.0  # nats: tokens that a top-k or top-p excludes
TRIED = 24  # questions that a reward is tested on
INSIDE = "numbers that only contain the right one get as much reward"


def gates(s: Subject, base: str) -> list[Gate]:
    """Return all gates of GRPO. `base`: the model that training starts from."""
    return [
        rewards(s),
        questions(s),
        samples(s),
        advantages(s),
        scored(s),
        objective(s),
        formula_gate(s),
        prompts(s),
        accuracy(s),
        fresh_export.exported(base, s.asker.tokenizer, prompts=s.asked),
    ]


# --------------------------------------------------------------------------------------------------------------- reward
def rewards(s: Subject) -> Gate:
    title = "the reward prefers right answers, and for their content"

    @gate("rewards", rows="R1", title=title, reads="data")
    def check(context: GateContext) -> Finding:
        """Calls the declared reward function with right answers, other questions' answers of the same length, empty answers and long wrong
        ones: alone, in a batch and in another order."""
        rows = context.look()[1].data["questions"].rows[: 20 * TRIED]
        tried = [(r, o) for r in rows[:TRIED] for o in rows if len(o["answer"]) == len(r["answer"])
                 and problems.differ(o["answer"], r["answer"])]  # fmt: skip
        pairs = list({id(r): (r, o["answer"]) for r, o in tried}.values())
        if not pairs:
            raise Skip("no two answers have the same length")

        def ask(texts: list[str], order: list[int] | None = None) -> list[float]:
            order = order or list(range(len(texts)))
            chosen = [pairs[i] for i in order]
            found = s.reward(prompts=[s.asker.put(r["prompt"]) for r, _ in chosen], completions=[texts[i] for i in order],
                             **problems.columns([r for r, _ in chosen]))  # fmt: skip
            return [found[order.index(i)] for i in range(len(order))]

        texts = {
            "right": [r["answer"] for r, _ in pairs],
            "wrong, of the same length": [other for _, other in pairs],
            "one digit off": [problems.one_digit_off(r["answer"]) or other for r, other in pairs],
            "empty": ["" for _ in pairs],
            "long and wrong": [f"{other} " * 6 for _, other in pairs],
            "one digit more": [problems.one_digit_more(r["answer"]) or other for r, other in pairs],
        }
        seen = {k: ask(v) for k, v in texts.items()}
        mean = {k: sum(v) / len(v) for k, v in seen.items()}
        turned = ask(texts["right"], list(reversed(range(len(pairs)))))
        # Rewards that are one place off show only among answers with other rewards
        kinds = ["right" if i % 3 else "wrong, of the same length" for i in range(len(pairs))]
        among = ask([texts[kind][i] for i, kind in enumerate(kinds)])
        single = [s.reward(prompts=[s.asker.put(r["prompt"])], completions=[r["answer"]], **problems.columns([r]))[0]
                  for r, _ in pairs]  # fmt: skip
        faults = _reward_faults(pairs, texts, seen)
        alone = among == [seen[kind][i] for i, kind in enumerate(kinds)]
        if not alone or not seen["right"] == turned == single:
            faults.append("an answer gets another reward among other answers, in another order or at a second call")
        rewards_shown = ", ".join(f"{k} {v:.3g}" for k, v in mean.items())
        return Finding(
            not faults, "; ".join(faults) or f"mean rewards over {len(pairs)} questions: {rewards_shown}",
            "right answers get a higher reward than wrong ones of their length, long ones and empty ones, independently of the batch",
            "the reward is constant or depends on length alone, so it teaches nothing or the wrong thing\n"
            "the function reads another column than the answer, or another part of the completion\n"
            "it looks for the answer anywhere in the text: in 1427 for 142, or in a list of many numbers\n"
            "it reads only the last number, but answers are fractions or formulas: compare with math-verify\n"
            "it draws at random, keeps a state, or mixes up the order of its batch",
            evidence={"mean": mean},
            cause="the reward looks for the answer anywhere in the text, also inside another number"
            if len(faults) == 1 and INSIDE in faults[0] else "",
        )  # fmt: skip

    return check


def _reward_faults(
    pairs: list[tuple[dict, str]], texts: dict[str, list[str]], seen: dict[str, list[float]]
) -> list[str]:
    """Return what is wrong with the rewards `seen` of `texts`, by kind of answer."""
    right, _, _, empty, long, _ = (sum(v) / len(v) for v in seen.values())
    all_of_it = {v for values in seen.values() for v in values}
    faults = []
    if len(all_of_it) == 1:
        faults.append(f"a constant reward: every answer gets {right:g}")
    elif seen["right"] == seen["wrong, of the same length"]:
        faults.append(
            f"right and wrong answers of one length get the same reward ({right:g}), empty answers {empty:g}, long ones "
            f"{long:g}: the reward depends on length alone"
        )
    else:
        better = sum(a > b for a, b in zip(seen["right"], seen["wrong, of the same length"], strict=True))
        if better < 0.9 * len(pairs):
            faults.append(
                f"only {better} of {len(pairs)} right answers get a higher reward than a wrong one of their length"
            )
        near = [(a, b, t) for a, b, t in zip(seen["right"], seen["one digit off"], texts["one digit off"], strict=True)]
        same = [(pairs[i][0]["answer"], t) for i, (a, b, t) in enumerate(near) if b >= a]
        if len(same) > 0.1 * len(pairs):
            faults.append(f"{len(same)} of {len(pairs)} answers with a changed digit get as much reward as the right one, e.g. "
                          f"{same[0][1]!r} for {same[0][0]!r}")  # fmt: skip
        more = zip(seen["right"], seen["one digit more"], pairs, texts["one digit more"], strict=True)
        inside = [(r["answer"], t) for a, b, (r, other), t in more if b >= a and t != other]
        if len(inside) > 0.1 * len(pairs):
            faults.append(f"{len(inside)} of {len(pairs)} {INSIDE}, e.g. {inside[0][1]!r} for {inside[0][0]!r}")
        if empty >= right:
            faults.append(f"the empty answer gets {empty:g}, a right one {right:g}")
        if long >= right:
            faults.append(f"a long wrong answer gets {long:g}, a right one {right:g}")
    return faults


def questions(s: Subject) -> Gate:
    title = "no held-out question is in the training set or in the prompt's examples"

    @gate("questions", rows="C6", title=title, reads="data")
    def check(context: GateContext) -> Finding:
        """Compares prompts and sources of both splits, without case and spaces, and the solved questions that precede each prompt."""
        data = context.look()[1].data

        def sets(rows: list[dict[str, str]]) -> list[set[str]]:
            return [{" ".join(r[k].casefold().split()) for r in rows} for k in ("prompt", "source")]

        learnt, held_out = sets(data["questions"].rows), sets(data["val"].rows)
        repeated = sets(s.asker.solved)[0] & held_out[0]
        both = [sorted(a & b) for a, b in zip(learnt, held_out, strict=True)]
        wrong = [
            f"{len(b)} {k} in both splits, e.g. {b[0]!r}"
            for k, b in zip(("prompts", "sources"), both, strict=True)
            if b
        ]
        wrong += [f"{len(repeated)} held-out questions appear solved in every prompt"] * bool(repeated)
        return Finding(
            not wrong, "; ".join(wrong) or f"{len(learnt[0]):,} training questions, {len(held_out[0])} held-out ones",
            "no prompt and no source in both splits",
            "split by source: two wordings of one question have one source\nthe held-out file is a part of the training file",
        )  # fmt: skip

    return check


# -------------------------------------------------------------------------------------------------------------- samples
def samples(s: Subject) -> Gate:
    title = "training uses the policy's own answers, up to their end token"

    @gate("samples", rows="L1 L3 R1", title=title, reads="data model loss train", explains=True)
    def check(context: GateContext) -> Finding:
        """Compares the distributions that the first tokens were drawn from with those of each answer alone, without padding. Compares the
        log-probability of the sampled answers with its expected value (the entropy of the same distributions), by prompt length.
        Checks where each answer ends, and whether a low temperature leaves one answer."""
        u, wrong = unit(s, context), []
        excesses, log_probs = [], alone(u, s.cfg.temperature)
        errors, limit = (
            drawn_elsewhere(u, log_probs, s.cfg.temperature),
            DRAWN if u.run.precision == "fp32" else DRAWN_16,
        )
        allowed = truncated(u, log_probs, s.cfg.temperature)
        far_off = {n: gap for n, gap in errors.items() if gap > limit}
        same = one_answer(u, log_probs, s.cfg.temperature)
        wrong += [same] * bool(same)
        wrong += [
            f"answers to prompts of {n} tokens were drawn from other distributions than each text alone has (they differ by {gap:.2g})"
            for n, gap in far_off.items()
        ]
        for start in range(0, len(u.rows), s.cfg.num_generations):
            group = slice(start, start + s.cfg.num_generations)
            excess, variance = 0.0, 1e-2
            for (_, after), p in zip(u.ids[group], allowed[group], strict=True):
                each = p.exp() * p.clamp_min(NEVER)
                h = -each.sum(-1)
                nll = -p.clamp_min(NEVER).gather(-1, torch.tensor(after, device=p.device)[:, None])[:, 0]
                excess += (nll - h).sum().item()
                variance += ((each * p.clamp_min(NEVER)).sum(-1) - h.square()).sum().item()
            far, n = excess / variance**0.5, len(u.ids[start][0])
            excesses.append(f"{far:+.1f} sd for prompts of {n} tokens")
            if abs(far) > FAR:
                wrong.append(
                    f"answers to prompts of {n} tokens are not this policy's: {excess:+.0f} nats, {far:+.1f} sd"
                )
        most, cut = s.cfg.max_new_tokens, 0
        for _, after in u.ids:
            ends = [i for i, t in enumerate(after) if t in s.asker.ends]
            cut += not ends
            if ends and ends[0] < len(after) - 1:
                wrong.append(f"{len(after) - 1 - ends[0]} tokens after the end token of an answer count as answer")
            if not ends and len(after) < most:
                wrong.append(f"an answer of {len(after)} of {most} tokens is without the token that ends it")
        return Finding(
            not wrong, "; ".join(dict.fromkeys(wrong)) or f"{', '.join(excesses)}; {len(u.ids) - cut} of {len(u.ids)} answers end" +
            (f"; drawn from the text's own distributions within {max(errors.values()):.1e}" if errors else ""),
            f"distributions within {limit:g}, log-probability within {FAR:g} sd of its expected value; each answer ends with its end "
            "token, which counts",
            "prompts are padded on the right for generation: the answer then continues the padding\n"
            "sampling uses another temperature than the loss, a top-k, or weights that are not the policy's\n"
            "the end token is masked because it is also the pad: mask by length, never by id (the model then never stops)",
            evidence={"excess": excesses, "cut": cut, "drawn": errors},
            cause="the sampling temperature is too low: equal answers have equal rewards, and a group of them no gradient" if same else
            "prompts are padded on the right for generation, or positions count the padding: of several lengths, only the longest "
            "prompt, which has no padding, is answered as it is alone" if far_off and max(errors) not in far_off else "",
        )  # fmt: skip

    return check


def drawn_elsewhere(u: Unit, log_probs: list[Tensor], temperature: float) -> dict[int, float]:
    """Return {prompt length: largest total variation distance} between the distributions that the first tokens were drawn from and
    those of each text alone, `log_probs`. Log-probabilities of what was drawn show a difference only over many answers."""
    found: dict[int, float] = {}
    for i, ((before, after), log_p) in enumerate(zip(u.ids, log_probs, strict=True)):
        for t, logits in enumerate(u.drawn_from[: len(after)]):
            gap = ((logits[i] / temperature).softmax(-1) - log_p[t].exp()).abs().sum().item() / 2
            found[len(before)] = max(found.get(len(before), 0.0), gap)
    return found


def group_advantages(rewards: Tensor) -> dict[str, Tensor]:
    """Return the advantages of rewards (groups, answers): GRPO's, then other published forms."""
    centred = rewards - rewards.mean(1, keepdim=True)
    n = rewards.shape[1]
    return {
        "divided by the group's standard deviation": centred / (rewards.std(1, keepdim=True) + 1e-4),
        "not divided (Dr. GRPO, Liu 2025)": centred,
        "divided by the batch's standard deviation (Lite PPO, Liu 2025)": centred / (rewards.std() + 1e-4),
        "against the mean of the others (RLOO, Ahmadian 2024)": centred * n / max(n - 1, 1),
    }


def advantages(s: Subject) -> Gate:
    title = "an answer's advantage is its reward relative to its group"

    @gate("advantages", rows="R1", title=title, reads="data model loss train", explains=True)
    def check(context: GateContext) -> Finding:
        """Computes the declared reward of each answer alone, minus its group's mean, divided by the group's standard deviation, or another
        published form of it (see `group_advantages`)."""
        u = unit(s, context)
        texts = [s.asker.tokenizer.decode(after, skip_special_tokens=True) for _, after in u.ids]
        own = [
            s.reward(prompts=[r["prompt"]], completions=[c], **problems.columns([r]))[0]
            for r, c in zip(u.rows, texts, strict=True)
        ]
        groups = torch.tensor(own, dtype=torch.float64).view(-1, s.cfg.num_generations)
        got = u.batch["advantages"].cpu().double().view(-1, s.cfg.num_generations)
        equal = int((groups.std(1) == 0).sum())
        forms = group_advantages(groups)
        form = min(forms, key=lambda name: (got - forms[name]).abs().max().item())
        form = form if (got - forms[form]).abs().max() <= 1e-3 else next(iter(forms))
        due = forms[form]
        questions = [{r["question"] for r in u.rows[i : i + s.cfg.num_generations]}
                 for i in range(0, len(u.rows), s.cfg.num_generations)]  # fmt: skip
        if mixed := [len(q) for q in questions if len(q) > 1]:
            return Finding(
                False, f"{len(mixed)} of {len(questions)} groups contain answers to {max(mixed)} questions",
                f"{s.cfg.num_generations} answers to one question in each group",
                "the answers of a group belong to different questions, so advantages compare questions, not answers. Rows must be "
                "ordered question by question, not round by round (two loops in the other order, a sampler, a shuffle)",
                evidence={"questions": [sorted(q) for q in questions]},
            )  # fmt: skip
        if equal == len(groups):
            raise Skip(
                f"in all {equal} groups every answer gets a reward of {own[0]:g}: there is nothing to compare or learn yet"
            )
        gap, centre = (got - due).abs().max().item(), got.mean(1).abs().max().item()
        wrong = [f"advantages are not centred: a group's mean is {centre:.3g}"] if centre > 1e-3 else []
        if gap > 1e-3 and not wrong:
            at = int((got - due).abs().flatten().argmax())
            wrong.append(f"{texts[at].strip()!r} has a reward of {own[at]:g} and in its group an advantage of {due.flatten()[at]:.3g}, but "
                         f"training uses {got.flatten()[at]:.3g}")  # fmt: skip
        return Finding(
            not wrong, "; ".join(wrong) or f"{len(own)} answers, mean reward {groups.mean():.3g}, equal rewards in {equal} of "
            f"{len(groups)} groups, {form}", "(reward - mean) / standard deviation of its group, within 1e-3",
            "rewards are assigned to other answers (shuffled, another order)\n"
            "advantages are plain rewards, or relative to another group or the whole batch\n"
            "--shuffle-rewards, the control experiment, is switched on",
            evidence={"rewards": own, "got": got.flatten().tolist(), "due": due.flatten().tolist()}, batch=u.batch,
        )  # fmt: skip

    return check


# ----------------------------------------------------------------------------------------------------------- evaluation
def prompts(s: Subject) -> Gate:
    title = "evaluation prompts equal training prompts, in a batch and alone"

    @gate("prompts", rows="L1 L8", title=title, reads="data model loss evaluate")
    def check(context: GateContext) -> Finding:
        """Compares the ids that enter the embedding while `evaluate` generates with the prompt of training, and greedy answers to three
        prompts of different lengths in one batch with those of each alone."""
        u, wrong = unit(s, context), []
        rows = [{**u.rows[0], "prompt": u.rows[0]["question"]}, u.stage.data["val"].rows[0]]
        rows.append({**rows[1], "prompt": s.asker.after(rows[0], rows[1]["prompt"])})
        with heard(u.stage.model) as seen_ids:
            u.run.measure(u.stage, View(Problems(rows), range(len(rows))))
        trained = u.ids[0][0]
        if trained not in [row[-len(trained) :] for ids in seen_ids for row in ids.tolist()]:
            wrong.append(
                f"in training, answers follow {s.asker.tokenizer.decode(trained[-24:])!r}; no evaluation prompt ends so"
            )

        def answers_to(some: list[dict]) -> list[str]:
            with evaluating(u.stage.model), u.run.autocast():
                return [t.caption for t in u.stage.predict(u.stage.model, Problems(some).collate(some))]

        together, single = answers_to(rows), [answers_to([r])[0] for r in rows]
        differ = [(a, b) for a, b in zip(together, single, strict=True) if a != b]
        wrong += [f"answers differ: {differ[0][0]!r} in a batch, {differ[0][1]!r} alone"] if differ else []
        return Finding(
            not wrong, "; ".join(wrong) or f"{len(rows)} answers equal, e.g. {together[0]!r}",
            "every evaluation prompt ends with the tokens of training; equal answers",
            "prompts are padded on the right for generation: the answer then continues the padding\n"
            "only one of training and evaluation adds a template, a BOS or solved questions",
            evidence={"together": together, "alone": single},
        )  # fmt: skip

    return check


def accuracy(s: Subject) -> Gate:
    title = "known answers get the right accuracy"

    @gate("accuracy", rows="R1", title=title, reads="data evaluate metric")
    def check(context: GateContext) -> Finding:
        """Runs `evaluate` with a policy that returns prepared answers: right, right after a calculation, corrected to a wrong one, empty."""
        run, stage = context.look()
        rows = stage.data["val"].rows[:8]
        wrong = {
            r["answer"]: next((o["answer"] for o in rows if problems.differ(o["answer"], r["answer"])), "")
            for r in rows
        }
        kinds = [lambda a, o: (a, 1), lambda a, o: (o, 0), lambda a, o: ("", 0)]
        if problems.number(rows[0]["answer"]) is not None:
            worked = lambda a, o: (f"{o} and so {a}", 1)  # noqa: E731
            # More of these than of the corrected ones, so that a metric that reads the first number gets another score.
            kinds = [kinds[0], worked, worked, lambda a, o: (f"{a}, no, {o}", 0), kinds[2]]
        probes = [kinds[i % len(kinds)](r["answer"], wrong[r["answer"]]) for i, r in enumerate(rows)]
        waiting = [s.asker.answer(text) for text, _ in probes]

        def written(input_ids: Tensor, **_) -> Tensor:
            now = [waiting.pop(0) for _ in input_ids]
            width = max(map(len, now))
            pad = s.asker.tokenizer.pad_token_id
            return torch.cat(
                [input_ids, torch.tensor([a + [pad] * (width - len(a)) for a in now], device=input_ids.device)], 1
            )

        stage.model.generate = written
        try:
            got = run.measure(stage, View(Problems(rows), range(len(rows))))["accuracy"]
        finally:
            del stage.model.generate
        due = sum(right for _, right in probes) / len(probes)
        listed = ", ".join(repr(text) for text, _ in probes[: len(kinds)])
        return Finding(
            abs(got - due) < 1e-6, f"accuracy is {got:.3f} for answers of which {due:.3f} are right, such as {listed}",
            f"{due:.3f}: the last number counts",
            "the metric reads the first number, which is part of the calculation\nthe metric also reads what follows the end of an answer\n"
            "answers are assigned to other questions",
            evidence={"answers": [text for text, _ in probes], "got": got, "due": due},
        )  # fmt: skip

    return check
