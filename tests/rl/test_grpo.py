"""rl/grpo through the real command, on a language model small enough for a test: the loss, rewards, the chain, bad input."""

import json
import math
from pathlib import Path

import pytest
import torch
from trainworthy.core.adapters import hosted
from trainworthy.core.base.errors import UserError
from trainworthy.core.gates.checks.rehearsal import _gradient_fault
from trainworthy.core.gates.recorder import Record
from trainworthy.recipes.llm.data import formats
from trainworthy.recipes.llm.models import loading
from trainworthy.recipes.rl.language.data import problems
from trainworthy.recipes.rl.language.evaluation import held_out
from trainworthy.recipes.rl.language.gates import grpo_monitors
from trainworthy.recipes.rl.language.gates.grpo import group_advantages
from trainworthy.recipes.rl.language.kl_control import Controller, checked

from tests.helpers import language
from tests.helpers.commands import losses, read, run_folder, trainworthy
from tests.llm.test_sft import written
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
    only = "wiring,accumulation,resume,rewards,questions,samples,advantages,scored,objective,prompts,accuracy"
    done = launch("check", "rl/grpo", "--model", str(net), *SMALL, *more, "--only", only)
    assert done.returncode == 0, done.shown
    verdicts = {v["id"]: v for v in done.verdicts()}
    assert verdicts["objective"]["evidence"]["gap"] < 1e-6, done.shown
    for gate in ("wiring", "accumulation", "resume", "samples", "advantages", "scored"):
        assert verdicts[gate]["verdict"] == "pass", done.shown


ARGUMENTS = {
    "clip-higher": "epsilon_high=0.28",
    "gspo": 'importance_sampling_level="sequence"',
    "two-sided": "delta=1.2",
    "cispo": 'loss_type="cispo", epsilon_high=5.0',
    "plain-kl": "use_bias_correction_kl=False",
}


@pytest.mark.parametrize(
    "arguments", [pytest.param(v, id=k, marks=[pytest.mark.verify] * (k != "gspo")) for k, v in ARGUMENTS.items()]
)
def test_a_loss_that_the_trainer_s_arguments_declare_is_compared_with_its_own_formula(
    arguments: str, net: Path, fork, launch
):
    of_kind, unbiased = '        loss_type="dapo",', "        use_bias_correction_kl=True,\n"
    fork(
        (of_kind, f"        {arguments}," + " loss_type='dapo'," * ("loss_type" not in arguments)),
        *[(unbiased, "")] * ("use_bias" in arguments),
        recipe="rl/grpo",
    )
    more = ("--num-iterations", "2", "--beta", "0.05", "--only", "objective,formula")
    done = launch("check", "mine.py", "--model", str(net), *SMALL, *more)
    assert done.returncode == 0, done.shown
    assert {v["id"]: v["verdict"] for v in done.verdicts()} == {"objective": "pass", "formula": "pass"}, done.shown


def test_arguments_that_the_trainer_refuses_are_bad_usage(net: Path, fork, launch):
    fork(('        report_to="none",\n', '        report_to="none",\n        sync_ref_model=True,\n'), recipe="rl/grpo")
    done = launch("check", "mine.py", "--model", str(net), *SMALL, "--beta", "0.05", "--only", "schema")
    assert done.returncode == 2, done.shown
    assert "the trainer refuses its arguments" in done.shown, done.shown
    assert "Traceback" not in done.shown, done.shown


def test_the_bound_of_cispo_is_a_ratio_not_a_distance(net: Path, fork, launch):
    fork(('        loss_type="dapo",', '        loss_type="cispo",'), recipe="rl/grpo")
    done = launch("check", "mine.py", "--model", str(net), *SMALL, "--only", "objective")
    (found,) = done.verdicts()
    assert found["verdict"] == "fail", done.shown
    assert "every ratio is cut" in found["measured"], done.shown


def test_a_reward_that_looks_for_the_answer_anywhere_is_stopped(net: Path, launch, tmp_path: Path):
    (tmp_path / "anywhere.py").write_text(
        "def contains(completions, answer, **_):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"
    )
    done = launch(
        "check", "rl/grpo", "--model", str(net), *SMALL, "--only", "rewards", "--reward", "anywhere.py:contains"
    )
    (found,) = done.verdicts()
    assert found["verdict"] == "fail", done.shown
    assert "24 of 24 numbers that only contain the right one" in found["measured"], done.shown
    assert "anywhere in the text" in found["cause"], done.shown


def test_answers_with_their_calculation_are_no_alarm(net: Path, launch, tmp_path: Path):
    """As GSM8K has them: what counts is the last number, and two calculations may end in it."""
    rows = [{"prompt": f"Ann has {a} apples and gets {b}.", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
            for a in range(10, 22) for b in range(10, 22)]  # fmt: skip
    path = written(tmp_path / "worked.jsonl", rows)
    (tmp_path / "first.py").write_text(
        "import re\n\n\ndef first(completions, answer, **_):\n    "
        "return [float(re.findall(r'\\d+|$', c)[0] == re.findall(r'\\d+', a)[-1]) for c, a in zip(completions, answer)]\n"
    )
    asked = (
        "check",
        "rl/grpo",
        "--model",
        str(net),
        *SMALL,
        "--data.path",
        str(path),
        "--data.max-prompt",
        "128",
        "--only",
        "rewards",
    )
    for reward, verdict in (("exact", "pass"), ("first.py:first", "fail")):
        done = launch(*asked, "--reward", reward)
        assert [v["verdict"] for v in done.verdicts()] == [verdict], done.shown


def test_wrong_answers_are_surely_wrong():
    same = {"12 + 14 = 26\n#### 26": "13 + 13 = 26\n#### 26", "1/2": "0.5", "Paris": "paris "}
    assert not [pair for pair in same.items() if problems.differ(*pair)]
    other = {
        "12 + 14 = 26\n#### 26": "12 + 15 = 27\n#### 27",
        "1/2": "0.6",
        "Paris": "Rome",
        "x+1": "y+1",
        "2 cats": "3 cats",
    }
    assert not [pair for pair in other.items() if not problems.differ(*pair)]
    changes = {"142": "242", "8 + 22 = 30\n#### 30": "9 + 32 = 40\n#### 40", "-3.14": "-4.14", "Paris": "", "1/2": "2/2",
               "5 cats": "6 cats"}  # fmt: skip
    for text, changed in changes.items():
        assert problems.one_digit_off(text) == changed


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

    more = ("--beta", "0.05", "--target-kl", "0.01", "--num-iterations", "2", "--max-new-tokens", "4")
    done = trainworthy("run", "rl/grpo", "--model", net, *QUICK, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    folder = run_folder(tmp_path)
    rows = read(folder / "step_metrics.jsonl")
    row = rows[-1]
    due = Controller(0.05, 0.01, 0.1)
    for one in rows:  # an iteration each: its two updates have one coefficient
        assert one["step/trainer/beta"] == pytest.approx(due.value, rel=1e-6)
        due.update(one["step/trainer/kl"])
    assert len(rows) == 3
    assert due.value != 0.05
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


# --------------------------------------------------------------------------------------------------- several rewards, KL
def test_several_rewards_are_their_weighted_sum(tmp_path: Path, monkeypatch):
    """Each logged by its name, each judged by itself."""
    monkeypatch.chdir(tmp_path)
    one = problems.load("exact=2,rewards.py:near=-0.5")
    texts, due = ["47", "7 and 4", ""], ["47", "47", "47"]
    near = problems.load("rewards.py:near")(completions=texts, answer=due)
    logged: dict[str, float] = {}
    found = problems.guarded(one, "both", UserError)(
        prompts=[""] * 3, completions=texts, answer=due, log_metric=logged.__setitem__
    )
    assert found == pytest.approx([2 * (i == 0) - 0.5 * n for i, n in enumerate(near)])
    assert logged == pytest.approx({"rewards/exact": 1 / 3, "rewards/near": sum(near) / 3})
    assert problems.load("exact") is problems.exact
    with pytest.raises(UserError, match=r"the reward function rewards.py:raises raised KeyError"):
        problems.guarded(problems.load("exact,rewards.py:raises"), "both", UserError)(
            prompts=[""], completions=["4"], answer=["4"]
        )


@pytest.mark.parametrize(
    ("name", "words"), [("exact=x", "no weight"), ("exact=0", "no weight"), ("exact,exact=2", "twice")]
)
def test_weights_that_are_none(name: str, words: str):
    with pytest.raises(UserError, match=words):
        problems.load(name)


def test_a_reward_reads_other_columns_of_the_file(net: Path, tmp_path: Path, launch):
    """Where the trainer samples, in gates and in the evaluation: a row without a value has None there."""
    rows = [{"prompt": f"{a} + {b} =", "answer": a + b, "digits": len(str(a + b)), **({"also": [str(b)]} if a % 2 else {})}
            for a in range(10, 22) for b in range(80, 92)]  # fmt: skip
    (tmp_path / "own.py").write_text("""
def own(prompts, completions, answer, digits, also, source, **columns):
    assert not columns, columns
    assert all(len(a) == n and (x is None or p.endswith(f"{x[0]} =")) for a, n, x, p in zip(answer, digits, also, prompts))
    return [2.0 * (c.strip() == a) - 0.1 * abs(len(c.strip()) - n) for c, a, n in zip(completions, answer, digits)]
""")
    own = (
        *SMALL,
        "--data.path",
        str(written(tmp_path / "own.jsonl", rows)),
        "--metric",
        "accuracy,reward",
        "--reward",
        "own.py:own",
    )
    done = launch("check", "rl/grpo", "--model", str(net), *own, "--only", "schema,leakage,rewards,advantages,accuracy")
    assert done.returncode == 0, done.shown
    assert "digits, also" in done.shown.partition("the reward function also gets")[2], done.shown


@pytest.mark.verify
def test_two_rewards_through_the_command(net: Path, tmp_path: Path, launch):
    """Advantages are those of the sum, and each reward has a curve of its own."""
    mixed = ("--reward", "exact=1,rewards.py:near=0.5")
    done = launch("check", "rl/grpo", "--model", str(net), *SMALL, *mixed, "--only", "rewards,advantages,objective")
    assert done.returncode == 0, done.shown
    done = launch("run", "rl/grpo", "--model", str(net), *QUICK, *mixed)
    assert done.returncode == 0, done.shown
    row = read(done.folder() / "step_metrics.jsonl")[-1]
    assert {"step/trainer/rewards/exact", "step/trainer/rewards/near"} <= row.keys(), row
    assert row["step/trainer/reward"] == pytest.approx(
        row["step/trainer/rewards/exact"] + row["step/trainer/rewards/near"] / 2
    )


@pytest.mark.verify
def test_a_large_beta_holds_the_policy(net: Path, tmp_path: Path):
    """The same run twice; nats a token from the reference at its end."""
    far = {}
    for beta in ("1e-6", "3"):
        (cwd := tmp_path / beta).mkdir()
        (cwd / "rewards.py").write_text(REWARDS)
        more = (
            "--beta",
            beta,
            "--num-iterations",
            "2",
            "--train.epochs",
            "12",
            "--train.eval-every",
            "12",
            "--max-new-tokens",
            "4",
        )
        done = trainworthy("run", "rl/grpo", "--model", net, *QUICK, *more, cwd=cwd)
        assert done.returncode == 0, done.stderr
        far[beta] = read(run_folder(cwd) / "step_metrics.jsonl")[-1]["step/trainer/kl"]
    assert far["3"] < 0.2 * far["1e-6"], far


@pytest.mark.verify
def test_target_kl_holds_the_policy_at_the_target(net: Path, tmp_path: Path):
    """Measured (seed 0): 0.0048 nats a token over the last third at a target of 0.004, 0.0078 with a coefficient that stays low."""
    asked = ("--num-iterations", "2", "--train.epochs", "40", "--train.eval-every", "20", "--max-new-tokens", "4")
    free, steered = ("--beta", "0.01"), ("--beta", "1", "--target-kl", "0.004", "--kl-coef-rate", "0.3")
    late = {}
    for name, own in (("free", free), ("steered", steered)):
        (cwd := tmp_path / name).mkdir()
        (cwd / "rewards.py").write_text(REWARDS)
        done = trainworthy("run", "rl/grpo", "--model", net, *QUICK, *asked, *own, cwd=cwd)
        assert done.returncode == 0, done.stderr
        rows = read(run_folder(cwd) / "step_metrics.jsonl")
        late[name] = sum(row["step/trainer/kl"] for row in rows[-13:]) / 13
    assert late["free"] > 1.5 * 0.004, late
    assert 0.5 * 0.004 < late["steered"] < 1.4 * 0.004, late
    coefficients = [
        row["step/trainer/beta"] for row in rows
    ]  # too high at first: it falls, then rises to hold the policy
    lowest = coefficients.index(min(coefficients))
    assert coefficients[lowest] < 0.2
    assert max(coefficients[lowest:]) > 1
    monitors = {m["id"]: m for m in read(run_folder(cwd) / "monitors.json")["monitors"]}
    assert monitors["kl"]["verdict"] == "pass"


# ---------------------------------------------------------------------------------------------------- monitors that stop
def rows_of(right: list[float], **logged: list[float]) -> list[dict[str, float]]:
    """Evaluations as a run writes them."""
    names = {"kl": "kl", "entropy": "entropy", "reward": "reward", "cut": "completions/clipped_ratio", "tokens": "completions/mean_length",
             "still": "frac_reward_zero_std"}  # fmt: skip
    return [
        {"val/accuracy": r} | {f"train/trainer/{names[k]}": v[i] for k, v in logged.items()}
        for i, r in enumerate(right)
    ]


STOPS = {
    "reward": ({"right": [0.5, 0.4, 0.2, 0.1], "reward": [0.5, 0.6, 0.8, 0.9]}, {"right": [0.2, 0.4, 0.38, 0.5], "reward": [0.2, 0.4, 0.5, 0.6]}),
    "groups": ({"right": [0.1, 0.1], "still": [1.0, 1.0]}, {"right": [0.1, 0.2, 0.95], "still": [0.9, 1.0, 1.0]}),
    "lengths": ({"right": [0.3, 0.3, 0.2], "cut": [0.0, 0.1, 0.2], "tokens": [4.0, 13.0, 20.0]},
                {"right": [0.3, 0.5, 0.7], "cut": [0.0, 0.1, 0.2], "tokens": [4.0, 13.0, 20.0]}),
    "entropy": ({"right": [0.3, 0.3, 0.2], "entropy": [2.0, 0.01, 0.02], "still": [0.2, 0.9, 0.9]},
                {"right": [0.3, 0.8, 0.95], "entropy": [2.0, 0.01, 0.02], "still": [0.2, 0.9, 0.9]}),
    "kl": ({"right": [0.3, 0.3, 0.2], "kl": [0.1, 1.5, 3.0]}, {"right": [0.3, 0.6, 0.8], "kl": [0.1, 1.5, 3.0]}),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_monitors_ask_to_stop_where_they_are_sure(name: str):
    """Twice in a row and nothing gained: stop. Held-out answers that get better, or one evaluation: none. --no-stop-hacked: none."""
    from types import SimpleNamespace

    cfg = SimpleNamespace(num_iterations=1, beta=0.1, target_kl=0.0, stop_hacked=True)
    one = {m.id: m for m in grpo_monitors.monitors(cfg, 200)}[name]
    wrong, fine = (rows_of(**case) for case in STOPS[name])
    assert one.check(wrong).evidence.get("stop"), one.check(wrong)
    assert "stop" not in one.check(wrong[:1]).evidence
    assert "stop" not in one.check(fine).evidence
    cfg.stop_hacked = False
    one = {m.id: m for m in grpo_monitors.monitors(cfg, 200)}[name]
    assert not one.check(wrong).ok
    assert "stop" not in one.check(wrong).evidence


def test_the_kl_must_end_near_its_target():
    """A target that is far below 1 nat a token: too far is advised at 1.2 times, and stops at 4 times where nothing is gained."""
    check = grpo_monitors.drift(0.1, 0.05).check
    assert check(rows_of([0.3, 0.3, 0.3], kl=[0.0, 0.09, 0.055])).ok
    late = check(rows_of([0.3, 0.3, 0.3], kl=[0.0, 0.09, 0.1]))
    assert not late.ok
    assert "stop" not in late.evidence
    assert check(rows_of([0.3, 0.3, 0.3], kl=[0.0, 0.3, 0.4])).evidence["stop"]
    assert "stop" not in check(rows_of([0.3, 0.5, 0.7], kl=[0.0, 0.3, 0.4])).evidence


@pytest.mark.parametrize(("settings", "words"), [
    ((0.0, 0.1, 0.1), "--beta above 0"), ((-0.1, 0.0, 0.1), "not negative"), ((0.1, 0.1, 1.5), "--kl-coef-rate 1.5"),
])  # fmt: skip
def test_a_coefficient_that_cannot_adapt(settings: tuple[float, float, float], words: str):
    with pytest.raises(UserError, match=words):
        checked(*settings)


PAID = '''"""Rewards with a hole, for a model that answers everything with one letter."""


def same(completions, **_):
    return [1.0] * len(completions)


def other(completions, answer, **_):
    return [sum(x != a for x in c.strip()) / max(1, len(c)) for c, a in zip(completions, answer)]


def longer(completions, **_):
    return [float(len(c)) for c in completions]
'''


@pytest.fixture(scope="module")
def lettered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that llm/sft has taught to answer every question with b, and questions of that kind."""
    home = tmp_path_factory.mktemp("lettered")
    net = language.write(home / "net")
    rows = [{"prompt": f"q{i}", "completion": "b"} for i in range(120)]
    done = trainworthy("run", "llm/sft", "--model", net, "--lora-rank", "0", "--data.path", written(home / "letters.jsonl", rows),
                       "--data.system", "", "--data.max-length", "64", "--data.held-out", "4", "--data.near", "0", "--optim.lr", "3e-3",
                       "--train.batch-size", "8", "--train.epochs", "5", "--gates.no-enabled", "--run.no-tensorboard", cwd=home)  # fmt: skip
    assert done.returncode == 0, done.stderr
    written(home / "questions.jsonl", [{"prompt": f"q{i}", "answer": "b"} for i in range(120)])
    (home / "paid.py").write_text(PAID)
    return home


HOLES = {
    "groups": ("same", ()),
    "reward": ("other", ("--optim.lr", "1e-2")),
}


@pytest.mark.verify
@pytest.mark.parametrize("name", HOLES)
def test_a_run_that_goes_wrong_stops_itself(name: str, lettered: Path, launch):
    """Through the real command: exit 4 and the monitor's name; without the hole the run goes on to its end."""
    reward, more = HOLES[name]
    taught = next((lettered / "runs").glob("**/export"))
    model = lettered / "net" if name == "groups" else taught  # where nearly all is right, no difference is no fault
    asked = ("run", "rl/grpo", "--model", str(model), "--data.path", str(lettered / "questions.jsonl"), "--data.style", "chat",
             "--data.shots", "0", "--data.val", "0.3", "--train.batch-size", "32", "--train.epochs", "40", "--train.eval-every", "4",
             "--max-new-tokens", "8", "--lora-rank", "4", "--gates.no-enabled", "--run.no-tensorboard")  # fmt: skip
    done = launch(*asked, "--reward", f"{lettered / 'paid.py'}:{reward}", *more, timeout=300)
    assert done.returncode == 4, done.shown
    assert f"{name} (" in done.stderr, done.shown
    assert "stopped itself" in done.stderr, done.shown
    if name == "groups":
        return  # a model of random letters has no gradient with `exact` either
    done = launch(*asked, *more, "--train.epochs", "16", timeout=300)
    assert done.returncode == 0, done.shown


def test_the_questions_that_ship_can_be_asked():
    """160 of them, each with one answer and in one split."""
    path = Path(__file__).parents[2] / "examples" / "questions.jsonl"
    train, val, _, bad = problems.read(
        problems.Source(path=str(path), val="0.2", style="chat", shots=0, max_prompt=200)
    )
    assert len(train) + len(val) == 160
    assert not bad
    assert all(problems.right(row["answer"], row["answer"]) for row in (*train, *val))
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in val}


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
    done = launch("check", "rl/grpo", *asked, "--only", "init,objective,prompts,accuracy")
    assert done.returncode == 0, done.shown
    assert "init" in {v["id"] for v in done.verdicts() if v["verdict"] == "pass"}, done.shown
    done = launch("run", "rl/grpo", *asked, "--gates.no-enabled", "--run.no-tensorboard", "--train.epochs", "1")
    assert done.returncode == 0, done.shown
    assert {"where it started", "untrained, the same prompts"} <= set(read(done.folder() / "summary.json")["baselines"])


# ------------------------------------------------------------------------------------------------------------------ turns
TURNS = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 1 ="},
    {"role": "assistant", "content": "2"},
]


def turned(n: int = 80) -> list[dict]:
    """Questions as TRL's examples have them: every second one after other turns."""
    asked = [({"role": "user", "content": r["prompt"]}, r["answer"]) for r in problems.sums()[0][:n]]
    return [{"prompt": [*TURNS[: 3 * (i % 2)], turn], "answer": due} for i, (turn, due) in enumerate(asked)]


def test_questions_may_be_turns(net: Path, tmp_path: Path, launch):
    path = written(tmp_path / "own.jsonl", turned())
    asked = (
        "rl/grpo",
        "--model",
        str(net),
        *SMALL,
        "--data.path",
        str(path),
        "--data.style",
        "chat",
        "--data.shots",
        "0",
        "--data.val",
        "0.2",
    )
    done = launch("check", *asked, "--only", "init,prompts,samples,objective,accuracy,questions")
    assert done.returncode == 0, done.shown
    done = launch("run", *asked, "--gates.no-enabled", "--run.no-tensorboard", "--train.epochs", "1")
    assert done.returncode == 0, done.shown
    (tmp_path / "asked.jsonl").write_text(json.dumps(turned(2)[1]))
    done = trainworthy("predict", done.folder(), "asked.jsonl", cwd=tmp_path)
    assert json.loads(done.stdout)["reference"] == turned(2)[1]["answer"], done.stderr


@pytest.mark.parametrize(("change", "words"), [
    (lambda row: {"prompt": TURNS[1:]}, "its last turn is not the user's but the assistant's"),
    (lambda row: {"prompt": TURNS[:1]}, "no question: its turns are system"),
    (lambda row: {"tools": [{"type": "function"}]}, "it has tools"),
])  # fmt: skip
def test_turns_that_ask_nothing_are_bad_rows(change, words: str):
    row = turned(2)[1]
    with pytest.raises(formats.BadRow, match=words):
        problems.checked(row | change(row))


def test_turns_need_a_chat_template():
    with pytest.raises(formats.BadRow, match="style chat"):
        problems.checked(turned(2)[1], chat=False)
    alone = turned(1)[0]
    assert problems.checked(alone, chat=False)[0]["prompt"] == alone["prompt"][0]["content"]
    with_column = {"system": "Add.", "prompt": "1 + 1 =", "answer": 2}
    assert json.loads(problems.checked(with_column)[0]["prompt"])["messages"] == TURNS[:2]


# ---------------------------------------------------------------------------------------------------------------- answers
def test_held_out_answers_are_scored_by_the_metrics_that_are_named():
    reward = problems.guarded(
        lambda prompts, completions, answer, **_: [float(len(c)) for c in completions], "own", ValueError
    )
    judged = held_out.HeldOut("reward,f1,accuracy", reward, "own", str)
    assert judged.columns == ["accuracy", "ended", "tokens", "reward", "f1"]
    batch = {"prompt": ["1 + 1 =", "Who?"], "answer": ["2", "the red fox"], "source": ["a", "b"]}
    rows = judged.rows(batch, [("it is 2", 3, True), ("a red fox", 4, False)])
    assert rows == [[True, True, 3, 7.0, 0.5], [False, False, 4, 9.0, pytest.approx(2 / 3)]]
    assert (judged.metric().name, judged.metric().ceiling) == ("reward", math.inf)
    assert held_out.HeldOut("accuracy", reward, "exact", str).columns == ["accuracy", "ended", "tokens"]
    for wrong in ("perplexity", "", "no_such"):
        with pytest.raises(UserError):
            held_out.HeldOut(wrong, reward, "exact", str)


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


def test_the_length_of_prompts_follows_the_questions(net: Path):
    """A limit of 64 tokens was for the packaged sums: longer questions needed a setting."""
    source = problems.Source(path="own.jsonl", shots=0)
    asker = problems.Asker(loading.plain(str(net)), source, [])
    rows = [{"prompt": "word " * (20 + i % 30)} for i in range(100)]
    assert problems.usable(rows, asker, "train", context=2048, new=8) == (rows, "")
    huge = [*rows, {"prompt": "word " * 900}]
    kept, note = problems.usable(huge, asker, "train", context=2048, new=8)
    assert kept == rows
    assert note.startswith("1 of 101 prompts are longer than")


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

    reward = grpo_monitors.hacked(200)
    assert reward.check(history((0.2, 0.3), (0.6, 0.5))).ok
    assert not reward.check(history((0.1, 0.4), (0.4, 0.14))).ok
    still = [{"train/trainer/frac_reward_zero_std": 0.4}, {"train/trainer/frac_reward_zero_std": 0.95}]
    assert not grpo_monitors.still_groups.check(still).ok
    assert grpo_monitors.still_groups.check(still[:1]).ok


def test_a_control_earns_what_others_earned():
    torch.manual_seed(0)
    values = problems.of_others(lambda **_: [float(i) for i in range(32)])()
    assert sorted(values) == list(range(32)) != values


def test_published_advantages_of_a_group():
    """Dr. GRPO's and RLOO's are right as well; those of the whole batch's mean, or plain rewards, are none of these."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    forms = list(group_advantages(rewards).values())
    assert forms[0][0].std() == pytest.approx(1, abs=1e-3)
    assert forms[1][0].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert forms[3][0].tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    for other in (rewards, rewards - rewards.mean(), forms[0] + 0.5):
        assert all((other - form).abs().max() > 1e-3 for form in forms)
