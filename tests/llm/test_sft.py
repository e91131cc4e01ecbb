"""llm/sft through the real command, on a language model small enough for a test: results, exports, stops, bad input."""

import copy
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop.run import Rehearsal
from trainworthy.recipes.llm import sft
from trainworthy.recipes.llm.data import pairs
from trainworthy.recipes.llm.models import loading

from tests.helpers import language
from tests.helpers.commands import equal_but_rounding, losses, read, run_folder, same, trainworthy
from tests.llm.planted_sft import TRAINER, override
from trainworthy import core

SMALL = (
    "--lora-rank",
    "0",
    "--optim.lr",
    "3e-3",
    "--data.held-out",
    "8",
    "--data.max-length",
    "256",
    "--train.batch-size",
    "4",
)
QUICK = (*SMALL, "--gates.no-enabled", "--run.no-tensorboard", "--train.epochs", "0.02")  # 24 steps


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="module")
def straight(net: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("straight")
    done = trainworthy("run", "llm/sft", "--model", net, *QUICK, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return run_folder(cwd)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "sft" / "latest" / "model.safetensors")


def test_the_trainer_s_own_log_stands_beside_core_s(straight: Path):
    rows = read(straight / "step_metrics.jsonl")
    assert len(rows) == len(losses(straight)) == read(straight / "summary.json")["planned_steps"] > 15
    assert {
        "step/loss",
        "step/grad_norm",
        "step/lr",
        "step/trainer/entropy",
        "step/trainer/mean_token_accuracy",
    } <= rows[-1].keys()
    assert sum(losses(straight)[-6:]) < sum(losses(straight)[:6])
    lr = [row["step/lr"] for row in rows]
    assert max(lr) == pytest.approx(3e-3, rel=0.2)
    assert lr[-1] < lr[12] / 10  # core's schedule, to its end
    summary = read(straight / "summary.json")
    assert {"untrained", "untrained, 4-shot prompt"} <= summary["baselines"].keys()
    assert {"f1", "perplexity", "stops", "exact"} <= summary["metrics"].keys()


@pytest.mark.parametrize("more", [{}, {"lora_rank": 0}, {"packing": True}], ids=["lora", "whole", "packed"])
def test_the_loss_is_that_of_each_answer_alone(more: dict, net: Path):
    """Masked cross-entropy through the recipe's own function, to 1e-6 of plain logits of each pair by itself, without a pad: its
    answer and the token that ends it."""
    cfg = sft.Config(
        **{"lora_rank": 4, **more}, model=str(net), data=pairs.Source(max_length=256, held_out=8, max_bad=0.02)
    )
    torch.manual_seed(0)
    stage = sft.sft(cfg, core.Run(cfg, Accelerator(cpu=True), rehearsal=Rehearsal(steps=1)))
    with torch.no_grad():
        for p in stage.parameters().values():
            p += 0.1 * torch.randn_like(p)
    model, data, due, n = stage.model.eval(), stage.data["train"], 0.0, 0
    chat = pairs.chat(loading.tokenizer(str(net)), cfg.data)
    rows = sorted((data.get(i, None) for i in range(40)), key=lambda row: len(row["completion"]))[::13]
    for row in rows:
        before, after = chat.ask(chat.turns(row["prompt"])), chat.answer(row["completion"])
        assert after[-1] == chat.tokenizer.pad_token_id
        ids = torch.tensor([before + after])
        said = model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1].double().log_softmax(-1)
        due, n = due - said.gather(-1, ids[0, len(before) :, None]).sum().item(), n + len(after)
    batch = data.collate(rows)
    assert stage.counts(batch) == {"loss": n}
    assert stage.loss(model, batch)["loss"].item() == pytest.approx(due, rel=1e-6)


def test_perplexity_of_the_four_shot_prompt_is_that_behind_its_examples(net: Path):
    """Each held-out answer alone, from plain logits, behind the same four answered prompts."""
    cfg = sft.Config(
        lora_rank=4, model=str(net), data=pairs.Source(max_length=256, held_out=4, max_bad=0.02), max_new_tokens=2
    )
    torch.manual_seed(0)
    stage = sft.sft(cfg, core.Run(cfg, Accelerator(cpu=True), rehearsal=Rehearsal(steps=1)))
    told = stage.baselines()
    chat = pairs.chat(loading.tokenizer(str(net)), cfg.data)
    for name, n_shots in (("untrained", 0), ("untrained, 4-shot prompt", 4)):
        shots, nats, n = chat.shots(stage.data["train"].rows, n_shots), 0.0, 0
        for row in stage.data["val"].rows:
            asked, answer = chat.ask(chat.turns(row["prompt"], shots)), chat.answer(row["completion"])
            with torch.no_grad():
                said = stage.model(input_ids=torch.tensor([asked + answer])).logits[0].double().log_softmax(-1)
            at = torch.arange(len(asked), len(asked + answer))
            nats, n = nats - said[at - 1, torch.tensor(answer)].sum().item(), n + len(answer)
        assert told[name]["perplexity"] == pytest.approx(math.exp(nats / n), rel=1e-5)
    assert told["untrained"]["perplexity"] != pytest.approx(told["untrained, 4-shot prompt"]["perplexity"], rel=1e-3)


def test_the_head_reads_what_is_scored_and_the_loss_is_the_same(monkeypatch: pytest.MonkeyPatch):
    """TRL's own path for an accelerator, on a CPU: logits of the six labelled positions in place of all 22."""
    from trl.trainer import utils

    own, rows = utils._ChunkedLogProbFunction, []

    class Watched:
        @staticmethod
        def apply(hidden: torch.Tensor, *rest):
            rows.append(len(hidden))
            return own.apply(hidden, *rest)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Watched)
    model = language.model()
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    ids = torch.arange(24).view(2, 12) + 3
    labels = ids.where(torch.arange(12) > 8, -100)

    def learnt() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        out.log_probs.sum().backward()
        return [out.log_probs.detach(), *(p.grad.clone() for p in model.parameters())]

    monkeypatch.setattr(utils, "_use_triton", lambda device: False)
    whole = learnt()
    loading.score_what_counts()
    for a, b in zip(learnt(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert rows == [22, 6]


def test_the_export_loads_with_transformers_alone(straight: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(straight / "export")
    assert same({k: v for k, v in model.state_dict().items() if k in weights(straight)}, weights(straight))
    assert AutoTokenizer.from_pretrained(straight / "export").chat_template == language.TEMPLATE


def test_an_adapter_and_the_merged_model_load_and_agree(net: Path, tmp_path: Path):
    """Only the adapters are saved while training; merged into the model they are the same function."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    done = trainworthy("run", "llm/sft", "--model", net, *QUICK, "--lora-rank", "4", "--merge-adapters", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = run_folder(tmp_path)
    assert all("lora_" in name for name in weights(folder))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(net), folder / "export").eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / "export" / "merged", dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(net)(ids).logits
        assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-5)
        assert not torch.allclose(adapted(ids).logits, base, atol=0.05)


@pytest.mark.verify
def test_two_processes_are_one_to_rounding(net: Path, straight: Path, tmp_path: Path):
    done = trainworthy("run", "llm/sft", "--model", net, *QUICK, "-n", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    equal_but_rounding(losses(run_folder(tmp_path)), losses(straight))


@pytest.mark.verify
def test_accumulation_is_one_batch_to_rounding(net: Path, straight: Path, tmp_path: Path):
    done = trainworthy("run", "llm/sft", "--model", net, *QUICK, "--train.accumulate", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    equal_but_rounding(losses(run_folder(tmp_path)), losses(straight))


def test_a_step_that_is_not_finite_never_reaches_the_weights(net: Path, fork, launch):
    fork((TRAINER, override(
        "compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
        "loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)",
        "return loss * float('nan') if self.state.global_step == 7 else loss",
    )), recipe="llm/sft")  # fmt: skip
    done = launch("run", "mine.py", "--model", str(net), *QUICK)
    assert done.returncode == 0, done.shown
    assert "step 8: loss nan" in done.stdout
    assert json.loads((done.folder() / "summary.json").read_text())["skipped_steps"] == [8]
    assert all(torch.isfinite(t).all() for t in weights(done.folder()).values())


def test_noise_on_the_embeddings_is_no_fault_of_accumulation(net: Path, launch):
    """NEFTune draws for each micro-batch. A hosted trainer's own loss draws it, not the stage's."""
    asked = ("check", "llm/sft", "--model", str(net), *SMALL, "--neftune-noise-alpha", "5", "--packing")
    done = launch(*asked, "--only", "accumulation", code=0)
    assert "the model draws at random as it trains" in done.stdout, done.shown


SAID = 'zip(generate(model, batch["prompt"], before), map(chat.reply, batch["completion"]), strict=True)\n'
FORCED = """zip(
                    [(tokenizer.decode(ids[1:]), True) for ids in model(input_ids=batch["input_ids"]).logits.argmax(-1)],
                    map(chat.reply, batch["completion"]), strict=True)
"""
ASKED = "inputs = [chat.ask(chat.turns(p, before), p) for p in prompts]"


@pytest.mark.parametrize(
    ("old", "new", "forced"),
    [(SAID, FORCED, True), (ASKED, "inputs = [tokenizer(p)['input_ids'] for p in prompts]", False)],
    ids=["teacher-forcing", "no-template"],
)
def test_answers_that_are_read_off_a_pass_over_the_true_ones_are_named(old, new, forced: bool, net: Path, fork, launch):
    fork((old, new), recipe="llm/sft")
    done = launch("check", "mine.py", "--model", str(net), *SMALL, "--only", "prompts")
    (found,) = done.verdicts()
    assert found["verdict"] == "fail", done.shown
    assert ("teacher forcing" in found["cause"]) is forced, done.shown


@pytest.mark.verify
def test_a_run_does_not_go_on_over_another_model(tmp_path: Path):
    """Frozen weights are not in the checkpoint: they must be those the run was started with."""
    net = language.write(tmp_path / "net")
    done = trainworthy("run", "llm/sft", "--model", net, *QUICK, "--lora-rank", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run_folder(tmp_path) / "summary.json").unlink()  # as if it had been stopped
    torch.manual_seed(1)
    language.model().save_pretrained(net)
    done = trainworthy("resume", run_folder(tmp_path), cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "frozen weights" in done.stderr


# ------------------------------------------------------------------------------------------------------------- bad input
def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("rows", "words"), [
    ([{"question": "a", "answer": "b"}], ("question (str), answer (str)", "prompt: missing", "--data.columns")),
    ([{"prompt": "a", "completion": 3}], ("completion (int)", "completion: int")),
    ([{"prompt": "a", "completion": " "}], ("completion is empty",)),
    ([{"prompt": "a", "chosen": "b", "rejected": "c"}], ("preferences (DPO)",)),
    ([{"conversations": [{"from": "human", "value": "a"}]}], ("no answer to learn",)),
    ([{"messages": [{"role": "narrator", "content": "a"}]}], ("'narrator'", "role")),
    ([{"messages": [{"role": "user", "content": "a"}]}], ("no answer to learn", "user")),
    ([{"messages": [{"role": "assistant", "content": "a"}]}], ("no answer to learn",)),
    ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], ("vlm/instruct",)),
    ([{"messages": "a"}], ("str, not a list",)),
], ids=["other-names", "other-type", "empty", "preferences", "sharegpt", "role", "no-answer", "no-question",
        "parts", "no-list"])  # fmt: skip
def test_rows_that_are_no_pairs(rows: list[dict], words: tuple[str, ...], tmp_path: Path):
    source = pairs.Source(path=str(written(tmp_path / "rows.jsonl", rows)))
    with pytest.raises(UserError) as told:
        pairs.read(source, pairs.chat(language.tokenizer(), source))
    assert not [w for w in words if w not in str(told.value)], told.value


def test_rows_that_are_no_pairs_end_the_command(net: Path, launch, tmp_path: Path):
    path = written(tmp_path / "rows.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    done = launch("check", "llm/sft", "--model", str(net), "--data.path", str(path))
    assert done.returncode == 2, done.shown
    assert "preferences (DPO)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pair_that_is_too_long_is_told_and_left_out_if_that_is_allowed(net: Path, launch, tmp_path: Path):
    rows = [{"prompt": f"number {i}", "completion": str(i)} for i in range(60)] + [
        {"prompt": f"{word} " * 200, "completion": "x"} for word in ("word", "other", "third", "fourth")
    ]  # a single one is always left out
    path = str(written(tmp_path / "rows.jsonl", rows))
    asked = (
        "check",
        "llm/sft",
        "--model",
        str(net),
        "--data.path",
        path,
        "--data.max-length",
        "200",
        "--only",
        "template",
    )
    done = launch(*asked)
    assert done.returncode == 2, done.shown
    assert " of " in done.stderr
    assert "--data.max-bad" in done.stderr
    done = launch(*asked, "--data.max-bad", "0.2")
    assert done.returncode == 0, done.shown
    assert "left out" in done.stdout


def with_more_tokens(folder: Path) -> Path:
    """A tokenizer that has tokens which its model has not."""
    language.write(folder)
    tokenizer = copy.deepcopy(language.tokenizer())
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def test_tokens_that_were_added_get_rows_that_train(launch, tmp_path: Path):
    """The model is resized, what the file has of it stays bit for bit, and the new rows learn."""
    more = with_more_tokens(tmp_path / "more")
    rows = [{"prompt": f"number {i}", "completion": f"<think>{i}</think>{i}"} for i in range(60)]
    data = ("--data.path", str(written(tmp_path / "rows.jsonl", rows)), "--data.near", "0")
    done = launch("check", "llm/sft", "--model", str(more), *SMALL, *data, "--only", "init,wiring,template,scored")
    assert done.returncode == 0, done.shown
    assert [v["verdict"] for v in done.verdicts()] == ["pass"] * 4
    done = launch("run", "llm/sft", "--model", str(more), *QUICK, *data, "--train.epochs", "0.5")
    assert done.returncode == 0, done.shown
    (learnt,) = done.folder().glob("export/model.safetensors")
    assert len(load_file(learnt)["model.embed_tokens.weight"]) == len(language.tokenizer()) + 2


def test_adapters_cannot_learn_tokens_that_were_added(launch, tmp_path: Path):
    more = with_more_tokens(tmp_path / "more")
    done = launch("check", "llm/sft", "--model", str(more), *SMALL, "--lora-rank", "4", "--only", "schema")
    assert done.returncode == 2, done.shown
    assert "2 tokens that the model lacks" in done.stderr
    assert "--lora-rank 0" in done.stderr


@pytest.mark.parametrize("recipe", ["llm/sft", pytest.param("llm/dpo", marks=pytest.mark.verify)])
def test_an_end_of_turn_that_is_not_the_eos_is_scored_and_stops_answers(recipe: str, launch, tmp_path: Path):
    """As Gemma's: <end_of_turn> ends a turn, the tokenizer's eos a text."""
    net = language.write(tmp_path / "net")
    (net / "chat_template.jinja").write_text(language.TEMPLATE.replace("<|im_end|>", "<|endoftext|>"))
    done = launch("check", recipe, "--model", str(net), *SMALL, "--only", "template,scored")
    assert done.returncode == 0, done.shown
    (told,) = [v["evidence"]["example"] for v in done.verdicts() if v["id"] == "template"]
    assert "[[" in told
    assert told.rstrip().endswith("<|endoftext|>]]")


def test_a_template_that_ends_no_answer_is_refused(launch, tmp_path: Path):
    net = language.write(tmp_path / "net")
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    (net / "chat_template.jinja").write_text(plain + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    done = launch("check", "llm/sft", "--model", str(net), "--only", "schema")
    assert done.returncode == 2, done.shown
    assert "does not end an answer" in done.stderr
    assert "never learn to stop" in done.stderr
    assert "--chat-template" in done.stderr


def test_a_whole_model_is_no_start_for_adapters(net: Path, launch):
    done = launch(
        "check", "llm/sft", "--model", str(net), *SMALL, "--lora-rank", "4", "--init-from", str(net), "--only", "init"
    )
    assert done.returncode == 2, done.shown
    assert "what is trained is added to one (adapters)" in done.stderr
    assert "--model" in done.stderr


@pytest.mark.parametrize(("missing", "words"), [
    ("model.safetensors", ("a file is missing", "model.safetensors")),
    ("config.json", ("a file is missing", "config.json")),
    ("tokenizer.json", ("a file is missing", "tokenizer.json")),
    ("chat_template.jinja", ("no chat template", "instruct")),
])  # fmt: skip
def test_a_model_folder_that_is_not_whole(missing: str, words: tuple[str, ...], tmp_path: Path):
    folder = language.write(tmp_path / "net")
    (folder / missing).unlink()
    with pytest.raises(UserError) as told:
        loading.tokenizer(loading.locate(str(folder)))
    assert not [w for w in words if w not in str(told.value)], told.value


def test_a_run_folder_as_the_model_names_the_folder_inside_it(tmp_path: Path):
    """Someone trains on with `--model runs/llm-sft/RUN`: the message said that a download was cut off, and to fetch it again."""
    run = tmp_path / "run"
    language.write(run / "export" / "merged")
    (run / "export" / "adapter_config.json").write_text('{"base_model_name_or_path": "my/base"}')

    def refused(folder: Path) -> str:
        with pytest.raises(UserError) as told:
            loading.locate(str(folder))
        return str(told.value)

    for folder in (run, run / "export"):
        assert f"next:         --model {run / 'export' / 'merged'}" in refused(folder)
    loading.locate(str(run / "export" / "merged"))
    (run / "export" / "merged").rename(tmp_path / "whole")
    for folder in (run, run / "export"):
        told = refused(folder)
        assert "holds adapters without their base" in told
        assert "next:         --model my/base, or " in told
    (tmp_path / "other").mkdir()
    (tmp_path / "whole").rename(tmp_path / "other" / "export")
    assert f"next:         --model {tmp_path / 'other' / 'export'}" in refused(tmp_path / "other")


def test_a_model_folder_that_is_not_whole_ends_the_command(launch, tmp_path: Path):
    folder = language.write(tmp_path / "net")
    (folder / "model.safetensors").unlink()
    done = launch("check", "llm/sft", "--model", str(folder))
    assert done.returncode == 2, done.shown
    assert "Traceback" not in done.stderr


class Gated(BaseHTTPRequestHandler):
    """The hub's answer to who may not read a gated model."""

    def do_GET(self):
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        """Nothing."""


def test_a_gated_model_without_access_is_refused_before_anything_is_built(launch):
    hub = HTTPServer(("127.0.0.1", 0), Gated)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    env = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": "hf_secretsecretsecret",
        "HF_HUB_OFFLINE": "0",
    }
    done = launch("check", "llm/sft", "--model", "owner/gated-model", **env)
    hub.shutdown()
    assert done.returncode == 2, done.shown
    assert "owner/gated-model is gated" in done.stderr
    assert "HF_TOKEN" in done.stderr
    assert "hf_secret" not in done.stdout + done.stderr
    assert not list(done.cwd.glob("runs/**/args.json"))
