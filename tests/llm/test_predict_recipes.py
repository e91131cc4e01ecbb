"""`trainworthy predict` and `trainworthy chat` on what each recipe with a language model exports; llm/sft is in test_exports_in_use."""

import io
import json
import sys
from pathlib import Path

import pytest
from trainworthy.core.commands import chat

from tests.helpers import language
from tests.helpers.commands import run_folder, trainworthy
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
