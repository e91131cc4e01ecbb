"""rl/grpo through the real command, on a language model small enough for a test: the loss, rewards, the chain, bad input."""

from pathlib import Path

import pytest
import torch
from trainworthy.core.adapters import hosted
from trainworthy.core.base.errors import UserError
from trainworthy.core.gates.recorder import Record
from trainworthy.core.gates.rehearsal import _gradient_fault
from trainworthy.recipes.rl.language import grpo_gates, problems

from tests.helpers import language
from tests.helpers.commands import losses, read, run_folder, trainworthy
from tests.llm.test_llm import written
from tests.rl import planted_grpo

REWARDS = '''"""Rewards for a model of random weights, which is never right."""

CALLS = []


def near(completions, answer, **_):
    """Right, and a little for its letters, so that a group differs."""
    return [10.0 * (c.strip() == a) + sum(x in c for x in set(a)) - 0.01 * len(c) for c, a in zip(completions, answer)]


def raises(**_):
    raise KeyError("nothing here")


def raises_late(completions, answer, **_):
    CALLS.append(1)
    if len(CALLS) > 2:
        raise KeyError("nothing here")
    return near(completions, answer)
'''
SMALL = (
    "--lora-rank",
    "4",
    "--data.held-out",
    "16",
    "--optim.lr",
    "3e-3",
    "--train.batch-size",
    "16",
    "--reward",
    "rewards.py:near",
)
QUICK = (*SMALL, "--gates.no-enabled", "--run.no-tensorboard", "--train.epochs", "3", "--train.eval-every", "2")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


@pytest.fixture(autouse=True)
def rewards(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)


MORE = {
    "lora": (),
    "older": ("--num-iterations", "2", "--beta", "0.1", "--train.accumulate", "2"),
    "whole": ("--lora-rank", "0", "--beta", "0.1", "--num-iterations", "2"),
    "hot": ("--temperature", "0.7", "--num-generations", "4"),
}


@pytest.mark.parametrize(
    "more", [pytest.param(v, id=k, marks=[pytest.mark.verify] * (k not in ("older",))) for k, v in MORE.items()]
)
def test_the_loss_is_the_formula_s(more: tuple[str, ...], net: Path, launch):
    """Every gate of its own, and those on the loop; the formula is written apart from TRL's, answers are read alone."""
    only = "wiring,accumulation,resume,rewards,questions,samples,advantages,scored,objective,prompts,judge"
    done = launch("check", "rl/grpo", "--model", str(net), *SMALL, *more, "--only", only)
    assert done.returncode == 0, done.shown
    verdicts = {v["id"]: v for v in done.verdicts()}
    assert verdicts["objective"]["evidence"]["gap"] < 1e-6, done.shown
    for gate in ("wiring", "accumulation", "resume", "samples", "advantages", "scored"):
        assert verdicts[gate]["verdict"] == "pass", done.shown


def test_a_base_model_is_asked_in_lines(launch, tmp_path: Path):
    """Lines need no chat template; turns do."""
    base = language.write(tmp_path / "base", template=False)
    done = launch("check", "rl/grpo", "--model", str(base), *SMALL, "--only", "questions,samples")
    assert done.returncode == 0, done.shown
    assert [v["verdict"] for v in done.verdicts()] == ["pass"] * 2
    done = launch("check", "rl/grpo", "--model", str(base), *SMALL, "--data.style", "chat", "--only", "questions")
    assert done.returncode == 2, done.shown
    assert "no chat template" in done.stderr


def test_a_run_logs_what_must_be_watched_and_exports_an_adapter(net: Path, tmp_path: Path):
    from peft import AutoPeftModelForCausalLM

    more = ("--beta", "0.05", "--num-iterations", "2", "--max-new-tokens", "4")
    done = trainworthy("run", "rl/grpo", "--model", net, *QUICK, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    folder = run_folder(tmp_path)
    row = read(folder / "step_metrics.jsonl")[-1]
    for name in (
        "reward",
        "frac_reward_zero_std",
        "entropy",
        "kl",
        "clip_ratio/region_mean",
        "completions/mean_length",
    ):
        assert f"step/trainer/{name}" in row, row
    assert len(losses(folder)) == 3
    monitors = {m["id"]: m["verdict"] for m in read(folder / "monitors.json")["monitors"]}
    assert {"reward", "groups", "lengths", "entropy", "clip", "kl"} <= monitors.keys()
    assert set(read(folder / "summary.json")["baselines"]) >= {"the commonest answer", "untrained, the same prompts"}
    assert AutoPeftModelForCausalLM.from_pretrained(folder / "export").peft_config.keys() == {"default"}


ON_SMALL = ("grpo-prompt-scored", "grpo-not-centred", "grpo-end-masked")


@pytest.mark.parametrize(
    "plant",
    [pytest.param(p, id=p.id, marks=[pytest.mark.verify] * (p.id not in ON_SMALL)) for p in planted_grpo.PLANTS],
)
def test_a_planted_bug_is_stopped_on_a_small_model_too(plant, net: Path, fork, launch):
    fork(plant.hunk, recipe="rl/grpo")
    settings = [*SMALL, "--max-new-tokens", "24"]  # random bytes: some answers end
    done = launch("check", "mine.py", "--model", str(net), *settings, *plant.argv, "--only", plant.gate)
    assert done.returncode == 3, done.shown
    (verdict,) = done.verdicts()
    said = " ".join((verdict["measured"], verdict["needed"], verdict["remedy"])).lower()
    assert not [w for w in plant.words if w.lower() not in said], said


# ----------------------------------------------------------------------------------------------------------------- chain
@pytest.fixture(scope="module")
def tuned(net: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of llm/sft on sums whose adapters are no longer nothing."""
    cwd = tmp_path_factory.mktemp("tuned")
    rows = [{"prompt": r["prompt"], "completion": r["answer"]} for r in problems.sums()[0][:80]]
    done = trainworthy("run", "llm/sft", "--model", net, "--lora-rank", "4", "--data.path", written(cwd / "sums.jsonl", rows),
                       "--data.system", "", "--data.max-length", "200", "--data.held-out", "4", "--optim.lr", "3e-3",
                       "--train.batch-size", "4", "--train.epochs", "0.3", "--gates.no-enabled", "--run.no-tensorboard",
                       cwd=cwd)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return run_folder(cwd)


def test_from_fine_tuning_to_rewards(net: Path, tuned: Path, tmp_path: Path, launch):
    """sft, then grpo from its adapters: the reference is what was fine-tuned; a run says where it started."""
    rows = [{k: r[k] for k in ("prompt", "answer")} for r in problems.sums()[0][:80]]
    asked = ("--model", str(net), *SMALL, "--data.path", str(written(tmp_path / "own.jsonl", rows)), "--data.style", "chat",
             "--data.shots", "0", "--data.max-prompt", "200", "--beta", "0.1", "--init-from", str(tuned))  # fmt: skip
    done = launch("check", "rl/grpo", *asked, "--only", "init,objective,prompts,judge")
    assert done.returncode == 0, done.shown
    assert "init" in {v["id"] for v in done.verdicts() if v["verdict"] == "pass"}, done.shown
    done = launch("run", "rl/grpo", *asked, "--gates.no-enabled", "--run.no-tensorboard", "--train.epochs", "1")
    assert done.returncode == 0, done.shown
    assert {"where it started", "untrained, the same prompts"} <= set(read(done.folder() / "summary.json")["baselines"])


# ---------------------------------------------------------------------------------------------------------------- answers
def test_the_last_number_counts():
    for text, value in {"12 + 35 = 47": 47, "1,000": 1000, "It is 3.50.": 3.5, "-4": -4, "5-3=2": 2, "#### 72": 72, "none": None,
                        "": None}.items():  # fmt: skip
        assert problems.number(text) == value, text
    assert problems.right("so 47.", "47")
    assert not problems.right("47, no, 48", "47")
    assert problems.right(" Paris\n", "paris")


def test_twins_are_on_one_side():
    train, val = problems.sums()
    assert len(train) + len(val) == 8100
    assert not {r["source"] for r in train} & {r["source"] for r in val}


# -------------------------------------------------------------------------------------------------------------- bad input
ROWS = [{"prompt": "2 + 2 =", "answer": "4", "source": "s"}]


@pytest.mark.parametrize(("function", "words"), [
    (lambda **_: {}["x"], ("raised KeyError", "test_grpo.py")),
    (lambda completions, **_: [float("nan")] * len(completions), ("returned nan", "finite")),
    (lambda completions, **_: [None] * len(completions), ("returned None", "finite")),
    (lambda completions, **_: [1.0], ("1 rewards for 4",)),
    (lambda **_: 1.0, ("returned a float",)),
], ids=["raises", "nan", "none", "count", "number"])  # fmt: skip
def test_a_reward_that_is_none(function, words: tuple[str, ...]):
    with pytest.raises(UserError) as told:
        problems.tried(problems.guarded(function, "mine.py:own", UserError), ROWS)
    assert not [w for w in ("mine.py:own", *words) if w not in str(told.value)], told.value


@pytest.mark.parametrize("name", ["nothing", "nowhere.py:reward", "no_such_module:reward", "math:no_such_reward"])
def test_a_reward_that_is_nowhere(name: str):
    with pytest.raises(UserError, match="--reward"):
        problems.load(name)


def test_a_reward_that_raises_ends_with_its_code(net: Path, launch):
    """Tried before anything is built: 2; in the middle of a run: 4, without a traceback."""
    asked = ("run", "rl/grpo", "--model", str(net), *QUICK, "--reward")
    done = launch(*asked, "rewards.py:raises")
    assert done.returncode == 2, done.shown
    done = launch(*asked, "rewards.py:raises_late")
    assert done.returncode == 4, done.shown
    assert "raised KeyError: 'nothing here'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prompt_longer_than_the_context(net: Path, launch):
    done = launch(
        "check",
        "rl/grpo",
        "--model",
        str(net),
        *SMALL,
        "--data.shots",
        "200",
        "--data.max-prompt",
        "9999",
        "--only",
        "schema",
    )
    assert done.returncode == 2, done.shown
    for words in ("a prompt longer than the model's context", "2048", "fewer --data.shots"):
        assert words in done.stderr, done.stderr


@pytest.mark.parametrize(("rows", "words"), [
    ([{"prompt": "a", "completion": "b"}], ("answer: missing", "prompts with one completion (SFT)")),
    ([{"prompt": "a", "answer": ["b"]}], ("answer: list",)),
    ([{"question": "a", "answer": "b"}], ("prompt: missing",)),
], ids=["pairs", "other-type", "question"])  # fmt: skip
def test_rows_that_are_no_questions(rows: list[dict], words: tuple[str, ...], tmp_path: Path):
    with pytest.raises(UserError) as told:
        problems.read(problems.Source(path=str(written(tmp_path / "rows.jsonl", rows))))
    assert not [w for w in words if w not in str(told.value)], told.value


def test_answers_that_come_in_no_whole_groups(net: Path, launch):
    done = launch("check", "rl/grpo", "--model", str(net), *SMALL, "--num-generations", "5", "--only", "schema")
    assert done.returncode == 2, done.shown
    assert "whole groups" in done.stderr


# ------------------------------------------------------------------------------------------------------ core and monitors
def test_samples_of_a_hosted_trainer_are_cut_as_core_cuts():
    """What is one number for all of them goes with each part."""

    class Uneven:
        def micro_batches(self, rows: dict) -> list[dict]:
            return [{k: v[:3] for k, v in rows.items()}, {k: v[3:] for k, v in rows.items()}]

    parts = [{"x": torch.arange(2) + 2 * i, "tokens": torch.tensor(7)} for i in range(2)]
    found = hosted._recut(Uneven(), parts)
    assert [p["x"].tolist() for p in found] == [[0, 1, 2], [3]]
    assert [int(p["tokens"]) for p in found] == [7, 7]


def test_no_gradient_at_all_points_nowhere():
    """Of a unit whose groups do not differ."""
    assert not _gradient_fault(Record(gradients=[{"cosine": 0.0, "norm": 0.0, "own_norm": 0.0}]), 1.0, tolerance=0.01)
    assert _gradient_fault(Record(gradients=[{"cosine": 0.0, "norm": 0.0, "own_norm": 2.0}]), 1.0, tolerance=0.01)


def test_monitors_tell_a_hole_in_the_reward():
    def history(*rows: tuple[float, float]) -> list[dict[str, float]]:
        return [{"train/trainer/reward": earned, "val/accuracy": right} for earned, right in rows]

    reward = grpo_gates.hacked(200)
    assert reward.judge(history((0.2, 0.3), (0.6, 0.5))).ok
    assert not reward.judge(history((0.1, 0.4), (0.4, 0.14))).ok
    still = [{"train/trainer/frac_reward_zero_std": 0.4}, {"train/trainer/frac_reward_zero_std": 0.95}]
    assert not grpo_gates.still_groups.judge(still).ok
    assert grpo_gates.still_groups.judge(still[:1]).ok


def test_a_control_earns_what_others_earned():
    torch.manual_seed(0)
    values = problems.of_others(lambda **_: [float(i) for i in range(32)])()
    assert sorted(values) == list(range(32)) != values
