"""Rows as people have them, in one form; and what answers are judged by."""

import json
from pathlib import Path

import pytest
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.validation_split import hold_out, is_held_out
from trainworthy.recipes.llm.data import column_names, formats, pairs, preferences
from trainworthy.recipes.llm.evaluation import metrics
from trainworthy.recipes.rl.language.data import problems

from tests.helpers import language
from tests.helpers.commands import trainworthy
from tests.llm.test_sft import written

USER, SAID = {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}


def messages(row: dict) -> list[dict]:
    return formats.as_messages(formats.conversation(row))["messages"]


@pytest.mark.parametrize("row", [
    {"messages": [USER, SAID]},
    {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Yes."}]},
    {"conversations": json.dumps([{"role": "user", "content": "One?"}, {"role": "model", "content": "Yes."}])},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "One?"}]}, SAID]},
    {"instruction": "One?", "input": "", "output": "Yes."},
    {"prompt": "One?", "completion": "Yes."},
    {"prompt": [USER], "completion": [SAID]},
], ids=["openai", "sharegpt", "json", "parts", "alpaca", "texts", "turns"])  # fmt: skip
def test_a_question_and_its_answer_in_every_form(row: dict):
    assert messages(row) == [USER, SAID]


def test_systems_tools_calls_history_and_thoughts_are_kept():
    row = {"conversations": [{"from": "human", "value": "One?"},
                             {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "it"}}'},
                             {"from": "observation", "value": "1"}, {"from": "gpt", "value": "Yes."}],
           "system": "Be brief.", "tools": '[{"name": "look", "parameters": {}}]'}  # fmt: skip
    found = formats.conversation(row)
    assert [t["role"] for t in found["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert found["messages"][2]["tool_calls"] == [CALL]
    assert found["tools"] == [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    sent = CALL | {"id": "1", "function": CALL["function"] | {"arguments": '{"at": "it"}'}}
    turns = messages(
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [sent], "reasoning": "Hm."}]}
    )
    assert turns[1]["tool_calls"] == [CALL | {"id": "1"}]
    assert turns[1]["reasoning_content"] == turns[1]["thinking"] == "Hm."
    old = messages({"instruction": "And?", "input": "x", "output": "So.", "history": [["One?", "Yes."]], "system": "S"})
    assert [t["content"] for t in old] == ["S", "One?", "Yes.", "And?\nx", "So."]


@pytest.mark.parametrize("row", [
    {"prompt": "One?", "chosen": "Yes.", "rejected": "No."},
    {"prompt": [USER], "chosen": [SAID], "rejected": [SAID | {"content": "No."}]},
    {"chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "No."}]},
    {"prompt": "One?", "chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "No."}]},
    {"chosen": "\n\nHuman: One?\n\nAssistant: Yes.", "rejected": "\n\nHuman: One?\n\nAssistant: No."},
    {"conversations": [{"from": "human", "value": "One?"}], "chosen": {"from": "gpt", "value": "Yes."},
     "rejected": {"from": "gpt", "value": "No."}},
    {"messages": [USER], "chosen": SAID, "rejected": SAID | {"content": "No."}},
    {"messages": [USER, SAID], "chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "No."}]},
    {"prompt": [USER], "chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "No."}]},
    {"instruction": "One?", "input": "", "chosen": "Yes.", "rejected": "No."},
], ids=["texts", "turns", "implicit", "both", "dialogue", "llama-factory", "axolotl", "messages-too", "prompt-too", "alpaca"])  # fmt: skip
def test_preferences_in_their_usual_shapes(row: dict):
    found = formats.preference(row)
    assert {k: found[k] for k in ("prompt", "chosen", "rejected")} == {
        "prompt": "One?",
        "chosen": "Yes.",
        "rejected": "No.",
    }
    assert "messages" not in found


@pytest.mark.parametrize("row", [
    {"prompt": "One?", "completion": "Yes."},
    {"prompt": "One?", "chosen": "Yes.", "rejected": "No."},
    {"prompt": [USER], "chosen": [SAID], "rejected": [SAID | {"content": "No."}]},
    {"instruction": "One?", "chosen": "Yes.", "rejected": "No."},
    {"conversations": [USER], "chosen": SAID, "rejected": SAID | {"content": "No."}},
], ids=["pairs", "texts", "turns", "alpaca", "llama-factory"])  # fmt: skip
def test_a_column_with_the_system_turn_is_read_in_every_form(row: dict):
    """As Intel/orca_dpo_pairs has it; it was dropped in silence."""
    read = formats.preference if "chosen" in row else formats.conversation
    found = read(row | {"system": "Be brief."})["messages"]
    assert found[:2] == [{"role": "system", "content": "Be brief."}, USER]
    assert formats.is_conversation(row | {"system": "Be brief."})
    assert "messages" not in read(
        {"prompt": "One?", "completion": "Yes.", "chosen": "Yes.", "rejected": "No.", "system": ""}
    )
    asked = formats.question({"prompt": "One?", "system": "Be brief."})
    assert asked["messages"] == [{"role": "system", "content": "Be brief."}, USER]


@pytest.mark.parametrize(("row", "words"), [
    ({"prompt": "a", "completion": "b", "label": True}, ("a label (KTO)", "the answer whose label is true")),
    ({"question": "a", "chosen": "b", "rejected": "c"}, ("--data.columns prompt=question",)),
    ({"prompt": "a", "response_a": "b", "response_b": "c", "score_a": 3, "score_b": 4},
     ("chosen is that of response_a and response_b which has the better score_a or score_b",)),
    ({"question": "a", "answer_1": "b", "answer_2": "c", "winner": "answer_1"}, ("that of answer_1 and answer_2 which winner names",)),
], ids=["kto", "question", "scores", "winner"])  # fmt: skip
def test_what_is_no_preference_is_named_for_what_it_is(row: dict, words: tuple[str, ...], tmp_path: Path):
    source = preferences.Source(path=str(written(tmp_path / "rows.jsonl", [row] * 9)))
    with pytest.raises(UserError) as told:
        preferences.read(source, preferences.chat(language.tokenizer(), source))
    assert not [w for w in words if w not in str(told.value)], told.value


def test_preferences_behind_a_conversation_are_read_as_one(tmp_path: Path):
    talk = [USER, SAID, {"role": "user", "content": "Why?"}]
    rows = [{"chosen": [*talk, SAID | {"content": f"So {i}."}], "rejected": [*talk, SAID | {"content": "No."}], "source": str(i)}
            for i in range(60)]  # fmt: skip
    source = preferences.Source(path=str(written(tmp_path / "rows.jsonl", rows)), val="0.2")
    chat = preferences.chat(language.tokenizer(), source)
    train, val, _, told = preferences.read(source, chat)
    assert len(train) + len(val) == 60
    assert 3 < len(val) < 25
    assert not told
    row = preferences.Preferences(train[:1], chat).row(train[0])
    text = chat.tokenizer.decode(row["prompt_ids"] + row["chosen_ids"])
    assert "One?" in text
    assert text.endswith(f"{train[0]['chosen']}<|im_end|>")
    with pytest.raises(formats.BadRow, match="more than their last turn"):
        formats.preference({"chosen": [USER, SAID], "rejected": [USER, SAID, USER, SAID]})


def test_columns_are_mapped_and_validation_has_a_file_of_its_own(tmp_path: Path):
    rows = [{"question": f"{i}?", "reply": f"{i}"} for i in range(9)]
    train = written(tmp_path / "rows.jsonl", rows)
    (tmp_path / "val.json").write_text(
        json.dumps([{"question": "new?", "reply": "x"}, {"question": "two?", "reply": "y"}])
    )
    names = "prompt=question,completion=reply"
    source = pairs.Source(path=str(train), val=str(tmp_path / "val.json"), columns=names, near=0)
    found = pairs.read(source, pairs.chat(language.tokenizer(), source))
    assert [len(x) for x in found] == [9, 2, 0, 0], "train, val, test, nothing to say"
    assert found[1][0] == {"prompt": "new?", "completion": "x", "source": "new?"}
    for wrong, words in (
        ({"columns": "prompt=q"}, "has no column q"),
        ({"columns": "prompt"}, "not a list"),
        ({"val": "1.5"}, "not a share"),
        ({"val": str(train)}, "names the training data"),
    ):
        source = pairs.Source(path=str(train), **{"columns": names, **wrong})
        with pytest.raises(UserError, match=words):
            pairs.read(source, pairs.chat(language.tokenizer(), source))


def test_rows_of_several_types_in_one_file_are_read_as_they_are(tmp_path: Path):
    """A table has one type a column; lines of JSON need not."""
    calls = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}, SAID]
    other = [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"at": 3}}}]}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "One?"}]}, SAID]
    path = written(tmp_path / "rows.jsonl", [{"messages": m} for m in (calls, other, parts)])
    rows = [formats.conversation(row) for row in pairs.tables(str(path))["train"]]
    assert rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"at": "it"}
    assert rows[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"at": 3}
    assert rows[2]["messages"][0] == USER


# ----------------------------------------------------------------------------------------------------------------- metrics
def test_words_of_all_scripts():
    assert metrics.words("parse_HTTPServer2 getName") == ["parse", "https", "erver", "2", "get", "name"]
    assert metrics.words("Привет, мир! ЁлкаДом") == ["привет", "мир", "ёлка", "дом"]
    assert metrics.words("我喜欢猫。ok 12") == ["我", "喜", "欢", "猫", "ok", "12"]
    assert metrics.words("हिन्दी भाषा") == ["हिन्दी", "भाषा"]
    assert metrics.words("한국어 말") == ["한국어", "말"]
    for text in ("the APIs of GPUs", "parse_HTTPServer2 getName", "ABcD eF 3D", "McDonald's iPhone"):
        assert metrics.words(f"{text} é") == [*metrics.words(text), "é"], (
            "a dash or an emoji changes the words next to it"
        )
    assert metrics.f1("Я люблю котов", "Я люблю собак") == pytest.approx(2 / 3)
    assert metrics.f1("我喜欢猫", "我喜欢狗") == 0.75


def test_scripts_are_counted_by_their_letters():
    assert metrics.scripts(["abcdef", "дом", "猫"]) == "latin 60%, cyrillic 30%, cjk 10%"
    assert metrics.scripts(["12 !"]) == ""


def test_metrics_by_name():
    assert metrics.named("f1, rouge,f1") == ["f1", "rouge"]
    assert metrics.score("rouge")("a b c d", "a x c d") == 0.75
    assert metrics.score("bleu")("eins zwei drei vier fünf", "eins zwei drei vier fünf") == pytest.approx(1.0)
    assert 0.2 < metrics.score("chrf")("我喜欢猫", "我喜欢狗") < 1
    assert metrics.score("os.path:commonprefix") is not None
    for wrong in ("nothing", "os.path:nothing", "no.such:thing", ""):
        with pytest.raises(UserError):
            metrics.named(wrong)
    with pytest.raises(UserError, match="raised"):
        metrics.score("math:sqrt")("a", "b")
    lowest = metrics.metric("perplexity", "", 300)
    assert not lowest.higher_is_better
    assert (lowest.floor, lowest.ceiling) == (300.0, 1.0)


def test_a_metric_of_one_s_own_is_a_module_s_or_a_file_s(tmp_path: Path):
    """The same names as `--reward` takes; a file that raises when it is imported is an error that says so."""
    file = tmp_path / "mine.py"
    file.write_text("def share(said, wanted):\n    return len({*said} & {*wanted}) / 4\n")
    assert metrics.score(f"{file}:share")("abcd", "abxy") == 0.5
    assert metrics.key(f"{file}:share") == "share"
    (tmp_path / "raises.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"raised while it was imported(?s:.*)ZeroDivisionError"):
        metrics.score(f"{tmp_path / 'raises.py'}:share")
    with pytest.raises(UserError, match=r"cannot be found(?s:.*)no file /"):
        metrics.score(f"{tmp_path / 'gone.py'}:share")
    with pytest.raises(UserError, match=rf"mine.py has share(?s:.*)next: +--metric {file}:share"):
        metrics.score(f"{file}:sahre")  # the message was: a file's own path needs no import path
    with pytest.raises(UserError, match=r"os.path:nothing cannot be found"):
        metrics.score("os.path:nothing")
    (tmp_path / "needs.py").write_text("import a_package_that_is_missing\n")
    with pytest.raises(UserError, match=r"raised while it was imported(?s:.*)a_package_that_is_missing"):
        metrics.score(f"{tmp_path / 'needs.py'}:share")


# ------------------------------------------------------------------------------------------------------------- arithmetic
@pytest.mark.parametrize(("answer", "said", "right"), [
    ("1/2", "3/2", False), (r"\frac{1}{2}", r"\frac{5}{2}", False), ("10", "2^10", False), ("1/2", "0.5", True),
    (r"\frac{1}{2}", "$1/2$", True), ("46", "34 + 12", False), ("46", "12 + 34 = 46", True), ("1024", "2^10", False),
    ("1,234", "so 1234.", True), ("-3", "3", False), ("x^2+1", "1+x^2", True), ("72", r"\boxed{72}", True), ("46", "", False),
    ("47", "47, no, 48", False), ("Paris", "paris\n", True), ("50%", "0.5", True),
])  # fmt: skip
def test_answers_are_judged_by_what_they_are_worth(answer: str, said: str, right: bool):
    assert problems.right(said, answer) is right


def test_wrong_answers_are_drawn_by_another_rule_than_the_reward_s():
    assert [problems.one_digit_off(a) for a in ("1/2", r"\frac{1}{2}", "10", "Paris")] == [
        "2/2",
        r"\frac{2}{2}",
        "20",
        "",
    ]
    assert not problems.differ("1/2", "0.5")
    assert problems.differ("1/2", "3/2")
    assert problems.differ("Paris", "Rome")


def test_a_test_set_is_what_validation_leaves_of_the_held_out_rows():
    rows = [{"prompt": str(i)} for i in range(238)]
    val, test = pairs.spaced(rows, 128)
    assert (len(val), len(test)) == (128, 110)
    assert not {r["prompt"] for r in val} & {r["prompt"] for r in test}
    assert pairs.spaced(rows, 0) == (rows, [])
    assert pairs.spaced(rows[:150], 128)[1] == [], "22 rows are too few to report"
    asked = [{"prompt": str(i % 150)} for i in range(300)]  # every prompt twice
    val, test = pairs.spaced(asked, 128)
    assert not {r["prompt"] for r in val} & {r["prompt"] for r in test}


def test_rows_of_one_instruction_are_held_out_by_their_input():
    """Alpaca's files often have one instruction, and what differs is the input: all rows must not become one group."""
    row = {"instruction": "Translate.", "output": "So."}
    assert formats.conversation(row | {"input": "one"})["source"] == "Translate.\none"
    assert formats.conversation(row | {"input": "one", "source": "book"})["source"] == "book"
    assert formats.conversation(row)["source"] == "Translate."


def test_rows_of_one_source_are_held_out_together_about_a_share():
    """A hash alone may hold out no source, or the largest one."""
    many = [f"document {i % 60}" for i in range(600)]
    for names in (many, [n for n in many if not is_held_out(n, 0.05)]):
        sides = hold_out(names, 0.05)
        held = {n for n, out in zip(names, sides, strict=True) if out}
        assert held.isdisjoint(n for n, out in zip(names, sides, strict=True) if not out)
        assert 0.01 < sum(sides) / len(names) < 0.15
    assert hold_out(["oasst", "dolly", "alpaca"] * 100, 0.05) is None  # data sets, not documents


def test_a_small_file_holds_out_its_share():
    """Hashes alone held out 5 of 240 rows where 12 are a twentieth."""
    for k in range(40):
        rows = [f"file {k} row {i}" for i in range(240)]
        assert 6 <= sum(hold_out(rows, 0.05)) <= 24
        assert sum(hold_out(rows[:10], 0.05)) == 1
        assert hold_out(rows[:1], 0.05) is None  # nothing would be left to train on
        few = [r for r in rows if not is_held_out(r, 0.05)]
        assert 9 <= sum(hold_out(few, 0.05)) <= 12


@pytest.mark.parametrize(
    "sources", [("oasst", "dolly", "alpaca"), tuple(n for n in map(str, range(200)) if not is_held_out(n, 0.05))]
)
def test_a_source_column_of_any_kind_leaves_rows_to_validate_on(sources: tuple[str, ...], tmp_path: Path):
    rows = [
        {"prompt": f"Add {i} and {i}.", "completion": f"It is {2 * i}.", "source": sources[i % len(sources)]}
        for i in range(400)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    done = trainworthy("data", "llm/sft", "--data.path", "rows.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("`source` has 3 values" in done.stdout) == (len(sources) == 3)
    assert ("source · group" in done.stdout) == (len(sources) > 3), done.stdout


def test_answers_that_are_alike_are_no_overlap_and_no_column_is_made_up(tmp_path: Path):
    """Validation's `yes` was called a copy of training's, and the exclusion lists left nothing to train on."""
    words = ["red", "blue", "green", "white", "black", "brown", "grey", "pink", "gold", "lilac"]
    rows = [{"prompt": f"Is {words[i % 10]} {words[i // 10 % 10]} {words[i // 100]} a name?", "completion": ("yes", "no")[i % 2]}
            for i in range(300)]  # fmt: skip
    asked = [
        {"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["completion"]}]}
        for r in rows
    ]
    for name, form in (("pairs", rows), ("chats", asked)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in form))
        done = trainworthy("data", "llm/sft", "--data.path", f"{name}.jsonl", cwd=tmp_path, code=0)
        assert "completion: same text        0 samples (" in done.stdout, done.stdout
        assert "exclusion lists: 0 texts" in done.stdout
        assert "groups of samples with the same question: 2" in done.stdout
        assert "source · group" not in done.stdout


@pytest.mark.parametrize("split", [True, False], ids=["prompt", "both"])
def test_a_dialogue_as_text_is_read_as_its_turns(split: bool):
    """All of it stood in one turn of the user, with `Assistant:` in it."""
    before = "\n\nHuman: One?\n\nAssistant: Yes.\n\nHuman: Two?\n\nMore?\n\nAssistant:"
    row = (
        {"prompt": before, "chosen": " A.", "rejected": " B."}
        if split
        else {"chosen": f"{before} A.", "rejected": f"{before} B."}
    )
    found = formats.preference(row)
    assert [(t["role"], t["content"]) for t in found["messages"]] == [
        ("user", "One?"),
        ("assistant", "Yes."),
        ("user", "Two?\n\nMore?"),
    ]
    assert (found["prompt"], found["chosen"], found["rejected"]) == ("Two?\n\nMore?", "A.", "B.")
    assert formats.is_conversation(row)


def test_a_system_column_beside_another_system_turn_is_a_bad_row():
    """The column was dropped without a word."""
    turns = [
        {"role": "system", "content": "Rhyme."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
    ]
    assert formats.conversation({"system": "Rhyme.", "messages": turns})["messages"] == turns
    with pytest.raises(formats.BadRow, match="two system turns"):
        formats.conversation({"system": "Be brief.", "messages": turns})


def test_no_setting_is_advised_that_changes_nothing():
    assert column_names.mapped({"prompt": [], "answer": "x"}, "prompt (str) and answer (str)") == ""
    assert (
        column_names.mapped({"question": "?", "answer": "x"}, "prompt (str) and answer (str)")
        == "--data.columns prompt=question"
    )


def test_answers_that_are_marked_as_bad_are_not_learnt():
    """They were, with a note that nothing reads `label`."""
    row = {"prompt": "One?", "completion": "No.", "label": True}
    assert formats.conversation(row)["completion"] == "No."
    with pytest.raises(formats.BadRow, match="not to give"):
        formats.conversation(row | {"label": False})


def test_plain_text_and_tokens_are_for_others():
    needed = "prompt (str) and completion (str), messages"
    assert "llm/pretrain" in column_names.mapped({"text": "A text."}, needed)
    assert "tokenizes" in column_names.mapped({"input_ids": [1], "labels": [-100]}, needed)
