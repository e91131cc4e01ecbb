"""usage: trainworthy bugs [RECIPE ...] [--kind planted|healthy|mutants] [--sample N] [settings]

Measures whether the gates catch bugs and pass healthy variants.

  trainworthy bugs vision/classify                        its planted bugs and healthy variants, at seed 0
  trainworthy bugs --kind planted --seeds 0,1,2           every planted bug at three seeds
  trainworthy bugs rl/ppo --kind healthy --sample 5       five of its healthy variants
  trainworthy bugs --mutate vision/classify --sample 40   40 mutants: small changes of its source, one at a time
  trainworthy bugs --mutate rl/ppo --steps 20 --helper recipes/rl/control/models/nets.py    and mutants of a helper module

Each case is a fork on which `trainworthy check` runs in its own process. Finished cases are kept in journal.jsonl by commit, case
and seed, so that the same command continues where it stopped. The result is bugs.html and bugs.json.

A mutant is set aside if it crashes, if nothing changes in a short run (losses and metrics equal to the last bit), or if it does no
measurable harm: a metric inside the range of healthy short runs at one of two seeds. The rest must be stopped by a gate; survivors
are listed with their patch. docs/bugs.md has the rules.

  --kind KIND        planted, healthy or mutants; may be given several times (default: planted and healthy)
  --sample N         N random cases of each recipe and kind; a larger sample contains a smaller one
  --seeds 0,1,2      seeds of planted bugs and healthy variants (mutants: 0 and 1)
  --steps 100        length of the short runs on mutants, in steps
  --part NAME        mutate this part of the stage, too (model, export, ...); default: loss, data, loop, evaluation
  --jobs 2           processes side by side, one thread each
  --to FOLDER        where journal and page go (default: runs/bugs)
  --json             the content of bugs.json

Other words are settings of every run. Planted bugs and healthy variants need a checkout of the source; mutants do not.
Exit codes: 0 done, 2 bad usage, 3 a bug was missed, a mutant survived or a healthy variant was stopped, 5 interrupted."""

import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

from trainworthy.core.base.errors import GATE_FAILED, UserError
from trainworthy.core.bugs import mutation, page, suite
from trainworthy.core.bugs.campaign import Campaign
from trainworthy.core.commands import argument_parser, prints_json, take_number
from trainworthy.core.recipe.registry import find

KINDS = ("planted", "healthy", "mutants")


@prints_json
def main(argv: list[str], output: dict[str, Any]) -> None:
    """Run the cases and write the page; put its content into `output`."""
    rest, sample = take_number(argv[1:], "--sample")
    rest, steps = take_number(rest, "--steps")
    rest, jobs = take_number(rest, "--jobs")
    parser = argument_parser(__doc__)
    for flag in ("--kind", "--mutate", "--helper", "--part"):
        parser.add_argument(flag, action="append", default=[])
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--to", type=Path, default=Path("runs/bugs"))
    args, left = parser.parse_known_args(rest)
    named = list(takewhile(lambda word: not word.startswith("--"), left))
    settings = left[len(named) :]  # a setting may have several values, which are no recipes
    if wrong := next((k for k in args.kind if k not in KINDS), None):
        raise UserError(f"unknown kind '{wrong}'", needed=" or ".join(KINDS), next="trainworthy bugs --help")
    if not all(w.isdigit() for w in args.seeds.split(",")):
        raise UserError("--seeds needs numbers", got=args.seeds, needed="--seeds 0,1,2")
    known = [find(name).id if not name.endswith(".py") else name for name in (*named, *args.mutate) if find(name)]
    recipes, mutate = known[: len(named)], known[len(named) :]
    kinds = args.kind or ([] if mutate and not recipes else ["planted", "healthy"])
    if "mutants" in kinds:
        if not recipes and not mutate:
            again = "trainworthy bugs --mutate vision/classify --sample 40"
            raise UserError("mutants of what?", needed="a recipe", next=again)
        mutate = list(dict.fromkeys([*mutate, *recipes]))
    helpers = [Path(h).resolve() for h in args.helper]
    if missing := next((h for h in helpers if not h.is_file()), None):
        raise UserError(f"no helper module {missing}", needed="the path of a Python file that the recipe imports")

    campaign = Campaign(args.to.resolve(), jobs or 2, settings)
    seeds = [int(w) for w in args.seeds.split(",")]
    suite_kinds = [k for k in kinds if k != "mutants"]
    cases = suite.sampled(suite.cases(recipes, suite_kinds), sample) if suite_kinds else []
    if suite_kinds and not cases:
        raise UserError("no case fits", got=f"{', '.join(kinds)} of {', '.join(recipes)}",
                        needed="a recipe with planted bugs or healthy variants", next="trainworthy bugs --mutate RECIPE")  # fmt: skip
    if cases:
        print(f"{len(cases)} cases at seeds {args.seeds}, commit {suite.commit()}, into {args.to}", flush=True)
    campaign.say = lambda text: print(text, flush=True)
    with campaign.interruptible():
        campaign.suite(cases, seeds)
        parts = (*mutation.PARTS, *args.part)
        runs = [campaign.mutants(recipe, sample, steps or 100, helpers, parts) for recipe in mutate]
    found = page.summary([row for row in campaign.rows if row.get("case") and row["commit"] == suite.commit()], runs)
    path = page.write(args.to, found)
    output |= found
    print("\n" + "\n".join(page.summary_lines(found)) + f"\n\npage {path}", flush=True)
    if any(row["outcome"] in ("missed", "alarm", "survived") for row in found["rows"]):
        sys.exit(GATE_FAILED)
