"""llm/sft beyond pairs of one turn: conversations and tool calls, several data sets, packing without padding, noise."""

import copy
import json
from pathlib import Path

import pytest
import torch
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.llm.data import conversations, documents, formats, mixture, pairs, streaming
from trainworthy.recipes.shared import hub

from tests.conftest import ROOT
from tests.helpers import language
from tests.helpers.commands import equal_but_rounding, losses, read, run_folder, trainworthy
from tests.llm.test_sft import QUICK, SMALL, written

CONVERSATIONS = ROOT / "tests" / "fixtures" / "conversations.jsonl"
# As Hermes and Qwen put tool calls; what the assistant says between the marks of `generation` is transformers' own account of it.
TOOLS = """{% if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}
{%- if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}
{%- for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}{{ '<|im_end|>' }}
{%- endgeneration %}
{%- else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": None}}}
CALLED = {
    "messages": [
        {"role": "user", "content": "How warm is Oslo?"},
        {"role": "assistant", "content": "I shall look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "3 degrees"},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "And Lima?"},
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "weather", "arguments": {"city": "Lima"}}}]},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
}


def with_template(template: str):
    found = copy.deepcopy(language.tokenizer())
    found.chat_template = template
    return found


def chat_and_rows(tmp_path: Path, tokenizer, *rows: dict, **settings) -> tuple[pairs.Chat, list[dict]]:
    """What a file of these rows (and an answered question, held out or not) becomes."""
    source = pairs.Source(path=str(written(tmp_path / "rows.jsonl", list(rows))), **settings)
    chat = pairs.chat(tokenizer, source)
    train, val, *_ = pairs.read(source, chat)
    return chat, [*train, *val]


# --------------------------------------------------------------------------------------------------------- conversations
def test_ids_and_labels_are_those_of_the_tokenizer_s_own_assistant_mask(tmp_path: Path):
    """Tool calls, tools and every answer, token for token: transformers marks what stands in `generation`."""
    tokenizer = with_template(TOOLS)
    chat, rows = chat_and_rows(tmp_path, tokenizer, CALLED, {"messages": CALLED["messages"][:2]}, system="")
    (row,) = [r for r in rows if "Lima" in r["prompt"]]
    made = chat.example(row["prompt"], row["completion"])
    due = tokenizer.apply_chat_template(
        CALLED["messages"], tools=CALLED["tools"], return_dict=True, return_assistant_tokens_mask=True
    )
    n = len(made["input_ids"])
    assert made["input_ids"] == due["input_ids"][:n]
    assert tokenizer.decode(due["input_ids"][n:]) == "\n"
    assert [label != -100 for label in made["labels"]] == [bool(m) for m in due["assistant_masks"][:n]]
    text = tokenizer.decode(made["input_ids"])
    assert '{"name": "weather", "arguments": {"city": "Oslo", "days": null}}' in text  # nothing of it was lost
    assert text.count("<tool_call>") == 2
    assert tokenizer.decode([i for i in made["labels"] if i != -100]).count("<|im_end|>") == 3


@pytest.mark.parametrize(("key", "off"), [("weight", 0), ("weight", 0.0), ("train", False)])
def test_an_answer_of_weight_0_is_read_and_not_scored(key: str, off: float, tmp_path: Path):
    """Turns behind the last answer that is scored are dropped, as a question behind the last answer is."""
    talk = [(role, f"{word} {i}") for i in range(4) for role, word in (("user", "ask"), ("assistant", "say"))]
    turns = [{"role": role, "content": text} for role, text in talk]
    turns[3] |= {key: off}
    turns[5] |= {key: 1}
    turns[7] |= {key: off}
    chat, (row,) = chat_and_rows(tmp_path, language.tokenizer(), {"messages": turns}, held_out=0)
    made = chat.example(row["prompt"], row["completion"])
    read, scored = (language.tokenizer().decode([i for i in made[k] if i != -100]) for k in ("input_ids", "labels"))
    assert "say 1" in read, read
    assert "ask 3" not in read, read
    assert scored == "say 0<|im_end|>say 2<|im_end|>", scored


@pytest.mark.parametrize(("turn", "words"), [
    ({"weight": 0}, "each has a weight of 0"), ({"weight": 0.5}, "the key weight of a turn is neither 0 nor 1"),
    ({"tool_calls": [{"function": {"name": "run", "arguments": "print(1)"}}]}, "the arguments of a tool call are not JSON"),
])  # fmt: skip
def test_a_turn_that_cannot_be_used_is_named(turn: dict, words: str):
    answer = {"role": "assistant", "content": "4", **turn}
    with pytest.raises(formats.BadRow, match=words):
        conversations.checked(formats.conversation({"messages": [{"role": "user", "content": "2 + 2?"}, answer]}))


def test_the_last_answer_alone_is_scored_where_that_is_asked_for(tmp_path: Path):
    rows = [json.loads(line) for line in CONVERSATIONS.read_text().splitlines()[:3]]
    chat, found = chat_and_rows(tmp_path, language.tokenizer(), *rows, every_turn=False)
    made = chat.example(found[0]["prompt"], found[0]["completion"])
    assert (
        language.tokenizer().decode([i for i in made["labels"] if i != -100]) == f"{found[0]['completion']}<|im_end|>"
    )


@pytest.mark.parametrize(("template", "words"), [
    (language.TEMPLATE.replace("m['content']", "(m['content'] if m['role'] != 'assistant' else '')"), ("does not render",)),
    (TOOLS.replace("c['function']", "'...'"), ("drops or changes", "knows no tool calls", "turn 5")),
    (TOOLS.replace("c['function']", "c['function']['name']"), ("drops or changes", "knows no tool calls")),
    (language.TEMPLATE + "{% if messages | length > 3 %}{{ raise_exception('one at a time') }}{% endif %}",
     ("does not take", "one at a time")),
], ids=["no-answers", "no-tool-calls", "no-arguments", "refused"])  # fmt: skip
def test_a_template_that_drops_what_the_assistant_says_is_refused(
    template: str, words: tuple[str, ...], tmp_path: Path
):
    with pytest.raises(UserError) as told:
        chat_and_rows(tmp_path, with_template(template), CALLED)
    assert not [w for w in words if w not in str(told.value)], told.value


def test_where_a_template_rewrites_earlier_answers_each_is_learnt_as_the_last_one(tmp_path: Path):
    """As templates do that take the thoughts out of what was said before: one row for each answer, scored as it is generated."""
    rows = [json.loads(line) for line in CONVERSATIONS.read_text().splitlines()[:3]]
    forgets = "(m['content'] if loop.last or m['role'] != 'assistant' else m['content'][:9])"
    tokenizer = with_template(language.TEMPLATE.replace("m['content']", forgets))
    for one in rows:
        one["messages"] += [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    answers = sum(turn["role"] == "assistant" for one in rows for turn in one["messages"])
    chat, found = chat_and_rows(tmp_path, tokenizer, *rows, near=0)
    scored = [chat.example(r["prompt"], r["completion"]) for r in found]
    said = [tokenizer.decode([i for i in one["labels"] if i != -100]) for one in scored]
    assert len(found) == answers
    assert all(text.count("<|im_end|>") == 1 for text in said)
    assert said.count("So.<|im_end|>") == 3
    assert all(text.removesuffix("<|im_end|>") in str(rows) for text in said)  # whole, as they stand in the file
    chat, found = chat_and_rows(tmp_path, tokenizer, *rows, every_turn=False, near=0)
    made = chat.example(found[0]["prompt"], found[0]["completion"])
    assert tokenizer.decode([i for i in made["labels"] if i != -100]) == "So.<|im_end|>"


def test_conversations_train_and_every_answer_passes_the_gates(tmp_path: Path, launch):
    net = language.write(tmp_path / "net")
    told = launch(
        "check", "llm/sft", "--model", str(net), *SMALL, "--data.path", str(CONVERSATIONS), "--max-new-tokens", "24"
    )
    assert told.returncode == 0, told.shown
    assert told.stdout.count("pass   scored") == told.stdout.count("pass   template") == 1
    assert "degrees in" in told.stdout


# -------------------------------------------------------------------------------------------------------------- mixtures
def row(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion, "source": prompt}


def test_weights_say_how_often_a_row_is_read():
    a, b = ([row(f"{name} number {i}", str(i)) for i in range(10)] for name in ("first", "second"))
    train, _, _, told = mixture.mixed([mixture.Part("a", 2.5, a, []), mixture.Part("b", 0.5, b, [])], near=0.8)
    times = [sum(r is x for r in train) for x in (*a, *b)]
    assert times == [3] * 5 + [2] * 5 + [1, 0] * 5
    assert told == ["a: 10 pairs, 25 of an epoch", "b: 10 pairs, 5 of an epoch"]
    assert mixture.weighted_paths("a.jsonl, hub:o/n*0.5") == [("a.jsonl", 1.0), ("hub:o/n", 0.5)]
    for wrong in ("a*b", "a,,b", "a*0"):
        with pytest.raises(UserError):
            mixture.weighted_paths(wrong)


SENTENCE = "the quick brown fox jumps over the lazy dog and then it sleeps until the next morning comes"


def test_what_stands_twice_goes_and_what_validation_asks_about_goes():
    nearly = SENTENCE.replace("next", "following")
    other = "a completely different sentence about bread that is baked early in the small bakery around the corner"
    rows = [row(SENTENCE, "fox"), row(SENTENCE.upper() + "!", "fox"), row(nearly, "fox"), row(other, "bread")]
    assert mixture.repeated(rows, 0.7) == {1, 2}
    assert mixture.repeated(rows, 1.0) == {1}
    assert mixture.repeated(rows, 0.0) == set()
    assert mixture.asked_about(rows[2:], rows[:1]) == {0}
    assert mixture.asked_about(rows[3:], rows[:1]) == set()
    # A prompt that half of the rows have says nothing about where they come from.
    same = [row("tell a joke", f"joke {i}") for i in range(8)]
    assert mixture.asked_about(same[1:], same[:1]) == set()
    with pytest.raises(UserError, match="nothing is left"):
        mixture.mixed([mixture.Part("a", 1.0, rows[:3], rows[:1])], near=0.8)


def test_a_mixture_trains_and_says_what_was_left_out(tmp_path: Path, launch):
    net = language.write(tmp_path / "net")
    rows = [{"prompt": f"say {i} {i * i} {i + 7} now", "completion": str(i)} for i in range(40)]
    both = f"{written(tmp_path / 'plain.jsonl', rows * 2)}*2,{CONVERSATIONS}"
    done = launch("run", "llm/sft", "--model", str(net), *QUICK, "--train.epochs", "1", "--data.path", both)
    assert done.returncode == 0, done.shown
    assert "repeat an earlier one" in done.stdout
    assert f"{CONVERSATIONS}: " in done.stdout


def test_a_limit_beyond_the_model_s_context_is_refused(tmp_path: Path, launch):
    net = language.write(tmp_path / "net")
    done = launch("check", "llm/sft", "--model", str(net), "--data.max-length", "4096")
    assert done.returncode == 2, done.shown
    assert "2048 positions" in done.stderr
    assert "--data.max-length 2048" in done.stderr


# --------------------------------------------------------------------------------------------------------------- packing
@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


def test_packing_changes_nothing_but_the_time(net: Path, tmp_path: Path):
    """The same pairs, one behind the other instead of padded: every loss and gradient of a run is the same, to rounding."""
    rows = {}
    for name, more in (("padded", ()), ("packed", ("--packing",))):
        (tmp_path / name).mkdir()
        done = trainworthy(
            "run", "llm/sft", "--model", net, *QUICK, "--train.accumulate", "2", *more, cwd=tmp_path / name
        )
        assert done.returncode == 0, done.stderr
        folder = run_folder(tmp_path / name)
        rows[name], planned = read(folder / "step_metrics.jsonl"), read(folder / "summary.json")["planned_steps"]
    for key in ("step/loss", "step/grad_norm"):
        a, b = ([row[key] for row in rows[name]] for name in ("padded", "packed"))
        assert len(a) == planned > 15  # how many docstrings there are is the running Python's affair
        equal_but_rounding(a, b)


def test_noise_on_the_embeddings_trains_only(net: Path, tmp_path: Path):
    plain, noisy = (tmp_path / name for name in ("plain", "noisy"))
    for folder, more in ((plain, ()), (noisy, ("--neftune-noise-alpha", "5"))):
        folder.mkdir()
        done = trainworthy("run", "llm/sft", "--model", net, *QUICK, *more, cwd=folder)
        assert done.returncode == 0, done.stderr
    assert losses(run_folder(plain))[0] != losses(run_folder(noisy))[0]
    first = [read(run_folder(folder) / "summary.json")["baselines"]["untrained"] for folder in (plain, noisy)]
    assert first[0] == first[1]


@pytest.mark.parametrize(("name", "data", "words"), [
    ("a.jsonl", b"", ("is empty",)),
    ("a.jsonl", b'{"prompt": "caf\xe9", "completion": "a"}\n', ("cannot be read", "UTF-8", "iconv")),
    ("a.jsonl", b'{"prompt": "a"\n', ("cannot be read", "not whole")),
    ("a.csv", b"", ("is empty",)),
], ids=["empty", "no-utf8", "no-json", "empty-csv"])  # fmt: skip
def test_a_file_that_cannot_be_read(name: str, data: bytes, words: tuple[str, ...], tmp_path: Path):
    (tmp_path / name).write_bytes(data)
    source = pairs.Source(path=str(tmp_path / name))
    with pytest.raises(UserError) as told:
        pairs.chat(language.tokenizer(), source)
    assert not [w for w in words if w not in str(told.value)], told.value


def test_a_call_in_parquet_has_the_arguments_that_it_was_given(tmp_path: Path):
    """A struct of parquet has in every row each key of any row; what stands in a line of JSON as null is meant."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    other = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    asked = {"role": "user", "content": "One and one?"}
    rows = [{"messages": CALLED["messages"]}, {"messages": [asked, {"role": "assistant", "tool_calls": [other]}]}]
    rows += [{"messages": [asked | {"content": f"{i}?"}, {"role": "assistant", "content": "2"}]} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tokenizer = with_template(TOOLS)
    source = pairs.Source(path=str(tmp_path / "rows.parquet"), system="")
    chat = pairs.chat(tokenizer, source)
    train, val, *_ = pairs.read(source, chat)
    said = [tokenizer.decode(chat.example(r["prompt"], r["completion"])["input_ids"]) for r in (*train, *val)]
    calls = {text.rpartition("<tool_call>")[2].partition("</tool_call>")[0] for text in said if "<tool_call>" in text}
    assert calls == {'{"name": "weather", "arguments": {"city": "Lima"}}', '{"name": "add", "arguments": {"a": 1}}'}


def test_a_data_set_in_the_hub_s_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder of it; its own validation split is taken, and it is found again from another folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "set" / "data").mkdir(parents=True)
    for split, names in (("train", "abc"), ("test", "de")):
        rows = [{"prompt": f"say {n}", "completion": n} for n in names]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    source = pairs.Source(path="hub:set*2", system="", near=0)
    monkeypatch.chdir("/")
    train, val, *_ = pairs.read(source, pairs.chat(language.tokenizer(), source))
    assert sorted(r["completion"] for r in train) == [*"aabbcc"]
    assert sorted(r["completion"] for r in val) == [*"de"]


def test_a_configuration_of_a_hub_data_set_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of several, `datasets` asks for one; the message says how, and streaming takes the same name."""
    names = ("main", "other")
    parts = "".join(f"- config_name: {n}\n  data_files:\n  - split: train\n    path: {n}.jsonl\n" for n in names)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    for name in names:
        rows = [{"prompt": f"say {i} of {name}", "completion": f"{i}", "text": f"{name} {i}"} for i in range(30)]
        written(tmp_path / "set" / f"{name}.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    path = hub.absolute("hub:set:other")
    monkeypatch.chdir("/")
    assert path == f"hub:{tmp_path / 'set'}:other"
    train, _, _ = pairs.read_file(path, pairs.text)
    assert {r["prompt"].split()[-1] for r in train} == {"other"}
    assert [Path(f).name for f in streaming._listed(path)["train"]] == ["other.jsonl"]
    with pytest.raises(UserError, match="hub:owner/name:configuration") as told:
        pairs.read_file(path.removesuffix(":other"), pairs.text)
    assert "main" in str(told.value)


@pytest.mark.parametrize("read", [lambda p: pairs.read_file(p, pairs.text), lambda p: documents.load(p, "text", 0.01)],
                         ids=["pairs", "texts"])  # fmt: skip
@pytest.mark.parametrize(("made", "words"), [
    ({}, ("cannot be read", "no network")), ({"validation.jsonl": '{"prompt": "a"}\n'}, ("no split to learn from", "validation")),
], ids=["not-there", "no-train"])  # fmt: skip
def test_a_hub_data_set_that_cannot_be_learnt_from(read, made: dict, words: tuple, tmp_path: Path):
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as told:
        read(f"hub:{tmp_path}")
    assert not [w for w in words if w not in str(told.value)], told.value


def test_too_few_rows_to_hold_some_out(tmp_path: Path, launch):
    path = written(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    done = launch("check", "llm/sft", "--model", str(language.write(tmp_path / "net")), "--data.path", str(path))
    assert done.returncode == 2, done.shown
    assert "no pair in it" in done.stderr


def test_a_packed_row_of_the_collator_is_seen_as_its_samples(net: Path):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    data = pairs.Pairs([row("one", "1"), row("a longer one", "22")], pairs.Chat(language.tokenizer(), ""))
    data.collator = DataCollatorForLanguageModeling(pad_token_id=2, padding_free=True)
    batch = data.collate(data.rows)
    assert batch["inputs"]["input_ids"].shape == (1, int(batch["attention_mask"].sum()))
    data.collator = DataCollatorForLanguageModeling(pad_token_id=2)
    padded = data.collate(data.rows)
    assert all(torch.equal(batch[k], padded[k]) for k in ("input_ids", "labels", "attention_mask"))
