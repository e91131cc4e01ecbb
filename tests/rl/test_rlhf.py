"""rl/rlhf: its arithmetic against plain references, its rewards, its watch; through the real command on a small language model."""

from pathlib import Path

import pytest
import torch
from trainworthy.core.base.errors import Stop, UserError
from trainworthy.recipes.rl import rlhf
from trainworthy.recipes.rl.language.data import prompts, rewards
from trainworthy.recipes.rl.language.gates.rlhf_causes import estimates
from trainworthy.recipes.rl.language.kl_control import Controller, Watch

from tests.helpers import language, odd_rewards
from tests.helpers.commands import read, run_folder, trainworthy

OWN = "reward,generation,score,returns,formula,controller"
SMALL = ("--reward", "tests.helpers.odd_rewards:letters", "--data.tokens", "40", "--data.max-bad", "1", "--rollout-batch-size", "16",
         "--train.batch-size", "8", "--max-new-tokens", "12", "--data.held-out", "16")  # fmt: skip


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


# ----------------------------------------------------------------------------------------------------------- arithmetic
@pytest.fixture
def rollout() -> dict[str, torch.Tensor]:
    """Twelve answers of one to nine tokens, with rubbish behind their ends."""
    draws = torch.Generator().manual_seed(0)
    valid = torch.arange(9) < torch.randint(1, 10, (12, 1), generator=draws)
    kl, value = (torch.randn(12, 9, generator=draws) for _ in range(2))
    return {"valid": valid, "kl": kl.where(valid, torch.tensor(50.0)), "value": value.where(valid, torch.tensor(50.0)),
            "reward": torch.randn(12, generator=draws)}  # fmt: skip


def test_what_a_token_earns_and_its_advantage(rollout):
    """In fp32, against sums by definition, to 1e-6 of the largest."""
    valid, price, gamma, lam = rollout["valid"], 0.3, 0.98, 0.9
    earned = rlhf.earnings(rollout["reward"], rollout["kl"], valid, price)
    advantage = rlhf.gae(earned, rollout["value"], valid, gamma, lam)
    white = rlhf.whitened(advantage, valid)
    due = []
    for row in range(12):
        n = int(valid[row].sum())
        paid = [-price * k for k in rollout["kl"][row, :n].tolist()]
        paid[-1] += rollout["reward"][row].item()
        assert earned[row, :n].tolist() == pytest.approx(paid, abs=1e-6)
        due.append(estimates(paid, rollout["value"][row, :n].tolist(), gamma, lam))
        assert advantage[row, :n].tolist() == pytest.approx(due[-1], rel=1e-6, abs=2e-6)
        assert not advantage[row, n:].any()
    every = torch.tensor([a for row in due for a in row], dtype=torch.float64)
    expected = (every - every.mean()) / every.std()
    assert torch.allclose(white[valid].double(), expected, atol=2e-6)
    assert not white[~valid].any()


def test_the_coefficient_follows_the_kl():
    one = Controller(0.2, 6.0, 0.1)
    one.update(60.0)
    assert one.value == pytest.approx(0.22)
    one.update(6.6)  # half of the way to where the change is cut: proportional (Ziegler 2019)
    assert one.value == pytest.approx(0.22 * 1.05)
    again = Controller(0.2, 6.0, 0.1)
    again.load_state_dict(one.state_dict())
    assert again.value == one.value
    free = Controller(0.0, 6.0, 0.1)
    free.update(60.0)
    assert free.value == 0


# -------------------------------------------------------------------------------------------------------------- rewards
TEXTS = [
    "The file is read, and its lines are kept.",
    "It returns a list of",
    "x",
    "No more than this one is ever held here.",
]


@pytest.mark.parametrize(("name", "wrong"), [
    ("constant", "constant"), ("undefined", "not a number"), ("one", "wrong number of"), ("raises", "raised; got: ZeroDivisionError"),
    ("empty", "an empty answer"), ("neighbours", "other texts of its batch"), ("letters", ""),
])  # fmt: skip
def test_odd_rewards_are_found(name: str, wrong: str):
    texts = [" ".join(text.split()[:n]) for text in TEXTS for n in range(1, 9)]
    sample = rewards.Sample(["a prompt"] * len(texts), texts)
    said = rewards.fault(getattr(odd_rewards, name), sample)
    assert wrong in said, said
    assert bool(wrong) is bool(said), said


def test_a_reward_of_length_alone_is_found():
    texts = [" ".join(text.split()[:n]) for text in TEXTS for n in range(1, 9)]
    sample = rewards.Sample([""] * len(texts), texts)
    assert "only the length" in rewards.length(rewards.longer, sample)
    assert "only the length" in rewards.length(lambda p, c: [len(t) + 0.1 * t.count("e") for t in c], sample)
    assert not rewards.length(rewards.sentence, sample)


def test_what_a_sentence_is():
    said = [
        "It returns the list of all lines.",
        "Too short.",
        "It returns the list of all lines",
        "a a a a a a a a.",
        "(see `x`).",
    ]
    assert rewards.sentence([""] * 5, said) == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "name",
    [
        "trainworthy.recipes.rl.language.data.rewards:nothing",
        "no.such.module:f",
        "trainworthy.recipes.rl.language.data.rewards:FEWEST",
        "words",
    ],
)
def test_a_reward_that_is_not_there(name: str):
    with pytest.raises(UserError, match="--reward"):
        rewards.load(name)


def test_a_reward_model_is_a_folder(net: Path, tmp_path: Path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig.from_pretrained(net, num_labels=1)
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    language.tokenizer().save_pretrained(tmp_path)
    model = rewards.load(str(tmp_path))
    together = rewards.ask(model, ["a", "a long prompt"], [" word", ""])
    alone = torch.cat([rewards.ask(model, [p], [c]) for p, c in (("a", " word"), ("a long prompt", ""))])
    assert torch.allclose(together, alone, atol=1e-5)
    assert set(rewards.nets(model)) == {"reward"}
    assert model._shown("a", "b") == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"


# ---------------------------------------------------------------------------------------------------------------- watch
def test_the_watch_tells_a_hole_from_learning():
    start = {"reward": 0.8, "distinct": 0.9, "tokens": 22.0, "kl": 0.0}
    for end, stops in (({"reward": 20.0, "distinct": 0.1}, True), ({"reward": 0.9, "tokens": 2.0}, True),
                       ({"reward": 2.0, "kl": 30.0}, True), ({"reward": 0.5, "distinct": 0.1}, False),
                       ({"reward": 3.0, "kl": 9.0}, False)):  # fmt: skip
        watch = Watch(6.0)
        watch.stop(start, 1)
        watch.stop(start | end, 2)
        watch.stop(start | end, 3)
        other = Watch(6.0)
        other.load_state_dict(watch.state_dict())
        if stops:
            with pytest.raises(Stop, match="hacked"):
                other.stop(start | end, 4)
        else:
            other.stop(start | end, 4)


# ---------------------------------------------------------------------------------------------------------- the command
def test_a_small_language_model_is_proved(net: Path, launch):
    """The eos of this tokenizer is its pad, its prompts have many lengths."""
    done = launch("check", "rl/rlhf", "--model", str(net), *SMALL, "--only", OWN)
    assert done.returncode == 0, done.shown
    assert {v["verdict"] for v in done.verdicts()} == {"pass"}, done.shown


def test_a_hole_stops_the_run(net: Path, tmp_path: Path):
    """A price of nothing and a rate that takes the policy anywhere: the run ends itself, and says why."""
    done = trainworthy("run", "rl/rlhf", "--model", net, *SMALL, "--gates.no-enabled", "--run.no-tensorboard", "--init-kl-coef", "0",
                       "--target-kl", "0.5", "--optim.lr", "3e-3", "--train.epochs", "40", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 4, done.stdout + done.stderr
    assert "hacked (R1)" in done.stderr
    folder = run_folder(tmp_path)
    rows = read(folder / "step_metrics.jsonl")
    assert rows[-1]["step/policy/reward"] > rows[0]["step/policy/reward"]
    assert (folder / "monitors.json").is_file()


@pytest.mark.verify
def test_target_kl_holds_the_policy_at_the_target(net: Path, tmp_path: Path):
    """Nats a completion over the last third of 40 rollouts, at a target of 0.5 (measured, seed 0): 0.44 from a coefficient that is too
    high at first, 0.45 from one that is too low (after 2.1 at most)."""
    late = {}
    for start in ("0", "0.1", "10"):  # 0 stays 0: nothing holds the policy
        (cwd := tmp_path / start).mkdir()
        done = trainworthy("run", "rl/rlhf", "--model", net, *SMALL, "--gates.no-enabled", "--run.no-tensorboard", "--no-stop-hacked",
                           "--optim.lr", "1e-3", "--rollout-batch-size", "32", "--train.epochs", "40", "--init-kl-coef", start,
                           "--target-kl", "0.5", "--kl-coef-rate", "0.2", cwd=cwd)  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows = read(run_folder(cwd) / "step_metrics.jsonl")
        late[start] = sum(row["step/policy/kl"] for row in rows[-13:]) / 13
        monitors = {m["id"]: m["verdict"] for m in read(run_folder(cwd) / "monitors.json")["monitors"]}
        assert monitors["kl"] == ("advice" if start == "0" else "pass"), late
        if start == "10":
            assert rows[-1]["step/policy/kl_coef"] < 0.1
    assert late["0"] > 2 * 0.5, late
    assert 0.5 * 0.5 < late["0.1"] < 1.5 * 0.5, late
    assert 0.5 * 0.5 < late["10"] < 1.5 * 0.5, late


def test_a_reference_loaded_by_name_is_stopped(net: Path, fork, launch, tmp_path: Path):
    """`--init-from` another model than the one that was named; the reference is left as that one."""
    torch.manual_seed(1)
    language.model().save_pretrained(tmp_path / "other")
    fork(("        on_start=lambda: reference.load_state_dict(policy.state_dict()),\n", ""), recipe="rl/rlhf")
    asked = ("--model", str(net), *SMALL, "--init-from", str(tmp_path / "other"), "--only", "returns")
    done = launch("check", "mine.py", *asked)
    assert done.returncode == 3, done.shown
    assert "another model than the initial one" in done.verdicts()[0]["remedy"]


def test_lengths_that_do_not_fit_are_one_message(net: Path, launch):
    for argv, words in (
        (("--max-new-tokens", "4096"), "longer than what the model reads"),
        (("--train.batch-size", "7"), "cut evenly"),
    ):
        done = launch("check", "rl/rlhf", "--model", str(net), *SMALL, *argv, "--only", "schema")
        assert done.returncode == 2, done.shown
        assert words in done.stderr
        assert "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------------------------------- prompts
@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "number {i} of many"}}\n' for i in range(60)))
    return path


def test_prompts_of_ones_own(rows: Path):
    found = prompts.read(prompts.Source(path=str(rows), held_out=2), language.tokenizer(), 5)
    assert len(found["val"]) <= 2
    some, seeded = found["prompts"], torch.Generator()
    sample = some.get(0, seeded.manual_seed(1))
    n = int(sample["mask"].sum())
    assert sample["mask"].tolist() == [False] * (24 - n) + [True] * n
    assert language.tokenizer().decode(sample["input_ids"][-n + 1 :]) == sample["prompt"]
    assert torch.equal(sample["draws"], some.get(0, seeded.manual_seed(1))["draws"])
    assert not torch.equal(sample["draws"], some.get(0, seeded.manual_seed(2))["draws"])
    assert torch.equal(some.get(0, None)["draws"], some.get(0, None)["draws"])


def test_held_out_prompts_have_a_file_of_their_own_or_a_share(rows: Path, tmp_path: Path):
    own = tmp_path / "own.jsonl"
    own.write_text("".join(f'{{"prompt": "held out {i}"}}\n' for i in range(9)))
    found = prompts.read(prompts.Source(path=str(rows), val=str(own)), language.tokenizer(), 5)
    assert found["val"].texts == [f"held out {i}" for i in range(9)]
    assert len(found["prompts"]) == 60
    found = prompts.read(prompts.Source(path=str(rows), val="0.3"), language.tokenizer(), 5)
    assert 8 < len(found["val"]) < 30
    assert len(found["prompts"]) + len(found["val"]) == 60
    assert not {*found["prompts"].texts} & {*found["val"].texts}
    with pytest.raises(UserError, match="not a share"):
        prompts.read(prompts.Source(path=str(rows), val="3"), language.tokenizer(), 5)


def test_prompts_in_turns(rows: Path):
    source = prompts.Source(path=str(rows), tokens=80, chat=True)
    sample = prompts.read(source, language.tokenizer(), 5)["prompts"].get(0, None)
    said = language.tokenizer().decode(sample["input_ids"][sample["mask"]])
    assert said.startswith("<|im_start|>user\nnumber")
    assert said.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(("settings", "words"), [
    ({"tokens": 3}, "too long"),
    ({"column": "question"}, "question"),
    ({"path": "nowhere.jsonl"}, "no such file"),
    ({"chat": True, "tokens": 7}, "too long"),
])  # fmt: skip
def test_prompts_that_cannot_be_asked(settings: dict, words: str, rows: Path):
    with pytest.raises(UserError, match=words):
        prompts.read(prompts.Source(**{"path": str(rows), **settings}), language.tokenizer(), 5)


# ----------------------------------------------------------------------------------------------------- slices and adapters
def test_log_probabilities_in_slices_are_the_same(net: Path):
    """However many completions are read at once, and no more of them than asked for."""
    from trainworthy.recipes.rl.language.models import loading as models
    from trainworthy.recipes.rl.language.models import policy

    torch.manual_seed(0)
    writer = policy.Writer(models.load(str(net)), models.tokenizer(str(net)))
    torch.nn.init.normal_(writer.head[-1].weight)
    ids, said = torch.randint(3, 200, (10, 5)), torch.randint(3, 200, (10, 7))
    asked = {"input_ids": ids, "mask": torch.ones(10, 12, dtype=torch.bool), "response": said}
    sizes: list[int] = []
    writer.register_forward_hook(lambda _module, _args, out: sizes.append(len(out[0])))
    whole, parts = (policy.scored(writer, asked, rows) for rows in (10, 4))
    assert sizes == [10, 4, 4, 2]
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
        assert a.shape == (10, 7)
    log_p, value = writer(**asked)
    assert torch.allclose(policy.own(log_p, said), parts[0], atol=1e-5)
    assert torch.allclose(value, parts[1], atol=1e-5)


@pytest.mark.verify
def test_adapters_learn_from_rewards_and_are_exported(net: Path, launch, tmp_path: Path):
    """LoRA: the gates hold, the base stays as it was, and what is exported is an adapter that peft reads."""
    asked = ("--model", str(net), *SMALL, "--lora-rank", "4", "--optim.lr", "3e-3")
    done = launch("check", "rl/rlhf", *asked, "--only", f"init,wiring,accumulation,resume,{OWN}")
    assert done.returncode == 0, done.shown
    verdicts = {v["id"]: v["verdict"] for v in done.verdicts()}
    assert {verdicts[k] for k in ("init", "wiring", "score", "returns", "formula")} == {"pass"}, done.shown
    done = launch(
        "run",
        "rl/rlhf",
        *asked,
        "--gates.no-enabled",
        "--run.no-tensorboard",
        "--train.epochs",
        "2",
        "--train.precision",
        "bf16",
    )
    assert done.returncode == 0, done.shown
    from peft import AutoPeftModelForCausalLM

    assert AutoPeftModelForCausalLM.from_pretrained(done.folder() / "export").peft_config.keys() == {"default"}
