"""Healthy variants of rl/sac, among them those that look like bugs."""

from tests.helpers.plant import Healthy
from tests.rl import healthy_ppo

FIXED = (  # as in the first paper (Haarnoja 2018a)
    "STAGES = [sac]\n",
    """def fixed(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    stage = sac(cfg, run, previous)
    own, net = stage.loss, stage.model
    for model in (net, stage.state["target"].net):
        value = model.log_temperature.detach().clone()
        del model.log_temperature
        model.register_buffer("log_temperature", value)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        return {k: v for k, v in own(model, batch).items() if k != "temperature"}

    stage.loss, stage.optimizers = loss, {"main": core.make_optimizer(net, cfg.optim)}
    stage.expect.small_terms = tuple(k for k in stage.expect.small_terms if k != "temperature")
    return stage


STAGES = [fixed]
""",
)


def healthy(id: str, *argv: str, naive: str = "", hunk=None) -> Healthy:
    return Healthy(id, argv, hunk, naive, recipe="rl/sac", may_skip=healthy_ppo.SKIPS)


ACTIVE = healthy_ppo.FOLLOWED + '        followed["reward"] = followed["reward"] - 0.1 * action.square().sum(-1)\n'

VARIANTS = [
    healthy_ppo.shaped("ok-sac-shaped-by-action", ACTIVE, "rl/sac", more=("terms",)),
    healthy("ok-sac-hot", "--init-temperature", "1", naive="entropy is all that counts at first"),
    healthy("ok-sac-cold", "--init-temperature", "0.02", naive="a term without a gradient"),
    healthy("ok-sac-fixed-temperature", naive="a term of the paper is missing", hunk=FIXED),
    healthy("ok-sac-narrow", "--target-entropy", "-2", naive="a policy that is nearly sure of itself"),
    healthy("ok-sac-slow-target", "--tau", "0.001", naive="the target hardly moves in a whole rehearsal"),
    healthy("ok-sac-clipped", "--optim.clip", "1"),
    healthy("ok-sac-ring-comes-round", "--buffer-size", "1024", naive="what was seen is overwritten"),
    healthy("ok-sac-few-updates", "--gradient-steps", "8"),
    healthy("ok-sac-accumulate", "--train.accumulate", "3"),
    healthy("ok-sac-stacked", "--frame-stack", "3"),
    healthy("ok-sac-sparse-reward", "--env", "MountainCarContinuous-v0", naive="no reward in most episodes: not learning"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all; as it is, every recipe is checked by tests/core/test_recipes.py
