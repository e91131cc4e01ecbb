"""Secrets in settings are used and never written; text from data, settings, metrics and files is text on the page, never markup."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from trainworthy.core.base import masking

from tests.core.test_report import epochs, lines, put
from tests.helpers.commands import QUICK, assert_refused, holds, stop

SECRET = "wq7-very-private-41"
HEAD = 'class Config(core.Config):\n    """Settings of vision/classify."""\n'
SETTING = (HEAD, HEAD + '\n    api_key: str = ""\n    """Of a service."""\n')
SMOOTHED = 'F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")'


def holders(folder: Path, secret: str = SECRET) -> list[str]:
    """Every file under `folder` that holds the secret."""
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]


@pytest.fixture
def keyed(fork):
    """A fork with a setting `--api-key`, which writes down whether it got the real value."""
    loop = (
        "    for step in run.steps(stage):\n",
        '    Path("used.txt").write_text(str(len(cfg.api_key)))\n    for step in run.steps(stage):\n',
    )
    return lambda *hunks: fork(SETTING, loop, *hunks)


def test_a_secret_setting_is_used_and_never_written(keyed, launch, tmp_path: Path):
    path = keyed()
    done = launch("run", path.name, *QUICK, "--api-key", SECRET, code=0)
    assert (tmp_path / "used.txt").read_text() == str(len(SECRET)), "the run works with the real value"
    assert SECRET not in done.shown
    assert not holders(tmp_path / "runs")
    args = json.loads((done.folder() / "args.json").read_text())
    assert args["settings"]["api_key"] == masking.HIDDEN
    assert args["argv"][-2:] == ["--api-key", masking.HIDDEN]
    page = (done.folder() / "report.html").read_text()
    assert "--api-key" in page
    again = launch("run", path.name, *QUICK, "--config", str(done.folder() / "args.json"), code=2)
    holds(again.stderr, "--api-key", "value again")


def test_a_failed_gate_prints_and_keeps_a_command_without_the_secret(keyed, launch, tmp_path: Path):
    path = keyed((SMOOTHED, f"20.0 * {SMOOTHED}"))
    done = launch("check", path.name, "--only", "initial-loss", f"--api-key={SECRET}", code=3)
    assert f"--api-key={masking.HIDDEN}" in done.stderr
    assert SECRET not in done.shown
    assert (done.folder() / "gates" / "initial-loss" / "repro.py").is_file()
    assert not holders(tmp_path / "runs")


def test_resume_asks_for_the_secret_again_and_goes_on_with_it(keyed, launch, tmp_path: Path):
    path = keyed()
    code, said = stop("run", path.name, "--train.epochs", "2", *QUICK[4:], "--run.save-every", "0.1",
                      "--api-key", SECRET, cwd=tmp_path, once="runs/*/*/checkpoints/*/step-*")  # fmt: skip
    assert code == 5, said
    assert SECRET not in said
    (folder,) = {p.parent for p in tmp_path.glob("runs/*/*/args.json")}
    (tmp_path / "used.txt").unlink()
    assert_refused(launch("resume", str(folder)), "--api-key", f"trainworthy resume {folder} --api-key VALUE")
    launch("resume", str(folder), "--optim.lr", "1", code=2)
    launch("resume", str(folder), "--api-key", SECRET, code=0)
    assert (tmp_path / "used.txt").read_text() == str(len(SECRET))
    assert not holders(tmp_path / "runs")


def test_a_secret_from_the_environment_is_found_again_by_itself(fork, launch, tmp_path: Path):
    """`api_key: str = os.environ.get(...)`: the recipe's own file gives it, at the start as at a resume."""
    values = {"hub": {"api_key": SECRET, "token_count": 3, "url": "u"}, "eos_token": "</s>", "password": ""}
    assert masking.settings(values) == {**values, "hub": {**values["hub"], "api_key": masking.HIDDEN}}
    assert masking.defaults(values, ["--lr", "1"]) == {"hub.api_key": SECRET}
    assert masking.defaults(values, ["--hub.api_key=x"]) == {}, "what was given by hand is asked for"


@pytest.mark.verify
def test_several_seeds_keep_the_secret_to_themselves(keyed, launch, tmp_path: Path):
    path = keyed()
    done = launch("run", path.name, "--seeds", "2", *QUICK, "--api-key", SECRET, code=0)
    assert SECRET not in done.shown
    assert not holders(tmp_path / "runs")
    (group,) = tmp_path.glob("runs/*/seeds-*")
    (group / "seed-1" / "summary.json").unlink()
    assert_refused(launch("resume", str(group)), f"trainworthy resume {group} --api-key VALUE")


@pytest.mark.parametrize(
    ("name", "secret"),
    [("api_key", True), ("hub.token", True), ("--openai-api-key", True), ("db.password", True), ("x.access-key", True),
     ("eos_token", False), ("pad-token", False), ("max_new_tokens", False), ("tokenizer", False), ("keyboard", False)],
)  # fmt: skip
def test_which_names_mean_a_secret(name: str, secret: bool):
    assert masking.is_secret(name) == secret


def test_a_diff_is_kept_without_what_it_assigns_to_secrets():
    diff = f'+    api_key: str = "{SECRET}"\n-token = \'abc\'\n+    "password": "pq",\n+lr = "3"\n+url = "https://me:pw@host"\n'
    kept = masking.source(diff)
    assert not [w for w in (SECRET, "abc", '"pq"', "me:pw") if w in kept]
    assert '+lr = "3"' in kept


# ---------------------------------------------------------------------------------------------------------------- markup
EVIL = '"><x-evil onload="1">&lt;'


class Tags(HTMLParser):
    """Every tag and attribute that a browser would see."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen |= {tag, *(name for name, _ in attrs)}


def harmless(text: str) -> None:
    """No hostile text has become an element or an attribute."""
    tags = Tags()
    tags.feed(text)
    assert not {"x-evil", "onload"} & tags.seen, re.findall(r".{60}<x-evil.{20}", text)[:3]
    assert "x-evil" in text, "it is shown, as text"


def hostile(run: Path) -> Path:
    """A finished run in which every name and text that comes from elsewhere is markup."""
    run.mkdir(parents=True)
    name, group = f"m{EVIL}", f"g{EVIL}"
    rows = [{k.replace("accuracy", name): v for k, v in r.items()} for r in epochs([0.5, 0.7, 0.8, 0.85, 0.88])]
    lines(run / "epoch_metrics.jsonl", rows)
    logged = {
        "step/loss": 1.0,
        f"step/{EVIL}": 0.5,
        f"step/{group}/{name}": 2.0,
        "step/lr": 1e-3,
        f"step/lr/{EVIL}": 1e-3,
    }
    lines(run / "step_metrics.jsonl", [{"step": i + 1, **logged, "step/grad_norm": 1.0} for i in range(40)])
    texts = dict.fromkeys(("stage", "rows", "title", "measured", "needed", "remedy", "reason", "remembered"), EVIL)
    verdict = {
        **texts,
        "id": f"gate{EVIL}",
        "verdict": "fail",
        "seconds": 1.0,
        "evidence": {EVIL: EVIL, "curve": [1.0, 2.0]},
    }
    passed = {
        **verdict,
        "id": f"other{EVIL}",
        "verdict": "waived",
        "evidence": {"gradient": {EVIL: 1.0}, "loss": {EVIL: 1.0}},
    }
    put(run / "gates.json", {"enabled": True, "seconds": 2.5, "gates": [{**verdict, "verdict": "pass"}, passed]})
    put(run / "monitors.json", {"monitors": [{**verdict, "verdict": "advice"}]})
    field = {
        "role": EVIL,
        "dtype": EVIL,
        "non_finite_samples": 0,
        "shape": {},
        "mean": [0.5],
        "std": [0.5],
        "invalid": {},
    }
    field |= {
        "classes": {EVIL: 37, "cat": 3},
        "per_class": {"min": 3, "median": 37, "max": 37},
        "lengths": {EVIL: {EVIL: 1}},
    }
    field["fabricated"] = {"mean": 1, "min": 0, "max": 1}
    split = {"samples": 9, "read": 9, "unique_contents": 9, "fields": {EVIL: field}, "notes": {EVIL: EVIL}}
    text = {"exact": 1, "near": 1, "chunks": 1, "longest_chunks": [EVIL]}
    put(run / "data.json", {"splits": {"train": split, "val": split, EVIL: split},
                            "overlap": {"exact": 7, "near": None, "groups": {EVIL: [1]}, "texts": {EVIL: text}}})  # fmt: skip
    put(run / "args.json", {"recipe": f"{EVIL}.py", "preset": EVIL, "argv": [EVIL, f"--{EVIL}", EVIL], "start": {
        "file": EVIL, "share": 1.0, "missing": [], "mismatched": [], "unexpected": [], "sha256": "0" * 64},
        "settings": {"train": {"epochs": 5, "batch_size": 8, EVIL: EVIL}, EVIL: EVIL, "run": {"seed": EVIL}}})  # fmt: skip
    put(
        run / "environment.json",
        {"versions": {EVIL: EVIL}, "commit": EVIL, "diff": EVIL, "devices": [EVIL], "platform": EVIL},
    )
    put(run / "summary.json", {
        "metric": name, "higher_is_better": True, "floor": 0.1, "ceiling": 1.0, "recipe": EVIL, "question": EVIL, "stage": EVIL,
        "baselines": {EVIL: {name: 0.6, EVIL: 1.0}}, "best_known": EVIL, "reported": {"weights": "final", "step": 40, name: 0.88},
        "metrics": {name: 0.9, f"recall/{EVIL}": 0.95, EVIL: 0.4}, "final": {"step": 40, f"val/{name}": 0.9},
        "n_best": [{"step": 32, name: 0.9}], "evaluations": 5, "seeds": [0], "steps": 40, "planned_steps": 80, "epochs": 5,
        "parameters": 1, "trained_parameters": 1, "parameters_per_sample": 1.0, "train_seconds": 3.2, "skipped_steps": [],
        "figures": {
            f"a{EVIL}": {"values": [[1, 0], [0, 1]], "rows": [EVIL, "b"], "columns": [EVIL, "b"], "axes": [EVIL, EVIL]},
            f"b{EVIL}": [{"caption": EVIL, "image": [[0, 255], [255, 0]], "good": None}],
            f"c{EVIL}": {"x": [1, 2], "y": [1, 2], "error": None, "named": {EVIL: [1, 2]}, "diagonal": True, "axes": [EVIL, EVIL],
                         "note": EVIL}}})  # fmt: skip
    for part in ("train", "val"):
        (run / "previews" / part).mkdir(parents=True)
        put(run / "previews" / part / "captions.json", [EVIL])
    lines(run / "previews" / "predictions.jsonl", [{"step": 8, "captions": [EVIL], "good": [0.5]}])
    return run


def test_nothing_that_comes_from_elsewhere_is_markup_on_the_page(launch, tmp_path: Path):
    from trainworthy.core.report.card import write_card

    run = hostile(tmp_path / "runs" / "toy" / "1")
    write_card(run)
    card = (run / "card.md").read_text()
    assert "<x-evil" not in card
    launch("report", str(run), code=0)
    harmless((run / "report.html").read_text())
    assert all(re.fullmatch(r"[\w.-]+\.png", p.name) for p in (run / "plots").iterdir())
    assert not list(tmp_path.rglob("*x-evil*")) or all(p.parent == run / "plots" for p in tmp_path.rglob("*x-evil*"))


def test_the_page_of_several_seeds_escapes_a_metrics_name(launch, tmp_path: Path):
    group = tmp_path / "runs" / "toy" / "seeds-1"
    for seed in range(2):
        hostile(group / f"seed-{seed}")
    put(group / "seeds.json", {"recipe": EVIL, "argv": [EVIL], "seeds": [0, 1], "at_once": 1})
    launch("report", str(group), code=0)
    harmless((group / "report.html").read_text())
    assert "<x-evil" not in (group / "card.md").read_text()
