"""Answer questions about images: a frozen vision encoder, a projector and a language model (LLaVA, Liu 2023).

tiny  composites of one to three tinted digits, four balanced questions each, two CPU cores, minutes. Small encoder and
      language model, trained here once and cached.
full  CLIP and SmolLM2 with LoRA, or with `--model` a model of the hub, on `--data.path FOLDER` of images with questions or
      conversations; an accelerator. The same code path.

Stage `align` trains only the projector, because a random projector would damage the language model. Stage `instruct` trains
projector and language model, each at its own learning rate. The encoder is frozen and in eval mode, except in stage `unfreeze`
(off by default). No sample is ever cut. Every image has a counterfactual, so that no question reveals its answer. A language
model with a chat template is trained and asked in its own turns, a base model in lines.
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
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.gates.objective import ended
from trainworthy.recipes.llm.models.loading import ends_with
from trainworthy.recipes.shared.language_models import Attention, LoRA, attend
from trainworthy.recipes.vlm.data import conversations, folders, rows, turns
from trainworthy.recipes.vlm.data.questions import Questions
from trainworthy.recipes.vlm.data.scenes import Scenes
from trainworthy.recipes.vlm.evaluation import answers
from trainworthy.recipes.vlm.gates import instruct as gates
from trainworthy.recipes.vlm.models import asking, hub, language, vision

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(LoRA, core.Config):
    """Settings of vlm/instruct."""

    data: folders.Source = field(default_factory=folders.Source)
    align: Phase = field(default_factory=Phase)
    instruct: Phase = field(default_factory=Phase)
    unfreeze: Phase = field(default_factory=Phase)
    encoder: str = "cells"
    """`cells` (a small CNN trained here), or a vision transformer of the hub by name or folder. Trained by --unfreeze only."""
    encoder_layer: int = -2
    """Layer of a hub encoder whose outputs are the features: -2 the last but one, as LLaVA takes of CLIP; -1 the last."""
    language: str = "words"
    """`words` (a small model trained here on text descriptions of scenes), or a causal language model of the hub by name or
    folder. One whose tokenizer has a chat template is trained and queried in its own chat format, another in plain lines."""
    chat_template: str = ""
    """File with a chat template that replaces the language model's own, or `trl:NAME` for one that TRL ships."""
    eos_token: str = ""
    """Token that ends an answer, if it differs from the tokenizer's eos and the template does not show it."""
    model: str = ""
    """A vision-language model of the hub, by name or folder, instead of these two, with its own projector, template, processor."""
    lora_rank: int = 0
    """Rank of LoRA adapters on the language model; 0 trains all of it. Usual peaks of its rate (--language-lr): 1e-4 to 2e-4 for
    adapters, 1e-5 to 2e-5 for all of it."""
    metric: str = ""
    """Metrics of the answers, separated by commas; the first selects the best checkpoint: accuracy (the very answer), or of
    generated text f1, exact, rouge, bleu, chrf or your own `module:function`; perplexity generates nothing. Empty: accuracy,
    and f1 where more than a tenth of the held-out answers have over five words."""
    max_new_tokens: int = 0
    """Maximum number of generated tokens of an answer; 0: the length of the longest answer."""
    attention: Attention = "auto"
    """Attention implementation; `auto` is transformers' own choice. The last two need an accelerator."""
    projector_width: int = 256
    """Units between the projector's two layers."""
    language_lr: float = 5e-4
    """Peak learning rate of the language model in `instruct`; the projector's is --instruct.lr."""

    def __post_init__(self):
        self.encoder, self.language, self.model = map(language.folder, (self.encoder, self.language, self.model))


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
        data=folders.Source(path="pictures", max_length=2048),
        align=Phase(epochs=1, batch_size=256, lr=1e-3),
        instruct=Phase(epochs=1, batch_size=128, lr=2e-5),
        unfreeze=Phase(epochs=0, batch_size=128, lr=2e-6),
        encoder="openai/clip-vit-large-patch14-336",
        language="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        lora_rank=64,
        projector_width=2048,
        language_lr=2e-4,
        train=Train(precision="bf16", eval_batch_size=16),
        optim=Optim(warmup=0.03, weight_decay=0.0),
        loader=core.Loader(workers=8, eval_workers=8),
    )


# ----------------------------------------------------------------------------------------------------------------- data
@cache
def read(split: str, where: tuple, model: str, words: tuple[str, str, str], reads: tuple) -> Questions:
    """Images with questions as rows of tokens, tokenised once per process. `words`: the language model, its chat template and the end of its
    turns; `reads`: description of the model for the report."""
    path, pairs, held_out, val, longest, max_bad, images = where
    if path == "scenes":
        source = Scenes(split, pairs if split == "train" else held_out)
        source.image = cache(source.image)  # 80 MB at most; gates read the same images repeatedly
    else:
        source = folders.load(path, split, val, max_bad, images)
    if model:
        alone = source if isinstance(source, conversations.Conversations) else conversations.SingleQuestions(source)
        return hub.Templated(alone, model, takes=reads, longest=longest)
    words = language.tokenizer(*words) if path == "scenes" else language.knowing(words, source)
    return Questions(source, words, features=reads[0], side=reads[1], longest=longest)


# ---------------------------------------------------------------------------------------------------------------- model
class Projector(nn.Module):
    """Features (B, n, width) -> embeddings (B, n, d): LayerNorm, two layers, LayerNorm x gain. Initially its outputs have the norm of word
    embeddings."""

    def __init__(self, n_in: int, width: int, n_out: int, rms: float):
        super().__init__()
        self.norm = nn.LayerNorm(n_in)
        self.layers = nn.Sequential(nn.Linear(n_in, width), nn.GELU(), nn.Linear(width, n_out))
        self.out = nn.LayerNorm(n_out, elementwise_affine=False)
        self.gain = nn.Parameter(torch.tensor(rms))

    def forward(self, features: Tensor) -> Tensor:
        return self.gain * self.out(self.layers(self.norm(features)))


class VLM(nn.Module):
    """Three towers. Images (B, 3, side, side) and rows of tokens (B, T) -> logits (B, T, V)."""

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
        """Return embeddings (B, T, d): words, with the features of each image in its places."""
        places = batch["ids"] == rows.IMAGE
        images, n = batch["image"], batch["pictures"]
        if images.ndim == 5:  # (B, P, 3, side, side): only existing images, in order
            images = images[torch.arange(images.shape[1], device=n.device) < n[:, None]]
        # frozen weights need no graph, so no_grad would change nothing
        features = self.projector(self.encoder(images))
        if (places.sum(1) != n * features.shape[1]).any():
            raise ValueError(f"{features.shape[1]} features of a picture, {places.sum(1).tolist()} places for them")
        words = self.language.get_input_embeddings()(batch["ids"].clamp_min(0))
        return words.masked_scatter(places[..., None], features.to(words.dtype))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return rows.answer(self.language, self.embedded(batch), batch)

    def speak(self, batch: dict[str, Tensor], n: int, ends: list[int]) -> Tensor:
        """Return generated answers for rows without their answers, (B, up to n). Rows are padded on the left."""
        return self.language.generate(
            inputs_embeds=self.embedded(batch), attention_mask=(batch["segment"] >= 0).long(), max_new_tokens=n,
            do_sample=False, eos_token_id=ends, pad_token_id=ends[0],
        )  # fmt: skip


def make_model(cfg: Config) -> VLM | hub.Whole:
    """Return encoder and language model as pretrained, with a new projector between them; or a model of the hub."""
    hub.assert_usable(cfg)
    if cfg.model:
        return hub.Whole(cfg.model, cfg)
    encoder, words = vision.load(cfg.encoder, cfg.encoder_layer), language.load(cfg.language, cfg)
    embedding = words.get_input_embeddings().weight.detach()
    rms = embedding.square().mean().sqrt().item()
    return VLM(encoder, Projector(encoder.width, cfg.projector_width, embedding.shape[1], rms), words)


# --------------------------------------------------------------------------------------------------------------- stages
def align(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """Stage one: the projector learns to produce the language model's embeddings; both towers are frozen."""
    model, start, fresh = make_model(cfg), {}, ()
    if not cfg.model:
        own = {"encoder": vision.weights(cfg.encoder), "language": language.weights(cfg.language, model.language)}
        start = {f"{t}.{k}": v for t, found in own.items() for k, v in found.items()}
        fresh = ("projector.", *(f"{t}." for t, found in own.items() if not found))  # others' files are not read twice
    return make_stage(cfg, run, "align", model, {"projector": cfg.optim.lr}, start, fresh)


def instruct(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """Stage two: projector and language model, each at its own learning rate, from the projector of stage one."""
    if previous is None and not cfg.model:
        raise UserError("instruct has no projector to start from", needed="STAGES = [align, instruct], --align.epochs above 0",
                        cause="a random projector damages the language model", next="--align.epochs 0.5, or --model NAME")  # fmt: skip
    model = make_model(cfg)
    if previous is not None:
        model.load_state_dict(previous.model.state_dict())
    rates = {"projector": cfg.optim.lr, "language": cfg.language_lr}
    return make_stage(cfg, run, "instruct", model, rates, previous.model.state_dict() if previous else {})


def unfreeze(cfg: Config, run: core.Run, previous: core.Stage) -> core.Stage:
    """Stage three, only with --unfreeze.epochs: the encoder at a very low rate, the others at a tenth of theirs."""
    rates = {"encoder": cfg.optim.lr, "projector": cfg.instruct.lr / 10, "language": cfg.language_lr / 10}
    return make_stage(cfg, run, "unfreeze", previous.model, rates, previous.model.state_dict())


def make_stage(cfg: Config, run: core.Run, name: str, model: nn.Module, rates: dict[str, float], start: dict[str, Tensor],
               fresh: tuple[str, ...] = ()) -> core.Stage:  # fmt: skip
    """What all stages share. `rates`: {tower: peak rate}; towers without a rate are frozen."""
    attend(model.net[0] if cfg.model else model.language, cfg.attention, run.device)
    for key, p in model.named_parameters():
        adapted = not cfg.lora_rank or not key.startswith("language.") or ".lora_" in key
        p.requires_grad_(key.split(".")[0] in rates and adapted)
    frozen = tuple(key for key, p in model.named_parameters() if not p.requires_grad)
    where = (astuple(cfg.data), cfg.model, (cfg.language, cfg.chat_template, cfg.eos_token), model.reads)
    data = {s: read(s, *where).copy() for s in ("train", "val", *folders.tested(cfg.data.path))}
    train_data, val_data = data["train"], data["val"]
    train_data.notes |= language.notes(cfg, vision.describe(cfg.encoder), bool(train_data.chat))
    words = train_data.tokenizer
    scored = answers.Answers(run, train_data, val_data, metric=cfg.metric, longest=cfg.max_new_tokens)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        return {"answer": rows.nll(model(batch), batch["labels"])}

    def counts(batch: dict) -> dict[str, float]:
        return {"answer": rows.scored(batch["labels"])}

    def baselines() -> dict[str, dict[str, float]]:
        n = len(val_data)
        others = View(val_data, range(n), swap=[(i + n // 2) % n for i in range(n)])  # no sample keeps its own image
        return {"commonest answer to each question": scored.commonest(),
                "this model, another's picture": scored.evaluate(model, others)}  # fmt: skip

    def export(folder: Path) -> None:
        """Save language/ for from_pretrained and vision.pt2 (torch.export): images -> embeddings. For a hub model: model/."""
        about = {"conversations": train_data.talks, "max_new_tokens": scored.longest or train_data.longest_answer(),
                 "ends": train_data.ends}  # fmt: skip
        if cfg.model:
            return hub.export(model, cfg.model, folder, about)
        net = copy.deepcopy(model).eval().cpu()
        talker = net.language.merge_and_unload() if cfg.lora_rank else net.language
        ends_with(talker, train_data.ends)
        talker.save_pretrained(folder / "language")
        words.save_pretrained(folder / "language")
        eyes = nn.Sequential(net.encoder, net.projector)
        save_file(net.projector.state_dict(), folder / "projector.safetensors")
        core.export_program(eyes, torch.zeros(2, 3, net.encoder.side, net.encoder.side), folder / "vision.pt2")
        config = about | {"encoder": cfg.encoder, "encoder_layer": cfg.encoder_layer, "language": cfg.language,
                  "features": net.features, "side": net.encoder.side, "row": turns.row_of(train_data.chat),
                  "image": "(B, 3, side, side) in [0, 1], not normalised", "prompt": turns.prompt_of(train_data.chat, words)}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config, indent=1))

    def halfway(batch: dict) -> float:
        """Return half of the untrained model's loss."""
        with evaluating(model), torch.no_grad(), run.autocast():
            return 0.5 * sum(loss(model, batch).values()).item() / counts(batch)["answer"]

    # Hub encoders have layers that nothing here uses (CLIP's last norm).
    unused = () if cfg.encoder == "cells" and not cfg.model else ("encoder.",)
    metric, probe = scored.metric(scored.names[0], len(words)), scored.probe(len(words))
    declared = {"frozen": frozen, "new_parameters": fresh, "no_gradient": unused}
    return core.Stage(
        name=name,
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim, rates)},
        data=data,
        loss=loss,
        counts=counts,
        evaluate=scored.evaluate,
        metric=metric,
        probe=probe,
        expect=answers.expected(name, probe.metric if probe else metric, halfway, in_words=scored.in_words, **declared),
        baselines=baselines,
        preview=scored.preview,
        predict=scored.predict,
        figures=scored.figures,
        intervals=scored.seen.intervals,
        pretrained={k: v.clone() for k, v in start.items()} or None,
        export=export,
        model_card=language.card(cfg),
        gates=gates.gates(name, tuple(rates), first=name == "align" or not start),
        monitors=[ended(scored.longest)] if scored.generated else [],
    )  # fmt: skip


def asker(cfg: Config, export: Path) -> asking.Asker:
    """The export, for `trainworthy predict`: answers to questions about pictures."""
    return asking.asker(cfg, export, VLM)


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
