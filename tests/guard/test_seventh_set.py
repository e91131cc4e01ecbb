"""What the seventh set led to: scales of few values and of columns, the direction of "best", joined rows, what hardly learns."""

import re

import pytest
import torch
from trainworthy.guard.checks import interventions
from trainworthy.guard.measures.data import indexing, joined_samples, scales
from trainworthy.guard.measures.scores import best_weights
from trainworthy.guard.rehearsals import control

from tests.guard import seventh_set
from tests.guard.guarding import SCRIPTS, guard
from tests.guard.test_guard import failed
from tests.helpers.patches import patched

ALIKE = SCRIPTS / "alike"
NAMED = {
    "pixelcnn--other_scale_in_test": ("evaluated", "never occur in training"),
    "listnet--lowest_kept": ("ending", "the wrong direction"),
    "mdn--targets_in_order": ("targets", "use the same indices for both"),
}
"""Bugs that are stopped -> the check, and words that it prints."""
PLANTED = {
    "unit_range": ("TensorDataset(x[1200:] * 2 - 1,", "TensorDataset(x[1200:],", "from 0 to 1 in evaluation"),
    "columns": ("(x[300:] - mean) / std", "x[300:] / x[300:].mean(0)", "normalised differently"),
    "growing": ("windows(series[cut - 12 :])", "windows(raw[cut - 12 :])", "normalised differently"),
    "permuted": (
        "y[rows]\n        shown = y[i : i + 50].mean()",
        "y[i : i + 50]\n        shown = by.mean()",
        "the same indices",
    ),
    "levels": (
        "best_acc = max(best_acc, acc)",
        "best_acc = acc if epoch == 0 else min(best_acc, acc)",
        "wrong direction",
    ),
}


def test_guard_command_names_the_worst_weights(launch, tmp_path):
    """The lowest accuracy is kept as the best."""
    old, new, words = PLANTED["levels"]
    (tmp_path / "train.py").write_text((ALIKE / "levels.py").read_text().replace(old, new))
    done = launch("guard", "train.py", "--seconds", "1", "--only", "ending")
    assert done.returncode == 3, done.shown
    assert words in done.stdout


@pytest.mark.parametrize(
    ("edit", "stopped"), [(("", ""), False), (("    model.eval()\n    enable_dropout(model)\n", ""), True)]
)
def test_dropout_that_an_evaluation_switches_on_is_no_fault(edit, stopped, tmp_path):
    source = (ALIKE / "mc_dropout.py").read_text()
    assert edit[0] in source
    verdicts, output, _ = guard(source.replace(*edit), tmp_path, **{"--only": "modes"})
    assert [v.id for v in verdicts.values() if v.blocks] == ["modes"] * stopped, output


@pytest.mark.verify
@pytest.mark.parametrize("name", NAMED)
def test_a_bug_is_stopped_and_named(name, tmp_path):
    id, words = NAMED[name]
    verdicts, output, _ = guard(patched(next(b for b in seventh_set.BUGS if b.id == name)), tmp_path, **{"--only": id})
    assert [v.id for v in verdicts.values() if v.blocks] == [id], output
    assert words in output


@pytest.mark.verify
@pytest.mark.parametrize("name", PLANTED)
def test_planted_scales_and_directions_are_stopped(name, tmp_path):
    old, new, words = PLANTED[name]
    source = (ALIKE / f"{name}.py").read_text()
    assert old in source
    verdicts, output, _ = guard(source.replace(old, new), tmp_path, **{"--only": "evaluated,ending,targets"})
    assert failed(verdicts), output
    assert words in output


@pytest.mark.verify
@pytest.mark.parametrize("name", sorted(p.stem for p in ALIKE.glob("*.py")))
def test_healthy_variants_are_quiet(name, tmp_path):
    verdicts, output, _ = guard((ALIKE / f"{name}.py").read_text(), tmp_path)
    assert not failed(verdicts), output
    if name == "bag":
        assert verdicts["overfit"].verdict == verdicts["signal"].verdict == "pass", output
    if name == "graphs":
        assert "nodes of several graphs" in verdicts["overfit"].reason, output


@pytest.mark.verify
def test_what_hardly_learns_is_no_pass(tmp_path):
    """The loss on eight samples ends near that of the best constant."""
    bug = next(b for b in seventh_set.BUGS if b.id == "quantile_tcn--chomp_wrong_end")
    verdicts, output, _ = guard(patched(bug), tmp_path, **{"--only": "overfit"})
    assert re.search(r"hardly learnt in \d+ steps", verdicts["overfit"].reason), output


def test_columns_of_another_scale_are_found_where_the_whole_has_the_same():
    torch.manual_seed(0)
    wide = torch.tensor([1.0, 10, 1, 10, 1, 10])
    ours, theirs, same = scales.Measures(), scales.Measures(), scales.Measures()
    for _ in range(4):
        ours.read(torch.randn(32, 6) * wide)
        same.read(torch.randn(32, 6) * wide)
        theirs.read(torch.randn(32, 6) * wide.flip(0))
    assert "6 of 6 columns" in scales.fault(ours, theirs)
    assert not scales.fault(ours, same)


def test_the_lags_of_a_series_that_grows_are_no_columns_of_another_scale():
    series = torch.linspace(0, 1, 400) + 0.01 * torch.randn(400, generator=torch.Generator().manual_seed(0))
    windows = series.unfold(0, 12, 1)  # (N, 12): the last ones are four deviations away, and vary a fourth
    ours, theirs = scales.Measures(), scales.Measures()
    ours.read(windows[:320])
    theirs.read(windows[320:])
    assert not scales.columns(ours, theirs)


def test_few_values_are_compared_as_a_whole():
    """Masks of another share, erased values and dropout of inputs are no other scale."""
    torch.manual_seed(0)
    bits = [(torch.rand(64, 64) > 0.6).float() for _ in range(8)]

    def read(rows):
        one = scales.Measures()
        for x in rows:
            one.read(x)
        return one

    plain = read(bits)
    assert scales.fault(read(2 * x - 1 for x in bits), read(1 - 2 * x for x in bits)) == ""
    assert scales.fault(read(2 * x for x in bits), plain) == ""
    assert scales.fault(read(x * (torch.rand_like(x) > 0.2) for x in bits), plain) == ""
    assert (
        scales.fault(read((2 * x - 1) * (torch.rand_like(x) > 0.2) for x in bits), read(2 * x - 1 for x in bits)) == ""
    )


def test_joined_rows_are_exchanged_with_their_offsets():
    text, starts, labels = torch.arange(12), torch.tensor([0, 3, 4, 9]), torch.tensor([0, 1, 0, 1])
    leaves = [labels, text, starts]
    assert joined_samples.arrange(leaves, 4, [2, 0, 0, 3])[1] == 1
    assert leaves[1].tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 0, 1, 2, 9, 10, 11]
    assert leaves[2].tolist() == [0, 5, 8, 11]
    whole = (torch.arange(6), torch.tensor([0, 2, 5, 6]), torch.tensor([1.0, 2, 3]))
    assert control.size_of(whole) == 3
    again = control.same_eight(whole, 5)
    assert again[1].tolist() == [0, 2, 5, 6, 8, 11]
    assert len(again[0]) == 11


def test_the_direction_of_best():
    """Only a score whose better side is known by its name, and a variable that follows its running extreme, decide."""
    values, output, rows = [0.5, 0.6, 0.58, 0.7, 0.72], "", []
    for i, v in enumerate(values):
        begin = len(output)
        output += f"epoch {i} val acc {v:.2f}\n"
        rows.append({"step": i, "output_span": [begin, len(output)], "best": {"best": max(values[: i + 1])}})
    assert best_weights.check(rows, output) == ("best is the best of 5 values of 'val acc'", "")
    wrong = [r | {"best": {"best": min(values[: i + 1])}} for i, r in enumerate(rows)]
    assert best_weights.check(wrong, output)[1] == best_weights.WRONG
    assert best_weights.check([r | {"best": {"best_loss": 0.5}} for r in rows], output) == ("", "")
    assert best_weights.check(wrong, output.replace("acc", "abc")) == ("", "")


def test_a_loss_near_that_of_a_constant_is_no_pass():
    fit = {"kind": "difference", "left": [1.05, *[0.8] * 40], "blind": [0.79] * 41, "spread": [0.5] * 41}
    found = interventions.closing(fit, fit | {"left": [2.0] * 41})
    assert "hardly learnt in 41 steps" in found["skip"]
    assert interventions.closing(fit | {"left": [1.05, *[0.3] * 40]}, fit | {"left": [2.0] * 41})["ok"]


def read(rows_of_inputs, rows_of_targets):
    """Eight steps of a loop whose batches hold these rows of two tensors which belong together."""
    torch.manual_seed(0)
    x = torch.randn(400, 2)
    y, one = x[:, :1] + 0.1 * torch.randn(400, 1), indexing.Indexed()
    for i in range(8):
        order = torch.randperm(400)[:40]
        one.steps.append(([indexing.Read(x, rows_of_inputs(i, order))], [indexing.Read(y, rows_of_targets(i, order))]))
    return indexing.check(one)


def test_rows_that_are_read_apart():
    """Other rows are a fault; the same rows and later ones are not."""
    assert "other rows" in read(lambda i, o: o, lambda i, o: torch.arange(40 * i, 40 * i + 40))[0]
    assert read(lambda i, o: o, lambda i, o: o) is None
    assert read(lambda i, o: torch.arange(i, i + 40), lambda i, o: torch.arange(i + 50, i + 90)) is None


def test_rows_that_do_not_belong_together_are_no_fault():
    torch.manual_seed(0)
    assert indexing.belonging(torch.randn(400, 2), torch.randn(400, 1)) > indexing.CLOSER
