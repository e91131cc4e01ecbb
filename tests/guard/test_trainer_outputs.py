"""What a trainer of transformers or TRL gets from its model, and the prompts of `generate`."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.utils.data import DataLoader
from trainworthy.guard.checks import samples
from trainworthy.guard.measures.models.generations import Generations
from trainworthy.guard.measures.rates import risen
from trainworthy.guard.measures.trainers import trainer_columns, trainer_outputs, trainer_tokens


def arguments(folder: Path, **more: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True, **more)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 3)

    def forward(self, numbers, labels=None):
        logits = self.head(numbers)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize(("outputs", "fault"), [(lambda out: out["logits"], True), (lambda out: out, False),
                                                (lambda out: (out["loss"], out["logits"]), False)])  # fmt: skip
def test_outputs_of_every_row(outputs, fault: bool, tmp_path: Path):
    class Own(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            out = model(**inputs)
            return (out["loss"], outputs(out)) if return_outputs else out["loss"]

    rows = Dataset.from_dict({"numbers": [[1.0, 2.0]] * 9, "labels": [0, 1, 2] * 3})
    found = trainer_outputs.lost_rows(Own(Net(), arguments(tmp_path), train_dataset=rows, eval_dataset=rows))
    assert bool(found) == fault
    assert not found or found[0].startswith("prediction_step() gives the outputs of 7 rows for a batch of 8")
    own = transformers.Trainer(Net(), arguments(tmp_path), train_dataset=rows)
    assert trainer_outputs.lost_rows(own) is None  # the library's own compute_loss


@pytest.mark.parametrize(
    ("limits", "fault"),
    [
        ({"max_new_tokens": 5}, True),
        ({"max_new_tokens": 6}, False),  # the end token may be left out
        ({"max_length": 6}, True),
        ({"max_length": 7}, False),
        ({"max_length": 7, "max_new_tokens": 3}, True),
    ],
)
def test_answers_as_long_as_their_labels(limits: dict[str, int], fault: bool):
    config = transformers.GenerationConfig(**limits)
    model = SimpleNamespace(config=SimpleNamespace(pad_token_id=0), generation_config=config)
    rows = Dataset.from_dict({"labels": [[5, 6, 7, 8, 9, 4, 2, 0, -100]] * 9})
    trainer = SimpleNamespace(
        model=model, accelerator=SimpleNamespace(unwrap_model=lambda m: m), eval_dataset=rows, train_dataset=rows,
        args=SimpleNamespace(predict_with_generate=True, generation_config=None, generation_max_length=None), data_collator=None,
        _remove_unused_columns=lambda rows, _: rows,
    )  # fmt: skip
    found = trainer_outputs.cut_short(trainer)
    assert bool(found) == fault
    assert not found or "9 of 9 labels have more tokens (up to 6 without the last one)" in found[0]
    trainer.args.predict_with_generate = False
    assert trainer_outputs.cut_short(trainer) is None


def test_a_reference_with_tensors_of_its_own():
    model, copy = nn.Linear(2, 2), nn.Linear(2, 2)
    trainer = SimpleNamespace(model=model, ref_model=copy)
    copy.load_state_dict(model.state_dict())
    assert trainer_outputs.shared_reference(trainer) is None
    copy.load_state_dict(model.state_dict(), assign=True)
    found = trainer_outputs.shared_reference(trainer)
    assert found
    assert "2 tensors of the reference model are those that train" in found[0]
    model.requires_grad_(False)  # only an adapter trains
    assert trainer_outputs.shared_reference(trainer) is None


@pytest.mark.parametrize(
    ("full", "short", "fault"),
    [(0, 0, False), (4, 0, True), (4, 4, False)],  # of 10 rows each; windows of one text have answers in others
)
def test_answers_behind_the_cut(full: int, short: int, fault: bool):
    rows = [((i >= full) * 3, 8) for i in range(10)] * 3 + [((i >= short) * 3, 6) for i in range(10)] * 3
    data = Dataset.from_list([
        {"input_ids": [1] * 8, "attention_mask": [1] * n + [0] * (8 - n), "start_positions": at} for at, n in rows
    ])  # fmt: skip
    found = trainer_columns.spans_cut_off(SimpleNamespace(train_dataset=data))
    assert bool(found) == fault


@pytest.mark.parametrize(("common", "share"), [(0, 0.0), (20, 0.0), (60, 1.0)])
def test_rows_of_tokens_in_both_splits(common: int, share: float):
    rows = [{"input_ids": [i, i % 7, *range(10)], "labels": i % 2} for i in range(300)]
    train, val = (DataLoader(Dataset.from_list(r)) for r in (rows[:240], rows[240 - common : 300 - common]))  # type: ignore[arg-type]
    mine = samples.content(train, 1000, time.monotonic() + 60)
    assert len(mine) == 240
    assert samples.shared(train, val, mine, time.monotonic() + 60) == share


@pytest.mark.parametrize(("kept", "fault"), [(8, False), (4, True), (0, False)])
def test_rows_with_the_same_tokens_and_other_labels(kept: int, fault: bool):
    """Texts of four shared tokens and a number of their own behind them; `kept` 0: short texts with several answers."""
    rows = [([1 + i % 9, 2, 3, 4, 10 + i, 5, 6, 7][: kept or 1 + i % 4], [10 + i, 2]) for i in range(200)]
    data = Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in rows])
    found = trainer_columns.ambiguous(SimpleNamespace(train_dataset=data))
    assert bool(found) == fault
    assert not found or "cut off after 4 tokens" in found[1]
    language = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids, _ in rows])
    assert trainer_columns.ambiguous(SimpleNamespace(train_dataset=language)) is None


@pytest.mark.parametrize(("mask", "decoder_alone", "fault"), [
    ([[1, 1, 0], [1, 1, 1]], True, True), ([[0, 1, 1], [1, 1, 1]], True, False), ([[1, 1, 0], [1, 1, 1]], False, False)])  # fmt: skip
def test_prompts_of_generate(mask: list, decoder_alone: bool, fault: bool):
    model, seen = nn.Linear(1, 1), Generations()
    model.config = SimpleNamespace(is_encoder_decoder=not decoder_alone)  # type: ignore[assignment]
    seen.note(model, torch.ones(2, 3).long(), attention_mask=torch.tensor(mask))
    assert bool(seen.fault()) == fault


START, END = "{{ '<|a|>", "{{ ' ' + message['content'] + '<|end|>' }}"
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% else %}"
    + START + "' }}{% generation %}" + END + "{% endgeneration %}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}" + START + "' }}{% endif %}"
)  # fmt: skip


def talks(template: str) -> SimpleNamespace:
    words = ["<|a|>", "<|end|>", "▁", "▁yes", "yes", "▁is", "it", "is", "▁so", "<", "|", "end", "fin", ">", "<pad>"]
    plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Metaspace(prepend_scheme="never"), pre_tokenizers.Punctuation()])  # fmt: skip
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|end|>", pad_token="<pad>", additional_special_tokens=["<|a|>"]
    )
    tokenizer.chat_template = template
    talk = [{"role": "user", "content": "it is so"}, {"role": "assistant", "content": "yes"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    at = ids.index(0) + 1
    row = {"messages": talk, "input_ids": ids, "labels": [-100] * at + ids[at:]}
    return SimpleNamespace(
        train_dataset=Dataset.from_list([row] * 20), processing_class=tokenizer, args=SimpleNamespace(max_length=64),
        accelerator=SimpleNamespace(unwrap_model=lambda m: m), model=None,
    )  # fmt: skip


def test_a_generation_prompt_that_ends_where_a_token_ends():
    assert trainer_tokens.border(talks(TEMPLATE)) is None
    bug = TEMPLATE.replace("add_generation_prompt %}{{ '<|a|>", "add_generation_prompt %}{{ '<|a|> ")
    found = trainer_tokens.border(talks(bug))
    assert found
    assert found[0].startswith("in 20 of 20 conversations")


def test_an_answer_that_ends_with_an_end_token():
    assert trainer_tokens.endless(talks(TEMPLATE)) is None
    found = trainer_tokens.endless(talks(TEMPLATE.replace("'<|end|>'", "'<|fin|>'")))
    assert found
    assert "never learns to stop" in found[1]


def test_a_factor_that_rises_again():
    def fault(steps: int, make: Any, **more: Any) -> bool:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
        scheduler, rates = make(optimizer, num_warmup_steps=10, num_training_steps=100, **more), []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step(), scheduler.step()
        return risen(SimpleNamespace(it=scheduler), rates) is not None

    cosine, restarts = (
        transformers.get_cosine_schedule_with_warmup,
        transformers.get_cosine_with_hard_restarts_schedule_with_warmup,
    )
    assert not fault(100, cosine)
    assert not fault(103, cosine)
    assert fault(200, cosine)
    assert not fault(100, restarts, num_cycles=3)
