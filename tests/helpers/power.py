"""`python -m tests.helpers.power [RECIPE ...]`: how often each gate stops a planted bug, over 20 seeds, and how often it is quiet.

Each gate is asked alone about one planted bug, in the first recipe of RECIPES that has one for it; the unchanged recipe meets every
gate. Finished runs are kept in docs/power.jsonl, so that the same command goes on; docs/power.md is written from it.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from trainworthy.core.gates import order
from trainworthy.core.recipe.registry import find

from tests.conftest import ROOT, collected, patched
from tests.helpers.commands import trainworthy
from tests.helpers.plant import Plant

SEEDS, QUIET_SEEDS = range(20), range(5)
RECIPES = ("vision/classify", "vision/segment", "llm/pretrain", "rl/ppo", "rl/dqn", "rl/sac", "distill/logits", "diffusion/pixel",
           "diffusion/flow")  # fmt: skip
JOURNAL, PAGE = ROOT / "docs" / "power.jsonl", ROOT / "docs" / "power.md"
HEAD = """# Power of the gates

How often does each gate stop a planted bug, and how often does it pass unchanged recipes? The seeds are those that were run so far (from 0;
20 are planned).

- Each gate has one planted bug, in the cheapest recipe that has one. The gate runs alone, so that no other gate can stop the bug first.
- *Skipped*: the gate does not apply, and reports why.
- Gates whose planted bugs are only in larger recipes are not in the table.

The page is written by `python -m tests.helpers.power`. All planted bugs at fewer seeds: [results of `make verify`](verify.md).

| gate | planted bug | in | bug stopped | unchanged recipes: passed | stopped | skipped |
|---|---|---|---|---|---|---|
"""


def chosen() -> dict[str, Plant]:
    """{gate: planted bug}, in the order of the gates."""
    known = [p for p in collected("planted_*.py", "PLANTS") if not p.missed]
    plants = sorted((p for p in known if p.recipe in RECIPES), key=lambda p: RECIPES.index(p.recipe))
    first: dict[str, Plant] = {}
    for plant in plants:
        first.setdefault(plant.gate, plant)
    ids = [g.id for g in order.ORDER]
    return {g: first[g] for g in sorted(first, key=lambda g: (ids.index(g) if g in ids else len(ids), g))}


def verdicts_of(recipe: str, seed: int, plant: Plant | None = None) -> dict[str, str]:
    """{gate: verdict} of a recipe, or of a planted bug's gate."""
    with tempfile.TemporaryDirectory() as name:
        source = (ROOT / "recipes" / f"{recipe}.py").read_text()
        words = [recipe]
        if plant:
            Path(name, "mine.py").write_text(patched(source, plant.hunk))
            words = ["mine.py", "--only", plant.gate, *plant.argv]
        done = trainworthy("check", *words, "--run.seed", seed, cwd=Path(name))
        folders = [*Path(name).glob("runs/*/checks/2*")]
        if done.returncode not in (0, 3) or len(folders) != 1:
            raise SystemExit(
                f"{recipe} {plant and plant.id} seed {seed}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            )
        verdicts = [v for f in [*folders[0].glob("gates.json"), *folders[0].glob("stages/*/gates.json")]
                    for v in json.loads(f.read_text())["gates"]]  # fmt: skip
    rank = ("skip", "pass", "advice", "fail").index
    found: dict[str, str] = {}
    for v in verdicts:
        found[v["id"]] = max(found.get(v["id"], "skip"), v["verdict"], key=rank)
    return found


def kept() -> list[dict]:
    """What was run, one entry for each recipe or planted bug and seed."""
    return [json.loads(line) for line in JOURNAL.read_text().splitlines()] if JOURNAL.exists() else []


def missing(recipes: list[str]) -> Iterator[tuple[str, int, Plant | None]]:
    """What is still to run: a seed at a time, planted bugs first."""
    done = {(k["recipe"], k["bug"], k["seed"]) for k in kept()}
    plants = [p for p in chosen().values() if p.recipe in recipes]
    for seed in SEEDS:
        todo = [*((p.recipe, seed, p) for p in plants), *((r, seed, None) for r in recipes if seed in QUIET_SEEDS)]
        yield from (t for t in todo if (t[0], t[2].id if t[2] else "", seed) not in done)


def page() -> str:
    """The table of all that was run."""
    runs, rows = kept(), []
    quiet: dict[str, Counter] = {}
    for k in runs:
        if not k["bug"]:
            for gate, verdict in k["verdicts"].items():
                quiet.setdefault(gate, Counter())[verdict] += 1
    for gate, plant in chosen().items():
        said = [k["verdicts"].get(gate) == "fail" for k in runs if k["bug"] == plant.id and k["recipe"] == plant.recipe]
        if said:
            own = quiet.get(gate, Counter())
            rows.append(f"| `{gate}` | `{plant.id}` | {plant.recipe} | {sum(said)} of {len(said)} | {own['pass'] + own['advice']} | "
                        f"{own['fail']} | {own['skip']} |\n")  # fmt: skip
    healthy = Counter(k["recipe"] for k in runs if not k["bug"])
    told = ", ".join(f"{r} ({n})" for r, n in sorted(healthy.items(), key=lambda x: RECIPES.index(x[0])))
    return f"{HEAD}{''.join(rows)}\nUnchanged recipes, and at how many seeds: {told}.\n"


def main(recipes: list[str]) -> None:
    """Run what is missing, and write the page after each run."""
    for recipe, seed, plant in missing(recipes or [*RECIPES]):
        find(recipe)
        entry = {
            "recipe": recipe,
            "bug": plant.id if plant else "",
            "seed": seed,
            "verdicts": verdicts_of(recipe, seed, plant),
        }
        with JOURNAL.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        PAGE.write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
