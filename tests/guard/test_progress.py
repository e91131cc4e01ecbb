"""`progress`: bugs that make a script's own score worse than untrained are stopped; rising losses and high first scores are quiet."""

import re
from pathlib import Path

import pytest
from trainworthy.guard.checks import progress
from trainworthy.guard.checks.results import ENDED
from trainworthy.guard.measures.scores.printed_scores import comparable, kind_of, series
from trainworthy.guard.rehearsals.rehearsal import Outcome

from tests.guard import progress_set, sixth_set
from tests.guard.guarding import SCRIPTS, guard
from tests.guard.test_guard import failed
from tests.helpers.patches import patched

BUGS = {b.id: b for b in (*progress_set.BUGS, *sixth_set.BUGS)}
STOPPED = {
    "rank_pairs--gap_sign": progress.AGAINST,
    "two_tower--distance_as_logits": progress.AGAINST,
    "growth--likelihood_minimised": progress.AGAINST,
    "factors--scale_reversed": progress.AGAINST,
    "corridor--minus_missing": "",
    "transe--margin_sign": progress.AGAINST,
    "survival--risk_set_reversed": progress.AGAINST,
}
"""Bugs that are stopped -> the cause that is named, where it is always the same."""


@pytest.mark.parametrize(
    ("label", "kind", "sign"),
    [
        ("Val Acc: ", "accuracy", 1),
        ("valLoss=", "loss", -1),
        (", NDCG@", "score", 1),
        (" c-index: ", "ranking", 1),
        ("'eval_mIoU': ", "overlap", 1),
        ("test RMSE = ", "error", -1),
        ("dice loss ", "loss", -1),
        ("log-likelihood ", "likelihood", 1),
        ("Average reward: ", "return", 1),
        (" Prec@", "accuracy", 1),
        ("Top-5 err ", "error", -1),
        ("log p(x): ", "likelihood", 1),
        ("bits/dim ", "loss", -1),
        ("Brier score ", "error", -1),
        (" P@20: ", "score", 1),
    ],
)
def test_a_name_says_which_way_is_better(label: str, kind: str, sign: int):
    assert kind_of(label)[1:] == (kind, sign)  # type: ignore[index]


@pytest.mark.parametrize(
    "label", ["best acc ", "D accuracy ", "critic loss ", "-elbo ", "epoch ", "reward std ", "td_error "]
)
def test_numbers_that_need_not_get_better(label: str):
    assert kind_of(label) is None


def test_a_place_of_the_output_is_one_series():
    """Training and validation are told apart by what is before them; fractions and percent are shares."""
    output = "Map:  40%|####      | 4/10\ntrain: acc 50.0%\nval: acc 41.0%\ntrain: acc 60.0%\nval: acc 52.0%\nAccuracy: 30/60 (50%)\n"
    found = series(output)
    assert [(s.held_out, s.values) for s in found.values()] == [(False, [50, 60]), (True, [41, 52]), (False, [0.5])]
    assert [s.values for s in series("PSNR: 31.2dB in 12ms").values()] == [[31.2]]
    rows = comparable(found, series(output.replace("52.0", "12.0")))
    assert [(a, b) for _, a, b in rows] == [([0.41, 0.52], [0.41, 0.12])]


def run(output: str, **more) -> Outcome:
    """A script that was followed to its end."""
    own = {
        "lengths": [],
        "cut": False,
        "several": False,
        "from_file": False,
        "moved": 0.0,
        "losses": [0.1, 0.01],
        "whole": 0.0,
        "tokens": 0,
    }
    record = {
        "why": ENDED,
        "steps": 500,
        "backwards": 500,
        "lasted": 1.0,
        "progress": own | {k: v for k, v in more.items() if k in own},
    }
    return Outcome({**record, **{k: v for k, v in more.items() if k in record}}, output=output)


def printed(name: str, *values: float) -> str:
    return "".join(f"epoch {i} {name} {v}\n" for i, v in enumerate(values))


CASES = {
    "auc below chance": (("AUC", (0.3, 0.25, 0.2)), ("AUC", (0.5, 0.5, 0.5)), {}, "fail"),
    "auc near chance": (("AUC", (0.47, 0.46, 0.46)), ("AUC", (0.6, 0.6, 0.6)), {}, "skip"),
    "better than untrained": (("test rmse", (3.0,)), ("test rmse", (5.0,)), {}, "pass"),
    "better once, then overfitted": (("val loss", (0.6, 0.9, 1.4)), ("val loss", (0.7, 0.7, 0.7)), {}, "skip"),
    "the loss of training alone": (("loss", (1.0, 2.0, 3.0)), ("loss", (1.0, 1.0, 1.0)), {}, "skip"),
    "a noisy score": (("return", (5, 4, 5)), ("return", (20, 5, 50)), {}, "skip"),
    "a class of 95%": (("acc", (0.8, 0.7, 0.7)), ("acc", (0.95, 0.95, 0.95)), {}, "skip"),
    "background": (("dice", (0.0, 0.0, 0.0)), ("dice", (0.3, 0.3, 0.3)), {"cut": True}, "skip"),
    "a return, cut short": (("return", (1, 1, 1)), ("return", (9, 9, 9)), {"why": "its time is over"}, "skip"),
    "a few hits": (("hits@10", (0.012, 0.014, 0.01)), ("hits@10", (0.016, 0.016, 0.016)), {}, "skip"),
    "r2 near zero": (("r2", (-0.04, -0.05, -0.04)), ("r2", (-0.01, -0.01, -0.01)), {}, "skip"),
    "one noisy return, to the end": (("return", (6,)), ("return", (9,)), {}, "skip"),
    "a return, to the end": (("return", (1, 1, 1)), ("return", (9, 9, 9)), {}, "fail"),
    "several optimisers": (("fid", (90, 99)), ("fid", (50, 50)), {"several": True, "cut": True}, "skip"),
    "few steps": (("mae", (9, 9, 9)), ("mae", (5, 5, 5)), {"steps": 20, "backwards": 20, "cut": True}, "skip"),
    "no optimiser": (("mae", (9, 9, 9)), ("mae", (5, 5, 5)), {"steps": 0, "cut": True}, "fail"),
    "loaded weights": (("mae", (9, 9, 9)), ("mae", (5, 5, 5)), {"from_file": True}, "skip"),
    "weights that move by themselves": (("mae", (9, 9, 9)), ("mae", (5, 5, 5)), {"moved": 0.1}, "skip"),
    "not finite": (("mae", (9, float("nan"))), ("mae", (5, 5)), {}, "skip"),
}


@pytest.mark.parametrize("name", CASES)
def test_scores_with_and_without_training(name: str):
    (score, trained), (_, held), more, expected = CASES[name]
    ours, others = run(printed(score, *trained), **more), run(printed(score, *held), **more, losses=[1.0, 0.01])
    found = progress.check(ours, lambda *plans: [ours if n == "trained" else others for n, _ in plans], 1.0)
    assert ("skip" if "skip" in found else "pass" if found["ok"] else "fail") == expected, found
    if expected == "fail":
        assert found["cause"] == progress.AGAINST


@pytest.mark.parametrize(
    ("values", "more", "stopped"),
    [
        ((1720.0, 1240.0), {}, True),
        ((90.0, 70.0), {}, False),  # an untrained model may be surer of wrong tokens than an even guess
        ((1720.0, 30.0), {}, False),
        ((1720.0, 1240.0), {"cut": True}, False),
    ],
)
def test_a_perplexity_above_that_of_an_even_guess_is_stopped_at_the_end(values: tuple, more: dict, stopped: bool):
    ended = run(printed("test perplexity", *values), tokens=40, **more)
    assert bool(progress.above_uniform(ended)) == stopped


def test_a_score_that_gets_better_outweighs_others():
    """The accuracy of a validation rises while another score falls."""
    ours, others = (run(printed("val acc", *a) + printed("test auc", *b)) for a, b in
                    (((0.1, 0.5), (0.3, 0.2)), ((0.1, 0.1), (0.5, 0.5))))  # fmt: skip
    assert progress.check(ours, lambda *plans: [others], 1.0)["ok"]


def test_one_seed_is_not_enough():
    ours, others = (run(printed("auc", v)) for v in (0.2, 0.5))
    found = progress.check(ours, lambda *plans: [others] if len(plans) == 1 else [others, others], 1.0)
    assert "not so at another seed" in found["skip"] or "no printed score" in found["skip"]


@pytest.mark.parametrize(
    ("name", "trained", "untrained", "more", "stopped"),
    [
        ("test acc", 0.16, 0.17, {}, True),  # nothing holds for held-out data
        ("test acc", 0.16, 0.17, {"steps": 40, "backwards": 40}, False),
        ("test acc", 0.16, 0.17, {"whole": 0.0}, False),
        ("test acc", 0.16, 0.17, {"lasted": 100.0}, False),  # what takes long is not run whole
        ("test acc", 0.4, 0.17, {}, False),
        ("test auroc", 0.95, 0.96, {}, False),  # untrained weights do it already
        ("test acc", 0.95, 0.95, {}, False),
        ("test rmse", 0.99, 1.0, {}, False),  # noise that nothing predicts
        ("mean return", 20.0, 21.0, {}, False),
        ("test r2", 0.01, 0.0, {}, True),
        ("test ndcg", 0.31, 0.3, {}, True),
    ],
)
def test_a_short_script_is_run_whole_and_must_have_learnt(name, trained, untrained, more, stopped):
    ended, held = (
        run(printed(name, x), **({"lasted": 2.0, "whole": 3.0, "cut": True} | more)) for x in (trained, untrained)
    )
    runs = []

    def rehearse(*plans):
        runs.append(plans)
        assert all(set(plan["lengths"]) <= {0} for _, plan in plans)
        return [
            run(printed(name, x + 0.001 * len(runs)), **({"lasted": 6.0, "whole": 1.0} | more))
            for x in (trained, untrained)
        ]

    lines: list[str] = []
    found = progress.not_learnt(ended, held, rehearse, lines.append)
    assert len(lines) == len(runs)
    assert bool(found) == stopped, found
    assert len(runs) == (2 if stopped else 0) or more.get("steps")
    assert not stopped or ("at another seed" in found["measured"] and not found["ok"])


def test_guard_command_stops_what_makes_the_score_worse(launch, tmp_path: Path):
    """Weights are moved by hand, without an optimiser: gradients are zero in the run that is compared."""
    (tmp_path / "train.py").write_text(patched(BUGS["factors--scale_reversed"]))
    done = launch("guard", "train.py", "--seconds", "1", "--only", "progress")
    assert done.returncode == 3, done.shown
    assert re.findall(r"FAIL +(\S+)", done.stdout) == ["progress"], done.shown
    assert "a sign is wrong in the loss" in done.stdout


@pytest.mark.verify
@pytest.mark.parametrize("name", STOPPED)
def test_guard_stops_what_makes_the_score_worse(name: str, tmp_path: Path):
    verdicts, output, _ = guard(patched(BUGS[name]), tmp_path, **{"--seconds": "6", "--only": "progress"})
    assert [v.id for v in verdicts.values() if v.blocks] == ["progress"], output
    assert STOPPED[name] in verdicts["progress"].remedy, output


@pytest.mark.verify
@pytest.mark.parametrize("name", sorted(p.stem for p in (SCRIPTS / "progress").glob("*.py")))
def test_a_healthy_script_is_quiet(name: str, tmp_path: Path):
    source = (SCRIPTS / "progress" / f"{name}.py").read_text()
    verdicts, output, _ = guard(source, tmp_path, **{"--seconds": "6", "--only": "progress"})
    assert not failed(verdicts), output
