"""What bench/peers.py takes from the scripts for other tools."""

import ast
import importlib.util
from pathlib import Path

from tests.guard.score import cases

SPEC = importlib.util.spec_from_file_location("peers", Path(__file__).parents[2] / "bench" / "peers.py")
peers = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(peers)


def test_every_case_has_parts_and_a_short_run_where_its_loop_calls_backward():
    known = [c for name in peers.SETS for c in cases(name, "both", "all")]
    assert len(known) == 103
    assert peers.CHANGED.keys() <= {id for _, id, _ in known}
    for _, id, _ in known:
        parts = peers.PARTS[id.partition("--")[0]]._replace(**peers.CHANGED.get(id, {}))
        for expression in parts:
            if isinstance(expression, str):
                compile(expression, id, "eval")
    for _, _, text in cases("eighth", "both", "all"):
        if "policy_loss.backward" not in text:  # its loops call a function that does
            ast.parse(short := peers.shortened(text, 1))
            assert short.count("steps_done.append(1)") == 1


def test_names_before_the_first_step_and_what_preflight_is_given(tmp_path: Path):
    script = tmp_path / "diabetes_mlp.py"
    script.write_text((peers.ROOT / "tests/guard/scripts/eighth/diabetes_mlp.py").read_text())
    seen = []

    def at_step(names):
        seen.append(
            {f: eval(getattr(peers.PARTS[script.stem], f), names) for f in ("inputs", "targets", "model", "loss")}
        )
        raise peers.Enough

    peers.run_script(script, "True", at_step)
    (parts,) = seen
    assert parts["loss"](parts["model"](parts["inputs"]), parts["targets"]).item() > 0
