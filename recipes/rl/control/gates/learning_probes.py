"""Probes of an agent: environments with known values, on which what it learns is compared with what is right."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, GateContext, build
from trainworthy.core.loop.run import Rehearsal, Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.rl.control.data.environments import Environments
from trainworthy.recipes.rl.control.data.probes import PROBES
from trainworthy.recipes.rl.control.gates import definitions, other_targets, shaping
from trainworthy.recipes.rl.control.gates.recording import seen
from trainworthy.recipes.rl.control.models.memory import Remembering, after, beginning

Make = Callable[[Any, Run], Stage]
ROLLOUTS = 60  # rollouts of 8 environments x 16 steps
LONGER = 4  # times as many, where an optimiser is slow and still approaches the answer
# Checked after every third rollout; four checks in a row must be close, because a value may only pass by the answer.
EVERY, IN_A_ROW = 3, 4
CLOSE = 0.1  # largest error of a learnt value, as a share of the largest value
EXACT = 1e-3  # relative difference up to which targets are those of their definition
EARNED = 0.4  # return of a policy that takes the best action with probability 0.7
OTHER_GAMMA = 0.8
UNDEFINED = "the model's answers are NaN: 0 / 0, as in the scaling of an observation that does not vary (divide by its deviation + epsilon)"
GAMMA = 0.5  # low enough to tell a discounted reward from an undiscounted one within two steps


@dataclass
class Subject:
    """A recipe's stage function, and how it learns a probe."""

    make: Make
    settings: dict[str, Any]
    """Settings under which a probe is learnt within 60 rollouts of 8 environments x 16 steps."""
    exact: dict[str, Any] = field(default_factory=dict)
    """Settings under which value targets are plain returns until the episode ends, without bootstrapping. Empty if the recipe always
    bootstraps."""
    estimated: dict[str, Any] = field(default_factory=dict)
    """Settings under which every target contains the value of the next step."""
    box: bool = False
    """True for continuous actions."""
    formula: Callable | None = None
    """Each term of the loss per sample (see formulas.py); None: no comparison. A fork that changes its objective states its own."""
    targets: Callable | None = None
    """The targets by their definition (see definitions.py)."""
    unread: Callable[[Any], dict[str, str]] = lambda cfg: {}
    """Settings -> {entry of a batch that the loss does not depend on: reason}."""
    lag: Callable[[Any], float] | None = None
    """Settings -> number of updates in which the target network is replaced once; None if there is no target network."""
    reward_scale: float = 1.0
    """Factor on every reward that the loop trains on, once `measure_reward_scale` has measured it."""


@dataclass
class Learnt:
    """Result of the recipe's own `train()` on a probe."""

    run: Run
    stage: Stage
    batches: list[dict] = field(default_factory=list)
    """Batches of one rollout, as the loss gets them."""
    values: list[Tensor] = field(default_factory=list)
    """The model's values of the probe's observations, before each of these batches."""
    rewards: dict[int, list[Tensor]] = field(default_factory=dict)
    """Rewards of every step, by rollout."""
    other: dict[int, Tensor] = field(default_factory=dict)
    """Whether each action was another than the policy's own, where the observation is 0, by rollout."""
    gradient: list[Tensor] = field(default_factory=list)
    """Gradient of the policy term on the first batch."""
    distances: list[float] = field(default_factory=list)
    """Distance from the known answer, at every third rollout."""

    @property
    def approaches(self) -> bool:
        """Whether the last third of the rollouts closed a tenth of the distance that was left."""
        third = len(self.distances) // 3
        return third > 1 and median(self.distances[-third:]) < 0.9 * median(self.distances[-2 * third : -third])


def learnt(
    context: GateContext,
    subject: Subject,
    name: str,
    *,
    rollouts: int = ROLLOUTS,
    noted: int = 0,
    batch: int = 32,
    stack: int = 1,
    before: Callable[[Stage], None] | None = None,
    look: Callable[[Callable, torch.nn.Module, dict], None] | None = None,
    **settings: Any,
) -> Learnt:
    """Run the recipe's own `train()` on a probe, at a learning rate that suits probes.

    With the default number of `rollouts` or more, training stops as soon as the answer is learnt; with fewer, all are made. Batches of
    rollout `noted` are kept. `look` gets the loss, the model and the first of these batches. `before` may change the stage first.
    Except for the probe "memory", the newest observation determines the answer."""
    cfg, id = context.cfg, f"probe/{name}{'-box' * subject.box}-v0"
    cfg = replace(cfg, env=id, frame_stack=stack, num_envs=8, num_steps=16, optim=replace(cfg.optim, lr=3e-3),
                  train=replace(cfg.train, batch_size=batch, accumulate=1), **{"gamma": GAMMA} | subject.settings | settings)  # fmt: skip
    distances: list[float] = []

    def enough(stage: Stage, iteration: int) -> bool:
        if iteration % EVERY == 0 and rollouts >= ROLLOUTS:
            distances.append(off(subject, stage, name, stack))
        return len(distances) >= IN_A_ROW and max(distances[-IN_A_ROW:]) <= CLOSE / 2

    run = Run(cfg, context.accelerator, rehearsal=Rehearsal(steps=rollouts, peak=True, watch=enough))
    with _runs_here(context, id):
        stage = build(run, lambda run: subject.make(cfg, run))
    if before:
        before(stage)
    own, found, envs = stage.loss, Learnt(run, stage, distances=distances), environments_of(stage)

    def loss(model: torch.nn.Module, batch: dict) -> dict[str, Tensor]:
        terms = own(model, batch)
        if run.step == noted and torch.is_grad_enabled():
            if look and not found.batches:
                look(own, model, batch)
            ends = (
                batch["return"].ndim - 1
            )  # recurrent policies have batches of whole environments: (time, environment)
            found.batches.append({k: v.detach().clone().flatten(0, ends) for k, v in batch.items()})
            with torch.no_grad():
                found.values.append(model.value(known(subject, model, name, stack)[0].to(run.device)))
            if not found.gradient and "policy" in terms:
                weights = [p for p in model.parameters() if p.requires_grad]
                given = torch.autograd.grad(terms["policy"], weights, retain_graph=True, allow_unused=True)
                found.gradient = [g.flatten() for g in given if g is not None]
        return terms

    def watched(stepped: Callable) -> Callable:
        def step(actions: Tensor) -> dict[str, Tensor]:
            if getattr(cfg, "exploration_fraction", 0) and not subject.box:
                start = (envs.observation == 0).all(-1)
                with torch.no_grad():
                    own_action = stage.model.near(envs.observation.to(run.device), actions.to(run.device)).cpu() > 0.5
                found.other[run.step] = torch.cat([found.other.get(run.step, start[:0]), ~own_action[start]])
            followed = stepped(actions)
            found.rewards.setdefault(run.step, []).append(followed["reward"])
            return followed

        return step

    stage.loss = loss
    if envs:
        envs.step = watched(envs.step)
    with _runs_here(context, id):
        context.train(cfg, run, stage)
    return found


@contextlib.contextmanager
def _runs_here(context: GateContext, id: str) -> Iterator[None]:
    """Skip where the recipe raises with a probe and not with the configured environment: a fork may know how many numbers an observation
    has, or which actions mirror each other. What raises is no silent bug."""
    try:
        yield
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        try:
            seen(context)
        except Exception:  # it is not the probe
            raise error from None
        raise Skip(
            f"this recipe does not run in the gate's own environment {id}, as it does in --env {context.cfg.env}: {type(error).__name__}: {error}"
        ) from None


def own_targets(context: GateContext, subject: Subject) -> str:
    """Return why the configured run's targets are right although they are not those of the probes' rules (see the gate `returns`): exactly
    those of a soft policy, or of rewards that the loop shapes. Empty if they are neither."""
    compared = by_definition(context, subject)
    name = next((name for name in compared if name.startswith((other_targets.SOFT, shaping.SHAPED))), "")
    if not name or any(off > EXACT for off, _ in compared.values()):
        return ""
    soft = name.startswith(other_targets.SOFT)
    why = "they contain the policy's entropy" if soft else "they are added to the environment's"
    return f"{name}: {why}, which the probes' rules do not know"


def by_definition(context: GateContext, subject: Subject) -> definitions.Compared:
    """Return the configured run's targets against their definition (see the gate `returns`), computed once; nothing where it does not fit."""

    def compared() -> definitions.Compared:
        with contextlib.suppress(Skip, KeyError, AttributeError, TypeError):
            return subject.targets(context.cfg, seen(context)) if subject.targets else {}
        return {}

    return context.once("rl-by-definition", compared)


def one_step_targets(context: GateContext, subject: Subject, gamma: float = GAMMA) -> list[tuple[float, float]]:
    """Return (reward of the action by the probe's rule, target) of the first rollout of a probe whose episodes have one step."""
    rule, pairs = PROBES["both"]["rule"], []
    for batch in learnt(context, subject, "both", rollouts=1, **subject.exact | {"gamma": gamma}).batches:
        action = (1 + batch["action"].flatten().clamp(-1, 1)) / 2 if subject.box else batch["action"]
        rows = torch.stack([batch["observation"][:, 0], action, batch["return"]], 1).tolist()
        pairs += [(rule(round(signal), chosen, 0), got) for signal, chosen, got in rows]
    return pairs


def measure_reward_scale(context: GateContext, subject: Subject) -> float:
    """Measure by which factor the loop multiplies every reward before it learns, as many published configurations do: returns, values and
    the best policy are those of the environment, in another unit. 1 if no one factor explains all targets, or if it changes with the
    discount: then rewards are discounted once too often."""

    def measured() -> float:
        try:
            factor = common_factor(one_step_targets(context, subject))
        except (KeyError, IndexError, TypeError, Skip):  # batches of a fork's own form: the gate `targets` reports it
            factor = 1.0
        power = math.log(factor, GAMMA) if factor > 0 else 0.0
        if factor != 1 and abs(power - round(power)) < 1e-2:
            other = common_factor(one_step_targets(context, subject, OTHER_GAMMA))
            factor = factor if abs(other - factor) <= 1e-3 * factor else 1.0
        return factor if 1e-3 <= factor <= 1e3 else 1.0

    subject.reward_scale = context.once("rl-reward-scale", measured)
    return subject.reward_scale


def common_factor(pairs: list[tuple[float, float]]) -> float:
    """Return the factor that makes every target of (due, target); 0 if there is none."""
    times = [got / due for due, got in pairs if due]
    same = bool(times) and all(abs(t - times[0]) <= 1e-3 * abs(times[0]) for t in times)
    return times[0] if same and all(abs(got) <= 1e-3 for due, got in pairs if not due) else 0.0


def environments_of(stage: Stage) -> Environments | None:
    """Return the environments in the stage's state, or None."""
    inner = (s.envs if isinstance(s, Remembering) else s for s in stage.state.values())
    return next((s for s in inner if isinstance(s, Environments)), None)


def off(subject: Subject, stage: Stage, name: str, stack: int = 1) -> float:
    """Return the distance from the known answer: error of the values as a share of the largest, or 1 - probability of the best action, over 3."""
    observations, values, best = known(subject, stage.model, name, stack)
    observations = observations.to(next(stage.model.parameters()).device)
    with torch.no_grad():
        if best is not None:
            near = stage.model.near(observations, best.to(observations.device))
            return (1 - near).max().item() / 3  # a probability of 0.7 is close enough
        found = stage.model.value(observations).cpu()
    return (found - values).abs().max().item() / max(values.abs().max().item(), 1e-9)


def answers(subject: Subject, name: str, stack: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (the last `stack` observations of every step, their values under the best policy, their best actions or None if actions
    do not matter). They follow analytically from the probe's rule, for every signal and step."""
    probe = PROBES[name]
    rule, length, limited = probe["rule"], probe.get("length", 1), probe.get("limited", False)
    n_actions, brief = probe.get("actions", 1), probe.get("brief", False)
    shift, scale = probe.get("shift", 0.0), probe.get("scale", 1.0)
    rows, values, best = [], [], []
    for signal in (-1, 1) if probe.get("random") else (0,):
        later = (
            rule(signal, 0, 0) / (1 - GAMMA) if limited else 0.0
        )  # a truncated episode counts as if it continued for ever
        for step in reversed(range(1 if limited else length)):
            rewards = [float(rule(signal, a, step)) for a in range(n_actions)]
            later = max(rewards) + GAMMA * later  # in units of the environment
            if n_actions > 1 and len(set(rewards)) == 1:
                continue  # all actions are equal
            past = [(0 if brief and t else signal, 0 if limited else t) for t in range(step + 1)]
            rows.append([shift + scale * x for seen in ([past[0]] * stack + past)[-stack:] for x in seen])
            values.append(subject.reward_scale * later)
            best.append(rewards.index(max(rewards)))
    chosen = 2 * torch.tensor(best)[:, None] - 1 if subject.box else torch.tensor(best)
    return torch.tensor(rows), torch.tensor(values), chosen if n_actions > 1 else None


def known(subject: Subject, model: torch.nn.Module, name: str, stack: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `answers` with observations in the form that the model takes; recurrent models get their state after the step before."""
    if not getattr(getattr(model, "memory", None), "size", 0):
        return answers(subject, name, stack)
    frames, values, best = answers(subject, name, 2)  # no probe has more than two steps
    earlier, newest = frames.chunk(2, -1)
    state, rows = after(model, beginning(model, earlier)), beginning(model, newest)
    second = (earlier != newest).any(-1)
    rows[second, newest.shape[1] :] = torch.cat([torch.zeros(len(state), 1), state], -1)[second]
    return rows, values, best


def probe_gate(subject: Subject, name: str, rows: str, title: str, remedy: str) -> Gate:
    """Return the gate that trains a probe with the recipe's own loop and compares what it learnt with the known answer."""

    @gate(f"probe-{name}", rows=rows, title=title, symptom=True)
    def check(context: GateContext) -> Finding:
        stack = context.cfg.frame_stack if name == "memory" else 1
        if name == "memory" and stack == 1 and not getattr(context.cfg, "rnn_hidden_size", 0):
            raise Skip("the policy has no memory (--frame-stack 1)")
        measure_reward_scale(context, subject)
        most, result = ROLLOUTS, learnt(context, subject, name, stack=stack)
        if off(subject, result.stage, name, stack) > CLOSE and result.approaches:
            most *= LONGER
            del result  # before the next one is built
            result = learnt(context, subject, name, stack=stack, rollouts=most)
        run, stage = result.run, result.stage
        observations, values, best = known(subject, stage.model, name, stack)
        with torch.no_grad():
            found = stage.model.value(observations.to(run.device)).tolist()
            near = None if best is None else stage.model.near(observations.to(run.device), best.to(run.device))
        error = off(subject, stage, name, stack)
        if error > CLOSE and (own := own_targets(context, subject)).startswith(shaping.SHAPED):
            raise Skip(own)
        measured = f"values {rounded(found)}" if near is None else f"probabilities of the best actions {rounded(near)}"
        earned = 1.0
        if (
            name == "memory"
        ):  # the frames above were made analytically; only episodes show what the environment really stacks
            with evaluating(stage.eval_model):
                earned = stage.evaluate(stage.eval_model, stage.data["val"])["return"]
            measured += f", return of an episode {earned:.2f} of 1"
        needed = (
            f"{rounded(values)}, with errors of at most {CLOSE:.0%} of the largest"
            if best is None
            else f"at least {1 - 3 * CLOSE:.1f} each" + f", and a return of at least {EARNED:g}" * (name == "memory")
        )
        return Finding(
            error <= CLOSE and earned >= EARNED, f"{measured} after {run.step} rollouts", f"{needed}, within {most} rollouts", remedy,
            evidence={"observations": observations.tolist(), "values": found, "known": values.tolist(), "off": error},
            cause=UNDEFINED if math.isnan(error) else "",
        )  # fmt: skip

    return check


def rounded(values: Any) -> str:
    return " ".join(f"{float(v):.2f}" for v in values)
