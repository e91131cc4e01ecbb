"""A reward model (Bradley & Terry 1952; Ouyang 2022): score answers so that preferred ones score higher, with TRL's
RewardTrainer.

tiny  SmolLM2-135M learns which docstring belongs to a function's name; LoRA, two CPU cores, minutes. Constructed preferences.
      128 held-out pairs are for validation, 102 for the test (standard errors of three points).
full  SmolLM2-360M on `--data.path FILE` or `hub:owner/name`; an accelerator. The same code path.

The reward is read at the token that ends the answer, on either padding side (a pad that also ends a turn would move it). The head
starts at zero, so all rewards are equal and the first loss is ln 2. It is trained with the adapters and exported with them, with
the pad token in the config. Pairs of equal answers are left out. The report shows a baseline that counts tokens, the correlation
of rewards with length, and the calibration of held-out margins.
"""

import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.adapters import hosted
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.base.doubles import to_double
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.data import pairs, preferences
from trainworthy.recipes.llm.evaluation import calibration, metrics
from trainworthy.recipes.llm.gates import chat as gates
from trainworthy.recipes.llm.gates import preference, splits
from trainworthy.recipes.llm.gates import reward as reward_gates
from trainworthy.recipes.llm.models import loading, scoring
from trainworthy.recipes.shared import hub

from trainworthy import core

EVERY = 0.06  # epochs between evaluations in `tiny`


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(loading.LoRA, core.Config):
    """Settings of llm/reward."""

    data: preferences.Source = field(default_factory=preferences.Source)
    SEARCH_RANGES = "center_rewards_coefficient=0:0.1"
    model: str = "smollm2"
    """`smollm2` (135M, from a package), a folder that `from_pretrained` reads, or `owner/name` on the hub."""
    chat_template: str = ""
    """File with a chat template that replaces the model's own, or `trl:NAME` for one that TRL ships."""
    eos_token: str = ""
    """Token that ends an answer, if it differs from the tokenizer's eos and the template does not show it."""
    lora_rank: int = 8
    """Rank of the LoRA adapters; 0 trains all weights, in fp32. The head is always trained. Usual peaks of the rate (--optim.lr): 1e-4
    to 2e-4 for adapters, 1e-5 to 2e-5 for all weights."""
    attention: loading.Attention = "auto"
    """Attention implementation; `auto` is transformers' own choice. The last two need an accelerator."""
    center_rewards_coefficient: float = 0.0
    """Coefficient of the squared sum of a pair's rewards, which centres rewards at zero (Eisenstein 2023; usually 0.01)."""
    metric: Literal["accuracy", "nll"] = "accuracy"
    """Metric that selects the best checkpoint: the share of preferred answers, or the loss of pairs (Bradley-Terry). Both are reported."""
    merge_adapters: bool = True
    """Export the full model with merged adapters, fp32. Otherwise only adapters and head are exported: users must then set
    `num_labels=1` and the pad token, or get other rewards."""

    def __post_init__(self):
        self.model = hub.folder(self.model)
        pairs.paced(self, EVERY)


def tiny() -> Config:
    """SmolLM2-135M on two CPU cores: 129 steps of 4 pairs."""
    return Config(
        train=Train(epochs=0.12, batch_size=4, eval_batch_size=16, eval_every=EVERY),
        optim=Optim(lr=2e-3, warmup=0.1, weight_decay=0.0),
        run=RunSettings(save_every=EVERY),
    )


def full() -> Config:
    """Human preferences between two summaries."""
    return Config(
        data=preferences.Source(
            path="hub:trl-lib/tldr-preference", system="", max_length=1024, max_bad=0.1, held_out=1000
        ),
        model="HuggingFaceTB/SmolLM2-360M-Instruct",
        lora_rank=16,
        center_rewards_coefficient=0.01,
        train=Train(epochs=1, batch_size=64, accumulate=8, eval_batch_size=16, eval_every=0.1, precision="bf16"),
        optim=Optim(lr=1e-4, warmup=0.1, weight_decay=0.0),
        run=RunSettings(save_every=0.1),
    )


# ----------------------------------------------------------------------------------------------------------------- data
def read(cfg: Config, chat: pairs.Chat) -> dict[str, preferences.Preferences]:
    """All splits, without what is too long or prefers nothing."""
    data, (*splits, bad) = {}, preferences.read(cfg.data, chat)
    sizes = [preferences.sizes(rows, chat) for rows in splits[:2]]
    limit = pairs.limit(cfg.data, sizes, loading.context(loading.locate(cfg.model)))
    for name, rows in zip(("train", "val", "test"), splits, strict=True):
        if not rows and name == "test":
            continue
        kept, notes = preferences.usable(rows, chat, cfg.data, name, limit)
        data[name] = preferences.Whole(kept, chat)
        share = preferred(preferences.more_tokens(kept, chat))
        data[name].notes = {"the preferred answer has more tokens": f"in {share:.0%} of the pairs"}
        data[name].notes |= {f"left out of {name}": "; ".join(notes)} if notes else {}
    data["train"].notes |= {"rows": "; ".join(bad)} if bad else {}
    data["train"].notes |= preferences.described(data["train"].rows, chat, sizes[0], limit)
    data["train"].notes |= pairs.passes(cfg.data.path, len(data["train"].rows), cfg.train)
    data["train"].notes |= loading.rate_notes(cfg, cfg.optim.lr)
    return data


# ---------------------------------------------------------------------------------------------------------------- model
def make_trainer(cfg: Config, run: core.Run, path: str):
    """TRL's trainer, as its documentation builds it: model, settings, data that core's stream replaces."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    dtype = loading.kept_in(cfg.lora_rank, run.precision)
    model = loading.scorer(path, dtype, loading.scoring_tokenizer(path, cfg.chat_template, cfg.eos_token))
    model = loading.adapted(loading.attend(model, cfg.attention, run.device), cfg, head="score")
    args = RewardConfig(
        output_dir=tempfile.gettempdir(),  # core saves, the trainer writes nothing
        per_device_train_batch_size=cfg.train.batch_size,
        center_rewards_coefficient=cfg.center_rewards_coefficient or None,
        max_length=None,  # what is too long is left out, never cut
        disable_dropout=not cfg.lora_dropout,
        bf16=False,  # core's autocast: --train.precision
        use_cpu=run.device.type == "cpu",
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        accelerator_config={"use_configured_state": True},
    )
    shape = Dataset.from_dict({"chosen_ids": [[1, 2]], "rejected_ids": [[1, 3]]})
    return RewardTrainer(model=model, args=args, train_dataset=shape,
                         processing_class=loading.scoring_tokenizer(path, cfg.chat_template, cfg.eos_token))  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- stage
def reward(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    path = loading.locate(cfg.model)
    tokenizer = loading.scoring_tokenizer(path, cfg.chat_template, cfg.eos_token)
    loading.fits(path, cfg.data.max_length)
    chat = preferences.chat(tokenizer, cfg.data)
    data, seen = read(cfg, chat), metrics.Seen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft and TRL still use names that transformers 5.23 deprecates
        trainer = hosted.built(lambda: make_trainer(cfg, run, path))
    trainer.optimizer = core.make_optimizer(trainer.model, cfg.optim)
    for split in data.values():
        split.collator = trainer.data_collator

    def scores(model: nn.Module, batch: dict) -> Tensor:
        """(reward of the chosen answer, of the rejected one, tokens of the chosen answer, of the rejected one), (B, 4)."""
        rows = gates.rows_of(batch)
        rewards = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], use_cache=False).logits
        tokens = (rows["labels"] != pairs.IGNORED).sum(1)
        return torch.stack([*rewards.float().squeeze(-1).chunk(2), *tokens.chunk(2)], 1)  # of (2B, 1) and (2B,)

    def table(model: nn.Module, data: core.Data) -> Tensor:
        """`scores` of every pair, (N, 4), the short ones first: like lengths together need less padding."""
        sizes = [len(row["chosen"]) + len(row["rejected"]) for row in (data.get(i, None) for i in range(len(data)))]
        short_first = View(data, sorted(range(len(data)), key=sizes.__getitem__))
        return to_double(run.gather(torch.cat([scores(model, batch) for batch in run.batches(short_first)])))

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        found = table(model, data)
        margin, more = found[:, 0] - found[:, 1], found[:, 2] - found[:, 3]
        against = {"shorter": margin[more < 0], "longer": margin[more > 0]}
        means = seen.means({"accuracy": calibration.hits(margin), "nll": -F.logsigmoid(margin), "margin": margin})
        return {
            **means,
            **{f"accuracy/chosen is {k}": preferred(v) for k, v in against.items() if len(v)},
            "ece": calibration.error(margin),
            "chosen": found[:, 0].mean().item(),
            "rejected": found[:, 1].mean().item(),
            "follows_length": calibration.follows(found[:, :2], found[:, 2:]),
        }

    def baselines() -> dict[str, dict[str, float]]:
        rows = data["val"].rows
        longer = preferred(preferences.more_tokens(rows, chat))
        return {
            "the answer that shares more words with its prompt": {
                "accuracy": preferred(preferences.shared_words(rows))
            },
            "the answer with more tokens": {"accuracy": longer},
            "the answer with fewer tokens": {"accuracy": 1 - longer},
            "untrained: every answer is worth the same": {"accuracy": 0.5},
        }

    def preview(batch: dict) -> list[core.Tile]:
        rows = gates.mark_scored(tokenizer, batch)
        pair = zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True)
        return [core.Tile(f"{chosen} rejected: {rejected[rejected.find('[[') :]}") for chosen, rejected in pair]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        found = scores(model, batch)
        rows = zip(found[:, :2].tolist(), *(batch[k] for k in preferences.COLUMNS), strict=True)
        return [core.Tile(f"{prompt}: {a:+.1f} {chosen} | {b:+.1f} {rejected}", score=preferred(torch.tensor([a - b])))
                for (a, b), prompt, chosen, rejected in rows]  # fmt: skip

    def figures(model: nn.Module, data: core.Data) -> dict:
        found = table(model, data)
        rewards, tokens = found.split(2, 1)
        some = View(data, range(min(24, len(data))))
        tiles = [tile for batch in run.batches(some) for tile in predict(model, batch)]
        return {
            "Calibration on held-out pairs": calibration.reliability(rewards[:, 0] - rewards[:, 1]),
            "Rewards over lengths": core.Points(
                tokens.flatten(), rewards.flatten(), axes=("tokens of the answer", "reward"),
                note=f"Rank correlation {calibration.follows(rewards, tokens):+.2f} among preferred answers and among the others: "
                     "how far rewards follow the number of tokens."),
            "Held-out pairs: rewards of chosen | rejected": tiles,
        }  # fmt: skip

    def whole(adapter: Path) -> nn.Module:
        """The model with exported adapters merged into it."""
        return loading.merged_scorer(path, adapter, loading.kept_in(cfg.lora_rank, run.precision), tokenizer)

    def export(folder: Path) -> None:
        """The model with its pad as transformers reads it (or adapters and head as peft does), and the tokenizer with that pad."""
        if cfg.lora_rank and cfg.merge_adapters:
            with tempfile.TemporaryDirectory() as adapter:
                trainer.model.save_pretrained(adapter)
                net = hosted.built(lambda: whole(Path(adapter)))
                net.save_pretrained(folder)
        else:
            trainer.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loading.name_base(folder, path)

    # The head starts at zero, unless --model is a reward model. Adapters start at zero or come from the file of --init-from.
    head = "base_model.model.score." if cfg.lora_rank else "score."
    new = tuple(
        n for n, _ in trainer.model.named_parameters() if n.startswith(head) or ("lora_" in n and not cfg.init_from)
    )
    untrained = not cfg.init_from and not any(
        p.any() for n, p in trainer.model.named_parameters() if n.startswith(head)
    )
    return hosted.host(
        trainer,
        run,
        name="reward",
        data=data,
        evaluate=evaluate,
        intervals=seen.intervals,
        metric=reward_gates.metric(cfg.metric),
        expect=core.Expect(
            initial_loss=reward_gates.first_loss if untrained and not hosted.own_loss(trainer) else None,
            floor_known=not hosted.own_loss(trainer),
            new_parameters=new,
            frozen=("base_model.model.model.", f"{head}original_module.") if cfg.lora_rank else trainer.model.fixed,
            solvable_without_input="both answers are given, and which of them is preferred can be learnt without the prompt",
            overfit_steps=60,
            overfit_longer=cfg.data.path != "docstrings",
            gate_batch_size=2,
        ),
        pretrained=loading.from_file(trainer.model, path),
        gates=[
            splits.held_out(cfg.data),
            preference.lengths(chat),
            preference.sides,
            gates.template(chat, ("chosen", "rejected")),
            reward_gates.place(chat),
            reward_gates.bradley_terry(chat, cfg),
            reward_gates.exported(chat),
        ],
        monitors=[reward_gates.follows_length],
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        model_card=scoring.card(cfg, path, chat),
    )  # fmt: skip


def asker(cfg: Config, export: Path) -> scoring.Scorer:
    """The export, for `trainworthy predict`: rewards of answers."""
    return scoring.scorer(cfg, export)


preferred = calibration.preferred
STAGES = [reward]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """TRL's own loop over core's steps; the gates rehearse this very function."""
    hosted.train(run, stage, eval_every=cfg.train.eval_every)


if __name__ == "__main__":
    core.main(__file__)
