"""Supervised fine-tuning of a chat model on prompts and completions, with TRL's SFTTrainer behind the gates.

tiny  SmolLM2-135M learns to name Python functions from the first sentence of their docstring; LoRA, two CPU cores, minutes.
full  SmolLM2-360M on `--data.path FILE` or `hub:owner/name`; an accelerator. The same code path.

What this recipe gets right without being asked: the chat template is applied once, by the tokenizer itself; only the completion and
the token that ends its turn are scored, though that token is also the pad (in a conversation, those of every turn); batches are
padded right for training and left for generation, or packed without padding, each pair on its own; what is too long is left out
and counted, never cut, and so is what validation asks about; the number that counts is taken from generated text, beside the
untrained model and its 4-shot prompt.
"""

import contextlib
import re
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.adapters import hosted
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.data.loader import to_device
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.data import pairs
from trainworthy.recipes.llm.gates import chat as gates
from trainworthy.recipes.llm.models import loading, quantized

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of llm/sft."""

    data: pairs.Source = field(default_factory=pairs.Source)
    model: str = "smollm2"
    """`smollm2` (135M, from a package), a folder that `from_pretrained` reads, or `owner/name` on the hub."""
    lora_rank: int = 8
    """Rank of the adapters (alpha is twice that); 0 trains every weight, in fp32."""
    load_in_4bit: bool = False
    """QLoRA (Dettmers 2023): the frozen weights under the adapters in four bits (NF4), for an accelerator's memory."""
    max_new_tokens: int = 10
    """Longest answer when generating; what has not ended by then has not stopped by itself."""
    packing: bool = False
    """Train on the pairs of a micro-batch one behind the other, without padding; each sees itself alone."""
    neftune_noise_alpha: float = 0.0
    """Noise on the embeddings while training (NEFTune, Jain 2023: 5 to 15); 0: none."""
    merge_adapters: bool = False
    """Also export the whole model with the adapters merged into it."""


def tiny() -> Config:
    """SmolLM2-135M on two CPU cores: 120 steps of 8 docstrings."""
    return Config(
        train=Train(epochs=0.2, batch_size=8, eval_batch_size=32),
        optim=Optim(lr=1e-3, warmup=0.05, weight_decay=0.0),
        run=RunSettings(save_every=0.05),
    )


def full() -> Config:
    """Fine-tune a larger model on pairs of your own."""
    return Config(
        data=pairs.Source(path="hub:trl-lib/tldr", system="", max_length=1024, max_bad=0.05),
        model="HuggingFaceTB/SmolLM2-360M-Instruct",
        lora_rank=16,
        max_new_tokens=128,
        train=Train(epochs=1, batch_size=64, accumulate=4, eval_every=0.25, precision="bf16"),
        optim=Optim(lr=2e-4, warmup=0.03, weight_decay=0.0),
        run=RunSettings(save_every=0.1),
    )


# ----------------------------------------------------------------------------------------------------------------- data
def read(cfg: Config, chat: pairs.Chat) -> dict[str, pairs.Pairs]:
    """Both splits, without what is too long."""
    data, (*splits, told) = {}, pairs.read(cfg.data, chat)
    for name, rows in zip(("train", "val"), splits, strict=True):
        kept, long = pairs.short_enough(rows, chat, cfg.data, name)
        data[name] = pairs.Pairs(kept, chat)
        data[name].notes = {f"too long in {name}": long} if long else {}
    data["train"].notes |= {"data sets": "; ".join(told)} if told else {}
    return data


# ---------------------------------------------------------------------------------------------------------------- model
def make_trainer(cfg: Config, run: core.Run, path: str):
    """TRL's trainer, as its documentation builds it: model, settings, data that are tokenised already."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    # Frozen weights may be bf16; of trained ones small updates would be lost.
    dtype = torch.float32 if run.precision == "fp32" or not cfg.lora_rank else torch.bfloat16
    loading.score_what_counts()
    model = quantized.load(path, dtype, run.device) if cfg.load_in_4bit else loading.load(path, dtype)
    model = loading.adapted(model, cfg.lora_rank)
    args = SFTConfig(
        output_dir=tempfile.gettempdir(),  # core saves, the trainer writes nothing
        per_device_train_batch_size=cfg.train.batch_size,
        bf16=False,  # core's autocast: --train.precision
        use_cpu=run.device.type == "cpu",
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        padding_free=cfg.packing,
        max_length=None,  # what is too long is left out, never cut
        neftune_noise_alpha=cfg.neftune_noise_alpha or None,
        accelerator_config={"use_configured_state": True},
    )
    shape = Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})  # core's stream brings the samples
    return SFTTrainer(model=model, args=args, train_dataset=shape, processing_class=loading.tokenizer(path))


# ---------------------------------------------------------------------------------------------------------------- stage
def sft(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    if cfg.load_in_4bit and not cfg.lora_rank:
        raise core.UserError("--load-in-4bit --lora-rank 0: weights in four bits have no gradient", needed="adapters on top of them",
                             next="--lora-rank 8, or --no-load-in-4bit")  # fmt: skip
    path = loading.locate(cfg.model)
    tokenizer = loading.tokenizer(path)
    loading.fits(path, cfg.data.max_length)
    chat = pairs.chat(tokenizer, cfg.data)
    data = read(cfg, chat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft and TRL still use names that transformers 5.23 deprecates
        trainer = make_trainer(cfg, run, path)
    for p in filter(lambda p: p.requires_grad, trainer.model.parameters()):
        p.data = p.data.float()  # TRL makes adapters on four bits bf16: updates would be lost
    trainer.optimizer = core.make_optimizer(trainer.model, cfg.optim)
    for split in data.values():
        split.collator = trainer.data_collator
    shots = [] if chat.conversations else chat.shots(data["train"].rows, 4)
    if shots and len(chat.ask(shots)) + cfg.data.max_length > loading.context(path):
        shots = []  # a short context has no room for examples

    def generate(model: nn.Module, prompts: list[str], before: list[dict] = ()) -> list[tuple[str, bool]]:
        """(answer, did it stop by itself?) to each prompt, greedily; padded left: every prompt ends where its answer begins."""
        asked = [chat.ask(chat.turns(p, before), p) for p in prompts]
        width = max(map(len, asked))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(a)) + a for a in asked], device=run.device)
        mask = torch.tensor([[0] * (width - len(a)) + [1] * len(a) for a in asked], device=run.device)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=cfg.max_new_tokens, do_sample=False,
                             eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)  # fmt: skip
        out = out[:, width:].tolist()
        ends = [row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else None for row in out]
        return [(tokenizer.decode(row[:end]).strip(), end is not None) for row, end in zip(out, ends, strict=True)]

    def nll(model: nn.Module, batch: dict, before: list[dict] = ()) -> tuple[Tensor, Tensor]:
        """(negative log-likelihood of each completion in nats, its scored tokens), (B,) both; plain logits, no fused head."""
        batch = to_device(pairs.behind(before, batch, chat), run.device) if before else batch
        labels = batch["labels"]
        first = int((labels != pairs.IGNORED).any(0).nonzero()[0])  # what stands before is scored in no row
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False,
                       logits_to_keep=labels.shape[1] - first + 1).logits[:, :-1]  # fmt: skip
        labels = labels[:, first:]
        each = F.cross_entropy(
            logits.float().transpose(1, 2), labels, ignore_index=pairs.IGNORED, reduction="none"
        )  # (B, T - first)
        return each.sum(1), (labels != pairs.IGNORED).sum(1)

    def scores(model: nn.Module, data: core.Data, before: list[dict] = ()) -> dict[str, float]:
        rows = []
        for batch in run.batches(data):
            answers = generate(model, batch["prompt"], before)
            said = zip(answers, batch["completion"], strict=True)
            told = torch.tensor([[stopped, token_f1(text, wanted), text == wanted] for (text, stopped), wanted in said])
            rows.append(torch.cat([told.double(), *(x[:, None].double().cpu() for x in nll(model, batch, before))], 1))
        table = run.gather(torch.cat(rows).to(run.device, torch.float32)).double()  # (N, 5)
        stops, f1, exact = table[:, :3].mean(0).tolist()
        return {
            "f1": f1,
            "perplexity": (table[:, 3].sum() / table[:, 4].sum()).exp().item(),
            "stops": stops,
            "exact": exact,
        }

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        return scores(model, data)

    def baselines() -> dict[str, dict[str, float]]:
        untrained = trainer.model if cfg.lora_rank else loading.load(path, torch.bfloat16).to(run.device)
        off = untrained.disable_adapter() if cfg.lora_rank else contextlib.nullcontext()
        asked = {"untrained": [], "untrained, 4-shot prompt": shots} if shots else {"untrained": []}
        with off, evaluating(untrained), run.autocast():
            return {name: scores(untrained, data["val"], before) for name, before in asked.items()}

    def preview(batch: dict) -> list[core.Tile]:
        return [core.Tile(text) for text in gates.shown(tokenizer, batch)]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        answers = generate(model, batch["prompt"])
        return [core.Tile(f"{chat.shown(p)} -> {text}{'' if stopped else ' ...'} ({wanted})", good=token_f1(text, wanted))
                for (text, stopped), p, wanted in zip(answers, batch["prompt"], batch["completion"], strict=True)]  # fmt: skip

    def figures(model: nn.Module, data: core.Data) -> dict:
        some = View(data, range(min(24, len(data))))
        return {"Answers to held-out prompts": [tile for batch in run.batches(some) for tile in predict(model, batch)]}

    def export(folder: Path) -> None:
        """The adapter (or the model) as `from_pretrained` of peft (or transformers) reads it, and the tokenizer."""
        trainer.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if cfg.lora_rank and cfg.merge_adapters:
            base = quantized.whole(path, trainer.model) if cfg.load_in_4bit else None
            loading.merged(path, folder, base=base).save_pretrained(folder / "merged")
            tokenizer.save_pretrained(folder / "merged")

    question = f"which words are in {'the name of the function' if cfg.data.path == 'docstrings' else 'the answer'}?"
    # With --init-from adapters stand in its file; else they begin at nothing.
    new = tuple(n for n, _ in trainer.model.named_parameters() if "lora_" in n and not cfg.init_from)
    return hosted.host(
        trainer,
        run,
        name="sft",
        data=data,
        evaluate=evaluate,
        metric=core.Metric("f1", question, floor=0.0, ceiling=1.0),
        expect=core.Expect(new_parameters=new, frozen=("base_model.",) if cfg.lora_rank else (), overfit_steps=40, gate_batch_size=2),
        pretrained=loading.from_file(trainer.model, path),
        gates=[*[quantized.four_bit] * cfg.load_in_4bit,
               *gates.of(chat, packed=cfg.packing, exports_whole=bool(cfg.lora_rank and cfg.merge_adapters))],
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
    )  # fmt: skip


def token_f1(said: str, wanted: str) -> float:
    """F1 over words; a name's words are what underscores, capitals and digits set apart (SQuAD's F1, Rajpurkar 2016)."""
    a, b = (Counter(w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", text)) for text in (said, wanted))
    shared = (a & b).total()
    return 2 * shared / (a.total() + b.total()) if shared else float(said == wanted)


STAGES = [sft]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """TRL's own loop over core's steps; the gates rehearse this very function."""

    def after(step: core.Step) -> None:
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)

    hosted.train(run, stage, after)


if __name__ == "__main__":
    core.main(__file__)
