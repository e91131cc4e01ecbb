"""A teacher of one's own for distill/logits: other classes, and answers that the labels contradict."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from trainworthy.recipes.distill.gates.logits import evaluate_own_divergence, least_loss, other_share
from transformers import LlamaConfig

from tests.helpers.commands import assert_refused


def test_the_least_loss_is_what_no_student_goes_below():
    """A label that the teacher contradicts leaves more than 0; without labels the teacher can be copied exactly."""
    taught = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    label = taught.argmin(1)
    known = torch.arange(8) < 4
    floor = least_loss(taught, label, known, 0.9, 2.0)
    free = (2 * taught).requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.05)
    for _ in range(2000):
        optimizer.zero_grad()
        kl = (taught.exp() * (taught - (free / 2).log_softmax(1))).sum(1).mean()
        loss = 0.1 * torch.nn.functional.cross_entropy(free[known], label[known]) + 0.9 * 4 * kl
        loss.backward()
        optimizer.step()
    assert floor == pytest.approx(loss.item(), abs=1e-3)
    assert floor > 0.1
    assert least_loss(taught, label, torch.zeros(8, dtype=torch.bool), 0.9, 2.0) == pytest.approx(0, abs=1e-6)


def test_own_terms_are_judged_by_where_they_are_least():
    """A fork's MSE and cosine in place of the divergence: right with the teacher's scores, wrong with those of other samples, and not
    compared if they read more than scores."""
    theirs = torch.randn(16, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def stage(goal, *, features: bool = False):
        def loss(model, batch):
            logits = model.features(batch["image"]) if features else model(batch["image"])
            return {
                "mse": (logits - goal).square().sum(),
                "cosine": (1 - F.cosine_similarity(logits, goal.float())).sum(),
                "ce": logits.sum(),
            }

        return SimpleNamespace(loss=loss)

    names, batch = ["mse", "cosine"], {"image": torch.zeros(16, 1)}
    fault, measured = evaluate_own_divergence(stage(theirs), batch, names, theirs)
    assert not fault
    assert measured.startswith("mse, cosine, minimal at the teacher's scores")
    fault, _ = evaluate_own_divergence(stage(theirs.roll(1, 0)), batch, names, theirs)
    assert "scores near the teacher's give no more than the teacher's own" in fault
    fault, measured = evaluate_own_divergence(stage(theirs, features=True), batch, names, theirs)
    assert not fault
    assert "not compared" in measured


def test_a_teacher_of_other_classes_is_refused(tmp_path, launch):
    """The default teacher knows ten digits, whatever the number of own classes."""
    for i, name in enumerate("abc"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for j in range(10):
            Image.new("L", (32, 32), 20 * i + 5 * j).save(tmp_path / "set" / name / f"{j}.png")
    done = launch("check", "distill/logits", "--data.path", "set", "--only", "schema")
    assert done.returncode == 2, done.shown
    assert "--teacher digits: a classifier of other classes" in done.stderr
    assert "in this order: a, b, c" in done.stderr
    assert "--teacher RUN/export" in done.stderr


@pytest.mark.parametrize(
    ("declared", "known", "wrong"),
    [(0.05, 0.05, False), (0.05, 1.0, True), (0.05, 0.0, True), (0.5, 0.5, False), (1.0, 1.0, False), (1.0, 0.05, True),
     (0.2, 0.8, True), (0.2, 0.25, False)],
)  # fmt: skip
def test_another_share_of_known_labels_is_found(declared: float, known: float, wrong: bool):
    assert bool(other_share(known, 512, declared, rounded=10 / 4000)) == wrong
    # Four pictures of each class: one known label is a quarter of them
    assert not other_share(0.25, 40, 0.05, rounded=10 / 40)


KL = (
    'kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n'
    '            terms["kl"] = weight * temperature**2 * kl\n'
)


@pytest.mark.parametrize(
    ("term", "form"),
    [
        ('terms["kl"] = -weight * temperature**2 * (taught(batch["image"]).exp() * soft(logits)).sum()\n',
         "cross-entropy with the teacher"),
        ('terms["scores"] = weight * (logits - answers(batch["image"])).square().sum()\n', "squared difference of the scores, a sum"),
    ],
)  # fmt: skip
def test_other_published_losses_are_let_through(term: str, form: str, launch, fork):
    fork((KL, term), recipe="distill/logits")
    done = launch("check", "mine.py", "--stage", "distilled", "--only", "divergence", code=0)
    assert form in done.verdicts()[0]["measured"], done.shown


def test_a_language_model_or_texts_get_the_recipes_that_read_them(tmp_path: Path, launch):
    """As the data, the teacher or the student of a recipe of pictures; and pictures or a folder in a recipe of texts."""
    model, pictures = tmp_path / "model", tmp_path / "pictures" / "a"
    LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=32).save_pretrained(model)
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    pictures.mkdir(parents=True)
    Image.new("L", (32, 32)).save(pictures / "1.png")
    way = "docs/recipes/distill-logits.md#language-models"
    for settings, words in (
        (("distill/logits", "--data.path", "chats.jsonl"), ("texts in", "llm/sft reads conversations")),
        (("distill/logits", "--data.path", "model"), ("files of a language model in", way)),
        (("distill/logits", "--teacher", "model"), ("no classifier there", way)),
        (("distill/logits", "--model", "model"), ("does not classify pictures", way)),
        (("vision/segment", "--data.path", "chats.jsonl"), ("llm/sft reads conversations",)),
        (("vision/detect", "--data.path", "chats.jsonl"), ("llm/sft reads conversations",)),
        (("llm/sft", "--data.path", "pictures"), ("a folder, not a file", "vision/classify reads folders of classes")),
        (("llm/sft", "--data.path", "."), ("a folder, not a file", "--data.path chats.jsonl")),
        (("llm/pretrain", "--data.path", "pictures"), ("vision/classify reads folders of classes",)),
    ):
        done = assert_refused(launch("check", *settings, "--only", "schema"), *words)
        assert "ran into the following error" not in done.stderr.lower(), "torch's own traceback is above the message"
