"""usage: trainworthy break RECIPE [--bug ID] [--yes] [--steps 60] [--seed 0] [--to FOLDER]

Shows a planted bug, lets you guess it, and shows the gate that stops it.

  trainworthy break vision/classify                       any of its planted bugs
  trainworthy break vision/classify --bug softmax-twice   this one
  trainworthy break rl/ppo --steps 10 --yes               without a question

The command trains the recipe and a fork with the bug for a few steps, without gates, and shows both loss curves: as text, and as an
image in FOLDER (default: runs/break). You guess what is wrong, on a terminal only. Then it shows the patch, runs the gate that should
stop the bug, and prints what the gate measured. It needs a checkout of the source.

Exit codes: 0 the gate stopped the bug, 2 bad usage, 3 no gate did, 5 interrupted."""

import argparse
import random
import shutil
import sys
from pathlib import Path

from trainworthy.core.base.errors import GATE_FAILED, INTERRUPTED, Interrupted, UserError
from trainworthy.core.commands import take_number
from trainworthy.core.recipe.registry import find


def main(argv: list[str]) -> None:
    """Show one bug."""
    rest, steps = take_number(argv[1:], "--steps")
    parser = argparse.ArgumentParser(
        prog="trainworthy break", usage=__doc__.splitlines()[0], add_help=False, allow_abbrev=False
    )
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--bug", default="")
    parser.add_argument("--yes", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=Path("runs/break"))
    args = parser.parse_args(rest)
    if args.recipe is None:
        raise UserError("break what?", needed="a recipe", next="trainworthy break vision/classify")
    try:
        show(find(args.recipe).id, args, steps or 60)
    except KeyboardInterrupt:
        raise Interrupted("SIGINT: nothing is kept", code=INTERRUPTED) from None


def show(recipe: str, args: argparse.Namespace, steps: int) -> None:
    """Train both, ask, explain."""
    from trainworthy.core.bugs import lesson
    from trainworthy.core.bugs.campaign import Campaign

    case, offered = lesson.choose(recipe, args.bug, random.Random())
    folder = args.to.resolve() / recipe.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    campaign = Campaign(folder)
    print(f"{recipe}: one of its planted bugs, {steps} steps without gates, next to the recipe itself", flush=True)
    broken, healthy, wrong = lesson.runs(campaign, case, args.seed, steps)
    print(f"\n{lesson.plot(healthy['losses'], wrong['losses'])}\n\n  healthy       {lesson.ending(healthy)}"
          f"\n  with the bug  {lesson.ending(wrong)}")  # fmt: skip
    for kind in ("png", "svg"):
        lesson.picture(folder / f"curves.{kind}", recipe, healthy["losses"], wrong["losses"])
    print(f"  curves        {args.to / folder.name / 'curves.png'}, curves.svg", flush=True)
    if not args.yes and sys.stdin.isatty():
        ask(case.id, [c.id for c in offered])
    print(f"\nthe bug: {case.id}" + (f" (seen in {case.source})" if case.source else ""))
    print("\n".join(f"  {line}" for line in lesson.patch(case, broken).splitlines()))
    if case.harm:
        print(f"  harm: {case.harm}")
    print(f"\ntrainworthy check {args.to / folder.name / broken.name} --only {case.gate}", flush=True)
    checked = lesson.stopped_by(campaign, case, broken, args.seed)
    print("\n".join(lesson.reason(case, checked)), flush=True)
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
