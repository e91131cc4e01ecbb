"""The denominator of a printed accuracy, against the right answers that were counted."""

import pytest
from trainworthy.guard.measures.scores import denominators

ROW = {"right": 1596, "rows": 2000, "calls": 8, "most": 256, "samples": 2000}


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("val 0.7793", denominators.FULL),
        ("accuracy: 77.93%", denominators.FULL),
        ("val 0.7980", ""),
        ("epoch 3 train 0.7793 val 0.7980", ""),  # the right one is printed, too
        ("val 0.78", ""),  # too few digits to say
        ("val 0.8012", ""),  # another number altogether
    ],
)
def test_a_printed_share_names_its_denominator(line, cause):
    found = denominators.check(ROW, line, [0, -1])
    assert (found[1] if found else "") == cause


def test_a_loader_that_drops_its_last_batch_is_divided_by_what_it_gave():
    row = ROW | {"right": 1500, "rows": 1792, "calls": 7}
    found = denominators.check(row, "val 0.7500", [0, -1])
    assert found
    assert found[1] == denominators.ALL
    assert denominators.check(row, "val 0.8371", [0, -1]) is None


def test_nothing_is_concluded_from_an_evaluation_that_was_not_counted():
    assert denominators.check({}, "val 0.7793", [0, -1]) is None
    assert denominators.check(ROW, "val 0.7793", []) is None


def test_every_evaluation_must_have_the_denominator():
    """A loss that equals one such share by chance does not equal the next one."""
    later = ROW | {"right": 1800}
    output = "val 0.7793\nval 0.8789\nval 0.8123\n"
    assert denominators.always([(ROW, [0, 11]), (later, [11, 22])], output)[1] == denominators.FULL
    assert denominators.always([(ROW, [0, 11]), (later, [22, -1])], output) is None
    assert denominators.always([({}, [0, 11])], output) is None
