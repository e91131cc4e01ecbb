"""vlm/instruct --model: models of the hub with their processors (LLaVA, Idefics3, Qwen2-VL), tiny, on pictures of one's own."""

from pathlib import Path

import pytest
import torch
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.vlm.data import folders, rows
from trainworthy.recipes.vlm.models import hub as whole
from trainworthy.recipes.vlm.models import small_language_model

from tests.helpers.commands import read
from tests.vlm.test_instruct import answered, hub, refused, talked, used  # noqa: F401

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
# What llava-hf and HuggingFaceM4 ship, shortened: the first ends no answer.
LLAVA = ("{% for m in messages %}{{ m['role'].upper() + ' : ' if m['role'] != 'system' else '' }}{% for c in m['content'] %}"
         "{{ '<image> ' if c['type'] == 'image' else '' }}{% endfor %}{% for c in m['content'] %}{{ c['text'] + ' ' if "
         "c['type'] == 'text' else '' }}{% endfor %}{% endfor %}{{ 'ASSISTANT :' if add_generation_prompt else '' }}")  # fmt: skip
IDEFICS = ("<bos>{% for m in messages %}{{ m['role'] | capitalize }}{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}"
           "{% for c in m['content'] %}{{ '<image>' if c['type'] == 'image' else c['text'] }}{% endfor %}<end_of_utterance>\n"
           "{% endfor %}{{ 'Assistant:' if add_generation_prompt else '' }}")  # fmt: skip


def llava(folder: Path) -> None:
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = small_language_model.vocabulary()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "USER", "ASSISTANT", ":"]})
    pictures = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    LlavaProcessor(pictures, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
                   chat_template=LLAVA).save_pretrained(folder)  # fmt: skip
    text = LlamaConfig(vocab_size=len(tokenizer), **SMALL, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    LlavaForConditionalGeneration(LlavaConfig(
        vision_config=CLIPVisionConfig(**SMALL, image_size=32, patch_size=8), text_config=text, vision_feature_layer=-1,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"))).save_pretrained(folder)  # fmt: skip


def idefics(folder: Path) -> None:
    """Pictures above 32 pixels are cut into tiles, so that every size has another number of places."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
    )

    tokenizer = small_language_model.vocabulary()
    tokenizer.add_special_tokens({"additional_special_tokens": ["User", "Assistant", ":", "<global-img>", "\n", *(
        f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6))]})  # fmt: skip
    pictures = Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=IDEFICS)
    processor.save_pretrained(folder)
    Idefics3ForConditionalGeneration(Idefics3Config(
        vision_config={**SMALL, "image_size": 32, "patch_size": 8}, scale_factor=2, image_token_id=processor.image_token_id,
        text_config={"model_type": "llama", **SMALL, "vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2,
                     "pad_token_id": 0}, pad_token_id=0)).save_pretrained(folder)  # fmt: skip


QWEN = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
        "{{ '<|vision_start|><|image_pad|><|vision_end|>' if c['type'] == 'image' else c['text'] }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}")  # fmt: skip


def qwen(folder: Path) -> None:
    """Its projector is a part of the vision tower, and a picture has as many patches as it is large."""
    from transformers import (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = small_language_model.vocabulary()
    marks = {name: f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *marks.values(), "system", "user",
                                                                "assistant"]})  # fmt: skip
    pictures = Qwen2VLImageProcessor(patch_size=8, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64})
    Qwen2VLProcessor(pictures, tokenizer, Qwen2VLVideoProcessor(patch_size=8), chat_template=QWEN).save_pretrained(
        folder
    )
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    Qwen2VLForConditionalGeneration(Qwen2VLConfig(
        text_config={**SMALL, "num_key_value_heads": 2, "vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2,
                     "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8},
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"])).save_pretrained(folder)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("models")
    for make in (llava, idefics, qwen):
        torch.manual_seed(0)
        make(home / make.__name__)
    return home


def data(model: Path, folder: Path, longest: int = 512) -> tuple[whole.Whole, whole.Templated]:
    net = whole.Whole(str(model)).eval()
    return net, whole.Templated(folders.load(str(folder), "train"), str(model), takes=net.reads, longest=longest)


@pytest.mark.parametrize("name", ["llava", "idefics", "qwen"])
def test_rows_are_the_processors_own(name, models, talked):  # noqa: F811
    """Token by token what `apply_chat_template` makes of the conversation with its pictures; the answers alone are scored; a batch
    of several sizes has each row's own logits."""
    net, found = data(models / name, talked)
    for i in range(4):
        turns = [whole.turn("system", found.source.system(i))] if found.source.system(i) else []
        for one in found.source.questions(i):
            turns += [whole.turn("user", one.question), whole.turn("assistant", one.answer)]
        images = iter(found.source.images(i))
        for part in (p for t in turns for p in t["content"] if p["type"] == "image"):
            part["image"] = next(images)
        made = found.processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
        ids = (
            found.rows[i]["ids"]
            .masked_fill(found.rows[i]["ids"] == rows.IMAGE, found.processor.image_token_id)
            .tolist()
        )
        ended = [t for t in ids if t != 2] if name == "llava" else ids  # the ends that its template has not
        assert ended == made["input_ids"][0].tolist()
        labels = found.rows[i]["labels"]
        said = found.tokenizer.decode(labels[labels >= 0]).split()
        assert said == " ".join(f"{one.answer} {found.end}" for one in found.source.questions(i)).split()
    batch = found.collate([found.get(i, None) for i in range(4)])
    with torch.no_grad():
        logits = net(batch)
        for i in range(4):
            alone = net(found.collate([found.get(i, None)]))
            assert torch.allclose(alone[0], logits[i, : alone.shape[1]], atol=1e-4)
        for view in (View(found, range(4), blank=("pixel_values",)), View(found, range(4), swap=[1, 2, 3, 0])):
            assert net(view.collate([view.get(i, None) for i in range(4)])).shape == logits.shape
    short = len(found.rows[0]["ids"]) + 1
    _, few = data(models / name, talked, longest=short)
    assert 0 < len(few) < 24
    assert f"{24 - len(few)} of 24 samples are longer than {short} tokens" in few.notes["over-long"]


def settings(model: Path, folder: Path, *more: str) -> tuple[str, ...]:
    return ("vlm/instruct", "--preset", "full", "--model", str(model), "--data.path", str(folder), "--train.precision", "fp32",
            "--loader.workers", "0", "--loader.eval-workers", "0", "--run.no-tensorboard", "--run.threads", "1",
            "--instruct.batch-size", "8", *more)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rank"), [("llava", 0), *(pytest.param(n, 2, marks=pytest.mark.verify) for n in ("idefics", "qwen"))]
)
def test_a_hub_model_trains_and_is_loaded_again(name, rank, models, talked, launch):  # noqa: F811
    """Its vision tower stays bit for bit, its projector and language model learn, and transformers alone reads what comes out."""
    done = launch("run", *settings(models / name, talked, "--lora-rank", str(rank)), "--gates.no-enabled", "--align.epochs", "0",
                  HF_HUB_OFFLINE="1")  # fmt: skip
    assert done.returncode == 0, done.shown
    out = done.folder()
    first = read(out / "step_metrics.jsonl")[0]
    assert {"step/lr/projector.decay", "step/lr/language.decay"} <= first.keys()
    assert "accuracy" in read(out / "summary.json")["metrics"]

    from transformers import AutoModelForImageTextToText, AutoProcessor

    old, new = (AutoModelForImageTextToText.from_pretrained(p) for p in (models / name, out / "export" / "model"))
    was, now = (whole.towers(net, name) for net in (old, new))
    for tower, moved in (("encoder", False), ("projector", True), ("language", True)):
        before, kept = was[tower].state_dict(), now[tower].state_dict()
        assert before.keys() == kept.keys()
        own = [
            k for k in kept if tower != "encoder" or not k.startswith("merger.")
        ]  # Qwen's projector is a part of what sees
        assert moved != all(torch.equal(before[k], kept[k]) for k in own)
    ready = AutoProcessor.from_pretrained(out / "export" / "model")
    image = torch.randint(0, 255, (3, 40, 50), dtype=torch.uint8)
    asked = ready.apply_chat_template(
        [whole.turn("user", f"{rows.PLACE} any red ?")], add_generation_prompt=True, tokenize=False
    )
    given = ready(text=[asked], images=[[image]], return_tensors="pt")
    assert new.generate(**given, max_new_tokens=2, do_sample=False).shape[0] == 1
    picture = next(talked.glob("*.png"))
    row = {"image": picture.name, "question": "any red ?"}
    assert used(out, picture, "any red ?") == answered(out, talked / "asked.jsonl", [row], launch)


GATES = "schema,data,wiring,schedule,dependency,evaluation,accumulation,loader,resume,init,towers,rates,image-tokens,answers"


@pytest.mark.verify
@pytest.mark.parametrize("name", ["llava", "idefics", "qwen"])
def test_a_hub_model_proves_itself(name, models, talked, launch):  # noqa: F811
    done = launch("check", *settings(models / name, talked, "--align.epochs", "0"), "--only", GATES, HF_HUB_OFFLINE="1",
                  timeout=550)  # fmt: skip
    assert done.returncode == 0, done.shown


@pytest.mark.verify
def test_what_is_no_vision_language_model_is_told(hub, models, launch):  # noqa: F811
    refused(
        launch("check", *settings(hub / "llama", hub / "data"), HF_HUB_OFFLINE="1"),
        "a file is missing",
        "processor_config.json",
    )
