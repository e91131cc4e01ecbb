"""Gates of RLHF: the reward, sampling, which tokens are scored, returns, the loss.

They require: a `Writer` for the model, its reference in `stage.frozen_modules`, its prompts in `stage.data`, its KL coefficient
in `stage.state["controller"]`; batches with `input_ids`, `mask`, `said`, `valid`, `log_prob`, `value`, `advantage` and `return`.
"""

import copy
import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, Proof, fetch
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.optim import exact
from trainworthy.core.loop.run import Plan, Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.rl.language.kl_control import BOUND
from trainworthy.recipes.rl.language.policy import Writer, own
from trainworthy.recipes.rl.language.rewards import Reward, Sample, ask, fault

TEXTS, WRITTEN = 96, 24  # completions that a reward is asked about; that are read token by token
FORMULA = 1e-6  # of the sum of the sizes, in fp32: one and the same logits
EDGE = 1e-4  # of the chances: as near to the border between two tokens rounding decides


def of(reward: Reward) -> list[Gate]:
    """The gates of a recipe that learns from this reward."""
    return [reward_gate(reward), generation, score, returns_gate(reward), formula, controller]


# ------------------------------------------------------------------------------------------------------- what gates read
@dataclass
class Unit:
    """What the recipe's own `train()` did in one unit."""

    price: float
    """Of a nat, when it began."""
    model: Writer
    """As it began."""
    batches: list[dict] = field(default_factory=list)
    """Of its first pass, just before the loss."""
    kl: float = math.nan
    """What the controller was told."""


def made(proof: Proof) -> tuple[Run, Stage, list[Unit]]:
    """Two units of the recipe's own `train()`: in the second the policy is no longer the reference. The head begins with something
    here: values of nothing hide what is done to them."""

    def make() -> tuple[Run, Stage, list[Unit]]:
        run, stage = proof.build(Plan(steps=2, peak=True))
        torch.nn.init.normal_(stage.model.head[-1].weight, std=0.1)
        loss, told, units = stage.loss, stage.state["controller"].update, {}
        share = proof.cfg.rollout_batch_size // run.world

        def listen(model: Writer, batch: dict) -> dict[str, Tensor]:
            if torch.is_grad_enabled():
                unit = units.setdefault(run.step, Unit(stage.state["controller"].value, copy.deepcopy(model)))
                if sum(len(b["said"]) for b in unit.batches) < share:
                    unit.batches.append({k: v.clone() for k, v in batch.items()})
            return loss(model, batch)

        def update(kl: float) -> None:
            units[run.step].kl = kl
            told(kl)

        stage.loss, stage.state["controller"].update = listen, update
        proof.train(proof.cfg, run, stage)
        stage.loss = loss
        return run, stage, [units[k] for k in sorted(units)]

    return proof.once("rlhf-made", make)


def whole(unit: Unit) -> dict[str, Tensor]:
    """The first pass of a unit in one batch."""
    return {k: torch.cat([b[k] for b in unit.batches]) for k in unit.batches[0]}


def known(stage: Stage) -> dict[tuple[int, ...], int]:
    """How many tokens each prompt has, by its padded row: what a batch says of its padding is not taken for granted."""
    prompts, pad = stage.data["prompts"], stage.model.pad
    return {(*[pad] * (prompts.width - len(ids)), *ids): len(ids) for ids in prompts.ids}


def parts(batch: dict, row: int, end: int, lengths: dict) -> tuple[Tensor, Tensor]:
    """(prompt (p,), answer (n,)) without padding: the answer ends with the token that ends a text, if it has one."""
    asked, said = batch["input_ids"][row], batch["said"][row]
    ends = (said == end).nonzero().flatten()
    return asked[len(asked) - lengths[tuple(asked.tolist())] :], said[: int(ends[0]) + 1] if len(ends) else said


@torch.no_grad()
def alone(model: Writer, prompt: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities of an answer (n,), values before its tokens (n,)), read by itself: no padding, no mask, no cache."""
    states = model.body(input_ids=torch.cat([prompt, answer])[None], use_cache=False).last_hidden_state
    states = states[0, len(prompt) - 1 : -1]
    log_p = (exact(model.lm.get_output_embeddings()(states)) / model.temperature).log_softmax(-1)
    return own(log_p, answer), exact(model.head(states)[:, 0])


# ---------------------------------------------------------------------------------------------------------------- gates
def reward_gate(reward: Reward) -> Gate:
    title = "the reward accepts any text, distinguishes texts, and depends on more than length"

    @gate("reward", rows="R1", title=title, reads="data model")
    def prove(proof: Proof) -> Finding:
        """The probes of rewards.py, on what the policy writes before it learns, whole and cut short, and on nothing at all."""
        run, stage = proof.look()
        prompts = stage.data["prompts"]
        order = prompts.order(proof.cfg.run.seed, "reward").tolist()[:TEXTS]
        batch = fetch(prompts, order, proof.cfg.run.seed, run.device)
        with evaluating(stage.model):
            said, valid = stage.model.write(batch["input_ids"], batch["mask"], batch["draws"])
        rows = [row[keep].tolist() for row, keep in zip(said, valid, strict=True)]
        rows += [row[: 1 + i % max(1, len(row))] for i, row in enumerate(rows)]
        texts = prompts.tokenizer.batch_decode(rows, skip_special_tokens=True)
        sample = Sample([*batch["prompt"], *batch["prompt"]], texts)
        wrong = fault(reward, sample)
        told = "" if wrong else ask(reward, sample.prompts, texts)
        return Finding(
            not wrong, wrong or f"{len(texts)} texts get {told.min():.3g} to {told.max():.3g}, {told.mean():.3g} on average",
            "a finite number for each text, the same whenever it is asked; not one for all, not the most for an empty answer",
            "a reward that raises, returns NaN or a wrong number of rewards on an empty or odd text\n"
            "a constant: an answer that is looked for where it never stands, or a scale that rounds everything away\n"
            "longer (or shorter) is better: divide by the length, or ask for what is meant",
            evidence={"texts": texts[:8]},
        )  # fmt: skip

    return prove


@gate(
    "generation",
    rows="L1 L3",
    title="completions in a batch equal those of each prompt alone, up to the end token",
    reads="data model train",
)
def generation(proof: Proof) -> Finding:
    """Prompts of different lengths at once; each token against the chances that one plain forward of the text so far gives, which
    must hold the number it was drawn by. Of the rehearsed model: an untrained one may say the same whatever it reads."""
    run, stage, _ = rehearsed(proof)
    model, prompts = stage.model, stage.data["prompts"]
    by_length = sorted(prompts.order(proof.cfg.run.seed, "written").tolist()[:400], key=lambda i: len(prompts.ids[i]))
    chosen = by_length[:: max(1, len(by_length) // WRITTEN)][:WRITTEN]
    batch = fetch(prompts, chosen, proof.cfg.run.seed, run.device)
    wrong, ended, lengths = [], 0, known(stage)
    with evaluating(model), run.autocast():
        said, valid = model.write(batch["input_ids"], batch["mask"], batch["draws"])
        for row, index in enumerate(chosen):
            prompt, answer = parts({**batch, "said": said}, row, model.eos, lengths)
            ended += int(answer[-1] == model.eos)
            if int(valid[row].sum()) != len(answer) or not valid[row, : len(answer)].all():
                wrong.append(
                    f"prompt {index}: {int(valid[row].sum())} tokens count, {len(answer)} with the end token were written"
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
                    f"prompt {index}: token {int(off[0]) + 1} of {len(answer)} is not what its draw stands for alone"
                )
    short, long = (len(prompts.ids[i]) for i in (chosen[0], chosen[-1]))
    return Finding(
        not wrong, f"{len(wrong)} of {len(chosen)}: {wrong[0]}" if wrong else
        f"{len(chosen)} prompts of {short} to {long} tokens, written as alone; {ended} end by themselves",
        "each token the one that its draw stands for in a plain forward of the text before it; the end token counts",
        "the end token is dropped from the answer, or what pads is counted: mask by length, never by id (it then never stops)\n"
        "prompts padded on the right: the answer continues the padding\n"
        "no attention mask, or positions that count the padding; another temperature than the one that is scored",
        evidence={"wrong": wrong[:8], "ended": ended},
    )  # fmt: skip


@gate(
    "score",
    rows="L1 L2 L3 R3",
    title="log-probabilities and values of a rollout equal those of each answer alone",
    reads="data model loss train",
)
def score(proof: Proof) -> Finding:
    """Two units of `train()`: what its batches hold against each text read by itself, without padding; the first loss of a unit,
    whose ratio must be 1; and the reference, which must be what training began with."""
    run, stage, units = made(proof)
    wrong, worst = [], {"log-probabilities": 0.0, "values": 0.0, "ratio": 0.0}
    limit, lengths = 1e-3 if run.precision == "fp32" else 0.2, known(stage)
    for k, unit in enumerate(units):
        batch, model = whole(unit), unit.model.eval()
        for row in range(min(len(batch["said"]), 64)):
            prompt, answer = parts(batch, row, model.eos, lengths)
            n = len(answer)
            if batch["valid"][row].nonzero().flatten().tolist() != list(range(n)):
                wrong.append(
                    f"unit {k + 1}: {int(batch['valid'][row].sum())} tokens of an answer of {n} with its end token count"
                )
                break
            with run.autocast():
                log_p, value = alone(model, prompt, answer)
            worst["log-probabilities"] = max(
                worst["log-probabilities"], (batch["log_prob"][row, :n] - log_p).abs().max().item()
            )
            worst["values"] = max(worst["values"], (batch["value"][row, :n] - value).abs().max().item())
        first = unit.batches[0]
        with torch.no_grad(), run.autocast():
            got = stage.loss(model, first)["policy"].item()
        due = -exact(first["advantage"][first["valid"]]).sum().item()
        worst["ratio"] = max(worst["ratio"], abs(got - due) / exact(first["advantage"].abs()).sum().item())
    _, start = proof.look()
    begun, now = start.model.state_dict(), stage.frozen_modules["reference"].state_dict()
    if other := [n for n, t in now.items() if not torch.equal(t, begun[n].to(t))]:
        wrong.append(f"the reference is not what training began with: {len(other)} tensors differ, e.g. {other[0]}")
    wrong += [f"{k} up to {v:.2g} off" for k, v in worst.items() if not v <= limit]
    told = ", ".join(f"{k} within {v:.1e}" for k, v in worst.items())
    return Finding(
        not wrong, "; ".join(wrong) or f"{len(units)} units: {told}; the reference is the start, bit for bit",
        f"the same within {limit:g}, a first ratio of 1, and a reference that stays",
        "answers are shifted by one: a state answers for the token after it\n"
        "positions count the padding on the left, or no attention mask is passed\n"
        "the end token is dropped, or padding is a part of the answer\n"
        "dropout, another precision or another temperature between what is drawn and what is learnt\n"
        "the reference is trained, follows the policy, or is another model (loaded by name after --init-from)",
        evidence={**worst, "wrong": wrong[:8]}, batch=units[0].batches[0],
    )  # fmt: skip


def estimates(reward: list[float], value: list[float], gamma: float, lam: float) -> list[float]:
    """Advantages by their definition: discounted sums of the errors of one step (Schulman 2016, equation 16)."""
    after = [*value[1:], 0.0]
    errors = [r + gamma * w - v for r, v, w in zip(reward, value, after, strict=True)]
    return [sum((gamma * lam) ** (u - t) * errors[u] for u in range(t, len(errors))) for t in range(len(errors))]


def returns_gate(reward: Reward) -> Gate:
    title = "token rewards are the final reward minus the KL penalty; advantages are whitened over answers"

    @gate("returns", rows="L2 R2 R3", title=title, reads="data model loss state train", explains=True)
    def prove(proof: Proof) -> Finding:
        """What two units learnt from, against reward - price x (log p - log p of the start) of each answer read alone, added up by
        the definition of the estimate, and whitened over the tokens of answers."""
        run, stage, units = made(proof)
        cfg, start, prompts = proof.cfg, proof.look()[1].model, stage.data["prompts"]
        asked = {tuple(ids): text for ids, text in zip(prompts.ids, prompts.texts, strict=True)}
        lengths = known(stage)
        limit, wrong, told = 5e-3 if run.precision == "fp32" else 0.2, [], []
        for k, unit in enumerate(units):
            batch, size, spent = whole(unit), unit.model.returns.rms.item(), []
            gaps = {"returns": 0.0, "advantages": 0.0}
            rows, scale = [], 1e-9
            for row in range(len(batch["said"])):
                prompt, answer = parts(batch, row, unit.model.eos, lengths)
                with run.autocast():
                    log_p, value = alone(unit.model, prompt, answer)
                    kl = log_p - alone(start, prompt, answer)[0]
                text = prompts.tokenizer.decode(answer, skip_special_tokens=True)
                got = ask(reward, [asked[tuple(prompt.tolist())]], [text]).item()
                paid = (-unit.price * kl).tolist()
                paid[-1] += got
                values = (value * size).tolist()
                due = torch.tensor(estimates(paid, values, cfg.gamma, cfg.gae_lambda), device=run.device)
                rows.append(due)
                spent.append(kl.sum().item())
                back = exact(batch["return"][row, : len(due)]) * size
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
            gaps["the distance that the price is adapted by"] = abs(unit.kl - kl) / max(1.0, abs(kl))
            wrong += [f"unit {k + 1}: {name} up to {v:.2g} off" for name, v in gaps.items() if not v <= limit]
            told.append(f"KL {kl:.3f} at {unit.price:.3g} a nat, off by {max(gaps.values()):.1e}")
        return Finding(
            not wrong, "; ".join(wrong) or "; ".join(told), f"within {limit:g} (of the largest return, of a standard deviation)",
            "the price has the wrong sign: it is taken off the reward\n"
            "the distance is taken of padding or the prompt, too, or to another model than the start (a reference that follows)\n"
            "the reward lies on another token than the last one, or is asked about other texts (the prompt is scored, too)\n"
            "advantages are whitened over padding, or not at all; something reaches over the end of an answer",
            evidence={"told": told},
        )  # fmt: skip

    return prove


@gate(
    "formula",
    rows="R3",
    title="the loss is PPO's, with clipped ratio and value, over answer tokens only",
    reads="model loss train",
    explains=True,
)
def formula(proof: Proof) -> Finding:
    """The recipe's own loss against the formula, token by token in double precision, of one and the same logits: on a batch whose
    old log-probabilities and values are moved so that both clips act, with rubbish where there is no answer."""
    run, stage, units = made(proof)
    cfg, model, batch = proof.cfg, units[1].model.eval(), {k: v.clone() for k, v in units[1].batches[0].items()}
    draws = torch.Generator().manual_seed(proof.cfg.run.seed)
    valid = batch["valid"]
    for key, size in (("log_prob", 0.4), ("value", 0.5), ("return", 0.5)):
        moved = batch[key] + size * torch.randn(valid.shape, generator=draws).to(run.device)
        batch[key] = torch.where(valid, moved, torch.full_like(moved, 3.0))
    batch["advantage"] = torch.where(valid, batch["advantage"], torch.full_like(batch["advantage"], -5.0))
    with torch.no_grad(), run.autocast():
        terms = {k: v.item() for k, v in stage.loss(model, batch).items()}
        log_p, value = model(batch["input_ids"], batch["mask"], batch["said"])
    read = {k: batch[k][valid].tolist() for k in ("log_prob", "value", "return", "advantage")}
    new, values = own(log_p, batch["said"])[valid].tolist(), value[valid].tolist()
    due = {"policy": [], "value": []}
    for p, v, old, before, back, gain in zip(
        new, values, read["log_prob"], read["value"], read["return"], read["advantage"], strict=True
    ):
        ratio = math.exp(p - old)
        due["policy"].append(-min(ratio * gain, min(max(ratio, 1 - cfg.clip_range), 1 + cfg.clip_range) * gain))
        near = before + min(max(v - before, -cfg.clip_range_vf), cfg.clip_range_vf)
        due["value"].append(cfg.vf_coef * 0.5 * max((v - back) ** 2, (near - back) ** 2))
    gaps = {k: abs(terms.get(k, math.nan) - sum(v)) / sum(map(abs, v)) for k, v in due.items()}
    limit = FORMULA if run.precision == "fp32" else 5e-2
    wrong = [
        f"{k} {terms.get(k, math.nan):.6g}, by the formula {sum(due[k]):.6g}" for k, v in gaps.items() if not v <= limit
    ]
    return Finding(
        not wrong, "; ".join(wrong) or f"{int(valid.sum())} tokens: " + ", ".join(f"{k} within {v:.1e}" for k, v in gaps.items()),
        f"within {limit:g} of the sum of the sizes",
        "padding is learnt from: advantages and errors must be masked\n"
        "the value is clipped against itself (the new one), not against the one of the rollout, or the lower error is taken\n"
        "the ratio upside down, the sign, the maximum instead of the minimum, a clip of one side alone\n"
        "a mean where the loss is a sum (core divides)", evidence={"gaps": gaps}, batch=batch,
    )  # fmt: skip


@gate("controller", rows="R2", title="the KL coefficient adapts to the KL, within bounds", reads="state train")
def controller(proof: Proof) -> Finding:
    """The stage's own controller, told distances that are far too large, far too small and right."""
    _, stage = proof.build(Plan(steps=1))
    one, cfg = stage.state["controller"], proof.cfg
    if not cfg.init_kl_coef:
        raise Skip("the distance has no price: --init-kl-coef 0")
    wrong, begun = [], one.value

    def told(kl: float, n: int) -> list[float]:
        """The price before and after each of `n` updates."""
        seen = [one.value]
        for _ in range(n):
            one.update(kl)
            seen.append(one.value)
        return seen

    high, low = told(100 * cfg.target_kl, 300), told(0.0, 600)
    for name, seen, sign in (("too far", high, 1), ("too near", low, -1)):
        steps = [b / a for a, b in pairwise(seen)]
        if not sign * (seen[1] - seen[0]) > 0:
            wrong.append(f"{name}: the price goes from {seen[0]:.3g} to {seen[1]:.3g}")
        if max(steps) > 1 + 1.01 * cfg.kl_coef_rate or min(steps) < 1 - 1.01 * cfg.kl_coef_rate:
            wrong.append(f"{name}: a price changes by a factor of {max(steps, key=lambda s: abs(s - 1)):.3g} at once")
    if max(high) > 1.01 * BOUND * begun or min(low) * 1.01 * BOUND < begun or not math.isfinite(max(high)):
        wrong.append(f"the price goes from {min(low):.3g} to {max(high):.3g}")
    still = told(cfg.target_kl, 1)
    if still[0] != still[1]:
        wrong.append(f"at its target the price changes from {still[0]:.3g} to {still[1]:.3g}")
    price = [u.price for u in made(proof)[2]]
    if price[0] == price[1]:
        wrong.append("train() does not adapt the price")
    return Finding(
        not wrong, "; ".join(wrong) or f"{begun:g} to begin with, between {min(low):.2g} and {max(high):.2g}",
        f"up where the policy is too far, down where it is too near, by at most {cfg.kl_coef_rate:.0%} an update, within a factor of "
        f"{BOUND:g}", "the sign of the error\nan error that is not clipped: one odd rollout decides for the next hundred\n"
        "the controller is never told, or told another distance",
    )  # fmt: skip
