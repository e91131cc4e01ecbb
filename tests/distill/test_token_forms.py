"""`divergence` of distill/compress (two Whispers of two layers and 60 words) and distill/logits on losses of other forms."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import soundfile
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.recipes.distill import logits as logits_recipe
from trainworthy.recipes.distill.compress import Config
from trainworthy.recipes.distill.gates import logits as pictures
from trainworthy.recipes.distill.gates import token_forms, whisper
from trainworthy.recipes.distill.gates.whisper import read
from trainworthy.recipes.shared import whisper as teachers
from trainworthy.recipes.shared.whisper import Whisper
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.helpers import hearing

TOKENIZER = SimpleNamespace(convert_tokens_to_ids=lambda tags: [3] * len(tags))
START, T = 2, Config().temperature


def small(seed: int) -> Whisper:
    torch.manual_seed(seed)
    config = WhisperConfig(vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                           decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=50, num_mel_bins=8,
                           max_target_positions=20, init_std=0.8, decoder_start_token_id=1, eos_token_id=2, pad_token_id=2, bos_token_id=2,
                           suppress_tokens=None, begin_suppress_tokens=None)  # fmt: skip
    return Whisper(WhisperForConditionalGeneration(config).eval(), TOKENIZER, 1)


def compared(kl=None, ce=None, *, name="kl", shift=0, start=START) -> token_forms.Compared:
    student, teacher, cfg = small(1), small(2), Config()
    batch = {"mel": torch.randn(3, 8, 100), "ids": torch.randint(4, 60, (3, 9)), "words": torch.tensor([9, 7, 5])}
    kl = kl or (lambda ours, theirs: T**2 * F.kl_div(*soft(ours, theirs), reduction="sum", log_target=True))
    ce = ce or (lambda ours, ids: F.cross_entropy(ours, ids, reduction="sum"))

    def loss(model, batch):
        ids, place = batch["ids"], torch.arange(1, batch["ids"].shape[1])
        scored = (place >= start) & (place < batch["words"][:, None])
        theirs, ours = (w.logits(w.encode(batch["mel"]), ids[:, :-1])[scored] for w in (teacher, student))
        return {"ce": cfg.ce * ce(ours, ids[:, 1:].roll(-shift, 1)[scored]), name: cfg.kl * kl(ours, theirs.detach())}

    stage = SimpleNamespace(model=student.model, frozen_modules={"teacher": teacher.model}, loss=loss,
                            counts=lambda batch: {"*": (batch["words"] - START).sum()})  # fmt: skip
    run = SimpleNamespace(autocast=contextlib.nullcontext, precision="fp32")
    each = [read(run, stage, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(3)]
    with torch.no_grad():
        due = token_forms.stated(stage, batch, teacher, cfg)
    return token_forms.compare(run, stage, batch, due, read(run, stage, batch), each, start=START, near=1e-3)


def soft(ours, theirs):
    return (ours / T).log_softmax(-1), (theirs / T).log_softmax(-1)


def reverse(ours, theirs):
    q, p = soft(ours, theirs)
    return T**2 * F.kl_div(p, q, reduction="sum", log_target=True)


def variation(ours, theirs):
    q, p = soft(ours, theirs)
    return (q.exp() - p.exp()).abs().sum() / 2


def best_of_teacher(ours, theirs):
    best = theirs.topk(5).indices
    q, p = (x.gather(-1, best).log_softmax(-1) for x in soft(ours, theirs))
    return F.kl_div(q, p, reduction="sum", log_target=True)


def focal(ours, ids):
    ce = F.cross_entropy(ours, ids, reduction="none")
    return (ce * (1 - (-ce).exp()) ** 2).sum()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kl": variation},
        {"kl": best_of_teacher},
        {"kl": lambda ours, theirs: (ours - theirs).square().mean(-1).sum()},
        {"kl": reverse, "name": "reverse_kl"},
        {"ce": lambda ours, ids: F.cross_entropy(ours, ids, label_smoothing=0.1, reduction="sum")},
        {"ce": focal},
    ],
)
def test_losses_of_other_forms_are_let_through(more):
    found = compared(**more)
    assert (found.wrong, len(found.remarks)) == ([], 2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kl": reverse}, "kl is"),
        ({"kl": lambda ours, theirs: variation(ours, theirs) + 0.2 * ours.sum()}, "give"),
        ({"kl": lambda ours, theirs: F.kl_div(*soft(ours, 1.5 * theirs), reduction="sum", log_target=True)}, "times the teacher's"),
        ({"kl": lambda ours, theirs: 4 * variation(ours, theirs), "start": 1}, "the prompt or pads"),
        ({"kl": lambda ours, theirs: F.kl_div(*soft(ours, theirs), reduction="mean", log_target=True)}, "one by one"),
        ({"ce": focal, "shift": 1}, "pushed away"),
        ({"ce": lambda ours, ids: -focal(ours, ids)}, "pushed away"),
    ],
)  # fmt: skip
def test_mistakes_in_losses_of_other_forms_are_stopped(more, words):
    assert words in " ".join(compared(**more).wrong)


def of_pictures(kl=None, ce=None, name="kl") -> tuple[list[str], list[str]]:
    """What is wrong with a loss of distill/logits, and what was measured: 12 samples of 10 classes, every second one with a known label."""
    cfg, draws = logits_recipe.Config(), torch.Generator().manual_seed(0)
    ours, theirs = (2 * torch.randn(12, 10, generator=draws, dtype=torch.double) for _ in range(2))
    batch = {"image": torch.zeros(12, 1), "label": torch.arange(12) % 10, "known": torch.arange(12) % 2 == 0}
    kl = kl or (lambda ours, theirs: T**2 * F.kl_div(*soft(ours, theirs), reduction="sum", log_target=True))
    ce = ce or (lambda ours, label, known: F.cross_entropy(ours[known], label[known], reduction="sum"))

    def loss(model, batch, rows=slice(None)):
        scores = model(batch["image"])[rows].double()
        terms = (
            (1 - cfg.weight) * ce(scores, batch["label"][rows], batch["known"][rows]),
            cfg.weight * kl(scores, theirs[rows]),
        )
        return dict(zip(("ce", name), terms, strict=True))

    stage, got, due = SimpleNamespace(loss=loss), {}, pictures._stated(cfg, batch, ours, theirs)
    for i in range(12):
        for k, v in loss(pictures.Answering(ours), batch, slice(i, i + 1)).items():
            got.setdefault(k, []).append(float(v))
    forms = pictures.other_forms(cfg, ours, theirs)
    wrong, measured = pictures.evaluate_own_terms(stage, batch, got, due, forms, (ours, theirs), 1e-4)
    near = {k: [right, *(forms.values() if k == "kl" else ())] for k, (right, _) in due.items()}
    return [
        *wrong,
        *(k for k, of in near.items() if min(pictures.far(torch.tensor(got[k]), f) for f in of) > 1e-4),
    ], measured


def smoothed(ours, label, known):
    return F.cross_entropy(ours[known], label[known], label_smoothing=0.1, reduction="sum")


@pytest.mark.parametrize(
    "more", [{}, {"kl": variation}, {"kl": best_of_teacher}, {"ce": smoothed}, {"kl": reverse, "name": "reverse_kl"}]
)
def test_other_losses_of_pictures_are_let_through(more):
    assert of_pictures(**more)[0] == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kl": reverse}, "kl"),
        ({"kl": lambda ours, theirs: F.kl_div(*soft(ours, 1.5 * theirs), reduction="sum", log_target=True)}, "times the teacher's"),
        ({"kl": lambda ours, theirs: F.kl_div(*soft(ours, theirs), reduction="sum", log_target=True)}, "kl"),
        ({"ce": lambda ours, label, known: smoothed(ours, label, known | True)}, "without a known label change the loss"),
        ({"ce": lambda ours, label, known: smoothed(ours, (label + 1) % 10, known)}, "pushed away"),
    ],
)  # fmt: skip
def test_mistakes_in_other_losses_of_pictures_are_stopped(more, words):
    assert words in " ".join(of_pictures(**more)[0])


@pytest.mark.parametrize(
    ("shift", "start", "right", "others"), [(0, START, 1.0, False), (1, START, 0.0, False), (0, 1, 1.0, True)]
)
def test_smoothed_words_pull_each_token_to_its_own(shift: int, start: int, right: float, others: bool):
    """`head` of distill/whisper: no smoothed loss is near 0, also not at the teacher's own features."""
    teacher = small(2)
    batch = {"ids": torch.randint(4, 60, (3, 9)), "words": torch.tensor([9, 7, 5])}

    def loss(model, batch):
        ids, place = batch["ids"], torch.arange(1, batch["ids"].shape[1])
        scored = (place >= start) & (place < batch["words"][:, None])
        scores = teacher.logits(model(None), ids[:, :-1])[scored]
        return {"ce": F.cross_entropy(scores, ids[:, 1:].roll(-shift, 1)[scored], label_smoothing=0.1, reduction="sum")}

    stage = SimpleNamespace(model=nn.Identity(), frozen_modules={"teacher": teacher.model}, loss=loss)
    run = SimpleNamespace(autocast=contextlib.nullcontext)
    found = whisper._pulled(run, stage, batch, torch.randn(3, 50, 16), START)
    assert found == (pytest.approx(right, abs=0.2), others)


@pytest.mark.parametrize("mels", [80, 128])
def test_teachers_with_their_own_number_of_mel_bins(mels: int, tmp_path: Path):
    """large-v3 has 128. What it writes about stored features is what transformers writes about the recording."""
    hearing.write(tmp_path, 3, mels)
    teacher = teachers.load(str(tmp_path / "whisper"), hearing.SECONDS)
    waves = [soundfile.read(path, dtype="float32")[0] for path in sorted((tmp_path / "recordings").glob("*.wav"))]
    sound = WhisperFeatureExtractor(feature_size=mels, chunk_length=hearing.SECONDS)(
        waves, sampling_rate=teachers.RATE, return_tensors="pt"
    )
    assert sound.input_features.shape[1] == mels
    features = teacher.hear(waves)
    with torch.no_grad():
        own = teacher.model.model.encoder(sound.input_features).last_hidden_state
    assert torch.allclose(features.float(), own, atol=1e-3)
    assert all(teacher.write(features))
