"""Proximal policy optimisation of a language model (Ziegler 2019, Ouyang 2022): maximise a reward, close to a reference model.

tiny  a small Llama that llm/pretrain trains on Python's documentation (built once), a reward for complete sentences; minutes.
full  SmolLM2-135M, or any causal language model by `--model`, and your reward: `module:function` or a reward model's folder.

The reference is a frozen copy of the initial weights, also with `--init-from`, and is never loaded again by name. The KL
coefficient is adapted and stored in the checkpoint. Only answer tokens, including the end token, enter the loss, the KL penalty
and the normalisation of advantages. Policy and values come from one forward. The reward is tested before training, and a run that
exploits a weakness of it stops itself.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from trainworthy.core.base import seeds
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import loader
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.models import speaking
from trainworthy.recipes.llm.models.loading import from_file
from trainworthy.recipes.rl.language.data import rewards
from trainworthy.recipes.rl.language.data.prompts import Source, encode, read
from trainworthy.recipes.rl.language.gates import rlhf as gates
from trainworthy.recipes.rl.language.gates import rlhf_monitors
from trainworthy.recipes.rl.language.kl_control import Controller, Watch
from trainworthy.recipes.rl.language.models import loading as models
from trainworthy.recipes.rl.language.models.policy import Writer, own, scored, shape, texts
from trainworthy.recipes.shared import hub, language_models

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(language_models.LoRA, core.Config):
    """Settings of rl/rlhf. --train.epochs counts rollouts with the updates on them, --train.batch-size completions per update."""

    data: Source = field(default_factory=Source)
    SEARCH_RANGES = "gae_lambda=0.8:1 clip_range=0.1:0.4 init_kl_coef=0.02:2 update_epochs=1:8"
    model: str = "prose"
    """`prose` (a small Llama that llm/pretrain trains once), `smollm2`, or a folder or `owner/name` with a causal model."""
    lora_rank: int = 0
    """Rank of LoRA adapters on the language model; 0 trains all of it. The value head trains whole. With adapters and bf16 the
    frozen weights are kept in bf16. Usual --optim.lr of a pretrained model: 1e-4 for adapters, 1e-5 for all weights."""
    attention: models.Attention = "auto"
    """Attention implementation; `auto` is transformers' own choice. The last two need an accelerator."""
    pretrained: float = 1.0
    """For `prose`: its pretraining epochs on the texts of the running Python."""
    reward: str = "sentence"
    """`sentence` (1 for a completion that ends as one), `module:function` that takes (prompts, completions) and returns a number
    for each, or the folder of a reward model."""
    max_new_tokens: int = 24
    """Maximum number of tokens in a completion."""
    temperature: float = 1.0
    """Sampling temperature, also used for log-probabilities."""
    rollout_batch_size: int = 64
    """Completions per rollout, over all processes."""
    update_epochs: int = 4
    """Maximum number of passes over each rollout."""
    gamma: float = 1.0
    """Discount factor per token."""
    gae_lambda: float = 0.95
    """GAE parameter: 0 uses the value function alone, 1 the rewards alone (Schulman 2016)."""
    clip_range: float = 0.2
    """Clipping range of the probability ratio of a token."""
    clip_range_vf: float = 0.2
    """Clipping range of the value, relative to the return scale; `inf` disables it."""
    vf_coef: float = 0.1
    """Coefficient of the value loss; policy and value share a net."""
    value_head_lr: float = 2e-3
    """Peak learning rate of the value head, which starts at zero; --optim.lr is the language model's."""
    init_kl_coef: float = 0.2
    """Initial KL coefficient (reward per nat of KL to the reference); 0: no KL penalty."""
    target_kl: float = 6.0
    """Target KL per completion, in nats, to which the coefficient adapts."""
    kl_coef_rate: float = 0.1
    """Maximum relative change of the KL coefficient per rollout."""
    far: float = 0.05
    """KL in nats per token between the policy and the rollout's policy above which no further pass is made."""
    stop_hacked: bool = True
    """Stop a run whose reward rises while its completions degenerate."""

    def __post_init__(self):
        self.model = hub.folder(self.model)


def tiny() -> Config:
    """A small Llama on two CPU cores."""
    return Config(
        train=Train(epochs=40, batch_size=32, eval_every=10, eval_batch_size=128),
        optim=Optim(lr=3e-4, weight_decay=0.0, clip=1.0, schedule="linear", warmup=0.0),
        run=RunSettings(threads=1, save_every=10),
    )


def full() -> Config:
    """SmolLM2-135M and complete sentences; set `--model`, `--reward` and `--data.path` for your own task."""
    return Config(
        model="smollm2",
        max_new_tokens=64,
        rollout_batch_size=512,
        data=Source(tokens=64),
        train=Train(epochs=200, batch_size=64, accumulate=4, eval_every=10, eval_batch_size=128, precision="bf16"),
        optim=Optim(lr=1e-5, weight_decay=0.0, clip=1.0, schedule="linear", warmup=0.05),
        run=RunSettings(save_every=10),
    )


# ------------------------------------------------------------------------------------------------------------- rollouts
@torch.no_grad()
def collect(cfg: Config, run: core.Run, stage: core.Stage, iteration: int) -> dict[str, Tensor]:
    """Collect one rollout of the policy over all processes: (rollout, ...) each. Draws depend on (seed, iteration, prompt) alone."""
    policy, reference, prompts = stage.model, stage.frozen_modules["reference"], stage.data["prompts"]
    stream = loader.Stream(len(prompts), cfg.run.seed, order=prompts.order)
    keys = stream.keys(iteration * cfg.rollout_batch_size, (iteration + 1) * cfg.rollout_batch_size)
    mine = keys[run.rank * len(keys) // run.world : (run.rank + 1) * len(keys) // run.world]
    known = loader.Keyed(prompts, cfg.run.seed)
    batch = loader.to_device(prompts.collate([known[key] for key in mine]), run.device)
    response, valid = policy.write(batch["input_ids"], batch["mask"], batch["draws"])
    found = texts(prompts.tokenizer, response, valid)
    reward = rewards.ask(rewards.load(cfg.reward), batch["prompt"], found).to(run.device)
    seen = {"input_ids": batch["input_ids"], "mask": torch.cat([batch["mask"], valid], 1), "response": response}
    log_prob, value, entropy = scored(policy, seen, slices(cfg, run))
    value = value * policy.returns.rms
    kl = (log_prob - scored(reference, seen, slices(cfg, run))[0]) * valid
    earned = earnings(reward, kl, valid, stage.state["controller"].value)
    advantage = gae(earned, value, valid, cfg.gamma, cfg.gae_lambda)
    rollout = seen | {"valid": valid, "log_prob": log_prob, "value": value, "advantage": advantage, "entropy": entropy,
                       "return": advantage + value, "reward": reward, "kl": kl.sum(1)}  # fmt: skip
    rollout = {k: run.gather(v) for k, v in rollout.items()}
    return rollout | {"advantage": whitened(rollout["advantage"], rollout["valid"])}


def slices(cfg: Config, run: core.Run) -> int:
    """Completions whose log-probabilities are computed at once: a micro-batch, so that a rollout needs no more memory than a step."""
    return max(1, cfg.train.batch_size // (cfg.train.accumulate * run.world))


def earnings(reward: Tensor, kl: Tensor, valid: Tensor, kl_coef: float) -> Tensor:
    """(B, T): reward per token. Each token costs `kl_coef` per nat of `kl` (B, T); a completion's last token adds its `reward`
    (B,)."""
    last = valid.sum(1) - 1
    return (-kl_coef * kl * valid).scatter_add(1, last[:, None], reward[:, None].to(kl))


def gae(reward: Tensor, value: Tensor, valid: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates (Schulman 2016), all (B, T). The value after a completion's last token is zero."""
    advantage, later, following = torch.zeros_like(reward), torch.zeros_like(reward[:, 0]), torch.zeros_like(reward[:, 0])  # fmt: skip
    for t in reversed(range(reward.shape[1])):
        delta = reward[:, t] + gamma * following - value[:, t]
        later = (delta + gamma * lam * later) * valid[:, t]
        following = value[:, t] * valid[:, t]
        advantage[:, t] = later
    return advantage


def whitened(x: Tensor, valid: Tensor) -> Tensor:
    """Normalise to mean 0 and standard deviation 1 over answer tokens; 0 elsewhere."""
    some = x[valid]
    return (x - some.mean()) / (some.std() + 1e-8) * valid


def minibatches(cfg: Config, run: core.Run, policy: Writer, rollout: dict, iteration: int, i: int) -> Iterator[dict]:
    """Yield the rollout in minibatches, in a new order each pass; values are relative to the return scale."""
    rows = {k: rollout[k] for k in ("input_ids", "mask", "response", "valid", "log_prob", "advantage")}
    rows |= {k: rollout[k] / policy.returns.rms for k in ("return", "value")}
    order = seeds.permutation(cfg.rollout_batch_size, cfg.run.seed, "minibatches", iteration, i).to(run.device)
    for chosen in order.split(cfg.train.batch_size):
        mine = chosen[run.rank * len(chosen) // run.world : (run.rank + 1) * len(chosen) // run.world]
        yield {k: v[mine] for k, v in rows.items()}


# ---------------------------------------------------------------------------------------------------------------- stage
def rlhf(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    reward = rewards.load(cfg.reward)  # first: the model may take minutes to build
    path = models.locate(cfg.model, cfg.pretrained)
    tokenizer, lm = models.tokenizer(path), models.load(path, language_models.kept_in(cfg.lora_rank, run.precision))
    lm = language_models.adapted(models.attend(lm, cfg.attention, run.device), cfg, exact=True)
    if cfg.data.tokens + cfg.max_new_tokens > (context := language_models.context(lm.config)):
        raise UserError("prompts and completions are longer than what the model reads", needed=f"--data.tokens + --max-new-tokens <= "
                        f"{context}", got=f"{cfg.data.tokens} + {cfg.max_new_tokens}")  # fmt: skip
    if cfg.rollout_batch_size % cfg.train.batch_size:
        raise UserError("a rollout is not cut evenly into minibatches", got=f"{cfg.rollout_batch_size} by {cfg.train.batch_size}",
                        needed="--train.batch-size that divides --rollout-batch-size")  # fmt: skip
    data = read(cfg.data, tokenizer, cfg.max_new_tokens)
    policy = Writer(lm, tokenizer, cfg.temperature)
    reference, watch = copy.deepcopy(policy), Watch(cfg.target_kl)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        log_p, value = model(batch["input_ids"], batch["mask"], batch["response"])
        ratio = (own(log_p, batch["response"]) - batch["log_prob"]).exp()
        gain = torch.min(ratio * batch["advantage"], ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * batch["advantage"])  # fmt: skip
        near = batch["value"] + (value - batch["value"]).clamp(-cfg.clip_range_vf, cfg.clip_range_vf)
        error = torch.max((value - batch["return"]).square(), (near - batch["return"]).square())
        valid = batch["valid"]
        return {"policy": -gain[valid].sum(), "value": cfg.vf_coef * 0.5 * error[valid].sum()}

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        rows = []
        for batch in run.batches(data):
            response, valid = model.write(batch["input_ids"], batch["mask"], batch["draws"])
            earned = rewards.ask(reward, batch["prompt"], texts(tokenizer, response, valid)).to(run.device)
            seen = {"input_ids": batch["input_ids"], "mask": torch.cat([batch["mask"], valid], 1), "response": response}
            log_prob, before = (scored(net, seen, slices(cfg, run))[0] for net in (model, reference))
            kl = ((log_prob - before) * valid).sum(1)
            rows.append(torch.stack([earned, kl, *shape(response, valid, tokenizer.eos_token_id)], 1))
        names = ("reward", "kl", "tokens", "distinct", "ended")
        return dict(zip(names, run.gather(torch.cat(rows)).cpu().double().mean(0).tolist(), strict=True))

    def baselines() -> dict[str, dict[str, float]]:
        with torch.no_grad(), run.autocast():
            start = evaluate(reference.to(run.device), data["val"])
        return {"the start, without training": start, "saying nothing": {"reward": floor}}

    def preview(batch: dict) -> list[core.Tile]:
        ids = batch["input_ids"] if "response" not in batch else torch.cat([batch["input_ids"], batch["response"]], 1)
        return [core.Tile(tokenizer.decode(row[keep.bool()])) for row, keep in zip(ids, batch["mask"], strict=True)]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        response, valid = model.write(batch["input_ids"], batch["mask"], batch["draws"])
        found = texts(tokenizer, response, valid)
        earned = rewards.ask(reward, batch["prompt"], found).tolist()
        return [core.Tile(f"{r:.3g}: {p} -> {c}") for r, p, c in zip(earned, batch["prompt"], found, strict=True)]

    def figures(model: nn.Module, some: core.Data) -> dict:
        nets = {"Reward: prompt -> completion": model, "The same by the start": reference}
        some = View(some, range(min(16, len(some))))
        return {title: [t for batch in run.batches(some) for t in predict(net, batch)] for title, net in nets.items()}

    def export(folder: Path) -> None:
        """The language model (or its adapter, for peft) and its tokenizer for `from_pretrained`, without the value head."""
        language_models.export(policy.lm, tokenizer, folder)
        language_models.complete_export(folder, path, ends=[tokenizer.eos_token_id], pad=tokenizer.pad_token_id, most=cfg.max_new_tokens)  # fmt: skip

    floor = rewards.of_nothing(reward, data["val"].texts)
    # With --init-from adapters come from its file; otherwise they start at zero.
    new = tuple(f"lm.{n}" for n, _ in lm.named_parameters() if "lora_" in n and not cfg.init_from)
    return core.Stage(
        name="rlhf",
        model=policy,
        optimizers={"main": core.make_optimizer(policy, cfg.optim, {"lm": cfg.optim.lr, "head": cfg.value_head_lr})},
        shard_units=None,  # a process writes until its own completions have ended
        data=data,
        loss=loss,
        counts=lambda batch: {"*": batch["valid"].sum()},
        evaluate=evaluate,
        metric=core.Metric("reward", "what does the reward say of held-out prompts' completions?", floor=floor, ceiling=rewards.ceiling(reward)),
        state={"controller": Controller(cfg.init_kl_coef, cfg.target_kl, cfg.kl_coef_rate), "watch": watch},
        on_start=lambda: reference.load_state_dict(policy.state_dict()),
        frozen_modules={"reference": reference, **rewards.nets(reward)},
        expect=core.Expect(loss_may_rise="its targets move with the policy", small_terms=("value",), new_parameters=("head.", *new),
                           frozen=tuple(f"lm.{n}" for n in language_models.frozen(lm, cfg)), gate_batch_size=8,
                           unused_fields=("value",) * (cfg.clip_range_vf == float("inf"))),  # not clipped: the old values are not read
        pretrained=from_file(lm, path),
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        monitors=rlhf_monitors.of(cfg.target_kl, watch),
        gates=gates.of(reward, path, tokenizer),
    )  # fmt: skip


def speaker(cfg: Config, export: Path) -> speaking.Speaker:
    """The export, for `trainworthy predict` and `trainworthy chat`: it goes on with a prompt, greedily."""
    base = models.locate(cfg.model, cfg.pretrained) if cfg.lora_rank else ""
    return speaking.going_on(cfg, export, lambda tokenizer, text: encode(cfg.data, tokenizer, text), base=base)


STAGES = [rlhf]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    policy, controller, watch = stage.model, stage.state["controller"], stage.state["watch"]
    for step in run.steps(stage):
        with run.autocast():  # as the loss will see it, so that the first ratio is 1
            rollout = collect(cfg, run, stage, step.index)
        for i in range(cfg.update_epochs):
            for minibatch in minibatches(cfg, run, policy, rollout, step.index, i):
                run.update(stage, run.micro_batches(minibatch))
            with run.autocast():
                metrics = moved(cfg, policy, rollout, slices(cfg, run))
            if metrics["approx_kl"] > cfg.far:
                break
        controller.update(metrics["kl"])
        run.log("policy", metrics | {"kl_coef": controller.value, "update_epochs": i + 1})
        policy.observe(rollout["return"][rollout["valid"]])
        if cfg.stop_hacked and not run.rehearsal:
            watch.stop(metrics, step.index + 1)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


@torch.no_grad()
def moved(cfg: Config, policy: Writer, rollout: dict[str, Tensor], rows: int) -> dict[str, float]:
    """Statistics of a rollout and of its updates, over all processes and equal on each; `rows` completions are read at once."""
    valid = rollout["valid"]
    log_prob, _, _ = scored(policy, {k: rollout[k] for k in ("input_ids", "mask", "response")}, rows)
    log_ratio = (log_prob - rollout["log_prob"])[valid]
    ratio, returned = log_ratio.exp(), rollout["return"][valid]
    tokens, distinct, ended = shape(rollout["response"], valid, policy.eos)
    metrics = {"approx_kl": ratio - 1 - log_ratio,  # Schulman, "Approximating KL divergence", 2020: the k3 estimate
            "clip_fraction": (ratio - 1).abs() > cfg.clip_range, "entropy": rollout["entropy"][valid], "reward": rollout["reward"],
            "kl": rollout["kl"], "tokens": tokens, "distinct": distinct, "ended": ended}  # fmt: skip
    metrics = {k: v.cpu().double().mean().item() for k, v in metrics.items()}
    unexplained = (returned - rollout["value"][valid]).var()
    return metrics | {"explained_variance": 1 - (unexplained / returned.var().clamp_min(1e-12)).item()}


if __name__ == "__main__":
    core.main(__file__)
