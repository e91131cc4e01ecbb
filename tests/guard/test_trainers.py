"""Faults of a trainer of transformers or TRL that are read from the trainer itself: columns, pairs, rewards, tokens, metric."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from torch import nn
from trainworthy.core.adapters.dropped_rows import DroppedRows
from trainworthy.guard.checks import trainers
from trainworthy.guard.hooks import initial_weights, patches
from trainworthy.guard.measures.trainers import trainer_columns, trainer_counts, trainer_scores, trainer_tokens


class Net(nn.Module):
    def forward(self, numbers, sex=None, labels=None):
        return {"logits": numbers.sum(1)}


@pytest.mark.parametrize(("column", "fault"), [("gender", True), ("sex", False), ("row_id", False)])
def test_a_column_that_forward_does_not_name_is_lost(column: str, fault: bool, tmp_path: Path):
    rows = Dataset.from_dict({"numbers": [[1.0, 2.0]] * 40, column: [0, 1] * 20, "labels": [0.5] * 40})
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = transformers.Trainer(Net(), args, train_dataset=rows)
    found = trainer_columns.dropped(trainer)
    assert (found is not None) == fault
    if found:
        assert "'gender' is dropped, and forward() gets no 'sex'" in found[0]


def bert(**settings: Any):
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertForSequenceClassification(config)
    for name, value in settings.items():
        setattr(model, name, value)
    return model


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2))


@pytest.mark.parametrize(("make", "parts", "fault"), [(bert, 4, True), (bert, 1, False),
                                                      (lambda: bert(accepts_loss_kwargs=False), 4, False), (gpt2, 4, False)])  # fmt: skip
def test_micro_batches_that_nothing_divides(make, parts: int, fault: bool, tmp_path: Path):
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 8, "labels": [[1, 2, 3]] * 8 if make is gpt2 else [0, 1] * 4})
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, gradient_accumulation_steps=parts
    )
    found = trainer_counts.undivided(transformers.Trainer(make(), args, train_dataset=rows))
    assert (found is not None) == fault
    assert not found or "accepts_loss_kwargs = False" in found[1]


@pytest.mark.parametrize(("kept", "fault"), [(80, True), (95, False)])
def test_rows_that_trl_leaves_out(kept: int, fault: bool):
    filtered, rows = DroppedRows(), Dataset.from_dict({"n": list(range(100))})
    patches.after(Dataset, "filter", filtered.note)
    try:
        rows.filter(lambda row: row["n"] < 10, desc="Only short ones")
        rows.filter(lambda row: row["n"] < kept, desc="Dropping fully masked examples from train dataset")
    finally:
        patches.remove()
    trainer = SimpleNamespace(dropped_rows=filtered.rows, args=SimpleNamespace(max_length=64))
    found = trainer_counts.dropped(trainer)
    assert (found is not None) == fault
    assert not found or "20 of 100 rows are left out (dropping fully masked examples" in found[0]


@pytest.mark.parametrize(("stop", "fault"), [((9, 8), True), ((9, 9), False), ((30, 31), False)])
def test_one_sign_must_not_tell_chosen_answers_apart(stop: tuple[int, int], fault: bool):
    """A full stop (9) behind the chosen answer alone; a word (30) is an answer."""
    words = {9: ".", 8: "so", 30: "yes", 31: "no"}
    tokenizer = SimpleNamespace(eos_token_id=1, all_special_ids=[0, 1], decode=lambda ids: words.get(ids[0], "word"))
    both = [[[2, 10 + i % 7, end, 1] for i in range(80)] for end in stop]
    rows = Dataset.from_dict({"chosen_ids": both[0], "rejected_ids": both[1]})
    trainer = SimpleNamespace(train_dataset=rows, processing_class=tokenizer)
    assert bool(trainer_columns.told_apart(trainer)) == fault


def test_rewards_belong_to_their_rows():
    rows = Dataset.from_dict({"prompt": [f"{i}?" for i in range(40)], "solution": [str(i % 5) for i in range(40)]})
    solutions = rows["solution"]

    def by_name(completions, solution, **_):
        return [float(a == b) for a, b in zip(completions, solution, strict=True)]

    def by_place(completions, **_):
        return [float(a == b) for a, b in zip(completions, solutions, strict=False)]

    def within_group(completions, solution, **_):
        own = by_name(completions, solution)
        means = [np.mean(own[i - i % 4 : i - i % 4 + 4]) for i in range(len(own))]
        return [a - m for a, m in zip(own, means, strict=True)]

    for function, fault in ((by_name, False), (by_place, True), (within_group, False)):
        trainer = SimpleNamespace(train_dataset=rows, num_generations=4, reward_funcs=[function])
        assert bool(trainer_columns.misplaced(trainer)) == fault, function


@pytest.mark.parametrize(
    ("name", "greater", "fault"),
    [
        ("f1_macro", False, True),
        ("eval_f1", True, False),
        ("wer", True, True),
        ("eval_loss", False, False),
        ("score", False, False),
    ],
)
def test_the_best_checkpoint_is_chosen_the_right_way(name: str, greater: bool, fault: bool):
    trainer = SimpleNamespace(args=SimpleNamespace(metric_for_best_model=name, greater_is_better=greater))
    assert bool(trainer_scores.selection(trainer)) == fault


class GPTForCausalLM(nn.Module):
    pass


def hosted(model: nn.Module, compute: Any, before: Any = None) -> Any:
    own = SimpleNamespace(unwrap_model=lambda m: m)
    args = SimpleNamespace(predict_with_generate=False, metric_for_best_model=None, greater_is_better=None)
    return SimpleNamespace(
        model=model, accelerator=own, args=args, compute_metrics=compute, preprocess_logits_for_metrics=before
    )


def test_a_metric_of_the_next_token_is_shifted_once():
    labels = np.random.default_rng(0).integers(0, 50, (16, 12))
    logits = np.zeros((16, 12, 50), dtype=np.float32)

    def share(p: Any, shift: bool) -> dict:
        made, wanted = (p.predictions[:, :-1], p.label_ids[:, 1:]) if shift else p
        return {"accuracy": float((made == wanted).mean())}

    def rolled(out, _):
        return torch.roll(out.argmax(-1), 1, 1)

    for compute, before, fault in (
        (lambda p: share(p, True), lambda out, _: out.argmax(-1), False),
        (lambda p: share(p, False), lambda out, _: out.argmax(-1), True),
        (lambda p: share(p, False), rolled, False),
    ):
        found = trainer_scores.compared(hosted(GPTForCausalLM(), compute, before), logits, labels)
        assert found is not None
        assert bool(found[1]) == fault, found


@pytest.mark.parametrize("masking", [False, True])
def test_a_causal_model_gets_no_masked_tokens(masking: bool):
    ids = torch.randint(5, 50, (8, 40))
    places = torch.rand(8, 40) < 0.2
    batch = {"input_ids": ids.masked_fill(places & masking, 4), "labels": ids.masked_fill(~places, -100)}
    trainer = SimpleNamespace(processing_class=SimpleNamespace(mask_token_id=4))
    assert bool(trainer_tokens.masked(trainer, GPTForCausalLM(), batch)) == masking
    assert trainer_tokens.masked(trainer, nn.Linear(1, 1), batch) is None


def test_a_conversation_ends_with_the_assistant():
    for roles, fault in (
        (("user", "assistant"), False),
        (("assistant", "user"), True),
        (("assistant", "assistant"), False),
    ):
        rows = Dataset.from_list([{"messages": [{"role": r, "content": "x"} for r in roles]}] * 8)
        assert bool(trainer_tokens.turned(SimpleNamespace(train_dataset=rows))) == fault


def test_several_labels_need_a_sigmoid():
    labels = (np.random.default_rng(0).random((64, 5)) < 0.4).astype(np.float32)
    logits = np.random.default_rng(1).normal(size=(64, 5)).astype(np.float32)

    def exact(p: Any, softmax: bool) -> dict:
        made = (
            np.exp(p.predictions) / np.exp(p.predictions).sum(1, keepdims=True)
            if softmax
            else 1 / (1 + np.exp(-p.predictions))
        )
        return {"accuracy": float(((made > 0.5) == p.label_ids).all(1).mean())}

    for softmax in (False, True):
        found = trainer_scores.compared(hosted(nn.Linear(1, 1), lambda p, s=softmax: exact(p, s)), logits, labels)
        assert found is not None
        assert bool(found[1]) == softmax, found


def test_numbers_are_scaled_back_alike():
    wanted = np.random.default_rng(0).normal(size=64).astype(np.float32)
    for factor, fault in ((1.0, False), (5.0, True)):
        made = lambda p, f=factor: {"mae": float(np.abs(f * p.predictions - p.label_ids).mean())}  # noqa: E731
        found = trainer_scores.compared(hosted(nn.Linear(1, 1), made), np.zeros(64, dtype=np.float32), wanted)
        assert found is not None
        assert bool(found[1]) == fault, found


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.score = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 1, bias=False)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_frozen_head_was_loaded(loaded: bool):
    drawn, model = initial_weights.Drawn(), Scorer()
    drawn.note(model.score.weight)
    if loaded:
        model.score.weight.data += 1
    model.score.requires_grad_(False)
    found = initial_weights.frozen_head(drawn, [model], {id(model.body[0].weight)})
    assert bool(found) == (not loaded)


class Talker(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.out.weight = self.table.weight

    def get_output_embeddings(self):
        return self.out


@pytest.mark.parametrize(("frozen", "trained"), [(True, True), (True, False), (False, True)])
def test_scores_of_tokens_are_frozen_with_the_embeddings(frozen: bool, trained: bool):
    drawn, model = initial_weights.Drawn(), Talker()
    drawn.note(model.out.weight)
    model.table.requires_grad_(not frozen)
    found = initial_weights.frozen_head(drawn, [model], {id(model.body.weight)} if trained else set())
    assert bool(found) == (frozen and trained)


def test_pairs_are_not_in_the_data_both_ways():
    chosen, rejected = [[2, 3 + i % 3] for i in range(90)], [[2, 3 + (i + 1 + i // 45) % 3] for i in range(90)]
    asked = [[7 + i] for i in range(90)]
    for more, fault in (({}, True), ({"prompt_ids": asked}, False)):
        rows = Dataset.from_dict({"chosen_ids": chosen, "rejected_ids": rejected, **more})
        assert bool(trainer_columns.contradicted(SimpleNamespace(train_dataset=rows))) == fault


def test_no_trainer_is_no_fault():
    assert trainers.faults(SimpleNamespace(groups={}, notes=[], trainer=None)) == {}  # type: ignore[arg-type]
