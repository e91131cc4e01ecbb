"""Test sets of several domains: samples that no setting was chosen on, beside unchanged training and validation sets."""

import hashlib

import numpy as np
import pytest
import torch
from trainworthy.recipes.diffusion.data import captions, pictures
from trainworthy.recipes.diffusion.flow import Noised
from trainworthy.recipes.diffusion.models.flow_noise import Noise, Process
from trainworthy.recipes.distill.data import recordings
from trainworthy.recipes.llm.data import documents, prose
from trainworthy.recipes.shared import digits, further_digits, speech


def rows(images: torch.Tensor) -> set[bytes]:
    return {hashlib.blake2b(x.numpy().tobytes()).digest() for x in images}


def test_further_digits_are_other_ones_and_as_hard():
    """A nearest neighbour among the training digits is right on as many of them as of the validation digits."""
    images, labels = further_digits.load()
    first, truth = digits.load()
    learn, held_out = digits.split(truth)
    assert labels.bincount().tolist() == [100] * 10
    assert len(rows(images)) == 1000
    assert not rows(images) & rows(first)

    def unit(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(x.flatten(1).float() - x.flatten(1).float().mean(1, keepdim=True))

    right = [(truth[learn][(unit(x) @ unit(first[learn]).T).argmax(1)] == y).float().mean().item()
             for x, y in ((images, labels), (first[held_out], truth[held_out]))]  # fmt: skip
    assert right == pytest.approx([0.945, 0.943], abs=0.005)


def test_a_generators_test_set_has_other_pictures_and_other_noise():
    found = pictures.read(pictures.Source(image_size=8))
    parts = [
        Noised(found.images[i], found.labels[i], found.classes, Process(Noise()), 0.1) for i in found[3:5] + found[6:]
    ]
    parts[2].split = "test"
    assert [len(p) for p in parts] == [4000, 1000, 1000]
    noise = [p.get(0, None)["noise"] for p in parts[1:]]
    assert not torch.equal(*noise)
    assert torch.equal(noise[1], parts[2].get(0, None)["noise"]), "the same in every evaluation"
    said = captions.read(captions.Source(image_size=8))
    asked = [
        {said.captions[i] for i in said.caption_ids[part].tolist()} for part in (said.learn, said.held_out, said.test)
    ]
    assert asked[2] <= asked[1]
    assert not asked[2] & asked[0]


def test_further_sentences_are_the_test_set_of_synthesised_speech(tmp_path):
    source, skip = recordings.test_source(recordings.Source())
    every = speech.sentences(source.sentences)
    assert (skip, len(every)) == (440, 528)
    assert every[:skip] == speech.sentences(440)
    assert not set(every[skip:]) & set(every[:skip])
    assert recordings.test_source(recordings.Source(sentences=60)) is None, "12 sentences would be no measurement"
    assert recordings.test_source(recordings.Source(sentences=speech.MOST)) is None
    own = recordings.Source(path=str(tmp_path))
    assert recordings.test_source(own) is None
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "metadata.csv").write_text("file_name,transcription\n")
    assert recordings.test_source(own) == (recordings.Source(path=str(tmp_path / "test")), 0)


def corpus(n: int) -> documents.Corpus:
    texts = [f"document {i // 2}" for i in range(n)]  # each of them twice
    return documents.Corpus([], [np.array([i]) for i in range(n)], [], ([], texts), None, np.zeros(1), {})


def test_half_of_the_held_out_documents_are_the_test_set(tmp_path):
    source = documents.Source(path=str(tmp_path))
    kept = documents.with_test(corpus(200), source)
    test = kept.test
    val = [int(row[0]) for row in kept.val]
    assert len(val) + len(test) == 200
    assert min(len(val), len(test)) >= documents.LEAST
    assert not {i // 2 for i in val} & {int(row[0]) // 2 for row in test}, "equal documents are on one side"
    assert kept.texts[1] == [f"document {i // 2}" for i in val]
    for small, other in ((corpus(60), source), (corpus(200), documents.Source(path=str(tmp_path), test=False)),
                         (corpus(200), documents.Source(path=str(tmp_path), val=str(tmp_path)))):  # fmt: skip
        assert documents.with_test(small, other) == small


def test_the_test_set_of_the_packaged_prose_is_of_other_sections_and_modules():
    train, val, test, _ = prose.load(test=True)
    all_of_training, *others, _ = prose.load()
    assert others == [val, []]
    assert len(train) < len(all_of_training)
    assert len(test) > 300
    shared = {s for t in test for p in t.split("\n\n") for s in prose.shingles(p)}
    assert not any(shared & prose.shingles(p) for t in (*train, *val) for p in t.split("\n\n"))
    corpus = documents.read(documents.Source())
    assert [len(train), len(val), len(test)] == [len(corpus.train), len(corpus.val), len(corpus.test)]
    assert documents.with_test(corpus, documents.Source()) == corpus
    assert not documents.read(documents.Source(test=False)).test
