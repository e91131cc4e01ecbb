"""Gates of RLHF: the reward, sampling, which tokens are scored, returns, the loss.

They require: a `Writer` for the model, its reference in `stage.frozen_modules`, its prompts in `stage.data`, its KL coefficient
in `stage.state["controller"]`; batches with `input_ids`, `mask`, `response`, `valid`, `log_prob`, `value`, `advantage` and `return`.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, GateContext, fetch
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.optim import exact
from trainworthy.core.loop.run import Rehearsal, Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.llm.gates import fresh_export, served
from trainworthy.recipes.rl.control.gates import own_forms
from trainworthy.recipes.rl.language.data.rewards import Reward, Sample, ask, fault
from trainworthy.recipes.rl.language.gates import rlhf_causes
from trainworthy.recipes.rl.language.gates.rlhf_recording import Iteration, made
from trainworthy.recipes.rl.language.kl_control import BOUND
from trainworthy.recipes.rl.language.models.policy import Writer, own

TEXTS, WRITTEN = 96, 24  # completions that a reward is tested on; completions that are compared token by token
FORMULA = 1e-6  # relative to the sum of absolute values, in fp32: both losses are computed from the same logits
RIGHT = "the formula"
EDGE = 1e-4  # cumulative probability: closer to the boundary between two tokens, rounding decides which one is drawn


def of(reward: Reward, base: str, tokenizer: Any) -> list[Gate]:
    """Return the gates of a recipe that learns from this reward. `base`: the model that training starts from."""
    own = [reward_gate(reward), generation, score, returns_gate(reward), formula, controller]
    return [*own, fresh_export.exported(base, tokenizer, lambda model: model.lm, served.of_prompts)]


# ------------------------------------------------------------------------------------------------------- what gates read
def whole(one: Iteration) -> dict[str, Tensor]:
    """Return the first pass of an iteration as one batch."""
    return {k: torch.cat([b[k] for b in one.batches]) for k in one.batches[0]}


def known(stage: Stage) -> dict[tuple[int, ...], int]:
    """Return the number of tokens of each prompt, by its padded row, independently of the batch's own mask."""
    prompts, pad = stage.data["prompts"], stage.model.pad
    return {(*[pad] * (prompts.width - len(ids)), *ids): len(ids) for ids in prompts.ids}


def unpadded(batch: dict, row: int, end: int, lengths: dict) -> tuple[Tensor, Tensor]:
    """Return (prompt (p,), answer (n,)) without padding. The answer ends with the end token, if it has one."""
    prompt, completion = batch["input_ids"][row], batch["response"][row]
    ends = (completion == end).nonzero().flatten()
    return prompt[len(prompt) - lengths[tuple(prompt.tolist())] :], completion[: int(ends[0]) + 1] if len(
        ends
    ) else completion


@torch.no_grad()
def alone(model: Writer, prompt: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of an answer (n,), values before its tokens (n,)), computed alone: no padding, no mask, no cache."""
    states = model.body(input_ids=torch.cat([prompt, answer])[None], use_cache=False).last_hidden_state
    states = states[0, len(prompt) - 1 : -1]
    log_p = (exact(model.lm.get_output_embeddings()(states)) / model.temperature).log_softmax(-1)
    return own(log_p, answer), exact(model.head(states)[:, 0])


# ---------------------------------------------------------------------------------------------------------------- gates
def reward_gate(reward: Reward) -> Gate:
    title = "the reward accepts any text, distinguishes texts, and depends on more than length"

    @gate("reward", rows="R1", title=title, reads="data model")
    def check(context: GateContext) -> Finding:
        """Runs the probes of rewards.py on texts of the untrained policy, complete and cut short, and on empty texts."""
        run, stage = context.look()
        prompts = stage.data["prompts"]
        order = prompts.order(context.cfg.run.seed, "reward").tolist()[:TEXTS]
        batch = fetch(prompts, order, context.cfg.run.seed, run.device)
        each, most = [batch[k] for k in ("input_ids", "mask", "draws")], context.cfg.rollout_batch_size
        with evaluating(stage.model):  # no more at once than a rollout
            parts = [stage.model.write(*(x[i : i + most] for x in each)) for i in range(0, len(order), most)]
        response, valid = (torch.cat(x) for x in zip(*parts, strict=True))
        rows = [row[keep].tolist() for row, keep in zip(response, valid, strict=True)]
        rows += [row[: 1 + i % max(1, len(row))] for i, row in enumerate(rows)]
        texts = prompts.tokenizer.batch_decode(rows, skip_special_tokens=True)
        sample = Sample([*batch["prompt"], *batch["prompt"]], texts)
        wrong = fault(reward, sample)
        found = "" if wrong else ask(reward, sample.prompts, texts)
        return Finding(
            not wrong, wrong or f"{len(texts)} texts get rewards of {found.min():.3g} to {found.max():.3g}, {found.mean():.3g} on average",
            "a finite reward for each text, the same at every call; rewards differ between texts; an empty answer does not get the highest",
            "the reward raises, or returns NaN or a wrong number of rewards, for an empty or unusual text\n"
            "the reward is constant: it searches the answer where it never is, or its scale rounds all differences away\n"
            "the reward depends on length alone: divide by the length, or reward what is meant",
            evidence={"texts": texts[:8]},
        )  # fmt: skip

    return check


@gate(
    "generation",
    rows="L1 L3",
    title="completions in a batch equal those of each prompt alone, up to the end token",
    reads="data model train",
)
def generation(context: GateContext) -> Finding:
    """Generates from prompts of different lengths in one batch. Then it computes each token's probabilities with one plain forward pass of
    the text before it: the random number that drew the token must lie in that token's interval. Uses the rehearsed model, because an
    untrained one may give the same output for any input."""
    run, stage, _ = rehearsed(context)
    model, prompts = stage.model, stage.data["prompts"]
    by_length = sorted(prompts.order(context.cfg.run.seed, "written").tolist()[:400], key=lambda i: len(prompts.ids[i]))
    chosen = by_length[:: max(1, len(by_length) // WRITTEN)][:WRITTEN]
    batch = fetch(prompts, chosen, context.cfg.run.seed, run.device)
    wrong, ended, lengths = [], 0, known(stage)
    with evaluating(model), run.autocast():
        response, valid = model.write(batch["input_ids"], batch["mask"], batch["draws"])
        for row, index in enumerate(chosen):
            prompt, answer = unpadded({**batch, "response": response}, row, model.eos, lengths)
            ended += int(answer[-1] == model.eos)
            if int(valid[row].sum()) != len(answer) or not valid[row, : len(answer)].all():
                wrong.append(
                    f"prompt {index}: {int(valid[row].sum())} tokens count, but {len(answer)} were generated with the end token"
                )
                continue
            logits = model.lm(input_ids=torch.cat([prompt, answer])[None], use_cache=False).logits
            logits = exact(logits[0, len(prompt) - 1 : -1])
            high = (logits / model.temperature).softmax(-1).cumsum(-1)
            at = answer[:, None]
            top, low = high.gather(1, at)[:, 0], high.gather(1, (at - 1).clamp_min(0))[:, 0] * (answer > 0)
            drawn, room = batch["draws"][row, : len(answer)], EDGE if run.precision == "fp32" else 5e-2
            off = ((drawn < low - room) | (drawn > top + room)).nonzero().flatten()
            if len(off):
                wrong.append(
                    f"prompt {index}: token {int(off[0]) + 1} of {len(answer)} is not the one that its random number draws alone"
                )
    short, long = (len(prompts.ids[i]) for i in (chosen[0], chosen[-1]))
    return Finding(
        not wrong, f"{len(wrong)} of {len(chosen)}: {wrong[0]}" if wrong else
        f"{len(chosen)} prompts of {short} to {long} tokens give the same answers as alone; {ended} end by themselves",
        "each token is the one that its random number draws in a plain forward pass of the text before it; the end token counts",
        "the end token is dropped from the answer, or padding is counted: mask by length, never by id (the model then never stops)\n"
        "prompts are padded on the right: the answer continues the padding\n"
        "the attention mask is missing, position ids count the padding, or the temperature differs from that of the loss",
        evidence={"wrong": wrong[:8], "ended": ended},
    )  # fmt: skip


@gate(
    "score",
    rows="L1 L2 L3 R3",
    title="log-probabilities and values of a rollout equal those of each answer alone",
    reads="data model loss train",
)
def score(context: GateContext) -> Finding:
    """Compares the batches of two iterations of `train()` with each text computed alone, without padding. In the first loss of an iteration
    the ratio must be 1. The reference must equal the initial weights."""
    run, stage, iterations = made(context)
    wrong, worst = [], {"log-probabilities": 0.0, "values": 0.0, "ratio": 0.0}
    limit, lengths = 1e-3 if run.precision == "fp32" else 0.2, known(stage)
    for k, one in enumerate(iterations):
        batch, model = whole(one), one.model.eval()
        for row in range(min(len(batch["response"]), 64)):
            prompt, answer = unpadded(batch, row, model.eos, lengths)
            n = len(answer)
            if batch["valid"][row].nonzero().flatten().tolist() != list(range(n)):
                wrong.append(
                    f"iteration {k + 1}: {int(batch['valid'][row].sum())} tokens of an answer of {n} (with its end token) count"
                )
                break
            with run.autocast():
                log_p, value = alone(model, prompt, answer)
            worst["log-probabilities"] = max(
                worst["log-probabilities"], (batch["log_prob"][row, :n] - log_p).abs().max().item()
            )
            worst["values"] = max(worst["values"], (batch["value"][row, :n] - value).abs().max().item())
        first = one.batches[0]
        with torch.no_grad(), run.autocast():
            got = stage.loss(model, first)["policy"].item()
        due = -exact(first["advantage"][first["valid"]]).sum().item()
        worst["ratio"] = max(worst["ratio"], abs(got - due) / exact(first["advantage"].abs()).sum().item())
    _, start = context.look()
    begun, now = start.model.state_dict(), stage.frozen_modules["reference"].state_dict()
    if other := [n for n, t in now.items() if not torch.equal(t, begun[n].to(t))]:
        wrong.append(f"the reference does not equal the initial weights: {len(other)} tensors differ, e.g. {other[0]}")
    wrong += [f"{k} differ by up to {v:.2g}" for k, v in worst.items() if not v <= limit]
    errors = ", ".join(f"{k} within {v:.1e}" for k, v in worst.items())
    return Finding(
        not wrong, "; ".join(wrong) or f"{len(iterations)} iterations: {errors}; the reference is bitwise equal to the initial weights",
        f"equal within {limit:g}, a first ratio of 1, and a reference that does not change",
        "answers are shifted by one: a hidden state predicts the token after it\n"
        "position ids count the padding on the left, or no attention mask is passed\n"
        "the end token is dropped, or padding is a part of the answer\n"
        "sampling and loss differ in dropout, precision or temperature\n"
        "the reference is trained, follows the policy, or is another model (loaded by name after --init-from)",
        evidence={**worst, "wrong": wrong[:8]}, batch=iterations[0].batches[0],
    )  # fmt: skip


def returns_gate(reward: Reward) -> Gate:
    title = "token rewards are the final reward minus the KL penalty; advantages are whitened over answers"

    @gate("returns", rows="L2 R2 R3", title=title, reads="data model loss state train", explains=True)
    def check(context: GateContext) -> Finding:
        """Compares returns and advantages of two iterations with their definition. A token's reward is -KL coefficient x (log p - log p of
        the initial model), of each answer computed alone; the last token also gets the reward. Advantages are the definition's sums,
        whitened over the tokens of all answers."""
        run, stage, iterations = made(context)
        cfg, start, prompts = context.cfg, context.look()[1].model, stage.data["prompts"]
        prompt_texts = {tuple(ids): text for ids, text in zip(prompts.ids, prompts.texts, strict=True)}
        lengths = known(stage)
        limit, wrong, measured, cause = 5e-3 if run.precision == "fp32" else 0.2, [], [], ""
        for k, one in enumerate(iterations):
            batch, size, spent = whole(one), one.model.returns.rms.item(), []
            gaps = {"returns": 0.0, "advantages": 0.0}
            rows, answers, scale = [], [], 1e-9
            for row in range(len(batch["response"])):
                prompt, answer = unpadded(batch, row, one.model.eos, lengths)
                with run.autocast():
                    log_p, value = alone(one.model, prompt, answer)
                    kl = log_p - alone(start, prompt, answer)[0]
                text = prompts.tokenizer.decode(answer, skip_special_tokens=True)
                got = ask(reward, [prompt_texts[tuple(prompt.tolist())]], [text]).item()
                paid = (-one.kl_coef * kl).tolist()
                paid[-1] += got
                values = (value * size).tolist()
                due = torch.tensor(rlhf_causes.estimates(paid, values, cfg.gamma, cfg.gae_lambda), device=run.device)
                rows.append(due)
                spent.append(kl.sum().item())
                back = exact(batch["return"][row, : len(due)]) * size
                answers.append(rlhf_causes.Answer(kl.tolist(), got, values, back.tolist()))
                gaps["returns"] = max(gaps["returns"], (back - due - value * size).abs().max().item())
                scale = max(scale, (due + value * size).abs().max().item())
            every = run.gather(torch.cat(rows))
            for row, due in enumerate(rows):
                white = (due - every.mean()) / (every.std() + 1e-8)
                gaps["advantages"] = max(
                    gaps["advantages"], (batch["advantage"][row, : len(due)] - white).abs().max().item()
                )
            kl = run.gather(torch.tensor(spent, device=run.device)).mean().item()
            gaps["returns"] /= scale
            if gaps["returns"] > limit:
                cause = cause or rlhf_causes.of_returns(answers, one.kl_coef, cfg.gamma, cfg.gae_lambda, limit * scale)
            elif gaps["advantages"] > limit:
                seen = [exact(batch["advantage"][row, : len(due)]) for row, due in enumerate(rows)]
                cause = cause or rlhf_causes.of_advantages(rows, seen, every, limit)
            gaps["the KL that the controller gets"] = abs(one.kl - kl) / max(1.0, abs(kl))
            wrong += [
                f"iteration {k + 1}: {name} differ by up to {v:.2g}" for name, v in gaps.items() if not v <= limit
            ]
            measured.append(
                f"KL {kl:.3f} at a coefficient of {one.kl_coef:.3g}, largest difference {max(gaps.values()):.1e}"
            )
        return Finding(
            not wrong, "; ".join(wrong) or "; ".join(measured), f"within {limit:g} of the largest return, or of a standard deviation",
            "the KL penalty has the wrong sign: it must be subtracted from the reward\n"
            "the KL also counts padding or the prompt, or is to another model than the initial one (a reference that follows the policy)\n"
            "the reward is added at another token than the last, or is that of other texts (with the prompt)\n"
            "advantages are whitened over padding, or not at all; or a sum reaches over the end of an answer",
            evidence={"shown": measured}, cause=cause,
        )  # fmt: skip

    return check


@gate(
    "formula",
    rows="R3",
    title="the loss is PPO's, with clipped ratio and value, over answer tokens only",
    reads="model loss train",
    explains=True,
    compares_loss=True,
)
def formula(context: GateContext) -> Finding:
    """Compares the recipe's own loss with the formula, token by token in double precision, from the same logits. Old log-probabilities and
    values of the batch are changed so that both clips are active, and padding holds arbitrary numbers."""
    run, stage, iterations = made(context)
    second = iterations[1]
    cfg, model, batch = context.cfg, second.model.eval(), {k: v.clone() for k, v in second.batches[0].items()}
    draws = torch.Generator().manual_seed(context.cfg.run.seed)
    valid = batch["valid"]
    for key, size in (("log_prob", 0.4), ("value", 0.5), ("return", 0.5)):
        moved = batch[key] + size * torch.randn(valid.shape, generator=draws).to(run.device)
        batch[key] = torch.where(valid, moved, torch.full_like(moved, 3.0))
    batch["advantage"] = torch.where(valid, batch["advantage"], torch.full_like(batch["advantage"], -5.0))
    with torch.no_grad(), run.autocast():
        terms = {k: v.item() for k, v in stage.loss(model, batch).items()}
        log_p, value = model(batch["input_ids"], batch["mask"], batch["response"])
    stored = (exact(batch[k][valid]) for k in ("log_prob", "value", "return", "advantage"))
    stated = _stated(cfg, exact(own(log_p, batch["response"])[valid]), exact(value[valid]), *stored)
    limit, wrong, met, cause, gaps = (FORMULA if run.precision == "fp32" else 5e-2), [], [], "", {}
    for term, forms in stated.items():
        near = {
            name: abs(terms.get(term, math.nan) - v.sum().item()) / v.abs().sum().item() for name, v in forms.items()
        }
        gaps[term] = near[RIGHT]
        if near[RIGHT] <= limit:
            met.append(f"{term} within {near[RIGHT]:.1e}")
            continue
        known = next((name for name, gap in near.items() if gap <= limit), "")
        why = known or (_own_form(run, stage, term, model, batch) if term in terms else "there is no such term")
        if why:
            wrong.append(
                f"{term} is {terms.get(term, math.nan):.6g}, by the formula {forms[RIGHT].sum().item():.6g} ({why})"
            )
            cause = cause or known
        else:
            met.append(f"{term} of another form, with the right gradients")
    return Finding(
        not wrong, "; ".join(wrong) or f"{int(valid.sum())} tokens: {', '.join(met)}",
        f"within {limit:g} of the sum of absolute values, or gradients along the advantages and to the returns",
        "padding is part of the loss: advantages and errors must be masked\n"
        "the ratio is inverted, the sign is wrong, or only one side is clipped\n"
        "the loss is a mean, but must be a sum (core divides)", evidence={"gaps": gaps}, batch=batch, cause=cause,
    )  # fmt: skip


def _stated(
    cfg: Any, new: Tensor, value: Tensor, old: Tensor, before: Tensor, back: Tensor, gain: Tensor
) -> dict[str, dict[str, Tensor]]:
    """Return for each term the formula (`RIGHT`) and known mistakes, token by token, (n,) each in double precision."""
    ratio = (new - old).exp()
    plain, held = -ratio * gain, -ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * gain
    free = cfg.vf_coef * 0.5 * (value - back).square()
    kept = cfg.vf_coef * 0.5 * (before + (value - before).clamp(-cfg.clip_range_vf, cfg.clip_range_vf) - back).square()
    policy = {
        RIGHT: torch.max(plain, held),
        "the maximum of the two gains is used instead of the minimum": torch.min(plain, held),
        "the ratio is not clipped": plain,
        "the ratio is clipped on both sides whatever the advantage is": held,
    }
    unclipped = "the value is clipped against the new value instead of the rollout's, or not at all (--clip-range-vf inf if that is meant)"
    larger = {
        RIGHT: torch.max(free, kept),
        "the lower of the two errors is used": torch.min(free, kept),
        unclipped: free,
    }
    mean = "the loss is a mean over the tokens, but must be a sum (core divides)"
    found = {"policy": policy, "value": larger}
    return {term: forms | {mean: forms[RIGHT] / len(new)} for term, forms in found.items()}


def _own_form(run: Run, stage: Stage, term: str, model: nn.Module, batch: dict) -> str:
    """Return what is wrong with a term that is not the formula's: the policy must follow the advantages by its ratio, the value its target."""
    check, place = {"policy": (own_forms.policy, 0), "value": (own_forms.value, 1)}[term]

    def read() -> Tensor:
        log_p, value = model(batch["input_ids"], batch["mask"], batch["response"])
        return (own(log_p, batch["response"]), value)[place]

    with run.autocast():
        return check(lambda one: stage.loss(model, one)[term].float(), model, batch, read)


@gate("controller", rows="R2", title="the KL coefficient adapts to the KL, within bounds", reads="state train")
def controller(context: GateContext) -> Finding:
    """Gives the stage's own controller KLs that are far too large, zero, and on target."""
    _, stage = context.build(Rehearsal(steps=1))
    one, cfg = stage.state["controller"], context.cfg
    if not cfg.init_kl_coef:
        raise Skip("there is no KL penalty: --init-kl-coef 0")
    wrong, begun = [], one.value

    def updated(kl: float, n: int) -> list[float]:
        """Return the coefficient before and after each of `n` updates."""
        seen = [one.value]
        for _ in range(n):
            one.update(kl)
            seen.append(one.value)
        return seen

    high, low = updated(100 * cfg.target_kl, 300), updated(0.0, 600)
    for name, seen, sign in (("KL too large", high, 1), ("KL too small", low, -1)):
        steps = [b / a for a, b in pairwise(seen)]
        if not sign * (seen[1] - seen[0]) > 0:
            wrong.append(f"{name}: the coefficient goes from {seen[0]:.3g} to {seen[1]:.3g}")
        if max(steps) > 1 + 1.01 * cfg.kl_coef_rate or min(steps) < 1 - 1.01 * cfg.kl_coef_rate:
            wrong.append(
                f"{name}: the coefficient changes by a factor of {max(steps, key=lambda s: abs(s - 1)):.3g} in one update"
            )
    if max(high) > 1.01 * BOUND * begun or min(low) * 1.01 * BOUND < begun or not math.isfinite(max(high)):
        wrong.append(f"the coefficient goes from {min(low):.3g} to {max(high):.3g}")
    on_target = updated(cfg.target_kl, 1)
    if on_target[0] != on_target[1]:
        wrong.append(f"with the KL on target the coefficient changes from {on_target[0]:.3g} to {on_target[1]:.3g}")
    used = [i.kl_coef for i in made(context)[2]]
    if used[0] == used[1]:
        wrong.append("train() does not adapt the coefficient")
    return Finding(
        not wrong, "; ".join(wrong) or f"the coefficient starts at {begun:g} and stays between {min(low):.2g} and {max(high):.2g}",
        f"it rises if the KL is above --target-kl and falls if it is below, by at most {cfg.kl_coef_rate:.0%} per update, within a factor of "
        f"{BOUND:g}", "the error has the wrong sign\nthe error is not clipped, so that one unusual rollout decides for the next hundred\n"
        "train() never updates the controller, or gives it another KL",
    )  # fmt: skip
