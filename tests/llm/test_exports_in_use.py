"""What a person does with a finished run: load its export elsewhere, ask it, read its card. From a ShareGPT file and a folder like
Qwen's, by the real commands."""

import json
import math
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.verdict import Skip
from trainworthy.core.report.intervals import bootstrap
from trainworthy.recipes.llm.data import documents, formats, pairs, preferences
from trainworthy.recipes.llm.evaluation import metrics
from trainworthy.recipes.llm.gates import objective
from trainworthy.recipes.shared import language_models

from tests.conftest import ROOT
from tests.helpers import language
from tests.helpers.commands import environment, read, run_folder, trainworthy
from tests.llm.test_sft import written

ASKED = ["What is red 5 cat?", "What is blue 77 owl?", "What is green 31 hen?"]
ELSEWHERE = """
import json, sys
from pathlib import Path
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

folder, said = Path(sys.argv[1]), {}
for name, load in (("adapter", AutoPeftModelForCausalLM), ("merged", AutoModelForCausalLM)):
    where = folder if name == "adapter" else folder / "merged"
    model, tokenizer = load.from_pretrained(where, dtype="float32").eval(), AutoTokenizer.from_pretrained(where)
    how = GenerationConfig.from_pretrained(where)
    said[name] = []
    for text in json.loads(sys.argv[2]):
        given = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt",
                                              return_dict=True)
        out = model.generate(**given, generation_config=how)[0, given["input_ids"].shape[1] :].tolist()
        out = out[: out.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in out else out
        said[name].append([tokenizer.decode(out), len(out)])
assert not any(m.startswith("trainworthy") for m in sys.modules)
print(json.dumps(said))
"""


def conversations(n: int = 160) -> list[dict]:
    draw, rows = random.Random(0), []
    for _ in range(n):
        colour, number, animal = (
            draw.choice(["red", "blue", "green"]),
            draw.randrange(100),
            draw.choice(["cat", "owl", "hen", "fox"]),
        )
        turns = [
            ("human", f"What is {colour} {number} {animal}?"),
            ("gpt", f"{animal} {colour}"),
            ("human", f"And {number}?"),
            ("gpt", "No."),
        ]
        rows.append({"conversations": [{"from": who, "value": said} for who, said in turns]})
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters on a folder like Qwen's, merged as well; the best checkpoint by perplexity."""
    cwd = tmp_path_factory.mktemp("use")
    language.qwen(cwd / "qwen")
    written(cwd / "chats.jsonl", conversations())
    done = trainworthy("run", "llm/sft", "--model", "qwen", "--data.path", "chats.jsonl", "--data.val", "0.2", "--lora-rank", "4", "--optim.lr",
                       "1e-2", "--train.epochs", "0.8", "--train.eval-every", "0.4", "--metric", "perplexity,f1,chrf", "--merge-adapters",
                       "--gates.no-enabled", "--run.no-tensorboard", "--data.max-bad", "0.02", cwd=cwd)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return run_folder(cwd)


# ------------------------------------------------------------------------------------------------------------------ export
def test_adapters_and_their_merged_copy_answer_elsewhere_as_predict_does(run: Path):
    """peft and transformers in a fresh process, with what the export says of itself and nothing else."""
    cwd = run.parents[2]
    written(cwd / "asked.jsonl", [{"id": i, "prompt": text} for i, text in enumerate(ASKED)])
    done = trainworthy("predict", run, "asked.jsonl", "--batch-size", "2", cwd=cwd)
    assert done.returncode == 0, done.stderr
    ours = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["id"], row["prompt"]) for row in ours] == list(enumerate(ASKED))  # other columns are kept
    cut = sum(not row["ended"] for row in ours)
    assert (f"{cut} of 3 ({cut / 3:.0%}) were cut" in done.stderr) is (cut > 0)
    command = [sys.executable, "-c", ELSEWHERE, str(run / "export"), json.dumps(ASKED)]
    there = subprocess.run(
        command, cwd=cwd, env=environment(PYTHONPATH=""), capture_output=True, text=True, timeout=120
    )
    assert there.returncode == 0, there.stderr
    theirs = json.loads(there.stdout.splitlines()[-1])
    assert theirs["adapter"] == theirs["merged"]
    for row, (text, tokens) in zip(ours, theirs["adapter"], strict=True):
        assert row["tokens"] == tokens
        assert row["answer"] == text.rpartition("</think>")[2].strip()


@pytest.mark.verify
def test_lm_evaluation_harness_gets_the_answers_that_predict_gives(run: Path):
    """The documented command on a task of one's own, offline. `pip install lm_eval` is not part of any extra: 120 MB."""
    pytest.importorskip("lm_eval", reason="pip install lm_eval")
    cwd, page = run.parents[2], (ROOT / "docs" / "recipes" / "llm-sft.md").read_text()
    (cwd / "tasks").mkdir()
    (cwd / "tasks" / "mine.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    written(cwd / "asked.jsonl", [{"prompt": text, "completion": "cat red"} for text in ASKED])
    command = page[page.index("lm_eval run") :].partition("```")[0].replace("\\\n", "").replace("BASE", "qwen")
    command = command.replace("runs/llm-sft/RUN", str(run.relative_to(cwd))).replace(
        "dtype=float32", "dtype=float32,think_end_token=</think>"
    )
    words = [sys.executable, "-m", *shlex.split(command), "--log_samples", "--output_path", "out"]
    done = subprocess.run(
        words, cwd=cwd, env=environment(HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (samples,) = (cwd / "out").rglob("samples_mine_*.jsonl")
    theirs = {row["doc"]["prompt"]: row["filtered_resps"][0] for row in read(samples)}
    done = trainworthy("predict", run, "asked.jsonl", "--max-new-tokens", "48", cwd=cwd)
    for row in map(json.loads, done.stdout.splitlines()):
        assert row["reference"] == "cat red"
        assert theirs[row["prompt"]].strip() == row["answer"]


@pytest.mark.parametrize("folder", ["My model (v2)", "qwen-0.5b"])
def test_a_local_folder_is_no_base_model_of_the_hub(folder: str, tmp_path: Path):
    """`base_model` is a link: the hub refuses one with a space in it, and `qwen-0.5b` would be somebody else's."""
    (tmp_path / folder).mkdir()
    card = language_models.model_card(str(tmp_path / folder), 0, "chats.jsonl")
    assert "base_model" not in card
    assert card["called"] == folder
    assert f"Base model: {folder}, a local folder" in card["facts"][0]


def test_the_card_prints_the_answer_without_what_the_template_puts_before_it(tmp_path: Path):
    last = [language_models.model_card(str(tmp_path), 0, "chats.jsonl", lead=lead)["usage"].splitlines()[-1]
            for lead in ("", "<think>\n\n</think>\n\n")]  # fmt: skip
    assert last[0] == "print(text)"
    for text in ("It is.", "<think>\n\n</think>\n\nIt is."):
        shown: list[str] = []
        exec(last[1], {"print": shown.append, "text": text})
        assert shown == ["It is."]


def test_the_card_is_the_hub_s_and_names_no_folder_of_this_machine(run: Path):
    from huggingface_hub import ModelCard

    for folder, library in ((run / "export", "peft"), (run / "export" / "merged", "transformers")):
        card = ModelCard.load(folder / "README.md")
        assert (card.data.base_model, card.data.library_name) == (None, library)
        assert card.data.eval_results[0].dataset_name
        assert card.text.lstrip().startswith("# qwen-")
        measured = {r.metric_type: r.metric_value for r in card.data.eval_results}
        assert measured["f1"] == pytest.approx(read(run / "summary.json")["metrics"]["f1"], abs=1e-5)
        assert {"perplexity", "f1", "chrf", "stops"} <= set(card.data.metrics)
        for words in (
            "Gates",
            "Switched off",
            "`lora_rank`: 4",
            "## Use",
            "bootstrap",
            "a local folder",
            "chats.jsonl",
        ):
            assert words in card.text, words
        here = str(run.parents[2])
        for name in ("README.md", "adapter_config.json", "generation_config.json", "config.json"):
            assert here not in ((folder / name).read_text() if (folder / name).is_file() else ""), name
    assert read(run / "export" / "adapter_config.json")["base_model_name_or_path"] == "qwen"


@pytest.mark.parametrize(("path", "name", "known"), [
    ("HuggingFaceTB/SmolLM2-360M", "HuggingFaceTB/SmolLM2-360M", True),
    ("/x/hub/models--Qwen--Qwen3-0.6B/snapshots/abc", "Qwen/Qwen3-0.6B", True),
    ("/x/built/smollm2-135m-instruct-bf16-0a1b", "HuggingFaceTB/SmolLM2-135M-Instruct", True),
])  # fmt: skip
def test_a_base_is_called_as_others_know_it(path: str, name: str, known: bool):
    found = language_models.base(path)
    assert (found.name, found.known) == (name, known)


def test_a_base_folder_has_its_licence_and_an_export_is_named_after_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, merged = tmp_path / "Qwen3-0.6B", tmp_path / "runs" / "llm-sft" / "2026-ab" / "export" / "merged"
    card = "---\nlicense: apache-2.0\nbase_model: Qwen/Qwen3-0.6B-Base\n---\n# Qwen3\n"
    for each in (folder, merged):
        each.mkdir(parents=True)
        (each / "README.md").write_text(card)
    assert language_models.base(str(folder)) == language_models.Base("Qwen3-0.6B", False, "apache-2.0")
    for each in (merged, merged.parent):  # adapters on an export belong on that export, not on what it was made from
        assert language_models.base(str(each)).name == "llm-sft-2026-ab"
    (folder / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for path, name in (
        (merged, "runs/llm-sft/2026-ab/export/merged"),
        ("/x/hub/models--Qwen--Qwen3-0.6B/snapshots/abc", "Qwen/Qwen3-0.6B"),
    ):
        language_models.name_base(folder, str(path))
        assert read(folder / "adapter_config.json")["base_model_name_or_path"] == name


# ----------------------------------------------------------------------------------------------------------------- metrics
def test_answers_are_generated_at_the_end_alone_where_perplexity_is_first(run: Path):
    seen = [row for row in read(run / "epoch_metrics.jsonl") if "val/perplexity" in row]
    assert len(seen) >= 2
    assert not [row for row in seen if "val/f1" in row]
    summary = read(run / "summary.json")
    assert summary["metric"] == "perplexity"
    assert {"f1", "chrf", "stops"} <= summary["metrics"].keys()
    low, high = summary["intervals"]["val"]["perplexity"]
    assert low < summary["metrics"]["perplexity"] < high
    low, high = summary["intervals"]["val"]["f1"]
    assert 0 <= low <= summary["metrics"]["f1"] <= high <= 1
    assert f"[{summary['intervals']['val']['perplexity'][0]:.4f}" in (run / "card.md").read_text()
    assert "95% interval over these samples" in (run / "report.html").read_text()


def test_a_share_of_none_has_an_interval_too():
    seen = metrics.Seen()
    assert seen.intervals() == {}
    found = seen.means(
        {
            "exact": torch.zeros(36),
            "f1": torch.tensor([0.0, 0.5, 1.0] * 12),
            "perplexity": (torch.full((36,), 2.0), torch.ones(36)),
        }
    )
    assert found == {"exact": 0.0, "f1": 0.5, "perplexity": pytest.approx(math.exp(2))}
    limits = seen.intervals()
    assert limits["exact"] == (0.0, pytest.approx(0.096, abs=0.001))
    assert limits["f1"][0] == pytest.approx(0.5 - 1.96 * 0.408 / 6, abs=0.03)
    assert limits["perplexity"] == pytest.approx((math.exp(2), math.exp(2)))


def test_an_interval_is_that_of_the_mean():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = bootstrap(values)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.03)
    assert high - low == pytest.approx(2 * 1.96 * 2.0 / math.sqrt(400), rel=0.12)
    assert bootstrap(values) == (low, high)
    tokens = np.arange(1, 401)
    assert bootstrap(2.0 * tokens, tokens) == pytest.approx((2.0, 2.0))  # a ratio, not a mean of ratios


def test_rouge_by_its_orders_and_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch):
    assert metrics.score("rouge1")("a b c", "c b a") == 1.0
    assert metrics.score("rouge2")("a b c", "c b a") == 0.0
    assert metrics.score("rouge2")("a b c", "a b d") == 0.5
    assert metrics.score("rougeL") is metrics.score("rouge")
    metrics.score.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="'sacrebleu'") as told:
        metrics.named("f1,chrf")
    assert "pip install" in str(told.value)
    metrics.score.cache_clear()


def test_answers_that_are_cut_are_told_with_their_share():
    found = objective.ended(10).check([{"val/perplexity": 3.0}, {"val/stops": 0.75}])
    assert not found.ok
    assert "75%" in found.measured
    assert "25% are cut" in found.measured
    assert "--max-new-tokens 20" in found.remedy
    with pytest.raises(Skip):
        objective.ended(10).check([{"val/perplexity": 3.0}])


# -------------------------------------------------------------------------------------------------------------------- chat
def test_a_chat_keeps_its_turns_until_it_is_told_to_begin_anew(run: Path):
    """From standard input that is no terminal: the answers alone are on standard output."""
    said = "What is red 5 cat?\nAnd 5?\n\n/new\nAnd 5?\n/quit\nnot asked\n"
    command = [sys.executable, "-m", "trainworthy", "chat", str(run), "--max-new-tokens", "40"]
    done = subprocess.run(
        command, cwd=run.parents[2], input=said, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) >= 3
    rows = [{"messages": [{"role": "user", "content": "And 5?"}]},
            {"conversations": [{"from": "human", "value": "What is red 5 cat?"}, {"from": "gpt", "value": "left off"}]}]  # fmt: skip
    written(run.parents[2] / "rows.jsonl", rows)
    done = trainworthy(
        "predict", run, "rows.jsonl", "--out", "answers.jsonl", "--max-new-tokens", "40", cwd=run.parents[2]
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    alone, first = read(run.parents[2] / "answers.jsonl")
    assert [t["role"] for t in first["messages"]] == ["user"]
    assert answers[0] == "".join(first["answer"].splitlines()[:1])  # an untrained model may say nothing
    assert alone["answer"] in done.stdout or alone["answer"].splitlines()[-1] == answers[-1]


@pytest.mark.verify
def test_from_a_file_and_a_folder_to_a_measured_export_with_every_gate(tmp_path: Path, launch):
    """As the README has it: `data`, `run`, `predict`. Some rows are bad; the longest answers are in a script of three bytes a letter, and
    some of them are in no held-out row."""
    language.qwen(tmp_path / "qwen")
    rows = [json.dumps(row, ensure_ascii=False) for row in conversations(160)]
    rows += [
        json.dumps(
            {"conversations": [{"from": "human", "value": f"介绍一下 {i}"}, {"from": "gpt", "value": f"{i}是城市。"}]}
        )
        for i in range(9)
    ]
    rows[20:20] = [json.dumps(BAD["sharegpt"][0]), json.dumps(BAD["sharegpt"][2]), '{"conversations": [{"from"']
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    asked = (
        "--data.path",
        "chats.jsonl",
        "--model",
        "qwen",
        "--data.max-bad",
        "0.03",
        "--lora-rank",
        "0",
        "--optim.lr",
        "3e-3",
    )
    done = launch("data", "llm/sft", *asked)
    assert done.returncode == 0, done.shown
    for words in (
        "3 of 172 rows",
        "its last answer is empty",
        "line 23: not JSON (",
        "--train.epochs 3",
        "--data.val 0.2",
    ):
        assert words in done.stdout, done.shown
    done = launch("run", "llm/sft", *asked, "--train.epochs", "3")
    assert done.returncode == 0, done.shown
    assert {v["verdict"] for v in done.verdicts()} == {"pass", "skip"}
    assert "next   trainworthy chat runs/llm-sft/" in done.stdout
    summary = read(done.folder() / "summary.json")
    assert {"f1", "perplexity", "stops"} <= summary["metrics"].keys()
    written(tmp_path / "asked.jsonl", [{"prompt": "What is red 5 cat?"}])
    done = launch("predict", str(done.folder()), "asked.jsonl")
    assert done.returncode == 0, done.shown
    assert len(done.stdout.splitlines()) == 1


# --------------------------------------------------------------------------------------------------------------- bad input
def test_rows_that_cannot_be_asked_are_named_all_at_once(run: Path):
    cwd = run.parents[2]
    rows = [{"prompt": "fine"}, {"prompt": ""}, {"prompt": 5}, {"messages": []}, {"messages": [{"role": "user", "content": " "}]},
            {"messages": [{"role": "king", "content": "x"}]}, {"completion": "x"}, {"prompt": "long " * 200}, [1]]  # fmt: skip
    (cwd / "bad.jsonl").write_text("\n".join([*map(json.dumps, rows), "{"]))
    done = trainworthy("predict", run, "bad.jsonl", cwd=cwd)
    assert done.returncode == 2, done.stderr
    for words in ("9 of 10 rows", "line 2: prompt is empty", "line 3: prompt: int", "a turn of the user is empty", "role 'king'", "prompt: missing",
                  "context of 512", "a row is list", "line 10: not JSON ("):  # fmt: skip
        assert words in done.stderr, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("made", "argv", "words"), [
    (None, ("nowhere", "asked.jsonl"), ("no such run folder", "ls -d runs")),
    ({"recipe": "vision/classify"}, ("RUN", "asked.jsonl"), ("no language model", "llm/sft", "rl/grpo", "docs/recipes/vision-classify.md")),
    ({"recipe": "rl/ppo"}, ("RUN", "asked.jsonl"), ("no language model", "llm/sft")),
    ({"recipe": "llm/sft"}, ("RUN", "asked.jsonl"), ("has no export", "trainworthy resume")),
    ({"recipe": "vision/segment"}, ("RUN", "asked.jsonl"), ("has no export", "still running")),
    ({}, ("RUN", "asked.jsonl"), ("not a run folder",)),
    (None, ("BARE", "asked.jsonl"), ("a model without its run", "BARE/README.md")),
    ({"recipe": "llm/sft"}, ("RUN", "missing.jsonl"), ("missing.jsonl: no such file",)),
    ({"recipe": "llm/sft"}, ("RUN",), ("a run folder and a file",)),
    ({"recipe": "llm/sft"}, ("RUN", "asked.jsonl", "--greedy"), ("unknown option --greedy",)),
], ids=["no-run", "vision", "control", "no-export", "still-training", "no-args", "bare", "no-file", "no-argument", "option"])  # fmt: skip
def test_what_cannot_be_asked(made: dict | None, argv: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, launch):
    (tmp_path / "BARE").mkdir()
    (tmp_path / "BARE" / "model.safetensors").touch()
    if made is not None:
        (tmp_path / "RUN").mkdir()
        (tmp_path / "RUN" / "args.json").write_text(json.dumps(made))
        if "no language model" in words:  # a finished run
            (tmp_path / "RUN" / "export").mkdir()
    written(tmp_path / "asked.jsonl", [{"prompt": "x"}])
    done = launch("predict", *argv)
    assert done.returncode == 2, done.shown
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.shown


def test_a_run_that_a_gate_stopped_has_no_export_to_resume(tmp_path: Path, launch):
    """`resume` would only run the same gate again."""
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "args.json").write_text(json.dumps({"recipe": "llm/sft"}))
    (tmp_path / "RUN" / "gates.json").write_text(json.dumps({"gates": [{"id": "overfit", "verdict": "fail"}]}))
    written(tmp_path / "asked.jsonl", [{"prompt": "x"}])
    done = launch("predict", "RUN", "asked.jsonl")
    assert done.returncode == 2, done.shown
    assert "the gate overfit stopped it" in done.stderr
    assert "RUN/report.html" in done.stderr
    assert "trainworthy resume" not in done.stderr


SAID = {"role": "assistant", "content": "Yes."}
ASK = {"role": "user", "content": "One?"}
GOOD = {
    "sharegpt": lambda i: {
        "conversations": [{"from": "human", "value": f"One {i}?"}, {"from": "gpt", "value": "Yes."}]
    },
    "alpaca": lambda i: {"instruction": f"One {i}?", "input": "", "output": "Yes."},
    "openai": lambda i: {"messages": [{"role": "user", "content": f"One {i}?"}, SAID]},
    "texts": lambda i: {"prompt": f"One {i}?", "completion": "Yes."},
    "turns": lambda i: {"prompt": [{"role": "user", "content": f"One {i}?"}], "completion": [SAID]},
}
BAD = {
    "sharegpt": [{"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": " "}]},
                 {"conversations": [{"from": "human", "value": "One?"}]},
                 {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": 5}]},
                 {"conversations": None}, {"conversations": []}],
    "alpaca": [{"instruction": "One?", "input": "", "output": ""}, {"instruction": "One?", "output": None}, {"instruction": 5, "output": "a"},
               {"instruction": "One?", "output": "Yes.", "history": "nothing"}, {"instruction": "One?", "output": "Yes.", "history": [["a"]]}],
    "openai": [{"messages": [ASK, SAID | {"content": ""}]}, {"messages": [ASK]}, {"messages": [ASK, SAID | {"content": {"a": 1}}]},
               {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": "look"}]},
               {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": "look"}]}]},
               {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [5]}]}, {"messages": "hello"}, {"messages": ["hello"]}],
    "texts": [{"prompt": "One?", "completion": ""}, {"prompt": "One?"}, {"prompt": "One?", "completion": 5}, {"prompt": None, "completion": "a"}],
    "turns": [{"prompt": [ASK], "completion": []}, {"prompt": [ASK], "completion": [SAID | {"content": ""}]}, {"prompt": [], "completion": [SAID]},
              {"prompt": ["One?"], "completion": ["Yes."]}],
}  # fmt: skip


@pytest.mark.parametrize("form", GOOD)
def test_bad_rows_of_each_form_are_all_named_in_one_message(form: str, tmp_path: Path):
    rows = [GOOD[form](i) for i in range(200)]
    rows[3:3] = BAD[form]
    source = pairs.Source(path=str(written(tmp_path / "rows.jsonl", rows)), max_bad=0.001)
    chat = pairs.chat(language.tokenizer(), source)
    with pytest.raises(UserError) as told:
        pairs.read(source, chat)
    n = len(BAD[form])
    assert f"{n} of {len(rows)} rows" in str(told.value), told.value
    assert "line 4" in str(told.value)
    source.max_bad = 0.1
    *_, said = pairs.read(source, chat)
    assert f"{n} of {len(rows)} rows" in said[0]
    assert "left out" in said[0]


def test_bad_rows_of_the_validation_file_are_in_the_same_message(tmp_path: Path):
    """Lines that are not JSON, and rows that are no objects, are bad rows like others; each file is under --data.max-bad by itself."""

    def file(name: str, n: int, *bad: str) -> str:
        lines = [json.dumps(GOOD["sharegpt"](i) | {"source": f"{name} {i}"}) for i in range(n)]
        (tmp_path / name).write_text("\n".join([*lines[:3], *bad, *lines[3:]]))
        return str(tmp_path / name)

    empty = json.dumps(BAD["sharegpt"][0])
    source = pairs.Source(path=file("rows.jsonl", 200, empty, '{"conversations": [{"fr'), near=0)
    source.val = file("val.jsonl", 30, "[1, 2]", "no JSON")
    chat = pairs.chat(language.tokenizer(), source)
    train, *_ = pairs.read(pairs.Source(path=source.path, val="0.1", near=0), chat)  # 2 of 202 are at most 1%
    assert train
    source.max_bad = 0.001
    with pytest.raises(UserError) as told:
        pairs.read(source, chat)
    for words in ("2 of 202 rows of", "2 of 32 rows of", "rows.jsonl: line 4: its last answer is empty", "line 5: not JSON (",
                  "val.jsonl: line 4: a row is list", "line 5: not JSON (", "--data.max-bad 0.06"):  # fmt: skip
        assert words in str(told.value), told.value
    source.max_bad = 0.07
    _, val, _, said = pairs.read(source, chat)
    assert len(val) == 30
    assert [words.partition(" rows of ")[0] for words in said[:2]] == ["2 of 202", "2 of 32"]
    assert all(" left out: " in words for words in said[:2])


def test_what_is_wrong_with_several_files_is_one_message(tmp_path: Path):
    """Two training files; documents to learn from and those held out, each under its setting."""
    for name in "ab":
        written(tmp_path / f"{name}.jsonl", [GOOD["texts"](i) for i in range(40)] + BAD["texts"][:1])
    source = pairs.Source(path=f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}")
    with pytest.raises(UserError) as told:
        pairs.read(source, pairs.chat(language.tokenizer(), source))
    assert {f"1 of 41 rows of {tmp_path / name}.jsonl" in str(told.value) for name in "ab"} == {True}, told.value
    for name in ("train", "val"):
        written(tmp_path / f"{name}.jsonl", [{"text": f"One {i}."} for i in range(40)] + [{"text": " "}])
    with pytest.raises(UserError) as told:
        documents.load(str(tmp_path / "train.jsonl"), "text", 0.01, str(tmp_path / "val.jsonl"))
    for words in (
        f"--data.path {tmp_path / 'train.jsonl'}: 1 of 41 documents in train",
        f"--data.val {tmp_path / 'val.jsonl'}: 1 of 41",
    ):
        assert words in str(told.value), told.value


def test_bad_rows_before_and_after_a_run_through_the_command(tmp_path: Path, launch):
    """A file of which each line is broken is no file; of a few, all are named before a model is read."""
    rows = [json.dumps(GOOD["sharegpt"](i)) for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows[:50], json.dumps(BAD["sharegpt"][1]), "{"]))
    (tmp_path / "val.jsonl").write_text("\n".join([*rows[50:], "{", json.dumps(BAD["sharegpt"][2])]))
    language.qwen(tmp_path / "qwen")
    done = launch("data", "llm/sft", "--model", "qwen", "--data.path", "rows.jsonl", "--data.val", "val.jsonl")
    assert done.returncode == 2, done.shown
    for words in (
        "2 of 52 rows",
        "and 2 of 12 rows",
        "no answer to learn",
        "a content is int",
        "line 52: ",
        "line 11: ",
    ):
        assert words in done.stderr, done.shown
    done = launch(
        "data",
        "llm/sft",
        "--model",
        "qwen",
        "--data.path",
        "rows.jsonl",
        "--data.val",
        "val.jsonl",
        "--data.max-bad",
        "0.2",
    )
    assert done.returncode == 0, done.shown
    assert "2 of 12 rows" in done.stdout


def test_rates_for_adapters_and_for_all_weights_are_in_the_help_and_told(tmp_path: Path):
    done = trainworthy("run", "llm/sft", "--help", cwd=tmp_path, COLUMNS="90")
    shown = " ".join(re.sub(r"[│┃|]", " ", done.stdout).split())
    assert "1e-4 to 2e-4 for adapters, 1e-5 to 2e-5 for all weights" in shown, shown[:3000]
    told, whole = language_models.rate_notes, language_models.LoRA(lora_rank=0)
    assert "1e-5 to 2e-5" in told(whole, 1e-3)["rate"]
    assert "--optim.lr 1e-5" in told(whole, 1e-3, usual="1e-6 to 1e-5")["rate"]
    assert told(language_models.LoRA(), 1e-3) == told(whole, 2e-5) == {}
    assert told(language_models.LoRA(lora_rank=64, lora_alpha=64), 1e-3) == {}
    assert "scaled by 0.0156" in told(language_models.LoRA(lora_rank=64, lora_alpha=1), 1e-3)["adapters"]


PREFERRED = {
    "texts": lambda i: {"prompt": f"One {i}?", "chosen": "Yes.", "rejected": "No."},
    "turns": lambda i: {"chosen": [{"role": "user", "content": f"One {i}?"}, SAID],
                        "rejected": [{"role": "user", "content": f"One {i}?"}, SAID | {"content": "No."}]},
    "dialogue": lambda i: {"chosen": f"\n\nHuman: One {i}?\n\nAssistant: Yes.", "rejected": f"\n\nHuman: One {i}?\n\nAssistant: No."},
}  # fmt: skip
BAD_PREFERENCES = {
    "texts": [{"prompt": "a", "chosen": "", "rejected": "b"}, {"prompt": "a", "chosen": "b"}, {"prompt": "a", "chosen": "b", "rejected": 5},
              {"prompt": "a", "chosen": "b", "rejected": "b "}, {"prompt": "", "chosen": "b", "rejected": "c"}],
    "turns": [{"chosen": [ASK, SAID | {"content": ""}], "rejected": [ASK, SAID]}, {"chosen": [ASK], "rejected": [ASK]},
              {"chosen": [ASK, SAID], "rejected": [ASK, SAID]}, {"chosen": [], "rejected": []}, {"chosen": [SAID], "rejected": [SAID]},
              {"chosen": [ASK, SAID], "rejected": "No."}, {"chosen": ["Yes."], "rejected": ["No."]},
              {"chosen": [ASK, SAID], "rejected": [ASK, SAID | {"content": 5}]}],
    "dialogue": [{"chosen": "Human: a", "rejected": "Human: b"},
                 {"chosen": "\n\nHuman: a\n\nAssistant: ", "rejected": "\n\nHuman: a\n\nAssistant: b"},
                 {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: b"}],
}  # fmt: skip


@pytest.mark.parametrize("form", PREFERRED)
def test_bad_preferences_of_each_shape_are_all_named_in_one_message(form: str, tmp_path: Path):
    rows = [PREFERRED[form](i) for i in range(200)]
    rows[3:3] = BAD_PREFERENCES[form]
    source = preferences.Source(path=str(written(tmp_path / "rows.jsonl", rows)), max_bad=0.001)
    chat = preferences.chat(language.tokenizer(), source)
    with pytest.raises(UserError) as told:
        preferences.read(source, chat)
    n = len(BAD_PREFERENCES[form])
    assert f"{n} of {len(rows)} rows" in str(told.value), told.value
    source.max_bad = 0.1
    train, val, test, said = preferences.read(source, chat)
    assert len(train) + len(val) + len(test) <= 200
    assert f"{n} of {len(rows)} rows" in said[0]


def test_a_question_is_read_from_every_form():
    shared = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Yes."}]
    rows = [{"prompt": "One?", "completion": "Yes."}, {"prompt": [ASK], "chosen": []}, {"messages": [ASK, SAID]}, {"messages": [ASK]},
            {"conversations": shared}, {"instruction": "One?", "input": ""}]  # fmt: skip
    for row in rows:
        assert formats.question(row)["messages"] == [ASK], row
