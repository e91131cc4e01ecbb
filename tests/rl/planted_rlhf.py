"""Bugs of learning from a reward, planted in a fork of rl/rlhf; gate and words were fixed before the gates were run on them."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import forgetful

RLHF = "rl/rlhf"
ODD, REWARDS = "tests.helpers.odd_rewards", "trainworthy.recipes.rl.language.data.rewards"
WRITE = '    response, valid = policy.write(batch["input_ids"], batch["mask"], batch["draws"])\n'
KL = "    kl = (log_prob - scored(reference, seen, slices(cfg, run))[0]) * valid\n"
SCORED = "    log_prob, value, entropy = scored(policy, seen, slices(cfg, run))\n"
PAID = "return (-kl_coef * kl * valid).scatter_add(1, last[:, None], reward[:, None].to(kl))"
LATER = "later = (delta + gamma * lam * later) * valid[:, t]\n"
WHITE = "    some = x[valid]\n"
LOSS = '"policy": -gain[valid].sum()'
NEAR = 'near = batch["value"] + (value - batch["value"]).clamp(-cfg.clip_range_vf, cfg.clip_range_vf)'
TOLD = '        controller.update(metrics["kl"])\n'
STAGES = "STAGES = [rlhf]\n"
FOUND = "    found = texts(prompts.tokenizer, response, valid)\n    reward"
BUILT = "    policy = Writer(lm, tokenizer, cfg.temperature)\n"
RATIO = '- batch["log_prob"]).exp()\n'


def plant(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more) -> Plant:
    return Plant(id, gate, row, old, new, words, recipe=RLHF, **more)


PLANTS = [
    plant("rlhf-prompts-of-one-iteration", "new-samples", "C15",
          "stream.keys(iteration * cfg.rollout_batch_size, (iteration + 1) * cfg.rollout_batch_size)", "stream.keys(0, cfg.rollout_batch_size)",
          ("restarts",), harm="the policy is trained on the first prompts alone"),
    plant("rlhf-exports-the-reference", "exported", "C18", "language_models.export(policy.lm, tokenizer, folder)",
          "language_models.export(reference.lm, tokenizer, folder)", ("weights that training began with",), source="common (stale variable)",
          harm="the untrained model is shipped"),
    plant("rlhf-export-without-its-scale", "exported", "C18", "language_models.export(policy.lm, tokenizer, folder)",
          "policy.lm.config.rms_norm_eps = 0.5\n        language_models.export(policy.lm, tokenizer, folder)",
          ("differ by",), source="common (config changed after building)",
          harm="every tensor of the file is right, and the loaded model computes something else"),
    plant("rlhf-reference-follows", "wiring", "C3", TOLD,
          TOLD + '        stage.frozen_modules["reference"].load_state_dict(policy.state_dict())\n',
          ("frozen", "the loop copies trained weights into frozen ones"), source="R2",
          harm="the KL is always 0: no penalty holds the policy"),
    plant("rlhf-reference-is-the-policy", "returns", "R2", KL, KL.replace("reference", "policy"),
          ("to another model than the initial one",), source="R2", harm="no penalty holds the policy"),
    plant("rlhf-price-upside-down", "returns", "R2", PAID, PAID.replace("-kl_coef", "kl_coef"), ("wrong sign",),
          source="RL-07 Logic-RL#58", harm="the policy is paid for leaving"),
    plant("rlhf-attention-drops-out", "score", "L1", BUILT, BUILT + "    for module in policy.modules():\n"
          "        if hasattr(module, 'attention_dropout'):\n            module.attention_dropout = 0.1\n", ("dropout",),
          source="LLM-13 huggingface/trl#2042", harm="the ratio of a text to itself is not 1: every update is noise as well"),
    plant("rlhf-distance-of-the-padding", "returns", "R2", KL, KL.replace(" * valid\n", "\n"), ("padding",), source="R2",
          harm="short answers get a large KL, and the coefficient rises"),
    plant("rlhf-whitened-over-padding", "returns", "R3", WHITE, "    some = x.flatten()\n", ("whitened over padding",),
          source="RL-09 NovaSky-AI/SkyRL#1305", harm="the shorter the answers, the larger the steps"),
    plant("rlhf-not-whitened", "returns", "R3", '"advantage": whitened(rollout["advantage"], rollout["valid"])',
          '"advantage": rollout["advantage"]', ("not at all",), source="R3",
          harm="the size of the rewards is the size of the step"),
    plant("rlhf-whitened-within-each-answer", "returns", "R3",
          WHITE + "    return (x - some.mean()) / (some.std() + 1e-8) * valid\n",
          "    n = valid.sum(1, keepdim=True)\n    centred = (x - (x * valid).sum(1, keepdim=True) / n) * valid\n"
          "    return centred / ((centred.square().sum(1, keepdim=True) / n).sqrt() + 1e-8)\n",
          ("within each answer", "no answer is better than another"), source="common (axis of a mean)",
          harm="the reward of a completion is in its mean, which is subtracted"),
    plant("rlhf-padding-learnt-from", "formula", "R3", LOSS, '"policy": -gain.sum()', ("padding is part of the loss",), source="R3",
          harm="what stands after the end is learnt, too, where anything else lets it"),
    plant("rlhf-value-clipped-against-itself", "formula", "R3", NEAR,
          "near = value.detach() + (value - value.detach()).clamp(-cfg.clip_range_vf, cfg.clip_range_vf)", ("clipped against the new value",),
          source="R3", harm="no clip at all"),
    plant("rlhf-ratio-upside-down", "formula", "R3", RATIO, RATIO.replace(".exp()", ".neg().exp()"), ("is inverted",), source="R3",
          harm="learns what the reward does not want"),
    plant("rlhf-reward-at-the-wrong-token", "returns", "R3", "    last = valid.sum(1) - 1\n",
          "    last = (valid.sum(1) - 2).clamp_min(0)\n", ("another token than the last",), source="RL-08 huggingface/trl#3750",
          harm="the end of a text is worth nothing: it never stops"),
    plant("rlhf-reaches-over-the-end", "returns", "R3", "following = value[:, t] * valid[:, t]\n", "following = value[:, t]\n",
          ("over the end",), source="R3", harm="the value of padding is promised at every end"),
    plant("rlhf-prompt-scored", "returns", "L2", FOUND,
          '    found = [a + b for a, b in zip(batch["prompt"], texts(prompts.tokenizer, response, valid), strict=True)]\n    reward',
          ("with the prompt",), source="L2", harm="a reward for what was asked, not for what was said"),
    plant("rlhf-end-dropped", "score", "L3", WRITE, WRITE + "    valid[:, 1:] &= response[:, 1:] != policy.eos\n", ("the end token",),
          source="L3", harm="nobody learns to stop"),
    plant("rlhf-answer-shifted", "score", "L2", SCORED, SCORED + "    log_prob = log_prob.roll(-1, 1)\n", ("shifted by one",), source="L2",
          before=("returns",), why="the distance is that of the shifted ones, too", harm="the chances of another token"),
    plant("rlhf-mask-forgotten", "score", "L1", SCORED,
          '    seen["mask"] = torch.ones_like(seen["mask"])\n' + SCORED, ("padding",), source="L1",
          harm="what pads is read, and other chances are learnt than those that were drawn from"),
    plant("rlhf-price-not-saved", "resume", "C13", STAGES, forgetful("rlhf", "controller"), ("stage.state",), source="R2",
          harm="a resumed run begins with the first coefficient"),
    plant("rlhf-price-never-adapted", "controller", "R2", TOLD, "", ("never updates the controller",), source="R2",
          harm="the initial coefficient in the whole run"),
    plant("rlhf-constant-reward", "reward", "R1", STAGES, STAGES, ("constant",), argv=("--reward", f"{ODD}:constant"),
          source="R1", harm="nothing to learn"),
    plant("rlhf-longer-is-better", "reward", "R1", STAGES, STAGES, ("length",), argv=("--reward", f"{REWARDS}:longer"),
          source="R1", harm="answers to the length limit"),
    plant("rlhf-nan-reward", "reward", "R1", STAGES, STAGES, ("not a number",), argv=("--reward", f"{ODD}:undefined"),
          source="R1", harm="a run that stops itself after hours"),
    plant("rlhf-wrong-count", "reward", "R1", STAGES, STAGES, ("wrong number of",), argv=("--reward", f"{ODD}:one"),
          source="R1", harm="one reward for all"),
    plant("rlhf-raises", "reward", "R1", STAGES, STAGES, ("raise",), argv=("--reward", f"{ODD}:raises"), source="R1",
          harm="a run that ends at the first empty answer"),
    plant("rlhf-empty-is-best", "reward", "R1", STAGES, STAGES, ("empty answer",), argv=("--reward", f"{ODD}:empty"),
          source="R1", harm="a policy that says nothing"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS]  # each builds a rollout or more; test_rlhf has the same gates on a smaller net
