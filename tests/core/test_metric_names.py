"""Which way a metric is better, by its name: one table for reports, schedules, trainers and the rules over a source."""

import pytest
from trainworthy.core.base.names import more_is_better, words


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("val_loss", False), ("valLoss", False), ("dice_loss", False), ("eval/nll", False), ("test.rmse", False), ("bits_per_byte", False),
        ("eval_accuracy", True), ("top1_acc", True), ("mIoU", True), ("mAP", True), ("rougeL", True), ("eval_exact_match", True), ("f1_macro", True),
        ("acc if best else loss", None), ("score", None), ("confidence", None), ("neg_mean_squared_error", None),
        ("distance", None), ("acc_error", None),
    ],
)  # fmt: skip
def test_a_name_says_which_way_is_better_or_nothing(name: str, more: bool | None) -> None:
    assert more_is_better(name) is more


def test_words_of_a_name() -> None:
    assert words("val_loader") == words("valLoader") == words("VAL_LOADER") == ["val", "loader"]
