"""An augmentation that makes one class look like another is found by nearest neighbours."""

import pytest
import torch
from torch.nn import functional as F
from torchvision.transforms import v2
from trainworthy.core.base.config import Config
from trainworthy.core.data import inventory, turned
from trainworthy.core.gates.causes import named
from trainworthy.core.recipe.stage import Data, Field

from tests.helpers.set_cases import digits


class Augmented(Data):
    """Digits as pictures of one channel, augmented on the training path; `turn` changes the label, too."""

    def __init__(self, augment=None, turn=None):
        images, labels = digits()
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:1500]
        self.images, self.labels, self.augment, self.turn = images[rows, None], labels[rows], augment, turn
        self.fields = {
            "image": Field("input", low=0.0, high=1.0),
            "label": Field("target", classes=[str(i) for i in range(10)]),
        }

    def __len__(self) -> int:
        return len(self.labels)

    def get(self, index, generator):
        image, label = self.images[index].float() / 255, self.labels[index]
        if generator is not None and self.augment is not None:
            image = self.augment(image)
        if generator is not None and self.turn is not None and torch.rand((), generator=generator) < 0.5:
            image, label = image.flip(-2, -1), self.turn[label]
        return {"image": image, "label": label}


def affine(degrees: int):
    return v2.RandomAffine(degrees, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10)


def found(data: Data):
    return turned.exchanged(inventory.scan("train", data), data, Config().run.seed)


def test_digits_turned_by_any_angle_are_found():
    pair = found(Augmented(affine(180)))
    assert pair is not None
    assert (pair.change, pair.classes) == ("turned by half", ("6", "9"))
    assert "'6' turned by half is '9'" in pair.cause()


@pytest.mark.parametrize("augment", [None, affine(12), affine(45), v2.RandomHorizontalFlip(), v2.RandomErasing(0.5)])
def test_changes_that_keep_the_classes_apart_are_quiet(augment):
    assert found(Augmented(augment)) is None


class Enlarged(Augmented):
    """Digits of 32 pixels, which are up to a pixel and a half beside the middle."""

    def get(self, index, generator):
        sample = super().get(index, generator)
        large = F.interpolate(sample["image"][None], size=35, mode="bilinear", antialias=True)[0]
        return sample | {"image": large[:, :32, 3:].expand(3, -1, -1)}


@pytest.mark.parametrize("augment", [affine(12), affine(45)])
def test_pictures_that_are_not_in_the_middle_are_quiet(augment):
    """A 0 that is turned lies where a 2 is, and is still a 0."""
    assert found(Enlarged(augment)) is None


def test_digits_beside_the_middle_that_are_turned_are_found():
    assert found(Enlarged(affine(180))).classes == ("6", "9")


class Placed(Augmented):
    """A spot on the left or on the right."""

    def __init__(self, augment=None):
        super().__init__(augment)
        draws = torch.Generator().manual_seed(0)
        self.labels = torch.arange(400) % 2
        self.images = torch.zeros(400, 1, 28, 28, dtype=torch.uint8)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            y, x = torch.randint(0, 20, (), generator=draws), torch.randint(0, 6, (), generator=draws) + 14 * label
            image[0, y : y + 8, x : x + 8] = torch.randint(100, 255, (8, 8), generator=draws)
        self.fields["label"] = Field("target", classes=["left", "right"])


def test_classes_that_differ_in_a_place_are_compared_where_they_are():
    assert found(Placed(v2.RandomHorizontalFlip())).classes == ("left", "right")
    assert found(Placed(v2.RandomVerticalFlip())) is None


class Uneven(Augmented):
    """Digits of which some are many and others few."""

    def __init__(self, counts: dict[int, int], augment):
        super().__init__(augment)
        images, labels = digits()
        rows = torch.cat([(labels == c).nonzero().flatten()[:n] for c, n in counts.items()])
        self.images, self.labels = images[rows, None], torch.searchsorted(torch.tensor(sorted(counts)), labels[rows])
        self.fields["label"] = Field("target", classes=[str(c) for c in sorted(counts)])


def test_a_large_class_is_near_to_many_pictures():
    """A turned 8 is an 8, but among 400 pictures of a 3 and 130 of an 8 a 3 is often nearest."""
    counts = {3: 400, 8: 130}
    assert found(Uneven(counts, v2.RandomChoice([torch.nn.Identity(), v2.RandomRotation((180, 180))]))) is None


def test_few_pictures_of_one_of_two_exchanged_classes_are_enough():
    pair = found(Uneven({1: 48, 6: 320, 9: 40}, affine(180)))
    assert pair is not None
    assert pair.classes == ("6", "9")


def test_a_turn_that_changes_the_label_is_quiet():
    assert found(Augmented(turn=torch.tensor([0, 1, 2, 3, 4, 5, 9, 7, 8, 6]))) is None


def test_an_inverted_training_path_is_named():
    spec = Field("input", low=0.0, high=1.0)
    assert "inverts" in named.explain_path_scales(0.87, 0.31, 0.13, 0.31, spec)
    assert "inverts" not in named.explain_path_scales(0.87, 0.1, 0.13, 0.31, spec)
    assert "inverts" not in named.explain_path_scales(0.52, 0.2, 0.48, 0.2, spec)


class Generated(Data):
    """Pictures that a model learns to generate, changed on the training path."""

    def __init__(self, pictures, augment):
        self.pictures, self.augment = pictures, augment
        self.fields = {"image": Field("source", low=-1.0, high=1.0), "noisy": Field("input")}

    def __len__(self) -> int:
        return len(self.pictures)

    def get(self, index, generator):
        image = self.pictures[index]
        if generator is not None:
            with torch.random.fork_rng():
                torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
                image = self.augment(image)
        return {"image": image, "noisy": image}


def drawn_digits():
    images, labels = digits()
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:1500]
    return torch.nn.functional.adaptive_avg_pool2d(images[rows, None].float(), 16) / 127.5 - 1


def landscapes(copies: int):
    """Light above, dark below, otherwise at random; each is there `copies` times, with noise, as frames of a film are."""
    draws = torch.Generator().manual_seed(0)
    coarse = torch.randn(1500 // copies, 3, 4, 4, generator=draws).repeat_interleave(copies, 0)
    fine = torch.nn.functional.interpolate(coarse, size=16, mode="bicubic") + torch.linspace(2, -2, 16)[:, None]
    return (fine / 3 + 0.05 * torch.randn(fine.shape, generator=draws)).clamp(-1, 1)


@pytest.mark.parametrize(
    ("pictures", "augment", "change"),
    [
        (drawn_digits, v2.RandomHorizontalFlip(), "mirrored"),
        (drawn_digits, affine(12), None),
        (lambda: landscapes(1), v2.RandomHorizontalFlip(), None),
        (lambda: landscapes(10), v2.RandomHorizontalFlip(), None),
        (lambda: landscapes(1), v2.RandomVerticalFlip(), "upside down"),
    ],
)
def test_a_change_that_the_data_do_not_have_is_not_to_be_generated(pictures, augment, change):
    data = Generated(pictures(), augment)
    made = turned.foreign(inventory.scan("train", data), data, 0)
    assert (made.change if made else None) == change


@pytest.mark.parametrize(("change", "made"), [(None, True), (lambda x: x.transpose(-2, -1), False)])
def test_a_path_that_transposes_every_picture_is_no_augmentation(change, made: bool, monkeypatch):
    """The training path was blamed, and so was its augmentation; other gates name paths that differ."""
    monkeypatch.setattr(turned, "_made", lambda *_: 1.0)
    assert (found(Augmented(change)) is not None) is made
