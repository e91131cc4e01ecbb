"""Gates of GRPO's loss: which tokens it scores, its value, and its gradient."""

import torch
from torch import Tensor
from trainworthy.core.adapters.hosted import Hosted
from trainworthy.core.base.modes import in_mode
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks import formula
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.optim import exact
from trainworthy.core.loop.run import Run
from trainworthy.recipes.llm.gates.chat import felt
from trainworthy.recipes.rl.language.gates import grpo_forms
from trainworthy.recipes.rl.language.gates.grpo_answers import Subject, alone, unit

STEPS = (-0.5, -0.1, 0.0, 0.1, 0.5)  # log-ratios to the older policy: inside the clip and outside, on both sides


def scored(s: Subject) -> Gate:
    title = "the answer and the token that ends it are scored, and nothing else"

    @gate("scored", rows="L2 L3", title=title, reads="data model loss train", explains=True)
    def check(context: GateContext) -> Finding:
        """Reads where the loss has a gradient with respect to the last hidden states: each state predicts the next token."""
        u, wrong = unit(s, context), []
        picked = [0, len(u.rows) - 1]  # a padded prompt and one that is not
        batch = {k: v[picked] for k, v in u.batch.items()}
        batch["advantages"] = torch.ones_like(batch["advantages"])
        with in_mode(u.stage.model, training=True):
            scored_at = felt(u.run, u.stage, batch)
        width = batch["prompt_ids"].shape[1]
        for row, i in enumerate(picked):
            learnt = bool(batch["completion_mask"][row].any())  # cut answers may be masked
            n = len(u.ids[i][1]) if learnt else 0
            due, got = set(range(width - 1, width - 1 + n)), set(scored_at[row].nonzero().flatten().tolist())
            if extra := got - due:
                where = "of the prompt" if min(extra) < width - 1 else "after its end"
                wrong.append(f"answer {i} scores {len(extra)} tokens {where}")
            if u.stage.trainer.args.top_entropy_quantile < 1:  # only tokens of high entropy are learnt from
                due &= got
            if lost := due - got:
                end = ", the one that ends it among them" * (max(due) in lost)
                wrong.append(f"answer {i} leaves {len(lost)} of {n} tokens unscored{end}")
        listed = " | ".join(repr(s.asker.tokenizer.decode(u.ids[i][1])) for i in picked)
        return Finding(
            not wrong, "; ".join(wrong) or f"of {width} + {batch['completion_ids'].shape[1]} tokens: {listed}",
            "only the answer and the token that ends it have a gradient",
            "prompts are scored: the mask is the attention mask\n"
            "the end token is masked because it is also the pad: mask by length, never by id (the model then never stops)",
            batch=batch,
        )  # fmt: skip

    return check


def objective(s: Subject) -> Gate:
    title = "the loss is the declared one, with each answer computed alone"

    @gate("objective", rows="R1 L1", title=title, reads="data model loss train", explains=True)
    def check(context: GateContext) -> Finding:
        """Compares the recipe's loss of a padded batch with the formula. Its log-probabilities come from each answer alone, without padding,
        from plain logits. Advantages and the older policy are made up, so that every branch of the clip is used. Before training, the
        reference must equal the policy."""
        u, how = unit(s, context), ""
        mask = exact(u.batch["completion_mask"])
        plain, wrong = torch.zeros_like(mask), []
        for row, ((_, after), p) in enumerate(zip(u.ids, alone(u, s.cfg.temperature), strict=True)):
            if mask[row].any():
                plain[row, mask[row].bool()] = p.gather(-1, torch.tensor(after, device=p.device)[:, None])[:, 0]
        if not mask.any():
            raise Skip("every answer was cut, and the trainer learns from none of them: --max-new-tokens")
        shifts = torch.tensor(STEPS, dtype=mask.dtype, device=mask.device)
        steps = shifts[torch.arange(mask.numel(), device=mask.device).view_as(mask) % len(STEPS)]
        given = torch.linspace(-1.5, 1.5, len(mask), dtype=mask.dtype, device=mask.device)
        made = {"advantages": given.float(), "old_per_token_logps": (plain - steps).float()}
        declared = grpo_forms.declared(s.cfg, u.stage.trainer.args, s.cfg.beta)
        if s.cfg.beta:
            limit = 1e-3 if u.run.precision == "fp32" else 5e-2
            off = ((exact(u.batch["ref_per_token_logps"]) - plain) * mask).abs().max().item()
            wrong += [f"before training the reference is {off:.3g} nats from the policy"] if off > limit else []
            made["ref_per_token_logps"] = (plain + steps.flip(1)).float()
        each = declared.per_token(plain, plain - steps, plain + steps.flip(1), given[:, None], mask)
        due = declared.mean(each, mask).item()
        with in_mode(u.stage.model, training=True), torch.no_grad(), u.run.autocast():
            batch = {**u.batch, **made}
            got = (sum(u.stage.loss(u.stage.model, batch).values()) / sum(u.stage.counts(batch).values())).item()
        limit, gap = 1e-4 if u.run.precision == "fp32" else 5e-2, abs(got - due) / max(1.0, abs(due))
        fixed = ((each * mask).sum() / (len(mask) * s.cfg.max_new_tokens)).item()
        if gap > limit and abs(got - fixed) <= limit * max(1.0, abs(fixed)):
            due, gap = fixed, abs(got - fixed)
            how = "the sum over tokens by answers times --max-new-tokens (Dr. GRPO, Liu 2025); "
        wrong += [f"the loss is {got:.6f}, by the formula {due:.6f}"] if gap > limit else []
        if declared.kind == "cispo" and declared.high <= 1:
            wrong.append(f"epsilon_high is {declared.high:g}: every ratio is cut to it, so each token has that weight")
        kl = f", and beta {s.cfg.beta:g} times {'ratio x ' * declared.corrected}KL" if s.cfg.beta else ""
        return Finding(
            not wrong, "; ".join(wrong) or f"{how}{got:.6f}, by the formula {due:.6f} ({int(mask.sum())} tokens)",
            f"the mean over tokens of -{declared.name}{kl}, within {limit:g}",
            "prompts are padded on the right, the attention mask is missing, or position ids count the padding: each answer then follows "
            "another prompt\nthe prompt or the padding counts, or the loss is a mean over answers instead of tokens\n"
            "the ratio is inverted, not clipped, or clipped on one side; or the sign is wrong\n"
            "the reference is another model: loaded again by name, or not copied after --init-from",
            evidence={"got": got, "due": due, "gap": gap},
        )  # fmt: skip

    return check


def formula_gate(s: Subject) -> Gate:
    @gate("formula", rows="R1 L1", title=formula.TITLE, reads="data model loss train", explains=True)
    def check(context: GateContext) -> Finding:
        """Compares the loss of each answer, and the gradient of all, with the formula: on answers and weights of the last rehearsed iteration,
        with advantages and an older policy made up as in `objective`. A gradient of the wrong sign changes no value of the loss."""
        run, stage, record = rehearsed(context)
        if not record.batch:
            raise Skip("the loop makes its own updates, so no batch was recorded (see wiring)")
        batch = _few(record.batch)
        batch["advantages"] = torch.linspace(-1.5, 1.5, len(batch["prompt_ids"]), device=run.device)
        log_probs = [_said(stage, run, batch, i, s.cfg.temperature) for i in range(len(batch["prompt_ids"]))]
        mask = batch["completion_mask"].bool()
        shifts = torch.tensor(STEPS, device=run.device).repeat(mask.numel())[: mask.numel()].view_as(mask)
        old, over = shifts.new_zeros(mask.shape), shifts.flip(1)
        beta = stage.state["controller"].value if s.cfg.target_kl else s.cfg.beta
        declared = grpo_forms.declared(s.cfg, stage.trainer.args, beta)
        for i, one in enumerate(log_probs):
            old[i, mask[i]] = one.detach().float()
        batch["old_per_token_logps"] = old - shifts
        if s.cfg.beta:
            batch["ref_per_token_logps"] = old + over

        def state() -> formula.Statements:
            rows = [_said(stage, run, batch, i, s.cfg.temperature) for i in range(len(log_probs))]
            forms = [_forms(declared, new, (old - shifts)[i, mask[i]], (old + over)[i, mask[i]], batch["advantages"][i])
                     for i, new in enumerate(rows)]  # fmt: skip
            right, wrong = ({k: torch.stack([one[j][k] for one in forms]) for k in forms[0][j]} for j in (0, 1))
            return {"loss": formula.Statement(right, wrong)}

        one, exact = formula.compared(run, stage, batch, state, training=True), formula.limit(run, 1e-4)
        return Finding(
            not one.wrong, "; ".join(one.wrong) or f"{one.samples} answers: {', '.join(one.remarks)}",
            f"the formula within {exact:g}, its gradient within {10 * exact:g}",
            "\n".join([*dict.fromkeys(one.causes), "a detach() in the loss, or a sign that it hides", formula.ON_PURPOSE]),
            evidence={"compared": one.remarks}, cause=formula.known(one.causes),
        )  # fmt: skip

    return check


def _few(batch: dict) -> dict[str, Tensor]:
    """Return the first and the last two answers of a batch."""
    rows = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.dim()}
    n = len(rows["prompt_ids"])
    picked = sorted({0, 1, n - 2, n - 1} & set(range(n)))
    return {k: v[picked].clone() for k, v in rows.items()}


def _said(stage: Hosted, run: Run, batch: dict[str, Tensor], i: int, temperature: float) -> Tensor:
    """Return log-probabilities (tokens,) of an answer's tokens, computed alone, without padding, from plain logits."""
    before, after = (batch[f"{k}_ids"][i][batch[f"{k}_mask"][i].bool()] for k in ("prompt", "completion"))
    with in_mode(stage.model, training=False), run.autocast():
        logits = stage.model(input_ids=torch.cat([before, after])[None], use_cache=False).logits[
            0, len(before) - 1 : -1
        ]
    return (exact(logits) / temperature).log_softmax(-1).gather(-1, after[:, None])[:, 0]


def _forms(
    one: grpo_forms.Loss, new: Tensor, old: Tensor, ref: Tensor, gain: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """({name: sum over an answer's tokens} of the declared loss, the same of known mistakes)."""
    mask = torch.ones_like(new)
    right = {"the declared loss": one.per_token(new, old, ref, gain, mask).sum()}
    ratio, gain = one.log_ratio(new, old, mask).exp(), gain.expand_as(new)
    bounded = ratio.clamp(1 - one.low, 1 + one.high)
    wrong = {
        "the ratio is 1 everywhere: the new probability is divided by itself": -(new - new.detach()).exp() * gain,
        "the ratio is missing: log-probability times advantage": -new * gain,
        "the ratio is inverted: old over new": -one.held(1 / ratio, gain),
        "the maximum instead of the minimum": -torch.max(ratio * gain, bounded * gain),
        "the ratio is not clipped": -ratio * gain,
        "the clipped ratio alone": -bounded * gain,
    }
    return right, {k: v.sum() for k, v in wrong.items()}
