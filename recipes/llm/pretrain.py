"""Pretrain a language model on documents: a small Llama from scratch on real prose, or any architecture on your own texts.

tiny  the manual and the docstrings of the running Python (1.8 MB), four layers, two CPU cores, minutes. 501 documents are for
      validation, 418 for the test, of other sections and modules.
full  a Llama of 100 M parameters on `--data.path FOLDER`, a table or `hub:owner/name`; an accelerator. The same code path.

Documents are packed into rows by best fit. Each starts at position 0 and attends only to itself, on every attention backend. Every token
except a document's first is predicted once, including the end token. The loss is a mean over tokens, not over rows. The output layer starts
at the token frequencies. The z-loss is logged separately, with log Z. The result is bits per byte of held-out documents, next to n-grams and xz.
"""

import math
import time
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.base.doubles import to_double
from trainworthy.core.loop.init_from import match, read_weights
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.data import documents, streaming
from trainworthy.recipes.llm.data.packing import IGNORED, Packed
from trainworthy.recipes.llm.evaluation import ngrams, positions
from trainworthy.recipes.llm.gates import pretrain as pretrain_gates
from trainworthy.recipes.llm.models import loading, speaking
from trainworthy.recipes.shared import hub

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of llm/pretrain."""

    data: documents.Source = field(default_factory=documents.Source)
    SEARCH_RANGES = "z_loss=1e-5:1e-2"
    model: str = "llama"
    """`llama` with the sizes below, or a folder or `owner/name` whose config.json describes any causal language model."""
    hidden_size: int = 128
    """Size of the residual stream; the feed-forward layers are three times as wide."""
    num_hidden_layers: int = 4
    """Transformer blocks."""
    num_attention_heads: int = 4
    """Attention heads; hidden_size divided by this must be even (rotary positions)."""
    qk_norm: bool = False
    """Normalise queries and keys (Henry 2020), so that attention does not saturate. The net is Qwen3's: a Llama with this
    change."""
    attention: Literal["sdpa", "eager", "flex_attention", "flash_attention_2"] = "sdpa"
    """Attention implementation; the last two need an accelerator. The gate `isolation` checks each one for attention across
    documents."""
    rope: Literal["default", "linear", "dynamic", "yarn"] = "default"
    """Scaling of rotary positions beyond `original_context`: linear interpolation (Chen 2023), a base that grows with the length
    (dynamic NTK), or per frequency (YaRN, Peng 2023). `--init-from` gives the model to extend."""
    original_context: int = 0
    """Context length that the model of `--init-from` was trained with; longer positions are evaluated separately. 0: no
    extension."""
    z_loss: float = 1e-4
    """Coefficient of log^2 Z (PaLM, Chowdhery 2022), against a drift of the logits, to which softmax is invariant; 0: none."""


def tiny() -> Config:
    """Four layers on two CPU cores: three passes over the texts in rows of 128 tokens."""
    return Config(
        train=Train(epochs=3, batch_size=8, eval_batch_size=32),
        optim=Optim(lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95), warmup=0.05),
        run=RunSettings(threads=1, save_every=0.5),
    )


def small() -> Config:
    """`full` with a third of its parameters, for one GPU of 24 GB: planned as half an hour, not trained yet."""
    cfg = full()
    cfg.data.vocabulary, cfg.data.context, cfg.data.stride = 8192, 512, 256
    cfg.hidden_size, cfg.num_hidden_layers, cfg.num_attention_heads = 512, 8, 8
    return cfg


def full() -> Config:
    """A Llama of about 100 M parameters on stories from the hub; warmup, stable rate, decay, so that training can continue."""
    return Config(
        data=documents.Source(path="hub:roneneldan/TinyStories", vocabulary=16384, context=1024, stride=512),
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
        train=Train(epochs=1, batch_size=256, accumulate=8, eval_batch_size=32, eval_every=0.1, precision="bf16", compile=True),
        optim=Optim(lr=6e-4, weight_decay=0.1, betas=(0.9, 0.95), warmup=0.02, schedule="wsd"),
        run=RunSettings(save_every=0.05),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- data
def read(cfg: Config) -> tuple[documents.Corpus, dict[str, Packed]]:
    """The corpus and its packed splits. Training reads each token once; evaluation overlaps windows, so most tokens have context before them."""
    corpus = documents.read(cfg.data, streaming.sample if cfg.data.streaming else None)
    corpus = documents.with_test(corpus, cfg.data)
    how = {"context": cfg.data.context, "packing": cfg.data.packing, "tokenizer": corpus.tokenizer, "sizes": corpus.sizes}  # fmt: skip
    train_data = streaming.rows(corpus, cfg.data, **how)
    val_data = Packed(corpus.val, stride=cfg.data.stride, **how)
    train_data.notes |= corpus.notes
    data = {"train": train_data, "val": val_data}
    if corpus.test:
        data["test"] = Packed(corpus.test, stride=cfg.data.stride, **how)
    return corpus, data


# ---------------------------------------------------------------------------------------------------------------- model
def make_model(cfg: Config, tokenizer, log_p: Tensor) -> nn.Module:
    """A causal language model of transformers, untrained; (V,) log-frequencies are what a Llama of ours begins with."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    ids = {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
           "pad_token_id": tokenizer.pad_token_id}  # fmt: skip
    if cfg.model != "llama":
        if cfg.qk_norm:
            raise core.UserError("--qk-norm is of the net that is made here", got=f"--model {cfg.model}",
                                 needed="--model llama, or a config.json that contains it")  # fmt: skip
        where = hub.locate(cfg.model, "--model", packaged="llama", needs=("config.json",), weights=False)
        config = loading.fitted(hub.configuration(where, **ids), cfg)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if cfg.hidden_size % (2 * cfg.num_attention_heads):
        raise core.UserError(
            "--hidden-size does not fit --num-attention-heads", got=f"{cfg.hidden_size} over {cfg.num_attention_heads}",
            needed="an even number of channels for each head")  # fmt: skip
    heads = cfg.num_attention_heads
    sizes = {"hidden_size": cfg.hidden_size, "intermediate_size": 3 * cfg.hidden_size, "num_hidden_layers": cfg.num_hidden_layers,
             "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": cfg.hidden_size // heads,
             "max_position_embeddings": cfg.data.context}  # fmt: skip
    config = (Qwen3Config if cfg.qk_norm else LlamaConfig)(**sizes, **ids)
    if cfg.rope != "default":
        loading.extend(config, cfg.rope, cfg.original_context)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    start_at_frequencies(model, log_p)
    return model


@torch.no_grad()
def start_at_frequencies(model: nn.Module, log_p: Tensor) -> None:
    """Make the untrained model return `log_p` (V,) for every input. A Llama's head has no bias, so one embedding channel that is equal for
    all tokens serves as one. Blocks start as the identity, so the last norm scales that channel to sqrt(width / 2)."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight  # (V, width) both
    constant = 0.1 * math.sqrt(embedding.shape[1])
    embedding[:, 1:] = constant * F.normalize(torch.randn_like(embedding[:, 1:]), dim=1)
    embedding[:, 0] = constant
    for block in model.model.layers:
        nn.init.zeros_(block.self_attn.o_proj.weight)
        nn.init.zeros_(block.mlp.down_proj.weight)
    nn.init.zeros_(head)
    head[:, 0] = log_p / math.sqrt(embedding.shape[1] / 2)


# ---------------------------------------------------------------------------------------------------------------- stage
def pretrain(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    corpus, data = read(cfg)
    tokenizer, val_data = corpus.tokenizer, data["val"]
    log_p = ngrams.frequencies(corpus.train, len(corpus.sizes))  # (V,)
    model = loading.attend(make_model(cfg, tokenizer, torch.from_numpy(log_p).float()), cfg.attention, run.device)

    def scores(model: nn.Module, batch: dict) -> tuple[Tensor, Tensor, Tensor]:
        """Return (negative log-likelihood in nats, log Z, whether it is a target) of each next token, (B, T - 1) each. There is no mask and no
        cache: positions restart with each document, and so separate the documents."""
        out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        logits, labels = out.logits[:, :-1].float(), batch["labels"][:, 1:]  # (B, T - 1, V), (B, T - 1)
        log_z = logits.logsumexp(-1)
        own = logits.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return log_z - own, log_z, labels != IGNORED

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        nll, log_z, scored = scores(model, batch)
        terms = {"ce": nll[scored].sum()}
        if cfg.z_loss:
            terms["z"] = cfg.z_loss * log_z[scored].square().sum()
        return terms

    def counts(batch: dict) -> dict[str, Tensor]:
        return {"*": (batch["labels"][:, 1:] != IGNORED).sum()}

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        rows = []
        for batch in run.batches(data):
            nll, log_z, scored = scores(model, batch)
            beyond = scored & (batch["position_ids"][:, 1:] >= (cfg.original_context or cfg.data.context))
            sums = (nll * scored, log_z * scored, scored, nll * beyond, beyond)
            rows.append(torch.stack([*(to_double(x).sum(1) for x in sums), to_double(batch["bytes"])], 1))  # (B, 6)
        nll, log_z, tokens, far, there, size = run.gather(torch.cat(rows)).sum(0).tolist()
        found = {
            "bits_per_byte": nll / math.log(2) / size,
            "perplexity": math.exp(nll / tokens),
            "log_z": log_z / tokens,
        }
        return found | ({"perplexity_beyond": math.exp(far / there)} if there else {})

    def baselines() -> dict[str, dict[str, float]]:
        found = {
            "unigram": unigram,
            **ngrams.smoothed(corpus.train, corpus.val, log_p, size),
            **ngrams.xz(*corpus.texts),
        }
        counted = {name: {"bits_per_byte": bits} for name, bits in found.items()}
        return counted | {name: metrics for name, (metrics, _) in before().items()}

    @cache
    def before() -> dict[str, tuple[dict[str, float], Tensor]]:
        """(metrics, perplexity by position) of the model of `--init-from` at this context, untrained: with its positions as they
        were, and scaled."""
        found = {}
        for rope in dict.fromkeys(("default", cfg.rope)) if cfg.original_context and cfg.init_from else ():
            old = make_model(replace(cfg, rope=rope), tokenizer, torch.from_numpy(log_p).float()).to(run.device)
            tensors = read_weights(Path(cfg.init_from), trust_pickle=cfg.trust_pickle).tensors
            old.load_state_dict(match(old, tensors).pairs, strict=False)
            with evaluating(old), run.autocast():
                found[f"before, {rope} positions"] = evaluate(old, val_data), by_position(old)
        return found

    def by_position(model: nn.Module) -> Tensor:
        return positions.perplexity(partial(scores, model), run.batches(val_data), cfg.data.context, run.gather)

    def preview(batch: dict) -> list[core.Tile]:
        return [
            core.Tile(pretrain_gates.mark_context(tokenizer, row))
            for row in zip(*(batch[k] for k in pretrain_gates.KEYS), strict=True)
        ]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        """The first eight tokens of each row, and how the model goes on, greedily."""
        completions = model.generate(input_ids=batch["input_ids"][:, :8], attention_mask=torch.ones_like(batch["input_ids"][:, :8]),
                              max_new_tokens=24, do_sample=False)  # fmt: skip
        nll, _, scored = scores(model, batch)
        sure = ((-nll).exp() * scored).sum(1) / scored.sum(1).clamp_min(1)
        return [core.Tile(f"{tokenizer.decode(ids[:8])} -> {tokenizer.decode(ids[8:])}", score=p)
                for ids, p in zip(completions, sure.tolist(), strict=True)]  # fmt: skip

    def figures(model: nn.Module, data: core.Data) -> dict:
        """Perplexity along a row; texts from nothing, at temperature 0.8; what follows the beginnings of held-out documents."""
        with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
            torch.manual_seed(cfg.run.seed)
            begin = torch.full((4, 1), tokenizer.bos_token_id, device=run.device)
            made = model.generate(input_ids=begin, attention_mask=torch.ones_like(begin), do_sample=True, temperature=0.8,
                                  max_new_tokens=min(120, cfg.data.context - 1))  # fmt: skip
        some = View(data, range(min(8, len(data))))
        going_on = [tile for batch in run.batches(some) for tile in predict(model, batch)]
        curves = {"after": by_position(model)} | {name: curve for name, (_, curve) in before().items()}
        return {"Perplexity by position": positions.figure(curves, cfg.data.context, cfg.original_context),
                "Sampled texts": [core.Tile(tokenizer.decode(row, skip_special_tokens=True)) for row in made],
                "Beginnings of held-out documents, continued greedily": going_on}  # fmt: skip

    def export(folder: Path) -> None:
        """The model as `AutoModelForCausalLM.from_pretrained` reads it, and its tokenizer."""
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    size = sum(len(text.encode()) for text in corpus.texts[1])
    unigram = ngrams.unigram(log_p, corpus.val, size)
    ours = cfg.model == "llama"
    uniform_loss = math.log(len(log_p)) * (1 + cfg.z_loss * math.log(len(log_p)))
    first = float(-(np.exp(log_p) * log_p).sum()) if ours else uniform_loss  # ours: the entropy of the frequencies
    return core.Stage(
        name="pretrain",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data=data,
        loss=loss,
        counts=counts,
        evaluate=evaluate,
        metric=core.Metric("bits_per_byte", "how well is the next token known?", floor=unigram, ceiling=0.0,
                           higher_is_better=False),
        expect=core.Expect(
            initial_loss=first,
            loss_floor=pretrain_gates.floor,
            overfit_metric=lambda batch: pretrain_gates.overfit(batch, first),
            overfit_longer=not ours,
            small_terms=("z",),
            gate_batch_size=16,  # a row is a hundred tokens and more
        ),
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        gates=pretrain_gates.of(cfg.z_loss),
    )  # fmt: skip


def speaker(cfg: Config, export: Path) -> speaking.Speaker:
    """Return the export for `trainworthy predict` and `chat`: it continues a text as the beginning of a document."""
    ids = lambda tokenizer, text: [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]  # noqa: E731
    return speaking.going_on(cfg, export, ids)


STAGES = [pretrain]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    then, flops = time.monotonic(), loading.flops(stage.model, cfg.data.context)
    for step in run.steps(stage):
        means = run.update(stage, step.batches)
        tokens = sum(stage.counts(batch)["*"] for batch in step.batches) * run.world
        rate = tokens / (time.monotonic() - then)
        metrics = {"tokens_per_sec": rate} | loading.utilisation(rate * flops / run.world, run.device)
        if "z" in means:
            metrics["rms_log_z"] = (means["z"] / cfg.z_loss).sqrt()
        run.log("lm", metrics)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)
        then = time.monotonic()  # reading the next rows counts, evaluating does not


if __name__ == "__main__":
    core.main(__file__)
