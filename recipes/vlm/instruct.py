"""Answer questions about images: a frozen vision encoder, a projector and a language model (LLaVA, Liu 2023).

tiny  composites of one to three tinted digits, four balanced questions each, two CPU cores, minutes. Small encoder and
      language model, trained here once and cached.
full  CLIP and SmolLM2 with LoRA, or with `--model` a model of the hub, on `--data.path FOLDER` of images with questions or
      conversations; an accelerator. The same code path.

Stage `align` trains only the projector, because a random projector would damage the language model. Stage `instruct` trains
projector and language model, each at its own learning rate. The encoder is frozen and in eval mode, except in stage `unfreeze`
(off by default). No sample is ever cut. Every image has a counterfactual, so that no question reveals its answer.
"""

import copy
import json
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from trainworthy.core.base.config import Optim, Phase, RunSettings, Train
from trainworthy.core.base.errors import UserError
from trainworthy.core.gates.gate import fetch
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.shared.language_models import Attention, LoRA, attend
from trainworthy.recipes.vlm.data import conversations, folders, questions, rows
from trainworthy.recipes.vlm.data.questions import Questions
from trainworthy.recipes.vlm.data.scenes import Scenes
from trainworthy.recipes.vlm.gates import instruct as gates
from trainworthy.recipes.vlm.models import hub, language, vision

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(LoRA, core.Config):
    """Settings of vlm/instruct."""

    data: folders.Where = field(default_factory=folders.Where)
    align: Phase = field(default_factory=Phase)
    instruct: Phase = field(default_factory=Phase)
    unfreeze: Phase = field(default_factory=Phase)
    encoder: str = "cells"
    """`cells` (a small CNN trained here), or a vision transformer of the hub by name or folder. Trained by --unfreeze only."""
    language: str = "words"
    """`words` (a small model trained here on text descriptions of scenes), or a causal language model of the hub by name or
    folder."""
    model: str = ""
    """A vision-language model of the hub, by name or folder, instead of these two, with its own projector, template and
    processor."""
    lora_rank: int = 0
    """Rank of LoRA adapters on the language model; 0 trains all of it."""
    attention: Attention = "auto"
    """Attention implementation; `auto` is transformers' own choice. The last two need an accelerator."""
    projector_width: int = 256
    """Units between the projector's two layers."""
    language_lr: float = 5e-4
    """Peak learning rate of the language model in `instruct`; the projector's is --instruct.lr."""


def tiny() -> Config:
    """Composites on two CPU cores."""
    return Config(
        align=Phase(epochs=0.5, lr=2e-3),
        instruct=Phase(epochs=2.5, lr=1e-3),
        unfreeze=Phase(epochs=0, lr=2e-5),
        train=Train(batch_size=16, eval_every=0.5),
        optim=Optim(warmup=0.06, weight_decay=0.05),
        run=RunSettings(save_every=0.25),
    )


def full() -> Config:
    """Rates of LLaVA for its projector, of LoRA for the language model; bf16."""
    return Config(
        data=folders.Where(path="pictures", longest=2048),
        align=Phase(epochs=1, batch_size=256, lr=1e-3),
        instruct=Phase(epochs=1, batch_size=128, lr=2e-5),
        unfreeze=Phase(epochs=0, batch_size=128, lr=2e-6),
        encoder="openai/clip-vit-large-patch14-336",
        language="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        lora_rank=64,
        projector_width=2048,
        language_lr=2e-4,
        train=Train(precision="bf16"),
        optim=Optim(warmup=0.03, weight_decay=0.0),
        loader=core.Loader(workers=8, eval_workers=8),
    )


# ----------------------------------------------------------------------------------------------------------------- data
@cache
def read(split: str, where: tuple, model: str, words: str, reads: tuple) -> Questions:
    """Pictures with questions as rows of tokens; read once per process. `reads`: what the model says of itself."""
    path, pairs, held_out, val, longest = where
    if path == "scenes":
        source = Scenes(split, pairs if split == "train" else held_out)
        source.image = cache(source.image)  # 80 MB at most, and gates read the same pictures again and again
    else:
        source = folders.load(path, split, val)
    if model:
        alone = source if isinstance(source, conversations.Talks) else conversations.Apart(source)
        return hub.Templated(alone, model, takes=reads, longest=longest)
    features, side = reads
    return Questions(source, language.tokenizer(words), features=features, side=side, longest=longest)


# ---------------------------------------------------------------------------------------------------------------- model
class Projector(nn.Module):
    """Features (B, n, width) -> embeddings (B, n, d): LayerNorm, two layers, LayerNorm x gain. It starts as loud as words are."""

    def __init__(self, n_in: int, width: int, n_out: int, rms: float):
        super().__init__()
        self.norm = nn.LayerNorm(n_in)
        self.layers = nn.Sequential(nn.Linear(n_in, width), nn.GELU(), nn.Linear(width, n_out))
        self.out = nn.LayerNorm(n_out, elementwise_affine=False)
        self.gain = nn.Parameter(torch.tensor(rms))

    def forward(self, features: Tensor) -> Tensor:
        return self.gain * self.out(self.layers(self.norm(features)))


class VLM(nn.Module):
    """Three towers. Pictures (B, 3, side, side) and rows of tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, encoder: nn.Module, projector: nn.Module, language: nn.Module):
        super().__init__()
        self.encoder, self.projector, self.language = encoder, projector, language
        with torch.no_grad():
            _, self.features, got = projector(encoder(torch.zeros(1, 3, encoder.side, encoder.side))).shape
        if got != (needed := language.get_input_embeddings().embedding_dim):
            raise UserError("the projector does not fit the language model", got=f"embeddings of {got}", needed=needed,
                            cause="it was made for another language model")  # fmt: skip
        self.reads = (self.features, encoder.side)

    def embedded(self, batch: dict[str, Tensor]) -> Tensor:
        """(B, T, d): words, and the features of each picture in its places."""
        places = batch["ids"] == rows.IMAGE
        images, n = batch["image"], batch["pictures"]
        if images.ndim == 5:  # (B, P, 3, side, side): those that there are, in their order
            images = images[torch.arange(images.shape[1], device=n.device) < n[:, None]]
        features = self.projector(self.encoder(images))  # frozen weights need no graph: no_grad would be idle
        if (places.sum(1) != n * features.shape[1]).any():
            raise ValueError(f"{features.shape[1]} features of a picture, {places.sum(1).tolist()} places for them")
        words = self.language.get_input_embeddings()(batch["ids"].clamp_min(0))
        return words.masked_scatter(places[..., None], features.to(words.dtype))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return rows.answer(self.language, self.embedded(batch), batch)

    def speak(self, batch: dict[str, Tensor], n: int) -> Tensor:
        """What a row without its answer is answered with, at most `n` tokens of it."""
        return self.language.generate(
            inputs_embeds=self.embedded(batch), max_new_tokens=n, do_sample=False, pad_token_id=0
        )[0]


def make_model(cfg: Config) -> VLM | hub.Whole:
    """Encoder and language model as they were trained, a new projector between them; or a model of the hub as it is."""
    if cfg.model:
        return hub.Whole(cfg.model, cfg)
    encoder, words = vision.load(cfg.encoder), language.load(cfg.language, cfg)
    embedding = words.get_input_embeddings().weight.detach()
    rms = embedding.square().mean().sqrt().item()
    return VLM(encoder, Projector(encoder.width, cfg.projector_width, embedding.shape[1], rms), words)


# --------------------------------------------------------------------------------------------------------------- stages
def align(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """Stage one: the projector learns the language model's embeddings; both towers beside it are as they came."""
    model, start, fresh = make_model(cfg), {}, ()
    if not cfg.model:
        own = {"encoder": vision.weights(cfg.encoder), "language": language.weights(cfg.language, model.language)}
        start, fresh = {f"{t}.{k}": v for t, found in own.items() for k, v in found.items()}, ("projector.",)
    return make_stage(cfg, run, "align", model, {"projector": cfg.optim.lr}, start, fresh)


def instruct(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """Stage two: projector and language model, each at its own rate, from the projector that stage one trained."""
    if previous is None and not cfg.model:
        raise UserError("instruct has no projector to start from", needed="STAGES = [align, instruct], --align.epochs above 0",
                        cause="a language model that learns beside a random projector is spoilt")  # fmt: skip
    model = make_model(cfg)
    if previous is not None:
        model.load_state_dict(previous.model.state_dict())
    rates = {"projector": cfg.optim.lr, "language": cfg.language_lr}
    return make_stage(cfg, run, "instruct", model, rates, previous.model.state_dict() if previous else {})


def unfreeze(cfg: Config, run: core.Run, previous: core.Stage) -> core.Stage:
    """Stage three, left out unless --unfreeze.epochs: the encoder at a tiny rate, the others at a tenth of what they had."""
    rates = {"encoder": cfg.optim.lr, "projector": cfg.instruct.lr / 10, "language": cfg.language_lr / 10}
    return make_stage(cfg, run, "unfreeze", previous.model, rates, previous.model.state_dict())


def make_stage(cfg: Config, run: core.Run, name: str, model: nn.Module, rates: dict[str, float], start: dict[str, Tensor],
               fresh: tuple[str, ...] = ()) -> core.Stage:  # fmt: skip
    """What all stages share. `rates`: {tower: peak rate}; a tower without one is frozen."""
    attend(model.net[0] if cfg.model else model.language, cfg.attention, run.device)
    for key, p in model.named_parameters():
        adapted = not cfg.lora_rank or not key.startswith("language.") or ".lora_" in key
        p.requires_grad_(key.split(".")[0] in rates and adapted)
    frozen = tuple(key for key, p in model.named_parameters() if not p.requires_grad)
    where = (astuple(cfg.data), cfg.model, cfg.language, model.reads)
    data = {s: read(s, *where).copy() for s in ("train", "val", *folders.tested(cfg.data.path))}
    train_data, val_data = data["train"], data["val"]
    if not cfg.model:
        train_data.notes |= {"vision encoder": vision.told(cfg.encoder), "language model": language.told(cfg.language)}
    kinds, words = train_data.source.kinds, train_data.tokenizer
    guess = questions.majority(train_data.source)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        return {"answer": rows.nll(model(batch), batch["labels"])}

    def counts(batch: dict) -> dict[str, float]:
        return {"answer": rows.scored(batch["labels"])}

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        found, nats = [], []
        for batch in run.batches(data):
            logits = model(batch)
            found.append(questions.verdicts(logits, batch))
            nats.append(questions.surprise(logits, batch["labels"]))
        lost, tokens = run.gather(torch.cat(nats)).sum(0).tolist()
        return {**questions.score(run.gather(torch.cat(found)), kinds), "nll": lost / tokens}

    def baselines() -> dict[str, dict[str, float]]:
        n = len(val_data)
        others = View(val_data, range(n), swap=[(i + n // 2) % n for i in range(n)])  # nobody keeps their own picture
        return {"commonest answer to each question": {"accuracy": questions.blindly(val_data.source, guess), "pairs": 0.0},
                "this model, another's picture": evaluate(model, others)}  # fmt: skip

    def preview(batch: dict) -> list[core.Tile]:
        said = [words.decode(row[row >= 0].tolist(), skip_special_tokens=True) for row in batch["labels"]]
        return [core.Tile(text, image) for text, image in zip(said, train_data.shown(batch), strict=True)]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        logits = model(batch)
        said = logits[:, :-1].argmax(-1).masked_fill(batch["labels"][:, 1:] < 0, -1)
        share = (rows.right(logits, batch) & (batch["kind"] >= 0)).sum(1) / (batch["kind"] >= 0).sum(1)
        texts = [words.decode(row[row >= 0].tolist(), skip_special_tokens=True) for row in said]
        return [core.Tile(text, score=s) for text, s in zip(texts, share.tolist(), strict=True)]

    def figures(model: nn.Module, data: core.Data) -> dict:
        batch = fetch(data, list(range(min(16, len(data)))), None, run.device)
        tiles = zip(predict(model, batch), preview({k: v.cpu() for k, v in batch.items()}), strict=True)
        return {"Pictures and their counterfactuals: what the model answers": [
            core.Tile(said.caption, seen.image, score=said.score) for said, seen in tiles]}  # fmt: skip

    def export(folder: Path) -> None:
        """language/ for from_pretrained; vision.pt2 (torch.export): pictures -> embeddings that stand before the question. Of a
        model of the hub: model/ for from_pretrained."""
        if cfg.model:
            return hub.export(model, cfg.model, folder)
        net = copy.deepcopy(model).eval().cpu()
        talker = net.language.merge_and_unload() if cfg.lora_rank else net.language
        talker.save_pretrained(folder / "language")
        words.save_pretrained(folder / "language")
        eyes = nn.Sequential(net.encoder, net.projector)
        save_file(net.projector.state_dict(), folder / "projector.safetensors")
        core.export_program(eyes, torch.zeros(2, 3, net.encoder.side, net.encoder.side), folder / "vision.pt2")
        config = {"encoder": cfg.encoder, "language": cfg.language, "features": net.features, "side": net.encoder.side,
                  "row": "embeddings of bos, those of the picture, those of '\\n' + question; then greedily up to eos",
                  "image": "float32 (B, 3, side, side) in [0, 1]; normalised inside vision.pt2"}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config, indent=1))

    own = cfg.encoder == "cells" and not cfg.model  # others keep layers that nothing here reads (CLIP's last norm)
    floor = questions.blindly(train_data.source, guess)
    return core.Stage(
        name=name,
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim, rates)},
        data=data,
        loss=loss,
        counts=counts,
        evaluate=evaluate,
        metric=core.Metric("accuracy", "what does the picture show, asked in words?", floor=floor, ceiling=1.0),
        # A projector alone, in front of a language model that stays, gets 30 of 32 answers at two seeds of five.
        expect=core.Expect(frozen=frozen, new_parameters=fresh, overfit_steps=200 if name == "align" else 110,
                           overfit_metric=0.9 if name == "align" else None, no_gradient=() if own else ("encoder.",)),
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        pretrained={k: v.clone() for k, v in start.items()} or None,
        export=export,
        gates=gates.gates(name, tuple(rates), first=name == "align" or not start),
    )  # fmt: skip


STAGES = [align, instruct, unfreeze]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop of all stages; the gates rehearse this very function."""
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__ == "__main__":
    core.main(__file__)
