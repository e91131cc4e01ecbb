"""TensorBoard beside a run, `--on-end`, and what a run costs, through the real command."""

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from trainworthy.core.monitoring import cost
from trainworthy.core.monitoring.board import Board, answers

from tests.core.test_seeds import group
from tests.helpers.commands import assert_refused, environment, read, run_folder, start, trainworthy, wait_until

TINY = ("--max-steps", "4", "--train.batch-size", "16", "--gates.no-enabled")


def fetched(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as page:
        return page.read().decode()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, str]:
    """A run with a board and a command at its end: (its folder, what it printed)."""
    home = tmp_path_factory.mktemp("board")
    (home / "end.sh").write_text("env | grep ^TRAINWORTHY_ | sort\nexit 7\n")
    done = trainworthy("run", "vision/classify", *TINY, "--board", "--on-end", "sh end.sh", cwd=home, code=0)
    return run_folder(home), done.stdout + done.stderr


def test_the_board_is_up_before_the_first_step_and_ends_with_the_run(run: tuple[Path, str]):
    _, out = run
    address = re.search(r"board  (http://\S+)", out)
    assert address, out
    assert out.index(address[0]) < out.index("train  4 steps")
    assert "again: trainworthy board runs" in out
    assert not answers(address[1])


def test_the_command_at_the_end_gets_folder_exit_code_and_result(run: tuple[Path, str]):
    folder, out = run
    said = dict(line.split("=", 1) for line in (folder / "on_end.log").read_text().splitlines())
    value = read(folder / "summary.json")["reported"]["accuracy"]
    assert said == {"TRAINWORTHY_RUN": str(folder.absolute()), "TRAINWORTHY_EXIT_CODE": "0", "TRAINWORTHY_ENDED": "done",
                    "TRAINWORTHY_RESULT": f"accuracy {value:.6g}"} | ({k: v for k, v in said.items() if k == "TRAINWORTHY_CACHE"})  # fmt: skip
    assert "on-end FAILED with exit code 7" in out
    assert "on-end" not in (folder / "args.json").read_text()  # a file must not run commands


def test_the_cost_is_measured_and_compared(run: tuple[Path, str], tmp_path: Path):
    folder, out = run
    spent = cost.of_run(folder)
    assert spent["device"] == "cpu"
    assert 1 < spent["seconds"] < 300
    assert 2**27 < spent["peak_memory"] < 2**34
    assert "cost   " in out
    assert "peak memory" in (folder / "report.html").read_text()
    assert re.search(
        r"^Cost of the run: [\d.]+ device-(hours|seconds) \(cpu\), peak memory [\d.]+ GiB",
        (folder / "card.md").read_text(),
        re.M,
    )
    told = json.loads(trainworthy("report", folder, "--json", cwd=tmp_path).stdout)
    assert told["cost"]["device_hours"] == pytest.approx(spent["seconds"] / 3600)
    for name in ("a", "b"):
        for home in group(tmp_path / name, [0.9, 0.91]).glob("seed-*/"):
            shutil.copy(folder / "cost.json", home)
    both = json.loads(trainworthy("compare", "a", "b", "--json", cwd=tmp_path).stdout)
    assert both["a"]["cost"]["device_hours"] == pytest.approx(2 * spent["device_hours"])
    assert "a: cost of 2 seeds" in trainworthy("compare", "a", "b", cwd=tmp_path).stdout


def test_a_failed_gate_runs_the_command_and_a_wrong_setting_does_not(tmp_path: Path):
    words = ("check", "vision/classify", "--only", "overfit", "--optim.lr", "1e-9", "--train.batch-size", "16")
    trainworthy(
        *words,
        "--on-end",
        "echo $TRAINWORTHY_EXIT_CODE $TRAINWORTHY_ENDED > end; echo $TRAINWORTHY_RESULT >> end",
        cwd=tmp_path,
        code=3,
    )
    code, result = (tmp_path / "end").read_text().splitlines()
    assert code == "3 gate failed"
    assert "overfit" in result
    (tmp_path / "end").unlink()
    wrong = trainworthy("run", "vision/classify", "--optim.lrr", "1", "--on-end", "touch end", cwd=tmp_path)
    assert (wrong.returncode, (tmp_path / "end").exists()) == (2, False)
    trainworthy("run", "vision/classify", "--on-end", cwd=tmp_path, code=2)


# ---------------------------------------------------------------------------------------------------------------- board
def test_board_prints_its_address_once_it_answers_and_ends_with_ctrl_c(run: tuple[Path, str]):
    home = run[0].parents[2]
    child = start("board", cwd=home)
    try:
        line = child.stdout.readline()
        url = re.search(r"http://\S+", line)
        assert url, line
        found = wait_until(lambda: json.loads(fetched(url[0].rstrip("/") + "/data/runs")), seconds=60, pause=0.5)
        assert any(run[0].name in name for name in found), found
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=30)
    assert child.returncode == 0
    assert not answers(url[0])


def test_a_board_does_not_outlive_a_killed_run(tmp_path: Path):
    code = ("import sys, time\nfrom pathlib import Path\nfrom trainworthy.core.monitoring.board import Board\n"
            "with Board(Path('.'), ready=lambda url: print(board.child.pid, flush=True)) as board:\n    time.sleep(60)\n")  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, seconds=20)


def test_bad_boards_get_one_message(tmp_path: Path):
    bad = {
        "no folder nothing": ("nothing",),
        "board takes one folder": ("a", "b"),
        "--port needs a number": ("--port", "x"),
        "--port needs a port": ("--port", "99999"),
        "did not start": ("--host", "no.such.host.invalid", "--port", "7123"),
    }
    for message, words in bad.items():
        assert_refused(trainworthy("board", *words, cwd=tmp_path), message)
    off = trainworthy("run", "vision/classify", *TINY, "--board", "--run.no-tensorboard", cwd=tmp_path)
    assert (off.returncode, "--board shows TensorBoard's files" in off.stderr) == (2, True), off.stderr


def test_without_tensorboard_the_message_names_the_package(monkeypatch):
    from trainworthy.core.base.errors import UserError

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        Board(Path("runs"), ready=print)


# ----------------------------------------------------------------------------------------------------------------- cost
def test_energy_is_counted_where_it_can_be_read_and_a_resumed_run_adds_up(tmp_path: Path, monkeypatch):
    """Counters of two processor packages, one of which begins again; a second process of the run adds its own row."""
    import torch

    for n, (now, wrap) in enumerate(((5_000_000, 10_000_000), (9_000_000, 10_000_000))):
        zone = tmp_path / "rapl" / f"intel-rapl:{n}"
        zone.mkdir(parents=True)
        (zone / "energy_uj").write_text(str(now))
        (zone / "max_energy_range_uj").write_text(str(wrap))
    monkeypatch.setattr(cost, "RAPL", tmp_path / "rapl")
    for begin, end in (((5, 9), (6, 1)), ((6, 1), (8, 2))):
        for n, value in enumerate(begin):
            (tmp_path / "rapl" / f"intel-rapl:{n}" / "energy_uj").write_text(str(value * 1_000_000))
        meter = cost.Meter(tmp_path, torch.device("cpu"), 2)
        for n, value in enumerate(end):
            (tmp_path / "rapl" / f"intel-rapl:{n}" / "energy_uj").write_text(str(value * 1_000_000))
        meter.note(now=True)
    found = cost.of_run(tmp_path)
    assert found["joules"] == pytest.approx((1 + 2) + (2 + 1))
    assert found["devices"] == 2
    assert found["device_hours"] == pytest.approx(2 * found["seconds"] / 3600)
    assert "whole processors" in cost.words(found)


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"seconds": "x"}]', '[{"seconds": 3.0, "dev'])
def test_a_cost_that_is_cut_off_is_no_cost(text: str, tmp_path: Path):
    (tmp_path / "cost.json").write_text(text)
    assert cost.of_run(tmp_path) == {}
    assert cost.words({}) == ""
    assert cost.together([{}, {}]) == {}
