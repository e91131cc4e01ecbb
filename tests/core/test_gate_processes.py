"""Gates in several processes (`--gates.jobs`): each runs once, and verdicts, evidence and remembered passes are those of one process."""

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from trainworthy.core.base.console import Console
from trainworthy.core.base.settings import Config, Train
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates.claims import Claims
from trainworthy.core.gates.gate import Gate
from trainworthy.core.gates.runner import run_gates
from trainworthy.core.session import checking, gate_processes

from tests.conftest import Done, patched
from tests.core.test_explained import context, gate
from tests.helpers.commands import assert_refused, outputs, start, wait_until

GATES = "gates=[gates.scale, "
PAIR = """gates=[core.Gate("waits", "C1", "it waits for the other process", waits), core.Gate("answers", "C1", "it answers", answers),
               gates.scale, """
FUNCTIONS = """
def waits(context):
    for _ in range(1200):
        if Path("answer").exists():
            return core.Finding(Path("answer").read_text() != str(os.getpid()), "another process answered", "")
        time.sleep(0.1)
    return core.Finding(False, "no other process answered", "")


def answers(context):
    Path("answer").write_text(str(os.getpid()))
    return core.Finding({ok}, "it has run", "nothing", "its cause", batch={{"x": torch.zeros(2)}})


def train("""
IMPORTS = ("import torch\n", "import os\nimport time\nfrom pathlib import Path\n\nimport torch\n")
ONLY = ("--gates.jobs", "2", "--only", "schema,initial-loss,waits,answers,formula")


def rows(folder: Path) -> dict[str, dict]:
    found = json.loads((folder / "gates.json").read_text())["gates"]
    return {row["id"]: row for row in found}


def pair(fork: Callable[..., Path], *, ok: bool) -> Path:
    return fork(IMPORTS, (GATES, PAIR), ("\ndef train(", FUNCTIONS.format(ok=ok)))


def test_two_processes_share_the_gates(fork: Callable[..., Path], launch: Callable[..., Done], tmp_path: Path):
    pair(fork, ok=True)
    done = launch("check", "mine.py", *ONLY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 gates passed" in done.stdout
    (folder,) = tmp_path.glob("runs/*/checks/*/")
    assert [*rows(folder)] == ["schema", "initial-loss", "waits", "answers", "formula"]
    alone = launch("check", "mine.py", "--only", "schema,initial-loss,formula")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    (other,) = {*tmp_path.glob("runs/*/checks/*/")} - {folder}
    for name, row in rows(other).items():
        assert {k: v for k, v in rows(folder)[name].items() if k != "seconds"} == {
            k: v for k, v in row.items() if k != "seconds"
        }


def test_evidence_of_the_other_process_is_in_the_run_folder(
    fork: Callable[..., Path], launch: Callable[..., Done], tmp_path: Path
):
    pair(fork, ok=False)
    done = launch("check", "mine.py", *ONLY)
    assert done.returncode == 3, done.stdout + done.stderr
    (folder,) = tmp_path.glob("runs/*/checks/*/")
    assert rows(folder)["answers"]["verdict"] == "fail"
    assert sorted(p.name for p in (folder / "gates" / "answers").iterdir()) == ["batch.safetensors", "repro.py"]
    assert "likely causes its cause" in done.stdout
    assert (folder / "report.html").is_file()


def test_a_signal_ends_all_processes(fork: Callable[..., Path], tmp_path: Path):
    fork(
        IMPORTS, (GATES, PAIR), ("\ndef train(", FUNCTIONS.format(ok=True).replace('Path("answer").exists()', "False"))
    )
    child = start("check", "mine.py", "--gates.jobs", "2", "--only", "waits,answers", cwd=tmp_path)
    wait_until((tmp_path / "answer").exists, child=child)
    helpers = psutil.Process(child.pid).children(recursive=True)
    assert helpers
    child.send_signal(signal.SIGTERM)
    ((code, text),) = outputs([child], 30)
    assert code == 128 + signal.SIGTERM, text
    assert not psutil.wait_procs(helpers, timeout=5)[1]


def test_several_ranks_run_what_compares_them_and_share_the_rest(
    fork: Callable[..., Path], launch: Callable[..., Done], tmp_path: Path
):
    together = 'core.Gate("together", "C1", "", together, compares_ranks=True), core.Gate("waits", '
    counts = """
def together(context):
    size = context.accelerator.num_processes * context.cfg.train.accumulate
    Path(f"rank-{os.getpid()}").write_text(f"{context.accelerator.num_processes} {size}")
    return core.Finding(True, "", "")


def waits("""
    mine = pair(fork, ok=True)
    mine.write_text(patched(mine.read_text(), ('core.Gate("waits", ', together), ("\ndef waits(", counts)))
    words = ("--only", "schema,together,waits,answers,formula")
    done = launch("check", "mine.py", "-n", "2", "--gates.jobs", "2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 gates passed" in done.stdout
    assert [p.read_text() for p in tmp_path.glob("rank-*")] == ["2 2"] * 2
    assert (tmp_path / "answer").is_file()
    assert "ended early" not in done.stdout


def test_a_helper_that_crashes_is_reported(fork: Callable[..., Path], launch: Callable[..., Done]):
    crash = 'if "TRAINWORTHY_GATES" in os.environ:\n    raise SystemExit("one process is gone")\n'
    fork(("import torch\n", f"import os\n\nimport torch\n\n{crash}"))
    done = launch("check", "mine.py", "--gates.jobs", "2", "--only", "schema,schedule,wiring")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 gates passed" in done.stdout
    assert "a further process of --gates.jobs ended early: error: one process is gone" in done.stdout


def test_helpers_of_several_ranks_leave_them_the_gates_that_compare_ranks(tmp_path: Path):
    ran: list[str] = []
    gates = [replace(gate(name, True, ran), compares_ranks=name == "b") for name in "abc"]
    helper = replace(shared(tmp_path, main=False, works=lambda: True), ranks=2)
    found = run_gates(gates, context(tmp_path), known={}, console=Console(quiet=True), claims=helper)
    assert (ran, [v.id for v in found]) == (["a", "c"], ["a", "c"])


def test_a_helper_of_several_ranks_keeps_the_size_of_their_micro_batches():
    cfg = Config(train=Train(accumulate=2))
    assert gate_processes.micro_batches(cfg, 4) == ["--train.accumulate", "8"]
    assert gate_processes.micro_batches(cfg, 1) == []


def test_settings_that_share_no_gates_are_refused(launch: Callable[..., Done]):
    words = ("check", "vision/classify", "-n", "2", "--gates.jobs", "2", "--shard", "full")
    assert_refused(launch(*words), "--gates.jobs 2 and --run.shard full", "all processes together")
    assert_refused(launch("check", "vision/classify", "--gates.jobs", "0"), "--gates.jobs must be at least 1")


def shared(folder: Path, *, main: bool, works: Callable[[], bool]) -> Claims:
    return Claims(folder, main=main, goes_on=works, evidence=folder / ("main" if main else "other"))


def test_each_gate_runs_once_and_a_symptom_is_explained(tmp_path: Path):
    ran: list[str] = []
    gates = [gate(f"g{i}", True, ran) for i in range(40)]
    views = [shared(tmp_path, main=main, works=lambda: True) for main in (True, False, False)]
    with ThreadPoolExecutor() as pool:
        found = [
            *pool.map(
                lambda c: run_gates(gates, context(tmp_path), known={}, console=Console(quiet=True), claims=c), views
            )
        ]
    assert sorted(ran) == sorted(g.id for g in gates)
    assert [v.id for v in found[0]] == [g.id for g in gates]


def test_gates_of_a_process_that_ended_run_here(tmp_path: Path):
    ran: list[str] = []
    other = shared(tmp_path, main=False, works=lambda: True)
    assert other.take("b")
    assert not other.take("b")
    found = run_gates([gate(name, True, ran) for name in "abc"], context(tmp_path), known={}, console=Console(quiet=True),
                      claims=shared(tmp_path, main=True, works=lambda: False))  # fmt: skip
    assert ran == ["a", "c", "b"]
    assert [v.id for v in found] == ["a", "b", "c"]


def test_a_process_whose_starter_ended_takes_nothing(tmp_path: Path):
    ran: list[str] = []
    found = run_gates([gate("a", True, ran)], context(tmp_path), known={}, console=Console(quiet=True),
                      claims=shared(tmp_path, main=False, works=lambda: False))  # fmt: skip
    assert (ran, found) == ([], [])


def test_a_verdict_arrives_with_sources_and_evidence(tmp_path: Path):
    failing = Gate("bad", "C1", "", lambda _: Finding(False, "measured", "needed", "cause"))
    home = tmp_path / "other"
    other = Claims(tmp_path, main=False, goes_on=lambda: True, evidence=home, sources=lambda: {"late.py": "1"})
    (verdict,) = run_gates([failing], context(home), known={}, console=Console(quiet=True), claims=other)
    main = shared(tmp_path, main=True, works=lambda: True)
    assert main.wait("bad") is not None
    assert asdict(main.get("bad")) == asdict(verdict)
    assert main.others_sources == {"late.py": "1"}
    assert (tmp_path / "main" / "gates" / "bad" / "repro.py").is_file()


def test_a_helper_reads_no_remembered_verdicts(monkeypatch):
    """Its folder is none of `checks`, and a check runs every gate."""
    monkeypatch.setattr(checking.gate_cache, "read", lambda _mark: ({"schema": {}}, {}))
    monkeypatch.setattr(checking.recipes, "unchanged", lambda *_: True)
    session = SimpleNamespace(folder=Path("one/two"), recipe=None, accelerator=SimpleNamespace(num_processes=1))
    cfg = SimpleNamespace(gates=SimpleNamespace(remember=True))
    assert checking._remembered(session, cfg, "mark") == ("mark", {"schema": {}}, {})
    monkeypatch.setenv(gate_processes.FOLDER, "three")
    assert checking._remembered(session, cfg, "mark") == ("mark", {}, {})


@pytest.mark.verify
@pytest.mark.parametrize("recipe", ["vision/classify", "rl/dqn", "distill/logits"])
def test_whole_checks_agree(recipe: str, launch: Callable[..., Done], tmp_path: Path):
    found = []
    for jobs in ("1", "3"):
        done = launch("check", recipe, "--gates.jobs", jobs, "--run.out", f"runs-{jobs}")
        assert done.returncode == 0, done.stdout + done.stderr
        (folder,) = tmp_path.glob(f"runs-{jobs}/*/checks/*/")
        assert not any(v["remembered"] for v in rows(folder).values())  # the first check has written its passes
        found.append({k: (v["verdict"], v["measured"], v["reason"]) for k, v in rows(folder).items()})
    assert found[0] == found[1]
