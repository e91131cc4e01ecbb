"""Bugs planted in a fork of rl/sac. `words` and `row` were fixed before the gates were run on them."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import forgetful

RECIPE = "rl/sac"
STEPS = 'steps.append({"observation": observation, "action": action, **followed})\n'
SEEN = "observation = envs.observation.to(run.device)\n"
ENDED = '~steps["terminated"]'
FUTURE = f'return steps["reward"] + cfg.gamma * {ENDED} * value\n'
NEXT = 'value = target.worth(steps["next_observation"], action).amin(0) * target.rewards.rms\n'
ERROR = 'error = model.worth(batch["observation"], batch["action"]) - batch["return"]  # (2, B)\n'


def plant(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more) -> Plant:
    return Plant(id, gate, row, old, new, words, recipe=RECIPE, **more)


PLANTS = [
    plant("sac-no-tanh-correction", "density", "R5", "return u.tanh(), (log_normal - log_slope).sum(-1)\n",
          "return u.tanh(), log_normal.sum(-1)\n", ("the slope of tanh is missing",), source="RL-04 automl/Mighty PR#117",
          harm="actions saturate"),
    plant("sac-entropy-sign", "entropy", "R5", "(model.log_temperature.detach().exp() * log_prob - gain).sum()",
          "(-model.log_temperature.detach().exp() * log_prob - gain).sum()", ("the entropy has the wrong sign",),
          harm="a policy that is sure of itself before it knows anything"),
    plant("sac-temperature-sign", "probe-action", "R5", "(model.log_temperature * surplus).sum()",
          "(-model.log_temperature * surplus).sum()", ("the temperature rises instead of falling",),
          harm="entropy is all that counts"),
    plant("sac-temperature-teaches-the-policy", "probe-action", "R5", "surplus = -log_prob.detach()", "surplus = -log_prob",
          ("temperature", "its loss term changes the policy"), harm="entropy counts more the less it should"),
    plant("sac-policy-teaches-the-critics", "probe-constant", "R5", ", frozen=True).amin(0)", ").amin(0)",
          ("another term that changes it",), harm="critics that flatter the policy"),
    plant("sac-old-action", "next-action", "R5", NEXT, NEXT.replace("action)", 'steps["action"])'), ("the stored action",),
          harm="values of actions that nobody will take"),
    plant("sac-action-not-scaled", "targets", "R5", "envs.step(action).items()", "envs.step(0.5 * action).items()",
          ("those that were taken",), harm="half of what the policy means to do"),
    plant("sac-target-never-updated", "probe-delay", "R5", "            target.follow(policy, cfg.tau)\n", "", ("never updated",),
          source="RL-01 higgsfield-ai/higgsfield#14", harm="values of a net that knows nothing"),
    plant("sac-target-is-the-net", "target", "R5", "policy, target.net, replay, step.index", "policy, policy, replay, step.index",
          ("the net itself",), source="RL-01 AgileRL/AgileRL PR#464", harm="a target that runs away from the net"),
    plant("sac-time-limit-is-an-end", "probe-limit", "R5", FUTURE,
          FUTURE.replace(ENDED, '~(steps["terminated"] | steps["truncated"])'), ("truncation", "treated as termination"),
          source="RL-02 Toni-SM/skrl#449", harm="values too low near the limit"),
    plant("sac-done-ignored", "probe-constant", "R5", FUTURE, FUTURE.replace(f" * {ENDED}", ""),
          ("terminated", "bootstrapping past the end"), before=("targets",), why="targets already hold it",
          source="RL-02 google-deepmind/mujoco_playground#305", harm="failing costs nothing"),
    plant("sac-value-of-the-reset-state", "probe-limit", "R5", STEPS,
          STEPS.replace("**followed", '**followed, "next_observation": envs.observation.to(run.device)'), ("after the reset",),
          source="RL-02 instadeepai/flashbax#3", harm="values of another episode at every time limit"),
    plant("sac-no-discount", "probe-delay", "R5", FUTURE, FUTURE.replace("cfg.gamma * ", ""), ("the discount is missing",),
          harm="values without a bound"),
    plant("sac-every-sample-with-every-other", "dependency", "C2", ERROR,
          'error = (model.worth(batch["observation"], batch["action"])[..., None] - batch["return"]).mean(-1)\n',
          ("(B, 1) with (B,)",), source="RL-03 thu-ml/tianshou#40", harm="every value is drawn towards the mean"),
    plant("sac-target-of-one-critic", "lower-critic", "R5", NEXT, NEXT.replace(".amin(0)", "[0]"), ("one critic only",),
          harm="values are overestimated"),
    plant("sac-target-of-the-mean", "lower-critic", "R5", NEXT, NEXT.replace("amin", "mean"), ("their mean",),
          harm="values are overestimated"),
    plant("sac-target-of-the-higher", "lower-critic", "R5", NEXT, NEXT.replace("amin", "amax"), ("the highest",),
          harm="values are overestimated"),
    plant("sac-policy-asks-one-critic", "lower-critic", "R5", "frozen=True).amin(0)", "frozen=True)[1]", ("the policy loss uses one critic only",),
          harm="the policy exploits that critic's errors"),
    plant("sac-one-critic-learns", "wiring", "C3", "0.5 * error.square().sum()", "0.5 * error[0].square().sum()", ("critics.1",),
          harm="the lower of a critic and of noise"),
    plant("sac-replay-of-views", "probe-observation", "R5", SEEN,
          SEEN.replace("\n", " if t == 0 else observation.copy_(envs.observation)\n"), ("overwritten",),
          harm="one observation for a whole unit"),
    *[plant(f"sac-{kept}-not-saved", "resume", "C13", "STAGES = [sac]\n", forgetful("sac", kept), ("differ", "stage.state"),
            harm=harm)
      for kept, harm in (("replay", "a resumed run has forgotten what it saw"), ("target", "targets of a net that knows nothing"),
                         ("environments", "a resumed run begins new episodes"))],
    plant("sac-tau-is-what-is-kept", "target-rate", "R5", "target.follow(policy, cfg.tau)", "target.follow(policy, 1 - cfg.tau)",
          ("equals the net after every update", "not the share kept"), harm="targets that run away"),
    plant("sac-logarithm-for-temperature", "returns", "R5", "policy.log_temperature.exp() * log_prob * policy",
          "policy.log_temperature * log_prob * policy", ("the temperature's logarithm",), harm="entropy costs what it should earn"),
    plant("sac-no-entropy-in-the-target", "returns", "R5", "value = value - policy.log_temperature.exp()", "value = value - 0",
          ("the entropy is missing in the target",), harm="values of another objective than the policy's"),
    plant("sac-temperature-taught-by-the-policy", "formula", "R5", "model.log_temperature.detach().exp() * log_prob",
          "model.log_temperature.exp() * log_prob", ("log_temperature must get no gradient",), harm="a temperature that falls to 0"),
]  # fmt: skip
QUICK = ("density", "entropy", "lower-critic")
RELATIVES = tuple(p.id for p in PLANTS if p.gate not in QUICK or p.id in ("sac-target-of-the-mean", "sac-target-of-the-higher",
                                                                        "sac-policy-asks-one-critic"))  # fmt: skip
