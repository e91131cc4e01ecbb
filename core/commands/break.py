"""usage: trainworthy break RECIPE [--bug ID] [--yes] [--steps 60] [--seed 0] [--to FOLDER] [settings]

Shows one planted bug as a lesson: its loss curve next to the healthy one, a guess, its patch, and the gate that stops it.

  trainworthy break vision/classify                       any of its planted bugs
  trainworthy break vision/classify --bug softmax-twice   this one
  trainworthy break rl/ppo --steps 10 --yes               without the question

The recipe and a fork with the bug train for a few steps without gates. Both curves are printed, and drawn in FOLDER/curves.png. On a
terminal you are asked what is wrong. Then the patch is printed, and `trainworthy check` runs on the fork with the gate that should stop it.

  --bug ID       the bug's name; an unknown name prints the nearest ones
  --yes          ask nothing
  --steps 60     length of the two runs, in steps
  --to FOLDER    where curves and forks go (default: runs/break)

Other words are settings of every run. Planted bugs need a checkout of the source.
Exit codes: 0 a gate stopped the bug, 2 bad usage, 3 no gate did, 5 interrupted."""

import random
import shutil
import sys
from pathlib import Path

from trainworthy.core.base.errors import GATE_FAILED, INTERRUPTED, Interrupted, UserError
from trainworthy.core.bugs import demonstration
from trainworthy.core.bugs.campaign import Campaign
from trainworthy.core.bugs.suite import Case
from trainworthy.core.commands import argument_parser, take_number
from trainworthy.core.recipe.registry import find


def main(argv: list[str]) -> None:
    rest, steps = take_number(argv[1:], "--steps")
    parser = argument_parser(__doc__)
    parser.add_argument("--bug", default="")
    parser.add_argument("--yes", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=Path("runs/break"))
    args, left = parser.parse_known_args(rest)
    if not left or left[0].startswith("--"):
        raise UserError("no recipe given", needed="a recipe of `trainworthy list`",
                        next="trainworthy break vision/classify")  # fmt: skip
    recipe, settings = find(left[0]).id, left[1:]
    case, offered = demonstration.choose(recipe, args.bug, random.Random())
    folder = args.to / recipe.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        show(Campaign(folder.resolve(), settings=settings), case, offered, folder, args.seed, steps or 60, args.yes)
    except KeyboardInterrupt:
        raise Interrupted("SIGINT: nothing is kept", code=INTERRUPTED) from None


def show(campaign: Campaign, case: Case, offered: list[Case], folder: Path, seed: int, steps: int, yes: bool) -> None:
    """Train both, ask, explain."""
    print(f"{case.recipe} and the same with a planted bug: {steps} steps each, without gates", flush=True)
    fork, healthy, broken = demonstration.runs(campaign, case, seed, steps)
    print(f"\n{demonstration.plot(healthy['losses'], broken['losses'])}\n\n  healthy       {demonstration.ending(healthy)}"
          f"\n  with the bug  {demonstration.ending(broken)}")  # fmt: skip
    demonstration.picture(folder / "curves.png", case.recipe, healthy["losses"], broken["losses"])
    print(f"  curves        {folder / 'curves.png'}", flush=True)
    if not yes and sys.stdin.isatty():
        ask(case.id, [c.id for c in offered])
    print(f"\nthe bug: {case.id}" + (f" (seen in {case.source})" if case.source else ""))
    print("\n".join(f"  {line}" for line in demonstration.patch(case, fork).splitlines()))
    if case.harm:
        print(f"  harm: {case.harm}")
    print(f"\ntrainworthy check {folder / fork.name} --only {case.gate}", flush=True)
    checked = demonstration.stopped_by(campaign, case, fork, seed)
    print("\n".join(demonstration.reason(case, checked)), flush=True)
    if not checked.failed:
        sys.exit(GATE_FAILED)


def ask(right: str, offered: list[str]) -> None:
    """Ask which bug it is, and say whether the answer is right."""
    print("\nWhat is wrong?")
    for i, name in enumerate(offered, 1):
        print(f"  {i}  {name}")
    try:
        answer = input("number, or Enter to see it: ").strip()
    except EOFError:
        return
    if answer:
        guess = offered[int(answer) - 1] if answer.isdigit() and 0 < int(answer) <= len(offered) else answer
        print("right" if guess == right else "not this one")
