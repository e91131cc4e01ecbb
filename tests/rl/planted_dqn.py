"""Bugs planted in a fork of rl/dqn. `words` and `row` were fixed before the gates were run on them."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import forgetful

RECIPE = "rl/dqn"
STEPS = 'steps.append({"observation": observation, "action": action, **followed})\n'
SEEN = "observation = envs.observation.to(run.device)\n"
ENDED = '~steps["terminated"][last, n]'
OWN = "own = (done.cumsum(0) - done.long()) == 0"
FUTURE = f"cfg.gamma ** (last + 1) * {ENDED}\n"
BEST = 'best = (policy(rows["following"]) if cfg.double else worth).argmax(-1, keepdim=True)\n'
VALUE = 'worth = target(rows["following"])\n'
RETURN = 'batch["return"] = returns(cfg, policy, target, rows) / policy.returns.rms\n'
TAKEN = "return self(observation).gather(-1, action[:, None]).squeeze(-1)\n"
ERROR = 'error = F.smooth_l1_loss(model.of(batch["observation"], batch["action"]), batch["return"], reduction="none")\n'
FOLLOW = "            if (step.index * cfg.gradient_steps + i) % cfg.target_update_interval == 0:\n                target.follow(policy)\n"
AGELESS = """def ageless(cfg, run, previous=None):
    stage = dqn(cfg, run)
    ring = stage.state["replay"]
    load = ring.load_state_dict
    ring.load_state_dict = lambda state: (load(state), ring.born.zero_())
    return stage


STAGES = [ageless]
"""
KEPT = '"target": Target(policy, run.device, scale="returns")},\n'


def plant(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more) -> Plant:
    return Plant(id, gate, row, old, new, words, recipe=RECIPE, **more)


PLANTS = [
    plant("dqn-target-never-updated", "probe-delay", "R5", FOLLOW, "", ("never updated",),
          source="RL-01 higgsfield-ai/higgsfield#14", harm="values of a net that knows nothing"),
    plant("dqn-target-is-the-net", "target", "R5", "policy, target.net, replay, step.index", "policy, policy, replay, step.index",
          ("the net itself",), source="RL-01 AgileRL/AgileRL PR#464", harm="a target that runs away from the net"),
    plant("dqn-target-every-update", "target", "R5", "if (step.index * cfg.gradient_steps + i) % cfg.target_update_interval == 0:", "if True:",
          ("after every update",), harm="a target that runs away from the net"),
    plant("dqn-value-of-the-online-net", "target", "R5", VALUE, VALUE.replace("target", "policy"),
          ("the trained net instead of the target network",), harm="the largest error is learnt"),
    plant("dqn-old-action", "next-action", "R5", BEST, 'best = rows["action"][:, None]\n', ("the stored action",),
          harm="values of actions that nobody will take"),
    plant("dqn-time-limit-is-an-end", "probe-limit", "R5", FUTURE, FUTURE.replace(ENDED, "~done[last, n]"),
          ("truncation", "treated as termination"), source="RL-02 Toni-SM/skrl#449", harm="values too low near the limit"),
    plant("dqn-done-ignored", "probe-constant", "R5", FUTURE, FUTURE.replace(f" * {ENDED}", ""),
          ("terminated", "bootstrapping past the end"), before=("targets",), why="targets already hold it",
          source="RL-02 google-deepmind/mujoco_playground#305", harm="failing costs nothing"),
    plant("dqn-value-of-the-reset-state", "probe-limit", "R5", STEPS,
          STEPS.replace("**followed", '**followed, "next_observation": envs.observation.to(run.device)'), ("after the reset",),
          source="RL-02 instadeepai/flashbax#3", harm="values of another episode at every time limit"),
    plant("dqn-no-discount", "probe-delay", "R5", FUTURE, FUTURE.replace("cfg.gamma ** (last + 1)", "1.0"),
          ("the discount is missing",), harm="values without a bound"),
    plant("dqn-n-step-discounted-once", "probe-limit", "R5", FUTURE, FUTURE.replace("cfg.gamma ** (last + 1)", "cfg.gamma"),
          ("not discounted n times",), argv=("--n-step", "3"), harm="the future counts too much"),
    plant("dqn-n-step-over-the-end", "targets", "R5", OWN, "own = torch.ones_like(done)",
          ("bootstrapping crosses the end of an episode", "mask"), harm="rewards of the next episode"),
    plant("dqn-n-step-one-short", "targets", "R5", OWN, "own = done.cumsum(0) == 0", ("mask", "one step off"),
          harm="the last reward of an episode is lost"),
    plant("dqn-action-not-taken", "targets", "R5", STEPS, STEPS.replace('"action": action', '"action": greedy'),
          ("those that were taken",), harm="actions are blamed for what others did"),
    plant("dqn-worth-of-the-best", "probe-action", "R5", TAKEN, "return self(observation).amax(-1)\n",
          ("those that were taken",), harm="actions are not told apart"),
    plant("dqn-every-sample-with-every-other", "dependency", "C2", ERROR,
          'error = (model.of(batch["observation"], batch["action"])[:, None] - batch["return"]).square().mean(1)\n',
          ("(B, 1) with (B,)",), source="RL-03 PacktPublishing/Deep-Reinforcement-Learning-Hands-On#33",
          harm="every value is drawn towards the mean"),
    plant("dqn-replay-of-views", "probe-observation", "R5", SEEN,
          SEEN.replace("\n", " if t == 0 else observation.copy_(envs.observation)\n"), ("overwritten",),
          harm="one observation for a whole unit"),
    plant("dqn-rows-shuffled-apart", "probe-observation", "R5", RETURN, RETURN.replace(" / ", ".roll(1) / "), ("shuffled in different orders",),
          harm="the value of another moment"),
    plant("dqn-epsilon-stuck", "exploration", "R4", "step.index, epsilon(cfg, progress))\n", "step.index, epsilon(cfg, 0.0))\n",
          ("does not fall", "is not advanced"), harm="nothing that was learnt is ever tried"),
    plant("dqn-exploration-over-at-once", "exploration", "R4", "step.index, epsilon(cfg, progress))\n", "step.index, epsilon(cfg, step.index))\n",
          ("over too early", "the share of the run"), harm="greedy from the second iteration on"),
    plant("dqn-nothing-tried", "exploration", "R4", "(chance[t] < epsilon)", "(chance[t] < 0.0)",
          ("no action is ever random",), harm="what is never done is never learnt"),
    plant("dqn-last-action-never-drawn", "exploration", "R4",
          "torch.randint(policy.n_actions, (length", "torch.randint(policy.n_actions - 1, (length",
          ("from some of the actions only",), harm="half of what is stored before training knows one action"),
    plant("dqn-no-normaliser", "probe-scale", "R3",
          "x = ((observation - self.observations.mean) / self.observations.std).clamp(-10, 10)\n", "x = observation\n",
          ("not normalised by running statistics", "observations"), source="seed 003 R4", harm="what is far from zero is told apart late or never"),
    plant("dqn-normaliser-moves-in-evaluation", "evaluation", "C12", "return model(observation.to(run.device)).argmax(-1).cpu()\n",
          "model.observations.update(observation)\n        return model(observation.to(run.device)).argmax(-1).cpu()\n",
          ("evaluation changed", "observations"), source="RL-05 DLR-RM/rl-baselines3-zoo#275",
          harm="statistics of the evaluation drift into training"),
    *[plant(f"dqn-{kept}-not-saved", "resume", "C13", "STAGES = [dqn]\n", forgetful("dqn", kept), ("differ", "stage.state"),
            harm=harm)
      for kept, harm in (("replay", "a resumed run has forgotten what it saw"), ("target", "targets of a net that knows nothing"),
                         ("environments", "a resumed run begins new episodes"))],
    plant("dqn-replay-forgets-its-age", "resume", "C13", "STAGES = [dqn]\n", AGELESS, ("differ", "state.replay", "stage.state"),
          harm="no loss shows it; what is thrown away by its age is another part"),
    plant("dqn-target-counts-units", "target-rate", "R5", FOLLOW,
          "            if i == cfg.gradient_steps and (step.index + 1) % cfg.target_update_interval == 0:\n                target.follow(policy)\n",
          ("rollouts are counted",), harm="ten targets in a run instead of three hundred; the probes have an interval of their own"),
    plant("dqn-buffer-of-one-iteration", "returns", "R4", "Replay(cfg.buffer_size // cfg.num_envs, cfg.num_envs, run.device)",
          "Replay(cfg.num_steps, cfg.num_envs, run.device)", ("has room for", "another capacity"),
          harm="what was seen before the last iteration is forgotten"),
    plant("dqn-observation-after-the-step", "returns", "R4", '"observation": observation, "action": action, **followed',
          '"observation": envs.observation.to(run.device), "action": action, **followed',
          ("stored with the action before it",), before=("targets", "probe-both", "probe-action"), why="no probe is learnt, either",
          source="sail-sg/envpool#174", harm="the value of an action is learnt for the state after it"),
    plant("dqn-double-is-not", "returns", "R5", BEST, "best = worth.argmax(-1, keepdim=True)\n", ("`double`",),
          harm="values that are too high"),
    plant("dqn-units-of-returns-mixed", "returns", "R5", "* target.returns.rms)", "* policy.returns.rms)", ("units are mixed up",),
          harm="targets jump with every unit's statistics"),
    plant("dqn-weights-are-not-applied", "formula", "R5", '(batch["weight"] * error).sum()', "error.sum()", ("are not applied",),
          argv=("--prioritized-replay-alpha", "0.6"), harm="what is drawn more often counts more"),
]  # fmt: skip
RELATIVES = (
    "dqn-units-of-returns-mixed", "dqn-weights-are-not-applied",
    "dqn-target-never-updated",
    "dqn-old-action", "dqn-target-every-update", "dqn-value-of-the-online-net", "dqn-time-limit-is-an-end", "dqn-done-ignored",
    "dqn-no-discount", "dqn-n-step-discounted-once", "dqn-replay-of-views",
    "dqn-value-of-the-reset-state", "dqn-n-step-one-short", "dqn-worth-of-the-best", "dqn-every-sample-with-every-other",
    "dqn-rows-shuffled-apart", "dqn-nothing-tried", "dqn-no-normaliser", "dqn-normaliser-moves-in-evaluation",
    "dqn-target-not-saved", "dqn-environments-not-saved", "dqn-replay-not-saved", "dqn-replay-forgets-its-age",
)  # fmt: skip
