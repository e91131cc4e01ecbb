"""Which tests `make test` leaves to `make verify`."""

import pytest

from tests.conftest import ROOT
from tests.helpers import sampling


def test_the_list_names_tests_that_exist():
    gone = [
        test for test in sampling.left_out() if f"def {name(test)}(" not in (ROOT / test.split("::")[0]).read_text()
    ]
    assert not gone, f"renamed or removed; take them out of {sampling.LIST.name}: {gone}"


def name(test: str) -> str:
    return test.split("::")[-1].split("[")[0]


def test_what_is_promised_is_always_run():
    out = [(test.split("::")[0], test.split("::")[-1]) for test in sampling.left_out()]
    for file, tests in sampling.ALWAYS.items():
        for one in tests:
            assert f"def {name(one)}(" in (ROOT / file).read_text(), one
            assert not [case for at, case in out if at == file and one in (case, name(case))]


@pytest.mark.parametrize(
    ("times", "out"),
    [
        ({"a.py::one": 500.0}, set()),  # one test of each file, however long
        ({"a.py::one": 15.0, "a.py::two": 15.0, "b.py::one": 15.0}, {"a.py::two"}),
        ({"a.py::one": 19.0, "a.py::two": 0.9, "a.py::three": 0.8}, {"a.py::one"}),
        ({"tests/core/test_life.py::test_kill_and_resume": 90.0, "tests/core/test_life.py::other[0]": 20.0}, set()),
    ],
)
def test_the_cheapest_tests_of_each_file_are_run(times: dict[str, float], out: set[str]):
    assert set(sampling.choose(times)) == out
