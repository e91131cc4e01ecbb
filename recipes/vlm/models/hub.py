"""Vision-language models of the hub as a whole: transformers' AutoModelForImageTextToText with its own processor and template.

The model is seen as three towers, as ours is, so that every gate means the same: `encoder`, `projector` and `language`. A row is
what the processor's chat template makes of a conversation, with what it puts in place of a picture of that size; rows are made
without reading pictures, so that what is too long is known before anything is trained.
"""

import copy
import inspect
import json
import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.shared import hub, language_models
from trainworthy.recipes.vlm.data.questions import Questions
from trainworthy.recipes.vlm.data.rows import IGNORE, IMAGE, PLACE, together
from trainworthy.recipes.vlm.models import language
from transformers import AutoModelForImageTextToText, AutoProcessor

from trainworthy import core

KINDS = ("mm_token_type_ids", "token_type_ids")  # keys that mark image tokens, for models that need them
NEEDS = (hub.TOKENIZER, "preprocessor_config.json or processor_config.json")


# ----------------------------------------------------------------------------------------------------------------- model
class Whole(nn.Module):
    """Maps a batch of `Templated` to logits (B, T, V)."""

    def __init__(self, name: str, lora: language_models.LoRA | None = None):
        super().__init__()
        try:
            net, _ = language_models.read(AutoModelForImageTextToText, locate(name), torch.float32)
        except ValueError as error:
            raise UserError(f"--model {name} is not a vision-language model", got=str(error).partition("\n")[0][:200],
                            needed="one that transformers' AutoModelForImageTextToText loads") from None  # fmt: skip
        parts = towers(net, name)
        head, decoder, self.image = net.get_output_embeddings(), parts["language"], feature_id(processor(name))
        adapted = lora and language_models.adapted(decoder, lora, alpha=lora.lora_rank, task=None)
        adapted = None if adapted is decoder else adapted
        self.net = (net, adapted)  # in a tuple: its parts are registered below under the names of their towers
        self.projector = parts["projector"]  # first: a projector inside the encoder still counts as the projector
        self.encoder = parts["encoder"]
        self.language = nn.ModuleDict({"decoder": decoder, "head": head})
        own = {id(p) for p in self.parameters()}
        self.rest = nn.ParameterList([p for p in net.parameters() if id(p) not in own])
        self.reads = tuple(inspect.signature(net.forward).parameters)

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs that the model itself takes."""
        ids, seen = batch["ids"], {}
        for key in (k.removesuffix(".shape") for k in batch if k.endswith(".shape")):
            there = torch.arange(batch[key].shape[1], device=ids.device) < batch[f"{key}.shape"][:, :1]
            seen[key] = batch[key][there]  # (B, most, ..) -> (all, ..)
        places = ids == IMAGE
        seen |= {key: places.long() for key in KINDS if key in self.reads}
        return {
            **seen,
            "input_ids": ids.masked_fill(places, self.image),
            "attention_mask": (batch["segment"] >= 0).long(),
        }

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net[0](**self.inputs(batch), use_cache=False).logits

    def speak(self, batch: dict[str, Tensor], n: int, ends: list[int]) -> Tensor:
        """Return generated answers for rows without their answers, (B, up to n)."""
        return self.net[0].generate(
            **self.inputs(batch), max_new_tokens=n, do_sample=False, eos_token_id=ends, pad_token_id=ends[0]
        )[:, batch["ids"].shape[1] :]

    def merged(self) -> nn.Module:
        """Return a copy of the model as from_pretrained knows it, with adapters merged."""
        net, adapted = copy.deepcopy(self.net)
        if adapted is not None:
            adapted.merge_and_unload()
        return net.cpu()


def towers(net: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return {tower: module} of a model: vision encoder, language model and projector."""
    encoder, language = net.get_encoder("image"), net.get_decoder()
    holders = [m for m in net.modules() if {id(encoder), id(language)} <= {id(c) for c in m.children()}]
    between = [
        c for m in holders for c in m.children() if c not in (encoder, language) and any(True for _ in c.parameters())
    ]
    # Qwen's projector is a part of the encoder module
    between = between or [c for n, c in encoder.named_children() if n == "merger"]
    if not holders or not between:
        raise UserError(f"--model {name}: its parts cannot be identified", got=type(net).__name__,
                        needed="a vision encoder, a projector and a language model side by side",
                        cause="an encoder-decoder, or one whose language model sees pictures by attention of its own")  # fmt: skip
    return {"encoder": encoder, "projector": between[-1], "language": language}


def locate(name: str) -> str:
    """Return what `from_pretrained` reads."""
    return hub.locate(name, "--model", packaged="our own three towers (leave --model out)", needs=NEEDS)


@cache
def processor(name: str) -> Any:
    """Return its processor, which must be able to make rows."""
    try:
        found = AutoProcessor.from_pretrained(locate(name))
    except ImportError as error:  # SmolVLM's needs num2words
        raise UserError(f"--model {name}: its processor needs another package", got=" ".join(str(error).split())[:300],
                        next="install it, then the same command again") from None  # fmt: skip
    lacking = [what for what, there in (("a chat template", getattr(found, "chat_template", None)),
               ("an image token", getattr(found, "image_token", None))) if not there]  # fmt: skip
    if lacking:
        raise UserError(f"--model {name}: its processor has not {' nor '.join(lacking)}", got=type(found).__name__,
                        needed="one of a model that was trained on conversations",
                        next="put a chat_template.jinja into the model's folder")  # fmt: skip
    picture = torch.zeros(3, 32, 32, dtype=torch.uint8)
    given = found(text=[found.image_token], images=[[picture]], return_tensors="pt")
    if "token_type_ids" in given and not given["token_type_ids"][given["input_ids"] == feature_id(found)].any():
        raise UserError(f"--model {name} is a prefix language model, which reads question and picture in both directions",
                        got=f"{type(found).__name__}, whose token_type_ids mark answers", needed="a model of conversations",
                        cause="a conversation has several answers, and the first would see those after it")  # fmt: skip
    return found


def feature_id(processor: Any) -> int:
    """Return the id of the tokens that a picture's features replace. Gemma 3's template has another one: the start of a picture."""
    return processor.image_token_ids[0]


# ------------------------------------------------------------------------------------------------------------------ data
class Templated(Questions):
    """Conversations in the processor's template, each a sample with all its images."""

    varied = True

    def __init__(self, source: Any, name: str, *, takes: tuple[str, ...], longest: int):
        self.source, self.name, self.takes, self.talks = source, name, takes, True
        self.processor, self.end, self.chat = processor(name), "", None
        self.tokenizer, self.token = self.processor.tokenizer, self.processor.image_token
        self.feature = feature_id(self.processor)
        self.stands = lru_cache(100_000)(self._stands)
        self.fields = {"pixel_values": core.Field("input"), "labels": core.Field("target")}
        self.keep(longest)
        ends = self.tokenizer(self.end, add_special_tokens=False)["input_ids"]
        self.ends = sorted({self.tokenizer.eos_token_id, *ends[:1]} - {None})

    def wanted(self, index: int) -> list[str]:
        return [f" {one.answer}{self.end}" for one in self.source.questions(index)]

    def at_most(self, index: int) -> float:
        return math.inf  # the number of image places depends on the image's size

    def row(self, index: int) -> dict[str, Tensor]:
        """Return the tokens of a sample: those of the whole text, scored inside answers."""
        places, parts, text, n = self.stands(tuple(self.source.sizes(index))), self.pieces(index), "", 0
        scored = []  # for each character
        for part, answer in parts:
            pieces = part.split(self.token)
            rendered = pieces[0] + "".join(a + b for a, b in zip(places[n:], pieces[1:], strict=False))
            n += len(pieces) - 1
            scored += [answer] * len(rendered)
            text += rendered
        if n != len(places) or any(answer and self.token in part for part, answer in parts):
            raise UserError(f"sample {index}: {n} {self.token} for {len(places)} pictures in the rendered template",
                            cause=f"a text with {self.token} in it, or a template that drops pictures")  # fmt: skip
        bos = self.tokenizer.bos_token
        found = self.tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)), return_offsets_mapping=True)
        ids = torch.tensor(found["input_ids"])
        answers = torch.tensor([b > a and scored[b - 1] for a, b in found["offset_mapping"]])
        return {"ids": ids.masked_fill(ids == self.feature, IMAGE), "labels": ids.where(answers, IGNORE),
                "segment": torch.ones_like(ids), "position": torch.arange(len(ids))}  # fmt: skip

    def pieces(self, index: int) -> list[tuple[str, bool]]:
        """Return the template's text in parts, each with whether it is an answer with its end."""
        system, before, parts = self.source.system(index), "", []
        turns = [turn("system", system)] if system else []
        for one in self.source.questions(index):
            turns.append(turn("user", one.question))
            given = self.rendered(turns, ask=True)
            turns.append(turn("assistant", one.answer.strip()))
            whole = self.rendered(turns)
            start, answer, rest = whole[len(given) :].partition(one.answer.strip())
            if not (given.startswith(before) and whole.startswith(given) and answer):
                raise UserError(f"--model {self.name}: its template drops or changes the turns before an answer",
                                got=repr(whole[-200:]), needed="each answer behind the very text that it is given to",
                                next="put a chat_template.jinja for training into the model's folder")  # fmt: skip
            # LLaVA's template ends no answer: a model trained on it would never stop
            self.end = rest.strip() or self.tokenizer.eos_token
            tail = rest[len(rest.rstrip()) :]
            parts += [(given[len(before) :], False), (start + answer + self.end, True), (tail, False)]
            before = whole
        return parts

    def rendered(self, turns: list[dict], *, ask: bool = False) -> str:
        """Return the conversation as text; with `ask`, up to the start of the assistant's answer."""
        try:
            return self.processor.apply_chat_template(turns, add_generation_prompt=ask, tokenize=False)
        except (TemplateError, TypeError) as error:
            raise UserError(f"--model {self.name}: its chat template does not take a conversation", got=error,
                            cause="a system turn, or turns in an order that it does not know") from None  # fmt: skip

    def _stands(self, sizes: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
        """Return what the processor inserts for each image of a sample."""
        blanks = [torch.zeros(3, *size, dtype=torch.uint8) for size in sizes]
        found = self.processor(text=[self.token * len(sizes)], images=[blanks], return_text_replacement_offsets=True)
        if "text_replacement_offsets" not in found:
            raise UserError(f"--model {self.name}: its processor does not name the placeholder of a picture",
                            got=type(self.processor).__name__, needed="return_text_replacement_offsets")  # fmt: skip
        return tuple(one["replacement"] for one in found["text_replacement_offsets"][0])

    def places(self, index: int) -> int:
        mark = self.tokenizer.convert_ids_to_tokens(self.feature)
        return sum(text.count(mark) for text in self.stands(tuple(self.source.sizes(self.kept[index]))))

    def seen(self, index: int) -> dict[str, Tensor]:
        """Return the processor's image inputs and their shape; another sample's are cut or repeated to fit."""
        images = [image.round().to(torch.uint8) for image in self.source.images(self.kept[index])]
        found = self.processor(text=[self.token * len(images)], images=[images], return_tensors="pt")
        mine = {k: v for k, v in found.items() if k in self.takes and k not in ("input_ids", "attention_mask", *KINDS)}
        return mine | {f"{k}.shape": torch.tensor(v.shape) for k, v in mine.items()}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        shapes = [k for k in samples[0] if k.endswith(".shape")]
        batch = {k: torch.stack([s[k] for s in samples]) for k in (*shapes, "kind", "pair")}
        for key in (k.removesuffix(".shape") for k in shapes):
            most = batch[f"{key}.shape"].amax(0).tolist()
            values = [fitted(s[key], s[f"{key}.shape"].tolist()) for s in samples]
            gaps = [[x for n, m in zip(v.shape[::-1], most[::-1], strict=True) for x in (0, m - n)] for v in values]
            batch[key] = torch.stack([F.pad(v, gap) for v, gap in zip(values, gaps, strict=True)])
        return {**together(samples), **batch}

    def images_of(self, batch: dict[str, Tensor]) -> list[Tensor | None]:
        """Return the first image of each sample as the model sees it; None for models that read patches."""
        seen = batch["pixel_values"]
        if seen.ndim < 5:
            return [None] * len(seen)
        seen = seen.flatten(1, -4)[:, 0]
        return [*((seen - seen.amin()) / (seen.amax() - seen.amin()).clamp_min(1e-6))]


def assert_usable(cfg: Any) -> None:
    """Raise UserError before a model is loaded: for a chat template that a processor would not read, and for what is wrong with the user's
    own lines."""
    if cfg.model and (cfg.chat_template or cfg.eos_token):
        raise UserError("--chat-template and --eos-token are for --language", got=f"--model {cfg.model}",
                        next="put a chat_template.jinja into the model's folder")  # fmt: skip
    language.assert_readable(cfg)


def turn(role: str, text: str) -> dict[str, Any]:
    """Return one turn as templates take it: a part for each text and each image."""
    first, *rest = text.split(PLACE)
    parts = [{"type": "text", "text": first.strip()}]
    for piece in rest:
        parts += [{"type": "image"}, {"type": "text", "text": piece.strip()}]
    return {"role": role, "content": [part for part in parts if part.get("text") != ""]}


def fitted(value: Tensor, shape: list[int]) -> Tensor:
    """Return as many images, tiles or patches as there are places. Some models treat all-zero inputs as padding, so they become almost zero."""
    for axis, n in enumerate(shape):
        if value.shape[axis] != n:
            value = value.index_select(axis, torch.arange(n) % value.shape[axis])
    return value + 1e-3 if value.is_floating_point() and not value.any() else value


def export(model: Whole, name: str, folder: Path, about: dict[str, Any]) -> None:
    """Save model/ for AutoModelForImageTextToText.from_pretrained and AutoProcessor.from_pretrained, and `about` as config.json."""
    (folder / "config.json").write_text(json.dumps(about, indent=1))
    model.merged().save_pretrained(folder / "model")
    processor(name).save_pretrained(folder / "model")
