"""Figures in README, pages, list, card and report are those of results files; results without gates say so wherever they stand."""

import json
import re
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainworthy.core import cli
from trainworthy.core.recipe.registry import Entry, recipes

from bench import results
from tests.conftest import ROOT
from tests.helpers.commands import QUICK, holds

DOCS = ROOT / "docs" / "recipes"
MEASURED = {e.id: e.measured for e in recipes() if e.measured}
ROWS = {
    m[1]: m[2]
    for m in re.finditer(r"^\| `(\w+/\w+)` \| .* \| (.*) \| \[page\]", (ROOT / "README.md").read_text(), re.M)
}
NUMBER = re.compile(r"(?<![\w.@-])(-|−)?(\d[\d,]*(?:\.\d+)?)(%?)")
ENDS = re.compile(r"(random|untrained) (-?[\d,.]+)")


def values(found: object) -> Iterator[float]:
    """Every number of a results file."""
    if isinstance(found, dict):
        for v in found.values():
            yield from values(v)
    elif isinstance(found, list):
        for v in found:
            yield from values(v)
    elif isinstance(found, (int, float)) and not isinstance(found, bool):
        yield float(found)


def numbers(text: str) -> Iterator[tuple[str, float, int, bool]]:
    """(as printed, value without its sign, decimals, is it a percentage) of a text."""
    for m in NUMBER.finditer(text):
        digits = m[2].replace(",", "")
        yield m[2] + m[3], float(digits), len(digits.partition(".")[2]), bool(m[3])


def rounds_to(value: float, printed: float, decimals: int) -> bool:
    """Is `value`, or its percentage, `printed` at so many decimals?"""
    return any(abs(abs(v) - printed) <= 0.5 * 10**-decimals + 1e-9 for v in (value, 100 * value))


def held(recipe: str) -> list[float]:
    """What the results files of a recipe hold, and the means over seeds of what each seed has."""
    files = [MEASURED[recipe], *(json.loads(p.read_text()) for p in DOCS.glob(f"{recipe.replace('/', '-')}*.json"))]
    each = [v for found in files for v in values(found)]
    seeds = MEASURED[recipe]["per_seed"]
    return each + [statistics.fmean(r[k] for r in seeds) for k in seeds[0] if k != "seed"]


def test_every_recipe_of_readme_has_a_results_file():
    assert ROWS.keys() == MEASURED.keys()


@pytest.mark.parametrize("recipe", sorted(ROWS))
def test_every_figure_of_readme_stands_in_a_results_file(recipe: str):
    """Whatever has decimals or is a percentage."""
    known = held(recipe)
    loose = [text for text, value, decimals, percent in numbers(ROWS[recipe])
             if (decimals or percent) and not any(rounds_to(v, value, decimals) for v in known)]  # fmt: skip
    assert not loose


@pytest.mark.parametrize("recipe", [r for r in sorted(ROWS) if ENDS.search(ROWS[r])])
def test_what_readme_says_of_the_untrained_model_is_in_the_file(recipe: str):
    for _, text in ENDS.findall(ROWS[recipe]):
        _, value, decimals, _ = next(numbers(text.lstrip("-").rstrip(".,")))
        assert any(rounds_to(v, value, decimals) for v in MEASURED[recipe]["baselines"].values()), text


@pytest.mark.parametrize("recipe", sorted(MEASURED))
def test_the_page_states_what_the_file_holds(recipe: str):
    """The mean, each seed and each baseline, to two digits or more."""
    found = MEASURED[recipe]
    page = list(numbers((DOCS / f"{recipe.replace('/', '-')}.md").read_text()))
    wanted = {
        "mean": found["mean"],
        **{f"seed {r['seed']}": r[found["metric"]] for r in found["per_seed"]},
        **found["baselines"],
    }
    lost = {
        name: v
        for name, v in wanted.items()
        if abs(v) > 1e-3
        and not any(
            rounds_to(v, value, d) and (value == v or len(re.sub(r"\D", "", text).lstrip("0")) > 1)
            for text, value, d, _ in page
        )
    }
    assert not lost


# ------------------------------------------------------------------------------------------------------------- gates off
@pytest.mark.parametrize(
    "path",
    sorted([*DOCS.glob("*.json"), *ROOT.glob("recipes/*/results/*/*.json")]),
    ids=lambda p: f"{p.parent.name}-{p.name}",
)
def test_a_file_of_results_without_gates_says_so_and_has_no_gate_seconds(path: Path):
    found = json.loads(path.read_text())
    settings = found.get("settings") if isinstance(found, dict) else None
    if not isinstance(settings, list) or "per_seed" not in found:
        return
    off = "--gates.no-enabled" in settings
    assert (found.get("gates", "on") == "off") == off
    assert (found["gate_seconds"] is None) == off
    assert off or found["gate_seconds"] > 0
    if off:
        name = path.name.split(".")[0] if path.parent == DOCS else f"{path.parts[-4]}-{path.parent.name}"
        assert re.search(r"gates\s+(were\s+)?(off|left\s+out)", (DOCS / f"{name}.md").read_text(), re.I), (
            f"the page {name}.md does not say so"
        )


@pytest.mark.parametrize("gates", ["on", "off"])
def test_list_says_that_gates_were_off(gates: str, tmp_path: Path, monkeypatch, capsys):
    entry = Entry("toy/toy", tmp_path / "toy.py")
    entry.path.write_text('"""A toy."""')
    file = entry.next_result("tiny", "2026-11-26")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"result": "1 point", "time": "1 s", "gates": gates}))
    monkeypatch.setattr(cli, "recipes", lambda: [entry])
    cli.list_recipes(["list"])
    assert ("gates were off" in capsys.readouterr().out) == (gates == "off")


def test_card_report_and_seeds_say_that_gates_were_off(launch, tmp_path: Path):
    done = launch("run", "vision/classify", "--seeds", "2", *QUICK, code=0)  # gates off
    (group,) = tmp_path.glob("runs/*/seeds-*")
    assert "Gates were off at 2 of 2 seeds" in done.stdout
    assert "gates OFF)" in (group / "seed-0.log").read_text()
    for text in ((group / "card.md").read_text(), (group / "report.html").read_text()):
        assert "Gates were off at 2 of 2 seeds" in text
    card = (group / "seed-0" / "card.md").read_text()
    assert card.index("Gates were off") < card.index("| weights |"), "beside the result"
    page = (group / "seed-0" / "report.html").read_text()
    holds(page, "Gates were OFF", "gates off: nothing was checked")
    again = launch("compare", str(group), str(group), code=2)
    assert "two different groups of seeds" in again.stderr, again.shown
    shutil.copytree(group, tmp_path / "other")
    compared = launch("compare", str(group), str(tmp_path / "other"))
    assert "Gates were off at 2 of 2 seeds" in compared.stdout, compared.shown


def test_gate_seconds_are_those_of_runs_that_proved():
    """A resumed run takes its passes from the gate cache at 0 seconds: its figure is left out, not averaged in."""

    def run(*remembered: str, enabled: bool = True, seconds: float = 8.0) -> dict:
        return {"enabled": enabled, "seconds": seconds, "gates": [{"remembered": r} for r in remembered]}

    assert results.proved([run("", ""), run("", "", seconds=6.0), run("2026-01-01", "2026-01-01", seconds=0.0)]) == {
        "gates": "on", "gate_seconds": 7.0}  # fmt: skip
    assert results.proved([run("", "2026-01-01", seconds=1.0)]) == {"gates": "on", "gate_seconds": None}
    assert results.proved([run(enabled=False, seconds=0.0)]) == {"gates": "off", "gate_seconds": None}


def test_results_keep_what_a_page_quotes_beside_the_metric():
    tables = [
        {"4-shot": {"f1": 0.2, "perplexity": 40.0}, "teacher": {"f1": 1.0}},
        {"4-shot": {"f1": 0.4, "perplexity": 42.0}, "teacher": {}},
    ]
    assert results.all_means(tables) == {"4-shot": {"f1": pytest.approx(0.3), "perplexity": 41.0}, "teacher": {}}


def test_a_second_measurement_is_a_file_of_its_own_and_the_newest_one_counts(tmp_path: Path):
    """Two people who measure at the same time do not write the same file; `full` is not what `list` shows."""
    entry = Entry("toy/toy", tmp_path / "toy.py")
    assert (entry.measured, entry.results()) == ({}, [])
    for preset, date, result in (("tiny", "2026-11-22", "a"), ("tiny", "2026-11-23", "b"), ("tiny", "2026-11-23", "c"),
                                 ("full", "2026-11-24", "d")):  # fmt: skip
        path = entry.next_result(preset, date)
        assert not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"result": result}))
    assert [path.name for path in entry.results()] == [
        "tiny-2026-11-22.json",
        "tiny-2026-11-23.json",
        "tiny-2026-11-23-2.json",
    ]
    assert entry.measured == {"result": "c"}
    assert [path.name for path in entry.results("full")] == ["full-2026-11-24.json"]


def test_every_recipe_has_its_result():
    """Results are in results/NAME/ and are found there."""
    assert MEASURED.keys() == {e.id for e in recipes()}
    assert not [*ROOT.glob("recipes/*/*.results.json"), *ROOT.glob("recipes/*/results/*.results.json")]


def test_the_readme_counts_the_record_s_planted_bugs_and_healthy_variants():
    row = re.compile(r"^\| [a-z/ ]+ \| (\d+) of (\d+) \| [^|]* \| [^|]* \| (\d+) of (\d+) \|", re.M)
    rows = row.findall((ROOT / "docs" / "verify.md").read_text())
    caught, planted, quiet, healthy = (sum(map(int, column)) for column in zip(*rows, strict=True))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{caught} of {planted} have been run" in text
    assert f"Of {healthy} healthy variants {quiet} have been run" in text


def first_scores(page: str, heading: str, *columns: str) -> tuple[int, int]:
    """Sum of a table's cells `N of M`. Those in parentheses are left out; the page says why."""
    section = (ROOT / "docs" / page).read_text().split(f"## {heading}\n")[1]
    table = re.search(r"^\|.*?(?=\n\n)", section, re.M | re.S)[0].splitlines()
    titles, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    cells = [row[titles.index(column)] for row in rows for column in columns]
    assert all(re.fullmatch(r"(\d+ of \d+|\(\d+ of \d+\)|not scored|none (planted|counted))?", c) for c in cells), cells
    scores = [tuple(map(int, c.split(" of "))) for c in cells if re.match(r"\d", c)]
    hits, cases = map(sum, zip(*scores, strict=True))
    return hits, cases


def test_the_readme_and_the_pages_add_up_the_first_scores():
    gates = ("bugs.md", "Bugs by people who had not seen the gates")
    guard = ("guard-scores.md", "Scripts with planted bugs")
    check = ("guard-scores.md", "The same for `trainworthy.check`")
    both = ("alarms: scripts", "alarms: variants")
    stopped = {table: "{} of {}".format(*first_scores(*table, "bugs stopped")) for table in (gates, guard, check)}
    public = first_scores("guard-scores.md", "Public scripts, unchanged", "false alarms")
    sets = first_scores(*guard, *both)
    alarms, scripts = (a + b for a, b in zip(sets, public, strict=True))
    in_recipes = "{} of {}".format(*first_scores(*gates, "false alarms"))
    in_check = "{} of {}".format(*first_scores(*check, *both))
    readme, scores, bugs = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/guard-scores.md", "docs/bugs.md")
    )
    share = f"one healthy script in {scripts / alarms:.0f}"
    holds(readme, f"| in recipes, by the gates | {stopped[gates]} |", f"| in plain scripts, by `guard` | {stopped[guard]} |",
          f"| in plain scripts and trainers, by `trainworthy.check` | {stopped[check]} |",
          f"{share} ({alarms} of {scripts}), `check` on {in_check} scripts, the gates on {in_recipes} uses")  # fmt: skip
    holds(scores, f"| {stopped[guard]} | {sets[0]} of {sets[1]} |", f"| | {public[0]} of {public[1]} |",
          f"| {stopped[check]} | {in_check} |", f"{share} ({alarms} of {scripts})")  # fmt: skip
    holds(bugs, f"{stopped[gates]} bugs were stopped, and {in_recipes} healthy cases")
    holds(" ".join((ROOT / "docs" / "own-scripts.md").read_text().split()), share)
