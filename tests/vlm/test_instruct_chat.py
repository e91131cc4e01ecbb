"""vlm/instruct with a language model that has a chat template: rows, gates, long answers, files read when they are needed."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.vlm.data import conversations, folders, questions, rows, turns
from trainworthy.recipes.vlm.data.rows import Question
from trainworthy.recipes.vlm.models import small_language_model

from tests.helpers import language, seeing
from tests.helpers.commands import read
from tests.vlm.test_instruct import answered, messages, used

LLAMA3 = ("{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}")  # fmt: skip
THINKS = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n"
          "{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """clip/ and data/ as ever, chat/ with a chat template."""
    home = seeing.write(tmp_path_factory.mktemp("hub"))
    language.write(home / "chat", hidden_size=32)
    return home


def small(hub: Path, *more: str) -> tuple[str, ...]:
    return ("vlm/instruct", *seeing.settings(hub), "--language", str(hub / "chat"), *more)


def tokenizer(template: str = "", **tokens: str):
    """The bytes of tests/helpers/language, with another template or other special tokens."""
    found = copy.deepcopy(language.tokenizer())
    found.chat_template = template or found.chat_template
    for name, value in tokens.items():
        setattr(found, name, value)
    return found


# ------------------------------------------------------------------------------------------------------------------ rows
def said(tokenizer, row: dict) -> tuple[str, list[str]]:
    """(a row as text, # for a feature; the texts that are scored)."""
    text = "".join("#" if i == rows.IMAGE else tokenizer.decode([i]) for i in row["ids"].tolist())
    number = rows.numbered(row["labels"])
    return text, [tokenizer.decode(row["labels"][number == q]) for q in range(1, int(number.max()) + 1)]


def test_a_conversation_is_in_the_templates_turns():
    """Token by token what apply_chat_template renders, a picture's features in its place; each answer is scored with the token that
    ends its turn, whether that is the tokenizer's eos or not."""
    talk = [Question(0, "<image>\nany red ?", "no"), Question(0, "left <image> colour ?", "blue")]
    for words in (tokenizer(), tokenizer(LLAMA3), tokenizer(LLAMA3, eos_token="<|endoftext|>")):
        chat = turns.chat(words)
        text, scored = said(words, turns.chained(chat, 3, "Look.", talk))
        asked = messages(*(t for one in talk for t in (one.question, one.answer)))
        plain = [{"role": "system", "content": "Look."}, *asked]
        assert text == words.apply_chat_template(plain, tokenize=False).replace("<image>", "###")[: len(text)]
        assert text.endswith("blue<|im_end|>")
        assert scored == ["no<|im_end|>", "blue<|im_end|>"]
        assert words.convert_tokens_to_ids("<|im_end|>") in chat.ends


def test_the_prompt_of_an_export_is_the_row_of_training():
    """Token by token up to the answer, with a chat template and without; `use.py` makes a row of it."""
    asked = Question(0, "any red ?", "no")
    for words in (tokenizer(), tokenizer(LLAMA3), small_language_model.vocabulary()):
        chat, ids = turns.chat(words), lambda text, words=words: words(text, add_special_tokens=False)["input_ids"]
        start = [words.bos_token_id, *[rows.IMAGE] * 3]
        row = turns.packed(chat, 3, [asked]) if chat else rows.pack(words, start, [asked])
        before, after = turns.prompt_of(chat, words).split("<image>")
        made = [*ids(before), *[rows.IMAGE] * 3, *ids(after.replace("{question}", asked.question))]
        assert row["ids"][row["labels"] == rows.IGNORE].tolist() == made


def test_questions_about_one_picture_share_it():
    """Packed, each reads as a conversation of its own."""
    words = tokenizer()
    chat, asked = turns.chat(words), [Question(0, "any red ?", "no"), Question(1, "left colour ?", "blue")]
    row = turns.packed(chat, 3, asked)
    assert int((row["ids"] == rows.IMAGE).sum()) == 3
    for q, one in enumerate(asked, 1):
        mine = (row["segment"] == 0) | (row["segment"] == q)
        alone = turns.chained(chat, 3, "", [turns.placed(one)])
        assert torch.equal(row["ids"][mine], alone["ids"])
        assert torch.equal(row["labels"][mine], alone["labels"])
        assert row["position"][mine].tolist() == alone["position"].tolist()


def test_a_template_that_changes_earlier_answers_is_refused():
    one, more = Question(0, "<image>any red ?", "no"), Question(0, "left colour ?", "blue")
    chat = turns.chat(tokenizer(THINKS))
    assert "<think>" in turns.rendered(chat, "", [one])[1][0]  # what the model must write itself is scored
    with pytest.raises(UserError, match="changes an answer once another question follows"):
        turns.rendered(chat, "", [one, more])


def test_prompts_end_where_answers_begin(hub):
    """What generation starts from is the row in training up to the answer, padded on the left; later pictures are not shown."""
    words = tokenizer()
    line = {
        "images": ["train-0.jpg", "train-2.jpg"],
        "messages": messages("<image>any red ?", "no", "<image>and here ?", "yes"),
    }
    talks = conversations.Conversations(hub / "data", [conversations.conversation(line)], ("a",))
    data = questions.Questions(talks, words, features=2, side=32, longest=500)
    asked = questions.prompts(data.collate([data.get(0, None)]))
    texts = [words.decode([i for i in row.tolist() if i > 0]) for row in asked.batch["ids"]]
    assert texts[0].endswith("any red ?<|im_end|>\n<|im_start|>assistant\n")
    assert texts[1].endswith("and here ?<|im_end|>\n<|im_start|>assistant\n")
    assert asked.batch["pictures"].tolist() == [1, 2]
    assert [data.texts(answer) for answer in asked.answers] == ["no", "yes"]


# ------------------------------------------------------------------------------------------------------- when it is needed
def test_large_data_are_read_when_they_are_needed(hub, monkeypatch):
    """Rows are not made and pictures not opened before they are asked for; what may be too long is still found."""
    lines = folders.read(hub / "data" / "train.jsonl") * 2
    lines[-1] = {**lines[-1], "image": "train-1.png", "answer": "blue " * 120}
    source = folders.Folder(hub / "data", lines, ["any red ?", "left colour ?"])
    every = questions.Questions(source, tokenizer(), features=4, side=32, longest=700)
    monkeypatch.setattr(questions, "EVERY", 4)
    monkeypatch.setattr(conversations, "OPENED", 4)
    made: list[int] = []
    row = questions.Questions.row
    monkeypatch.setattr(questions.Questions, "row", lambda self, i: made.append(i) or row(self, i))
    source = folders.Folder(hub / "data", lines, ["any red ?", "left colour ?"])
    assert "4 of 24 were opened" in source.unopened
    assert len(source.found) == 4
    data = questions.Questions(source, tokenizer(), features=4, side=32, longest=700)
    assert len(made) < len(source)
    assert data.kept == every.kept
    assert len(data) == 23
    assert torch.equal(data.rows[3]["ids"], every.rows[3]["ids"])
    assert source.size(9) == tuple(source.image(9).shape[1:])


def test_a_picture_that_is_not_there_is_told_of_many(hub, monkeypatch):
    monkeypatch.setattr(conversations, "OPENED", 2)
    names = ["train-0.jpg", "train-1.png", "nowhere.jpg", "train-2.jpg"]
    with pytest.raises(UserError, match=r"1 of 4 pictures"):
        conversations.looked_over(hub / "data", names)


# ----------------------------------------------------------------------------------------------------------------- gates
GENERATED = ("--metric", "f1", "--max-new-tokens", "4")


def test_gates_look_at_the_template(hub, launch):
    done = launch("check", *small(hub, *GENERATED), "--stage", "align", "--only", "image-tokens,template,answers,prompts",
                  HF_HUB_OFFLINE="1")  # fmt: skip
    assert done.returncode == 0, done.shown
    verdicts = {v["id"]: v for v in done.verdicts()}
    assert {v["verdict"] for v in verdicts.values()} == {"pass"}, done.shown
    assert "assistant\\n[[" in verdicts["template"]["measured"]


SCORED = "    scored = answers.Answers(run, train_data, val_data, metric=cfg.metric, longest=cfg.max_new_tokens)\n"
PLANTS = {
    "no-generation-prompt": ("prompts", "generation prompt", (SCORED, SCORED + (
        "    speak, short = model.speak, len(words('<|im_start|>assistant\\n')['input_ids'])\n"
        "    model.speak = lambda batch, n, ends: speak(batch | {k: batch[k][:, :-short] for k in rows.FILL}, n, ends)\n"))),
    "end-never-scored": ("answers", "its answers are", (
        'return {"answer": rows.nll(model(batch), batch["labels"])}\n',
        'labels = batch["labels"].masked_fill(batch["labels"] == train_data.ends[-1], rows.IGNORE)\n'
        '        return {"answer": rows.nll(model(batch), labels)}\n')),
    "template-not-applied": ("template", "joined as strings", ("    return Questions(source,", (
        "    class Lines(Questions):\n        def row(self, index):\n            own, self.chat = self.chat, None\n"
        "            try:\n                return super().row(index)\n            finally:\n                self.chat = own\n\n"
        "    return Lines(source,"))),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.verify] * (i > 1)) for i, n in enumerate(PLANTS)])
def test_a_planted_bug_of_turns_is_stopped(name, hub, fork, launch):
    gate, words, hunk = PLANTS[name]
    fork(hunk, recipe="vlm/instruct")
    done = launch(
        "check", "mine.py", *small(hub, *GENERATED)[1:], "--stage", "align", "--only", gate, HF_HUB_OFFLINE="1"
    )
    assert done.returncode == 3, done.shown
    (verdict,) = done.verdicts()
    assert verdict["id"] == gate
    assert words in " ".join((verdict["measured"], verdict["remedy"])), verdict


@pytest.mark.verify
def test_pictures_are_used_in_data_without_pairs(hub, fork, launch, tmp_path):
    """The same questions about other pictures; a model that sees the mean of a batch's pictures is stopped."""
    shutil.copytree(hub / "data", tmp_path / "data")
    for split in ("train", "val"):
        lines = [json.loads(line) for line in (hub / "data" / f"{split}.jsonl").read_text().splitlines()]
        told = [json.dumps({k: v for k, v in line.items() if k != "pair"}) for line in lines]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(told))
    asked = (*small(hub)[1:], "--data.path", str(tmp_path / "data"), "--stage", "instruct", "--only", "pairs")
    done = launch("check", "vlm/instruct", *asked, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.shown
    assert "with each other's picture it changes by +" in done.verdicts()[-1]["measured"], done.shown
    seen = "features = self.projector(self.encoder(images))\n"
    fork(
        (seen, "features = self.projector(self.encoder(images))\n        features = 0 * features + features.mean(0)\n"),
        recipe="vlm/instruct",
    )
    done = launch("check", "mine.py", *asked, HF_HUB_OFFLINE="1")
    assert done.returncode == 3, done.shown
    assert "FAIL   pairs" in done.stdout


def test_the_layer_of_the_encoder_is_a_setting(hub):
    """The last but one, as LLaVA has it; -1 is the last; what is not there is told."""
    from trainworthy.recipes.vlm.models import vision

    image = torch.rand(2, 3, 32, 32)
    own = vision.load(str(hub / "clip"))
    pixels = (image - own.mean) / own.std
    states = own.net(pixel_values=pixels, output_hidden_states=True).hidden_states
    assert torch.equal(own(image), states[-2][:, 1:])
    assert torch.equal(vision.load(str(hub / "clip"), -1)(image), states[-1][:, 1:])
    assert not torch.equal(states[-1], states[-2])
    with pytest.raises(UserError, match="--encoder-layer -3"):
        vision.load(str(hub / "clip"), -3)


def test_a_template_that_is_nowhere_is_told(hub):
    from trainworthy.recipes.vlm.models import language as models

    with pytest.raises(UserError, match="no such template"):
        models.tokenizer(str(hub / "chat"), "trl:nowhere")
    lines = models.tokenizer("words")
    assert lines.chat_template is None  # a base model is trained in lines, as ever


# ---------------------------------------------------------------------------------------------------------- long answers
@pytest.fixture(scope="module")
def talkative(tmp_path_factory) -> Path:
    return seeing.talkative(tmp_path_factory.mktemp("talkative"))


@pytest.mark.verify
def test_every_gate_passes_on_long_answers(talkative, launch):
    """A small language model that speaks in turns, conversations with long answers, none of the gates left out."""
    asked = ("vlm/instruct", "--language", str(talkative / "chat"), "--data.path", str(talkative / "talks"), "--data.max-length", "200",
             "--run.no-tensorboard", "--run.threads", "1")  # fmt: skip
    done = launch("check", *asked, timeout=900)
    assert done.returncode == 0, done.shown
    found = {v["id"]: v["verdict"] for v in done.verdicts()}
    needed = {
        "overfit",
        "aligned",
        "generation",
        "template",
        "prompts",
        "answers",
        "image-tokens",
        "towers",
        "rates",
        "language-prior",
        "pairs",
    }
    assert {k for k, v in found.items() if v == "pass"} >= needed, found
    assert "fail" not in found.values()


@pytest.mark.verify
def test_a_run_answers_at_length_and_says_how_its_prompt_reads(hub, launch):
    """Generated answers are in the summary, and the export's prompt is the template's."""
    done = launch("run", *small(hub, "--metric", "f1,chrf", "--max-new-tokens", "4"), "--gates.no-enabled", "--align.epochs", "1",
                  "--instruct.epochs", "1", HF_HUB_OFFLINE="1")  # fmt: skip
    assert done.returncode == 0, done.shown
    out = done.folder()
    assert {"f1", "chrf", "stops", "accuracy", "nll"} <= read(out / "summary.json")["metrics"].keys()
    config = read(out / "export" / "config.json")
    assert config["encoder_layer"] == -2
    assert config["row"].endswith("{question}<|im_end|>\n<|im_start|>assistant\n")
    row = {"image": "val-1.png", "question": "any red ?"}
    answer = answered(out, hub / "data" / "asked.jsonl", [row], launch)
    assert used(out, hub / "data" / row["image"], "any red ?") == answer
    from transformers import GenerationConfig

    ends = GenerationConfig.from_pretrained(out / "export" / "language").eos_token_id
    assert language.tokenizer().convert_tokens_to_ids("<|im_end|>") in (ends if isinstance(ends, list) else [ends])
