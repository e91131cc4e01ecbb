"""What texts, preferences, questions and prompts of one's own can be wrong in: each recipe of language through the real command."""

import json
from pathlib import Path

import pytest
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.llm.data import pairs, preferences

from tests.helpers import language

NEEDED = {
    "llm/pretrain": "'text' (str)",
    "llm/sft": "completion (str)",
    "llm/dpo": "rejected (str)",
    "llm/reward": "rejected (str)",
    "rl/grpo": "answer (str)",
    "rl/rlhf": "'prompt' (str)",
}
ROWS = {
    "llm/sft": {"prompt": "number {i}", "completion": "{i}"},
    "llm/dpo": {"prompt": "number {i}", "chosen": "{i}", "rejected": "no {i}"},
    "llm/reward": {"prompt": "number {i}", "chosen": "{i}", "rejected": "no {i}"},
}
REWARDS = """
def undefined(completions, **_):
    return [float("nan")] * len(completions)

def one(completions, **_):
    return [1.0]
"""
MUTE = language.TEMPLATE.replace("m['content']", "(m['content'] if m['role'] != 'assistant' else '')")


def each(recipes, *often: str) -> list:
    """All of them by `make verify`, some by every test run."""
    return [pytest.param(r, marks=[pytest.mark.verify] * (r not in often)) for r in recipes]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


@pytest.fixture
def refused(net: Path, launch, tmp_path: Path):
    """`refused(recipe, content, words, *argv)`: the command ends with 2 and says the words."""

    def ask(recipe: str, content: bytes | None, words: tuple[str, ...], *argv: str, model: Path = net) -> None:
        where = () if recipe == "llm/pretrain" else ("--model", str(model))
        if content is not None:
            (tmp_path / "rows.jsonl").write_bytes(content)
            where += ("--data.path", "rows.jsonl")
        done = launch("check", recipe, *where, *argv, "--only", "schema")
        assert done.returncode == 2, done.shown
        assert "Traceback" not in done.stderr
        assert not [w for w in words if w not in done.stderr], done.stderr

    return ask


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def many(recipe: str, *more: dict[str, str]) -> bytes:
    """Sixty good rows, and more."""
    return lines([*({k: v.format(i=i) for k, v in ROWS[recipe].items()} for i in range(60)), *more])


@pytest.mark.parametrize("recipe", each(NEEDED, "rl/grpo", "rl/rlhf"))
def test_columns_of_another_kind(recipe: str, refused):
    refused(recipe, lines([{"question": "a", "reply": "b"}]), ("question (str), reply (str)", NEEDED[recipe]))


@pytest.mark.parametrize("recipe", each(NEEDED, "llm/sft", "llm/pretrain"))
def test_bytes_that_are_no_text(recipe: str, refused):
    keys = {"llm/pretrain": ("text",), "rl/rlhf": ("prompt",), "rl/grpo": ("prompt", "answer")}.get(recipe) or ROWS[
        recipe
    ]
    row = b"{" + b", ".join(b'"%s": "caf\xe9"' % k.encode() for k in keys) + b"}\n"
    refused(recipe, row, ("UTF-8",))


@pytest.mark.parametrize("recipe", each(NEEDED, "llm/dpo"))
def test_an_empty_file(recipe: str, refused):
    refused(recipe, b"", ("no documents" if recipe in ("llm/pretrain", "rl/rlhf") else "is empty",))


@pytest.mark.parametrize("recipe", each(ROWS, "llm/dpo"))
def test_a_limit_beyond_the_context(recipe: str, refused):
    refused(recipe, None, ("longer than the model's context", "2048 positions"), "--data.max-length", "4096")


@pytest.mark.parametrize("recipe", each(ROWS, "llm/reward"))
def test_answers_that_a_limit_would_cut(recipe: str, refused):
    """More than a hundredth of them: refused, and none is cut; how many, and what would do."""
    long = {k: f"{v} " + 40 * "word " for k, v in ROWS[recipe].items()}
    words = ("2 of ", "longer than 160 tokens", "--data.max-bad", "--data.max-length")
    refused(recipe, many(recipe, long | {"prompt": "one"}, long | {"prompt": "two"}), words, "--data.max-length", "160")


@pytest.mark.parametrize("module", [pairs, preferences])
@pytest.mark.parametrize(("max_length", "share", "words", "not_words"), [
    (0, 1.0, "next:         a model with a longer context", "--data.max-"),  # "--data.max-bad 1.001", or a length beyond the context
    (0, 0.1, "next:         --data.max-bad 0.101 leaves them out, or a model with", "--data.max-length"),
    (16, 1.0, "next:         --data.max-length 99", "--data.max-bad "),
    (16, 0.1, "next:         --data.max-length 99, or --data.max-bad 0.101 leaves", "a model with"),
])  # fmt: skip
def test_what_helps_rows_that_are_too_long(
    module, max_length: int, share: float, words: str, not_words: str, monkeypatch
):
    rows = [{"prompt": "Who?", "completion": "I."}] * 100
    sizes = [99 if i < 100 * share else 9 for i in range(100)]
    monkeypatch.setattr(pairs, "lengths", lambda rows, chat: sizes)
    monkeypatch.setattr(preferences, "sizes", lambda rows, chat: sizes)
    source = pairs.Source(path="rows.jsonl", max_length=max_length)
    check = module.short_enough if module is pairs else module.usable
    with pytest.raises(UserError) as told:
        check(rows, None, source, "train", 16)
    assert words in str(told.value)
    assert not_words not in str(told.value).split("next:")[1]


def test_nothing_that_is_scored(refused):
    """Conversations in which nobody answers."""
    refused(
        "llm/sft",
        lines([{"messages": [{"role": "user", "content": f"number {i}"}]} for i in range(60)]),
        ("no answer to learn",),
    )


def test_a_template_that_drops_what_the_assistant_says(refused, tmp_path: Path):
    mute = language.write(tmp_path / "mute")
    (mute / "chat_template.jinja").write_text(MUTE)
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    refused("llm/sft", lines([{"messages": turns}] * 60), ("does not render a question and its answer",), model=mute)


@pytest.mark.parametrize("recipe", each(["llm/dpo", "llm/reward"], "llm/dpo"))
def test_such_a_template_is_refused_for_preferences_too(recipe: str, refused, tmp_path: Path):
    mute = language.write(tmp_path / "mute")
    (mute / "chat_template.jinja").write_text(MUTE)
    refused(recipe, None, ("does not render a question and its answer",), model=mute)


@pytest.mark.parametrize(("name", "words"), [
    pytest.param("undefined", "returned nan", marks=pytest.mark.verify), ("one", "1 rewards for"),
])  # fmt: skip
def test_a_reward_that_is_no_number_or_one_for_all(name: str, words: str, refused, tmp_path: Path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    refused("rl/grpo", None, (words,), "--reward", f"rewards.py:{name}")


def test_a_wrong_number_of_rewards_in_the_middle_of_a_run(net: Path, launch):
    """Gates left out; rl/rlhf asks a function of a module."""
    more = (
        "--data.tokens",
        "40",
        "--data.max-bad",
        "1",
        "--rollout-batch-size",
        "16",
        "--train.batch-size",
        "8",
        "--max-new-tokens",
        "4",
    )
    asked = ("run", "rl/rlhf", "--model", str(net), *more, "--gates.no-enabled", "--run.no-tensorboard")
    done = launch(*asked, "--reward", "tests.helpers.odd_rewards:one")
    assert done.returncode == 2, done.shown
    assert "a wrong number of rewards" in done.stderr
    assert "Traceback" not in done.stderr


TURNS = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one"}]


@pytest.mark.parametrize(
    ("recipe", "row", "argv", "words"),
    [
        ("llm/sft", {"dialog": [{"who": "human", "value": "1?"}, {"who": "gpt", "value": "one"}]},
         ("--data.columns", "messages=dialog"), ("a turn has no role", "from and value", "or convert the rows")),
        ("llm/sft", {"chosen": TURNS, "rejected": TURNS}, (), ("look like preferences", "llm/dpo or llm/reward")),
        ("llm/dpo", {"better": TURNS, "worse": TURNS}, (), ("the last two as turns", "--data.columns chosen=better,rejected=worse")),
        ("llm/dpo", {"conversations": TURNS}, (), ("whole conversations", "llm/sft, which reads")),
        ("llm/dpo", {"chosen": TURNS, "rejected": "two"}, (), ("chosen: list, rejected: str", "both as text")),
    ],
)  # fmt: skip
def test_the_next_step_reads_these_rows(recipe: str, row: dict, argv: tuple[str, ...], words: tuple[str, ...], refused):
    """Other names of columns, or rows of another recipe: the message names the setting or the recipe that reads them."""
    refused(recipe, lines([row] * 3), words, *argv)


def test_a_folder_of_tables_for_pretraining_is_a_data_set(launch, tmp_path: Path):
    (tmp_path / "part.jsonl").write_text('{"text": "one"}\n')
    done = launch("data", "llm/pretrain", "--data.path", str(tmp_path), code=2)
    assert f"next:         --data.path hub:{tmp_path}" in done.stderr
