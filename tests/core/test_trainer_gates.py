"""Gates of their own that trainers of transformers and TRL have, and healthy trainers that other gates stopped wrongly."""

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainworthy.guard.measures.trainers import trainer_tokens
from transformers import PreTrainedTokenizerFast

import trainworthy
from tests.core.test_hosted import COMMON, answers, classifier, sft
from tests.helpers import language
from trainworthy import GateFailed


@pytest.fixture(autouse=True)
def quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def checked(make: Callable, gate: str) -> tuple[str, str]:
    """(verdict, what was measured or why it was skipped)."""
    one = trainworthy.check(make, only=gate, raises=False).verdicts[0]
    return one.verdict, one.measured or one.reason


def argmax_twice():
    trainer = classifier()
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    trainer.compute_metrics = lambda p: {"accuracy": float((np.argmax(p.predictions, axis=-1) == p.label_ids).mean())}
    return trainer


def classes_of_logits():
    trainer = classifier()
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    trainer.compute_metrics = lambda p: {"accuracy": float((p.predictions == p.label_ids).mean())}
    return trainer


def test_a_metric_must_prefer_the_right_answers():
    assert checked(argmax_twice, "answers")[0] == "fail"
    for make in (classifier, classes_of_logits):
        assert checked(make, "answers") == (
            "pass",
            "accuracy 1.000 for the labels themselves, 0.000 for other ones, on 16 samples",
        )


def pads_are_ends():
    words = language.tokenizer()

    def collate(rows):
        batch = words.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt")
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == words.pad_token_id, -100)}

    trainer = sft()
    trainer.data_collator = collate
    return trainer


def shifted():
    from trl import SFTTrainer

    class Own(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs["labels"]
            inputs["labels"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return sft(Own)


def test_labels_that_do_not_fit_their_tokens_are_stopped():
    assert checked(sft, "tokens")[0] == "pass"
    verdict, measured = checked(pads_are_ends, "tokens")
    assert verdict == "fail"
    assert "none of these ends is scored" in measured
    verdict, measured = checked(shifted, "tokens")
    assert verdict == "fail"
    assert "the token of the next position" in measured


def test_rows_that_the_library_drops_are_reported():
    verdict, measured = checked(lambda: sft(max_length=9), "tokens")
    assert verdict == "fail"
    assert "rows are left out" in measured


@pytest.mark.parametrize(
    ("longest", "packing", "words"),
    [
        (6, False, "6 of 10 answers are cut off"),
        (4, False, "10 of 10 conversations are cut off"),
        (9, False, ""),
        (6, True, ""),
    ],
)
def test_answers_that_max_length_cuts_off_are_counted(longest: int, packing: bool, words: str):
    """Six answers of six tokens and the end, four of two, behind two tokens of a prompt."""
    rows = [[5, 6, *range(7, 7 + n), 2] for n in [6] * 6 + [2] * 4]
    made = {
        "input_ids": [ids[:longest] for ids in rows],
        "labels": [[-100, -100, *ids[2:longest]] for ids in rows],
    }
    trainer: Any = SimpleNamespace(args=SimpleNamespace(max_length=longest, packing=packing), train_dataset=Dataset.from_dict(made),
                                   processing_class=SimpleNamespace(eos_token_id=2))  # fmt: skip
    found = trainer_tokens.cut_off(trainer)
    assert (words in found[0]) if words else found is None


@pytest.mark.parametrize(
    ("prompt", "answer", "merged"), [("3 4 =", " three", False), ("3 4 =", "three", True), ("3 4 = ", "three", False)]
)
def test_prompts_that_the_tokenizer_joins_to_their_answers(prompt: str, answer: str, merged: bool):
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<eos>", "3", "4", "=", "three"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")
    rows = Dataset.from_list([{"prompt": prompt, "input_ids": [*words(prompt + answer)["input_ids"], 1]}] * 4)
    trainer: Any = SimpleNamespace(args=SimpleNamespace(packing=False), train_dataset=rows, processing_class=words)
    assert bool(trainer_tokens.merged(trainer)) == merged


def encoded_anew():
    trainer = classifier()
    made = [[t + 1 for t in ids] for ids in trainer.eval_dataset["input_ids"]]
    trainer.eval_dataset = trainer.eval_dataset.remove_columns("input_ids").add_column("input_ids", made)
    return trainer


def test_another_vocabulary_of_the_evaluation_is_stopped():
    verdict, measured = checked(encoded_anew, "tokens")
    assert verdict == "fail"
    assert "not the evaluation's (0%)" in measured
    assert checked(classifier, "tokens")[0] == "pass"


def translator(start: int = 2):
    from datasets import Dataset
    from transformers import (
        BartConfig,
        BartForConditionalGeneration,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    words = language.tokenizer()
    rows = [
        {"input_ids": words(f"item {i}")["input_ids"], "labels": words(str(i))["input_ids"] + [2]} for i in range(40)
    ]
    data = Dataset.from_list(rows).train_test_split(16, seed=0)
    config = BartConfig(vocab_size=len(words), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, pad_token_id=2,
                        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None)  # fmt: skip
    model = BartForConditionalGeneration(config)
    model.generation_config.decoder_start_token_id = start

    def exact(p):
        said = words.batch_decode(np.where(p.predictions < 0, 2, p.predictions), skip_special_tokens=True)
        known = words.batch_decode(np.where(p.label_ids < 0, 2, p.label_ids), skip_special_tokens=True)
        return {"exact_match": float(np.mean([s == k for s, k in zip(said, known, strict=True)]))}

    args = Seq2SeqTrainingArguments(output_dir="bart", predict_with_generate=True, generation_max_length=8, **COMMON)
    return Seq2SeqTrainer(model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"], processing_class=words,
                          data_collator=DataCollatorForSeq2Seq(words, model=model), compute_metrics=exact)  # fmt: skip


def smoothed():
    from transformers.trainer_pt_utils import LabelSmoother

    trainer = translator()
    trainer.args.label_smoothing_factor = 0.1
    trainer.label_smoother = LabelSmoother(epsilon=0.1)
    return trainer


def test_the_floor_of_a_smoothed_loss_of_tokens_is_over_the_vocabulary():
    assert checked(smoothed, "overfit")[0] == "pass"


def argmax_of_tokens():
    trainer = translator()
    own = trainer.compute_metrics
    trainer.compute_metrics = lambda p: own(
        type(p)(predictions=np.argmax(p.predictions, axis=-1)[:, None], label_ids=p.label_ids)
    )
    return trainer


def test_generation_begins_as_training_does_and_its_metric_reads_tokens():
    assert checked(translator, "tokens")[0] == "pass"
    assert checked(lambda: translator(start=1), "tokens") == (
        "fail", "generation begins with token 1, the decoder's inputs in training with token 2")  # fmt: skip
    assert checked(translator, "answers")[0] == "pass"
    assert checked(argmax_of_tokens, "answers")[0] == "fail"


def adapted(thaw: bool = False, **settings):
    from peft import LoraConfig, get_peft_model
    from trl import DPOConfig, DPOTrainer

    model = get_peft_model(language.model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for p in model.parameters():
        p.requires_grad_(p.requires_grad or thaw)
    data = answers("preferences")
    args = DPOConfig(output_dir="dpo", gradient_checkpointing=False, **COMMON, **settings)
    return DPOTrainer(model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"],
                      processing_class=language.tokenizer())  # fmt: skip


def test_a_reference_without_its_adapter_must_not_train():
    assert checked(adapted, "reference")[0] == "pass"
    assert checked(lambda: adapted(thaw=True), "reference")[0] == "fail"


def test_reference_scores_that_were_computed_first_are_no_rows_of_tokens():
    assert checked(lambda: adapted(precompute_ref_log_probs=True), "tokens")[0] == "pass"


def test_lora_has_no_weights_without_decay_and_passes_wiring():
    assert checked(adapted, "wiring")[0] == "pass"


def test_the_file_of_the_function_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begin = "from tests.core.test_hosted import classifier\n\n\ndef make():\n    trainer = classifier()\n"
    fork = begin + "    trainer.model.train{}\n    return trainer\n"
    monkeypatch.syspath_prepend(tmp_path)
    for name, call, verdict in (("called", "()", "pass"), ("named", "", "fail")):
        (tmp_path / f"{name}.py").write_text(fork.format(call))
        found = checked(import_module(name).make, "names")
        assert found[0] == verdict
    assert found[1] == "line 6 of named.py is `trainer.model.train`, without parentheses"


def frozen_head():
    trainer = classifier()
    trainer.model.classifier.requires_grad_(False)
    return trainer


def test_a_new_head_must_train():
    assert checked(frozen_head, "head") == ("fail", "frozen at its random initial values: classifier")
    assert checked(classifier, "head")[0] == "skip"


def pictures(turned: Callable | None = None):
    """`with_transform` that draws at random, OneCycleLR that ends with the run."""
    from datasets import Dataset
    from transformers import DefaultDataCollator, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    labels = [i % 2 for i in range(48)]
    values = (torch.rand(48, 1, 8, 8) * 0.2 + torch.tensor(labels).view(-1, 1, 1, 1)).tolist()

    def augment(rows):
        return {"pixel_values": [torch.tensor(v) + 0.05 * torch.randn(1, 8, 8) for v in rows["x"]], "labels": rows["y"]}

    def plain(rows):
        return {"pixel_values": [torch.tensor(v) for v in rows["x"]], "labels": rows["y"]}

    data = Dataset.from_dict({"x": values, "y": labels}).train_test_split(16, seed=0)
    config = ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                       intermediate_size=16, num_labels=2)  # fmt: skip
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=6)
    args = TrainingArguments(output_dir="vit", remove_unused_columns=False, **COMMON)
    return Trainer(model=model, args=args, data_collator=DefaultDataCollator(), train_dataset=data["train"].with_transform(augment),
                   eval_dataset=data["test"].with_transform(plain), optimizers=(optimizer, scheduler))  # fmt: skip


@pytest.mark.parametrize("gate", ["schedule", "loader", "evaluation"])
def test_pictures_that_are_augmented_as_they_are_read_and_a_schedule_that_ends(gate: str):
    assert checked(pictures, gate)[0] == "pass"


def rare(own: type | None = None):
    """F1 of a class that one sentence in sixteen has."""
    trainer = classifier()
    trainer.args.metric_for_best_model = "f1"
    trainer.compute_metrics = lambda p: {"f1": _f1(p.predictions.argmax(-1), p.label_ids)}
    labels = [int(i % 16 == 0) for i in range(len(trainer.train_dataset))]
    trainer.train_dataset = trainer.train_dataset.remove_columns("label").add_column("label", labels)
    return trainer


def _f1(said: np.ndarray, known: np.ndarray) -> float:
    return float(2 * (said & known).sum() / max(said.sum() + known.sum(), 1))


def test_f1_is_not_asked_of_eight_samples_without_its_class():
    assert checked(rare, "overfit")[0] == "pass"


def test_bugs_are_named_in_an_error():
    with pytest.raises(GateFailed, match="choose another pad token"):
        trainworthy.check(pads_are_ends, only="tokens")


WEIGHTS = torch.tensor([0.2, 3.0])


def by_class(mixed: bool = False):
    """A weighted mean through `compute_loss_func`; `mixed`: of scores that are normalised over the batch."""

    def weighted(outputs, labels, num_items_in_batch=None):
        scores = outputs.logits - outputs.logits.mean(0) if mixed else outputs.logits
        return torch.nn.functional.cross_entropy(scores, labels, weight=WEIGHTS)

    trainer = classifier()
    trainer.compute_loss_func = weighted
    return trainer


def test_class_weights_are_no_dependence_of_samples():
    """The loss is the mean over the weights of its samples' classes: samples of another weight count more, and do not mix."""
    assert checked(by_class, "dependency")[0] == "pass"
    assert checked(lambda: by_class(mixed=True), "dependency")[0] == "fail"
    assert checked(by_class, "wiring")[0] == "pass"


def test_class_weights_are_read_from_the_loss():
    from torch.nn import functional as F
    from trainworthy.guard.adapters.class_weights import class_weights, total_weight

    scores, labels = torch.randn(6, 2), torch.tensor([0, 1, 1, -100, 0, 1])
    found = class_weights(lambda: F.cross_entropy(scores, labels, weight=WEIGHTS), labels)
    assert torch.equal(found, WEIGHTS)
    assert total_weight(found, labels) == 2 * 0.2 + 3 * 3.0
    for other in (
        lambda: F.cross_entropy(scores, labels),
        lambda: F.cross_entropy(scores, labels, weight=WEIGHTS, reduction="sum"),
        lambda: F.cross_entropy(scores, labels, weight=WEIGHTS) + scores.pow(2).mean(),
        lambda: F.cross_entropy(scores, (labels + 1).clamp(max=1), weight=WEIGHTS),
    ):
        assert class_weights(other, labels) is None
    assert F.cross_entropy is torch.nn.functional.cross_entropy
