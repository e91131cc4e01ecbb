"""Direct preference optimisation (Rafailov 2023): train a chat model on preferences between two answers, with TRL's DPOTrainer.

tiny  SmolLM2-135M learns which docstring belongs to a function's name; LoRA, two CPU cores, minutes. Constructed preferences.
full  SmolLM2-360M on `--data.path FILE` or `hub:owner/name`; an accelerator. The same code path.

The reference is a frozen copy of the initial weights, made in memory and never loaded again by name. The chat template is applied
once. Only answers and their end tokens count, summed and not averaged. Pairs of equal answers are left out. Margins are evaluated
on held-out pairs, next to the log-probabilities of both answers, which show a collapse.
"""

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from trainworthy.core.adapters import hosted
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.base.doubles import to_double
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.data import formats, pairs, preferences
from trainworthy.recipes.llm.evaluation import metrics
from trainworthy.recipes.llm.evaluation.calibration import hits, preferred
from trainworthy.recipes.llm.gates import chat as gates
from trainworthy.recipes.llm.gates import fresh_export, preference, splits
from trainworthy.recipes.llm.models import loading, speaking
from trainworthy.recipes.shared import hub

from trainworthy import core

EVERY = 0.03  # epochs between evaluations in `tiny`


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(loading.LoRA, core.Config):
    """Settings of llm/dpo."""

    data: preferences.Source = field(default_factory=preferences.Source)
    SEARCH_RANGES = "beta=0.01:1 label_smoothing=0:0.2"
    model: str = "smollm2"
    """`smollm2` (135M, from a package), a folder that `from_pretrained` reads, or `owner/name` on the hub."""
    chat_template: str = ""
    """File with a chat template that replaces the model's own, or `trl:NAME` for one that TRL ships."""
    eos_token: str = ""
    """Token that ends an answer, if it differs from the tokenizer's eos and the template does not show it."""
    lora_rank: int = 8
    """Rank of the LoRA adapters; 0 trains all weights, in fp32, which needs a fiftieth of the rate (--optim.lr 1e-5). Large models:
    about 1e-5 for adapters, 1e-6 for all weights."""
    attention: loading.Attention = "auto"
    """Attention implementation; `auto` is transformers' own choice. The last two need an accelerator."""
    beta: float = 0.1
    """DPO's beta: strength of the penalty for leaving the reference. It scales the difference of log-probabilities to the
    reference."""
    loss: Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
                  "apo_zero", "apo_down", "discopop"] = "sigmoid"  # fmt: skip
    """DPO's own loss, or another one by TRL's name (formulas and sources: recipes/llm/gates/preference.py)."""
    label_smoothing: float = 1e-3
    """Assumed fraction of swapped pairs, for `robust` (usually 0.1) and `exo_pair` (1e-3) only."""
    metric: Literal["accuracy", "likelier", "margin", "loss"] = "accuracy"
    """Metric that selects the best checkpoint. All four are reported."""
    merge_adapters: bool = False
    """Also export the full model with merged adapters."""

    def __post_init__(self):
        self.model = hub.folder(self.model)
        pairs.paced(self, EVERY)


def tiny() -> Config:
    """SmolLM2-135M on two CPU cores: 60 steps of 4 pairs."""
    return Config(
        train=Train(epochs=0.06, batch_size=4, eval_batch_size=16, eval_every=EVERY),
        optim=Optim(lr=5e-4, warmup=0.1, weight_decay=0.0),
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
        train=Train(epochs=1, batch_size=64, accumulate=8, eval_batch_size=16, eval_every=0.1, precision="bf16"),
        optim=Optim(lr=5e-5, warmup=0.1, weight_decay=0.0),
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
        data[name] = preferences.Preferences(kept, chat)
        data[name].notes = {f"left out of {name}": "; ".join(notes)} if notes else {}
    data["train"].notes |= {"rows": "; ".join(bad)} if bad else {}
    data["train"].notes |= preferences.described(data["train"].rows, chat, sizes[0], limit)
    data["train"].notes |= loading.rate_notes(cfg, cfg.optim.lr, usual="1e-6 to 1e-5")
    data["train"].notes |= pairs.passes(cfg.data.path, len(data["train"].rows), cfg.train)
    return data


# ---------------------------------------------------------------------------------------------------------------- model
def make_trainer(cfg: Config, run: core.Run, path: str):
    """TRL's trainer, as its documentation builds it: model, reference, settings, data that core's stream replaces."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    loading.score_what_counts()
    model = loading.load(path, loading.kept_in(cfg.lora_rank, run.precision), dropout=False)
    model = loading.adapted(loading.attend(model, cfg.attention, run.device), cfg, exact=True)
    args = DPOConfig(
        output_dir=tempfile.gettempdir(),  # core saves, the trainer writes nothing
        per_device_train_batch_size=cfg.train.batch_size,
        beta=cfg.beta,
        loss_type=cfg.loss,
        label_smoothing=cfg.label_smoothing,
        max_length=None,  # what is too long is left out, never cut
        bf16=False,  # core's autocast: --train.precision
        use_cpu=run.device.type == "cpu",
        gradient_checkpointing=False,
        router_aux_loss_coef=0.0,  # a mean over a micro-batch: the loss would depend on the cut
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        accelerator_config={"use_configured_state": True},
    )
    shape = Dataset.from_dict({"prompt": ["a:"], "chosen": [" b"], "rejected": [" c"]})
    # TRL keeps a second, frozen set of adapters, named "ref"
    reference = None if cfg.lora_rank else copy.deepcopy(model)
    return DPOTrainer(model=model, ref_model=reference, args=args, train_dataset=shape,
                      processing_class=loading.tokenizer(path, cfg.chat_template, cfg.eos_token))  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- stage
def dpo(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    from trl.trainer.utils import use_adapter

    if cfg.loss in ("robust", "exo_pair") and not 0 < cfg.label_smoothing < 0.5:
        raise core.UserError(
            f"--label-smoothing {cfg.label_smoothing:g}", needed=f"above 0 and below a half, for --loss {cfg.loss}"
        )
    path = loading.locate(cfg.model)
    tokenizer = loading.tokenizer(path, cfg.chat_template, cfg.eos_token)
    loading.fits(path, cfg.data.max_length)
    chat = preferences.chat(tokenizer, cfg.data)
    data = read(cfg, chat)
    seen = metrics.Seen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft and TRL still use names that transformers 5.23 deprecates
        trainer = hosted.built(lambda: make_trainer(cfg, run, path))
    trainer.optimizer = core.make_optimizer(trainer.model, cfg.optim)
    for split in data.values():
        split.collator = trainer.data_collator

    def begin() -> None:
        """The reference is what the policy is when training begins, with `--init-from` too."""
        if cfg.lora_rank:
            own = dict(trainer.model.named_parameters())
            for name, p in own.items():
                if ".ref." in name:
                    p.data.copy_(own[name.replace(".ref.", ".default.")])
        else:
            trainer.ref_model.load_state_dict(trainer.model.state_dict())

    @contextlib.contextmanager
    def reference() -> Iterator[nn.Module]:
        """The frozen model."""
        if trainer.ref_model is not None:
            yield trainer.ref_model
        else:
            with use_adapter(trainer.model, "ref"):
                yield trainer.model

    def log_probs(model: nn.Module, batch: dict) -> tuple[Tensor, Tensor]:
        """(chosen, rejected) log-probability of each answer, the sum over its tokens in nats, (B,) both; plain logits."""
        rows = gates.rows_of(batch)
        logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], use_cache=False).logits
        labels = rows["labels"][:, 1:]
        each = loading.log_probs(logits[:, :-1], labels)
        return tuple((each * (labels != pairs.IGNORED)).sum(1).chunk(2))  # (2B, T - 1) -> (B,), (B,)

    def scores(model: nn.Module, batch: dict) -> Tensor:
        """(margin to the reference, chosen, rejected, chosen of the reference, rejected of the reference, tokens of the chosen
        answer, of the rejected one), (B, 7)."""
        chosen, rejected = log_probs(model, batch)
        with reference() as frozen:
            ref_chosen, ref_rejected = log_probs(frozen, batch)
        margin = (chosen - ref_chosen) - (rejected - ref_rejected)
        tokens = (batch["labels"] != pairs.IGNORED).sum(2).unbind(1)
        return torch.stack([margin, chosen, rejected, ref_chosen, ref_rejected, *tokens], 1)

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        table = to_double(run.gather(torch.cat([scores(model, batch) for batch in run.batches(data)])))  # (N, 7)
        margin, chosen, rejected, ref_chosen, ref_rejected, tokens, _ = table.unbind(1)
        lost = preference.LOSSES[cfg.loss](table[:, 1:3] - table[:, 3:5], table[:, 5:], cfg.beta, cfg.label_smoothing)
        shares = {"accuracy": hits(margin), "likelier": hits(chosen - rejected), "margin": cfg.beta * margin}
        shares = seen.means(shares | {"loss": lost})
        return {
            **shares,
            "chosen": chosen.mean().item(),
            "rejected": rejected.mean().item(),
            "reference/chosen": ref_chosen.mean().item(),
            "reference/rejected": ref_rejected.mean().item(),
            "tokens": tokens.mean().item(),
        }

    def baselines() -> dict[str, dict[str, float]]:
        with reference() as frozen, evaluating(frozen), run.autocast():
            table = run.gather(torch.cat([torch.stack(log_probs(frozen, b), 1) for b in run.batches(data["val"])]))
        rows, likelier = data["val"].rows, preferred(table[:, 0] - table[:, 1])
        return {
            "untrained": {"accuracy": 0.5, "likelier": likelier, "margin": 0.0},  # a policy that equals its reference
            "the likelier answer, before training": {"accuracy": likelier},
            "the answer that shares more words with its prompt": {
                "accuracy": preferred(preferences.shared_words(rows))
            },
            "the longer answer": {"accuracy": preferred(preferences.longer(rows))},
        }

    def preview(batch: dict) -> list[core.Tile]:
        rows = gates.mark_scored(tokenizer, batch)
        pair = zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True)
        return [core.Tile(f"{chosen} rejected: {rejected[rejected.find('[[') :]}") for chosen, rejected in pair]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        rows = zip(scores(model, batch)[:, 0].tolist(), *(batch[k] for k in preferences.COLUMNS), strict=True)
        return [core.Tile(f"{m:+.1f} {prompt}: {chosen} | {rejected}", score=preferred(torch.tensor([m])))
                for m, prompt, chosen, rejected in rows]  # fmt: skip

    def figures(model: nn.Module, data: core.Data) -> dict:
        some = View(data, range(min(24, len(data))))
        tiles = [tile for batch in run.batches(some) for tile in predict(model, batch)]
        return {"Held-out pairs: margin in nats, chosen | rejected": tiles}

    def export(folder: Path) -> None:
        """The adapter (or the model) as `from_pretrained` of peft (or transformers) reads it, and the tokenizer."""
        loading.ends_with(trainer.model, chat.ends)
        loading.export(trainer.model, tokenizer, folder)
        if cfg.lora_rank and cfg.merge_adapters:
            whole = loading.merged(path, folder)
            loading.ends_with(whole, chat.ends)
            loading.export(whole, tokenizer, folder / "merged")
        longest = max(max(pairs.answer_tokens(data["val"].rows, chat, k)) for k in ("chosen", "rejected"))
        loading.complete_export(folder, path, ends=chat.ends, pad=tokenizer.pad_token_id, most=longest)

    # Adapters start at zero or come from the file of --init-from. No file holds the reference's.
    new = tuple(n for n, _ in trainer.model.named_parameters() if ".ref." in n or ("lora_" in n and not cfg.init_from))
    return hosted.host(
        trainer,
        run,
        name="dpo",
        data=data,
        frozen_modules={} if cfg.lora_rank else {"reference": trainer.ref_model},
        shard_frozen=() if cfg.lora_rank else ("reference",),
        on_start=begin,
        evaluate=evaluate,
        intervals=seen.intervals,
        metric=preference.metric(cfg),
        probe=preference.probe(cfg, evaluate),
        expect=core.Expect(
            initial_loss=preference.untrained(trainer, cfg),
            loss_floor=preference.floor(trainer, cfg),
            floor_known=preference.known_floor(trainer),
            new_parameters=new,
            frozen=loading.frozen(trainer.model, cfg),
            solvable_without_input="both answers are given, and which of them is preferred can be learnt without the prompt",
            range_test="how far the policy is from its reference decides, not one batch",
            overfit_steps=60,
            overfit_longer=cfg.data.path != "docstrings",
            gate_batch_size=2,
        ),
        pretrained=loading.from_file(trainer.model, path),
        gates=[splits.held_out(cfg.data), *gates.of_answers(chat, ("chosen", "rejected")), preference.lengths(chat),
               preference.sides, preference.preference(chat, cfg),
               fresh_export.exported(path, tokenizer, prompts=fresh_export.of_rows(chat))],
        monitors=[preference.likelihood, preference.moved_reference],
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        model_card=loading.model_card(path, cfg.lora_rank, cfg.data.path, system=chat.system, arguments=chat.form.arguments, lead=chat.form.lead),
    )  # fmt: skip


def speaker(cfg: Config, export: Path) -> speaking.Speaker:
    """The export, for `trainworthy predict` and `trainworthy chat`."""
    return speaking.chatting(cfg, export, formats.system(cfg.data.system, cfg.data.path, preferences.SYSTEM))


STAGES = [dpo]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """TRL's own loop over core's steps; the gates rehearse this very function."""
    hosted.train(run, stage, eval_every=cfg.train.eval_every)


if __name__ == "__main__":
    core.main(__file__)
