"""vlm/instruct: rows and their mask, balanced scenes, models of the hub's layout, folders of one's own, bad input."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from trainworthy.core.base.errors import UserError
from trainworthy.core.recipe.stage import Metric
from trainworthy.recipes.vision.data.pictures import decode
from trainworthy.recipes.vlm import instruct
from trainworthy.recipes.vlm.data import conversations, folders, questions, rows, scenes
from trainworthy.recipes.vlm.data.rows import Question
from trainworthy.recipes.vlm.evaluation import answers
from trainworthy.recipes.vlm.gates import fresh_export
from trainworthy.recipes.vlm.models import export_reader, small_language_model, small_vision_encoder

from tests.helpers import seeing
from tests.helpers.cards import printed
from tests.helpers.commands import read
from trainworthy import core

SCENES = scenes.Scenes("train", 200)


@pytest.fixture(scope="module")
def talker() -> nn.Module:
    """An untrained language model of the shape of ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(scenes.WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=2, initializer_range=0.3)).eval()  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ rows
def test_each_question_is_answered_as_if_it_stood_alone(talker):
    """Packed in one row, filled up, or alone: the same logits; and `right` is what greedy decoding says."""
    tokenizer = small_language_model.vocabulary()
    batch = small_language_model.stories(tokenizer, "train", range(12))
    embed = talker.get_input_embeddings()
    with torch.no_grad():
        packed = rows.answer(talker, embed(batch["ids"]), batch)
        said = packed[:, :-1].argmax(-1)
        # Half of the rows are right.
        batch["labels"][::2, 1:] = torch.where(batch["labels"][::2, 1:] >= 0, said[::2], -100)
        right = rows.right(packed, batch)
        assert right[::2].all()
        assert not right[1::2].all()
        for i in range(12):
            for q in range(1, 5):
                mine = (batch["segment"][i] == 0) | (batch["segment"][i] == q)
                alone = talker(batch["ids"][i : i + 1, mine]).logits
                assert torch.allclose(alone[0], packed[i, mine], atol=1e-5)
                answer = batch["labels"][i][batch["segment"][i] == q]
                answer = answer[answer >= 0]
                start = batch["ids"][i : i + 1, mine][:, : -len(answer)]
                if not right[i, q - 1]:
                    continue
                told = talker.generate(start, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, start.shape[1] :]
                assert told.tolist() == answer[:1].tolist()


def test_the_reader_of_an_export_computes_what_the_model_computes(talker):
    """The gate `exported` takes the first question of packed rows; pictures that the model's own code changes make another answer."""
    tokenizer = small_language_model.vocabulary()
    data = questions.Questions(SCENES, tokenizer, features=16, side=64, longest=200)
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.Flatten(2)).eval()  # (B, 3, 64, 64) -> (B, 8, 16)
    encoder.forward = lambda images, forward=encoder.forward: forward(images).mT
    encoder.side, encoder.width = 64, 8
    model = instruct.VLM(encoder, instruct.Projector(8, 16, 32, 0.3), talker).eval()
    batch = data.collate([data.get(i, None) for i in range(3)])
    asked = fresh_export.first_answers(batch, data.features)
    eyes = lambda images: model.projector(encoder(images))  # noqa: E731
    with torch.no_grad():
        ours = model(batch)
        for b, (sample, where) in enumerate(asked):
            due = ours[b, where].log_softmax(-1)
            for seen, same in ((eyes, True), (lambda images: eyes((images - 0.45) / 0.27), False)):
                found = export_reader.answer((seen, talker), sample)["log-probabilities"]
                assert torch.allclose(found, due, atol=1e-4) == same


def test_a_row_is_never_cut():
    """What does not fit is left out whole, and counted."""
    tokenizer = small_language_model.vocabulary()
    data = questions.Questions(SCENES, tokenizer, features=16, side=64, longest=38)
    assert len(data) == len(SCENES)
    assert not data.notes
    ids = data.rows[0]["ids"]
    assert (ids == rows.IMAGE).sum() == 16
    assert tokenizer.decode(data.rows[0]["labels"][data.rows[0]["labels"] >= 0]).count("<eos>") == 4

    class Long(scenes.Scenes):
        def questions(self, index: int) -> list[Question]:
            return super().questions(index) * (1 + index % 2)

    data = questions.Questions(Long("train", 200), tokenizer, features=16, side=64, longest=50)
    assert len(data) == 200
    assert "200 of 400 samples are longer than 50 tokens" in data.notes["over-long"]


def test_score_counts_pairs_with_both_right():
    found = torch.tensor([[1, 0, 7], [1, 0, 7], [1, 1, 8], [0, 1, 8], [1, 0, -1], [1, 1, 9]])
    assert questions.score(found, ("a", "b")) == {
        "accuracy": 5 / 6,
        "pairs": 0.5,
        "accuracy/a": 1.0,
        "accuracy/b": 2 / 3,
    }


def test_parts_learn_at_rates_of_their_own():
    """Each part has its groups and its rate; what requires a gradient and has no rate is refused, not left behind."""
    towers = nn.ModuleDict({"projector": nn.Linear(4, 4), "language": nn.Linear(4, 4)})
    optimizer = core.make_optimizer(towers, core.Optim(), {"projector": 1e-3, "language": 2e-5})
    named = {g["name"]: g["lr"] for g in optimizer.param_groups}
    assert named == {
        "projector.decay": 1e-3,
        "projector.no_decay": 1e-3,
        "language.decay": 2e-5,
        "language.no_decay": 2e-5,
    }
    with pytest.raises(core.UserError, match="no learning rate"):
        core.make_optimizer(towers, core.Optim(), {"projector": 1e-3})


# ---------------------------------------------------------------------------------------------------------------- scenes
def test_scenes_are_balanced_and_parted():
    """No answer from the question alone; a pair differs in what it asks about; no validation digit in a training picture."""
    counts = [Counter() for _ in scenes.QUESTIONS]
    for i in range(len(SCENES)):
        for one in SCENES.questions(i):
            counts[one.kind][one.answer] += 1
    for count, n in zip(counts, (3, 4, 10, 2), strict=True):
        assert len(count) == n
        assert max(count.values()) < 2 * min(count.values()) + 12
    for k, (one, other) in enumerate(SCENES.pairs):
        assert scenes.answers(one)[k % 4] != scenes.answers(other)[k % 4]
    train, val = (scenes.pool(s).tiles for s in ("train", "val"))
    assert not {t.tobytes() for t in train} & {t.tobytes() for t in val}
    assert torch.equal(SCENES.image(5), scenes.Scenes("train", 3).image(5))


# ------------------------------------------------------------------------------------------------ the hub's layout, offline
@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """Models and pictures on disk."""
    return seeing.write(tmp_path_factory.mktemp("hub"))


def small(hub: Path) -> tuple[str, ...]:
    return ("vlm/instruct", *seeing.settings(hub))


def test_full_trains_hub_models_on_a_folder_and_exports(hub, launch):
    """CLIP's vision part, a language model with LoRA, pictures of one's own; the export answers by torch and transformers alone."""
    done = launch("run", *small(hub), "--gates.no-enabled", "--align.epochs", "1", "--instruct.epochs", "1",
                  HF_HUB_OFFLINE="1")  # fmt: skip
    assert done.returncode == 0, done.shown
    out = done.folder()
    rows_of = read(out / "step_metrics.jsonl")
    assert {"step/lr/projector.decay", "step/lr/language.decay"} <= rows_of[0].keys()
    first = read(out / "stages" / "align" / "step_metrics.jsonl")
    assert "step/lr" in first[0]  # one tower, one rate
    assert {"accuracy", "pairs"} <= read(out / "summary.json")["metrics"].keys()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    talker = AutoModelForCausalLM.from_pretrained(out / "export" / "language").eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "export" / "language")
    eyes = torch.export.load(out / "export" / "vision.pt2").module()
    config = read(out / "export" / "config.json")
    embed = talker.get_input_embeddings()
    image = torch.rand(1, 3, config["side"], config["side"])
    first, question = torch.tensor([[tokenizer.bos_token_id]]), tokenizer("any red ?", return_tensors="pt").input_ids
    start = torch.cat([embed(first), eyes(image), embed(question)], 1)
    assert start.shape[1] == 1 + config["features"] + 3
    said = talker.generate(inputs_embeds=start, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert said.shape[0] == 1
    assert {"accuracy"} <= read(out / "summary.json")["intervals"]["val"].keys()
    predicted(out, hub, launch, talker, tokenizer, eyes, config)


def predicted(out: Path, hub: Path, launch, talker, tokenizer, eyes, config: dict) -> None:
    """`trainworthy predict` answers as the export does without this project: a question in a line, and a conversation."""
    file, name = hub / "data" / "asked.jsonl", "val-1.png"
    talk = [
        {"from": "human", "value": "<image>\nany red ?"},
        {"from": "gpt", "value": "yes"},
        {"from": "human", "value": "left colour ?"},
    ]
    rows = [{"image": name, "question": "any red ?", "answer": "no", "id": 7}, {"image": name, "conversations": talk}]
    file.write_text("\n".join(map(json.dumps, rows)))
    done = launch("predict", str(out), str(file), "--max-new-tokens", "3")
    assert done.returncode == 0, done.shown
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert (first["id"], first["reference"], first["question"]) == (7, "no", "any red ?")
    assert "reference" not in second
    assert max(first["tokens"], second["tokens"]) <= 3
    image = decode(Image.open(hub / "data" / name)).float() / 255
    image = F.interpolate(image[None], size=(config["side"],) * 2, mode="bicubic", antialias=True).clamp(0, 1)
    embed, ids = (
        talker.get_input_embeddings(),
        tokenizer("\nany red ?", add_special_tokens=False, return_tensors="pt").input_ids,
    )
    start = torch.cat([embed(torch.tensor([[tokenizer.bos_token_id]])), eyes(image), embed(ids)], 1)
    said = talker.generate(
        inputs_embeds=start, max_new_tokens=3, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
    )
    assert first["answer"] == tokenizer.decode(said[0], skip_special_tokens=True).strip()
    assert used(out, hub / "data" / name, "any red ?") == answered(out, file, rows[:1], launch)
    file.write_text(
        "\n".join(map(json.dumps, [rows[0], {"image": "nowhere.png", "question": "any red ?"}, {"prompt": "hello"}]))
    )
    refused(
        launch("predict", str(out), str(file)),
        "2 of 3 rows",
        "line 2: a picture cannot be read",
        "line 3: no image and question",
    )
    refused(launch("chat", str(out)), "answers questions about pictures", "trainworthy predict")


def used(out: Path, picture: Path, question: str) -> str:
    """What the code of the card prints for a question about a picture."""
    example = {"picture.jpg": str(picture), "What is in the picture?": question}
    return printed(out, out, **example).removesuffix("\n")


def answered(out: Path, file: Path, asked: list[dict], launch) -> str:
    """What `trainworthy predict` answers to the only row."""
    file.write_text("\n".join(map(json.dumps, asked)))
    done = launch("predict", str(out), str(file), code=0)
    return json.loads(done.stdout)["answer"]


@pytest.mark.verify
def test_full_proves_itself(hub, launch):
    done = launch("check", *small(hub), "--only", "schema,data,leakage,wiring,schedule,dependency,evaluation,accumulation,loader,"
                  "resume,towers,image-tokens,answers", HF_HUB_OFFLINE="1", timeout=550)  # fmt: skip
    assert done.returncode == 0, done.shown


# --------------------------------------------------------------------------------------------------------- conversations
def turns(*texts: str) -> list[dict]:
    """As LLaVA writes them."""
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


def messages(*texts: str | list) -> list[dict]:
    """As the hub writes them."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def spoken(i: int, split: str) -> dict:
    """One conversation in one of four ways, about one, two or three pictures of different sizes."""
    a, b = (f"{split}-{k}.{'png' if k % 2 else 'jpg'}" for k in (i, (i + 3) % 8))
    red = ("no", "yes")[i // 2 % 2]
    if i % 4 == 0:
        return {
            "image": a,
            "conversations": turns("<image>\nany red ?", red, "left colour ?", "red" if red == "yes" else "blue"),
        }
    if i % 4 == 1:
        return {
            "image": [a, b],
            "conversations": turns("<image> <image> how many ?", "two", "any red ?", red, "left colour ?"),
        }
    if i % 4 == 2:
        parts = [{"type": "image"}, {"type": "text", "text": "any red ?"}, {"type": "image", "path": b}]
        told = messages(parts, [{"type": "text", "text": red}])
        return {"messages": [{"role": "system", "content": "any left ?"}, *told], "images": [a, b]}
    return {"images": [a, b, a], "messages": messages("how many digits ?", "three")}


@pytest.fixture(scope="module")
def talked(hub) -> Path:
    """The same pictures, talked about."""
    folder = hub / "talks"
    shutil.copytree(hub / "data", folder)
    for split, n in (("train", 24), ("val", 8)):
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps(spoken(i, split)) for i in range(n)))
    return folder


def test_a_conversation_is_read_as_it_is_written(talked):
    """Places where the text has them, every answer scored with its end and nothing else; a lone question reads as ever."""
    source, tokenizer = folders.load(str(talked), "train"), small_language_model.vocabulary()
    data = questions.Questions(source, tokenizer, features=4, side=32, longest=64)
    assert [data.pictures(i) for i in range(4)] == [1, 2, 2, 3]
    shown = [tokenizer.decode(row["ids"].clamp_min(0)).replace("<pad> <pad> <pad> <pad>", "#") for row in data.rows[:4]]
    assert shown == ["<bos> # any red ? no <eos> left colour ? blue <eos>", "<bos> # # how many ? two <eos> any red ? no <eos>",
                     "<bos> any left ? # any red ? # yes <eos>", "<bos> # # # how many digits ? three <eos>"]  # fmt: skip
    said = [tokenizer.decode(row["labels"][row["labels"] >= 0]) for row in data.rows[:4]]
    assert said == ["no <eos> blue <eos>", "two <eos> no <eos>", "yes <eos>", "three <eos>"]
    batch = data.collate([data.get(i, None) for i in range(4)])
    assert batch["image"].shape == (4, 3, 3, 32, 32)
    assert not batch["image"][0, 1:].any()
    asked = Question(0, "how many digits ?", "two")
    alone = rows.pack(tokenizer, [1, rows.IMAGE, rows.IMAGE], [asked])
    same = rows.chain(tokenizer, [1], 2, "", [asked._replace(question="<image>how many digits ?")])
    assert all(torch.equal(alone[k], same[k]) for k in ("ids", "labels", "position"))


@pytest.mark.parametrize(("line", "why"), [
    ({"conversations": "hello"}, "conversations is str"),
    ({"image": "a", "conversations": [*turns("any red ?", "no"), *turns("", "no")[1:]]}, "turn 2 is of 'gpt'"),
    ({"image": "a", "conversations": turns("any red ?")}, "no answer"),
    ({"image": "a", "messages": messages("any red ?", "<image>")}, "in an answer"),
    ({"images": ["a", "b"], "messages": messages("<image>any red ?", "no", "<image>and here ?")}, "1 <image> for 2 pictures"),
    ({"image": "a", "messages": messages([{"type": "video"}], "no")}, "type 'video'"),
    ({"images": [{"bytes": ""}], "messages": messages("any red ?", "no")}, "a picture is a dict"),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_what_is_no_conversation(line, why):
    with pytest.raises(conversations.BadLine, match=why):
        conversations.conversation(line)


def test_talks_without_a_picture_are_counted(talked):
    line = {"messages": messages("any red ?", "no")}
    alone = conversations.Conversations(
        talked, [conversations.conversation(line), conversations.conversation(spoken(0, "train"))], ("any red ?",)
    )
    assert len(alone) == 1
    assert "1 of 2 conversations have no picture" in alone.note
    with pytest.raises(core.UserError, match="1 of 1 conversations have no picture"):
        conversations.Conversations(talked, [conversations.conversation(line)], ())


def test_pictures_of_a_row_are_its_own(hub, talked):
    """However many pictures the others of a batch have, a row's logits are those of the row alone."""
    cfg = instruct.full()
    cfg.encoder, cfg.language, cfg.projector_width = str(hub / "clip"), str(hub / "llama"), 32
    cfg.data.path = str(talked)
    torch.manual_seed(0)
    model = instruct.make_model(cfg).eval()
    source = folders.load(str(talked), "train")
    data = questions.Questions(source, small_language_model.vocabulary(), features=model.features, side=32, longest=128)
    with torch.no_grad():
        whole = model(data.collate([data.get(i, None) for i in range(4)]))
        for i in range(4):
            alone = model(data.collate([data.get(i, None)]))
            assert torch.allclose(alone[0], whole[i, : alone.shape[1]], atol=1e-4)


@pytest.mark.verify
def test_conversations_prove_themselves(hub, talked, launch):
    done = launch("check", *small(hub), "--data.path", str(talked), "--only", "schema,data,wiring,dependency,evaluation,"
                  "accumulation,towers,image-tokens,answers", HF_HUB_OFFLINE="1", timeout=550)  # fmt: skip
    assert done.returncode == 0, done.shown


@pytest.mark.verify
@pytest.mark.parametrize("encoder", ["cells", "clip"])
def test_the_third_stage_proves_itself(encoder, hub, launch):
    """The encoder learns, too, at a rate of its own; what it starts from is what `instruct` left."""
    argv = ("vlm/instruct",) if encoder == "cells" else small(hub)
    only = "init,wiring,dependency,resume,towers,rates,image-tokens,answers" + ",aligned,generation" * (
        encoder == "cells"
    )
    done = launch("check", *argv, "--unfreeze.epochs", "0.5", "--stage", "unfreeze", "--only", only, timeout=600)
    assert done.returncode == 0, done.shown


# ------------------------------------------------------------------------------------------------------------- bad input
def lines(*rows: object) -> str:
    return "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows)


GOOD = {"image": "train-0.jpg", "question": "any red ?", "answer": "no"}
BAD = {
    "wrong columns": (lines({"picture": "a.jpg", "question": "?", "text": "no"}),
                      ("line 1: no image and no answer", "picture, question, text", "image, question and answer")),
    "a wrong type": (lines(GOOD, {**GOOD, "answer": 3}), ("line 2", "answer 3", "each a text")),
    "an empty answer": (lines(GOOD, {**GOOD, "answer": " "}), ("line 2", "answer ' '", "each a text")),
    "an answer that must not be learnt": (lines(GOOD, {"image": "train-0.jpg", "messages": [{"role": "user", "content": "<image>any ?"},
                                          {"role": "assistant", "content": "no", "weight": 0}]}), ("line 2", "turn 1 has the weight 0")),
    "no image": (lines(GOOD, {**GOOD, "image": ""}), ("line 2", "image ''", "each a text")),
    "two places for one picture": (lines(GOOD, {**GOOD, "question": "<image> or <image> ?"}), ("line 2", "one place", "messages")),
    "no JSON": (lines(GOOD, "image: a.jpg"), ("line 2", "not JSON", "image: a.jpg")),
    "an empty file": ("", ("train.jsonl is empty",)),
    "a picture that is none": (lines(GOOD, {**GOOD, "image": "fake.png"}), ("1 of 2 lines", "line 2", "fake.png", "cannot be read")),
    "a picture that is missing": (lines(GOOD, {**GOOD, "image": "gone.png"}), ("1 of 2 lines", "gone.png")),
    "talks that are none": (
        lines({"conversations": turns("<image>any red ?", "no")},
              {"image": "train-0.jpg", "conversations": turns("<image> or <image> ?", "no")},
              {"images": ["train-0.jpg"], "messages": messages("any red ?", "")}),
        ("3 of 3 lines", "line 1 and 1 more: 1 <image> for 0 pictures", "line 3: turn 1, of the assistant, is empty"),
    ),
    "all kinds at once": (
        lines(GOOD, {**GOOD, "answer": 3}, "image: a.jpg", GOOD, {**GOOD, "answer": ""}, {**GOOD, "image": "gone.png"}, *[GOOD] * 6),
        ("4 of 12 lines", "line 2 and 1 more: answer is no text, or empty (answer 3)", "line 3: not JSON", "line 6: a picture is not there",
         "--data.max-bad 0.334 leaves them out"),
    ),
}  # fmt: skip


def refused(done, *said: str) -> None:
    assert done.returncode == 2, done.shown
    assert "Traceback" not in done.stderr, done.stderr
    assert not [w for w in said if w not in done.stderr], done.stderr


@pytest.mark.parametrize("what", BAD)
def test_bad_folders_are_told(what: str, hub, launch, tmp_path):
    text, said = BAD[what]
    folder = tmp_path / "data"
    shutil.copytree(hub / "data", folder)
    (folder / "train.jsonl").write_text(text)
    (folder / "fake.png").write_text("no picture")
    refused(launch("check", *small(hub), "--data.path", str(folder), HF_HUB_OFFLINE="1"), *said)


def test_words_that_the_language_model_does_not_know_are_refused(hub, launch, tmp_path):
    """They were learnt as <pad>, and every gate passed."""
    folder = tmp_path / "data"
    shutil.copytree(hub / "data", folder)
    (folder / "train.jsonl").write_text(lines(GOOD, {**GOOD, "answer": "a wall of bricks"}))
    done = launch("data", "vlm/instruct", "--data.path", str(folder), HF_HUB_OFFLINE="1")
    refused(
        done,
        "--language words has no tokens",
        "1 of 2 answers, the first: 'a wall of bricks'",
        "--language NAME_OR_FOLDER",
    )


def test_own_lines_are_read_before_a_model_is_trained_for_them(tmp_path, monkeypatch):
    """The packaged encoder and language model take minutes to train on first use."""
    folder = tmp_path / "data"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    rows = [{"image": "a.png", "question": "what is it?", "answer": "a wall"}] * 2
    for split in ("train", "val"):
        (folder / f"{split}.jsonl").write_text(lines(*rows))
    cfg = instruct.tiny()
    cfg.data.path = str(folder)
    for module in (small_vision_encoder, small_language_model):
        monkeypatch.setattr(module, "folder", lambda: pytest.fail("a model is trained"))
    with pytest.raises(UserError, match="--language words has no tokens"):
        instruct.make_model(cfg)
    (folder / "val.jsonl").write_text("[]")
    folders.splits.cache_clear()
    with pytest.raises(UserError, match="is empty"):
        instruct.make_model(cfg)


def test_bad_lines_are_left_out_and_counted(hub, launch, tmp_path):
    """Those that `--data.max-bad` allows, in both files, and a last question without an answer."""
    folder = tmp_path / "data"
    shutil.copytree(hub / "data", folder)
    learn, held_out = (folder / f"{split}.jsonl" for split in ("train", "val"))
    open_end = {
        "image": "train-0.jpg",
        "conversations": turns("<image>any red ?", "no", "left colour ?"),
        "topic": "colours",
    }
    learn.write_text(lines(*learn.read_text().splitlines(), "image: a.jpg", {**GOOD, "image": "gone.png"}, open_end))
    held_out.write_text(lines(*held_out.read_text().splitlines(), {**GOOD, "answer": ""}))
    n = len(learn.read_text().splitlines())
    done = launch("data", *small(hub), "--data.path", str(folder), "--data.max-bad", "0.2", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.shown
    shown = " ".join(done.stdout.split())
    for said in (f"2 of {n} lines of", f"line {n - 2}: not JSON", f"line {n - 1}: a picture is not there (gone.png",
                 "answer is no text, or empty", "end with a question that has no answer",
                 "columns of train.jsonl that are not read: topic"):  # fmt: skip
        assert said in shown, done.stdout


def test_one_json_list_as_llava_publishes_it(hub, launch, tmp_path):
    """`--data.path` is the file, `--data.images` the folder that it names pictures from; a twentieth of the pictures is held out."""
    (tmp_path / "pictures").mkdir()
    row = {"conversations": turns("<image>\nany red ?", "no")}
    names = [f"{i}.jpg" for i in range(120)]
    for name in names:  # no two are copies of one picture
        (tmp_path / "pictures" / name).write_bytes((hub / "data" / "train-0.jpg").read_bytes() + name.encode())
    rows = [{"id": name, "image": name, **row} for name in names]
    file, talk = tmp_path / "llava.json", {"conversations": turns("who are you ?", "no")}
    file.write_text(json.dumps([*rows, talk, {"image": "gone.jpg", **row}], indent=1))
    own = (*small(hub), "--data.path", str(file), "--data.images", str(tmp_path / "pictures"))
    done = launch("data", *own, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.shown
    shown = " ".join(done.stdout.split())
    assert "1 of 122 rows of" in shown, done.stdout
    assert "row 122: a picture is not there (gone.jpg" in shown
    assert "1 of" in shown
    assert "conversations have no picture and are left out" in shown
    splits = [folders.load(str(file), split, "", 0.01, str(tmp_path / "pictures")) for split in ("train", "val")]
    assert sum(map(len, splits)) == 120
    assert 0 < len(splits[1]) < 20
    refused(launch("data", *own[:-2], HF_HUB_OFFLINE="1"), "--data.images FOLDER: no picture is found from")
    file.with_name("train.json").write_text(json.dumps(rows))  # a folder with such a file is one with train.jsonl
    assert len(folders.load(str(tmp_path), "train", "0.1", images=str(tmp_path / "pictures"))) > 90
    file.write_text(json.dumps(rows)[:-9])
    refused(launch("check", *own, HF_HUB_OFFLINE="1"), "llava.json")
    refused(launch("check", *own[:-1], "nowhere", HF_HUB_OFFLINE="1"), "nowhere: there is no such folder")


def test_a_projector_alone_need_not_learn_answers_of_several_words():
    """`No, it is green.` from a frozen language model that somebody else trained: the loss must fall to half, as for longer texts."""
    accuracy = Metric("accuracy", "?", floor=0.3, ceiling=1.0)
    needed = {words: answers.expected("align", accuracy, lambda batch: 2.0, in_words=words) for words in (False, True)}
    assert needed[False].overfit_metric == 0.9
    assert (needed[True].overfit_metric, needed[True].loss_floor({})) == (0.0, 2.0)
    assert answers.expected("instruct", accuracy, lambda batch: 2.0, in_words=True).overfit_metric is None


def test_copies_of_a_picture_stay_on_one_side(tmp_path):
    """Under any names: LLaVA's mixtures have the pictures of one set in several folders."""
    lines_of = [{"image": f"{folder}{i}.png", "question": "x", "answer": "a"} for folder in "ab" for i in range(200)]
    for line in lines_of:
        (tmp_path / line["image"]).write_bytes(f"picture {line['image'][1:]:>9}".encode())
    same = folders.copies(tmp_path, [line["image"] for line in lines_of])
    assert [same[f"{folder}7.png"] for folder in "ab"] == ["a7.png"] * 2
    out = folders.held_out(lines_of, 0.25, same)
    assert out[:200] == out[200:]
    assert out[:200] == folders.held_out(lines_of[:200], 0.25), "without copies the split is as before"
    assert folders.held_out(lines_of, 0.25)[200:] != out[:200]


def test_a_share_of_the_pictures_or_a_file_is_held_out(hub, launch, tmp_path):
    """Lines of one picture, and both of a counterfactual pair, stay on one side; test.jsonl is evaluated once, at the end."""
    ours = [{"image": f"{i}.png", "question": q, "answer": "a", "pair": f"{i // 2}"} for i in range(400) for q in "xy"]
    out = folders.held_out(ours, 0.25)
    assert 0.15 < sum(out) / len(out) < 0.35
    sides = {}
    for line, held in zip(ours, out, strict=True):
        sides.setdefault(line["pair"], set()).add(held)
    assert all(len(s) == 1 for s in sides.values())
    folder = tmp_path / "data"
    shutil.copytree(hub / "data", folder)
    (folder / "val.jsonl").rename(folder / "test.jsonl")
    own = ("--data.path", str(folder), "--data.val")
    done = launch("data", *small(hub), *own, "0.3", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.shown
    assert " test" in done.stdout
    done = launch("data", *small(hub), *own, str(folder / "test.jsonl"), HF_HUB_OFFLINE="1")
    assert "same input   8 of 8" in done.stdout.split("test in val")[1], "the same file twice"
    refused(launch("check", *small(hub), *own, "2", HF_HUB_OFFLINE="1"), "--data.val is not a share", "less than 1")
    refused(
        launch("check", *small(hub), "--data.path", "scenes", "--data.val", "0.3"),
        "--data.val is for pictures of your own",
    )


@pytest.mark.parametrize(("argv", "said"), [
    (("--data.max-length", "20"), ("no sample fits", "--data.max-length of at least", "left out")),
    (("--data.path", "nowhere"), ("there is no nowhere/train.jsonl", "train.jsonl and val.jsonl")),
    (("--encoder", "nobody/no-such-encoder"), ("--encoder nobody/no-such-encoder cannot be fetched", "--encoder FOLDER")),
    (("--language", "nobody/no-such-model"), ("--language nobody/no-such-model cannot be fetched", "--language FOLDER")),
], ids=["over-long", "no folder", "no encoder", "no language model"])  # fmt: skip
def test_bad_settings_are_told(argv, said, hub, launch):
    refused(launch("check", *small(hub), *argv, HF_HUB_OFFLINE="1"), *said)


def test_a_model_folder_without_its_weights_is_told(hub, launch, tmp_path):
    broken = tmp_path / "llama"
    shutil.copytree(hub / "llama", broken)
    (broken / "model.safetensors").unlink()
    refused(
        launch("check", *small(hub), "--language", str(broken), HF_HUB_OFFLINE="1"),
        "a file is missing",
        "model.safetensors",
    )


def test_stage_two_refuses_to_go_first(hub, launch, fork):
    """A fork without stage one, or a projector of another width, gets one message."""
    fork(("STAGES = [align, instruct, unfreeze]\n", "STAGES = [instruct]\n"), recipe="vlm/instruct")
    refused(
        launch("check", "mine.py", *small(hub)[1:], HF_HUB_OFFLINE="1"),
        "no projector to start from",
        "--align.epochs 0.5",
    )
    fork(("Projector(encoder.width, cfg.projector_width, embedding.shape[1], rms)",
          "Projector(encoder.width, cfg.projector_width, 48, rms)"), recipe="vlm/instruct")  # fmt: skip
    refused(launch("check", "mine.py", *small(hub)[1:], HF_HUB_OFFLINE="1"), "does not fit", "embeddings of 48", "32")
