"""`trainworthy predict` and `trainworthy chat` on what each recipe with a language model exports; llm/sft is in test_exports_in_use."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import chat, predict
from trainworthy.recipes.llm.data import formats
from trainworthy.recipes.llm.models import speaking

from tests.helpers import language
from tests.helpers.commands import environment, read, run_folder, trainworthy
from tests.llm.test_sft import written

QUICK = ("--gates.no-enabled", "--run.no-tensorboard", "--train.batch-size", "8", "--train.eval-every", "10")
ROWS = {
    "llm/dpo": [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": f"No {i} idea."} for i in range(80)],
    "llm/pretrain": [
        {"text": f"Document {i} says that {i} is a number which follows {i - 1}. " * 3} for i in range(120)
    ],
    "rl/grpo": [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(80)],
    "rl/rlhf": [{"prompt": f"Say {i}"} for i in range(80)],
}
MORE = {
    "llm/dpo": ("--model", "net", "--train.epochs", "0.2"),
    "llm/pretrain": ("--train.epochs", "0.2"),
    "rl/grpo": ("--model", "net", "--train.epochs", "1", "--num-generations", "4", "--data.held-out", "8"),
    "rl/rlhf": ("--model", "net", "--train.epochs", "1", "--rollout-batch-size", "8", "--max-new-tokens", "8"),
}
LONGER = ("llm/pretrain", "rl/rlhf")


@pytest.mark.parametrize("recipe", [pytest.param(r, marks=[pytest.mark.verify] * (r in LONGER)) for r in ROWS])
def test_an_export_answers(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Prompts, a conversation and a chat with a second turn: every row is answered, none longer than was asked for."""
    language.write(tmp_path / "net")
    written(tmp_path / "rows.jsonl", ROWS[recipe])
    done = trainworthy("run", recipe, "--data.path", "rows.jsonl", *MORE[recipe], *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = run_folder(tmp_path)
    talk = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    written(tmp_path / "asked.jsonl", [{"prompt": "What is 5?"}, {"messages": talk}, {"prompt": "7 + 1 ="}])
    done = trainworthy("predict", folder, "asked.jsonl", "--max-new-tokens", "6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row.get("prompt") for row in rows] == ["What is 5?", None, "7 + 1 ="]
    assert all(row["tokens"] <= 6 and (row["ended"] or row["tokens"] == 6) for row in rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 5?\nAnd 6?\n/new\n7 + 1 =\n/quit\n"))
    capsys.readouterr()
    chat.main(["chat", str(folder), "--max-new-tokens", "6"])
    said = capsys.readouterr().out
    assert rows[0]["answer"] in said
    assert rows[2]["answer"] in said


class Echo:
    """Answers with the roles and texts of all turns; two questions are as many as it has room for."""

    called, unspoken, chats = "echo", "", True

    def answers(self, rows: list[dict], size: int):
        for row in rows:
            yield {"answer": " ".join(f"{t['role'][0]}:{t['content']}" for t in row["messages"]), "ended": True}

    def too_long(self, turns: list[dict]) -> str:
        if any(t["content"] == "refuse" for t in turns):
            raise ValueError("System role not supported")
        return "too long" * (sum(t["role"] == "user" for t in turns) > 2)


def test_a_system_message_begins_a_conversation_and_stays_when_earlier_turns_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(chat, "speaker_of", lambda folder, **options: Echo())
    typed = "a\n/new\nb\nc\nd\n/system refuse\n/system T\ne\n/system\nf\n/quit\nnot asked\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    chat.main(["chat", "run", "--system", "S"])
    said = capsys.readouterr()
    alone = ["s:S u:a", "s:S u:b", "s:S u:b a:s:S u:b u:c", "s:S u:d", "s:T u:e", "u:f"]
    assert said.out.splitlines() == alone
    assert "System role not supported" in said.err
    monkeypatch.setattr(Echo, "chats", False)
    with pytest.raises(UserError, match="no system message"):
        chat.main(["chat", "run", "--system", "S"])


@pytest.mark.parametrize("lora", ["4", pytest.param("0", marks=pytest.mark.verify)], ids=["adapters", "whole"])
def test_a_reward_model_rewards_answers(lora: str, tmp_path: Path):
    """Pairs, single answers and conversations, under the names of the run's --data.columns; the rewards of the report."""
    language.write(tmp_path / "net")
    rows = [{"q": r["prompt"], "good": r["chosen"], "bad": r["rejected"]} for r in ROWS["llm/dpo"]]
    written(tmp_path / "rows.jsonl", rows)
    ran = trainworthy("run", "llm/reward", "--data.path", "rows.jsonl", "--data.columns", "prompt=q,chosen=good,rejected=bad", "--model",
                       "net", "--lora-rank", lora, "--train.epochs", "1", "--data.val", "0.3", *QUICK, cwd=tmp_path)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    folder = run_folder(tmp_path)
    talk = [{"role": "user", "content": "What is 5?"}, {"role": "assistant", "content": "It is 5."}]
    written(
        tmp_path / "asked.jsonl",
        [rows[5] | {"id": 1}, {"prompt": "What is 5?", "completion": "It is 5."}, {"messages": talk}],
    )
    done = trainworthy("predict", folder, "asked.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pair, single, messages = (json.loads(line) for line in done.stdout.splitlines())
    assert pair["id"] == 1
    assert pair["chosen_reward"] == pytest.approx(single["reward"], abs=1e-5)
    assert messages["reward"] == pytest.approx(single["reward"], abs=1e-5)
    assert abs(pair["chosen_reward"] - pair["rejected_reward"]) > 1e-4
    assert f"next   trainworthy predict {folder.relative_to(tmp_path)} FILE" in ran.stdout
    assert {"accuracy", "nll"} <= read(folder / "summary.json")["intervals"]["val"].keys()
    usage = (
        (folder / "export" / "README.md").read_text().partition("```python")[2].partition("```")[0]
    )  # what the card says
    usage = usage.replace('"content": "..."', '"content": "What is 5?"').replace('}], "..."', '}], "It is 5."')
    there = subprocess.run(
        [sys.executable, "-c", usage], cwd=folder, env=environment(PYTHONPATH=""), capture_output=True, text=True
    )
    assert float(there.stdout) == pytest.approx(single["reward"], abs=1e-5), there.stderr
    done = trainworthy("predict", folder, "asked.jsonl", "--max-new-tokens", "4", cwd=tmp_path)
    assert (done.returncode, "generates none" in done.stderr) == (2, True)
    done = trainworthy("chat", folder, cwd=tmp_path)
    assert (done.returncode, "rewards answers" in done.stderr) == (2, True)


def test_a_few_rows_that_cannot_be_asked_are_left_out_and_named(tmp_path: Path, capsys):
    """`run` leaves them out, too: a file that trained a reward model could not be scored by it."""

    def one(row: dict) -> dict:
        if not row["prompt"]:
            raise formats.BadRow("prompt is empty")
        return row

    def read_file(n: int) -> list[dict]:
        file = written(tmp_path / "rows.jsonl", [{"prompt": str(i) if i != 5 else ""} for i in range(n)])
        return speaking.usable(file, one, "", what="asked", needed="prompt (str)")

    assert len(read_file(100)) == 99
    assert "1 of 100 rows of" in (said := capsys.readouterr().err)
    assert "line 6: prompt is empty" in said
    with pytest.raises(UserError, match="1 of 99 rows"):
        read_file(99)


def test_one_row_is_counted_in_the_singular():
    assert predict.count(1, "answers") == "1 answer"
    assert predict.count(1, "rows with rewards") == "1 row with rewards"
    assert predict.count(1200, "rows with rewards") == "1,200 rows with rewards"
