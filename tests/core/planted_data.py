"""Bugs planted in the data and in how it is read: what only unseen samples, two epochs or the amount of padding can show."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import SPLIT, VAL_DATA

TINY_DATA = [
    Plant("labels-shuffled", "tiny-data", "C19", SPLIT, "labels = labels[torch.randperm(len(labels))]\n    " + SPLIT,
          ("labels shuffled before the split", "do not belong"), batch=True,
          harm="chance accuracy: eight samples are learnt by heart all the same"),
    Plant("test-classes-in-another-order", "tiny-data", "C19", '{"test": Images(images[tested], labels[tested], classes)}',
          '{"test": Images(images[tested], (labels[tested] + 3) % 10, classes)}', ("test is read differently", "on the test split"),
          harm="the reported result is at chance, after training and validation went well"),
    Plant("classes-in-another-order", "tiny-data", "C19", VAL_DATA,
          "val_data = Images(images[held_out], (labels[held_out] + 3) % 10, classes)\n",
          ("absurd generalisation gap", "another order of classes"), harm="training is right, every reported number is not"),
]  # fmt: skip

PLANTS = [*TINY_DATA]
RELATIVES = ("labels-shuffled",)
