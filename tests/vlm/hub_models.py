"""Vision-language models of the hub, tiny: random weights from their published configuration classes, with their own processors and the form
of their published chat templates. One token is one word, so templates have spaces where the published ones have none."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers as t
from trainworthy.recipes.vlm.models import small_language_model

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# What llava-hf and HuggingFaceM4 ship, shortened: the first ends no answer.
LLAVA = ("{% for m in messages %}{{ m['role'].upper() + ' : ' if m['role'] != 'system' else '' }}{% for c in m['content'] %}"
         "{{ '<image> ' if c['type'] == 'image' else '' }}{% endfor %}{% for c in m['content'] %}{{ c['text'] + ' ' if "
         "c['type'] == 'text' else '' }}{% endfor %}{% endfor %}{{ 'ASSISTANT :' if add_generation_prompt else '' }}")  # fmt: skip
IDEFICS = ("<bos>{% for m in messages %}{{ m['role'] | capitalize }}{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}"
           "{% for c in m['content'] %}{{ '<image>' if c['type'] == 'image' else c['text'] }}{% endfor %}<end_of_utterance>\n"
           "{% endfor %}{{ 'Assistant:' if add_generation_prompt else '' }}")  # fmt: skip
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
          "{{ 'PLACE' if c['type'] == 'image' else c['text'] }}{% endfor %}"
          "<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}")  # fmt: skip
GEMMA = ("<bos>{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'][0]['text'] + '\n\n' %}"
         "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
         "{% for m in rest %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ first if loop.first else '' }}"
         "{% for c in m['content'] %}{{ '<start_of_image>' if c['type'] == 'image' else c['text'] | trim }}{% endfor %}<end_of_turn>\n"
         "{% endfor %}{{ '<start_of_turn>model\n' if add_generation_prompt else '' }}")  # fmt: skip
MISTRAL = ("<bos>{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'][0]['text'] }}<eos>{% else %}"
           "{{ '[SYSTEM_PROMPT] ' if m['role'] == 'system' else '[INST] ' }}{% for c in m['content'] %}"
           "{{ '[IMG]' if c['type'] == 'image' else c['text'] }}{% endfor %}"
           "{{ ' [/SYSTEM_PROMPT]' if m['role'] == 'system' else ' [/INST]' }}{% endif %}{% endfor %}")  # fmt: skip


def vocabulary(words: Sequence[str], **named: str) -> t.PreTrainedTokenizerFast:
    """A token for each word; `named` are those that processors know by an attribute of the tokenizer."""
    tokenizer = small_language_model.vocabulary()
    tokenizer.add_special_tokens({"additional_special_tokens": [*named.values(), *words]})
    return t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", extra_special_tokens=named
    )  # fmt: skip


def llava(folder: Path) -> None:
    tokenizer = vocabulary(["<image>", "USER", "ASSISTANT", ":"])
    pictures = t.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    t.LlavaProcessor(pictures, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
                     chat_template=LLAVA).save_pretrained(folder)  # fmt: skip
    text = t.LlamaConfig(vocab_size=len(tokenizer), **SMALL, **IDS)
    t.LlavaForConditionalGeneration(t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**SMALL, image_size=32, patch_size=8), text_config=text, vision_feature_layer=-1,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"))).save_pretrained(folder)  # fmt: skip


def llava_next(folder: Path) -> None:
    """A picture is cut into tiles, whose grid follows its aspect ratio, and a learnt vector ends each line."""
    tokenizer = vocabulary(["<image>", "USER", "ASSISTANT", ":"])
    grid = [[32, 64], [64, 32], [64, 64]]
    pictures = t.LlavaNextImageProcessor(size={"shortest_edge": 32}, crop_size=32, image_grid_pinpoints=grid)
    t.LlavaNextProcessor(pictures, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
                         chat_template=LLAVA).save_pretrained(folder)  # fmt: skip
    t.LlavaNextForConditionalGeneration(t.LlavaNextConfig(
        vision_config=t.CLIPVisionConfig(**SMALL, image_size=32, patch_size=8), image_grid_pinpoints=grid, image_seq_length=16,
        text_config=t.LlamaConfig(vocab_size=len(tokenizer), **SMALL, **IDS), vision_feature_layer=-1,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"))).save_pretrained(folder)  # fmt: skip


def llava_onevision(folder: Path) -> None:
    tokenizer = vocabulary(["<image>", "<video>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant"])
    grid = [[32, 32], [32, 64], [64, 32], [64, 64]]
    pictures = t.LlavaOnevisionImageProcessor(size={"height": 32, "width": 32}, image_grid_pinpoints=grid)
    t.LlavaOnevisionProcessor(pictures, tokenizer, t.LlavaOnevisionVideoProcessor(size={"height": 32, "width": 32}), num_image_tokens=16,
                              vision_feature_select_strategy="full",
                              chat_template=CHATML.replace("PLACE", "<image>")).save_pretrained(folder)  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids
    t.LlavaOnevisionForConditionalGeneration(t.LlavaOnevisionConfig(
        vision_config=t.SiglipVisionConfig(**SMALL, image_size=32, patch_size=8, vision_use_head=False), image_grid_pinpoints=grid,
        text_config=t.Qwen2Config(vocab_size=len(tokenizer), **SMALL, **IDS, num_key_value_heads=2),
        image_token_index=ids("<image>"), video_token_index=ids("<video>"))).save_pretrained(folder)  # fmt: skip


def idefics(folder: Path) -> None:
    """Pictures above 32 pixels are cut into tiles, so that every size has another number of places."""
    tokenizer = vocabulary(
        [
            "User",
            "Assistant",
            ":",
            "<global-img>",
            "\n",
            *(f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)),
        ]
    )
    pictures = t.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = t.Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=IDEFICS)
    processor.save_pretrained(folder)
    t.Idefics3ForConditionalGeneration(t.Idefics3Config(
        vision_config={**SMALL, "image_size": 32, "patch_size": 8}, scale_factor=2, image_token_id=processor.image_token_id,
        text_config={"model_type": "llama", **SMALL, **IDS, "vocab_size": len(tokenizer)}, pad_token_id=0)).save_pretrained(folder)  # fmt: skip


def smolvlm(folder: Path) -> None:
    rows = [f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)]
    tokenizer = vocabulary(["User", "Assistant", ":", "\n", "<end_of_utterance>", *rows], image_token="<image>",
                           fake_image_token="<fake_token_around_image>", global_image_token="<global-img>")  # fmt: skip
    pictures = t.SmolVLMImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = t.SmolVLMProcessor(
        pictures, tokenizer, t.SmolVLMVideoProcessor(), image_seq_len=4, chat_template=IDEFICS
    )
    processor.save_pretrained(folder)
    t.SmolVLMForConditionalGeneration(t.SmolVLMConfig(
        vision_config={**SMALL, "image_size": 32, "patch_size": 8}, scale_factor=2, image_token_id=processor.image_token_id,
        text_config={"model_type": "llama", **SMALL, **IDS, "vocab_size": len(tokenizer)}, pad_token_id=0)).save_pretrained(folder)  # fmt: skip


def _qwen(
    folder: Path, kind: str, family: str, vision: dict[str, Any], rope: dict[str, Any], patch: int, **sizes: Any
) -> None:
    marks = {name: f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    tokenizer = vocabulary(["<|im_start|>", "<|im_end|>", *marks.values(), "system", "user", "assistant"])
    pictures = t.Qwen2VLImageProcessor(patch_size=patch, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64})
    video = getattr(t, f"{family}VideoProcessor")(patch_size=patch)
    template = CHATML.replace("PLACE", "<|vision_start|><|image_pad|><|vision_end|>")
    getattr(t, f"{kind}Processor")(pictures, tokenizer, video, chat_template=template).save_pretrained(folder)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    ids = {name.replace("_pad", ""): i for name, i in ids.items()}
    getattr(t, f"{kind}ForConditionalGeneration")(getattr(t, f"{kind}Config")(
        text_config={**SMALL, **IDS, "num_key_value_heads": 2, "vocab_size": len(tokenizer), "rope_parameters": rope, **sizes},
        vision_config={**vision, "patch_size": patch}, **ids)).save_pretrained(folder)  # fmt: skip


ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}


def qwen(folder: Path) -> None:
    """Its projector is a part of the vision tower, and a picture has as many patches as it is large."""
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    _qwen(folder, "Qwen2VL", "Qwen2VL", vision, ROPE, 8)


def qwen2_5(folder: Path) -> None:
    """Its vision tower attends in windows, but for some layers."""
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32, "window_size": 32,
              "fullatt_block_indexes": [1]}  # fmt: skip
    _qwen(folder, "Qwen2_5_VL", "Qwen2VL", vision, ROPE, 8)


def qwen3(folder: Path) -> None:
    """Its language model takes features of several layers of the vision tower."""
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 64,
              "deepstack_visual_indexes": [0]}  # fmt: skip
    _qwen(folder, "Qwen3VL", "Qwen3VL", vision, ROPE | {"mrope_interleaved": True}, 8, head_dim=16)


def gemma3(folder: Path) -> None:
    """The template's placeholder is another token than that of a picture's features, which see each other both ways."""
    tokenizer = vocabulary(["<start_of_turn>", "<end_of_turn>", "model", "user"], image_token="<image_soft_token>",
                           boi_token="<start_of_image>", eoi_token="<end_of_image>")  # fmt: skip
    pictures = t.Gemma3ImageProcessor(size={"height": 32, "width": 32})
    t.Gemma3Processor(pictures, tokenizer, chat_template=GEMMA, image_seq_length=4).save_pretrained(folder)
    text = {**SMALL, **IDS, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer), "sliding_window": 32,
            "query_pre_attn_scalar": 16}  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids
    t.Gemma3ForConditionalGeneration(t.Gemma3Config(
        text_config=text, vision_config={**SMALL, "image_size": 32, "patch_size": 8}, mm_tokens_per_image=4,
        image_token_index=ids("<image_soft_token>"), boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"))).save_pretrained(folder)  # fmt: skip


def internvl(folder: Path) -> None:
    tokenizer = vocabulary(["<|im_start|>", "<|im_end|>", "system", "user", "assistant"], start_image_token="<img>", end_image_token="</img>",
                           context_image_token="<IMG_CONTEXT>", video_token="<video>")  # fmt: skip
    pictures = t.GotOcr2ImageProcessor(size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4)
    video = t.InternVLVideoProcessor(size={"height": 32, "width": 32})
    t.InternVLProcessor(pictures, tokenizer, video, image_seq_length=4,
                        chat_template=CHATML.replace("PLACE", "<IMG_CONTEXT>")).save_pretrained(folder)  # fmt: skip
    t.InternVLForConditionalGeneration(t.InternVLConfig(
        vision_config={**SMALL, "image_size": [32, 32], "patch_size": [8, 8]}, image_seq_length=4,
        text_config={"model_type": "qwen2", **SMALL, **IDS, "num_key_value_heads": 2, "vocab_size": len(tokenizer)},
        image_token_id=tokenizer.context_image_token_id)).save_pretrained(folder)  # fmt: skip


def mistral3(folder: Path) -> None:
    """Every line of patches ends with a token of its own, and the last with another."""
    tokenizer = vocabulary(
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    )
    pictures = t.PixtralImageProcessor(size={"longest_edge": 32}, patch_size=8)
    t.PixtralProcessor(pictures, tokenizer, patch_size=8, spatial_merge_size=2, chat_template=MISTRAL).save_pretrained(
        folder
    )
    t.Mistral3ForConditionalGeneration(t.Mistral3Config(
        vision_config={"model_type": "pixtral", **SMALL, "image_size": 32, "patch_size": 8, "head_dim": 16},
        text_config={"model_type": "mistral", **SMALL, **IDS, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": len(tokenizer)},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"), spatial_merge_size=2)).save_pretrained(folder)  # fmt: skip


def paligemma(folder: Path) -> None:
    """Answers are marked for its mask (a prefix language model), and it has no conversations; this template is ours."""
    tokenizer = vocabulary(["<start_of_turn>", "<end_of_turn>", "model", "user"], image_token="<image>")
    pictures = t.SiglipImageProcessor(size={"height": 32, "width": 32})
    pictures.image_seq_length = 16
    template = GEMMA.replace("<start_of_image>", "<image>")
    t.PaliGemmaProcessor(pictures, tokenizer, chat_template=template).save_pretrained(folder)
    text = {
        "model_type": "gemma",
        **SMALL,
        **IDS,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
    }
    t.PaliGemmaForConditionalGeneration(t.PaliGemmaConfig(
        text_config=text, vision_config={"model_type": "siglip_vision_model", **SMALL, "image_size": 32, "patch_size": 8},
        image_token_index=tokenizer.image_token_id, projection_dim=32, hidden_size=32)).save_pretrained(folder)  # fmt: skip


KINDS: tuple[Callable[[Path], None], ...] = (
    llava, llava_next, llava_onevision, idefics, *([smolvlm] if find_spec("num2words") else []), qwen, qwen2_5, qwen3, gemma3, internvl,
    mistral3,
)  # fmt: skip
"""Without the package num2words there is no SmolVLM."""


def written(make: Callable[[Path], None], home: Path) -> Path:
    """The folder of a model as the hub has it."""
    torch.manual_seed(0)
    make(home / make.__name__)
    return home / make.__name__
