"""A failed symptom names the cause that a more specific gate finds; numbers that are off by a known factor name the mistake."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trainworthy.core.base.console import Console
from trainworthy.core.base.verdict import Finding, Verdict
from trainworthy.core.gates import runner
from trainworthy.core.gates.causes import gradient
from trainworthy.core.gates.gate import Gate


def context(folder: Path) -> SimpleNamespace:
    """As much of a context as the runner itself reads."""
    alone = SimpleNamespace(num_processes=1, is_main_process=True)
    cfg = SimpleNamespace(gates=SimpleNamespace(waive=(), because=""))
    return SimpleNamespace(accelerator=alone, cfg=cfg, folder=folder, argv=["mine.py"], again=None, stage="", train=keeps_the_best,
                           failed=[], once=lambda _key, _make: 0, put_away=lambda: None)  # fmt: skip


def keeps_the_best(evaluations: list[dict], model: torch.nn.Module) -> None:
    """A loop that loads the best weights at its end."""
    kept = None
    for _ in evaluations:
        kept = model.state_dict()
    model.load_state_dict(kept)


def gate(id: str, ok: bool, ran: list[str], **marks: bool) -> Gate:
    def check(_context) -> Finding:
        ran.append(id)
        return Finding(ok, f"{id} measured", "", f"{id} cause\n{id} second cause")

    return Gate(id, "C1", id, check, **marks)


def test_a_failed_symptom_names_the_first_gate_that_explains_it(tmp_path: Path, capsys):
    ran: list[str] = []
    gates = [gate("loss", False, ran, symptom=True), gate("quiet", True, ran, explains=True), gate("other", True, ran),
             gate("formula", False, ran, explains=True), gate("later", False, ran, explains=True)]  # fmt: skip
    found = runner.run_gates(gates, context(tmp_path), known={}, console=Console())
    assert ran == ["loss", "quiet", "formula", "later", "other"], "each once; those that explain before the others"
    assert [v.id for v in found] == ["loss", "quiet", "other", "formula", "later"], (
        "verdicts keep the order of the gates"
    )
    first = found[0].remedy.splitlines()[0]
    assert first == "formula cause (the gate `formula` fails, too: formula measured)"
    assert found[0].evidence["explained_by"] == "formula"
    assert "loss cause" in found[0].remedy
    assert "formula cause" in capsys.readouterr().out


def test_an_exception_is_printed_once_with_the_users_line(tmp_path: Path, capsys):
    """A loss that raises ends most gates. The causes are the user's own line, then the library's; nothing else is run to explain it."""
    ran: list[str] = []

    def check(_context) -> Finding:
        return Finding(bool(torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.zeros(2, 1).long())), "", "")

    gates = [
        Gate("first", "C1", "", check),
        Gate("second", "C1", "", check, symptom=True),
        gate("other", False, ran, explains=True),
    ]
    found = runner.run_gates(gates, context(tmp_path), known={}, console=Console())
    own, library = found[0].remedy.splitlines()
    assert own.startswith(__file__)
    assert "cross_entropy" in own
    assert "functional.py" in library
    shown = capsys.readouterr().out
    assert shown.count(own) == 1, shown
    assert "raised what `first` raised" in shown
    assert "explained_by" not in found[1].evidence


def test_a_loop_without_an_evaluation_is_told_what_it_lacks(tmp_path: Path):
    """Twelve gates of a fork failed with `Expected state_dict to be dict-like`, and no word of the evaluation that a rehearsal has not."""
    loop = Gate("loop", "C1", "", lambda c: c.train([], torch.nn.Linear(2, 2)))
    (found,) = runner.run_gates([loop], context(tmp_path), known={}, console=Console())
    own, hint, _ = found.remedy.splitlines()
    assert "model.load_state_dict(kept)" in own
    assert "before the first one" in hint
    other = Gate("other", "C1", "", lambda _: torch.nn.Linear(2, 2).load_state_dict(None))
    assert (
        "before the first one"
        not in runner.run_gates([other], context(tmp_path), known={}, console=Console())[0].remedy
    )


def test_gates_that_failed_are_noted_for_later_ones(tmp_path: Path):
    """`tiny-data` does not train for minutes then."""
    ran: list[str] = []
    now = context(tmp_path)
    now.cfg.gates.waive = ("waived",)
    runner.run_gates([gate(n, n == "good", ran) for n in ("waived", "good", "bad")], now, known={}, console=Console())
    assert now.failed == ["bad"]


def test_a_measured_cause_comes_before_a_list(tmp_path: Path):
    ran: list[str] = []
    measured = Gate(
        "measured",
        "C1",
        "",
        lambda _: Finding(False, "by a number", "", "a list", cause="a known mistake"),
        explains=True,
    )
    gates = [gate("loss", False, ran, symptom=True), gate("listed", False, ran, explains=True), measured,
             gate("later", False, ran, explains=True)]  # fmt: skip
    found = runner.run_gates(gates, context(tmp_path), known={}, console=Console(quiet=True))
    assert found[0].remedy.splitlines()[0] == "a known mistake (the gate `measured` fails, too: by a number)"
    assert found[0].evidence["explained_by"] == "measured"
    assert ran == ["loss", "listed", "later"], "a measured cause ends the search"


def test_a_symptom_that_nothing_explains_keeps_its_causes(tmp_path: Path):
    ran: list[str] = []
    gates = [gate("loss", False, ran, symptom=True), gate("formula", True, ran, explains=True)]
    found = runner.run_gates(gates, context(tmp_path), known={}, console=Console(quiet=True))
    assert found[0].remedy == "loss cause\nloss second cause"
    assert "explained_by" not in found[0].evidence
    ran.clear()
    runner.run_gates(
        [gate("loss", True, ran, symptom=True), gates[1]], context(tmp_path), known={}, console=Console(quiet=True)
    )
    assert ran == ["loss", "formula"], "where nothing fails the order is that of the list"


@pytest.mark.parametrize(
    ("got", "due", "said"), [(6.0, 2.0, "three"), (2.0, 2.0, ""), (5.0, 2.0, ""), (1.0, 0.0, ""), (2.0, 2.001, "")]
)
def test_a_number_that_is_off_by_a_known_factor_names_its_cause(got: float, due: float, said: str):
    found = gradient.ratio(got, due, {"three": 3.0, "one": 1.0, "none": 0.0})
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_an_exception_with_a_picture_in_it_is_cut(tmp_path: Path):
    def check(_context) -> Finding:
        return {}[b"\xe9" * 60_000]

    one = SimpleNamespace(**{**vars(context(tmp_path)), "once": lambda key, make: 0, "memo": {}})
    (found,) = runner.run_gates([Gate("broken", "C1", "", check)], one, known={}, console=Console(quiet=True))
    assert found.measured.startswith("raised KeyError")
    assert len(found.measured) < 2 * runner.LONGEST
    assert max(map(len, found.evidence["traceback"])) < 20 * runner.LONGEST


def test_a_verdict_is_one_line_even_if_it_quotes_a_text_of_several(capsys):
    """Answers of Qwen3 begin with "<think>\\n\\n</think>\\n\\n": the gate `answers` printed two of them over ten lines."""
    verdict = Verdict("answers", "X4", "title", "pass", "sample 6: <think>\n\n</think>\n\ngreen", "needed", "", 0.1)
    runner._show(verdict, Console())
    assert capsys.readouterr().out == "  pass   answers       sample 6: <think>\\n\\n</think>\\n\\ngreen  [0.1 s]\n"
