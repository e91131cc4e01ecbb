"""llm/dpo through the real command, on a language model small enough for a test: the loss, the reference, the chain, bad input."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop.run import Rehearsal
from trainworthy.recipes.llm import dpo, reward
from trainworthy.recipes.llm.data import pairs, preferences
from trainworthy.recipes.llm.gates import preference
from trainworthy.recipes.llm.models import loading
from trl.trainer.utils import use_adapter

from tests.helpers import language
from tests.helpers.commands import losses, read, run_folder, trainworthy
from tests.llm.test_sft import written
from trainworthy import core

SMALL = (
    "--lora-rank",
    "4",
    "--optim.lr",
    "3e-3",
    "--data.held-out",
    "8",
    "--data.max-length",
    "256",
    "--data.max-bad",
    "0.02",
)
QUICK = (*SMALL, "--gates.no-enabled", "--run.no-tensorboard", "--train.epochs", "0.012")  # 13 steps of 4 pairs


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="module")
def straight(net: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("straight")
    done = trainworthy("run", "llm/dpo", "--model", net, *QUICK, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return run_folder(cwd)


MORE = {"lora": (), "whole": ("--lora-rank", "0"), "ipo": ("--loss", "ipo", "--beta", "0.5")}
MORE |= {k: ("--loss", k) for k in ("hinge", "exo_pair", "nca_pair", "sppo_hard", "apo_down", "discopop")}


@pytest.mark.parametrize(
    "more", [pytest.param(v, id=k, marks=[pytest.mark.verify] * (k != "lora")) for k, v in MORE.items()]
)
def test_the_loss_is_the_formula_s(more: tuple[str, ...], net: Path, launch):
    """Every gate that needs no trained language model; the formula is written apart from TRL's, the answers are read alone."""
    only = "schema,data,leakage,initial-loss,init,wiring,schedule,dependency,accumulation,template,scored,preference"
    done = launch("check", "llm/dpo", "--model", str(net), *SMALL, *more, "--only", only)
    gaps = {v["id"]: v for v in done.verdicts()}["preference"]["evidence"]["gaps"]
    assert max(gaps) < 1e-5, done.shown
    assert done.returncode == 0, done.shown


FIRST = {"sigmoid": 0.6931, "sigmoid_norm": 0.6931, "hinge": 1.0, "ipo": 25.0, "robust": 0.6931, "exo_pair": 0.5108,
         "nca_pair": 1.3863, "bco_pair": 1.3863, "sppo_hard": 50.0, "apo_zero": 1.0, "apo_down": 1.0,
         "discopop": 0.8466}  # fmt: skip


@pytest.fixture(scope="module")
def learnt(net: Path):
    """TRL's trainer as the recipe builds it, its policy moved away from the reference; a batch; what each answer has over the
    reference in nats, read alone from plain logits, its tokens, and its own log-probability, (2, 2) each."""
    Accelerator(cpu=True)  # the launcher's, which the trainer is told to take
    cfg = dpo.Config(lora_rank=4, label_smoothing=0.1)
    torch.manual_seed(0)  # adapters begin with draws
    trainer = dpo.make_trainer(cfg, SimpleNamespace(precision="fp32", device=torch.device("cpu")), str(net))
    generator = torch.Generator().manual_seed(0)
    for name, p in trainer.model.named_parameters():
        if ".default." in name:
            p.data += 0.6 * torch.randn(p.shape, generator=generator)
    chat = pairs.Chat(loading.tokenizer(str(net)), "Say.")
    rows = [{"prompt": "a", "chosen": "an answer", "rejected": "no", "source": "1"},
            {"prompt": "what else", "chosen": "b", "rejected": "something longer", "source": "2"}]  # fmt: skip
    data = preferences.Preferences(rows, chat)
    data.collator = trainer.data_collator

    def nats(row: dict, key: str) -> tuple[float, int]:
        before, after = chat.ask(chat.turns(row["prompt"])), chat.answer(row[key])
        ids = torch.tensor([before + after])
        said = trainer.model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1].double().log_softmax(-1)
        return said.gather(-1, ids[0, len(before) :, None]).sum().item(), len(after)

    with torch.no_grad():
        said = torch.tensor([[nats(r, k) for k in ("chosen", "rejected")] for r in rows], dtype=torch.double)
        with use_adapter(trainer.model, "ref"):
            was = torch.tensor([[nats(r, k) for k in ("chosen", "rejected")] for r in rows], dtype=torch.double)
    return trainer, data.collate(rows)["inputs"], said[..., 0] - was[..., 0], said[..., 1], said[..., 0]


@pytest.mark.parametrize(
    ("loss", "lora"), [("sigmoid", 4), ("sigmoid", 0), pytest.param("ipo", 4, marks=pytest.mark.verify)]
)
def test_the_stage_s_loss_is_that_of_each_answer_alone(loss: str, lora: int, net: Path):
    """The recipe's own function, to 1e-6 of the formula: the policy moved, its reference what it was when training began."""
    source = preferences.Source(max_length=256, held_out=8, max_bad=0.02)
    cfg = dpo.Config(lora_rank=lora, loss=loss, model=str(net), data=source)
    torch.manual_seed(0)
    stage = dpo.dpo(cfg, core.Run(cfg, Accelerator(cpu=True), rehearsal=Rehearsal(steps=1)))
    stage.on_start()
    data, model = stage.data["train"], stage.model.eval()
    rows = [{"prompt": "a", "chosen": "an answer", "rejected": "no", "source": "1"},
            {"prompt": "what else", "chosen": "b", "rejected": "longer", "source": "2"}]  # fmt: skip

    def nats(key: str) -> tuple[list[float], list[int]]:
        found = []
        for row in rows:
            before, after = data.chat.ask(data.chat.turns(row["prompt"])), data.chat.answer(row[key])
            ids = torch.tensor([before + after])
            said = model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1].double().log_softmax(-1)
            found.append((said.gather(-1, ids[0, len(before) :, None]).sum().item(), len(after)))
        return [n for n, _ in found], [n for _, n in found]

    with torch.no_grad():
        was = torch.tensor([nats(k)[0] for k in ("chosen", "rejected")], dtype=torch.double)
        for p in stage.parameters().values():
            p += (0.6 if lora else 0.1) * torch.randn_like(p)
        now = torch.tensor([nats(k)[0] for k in ("chosen", "rejected")], dtype=torch.double)
        sizes = torch.tensor([nats(k)[1] for k in ("chosen", "rejected")])
    assert (now - was).abs().max() > 0.2
    due = preference.LOSSES[loss]((now - was).T, sizes.T, cfg.beta, cfg.label_smoothing).mean().item()
    batch = data.collate(rows)
    got = stage.loss(model, batch)["loss"].item() / int(stage.counts(batch)["loss"])
    assert got == pytest.approx(due, rel=1e-6)


@pytest.mark.parametrize("loss", preference.LOSSES)
def test_every_loss_that_is_offered_is_its_formula(loss: str, learnt):
    trainer, inputs, over, sizes, _ = learnt
    assert over.abs().min() > 0.02
    trainer.loss_types = [loss]
    got = trainer.compute_loss(trainer.model, dict(inputs)).item()
    due = preference.LOSSES[loss](over, sizes, 0.1, 0.1).mean().item()
    assert got == pytest.approx(due, rel=1e-6, abs=1e-6)
    assert preference.first_loss(loss, 0.1, 0.1) == pytest.approx(FIRST[loss], abs=1e-4)
    assert abs(due - FIRST[loss]) > 1e-4
    assert loss in get_args(dpo.Config.__annotations__["loss"])


@pytest.mark.parametrize(
    ("weights", "first"),
    [({"sigmoid": 0.8, "bco_pair": 0.2}, 0.8318), ({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, None)],
)
def test_a_mixture_of_losses_is_their_weighted_sum(weights: dict[str, float], first: float | None, learnt):
    """TRL adds up several losses, as for multimodal preferences (MPO); fine-tuning on the chosen answers may be among them."""
    trainer, inputs, over, sizes, own = learnt
    trainer.loss_types, trainer.loss_weights = list(weights), list(weights.values())
    got = trainer.compute_loss(trainer.model, dict(inputs)).item()
    cfg = SimpleNamespace(loss="sigmoid", beta=0.1, label_smoothing=0.1)
    assert preference.mixture(trainer, cfg) == weights
    due = preference.declared(trainer, cfg, over, own, sizes, torch.ones_like(over))
    assert got == pytest.approx(due, rel=1e-6, abs=1e-6)
    assert preference.untrained(trainer, cfg) == (first if first is None else pytest.approx(first, abs=1e-4))
    trainer.loss_types, trainer.loss_weights = ["sigmoid"], [1.0]
    assert preference.untrained(trainer, cfg) == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "coefficient"), [("js_divergence", 0.5), ("forward_kl", 0.5), ("alpha_divergence", 0.3)]
)
def test_another_divergence_changes_the_log_ratios(name: str, coefficient: float, learnt, monkeypatch):
    trainer, inputs, over, sizes, own = learnt
    for holder in (trainer, trainer.args):
        monkeypatch.setattr(holder, "f_divergence_type", name)
        monkeypatch.setattr(holder, "f_alpha_divergence_coef", coefficient)
    got = trainer.compute_loss(trainer.model, dict(inputs)).item()
    cfg = SimpleNamespace(loss="sigmoid", beta=0.1, label_smoothing=0.1)
    due = preference.declared(trainer, cfg, over, own, sizes, torch.ones_like(over))
    assert got == pytest.approx(due, rel=1e-6)
    assert abs(due - preference.LOSSES["sigmoid"](over, sizes, 0.1, 0.0).mean().item()) > 1e-5
    assert not preference.known_floor(trainer)


def test_a_run_keeps_its_reference_and_exports_an_adapter(net: Path, straight: Path):
    from peft import AutoPeftModelForCausalLM

    rows = read(straight / "epoch_metrics.jsonl")
    assert {"accuracy", "likelier", "margin", "loss"} <= read(straight / "summary.json")["intervals"]["val"].keys()
    # `accuracy` compares with the reference, so an untrained policy has 0.5 of it, however often it finds the chosen answer likelier.
    baselines = read(straight / "summary.json")["baselines"]
    before = baselines["the likelier answer, before training"]["accuracy"]
    assert baselines["untrained"] == {"accuracy": 0.5, "likelier": before, "margin": 0.0}
    assert rows[0]["val/reference/chosen"] == pytest.approx(rows[-1]["val/reference/chosen"], rel=1e-6)
    assert losses(straight)[0] == pytest.approx(0.693147, abs=1e-5)
    # It trains; random weights learn nothing general in 13 steps.
    assert len({round(value, 3) for value in losses(straight)}) > 8
    monitors = {m["id"]: m["verdict"] for m in read(straight / "monitors.json")["monitors"]}
    assert (monitors["likelihood"], monitors["reference"]) == ("pass", "pass")
    tensors = load_file(straight / "export" / "adapter_model.safetensors")
    assert not [n for n in tensors if ".ref." in n]
    assert AutoPeftModelForCausalLM.from_pretrained(straight / "export").peft_config.keys() == {"default"}


@pytest.fixture(scope="module")
def tuned(net: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of llm/sft whose adapters are no longer nothing."""
    cwd = tmp_path_factory.mktemp("tuned")
    done = trainworthy("run", "llm/sft", "--model", net, *SMALL, "--train.batch-size", "4", "--train.epochs", "0.02",
                       "--gates.no-enabled", "--run.no-tensorboard", cwd=cwd)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return run_folder(cwd)


@pytest.mark.verify
def test_from_fine_tuning_to_preferences(net: Path, tuned: Path, launch):
    """sft, then dpo from its weights: the reference is what was fine-tuned, not the model that was loaded by name."""
    asked = ("--model", str(net), *SMALL, "--init-from", str(tuned))
    done = launch("check", "llm/dpo", *asked, "--only", "init,wiring,preference")
    assert done.returncode == 0, done.shown
    told = {v["id"]: v for v in done.verdicts()}
    assert told["init"]["verdict"] == "pass", done.shown
    assert max(told["preference"]["evidence"]["gaps"]) < 1e-5


def test_a_reference_of_another_model_is_stopped(net: Path, tuned: Path, fork, launch):
    """The same chain with the reference left as the model that was loaded by name."""
    fork(("        on_start=begin,\n", ""), recipe="llm/dpo")
    done = launch("check", "mine.py", "--model", str(net), *SMALL, "--init-from", str(tuned), "--only", "preference")
    assert done.returncode == 3, done.shown
    verdict = done.verdicts()[0]
    assert "--init-from" in verdict["remedy"]
    assert "before training 0.69315" not in verdict["measured"]


def test_monitors_tell_a_collapse_from_what_is_normal():
    def history(chosen: float, rejected: float, moved: float = 0.0) -> list[dict[str, float]]:
        start = {"val/reference/chosen": -40.0, "val/reference/rejected": -45.0, "val/tokens": 15.0}
        return [{**start, "val/chosen": -40.0, "val/rejected": -45.0},
                {**start, "val/reference/chosen": -40.0 + moved, "val/chosen": chosen, "val/rejected": rejected}]  # fmt: skip

    assert preference.likelihood.check(history(-46.0, -78.0)).ok  # measured on a healthy run: 6 nats and 33
    assert preference.likelihood.check(history(-38.0, -60.0)).ok
    assert not preference.likelihood.check(history(-140.0, -160.0)).ok
    assert preference.moved_reference.check(history(-40.0, -45.0)).ok
    assert not preference.moved_reference.check(history(-40.0, -45.0, moved=-1.0)).ok


@pytest.mark.parametrize("recipe", [dpo, reward], ids=["dpo", "reward"])
def test_whole_epochs_of_a_user_s_data_are_evaluated_twice_an_epoch(recipe, tmp_path: Path, monkeypatch):
    """The preset's interval is a part of an epoch of 4,278 pairs: of 220 pairs it was two steps, 101 evaluations in three epochs."""

    def intervals(path: str, epochs: float, every: float) -> tuple[float, float]:
        train, run = config.Train(epochs=epochs, eval_every=every), config.RunSettings(save_every=every)
        cfg = recipe.Config(data=preferences.Source(path=path), train=train, run=run)
        return cfg.train.eval_every, cfg.run.save_every

    assert intervals("own.jsonl", 3, recipe.EVERY) == (0.5, 0.5)
    assert (
        intervals("own.jsonl", 0.1, recipe.EVERY)
        == intervals("docstrings", 3, recipe.EVERY)
        == (recipe.EVERY, recipe.EVERY)
    )
    assert intervals("own.jsonl", 3, 0.2) == (0.2, 0.2)
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert recipe.Config(model="model").model == str(tmp_path / "model")  # a run can be asked from another folder


CITIES, COLOURS = (
    ("Oslo", "Lima", "Rome", "Bern", "Riga", "Doha", "Kyiv", "Quito"),
    ("red", "blue", "green", "white", "black"),
)


@pytest.mark.verify
def test_a_collapse_is_said_by_the_command(net: Path, tmp_path: Path):
    """L9: a rate that is too high and a beta that is too low, on answers that differ in a word, after `llm/sft` on the chosen ones. The
    chosen answers become as unlikely as the rejected ones: 1.7 nats a token in one epoch, 3.4 in two (measured). A lower rate and no
    alarm."""
    opt = ("--model", net, "--lora-rank", "0", "--data.system", "", "--data.held-out", "16", "--data.max-length", "96",
           "--train.batch-size", "8", "--gates.no-enabled", "--run.no-tensorboard")  # fmt: skip
    rows = [{"prompt": f"flag of {CITIES[i % 8]} {i}?", "chosen": f"It is {COLOURS[i % 5]} there.",
             "rejected": f"It is {COLOURS[(i + 1 + i // 5 % 4) % 5]} there."} for i in range(240)]  # fmt: skip
    taught = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    done = trainworthy("run", "llm/sft", *opt, "--data.path", written(tmp_path / "taught.jsonl", taught), "--data.near", "0",
                       "--optim.lr", "3e-3", "--train.epochs", "4", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    own = (*opt, "--init-from", run_folder(tmp_path), "--data.path", written(tmp_path / "pairs.jsonl", rows))
    for name, settings in (("fine", ("--optim.lr", "1e-4")), ("collapsed", ("--optim.lr", "3e-3", "--beta", "0.01"))):
        (cwd := tmp_path / name).mkdir()
        done = trainworthy(
            "run", "llm/dpo", *own, *settings, "--train.epochs", "1", "--train.eval-every", "0.5", cwd=cwd
        )
        assert done.returncode == 0, done.stderr
        monitors = {m["id"]: m for m in read(run_folder(cwd) / "monitors.json")["monitors"]}
        said = "advice likelihood" in " ".join(done.stdout.split())
        assert (monitors["likelihood"]["verdict"], said) == (("pass", False) if name == "fine" else ("advice", True)), (
            done.stdout
        )
    last = read(run_folder(cwd) / "epoch_metrics.jsonl")[-1]
    assert last["val/chosen"] < last["val/reference/chosen"] - 1.5 * last["val/tokens"], last


def test_the_best_checkpoint_may_be_chosen_by_the_loss(net: Path, tmp_path: Path):
    """Through the command; gates keep the share of preferred answers, whose best value is known."""
    cfg = dpo.Config(metric="loss", loss="ipo", beta=0.5)
    assert preference.metric(cfg).floor == pytest.approx(1.0)
    assert not preference.metric(cfg).higher_is_better
    assert preference.probe(cfg, lambda model, data: {}).metric.name == "accuracy"
    assert preference.probe(dpo.Config(), lambda model, data: {}) is None
    done = trainworthy("run", "llm/dpo", "--model", net, *QUICK, "--metric", "loss", "--train.eval-every", "0.004", "--run.export", "best",
                       cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = run_folder(tmp_path)
    summary, rows = read(folder / "summary.json"), read(folder / "epoch_metrics.jsonl")
    assert summary["metric"] == "loss"
    assert summary["reported"]["loss"] == pytest.approx(min(row["val/loss"] for row in rows))
    (same,) = {row["val/loss"] for row in rows if row["step"] == summary["reported"]["step"]}
    assert same == min(row["val/loss"] for row in rows)


# ------------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(("rows", "words"), [
    ([{"prompt": "a", "completion": "b"}], ("chosen: missing", "prompts with one completion (SFT)")),
    ([{"prompt": "a", "chosen": "b", "rejected": 1}], ("rejected (int)", "rejected: int")),
    ([{"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"}], ("chosen: list",)),
], ids=["pairs", "other-type", "messages"])  # fmt: skip
def test_rows_that_are_no_preferences(rows: list[dict], words: tuple[str, ...], tmp_path: Path):
    source = preferences.Source(path=str(written(tmp_path / "rows.jsonl", rows)))
    chat = preferences.chat(language.tokenizer(), source)
    with pytest.raises(UserError) as told:
        preferences.read(source, chat)
    assert not [w for w in words if w not in str(told.value)], told.value


def test_two_answers_that_are_the_same_are_told(net: Path, launch, tmp_path: Path):
    rows = [{"prompt": f"number {i}", "chosen": str(i), "rejected": str(i if i % 2 else i + 1)} for i in range(80)]
    path = str(written(tmp_path / "rows.jsonl", rows))
    asked = (
        "check",
        "llm/dpo",
        "--model",
        str(net),
        "--data.path",
        path,
        "--data.max-length",
        "200",
        "--only",
        "schema",
    )
    done = launch(*asked)
    assert done.returncode == 2, done.shown
    for words in ("one answer twice", "filled from one column"):
        assert words in done.stderr, done.stderr
    done = launch(*asked, "--data.max-bad", "0.6")
    assert done.returncode == 0, done.shown
    assert "left out" in json.dumps(read(done.folder() / "data.json"))


def cut(rows: list[dict], key: str, tokens: int, tokenizer) -> list[dict]:
    """Rows with answers as a model writes them that may generate so many tokens."""
    ids = tokenizer([r[key] for r in rows], add_special_tokens=False)["input_ids"]
    return [{**r, key: tokenizer.decode(some[:tokens])} for r, some in zip(rows, ids, strict=True)]


@pytest.mark.parametrize(
    ("change", "gate", "words"),
    [
        (lambda rows, _: [{**r, "rejected": r["rejected"][:20]} for r in rows if len(r["rejected"]) > 24], "data", "was cut at 20 characters"),
        (lambda rows, words: cut(rows, "rejected", 56, words), "lengths", "rejected answers were cut at 56 tokens"),
        (lambda rows, _: [{**r, "rejected": r["chosen"][: len(r["chosen"]) // 2]} for r in rows], "lengths", "rejected answers are cut"),
    ],
    ids=["characters", "tokens", "shorter"],
)  # fmt: skip
def test_rejected_answers_that_were_cut_are_stopped(change, gate: str, words: str, net: Path, launch, tmp_path: Path):
    """What is learnt from them is that an answer ends, or how long it is."""
    rows = change(preferences.constructed()[0][:600], loading.tokenizer(str(net)))
    path = str(written(tmp_path / "rows.jsonl", rows))
    done = launch("check", "llm/dpo", "--model", str(net), *SMALL, "--data.path", path, "--only", "data,lengths")
    found = {v["id"]: v for v in done.verdicts()}
    assert found[gate]["verdict"] == "fail", done.shown
    assert words in found[gate]["cause"] + found[gate]["remedy"], done.shown
