"""Files as people have them: packed, of other programs, with greetings, long system turns, many turns, and characters that are none."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainworthy.core.base.errors import UserError
from trainworthy.core.gates.causes import named
from trainworthy.core.gates.gate import pick
from trainworthy.recipes.llm.data import (
    column_names,
    documents,
    files,
    formats,
    mixture,
    pairs,
    plain_texts,
    preferences,
    templates,
)
from trainworthy.recipes.llm.gates import rendering

from tests.helpers import language
from tests.llm import chat_models
from tests.llm.test_sft import written

SHORT = [{"prompt": f"What is {i}?", "completion": f"It is {i}."} for i in range(60)]
TOOL = {"name": "weather", "description": "Says how the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}}}  # fmt: skip


def turns(*said: str, first: str = "user") -> list[dict[str, str]]:
    both = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": both[i % 2], "content": text} for i, text in enumerate(said)]


def read(path: Path, tokenizer: object, **settings: object) -> tuple[list[dict], list[dict], list[str]]:
    source = pairs.Source(path=str(path), **settings)
    train, val, _, told = pairs.read(source, pairs.chat(tokenizer, source))
    return train, val, told


@pytest.mark.parametrize(("name", "data"), [
    ("a.jsonl.gz", gzip.compress("\n".join(map(json.dumps, SHORT)).encode())),
    ("a.json.gz", gzip.compress(json.dumps(SHORT).encode())),
    ("a.json", json.dumps({"data": SHORT}, indent=1).encode()),
    ("a.jsonl", "\r\n".join(map(json.dumps, SHORT)).encode("utf-8-sig")),
    ("a.jsonl", "\n".join(map(json.dumps, SHORT)).encode("utf-16")),
    ("a.tsv", "\n".join(["prompt\tcompletion", *(f"{r['prompt']}\t{r['completion']}" for r in SHORT)]).encode()),
    *((name, "\r\n".join([sep.join(SHORT[0]), *(sep.join(r.values()) for r in SHORT)]).encode(code)) for name, sep, code in (
        ("a.csv", ";", "utf-8-sig"), ("a.csv", ",", "utf-16"), ("a.csv", "\t", "utf-16"), ("a.tsv", "\t", "utf-16"))),
], ids=["lines-gz", "list-gz", "object", "windows", "utf16", "tsv", "semicolons", "utf16-csv", "spreadsheet", "utf16-tsv"])  # fmt: skip
def test_files_of_other_programs(name: str, data: bytes, tmp_path: Path):
    (tmp_path / name).write_bytes(data)
    assert files.tables(str(tmp_path / name), "--data.path")["train"] == SHORT


def test_cells_of_a_table_are_texts(tmp_path: Path):
    """Answers such as NA, None and null were missing, 007 was a number, and a text of more than 128 kB ended the command."""
    said = ["NA", "None", "null", "nan", "007", "3.50", "True", "two\nlines, and a comma", "x" * 200_000]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [("prompt", "completion"), *((f"q{i}", text) for i, text in enumerate(said)), ("empty", "")]
        )
    (tmp_path / "b.csv").write_text("prompt,completion\nq,one, two\nr,fine\n")
    (tmp_path / "c.csv").write_text('prompt,completion\nq,"never closed\nr,fine\n')
    *found, empty = files.tables(str(tmp_path / "a.csv"), "--data.path")["train"]
    assert [row["completion"] for row in found] == said
    assert empty["completion"] is None
    wide, fine = files.tables(str(tmp_path / "b.csv"), "--data.path")["train"]
    assert "more cells than the 2 columns" in wide.fault.why
    assert fine == {"prompt": "r", "completion": "fine"}
    with pytest.raises(UserError, match="line 3"):
        files.tables(str(tmp_path / "c.csv"), "--data.path")


def test_texts_of_a_table_stay_texts(tmp_path: Path):
    """Each kind of recipe that reads plain texts: `NA` and `007` are texts, a cell too many and an empty one are bad rows."""
    (tmp_path / "a.csv").write_text('text,n\nNA,1\n007,2\n,3\n"one, two",4\none, two,5\n', encoding="utf-8")
    rows = plain_texts._table(str(tmp_path / "a.csv"), "text")["train"]
    assert [text for _, text in rows] == ["NA", "007", "text: nothing", "one, two", rows[4][1]]
    assert "more cells than the 2 columns" in str(rows[4][1])
    with pytest.raises(UserError, match="no text in column 'body'"):
        plain_texts._table(str(tmp_path / "a.csv"), "body")


def test_a_file_that_is_not_whole_is_named(tmp_path: Path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}')[:-4])
    with pytest.raises(UserError, match="gzip"):
        files.tables(str(tmp_path / "a.jsonl.gz"), "--data.path")


def test_instructions_of_a_developer_are_a_system_turn(tmp_path: Path):
    """Qwen3's template writes nothing of a role that it does not know: what the rows ask for was not in the prompts, without a word."""
    tokenizer = chat_models.tokenizer("qwen3")
    rows = [
        {"messages": [{"role": "developer", "content": "Be brief."}, *turns(f"{i}?", f"It is {i}.")]} for i in range(60)
    ]
    source = pairs.Source(path=str(written(tmp_path / "a.jsonl", rows)))
    chat = pairs.chat(tokenizer, source)
    train, *_ = pairs.read(source, chat)
    assert all("system\nBe brief." in chat.opening(chat.turns(r["prompt"]), r["prompt"]) for r in train)


def test_words_that_a_template_drops_make_a_row_bad(tmp_path: Path):
    tokenizer = chat_models.tokenizer("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    late = [*turns("1?", "one"), {"role": "system", "content": "Answer in French."}, *turns("2?", "deux")]
    with pytest.raises(UserError, match="drops what the system says") as stopped:
        read(written(tmp_path / "a.jsonl", [{"messages": late}] * 30), tokenizer)
    assert "--chat-template FILE" in str(stopped.value)


def test_calls_in_openai_s_older_form(tmp_path: Path):
    """`function_call` and `functions`: the turn was called empty."""
    call = {"name": "weather", "arguments": '{"city": "Lima"}'}
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": None, "function_call": call},
                          {"role": "function", "name": "weather", "content": "rain"}, {"role": "assistant", "content": f"Rain, {i}."}],
             "functions": [TOOL]} for i in range(60)]  # fmt: skip
    train, *_ = read(written(tmp_path / "a.jsonl", rows), chat_models.tokenizer("qwen3"))
    calling = [r for r in train if '{"name": "weather", "arguments": {"city": "Lima"}}' in r["completion"]]
    assert len(calling) > 40
    assert all(TOOL["description"] in r["prompt"] for r in train)


def test_what_all_rows_share_makes_none_of_them_a_repetition(tmp_path: Path):
    """A system turn, tools and a form of question: 230 of 232 such pairs were left out, because a row that had gone was not counted."""
    rows = [{"messages": [{"role": "system", "content": "You are careful. " * 5}, *turns(f"how is the weather in town {i} now", f"sunny in {i}")],
             "tools": [TOOL]} for i in range(60)]  # fmt: skip
    train, val, told = read(written(tmp_path / "a.jsonl", rows), chat_models.tokenizer("qwen3"))
    assert len(train) + len(val) == 60, told
    train, val, told = read(written(tmp_path / "b.jsonl", rows + rows[:5]), chat_models.tokenizer("qwen3"))
    assert len(train) + len(val) <= 65 - 1, told  # exact copies still go (those held out may be kept twice)
    assert any("repeat an earlier one" in words for words in told)


SAME_IN = {
    "cyrillic": (
        "Какой сегодня флаг висит в городе номер {} у старых ворот",
        "Сегодня там висит красный флаг с цифрой {} и белой полосой",
    ),
    "chinese": ("请问第{}号门今天挂着什么颜色的旗子", "第{}号门今天挂着红色的旗子上面有白色的条纹"),
}


@pytest.mark.parametrize("script", SAME_IN)
def test_near_copies_are_found_in_every_script(script: str, tmp_path: Path):
    """Prompts of conversations were kept with letters as \\u escapes, so that runs of four words were runs of four letters; a clause
    of Chinese was one word."""
    ask, say = SAME_IN[script]
    words = (
        [*"абвгдежзиклмнопрстуфхцчшщэюя"] if script == "cyrillic" else [*"天地人山水火木金土日月星风雨云雷电花草虫鱼鸟"]
    )
    rows = [{"messages": turns(f"{ask.format(i)} {' '.join(words[(i * k + k) % len(words)] * 3 for k in range(1, 9))}",
                               say.format(i), "?", f"{i}")} for i in range(40)]  # fmt: skip
    copied = [
        {"messages": [*row["messages"][:3], {"role": "assistant", "content": f"{i} !"}]}
        for i, row in enumerate(rows[:5])
    ]
    tokenizer = chat_models.tokenizer("llama3")
    source = pairs.Source(path=str(written(tmp_path / "a.jsonl", rows + copied)))
    chat = pairs.chat(tokenizer, source)
    each = [one for row in rows + copied for one in chat.rows(row)]
    assert "\\u" not in each[0]["prompt"]
    assert ask[:3] in each[0]["prompt"]
    gone = mixture.repeated(each, 0.8)
    assert gone == {*range(40, 45)}, gone


def test_a_later_answer_of_a_long_conversation_is_no_repetition_of_the_earlier_ones(tmp_path: Path):
    """Qwen3's template makes each answer a row of its own, which holds all turns before it."""
    rows = [{"messages": turns(*(f"{('please tell me fact', 'it is the number')[k % 2]} {k * i + k} about the thing {i * 13} today"
                                 for k in range(16)))} for i in range(12)]  # fmt: skip
    source = pairs.Source(path=str(written(tmp_path / "a.jsonl", rows)))
    chat = pairs.chat(chat_models.tokenizer("qwen3"), source)
    each = [one for row in rows for one in chat.rows(row)]
    assert len(each) == 12 * 8
    assert mixture.repeated(each, 0.8) == set()
    assert mixture.repeated([*each, *each[:8]], 0.8) == {*range(96, 104)}


def test_a_greeting_is_read_and_not_scored(tmp_path: Path):
    rows = [{"conversations": [{"from": "GPT", "value": "Hello."}, {"from": "Human", "value": f"What is {i}?"},
                               {"from": "gpt", "value": f"It is {i}."}]} for i in range(60)]  # fmt: skip
    for name in ("qwen3", "llama3"):
        tokenizer = chat_models.tokenizer(name)
        source = pairs.Source(path=str(written(tmp_path / "a.jsonl", rows)))
        chat = pairs.chat(tokenizer, source)
        row = pairs.read(source, chat)[0][0]
        found = chat.example(row["prompt"], row["completion"])
        scored = tokenizer.decode(
            [i for i, label in zip(found["input_ids"], found["labels"], strict=True) if label >= 0]
        )
        assert "It is" in scored
        assert "Hello" not in scored
        assert "Hello" in tokenizer.decode(found["input_ids"])


def test_characters_that_are_none_and_tokens_that_end_a_turn_are_counted(tmp_path: Path):
    wrong = [
        '{"prompt": "half \\ud83d", "completion": "of one"}',
        '{"prompt": "What?", "completion": "This.<|im_end|>"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*map(json.dumps, SHORT), *wrong]))
    train, val, told = read(path, language.tokenizer(), max_bad=0.05)
    assert len(train) + len(val) == 60
    for words in (
        "line 61: a text has half of a character",
        "line 62: a text has '<|im_end|>' in it, which ends a turn",
    ):
        assert words in told[0], told


def test_the_line_of_a_bad_row_is_that_of_the_file(tmp_path: Path):
    """Empty lines count; a list has rows, from 1."""
    rows = [json.dumps(row) for row in SHORT]
    (tmp_path / "a.jsonl").write_text("\n".join(["", *rows[:5], "", '{"prompt": "no answer"}', *rows[5:]]))
    (tmp_path / "a.json").write_text(json.dumps([*SHORT[:5], {"prompt": "no answer"}, *SHORT[5:]]))
    for name, place in (("a.jsonl", "line 8: completion"), ("a.json", "row 6: completion")):
        *_, told = read(tmp_path / name, language.tokenizer(), max_bad=0.05)
        assert place in told[0], told


def test_columns_that_nothing_reads_are_named(tmp_path: Path):
    rows = [row | {"id": i, "topic": "x", "quality": i} for i, row in enumerate(SHORT)]
    *_, told = read(written(tmp_path / "a.jsonl", rows), language.tokenizer())
    assert told[0] == f"columns of {tmp_path / 'a.jsonl'} that are not read: topic, quality", told
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 2, "score_rejected": 1}
    assert not column_names.not_read([pair], "a.jsonl", "prompt (str), chosen (str) and rejected (str)")


@pytest.mark.parametrize(("row", "setting"), [
    ({"question": "a", "answer": "b"}, "prompt=question,completion=answer"),
    ({"prompt": "a", "answer": "b"}, "completion=answer"),
    ({"dialog": turns("a", "b")}, "messages=dialog"),
    ({"instruction": "a", "context": "", "response": "b"}, "input=context,output=response"),
])  # fmt: skip
def test_the_setting_that_reads_other_columns_is_named(row: dict, setting: str, tmp_path: Path):
    rows = [json.loads(json.dumps(row).replace('"a"', f'"What is {i}?"')) for i in range(60)]
    path = written(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=f"--data.columns {setting}$"):
        read(path, language.tokenizer())
    train, val, _ = read(path, language.tokenizer(), columns=setting)
    assert len(train) + len(val) == 60


def test_the_samples_of_a_gate_have_different_answers():
    """Four times "No." was memorised from the start, and without the input: two gates stopped a healthy run."""
    rows = [
        {"prompt": f"q{i}", "completion": f"It is {i}." if i % 5 == 0 else "No.", "source": str(i)} for i in range(100)
    ]
    for seed in range(5):
        said = [rows[i]["completion"] for i in pick(pairs.Pairs(rows, None), 4, seed)]
        assert said.count("No.") <= 2, said
    assert len(pick(pairs.Pairs(rows, None), 100, 0)) == 100


def test_one_row_of_megabytes_decides_nothing():
    """It was in the six held-out rows: no limit was short enough, and 17% of them were too long."""
    source = pairs.Source(path="own.jsonl")
    assert pairs.limit(source, [[40, 50] * 50, [30, 60, 40, 50, 40, 5_000_000]], float("inf")) == 64
    assert pairs.limit(source, [[40, 50] * 50, [30, 5_000]], 2048) == 2048  # of two rows none is left out
    assert [pairs.spared(0.01, n) for n in (4, 6, 300)] == [0, 1, 3]
    assert pairs.spared(0.0, 300) == 0


def test_more_bad_rows_do_not_shorten_the_others():
    """`--data.max-bad 0.2`, as the message on bad rows advises, also left out a fifth of the healthy rows: the longest ones."""
    sizes = [40] * 80 + [200] * 20
    assert pairs.limit(pairs.Source(path="own.jsonl", max_bad=0.2), [sizes], 2048) == 224
    assert pairs.limit(pairs.Source(path="own.jsonl", max_bad=0.2), [sizes], 128) == 128


def test_rows_of_texts_that_cannot_be_read_are_counted_together(tmp_path: Path):
    """One broken line or one empty cell ended the command, whatever --data.max-bad said."""
    good = [json.dumps({"text": f"Document number {i} says so."}) for i in range(300)]
    wrong = ['{"text": null}', "{", '["no object"]']
    for name, pack in (("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack("\n".join([*good, *wrong]).encode()))
        train, val, notes = documents.load(str(tmp_path / name), "text", 0.02)
        assert len(train) + len(val) == 300
        for words in (
            "3 of 303",
            "line 301 (text: NoneType, not text)",
            "line 302 (not JSON",
            "line 303 (text: str, not text)",
        ):
            assert words in notes["left out of train"], notes


def test_a_long_example_is_shown_from_both_ends():
    """A row of 2,000 tokens would fill the terminal; its roles and the end of its answer are at the ends."""
    long = f"<|im_start|>user\n{'a word ' * 500}[[{'an answer ' * 500}<|im_end|>]]"
    assert rendering.excerpt("short") == "short"
    found = rendering.excerpt(long)
    assert len(found) < 700
    assert found.startswith("<|im_start|>user")
    assert found.endswith("<|im_end|>]]")


def test_conversations_that_open_alike_are_in_both_files(tmp_path: Path):
    """`Hi` in the training and in the validation file was taken for one document in two splits, which stopped the run."""
    opened = [turns("Hi", "Hello!", f"what is {i} and {i * 7}", f"it is {i * 8} or so") for i in range(40)]
    train, val = ([{"messages": t} for t in part] for part in (opened[:30], opened[30:]))
    file = written(tmp_path / "val.jsonl", val)
    train, val, _ = read(written(tmp_path / "train.jsonl", train), language.tokenizer(), val=str(file))
    assert (len(train), len(val)) == (30, 10)
    assert not {row["source"] for row in train} & {row["source"] for row in val}


@pytest.mark.parametrize(("names", "kept"), [(3, False), (60, True)], ids=["data sets", "documents"])
def test_a_source_in_both_files_is_a_data_set_where_few_rows_have_another(names: int, kept: bool, tmp_path: Path):
    """Data sets of chats name in `source` where a row comes from. Documents that both files have stay visible to the gate `leakage`."""
    rows = [row | {"source": f"name {i % names}"} for i, row in enumerate(SHORT * 2)]
    file = written(tmp_path / "val.jsonl", [row | {"prompt": f"And {row['prompt']}"} for row in rows[:60]])
    train, val, told = read(written(tmp_path / "train.jsonl", rows), language.tokenizer(), val=str(file), near=0)
    assert bool({row["source"] for row in train} & {row["source"] for row in val}) is kept, told
    assert any("names of data sets" in words for words in told) is not kept


def test_scores_that_prefer_the_rejected_answers_are_named(tmp_path: Path):
    rows = [{"prompt": f"What is {i}?", "chosen": f"no {i}", "rejected": f"It is {i}.", "score_chosen": 1.0 + i % 2,
             "score_rejected": 9.0} for i in range(60)]  # fmt: skip
    file = written(tmp_path / "a.jsonl", rows)
    for columns, refused in (("", True), ("chosen=rejected,rejected=chosen", False)):
        source = preferences.Source(path=str(file), columns=columns)
        if refused:
            with pytest.raises(UserError, match="chosen and rejected are exchanged"):
                preferences.read(source, preferences.chat(language.tokenizer(), source))
        else:
            assert preferences.read(source, preferences.chat(language.tokenizer(), source))[0][0]["chosen"].startswith(
                "It is"
            )


def test_a_template_of_other_models_is_named():
    tokenizer = chat_models.tokenizer("qwen3")
    tokenizer.bos_token, tokenizer.chat_template = None, "{{ bos_token + messages[0]['content'] }}" + language.TEMPLATE
    with pytest.raises(UserError, match="another family of models: it writes a bos_token"):
        templates.form(tokenizer)
    assert "<|start_header_id|> is no token" in templates.foreign(_with(tokenizer, "<|start_header_id|>"))


def _with(tokenizer: Any, mark: str) -> Any:
    tokenizer.chat_template = f"{{% for m in messages %}}{mark}{{{{ m['content'] }}}}{{% endfor %}}"
    return tokenizer


@pytest.mark.parametrize("shape", [(2, 9), (2, 2, 9)], ids=["rows", "pairs of answers"])
def test_random_weights_below_adapters_are_seen_in_every_shape_of_batch(shape: tuple[int, ...]):
    """Preferences are (B, 2, T): the diagnosis raised, and its error stood in the place of what had failed."""
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(3, 200, shape)}
    assert "random weights" in named.explain_untrained_base(language.model(), batch)


def test_steps_without_any_gradient_are_the_cause_of_parameters_that_get_none():
    """`rl/grpo` with answers of six tokens to questions of a chat: no answer earned anything in three of four steps, and a cut graph was named."""
    assert "in 3 of 4 steps every gradient was exactly 0" in named.explain_silent_steps([False, True, True, True])
    for other in ([False] * 4, [True] * 4, []):
        assert not named.explain_silent_steps(other)


def test_prompts_that_end_with_their_answers_are_refused(tmp_path: Path):
    """Alpaca's `text` is the whole example: read as the prompt, each answer could be copied."""
    rows = [
        {"text": f"### Q:\nWhat is {i}?\n### A:\nIt is number {i}.", "output": f"It is number {i}."} for i in range(60)
    ]
    path = written(tmp_path / "own.jsonl", rows)
    source = pairs.Source(path=str(path), columns="prompt=text,completion=output")
    with pytest.raises(UserError, match="end with their answers: 60 of 60"):
        pairs.read_file(str(path), lambda row: [formats.conversation(row)], source)


def test_missing_values_that_were_written_as_text_are_bad_rows():
    with pytest.raises(formats.BadRow, match="missing value"):
        formats.conversation({"prompt": "Which town?", "completion": "nan"})
    assert formats.conversation({"prompt": "Which town?", "completion": "None"})["completion"] == "None"


def test_texts_joined_by_a_separator_are_refused(tmp_path: Path):
    """The tokenizer reads a token that a text spells as letters: bits per byte count letters that cost nothing."""
    story = "A cat sat on a mat and saw number {}. "
    rows = [{"text": " <|endoftext|> ".join(story.format(3 * i + k) * 4 for k in range(3))} for i in range(60)]
    path = written(tmp_path / "own.jsonl", rows)
    with pytest.raises(UserError, match=r"<\|endoftext\|> is in 100% of the documents"):
        documents.load(str(path), "text", 0.0)
    rows = [{"text": story.format(i) * 4 + "<|endoftext|> ends a text" * (i % 9 == 0)} for i in range(60)]
    documents.load(str(written(tmp_path / "few.jsonl", rows)), "text", 0.0)


def test_answers_that_begin_with_their_prompt_are_noted():
    """A column of whole texts beside one of prompts: the prompt would be trained as a part of every answer."""
    whole = [{"prompt": f"What is {i} + 1?", "completion": f"What is {i} + 1? It is {i + 1}."} for i in range(9)]
    plain = [row | {"completion": f"It is {i + 1}."} for i, row in enumerate(whole)]
    assert "take it off" in pairs.echoed(whole, ("completion",))["echoed"]
    assert pairs.echoed(plain, ("completion",)) == {}
    assert pairs.echoed(whole[:4] + plain[4:], ("completion",)) == {}
