"""The record of `make verify` grows by what each session ran, and tells misses first."""

from pathlib import Path
from types import SimpleNamespace

from tests.helpers.record import Record


def ran(record: Record, node: str, outcome: str = "passed", **more) -> None:
    record.pytest_runtest_logreport(
        SimpleNamespace(nodeid=f"tests/{node}", when="call", outcome=outcome, user_properties=list(more.items()))
    )


def test_sessions_add_up_and_the_newest_run_counts(tmp_path: Path):
    page = tmp_path / "verify.md"
    first = Record(page)
    ran(first, "test_gates.py::test_caught[no-zero-grad]", first="wiring", seconds=0.7)
    ran(first, "test_gates.py::test_caught_at_every_seed[no-zero-grad-3]", "failed", first="none", seconds=9.0)
    ran(first, "test_check.py::test_caught[no-zero-grad]")
    ran(first, "test_rl_monitors.py::test_quiet[3-500]", "failed")  # no case of the record
    assert not page.exists(), "the page is written at the end, the lines as they come"

    second = Record(page)
    ran(
        first, "test_gates.py::test_caught_at_every_seed[no-zero-grad-4]", first="wiring", seconds=0.7
    )  # at the same time
    ran(second, "test_quiet.py::test_quiet_at_every_seed[ok-24-balanced-sampling-2]", "failed")
    second.pytest_sessionfinish()
    told = page.read_text()
    assert "3 of 4: 0.750" in told, told
    assert "- not caught: vision/classify, `no-zero-grad`, seed 3" in told, told
    assert "- false alarm: vision/classify, `ok-24-balanced-sampling`, seed 2" in told, told
    assert "| vision/classify | `no-zero-grad` | none, wiring | 0, 4 |" in told, told
    assert "| plain scripts | `no-zero-grad` |  | 0 |" in told, told

    mended = Record(page)
    ran(mended, "test_gates.py::test_caught_at_every_seed[no-zero-grad-3]", first="wiring", seconds=0.7)
    mended.pytest_sessionfinish()
    assert "| vision/classify | `no-zero-grad` | wiring | 0, 3, 4 |" in page.read_text()
    assert "not caught" not in page.read_text().partition("## Misses first")[2]
