"""Supervised fine-tuning of a chat model on prompts and completions, with TRL's SFTTrainer behind the gates.

tiny  SmolLM2-135M learns to name Python functions from the first sentence of their docstring; LoRA, two CPU cores, minutes.
full  SmolLM2-360M on `--data.path FILE` or `hub:owner/name`; an accelerator. The same code path.

The tokenizer applies the chat template once. Only the completion and the token that ends its turn are scored, even if that token
is also the pad (in a conversation: those of every turn). Batches are padded right for training and left for generation, or packed
without padding and without attention between pairs. Samples that are too long, or that validation contains, are left out and
counted, never cut. The metric is computed on generated text, next to the untrained model and its 4-shot prompt.
"""

import contextlib
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.adapters import hosted
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.base.doubles import to_double
from trainworthy.core.data.loader import to_device
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.data import formats, pairs
from trainworthy.recipes.llm.evaluation import metrics
from trainworthy.recipes.llm.gates import chat as gates
from trainworthy.recipes.llm.gates import objective
from trainworthy.recipes.llm.models import loading, quantized, speaking
from trainworthy.recipes.shared import hub

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(loading.LoRA, core.Config):
    """Settings of llm/sft."""

    data: pairs.Source = field(default_factory=pairs.Source)
    SEARCH_RANGES = "neftune_noise_alpha=0:15"
    model: str = "smollm2"
    """`smollm2` (135M, from a package), a folder that `from_pretrained` reads, or `owner/name` on the hub."""
    chat_template: str = ""
    """File with a chat template that replaces the model's own, or `trl:NAME` for one that TRL ships."""
    eos_token: str = ""
    """Token that ends an answer, if it differs from the tokenizer's eos and the template does not show it."""
    attention: loading.Attention = "auto"
    """Attention implementation; `auto` is transformers' own choice. The last two need an accelerator."""
    load_in_4bit: bool = False
    """QLoRA (Dettmers 2023): the frozen base model in 4 bits (NF4), which saves accelerator memory."""
    max_new_tokens: int = 0
    """Maximum number of generated tokens; an answer without an end token by then counts as unfinished. 0: the length of the
    longest answer of the data."""
    metric: str = "f1"
    """Metrics of generated answers, separated by commas; the first selects the best checkpoint: exact, f1, rouge1, rouge2, rouge
    (ROUGE-L), bleu, chrf, perplexity, or your own `module:function`, called with the generated and the wanted text (1 is best).
    With perplexity first, no answers are generated until the run ends."""
    packing: bool = False
    """Concatenate the pairs of a micro-batch without padding; each pair attends only to itself."""
    neftune_noise_alpha: float = 0.0
    """Noise on the embeddings in training (NEFTune, Jain 2023: 5 to 15); 0: none."""
    merge_adapters: bool = False
    """Also export the full model with merged adapters."""

    def __post_init__(self):
        self.model = hub.folder(self.model)


def tiny() -> Config:
    """SmolLM2-135M on two CPU cores: 120 steps of 8 docstrings."""
    return Config(
        train=Train(epochs=0.2, batch_size=8, eval_batch_size=32),
        optim=Optim(lr=1e-3, warmup=0.05, weight_decay=0.0),
        run=RunSettings(save_every=0.05),
    )


def full() -> Config:
    """Fine-tune a larger model on your own pairs."""
    return Config(
        data=pairs.Source(path="hub:trl-lib/tldr", system="", max_length=1024, max_bad=0.05),
        model="HuggingFaceTB/SmolLM2-360M-Instruct",
        lora_rank=16,
        max_new_tokens=128,
        train=Train(epochs=1, batch_size=64, accumulate=4, eval_batch_size=16, eval_every=0.25, precision="bf16"),
        optim=Optim(lr=2e-4, warmup=0.03, weight_decay=0.0),
        run=RunSettings(save_every=0.1),
    )


# ----------------------------------------------------------------------------------------------------------------- data
def read(cfg: Config, chat: pairs.Chat) -> dict[str, pairs.Pairs]:
    """All splits, without what is too long."""
    data, (*splits, notes) = {}, pairs.read(cfg.data, chat)
    sizes = [pairs.lengths(tuple((r["prompt"], r["completion"]) for r in rows), chat) for rows in splits[:2]]
    limit = pairs.limit(cfg.data, sizes, loading.context(loading.locate(cfg.model)))
    for name, rows in zip(("train", "val", "test"), splits, strict=True):
        if not rows and name == "test":
            continue
        kept, long = pairs.short_enough(rows, chat, cfg.data, name, limit)
        data[name] = pairs.Pairs(kept, chat)
        data[name].limit = limit
        data[name].notes = {f"too long in {name}": long} if long else {}
    data["train"].notes |= {"rows": ";\n       ".join(notes)} if notes else {}
    data["train"].notes |= pairs.described(data["train"].rows, chat, sizes[0], limit)
    data["train"].notes |= loading.rate_notes(cfg, cfg.optim.lr)
    data["train"].notes |= pairs.passes(cfg.data.path, len(data["train"].rows), cfg.train)
    return data


def new_tokens(cfg: Config, data: dict[str, pairs.Pairs], chat: pairs.Chat) -> int:
    """Most tokens of a generated answer: by default the length of the longest answer (at most four times the length that 99% of
    them have). Held-out answers that are longer are counted, because they cannot be generated completely."""
    val, sizes = data["val"], pairs.answer_tokens(data["val"].rows, chat)
    every = sorted(sizes + pairs.answer_tokens(data["train"].rows, chat))
    most = cfg.max_new_tokens or max(*sizes, min(every[-1], 4 * every[int(0.99 * (len(every) - 1))]))
    if longer := sum(n > most for n in sizes):
        val.notes["cut by --max-new-tokens"] = (
            f"{longer} of {len(sizes)} held-out answers are longer than {most} tokens (the longest: {max(sizes)}): they can never "
            f"be given whole; --max-new-tokens {max(sizes)}"
        )
    return most


# ---------------------------------------------------------------------------------------------------------------- model
def make_trainer(cfg: Config, run: core.Run, path: str):
    """TRL's trainer, as its documentation builds it: model, settings, data that are tokenised already."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    dtype = loading.kept_in(cfg.lora_rank, run.precision)
    loading.score_what_counts()
    model = quantized.load(path, dtype, run.device) if cfg.load_in_4bit else loading.load(path, dtype)
    model = loading.adapted(loading.attend(model, cfg.attention, run.device), cfg)
    args = SFTConfig(
        output_dir=tempfile.gettempdir(),  # core saves, the trainer writes nothing
        per_device_train_batch_size=cfg.train.batch_size,
        bf16=False,  # core's autocast: --train.precision
        use_cpu=run.device.type == "cpu",
        gradient_checkpointing=False,
        router_aux_loss_coef=0.0,  # a mean over a micro-batch: the loss would depend on the cut
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
    tokenizer = loading.tokenizer(path, cfg.chat_template, cfg.eos_token)
    return SFTTrainer(model=model, args=args, train_dataset=shape, processing_class=tokenizer)


# ---------------------------------------------------------------------------------------------------------------- stage
def sft(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    if cfg.load_in_4bit and not cfg.lora_rank:
        raise core.UserError("--load-in-4bit --lora-rank 0: weights in four bits have no gradient", needed="adapters on top of them",
                             next="--lora-rank 8, or --no-load-in-4bit")  # fmt: skip
    path = loading.locate(cfg.model)
    tokenizer = loading.tokenizer(path, cfg.chat_template, cfg.eos_token)
    loading.fits(path, cfg.data.max_length)
    chat = pairs.chat(tokenizer, cfg.data)
    names, seen = metrics.named(cfg.metric), metrics.Seen()
    scored_by = list(dict.fromkeys(["f1", "exact", *(k for k in names if k != "perplexity")]))
    data = read(cfg, chat)
    longest = new_tokens(cfg, data, chat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft and TRL still use names that transformers 5.23 deprecates
        trainer = make_trainer(cfg, run, path)
    for p in filter(lambda p: p.requires_grad, trainer.model.parameters()):
        p.data = p.data.float()  # TRL makes adapters on four bits bf16: updates would be lost
    trainer.optimizer = core.make_optimizer(trainer.model, cfg.optim)
    for split in data.values():
        split.collator = trainer.data_collator
    shots = [] if chat.conversations else chat.shots(data["train"].rows, 4)
    if shots and len(chat.ask(shots)) + data["train"].limit > loading.context(path):
        shots = []  # a short context has no room for examples

    def generate(model: nn.Module, prompts: list[str], before: list[dict] = ()) -> list[tuple[str, bool]]:
        """(answer, did it stop by itself?) to each prompt, greedily; padded left: every prompt ends where its answer begins."""
        inputs = [chat.ask(chat.turns(p, before), p) for p in prompts]
        found = loading.generate(model, inputs, pad=tokenizer.pad_token_id, ends=chat.ends, most=longest)
        return [(chat.reply(tokenizer.decode(ids)), ended) for ids, ended in found]

    def nll(model: nn.Module, batch: dict, before: list[dict] = ()) -> tuple[Tensor, Tensor]:
        """(negative log-likelihood of each completion in nats, its scored tokens), (B,) both; plain logits, no fused head."""
        batch = to_device(pairs.behind(before, batch, chat), run.device) if before else batch
        labels = batch["labels"]
        first = int((labels != pairs.IGNORED).any(0).nonzero()[0])  # no row has a scored token before it
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False,
                       logits_to_keep=labels.shape[1] - first + 1).logits[:, :-1]  # fmt: skip
        labels = labels[:, first:]
        # Row by row: in fp32 the whole vocabulary at every place of a batch may take more memory than the model.
        each = [
            F.cross_entropy(a.float(), b, ignore_index=pairs.IGNORED, reduction="sum")
            for a, b in zip(logits, labels, strict=True)
        ]
        return torch.stack(each), (labels != pairs.IGNORED).sum(1)

    def scores(model: nn.Module, data: core.Data, before: list[dict] = (), *, answers: bool = True) -> dict[str, float]:
        """Scores of generated and of wanted answers; without `answers`, of the wanted ones alone."""
        rows = []
        for batch in run.batches(data):
            each = [to_double(x[:, None]) for x in nll(model, batch, before)]
            if answers:
                both = zip(generate(model, batch["prompt"], before), map(chat.reply, batch["completion"]), strict=True)
                scored = [
                    [*(metrics.score(k)(text, wanted) for k in scored_by), stopped] for (text, stopped), wanted in both
                ]
                each.append(torch.tensor(scored, dtype=torch.float64))
            rows.append(torch.cat(each, 1))
        table = to_double(run.gather(torch.cat(rows).to(run.device, torch.float32)))  # (N, 3 + metrics), or (N, 2)
        nats, tokens, *values = table.unbind(1)
        found = {metrics.key(k): v for k, v in zip([*scored_by, "stops"] if answers else [], values, strict=True)}
        return seen.means({**({"f1": found.pop("f1")} if answers else {}), "perplexity": (nats, tokens),
                           **({"stops": found.pop("stops")} if answers else {}), **found})  # fmt: skip

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        return scores(model, data)

    def evaluate_loss(model: nn.Module, data: core.Data) -> dict[str, float]:
        return scores(model, data, answers=False)

    def baselines() -> dict[str, dict[str, float]]:
        untrained = trainer.model if cfg.lora_rank else loading.load(path, torch.bfloat16).to(run.device)
        off = untrained.disable_adapter() if cfg.lora_rank else contextlib.nullcontext()
        shots_of = {"untrained": [], "untrained, 4-shot prompt": shots} if shots else {"untrained": []}
        with off, evaluating(untrained), run.autocast():
            return {name: scores(untrained, data["val"], before) for name, before in shots_of.items()}

    def preview(batch: dict) -> list[core.Tile]:
        return [core.Tile(text) for text in gates.mark_scored(tokenizer, batch)]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        answers, due = generate(model, batch["prompt"]), map(chat.reply, batch["completion"])
        return [core.Tile(f"{chat.last_text(p)} -> {text}{'' if stopped else ' ...'} ({wanted})", score=metrics.f1(text, wanted))
                for (text, stopped), p, wanted in zip(answers, batch["prompt"], due, strict=True)]  # fmt: skip

    def figures(model: nn.Module, data: core.Data) -> dict:
        some = View(data, range(min(24, len(data))))
        return {"Answers to held-out prompts": [tile for batch in run.batches(some) for tile in predict(model, batch)]}

    def export(folder: Path) -> None:
        """The adapter (or the model) as `from_pretrained` of peft (or transformers) reads it, and the tokenizer."""
        loading.ends_with(trainer.model, chat.ends)
        loading.export(trainer.model, tokenizer, folder)
        if cfg.lora_rank and cfg.merge_adapters:
            base = quantized.whole(path, trainer.model) if cfg.load_in_4bit else None
            whole = loading.merged(path, folder, base=base)
            loading.ends_with(whole, chat.ends)
            loading.export(whole, tokenizer, folder / "merged")
        loading.complete_export(folder, path, ends=chat.ends, pad=tokenizer.pad_token_id, most=longest)

    untrained = None if cfg.lora_rank else lambda: loading.load(path, torch.float32)
    question = f"which words are in {'the name of the function' if cfg.data.path == 'docstrings' else 'the answer'}?"
    new = tuple(n for n, _ in trainer.model.named_parameters() if "lora_" in n and not cfg.init_from)
    return hosted.host(
        trainer,
        run,
        name="sft",
        data=data,
        evaluate=evaluate,
        evaluate_while_training=evaluate_loss if names[0] == "perplexity" else None,
        intervals=seen.intervals,
        metric=metrics.metric(names[0], question, len(tokenizer)),
        expect=core.Expect(new_parameters=new, frozen=loading.frozen(trainer.model, cfg), overfit_steps=40, gate_batch_size=2,
                           overfit_longer=cfg.data.path != "docstrings", loss_floor=objective.floor(trainer),
                           floor_known=not hosted.own_loss(trainer)),
        pretrained=loading.from_file(trainer.model, path),
        gates=[*[quantized.four_bit] * cfg.load_in_4bit, *gates.of(chat, packed=cfg.packing), objective.objective(chat),
               *(objective.exported(chat, name, load, untrained) for name, load in exports(cfg, path).items())],
        monitors=[objective.ended(longest)],
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        model_card=loading.model_card(path, cfg.lora_rank, cfg.data.path, system=chat.system, arguments=chat.form.arguments, lead=chat.form.lead),
    )  # fmt: skip


def speaker(cfg: Config, export: Path) -> speaking.Speaker:
    """The export, for `trainworthy predict` and `trainworthy chat`."""
    return speaking.chatting(cfg, export, formats.system(cfg.data.system, cfg.data.path, pairs.SYSTEM))


def exports(cfg: Config, path: str) -> objective.Loaders:
    """How a user loads what `export` writes. An adapter on four bits answers like training on that machine's kernels alone; its
    merged copy is compared."""
    from transformers import AutoModelForCausalLM

    def whole(folder: Path) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def adapter(folder: Path) -> nn.Module:
        from peft import PeftModel

        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), folder)

    found = {} if cfg.load_in_4bit else {"exported": adapter if cfg.lora_rank else whole}
    return found | ({"merged": lambda folder: whole(folder / "merged")} if cfg.lora_rank and cfg.merge_adapters else {})


STAGES = [sft]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """TRL's own loop over core's steps; the gates rehearse this very function."""
    hosted.train(run, stage, eval_every=cfg.train.eval_every)


if __name__ == "__main__":
    core.main(__file__)
