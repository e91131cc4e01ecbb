"""The gate `target-rate`: how often the target network is updated, measured over a few rollouts."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.fingerprints import fingerprint
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.stage import Stage

FEWEST, LOOK = 3.0, 12  # times that the target must be replaced in a run; rollouts that are watched at most
SHORT = 1000  # updates: shorter runs are only trials


def target_rate_gate(lag: Callable[[Any], float] | None) -> Gate:
    title = "the target network is updated more than once in the run, and less often than the online network"

    @gate("target-rate", rows="R5", title=title, explains=True)
    def check(context: GateContext) -> Finding:
        """Measures how far the target network moves towards the net in each update, over a few rollouts at the run's own settings (the probe
        gates use others), and scales it to the updates of the whole run."""
        if lag is None:
            raise Skip("no target network")
        return _renewed(context, lag(context.cfg))

    return check


def _renewed(context: GateContext, due: float) -> Finding:
    total = Run(context.cfg, context.accelerator).total_steps(context.peek())
    iterations = min(LOOK, total)
    run, stage = context.build(
        Rehearsal(steps=iterations, peak=True, watch=lambda stage, iteration: enough(stage, iteration))
    )
    target, own = stage.state.get("target"), stage.loss
    if not hasattr(target, "net"):
        raise Skip("no 'target' in what is saved")
    shares, seen_iterations = [], [0]
    before: list[Tensor] = []  # the target's parameters at the previous update: the one copy of them that is kept
    mark: list[int] = []

    @torch.no_grad()
    def watch(model: nn.Module) -> None:
        """Note the share by which the target moved towards the net since the previous update."""
        pairs = list(zip(target.net.parameters(), model.parameters(), strict=True))
        now = [int(fingerprint(net)) for _, net in pairs]
        if now == mark:
            return  # another part of the same batch
        mark[:] = now
        if not before:
            before.extend(mine.detach().clone() for mine, _ in pairs)
            return
        moved = square = torch.zeros(())
        for (mine, net), old in zip(pairs, before, strict=True):
            way = (net - old).flatten()  # the copy contains the net after its update
            moved = moved + ((mine - old).flatten() @ way).cpu()
            square = square + (way @ way).cpu()
            old.copy_(mine)
        shares.append((moved / square.clamp_min(1e-30)).item())

    def enough(_stage: Stage, iteration: int) -> bool:
        seen_iterations[0] = iteration
        return len(shares) >= 4 * due or sum(s > 0 for s in shares) >= 16

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            watch(model)
        return own(model, batch)

    stage.loss = loss
    context.train(context.cfg, run, stage)
    if not shares:
        raise Skip("no updates to watch (see wiring)")
    return _verdict(shares, due, (len(shares) + 1) / seen_iterations[0], total)


def _verdict(shares: list[float], due: float, updates: float, total: int) -> Finding:
    """Compare the measured rate with the settings. `shares`: how far the target moved towards the net in each update, `due`: updates between two
    copies by the settings, `updates` per rollout, `total` rollouts."""
    found = sum(shares) / len(shares)
    copies = [i for i, share in enumerate(shares) if share > 0.5]
    if len(copies) > 1:  # between the first and the last copy: steps before and after them carry no information
        found = (len(copies) - 1) / (copies[-1] - copies[0])
    rate = found if found > 0 else 1 / due  # no copy in these rollouts: use the settings
    times = rate * updates * total
    expected = 1 / due
    plain = len(shares) * expected >= 2 or found * len(shares) >= 2  # enough was watched
    other = plain and not 0.5 <= (found / expected if expected else math.inf) <= 2
    every = (
        f"once in {1 / rate:.4g} updates" if rate < 0.5 else f"{rate:.0%} of the distance to the net in every update"
    )
    seen_now = "" if found > 0 else f" by the settings (no copy in the {len(shares)} recorded updates)"
    wrong, causes = [], []
    if rate >= 0.9:
        wrong.append("the target equals the net after every update")
        causes.append(
            "--target-update-interval 32 or more, --tau 0.05 or less (tau is the share taken from the net, not the share kept)"
        )
    if other:
        wrong.append(f"the settings say once in {due:.4g} updates")
        causes.append("rollouts are counted instead of updates, or the other way round; or the setting is not read")
    if times < FEWEST and updates * total >= SHORT:
        wrong.append(f"the target is updated {times:.2g} times in the whole run")
        causes.append("a reward k steps later is learnt only after k updates of the target: a longer run, or "
                      f"--target-update-interval {max(1, updates * total / 300):.0f} (--tau 0.005)")  # fmt: skip
    measured = f"{every}{seen_now}: {times:.3g} times in {updates * total:,.0f} updates of {total:,} rollouts"
    return Finding(
        not wrong, f"{'; '.join(wrong)}: {measured}" if wrong else measured,
        f"at least {FEWEST:g} times in a run, not completely at every update, and as often as the settings say",
        "\n".join([*causes, 'on purpose: --gates.waive target-rate --gates.because "..."']),
        evidence={"way": shares[:200], "times": times, "updates": updates * total},
    )  # fmt: skip
