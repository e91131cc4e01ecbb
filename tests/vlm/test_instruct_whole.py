"""vlm/instruct --model: models of the hub with their processors (hub_models.py), tiny, on pictures of one's own."""

from pathlib import Path

import pytest
import torch
from trainworthy.core.base.errors import UserError
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.vlm.data import folders, rows
from trainworthy.recipes.vlm.models import hub as whole

from tests.helpers.commands import read
from tests.vlm import hub_models
from tests.vlm.test_instruct import answered, hub, refused, talked, used  # noqa: F401


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("models")
    for make in hub_models.KINDS:
        hub_models.written(make, home)
    return home


def data(model: Path, folder: Path, longest: int = 512) -> tuple[whole.Whole, whole.Templated]:
    net = whole.Whole(str(model)).eval()
    return net, whole.Templated(folders.load(str(folder), "train"), str(model), takes=net.reads, longest=longest)


NAMES = [make.__name__ for make in hub_models.KINDS]


@pytest.mark.parametrize("name", NAMES)
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
            .masked_fill(found.rows[i]["ids"] == rows.IMAGE, whole.feature_id(found.processor))
            .tolist()
        )
        ended = (
            [t for t in ids if t != 2] if name in ("llava", "llava_next") else ids
        )  # the ends that its template has not
        assert ended == made["input_ids"][0].tolist()
        if ended == ids:
            with torch.no_grad():
                assert torch.allclose(net(found.collate([found.get(i, None)])), net.net[0](**made).logits, atol=1e-5)
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
    ("name", "rank"), [("llava", 0), *(pytest.param(n, 2, marks=pytest.mark.verify) for n in NAMES[1:])]
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


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.verify] * (n != "gemma3")) for n in NAMES])
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


def test_a_prefix_language_model_is_refused(models, talked, launch, tmp_path):  # noqa: F811
    """PaliGemma's mask lets every token of a prefix see the others; in a conversation, those would be answers."""
    folder = hub_models.written(hub_models.paligemma, tmp_path)
    refused(launch("check", *settings(folder, talked), HF_HUB_OFFLINE="1"), "prefix language model", "token_type_ids")


def test_a_processor_that_needs_another_package_names_it(models, monkeypatch):
    def lacking(_name: str) -> None:
        raise ImportError(
            "Package `num2words` is required to run SmolVLM processor.\nInstall it with `pip install num2words`."
        )

    monkeypatch.setattr(whole.AutoProcessor, "from_pretrained", lacking)
    with pytest.raises(UserError, match="pip install num2words"):
        whole.processor.__wrapped__(str(models / "idefics"))
