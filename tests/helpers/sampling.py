"""What `make test` runs of cases that are alike and of long tests, and what is left to `make verify`.

`tests/verify_only.txt` lists the tests that `make test` leaves out for their time. To choose anew, on an idle machine:

  pytest -n 2 --dist loadgroup --junitxml times.xml
  python -m tests.helpers.sampling times.xml
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

LIST = Path(__file__).parents[1] / "verify_only.txt"
SECONDS = 16  # of a test file; the cheapest tests of each file come first
MORE = {  # files that are about many things
    "tests/core/test_check.py": 48, "tests/core/test_gates.py": 120, "tests/core/test_life.py": 80, "tests/core/test_process_end.py": 64,
    "tests/core/test_quiet.py": 56, "tests/guard/test_guard.py": 48, "tests/guard/test_loop.py": 48, "tests/core/test_docs.py": 48,
}  # fmt: skip
ALWAYS = {  # what the README promises, at any cost
    "tests/core/test_life.py": {
        "test_tiny_reaches_its_result_and_its_export_stands_alone", "test_kill_and_resume", "test_accelerate_launch_is_the_same_path",
        "test_two_processes_train_like_one",
    },
    "tests/core/test_package.py": {"test_a_wheel_lives_beside_a_foreign_core"},
    "tests/core/test_process_end.py": {"test_a_closed_terminal_and_slurms_warning_save_and_stop"},
    "tests/core/test_shard.py": {"test_a_sharded_run_goes_on_with_any_number_of_processes"},
    "tests/core/test_check.py": {"test_the_command_says_where_the_evidence_is", "test_quiet[mlp]", "test_caught[validation-in-training]"},
    "tests/core/test_bugs.py": {"test_break_shows_the_bug_and_the_gate"},
    "tests/guard/test_guard.py": {"test_guard_command_is_quiet_on_an_mnist_script"},
    "tests/guard/test_ending.py": {"test_guard_command_follows_a_script_to_its_end"},
}  # fmt: skip
HEAD = "# Left to `make verify`: seconds and test. Written by `python -m tests.helpers.sampling`.\n"


def sample(names: Iterable[Any], *keep: Any) -> list:
    """The names as cases; all but those in `keep` are marked `verify`. A tuple holds the values of several arguments."""
    names = list(names)
    assert {*keep} <= {*names}, f"no cases: {sorted({*keep} - {*names})}"
    return [
        n if n in keep else pytest.param(*(n if isinstance(n, tuple) else (n,)), marks=pytest.mark.verify)
        for n in names
    ]


@cache
def left_out() -> dict[str, float]:
    """Seconds of each test in the list."""
    rows = (line.split(" ", 1) for line in LIST.read_text().splitlines() if not line.startswith("#"))
    return {test: float(seconds) for seconds, test in rows}


def pytest_itemcollected(item) -> None:
    if item.nodeid in left_out():
        item.add_marker("verify")


def choose(times: dict[str, float]) -> dict[str, float]:
    """The tests that are left out: in each file, those that go beyond its seconds."""
    files = defaultdict(list)
    for test, seconds in times.items():
        files[test.split("::")[0]].append((seconds, test))
    out = {}
    for file, tests in files.items():
        spent = 0.0
        for seconds, test in sorted(tests):
            case = test.split("::")[-1]
            always = not {case, case.split("[")[0]}.isdisjoint(ALWAYS.get(file, ()))
            if not always and seconds > 1 and spent and spent + seconds > MORE.get(file, SECONDS):
                out[test] = seconds
            elif not always:
                spent += seconds
    return out


def read(report: Path) -> dict[str, float]:
    """Seconds of each test in a report of `--junitxml`."""
    return {
        f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}": float(case.get("time"))
        for case in ElementTree.parse(report).iter("testcase")
    }


if __name__ == "__main__":
    times = left_out() | read(Path(sys.argv[1]))
    chosen = choose(times)
    LIST.write_text(HEAD + "".join(f"{s:.0f} {t}\n" for t, s in sorted(chosen.items())))
    print(
        f"{len(times) - len(chosen)} tests in {sum(times.values()) - sum(chosen.values()):.0f} s, {len(chosen)} left to make verify"
    )
