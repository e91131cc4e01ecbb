"""Bugs planted in a fork of rl/ppo. `words` and `row` were fixed before the gates were run on them."""

from tests.helpers.plant import Plant

RECIPE = "rl/ppo"
DELTA = "delta, goes_on = reward + gamma * next_value * ~terminated - value,"
LATER = "later = delta[t] + goes_on[t] * later\n"
STEPS = '"observation": observation, "action": action, "log_prob": log_prob, **followed'
WHITEN = '(batch["advantage"] - everyone.mean()) / (everyone.std() + 1e-8)'
OBSERVE = "return ((observation - self.observations.mean) / self.observations.std).clamp(-10, 10)\n"
OWNED = "self.observations, self.returns = Running(n_obs), Running(1)\n"
ACT = "return model.act(observation.to(run.device)).cpu()\n"
ENVS = "envs = Environments(cfg.env, cfg.num_envs, seed=cfg.run.seed, stack=cfg.frame_stack, rank=run.rank, world=run.world)\n"
STAGES = "STAGES = [ppo]\n"
REMEMBER = ("--rnn-hidden-size", "16")
OWN = "own = envs.rows(chosen)\n"
THROUGH = 'outputs, value, *_ = model(batch["observation"], through=True)\n'
RATIO = '- batch["log_prob"]).exp()\n'


def plant(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more) -> Plant:
    return Plant(id, gate, row, old, new, words, recipe=RECIPE, **more)


def frames(*body: str) -> str:
    """STAGES, and before it frames stacked by a class of one's own, which differs from gymnasium's in one method."""
    lines = "".join(f"    {line}\n" for line in body)
    return (
        "import numpy as np\nfrom gymnasium import wrappers\n\n\nclass Frames(wrappers.FrameStackObservation):\n"
        f"{lines}\n\nwrappers.FrameStackObservation = Frames\n{STAGES}"
    )


def remembering(method: str, *body: str) -> str:
    """STAGES, and before it another class of environments with a memory, which differs in one method."""
    lines = "".join(f"        {line}\n" for line in body)
    return f"class Other(Remembering):\n    def {method}:\n{lines}\n\nRemembering = Other\n{STAGES}"


PLANTS = [
    plant("rl-time-limit-is-an-end", "probe-limit", "R5", DELTA, DELTA.replace("~terminated", "~done"),
          ("truncation", "treated as termination"), source="RL-02 Toni-SM/skrl#449", harm="values too low near the limit"),
    plant("rl-bootstraps-past-the-end", "probe-constant", "R5", DELTA, DELTA.replace(" * ~terminated", ""),
          ("terminated", "bootstrapping past the end"), source="RL-02 google-deepmind/mujoco_playground#305",
          before=("targets",), why="a first rollout's targets already hold what was added",
          harm="failing costs nothing"),
    plant("rl-value-of-the-reset-state", "probe-limit", "R5", STEPS,
          STEPS + ', "next_observation": envs.observation.to(run.device)',
          ("after the reset",), source="RL-02 instadeepai/flashbax#3", harm="values of another episode at every time limit"),
    plant("rl-no-mask", "targets", "R5", LATER, "later = delta[t] + gamma * lam * later\n",
          ("bootstrapping crosses the end of an episode", "mask"),
          harm="credit for what happened in the next episode"),
    plant("rl-mask-one-off", "targets", "R5", LATER, "later = delta[t] + goes_on[max(t - 1, 0)] * later\n",
          ("mask", "one step off"), harm="credit for what happened in the next episode"),
    plant("rl-no-discount", "targets", "R5", "goes_on = reward + gamma * next_value", "goes_on = reward + next_value",
          ("the discount is missing",), harm="values without a bound"),
    plant("rl-observation-after-the-step", "probe-observation", "R5", '"observation": observation, "action"',
          '"observation": envs.observation.to(run.device), "action"', ("with another step's reward",),
          harm="learns what to do one step too late"),
    plant("rl-rows-shuffled-apart", "probe-observation", "R5", "batch = {k: v[own] for k, v in rows.items()}\n",
          'batch = {k: v[envs.rows(chosen if k != "return" else order[: len(chosen)])] for k, v in rows.items()}\n',
          ("shuffled in different orders",), harm="the value of another moment"),
    plant("rl-policy-sign", "probe-action", "R5", '"policy": -gain.sum(),', '"policy": gain.sum(),', ("sign",),
          harm="learns the worst action"),
    plant("rl-ratio-upside-down", "probe-action", "R5", RATIO, RATIO.replace(".exp()", ".neg().exp()"), ("ratio",),
          source="", harm="learns the worst action"),
    plant("rl-policy-blind", "probe-both", "R5", "self.head(self.actor(x))", "self.head(self.actor(torch.zeros_like(x)))",
          ("observations do not reach the policy",), before=("wiring",), why="a layer that reads zeros gets no gradient",
          harm="one action for every observation"),
    plant("rl-value-weight-divides", "formula", "R3", "cfg.vf_coef * 0.5 * error.sum()", "cfg.vf_coef / 0.5 * error.sum()",
          ("4 times what that says", "vf_coef"), harm="the value's gradient outweighs the policy's: return 160 to 374, not 500"),
    plant("rl-no-whitening", "whitening", "R3", WHITEN, 'batch["advantage"]', ("not whitened",),
          source="seed 003 R3", harm="the size of the rewards is the size of the step"),
    plant("rl-centred-only", "whitening", "R3", WHITEN, '(batch["advantage"] - everyone.mean())', ("not whitened",),
          harm="the size of the rewards is the size of the step"),
    plant("rl-no-normaliser", "probe-scale", "R3", OBSERVE, "return observation\n", ("not normalised by running statistics", "observations"),
          source="seed 003 R4", harm="saturated layers"),
    plant("rl-evaluation-moves-the-normaliser", "evaluation", "C12", ACT,
          "model.observations.update(observation)\n        " + ACT, ("evaluation changed", "observations"),
          source="RL-05 DLR-RM/rl-baselines3-zoo#275", harm="statistics of the evaluation drift into training"),
    plant("rl-normaliser-not-saved", "resume", "C13", OWNED,
          OWNED + "        for one in (self.observations, self.returns):\n"
          "            one._non_persistent_buffers_set.update(one._buffers)\n",
          ("losses differ", "tensors differ"), source="RL-06 isaac-sim/IsaacLab#2635", harm="a resumed policy sees other inputs"),
    plant("rl-environments-not-saved", "resume", "C13", ENVS, ENVS + "    envs.load_state_dict = lambda state: None\n",
          ("differ", "stage.state"),
          source="seed 003 R4", harm="a resumed run begins new episodes"),
    plant("rl-every-sample-with-every-other", "dependency", "C2", '(value - batch["return"]).square(), (near',
          '(value[:, None] - batch["return"]).square().mean(1), (near', ("(B, 1) with (B,)",), source="RL-03 thu-ml/tianshou#40",
          harm="every value is drawn towards the mean"),
    plant("rl-clipped-action-scored", "density", "R5", "return action, self.head.log_prob(outputs, action)\n",
          "return action, self.head.log_prob(outputs, action.clamp(-1, 1))\n", ("change of variables",),
          argv=("--env", "Pendulum-v1"),
          harm="a ratio that is not that of what was drawn"),
    plant("rl-mean-alone-is-taken", "density", "R5", "action = self.head.draw(outputs, noise)\n",
          "action = self.head.best(outputs) + 0 * noise\n", ("change of variables",), argv=("--env", "Pendulum-v1"),
          harm="nothing is ever tried"),
    plant("rl-frames-of-the-episode-before", "environments", "R4", STAGES,
          frames("def reset(self, **settings):", "    observation, info = self.env.reset(**settings)",
                 "    self.obs_queue.append(observation)", "    return np.stack(self.obs_queue), info"),
          ("depend on the episode before", "cross the end of an episode"), argv=("--frame-stack", "4"),
          harm="an episode begins with what it cannot know"),
    plant("rl-memory-goes-on-over-the-end", "memory", "R5", STAGES,
          remembering("step(self, actions)", "followed = super().step(actions)",
                      "self.begun, self.state = 0 * self.begun, followed['next_observation'][:, -16:]", "return followed"),
          ("an episode differ", "not reset at the end of an episode"), argv=REMEMBER, harm="an episode begins with what it cannot know"),
    plant("rl-memory-replayed-over-the-end", "memory", "R5", THROUGH,
          'whole = torch.cat([batch["observation"][..., :n_obs], 0 * batch["observation"][..., n_obs : n_obs + 1],\n'
          '                           batch["observation"][..., n_obs + 1 :]], -1)\n'
          "        outputs, value, *_ = model(whole, through=True)\n",
          ("in the rollout or in the update",), argv=REMEMBER, harm="the update sees another memory than the rollout had"),
    plant("rl-memory-time-turned-round", "memory", "R5", OWN, "own = envs.rows(chosen).flip(-1)\n", ("time order",),
          argv=REMEMBER, harm="learns from what was not known yet"),
    plant("rl-memory-not-saved", "resume", "C13", STAGES,
          remembering("load_state_dict(self, state)", "self.envs.load_state_dict(state)"), ("differ", "stage.state"),
          argv=(*REMEMBER, "--num-steps", "32", "--train.batch-size", "64"),
          harm="a resumed run has forgotten the running episodes"),
    plant("rl-newest-frame-again-and-again", "probe-memory", "R5", STAGES,
          frames("def step(self, action):", "    seen, *rest = super().step(action)",
                 "    self.obs_queue.extend([seen[-1]] * self.stack_size)", "    return np.stack(self.obs_queue), *rest"),
          ("the newest is repeated",), argv=("--frame-stack", "4"), harm="four times the same: nothing is remembered"),
    plant("rl-ratio-always-one", "formula", "R3", f"(outputs, batch[\"action\"]) {RATIO}",
          "(outputs, batch[\"action\"]))\n        ratio = (ratio - ratio.detach()).exp()\n", ("the ratio is 1 everywhere",),
          harm="return 162 instead of 500"),
    plant("rl-maximum-for-minimum", "formula", "R3", "gain = torch.min(", "gain = torch.max(",
          ("the maximum instead of the minimum",), harm="steps without a bound"),
    plant("rl-ratio-not-clipped", "formula", "R3", "ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range)", "ratio", ("not clipped",),
          harm="steps without a bound"),
    plant("rl-value-clipped-against-itself", "formula", "R3", 'near = batch["value"] + (value - batch["value"])',
          "near = value + (value - value.detach())", ("clipped around",), harm="no clip at all"),
    plant("rl-entropy-detached", "formula", "R3", "policy.head.entropy(outputs).sum()",
          "policy.head.entropy(outputs.detach()).sum()",
          ("detach()", "actor"), harm="no bonus: the term is declared small, so its share of the gradient is not asked"),
    plant("rl-entropy-sign", "formula", "R3", '"entropy": -cfg.ent_coef', '"entropy": cfg.ent_coef', ("its sign is wrong",),
          harm="decided before it knows"),
    plant("rl-no-lambda", "returns", "R5", "gamma * lam * ~done", "gamma * ~done", ("lambda is missing",),
          harm="advantages full of noise; the probes' lambda of 1 hides it"),
    plant("rl-returns-along-another-axis", "returns", "R5", "rollout[k].flatten() / size", "rollout[k].T.flatten() / size",
          ("belong to other steps", "flattened"), before=("targets", "probe-limit"), why="no probe's value is learnt, either",
          source="hill-a/stable-baselines#123", harm="the critic learns the returns of other states"),
    plant("rl-one-buffer-of-observations", "returns", "R4",
          "    steps = []\n    for t in range(cfg.num_steps):\n        observation = envs.observation.to(run.device)\n",
          "    steps, observation = [], torch.empty_like(envs.observation, device=run.device)\n    for t in range(cfg.num_steps):\n"
          "        observation.copy_(envs.observation)\n", ("views of one buffer",), before=("targets", "probe-both", "probe-action"),
          why="no probe is learnt, either", source="openai/baselines#418", harm="all steps of a rollout learn from its last observation"),
    plant("rl-log-probabilities-anew", "returns", "R5", "            yield batch\n",
          '            with torch.no_grad():\n                outputs = policy.outputs(batch["observation"])\n'
          '                batch["log_prob"] = policy.head.log_prob(outputs, batch["action"])\n            yield batch\n',
          ("change between passes",), harm="the ratio is always 1 at its first look"),
    plant("rl-environments-share-a-seed", "environments", "R4", STAGES,
          'Environments._seed = lambda self, i: seeds.derive(self.seed, "episode", 0, self.episode[i])\n' + STAGES,
          ("start from the same observation",), harm="sixteen times the same episode at first"),
    plant("rl-actions-without-effect", "environments", "R4", STAGES,
          "step = Environments.step\nEnvironments.step = lambda self, actions: step(self, torch.zeros_like(actions))\n" + STAGES,
          ("no action has an effect",), harm="the return is that of the first action, whatever the policy does"),
]  # fmt: skip
RELATIVES = (
    "rl-maximum-for-minimum", "rl-ratio-not-clipped", "rl-value-clipped-against-itself", "rl-entropy-detached", "rl-entropy-sign",
    "rl-log-probabilities-anew",
    "rl-memory-goes-on-over-the-end", "rl-memory-replayed-over-the-end", "rl-memory-not-saved",
    "rl-mask-one-off", "rl-centred-only", "rl-value-of-the-reset-state", "rl-no-discount", "rl-ratio-upside-down", "rl-no-mask",
    "rl-rows-shuffled-apart", "rl-policy-sign", "rl-normaliser-not-saved", "rl-observation-after-the-step", "rl-policy-blind",
    "rl-every-sample-with-every-other",
)  # fmt: skip
