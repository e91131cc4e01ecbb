"""usage: trainworthy sweep RECIPE [--scientific NAME=A,B] [--nuisance NAME=LOW:HIGH] [--trials 20] [settings]

Searches settings, behind the gates.

  trainworthy sweep vision/classify                             the peak rate, a factor of 30 to either side of the preset's
  trainworthy sweep vision/classify --range-test                the peak rate, in the range that a range test finds
  trainworthy sweep rl/ppo --ranges                             settings with a known range; searches nothing
  trainworthy sweep rl/ppo --nuisance optim.lr --nuisance ent_coef    these two in their known ranges
  trainworthy sweep vision/classify --scientific optim.name=adamw,sgd --nuisance optim.lr=1e-4:1e-1 --trials 24
  trainworthy sweep ./mine.py --space sweep.yaml --seeds 3      declared in a file; three seeds for each trial
  trainworthy sweep runs/vision-classify/sweep-20260101-1200    continue it, or join it from another process
  trainworthy sweep runs/vision-classify/sweep-20260101-1200 --trials 40    continue to 40 trials

  scientific settings    are compared: NAME=A,B
  nuisance settings      are tuned for each compared value: NAME=LOW:HIGH or NAME=A,B. Without a range they get the one that the recipe
                         knows. Rates, and ranges that span a factor of 100, are searched on a log scale; NAME=LOW:HIGH:linear on a
                         linear one
  all others             are fixed, given as to `trainworthy run`

If the best trial is at the end of a range, the command that searches a wider one is printed.

Trials are quasi-random; `--bayes` lets a Bayesian sampler choose after the first third. Gates run once for each structure. A trial whose
gates fail, or that stops itself, is infeasible and has no score. The best trial is chosen on validation data. Its score on the test
split, if there is one, is printed once, at the end. No trial is pruned: high rates and short warm-ups look best early.

  --range-test       first run `trainworthy lr`, once for each compared value. The peak rate is then searched from a thirtieth of its
                     suggestion to 30 times it, but not above the rate at which the loss blew up
  --name NAME        of the study; the same name and settings join it again
  --storage WHERE    a URL, a .db file (SQLite) or a journal file; default: a journal file in the study's folder
  --on-end CMD       a command that runs when this process has ended its part: no trial is left, none is feasible, or it was interrupted
  --json             what was found, as JSON

Exit codes: 0 done, 2 bad usage or a study that was made with other settings, 3 no structure passed its gates, 5 interrupted: the
same command continues."""

import json
import shlex
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trainworthy.core.base import config, masking, settings_check
from trainworthy.core.base.console import Console, table
from trainworthy.core.base.errors import DONE, GateFailed, Interrupted, Stop, UserError
from trainworthy.core.base.files import read_json, write_whole
from trainworthy.core.commands import open_recipe, prints_json, take_flag, take_number
from trainworthy.core.commands.config import differing
from trainworthy.core.monitoring import cost
from trainworthy.core.session import on_end
from trainworthy.core.sweep import ranges
from trainworthy.core.sweep import space as spaces
from trainworthy.core.sweep import study as studies
from trainworthy.core.sweep.space import Space
from trainworthy.core.sweep.study import folder_of

PLAN = "sweep.json"
TRIALS = 20


@prints_json
def main(argv: list[str], output: dict[str, Any]) -> None:
    """Make a study or join it, work on its trials, write the page."""
    words, listed = take_flag(argv[1:], "--ranges")
    words = on_end.take_any(words)
    if not words or words[0].startswith("-"):
        needed = "a recipe, or the folder of a sweep"
        raise UserError("sweep what?", needed=needed, next="trainworthy sweep vision/classify")
    if listed:
        list_ranges(words, output)
        return
    studies.optuna()
    home, plan = read_plan(Path(words[0]), words[1:]) if Path(words[0]).is_dir() else make_plan(words)
    try:
        output |= work(home, plan)
    except Stop as stop:
        on_end.run(stop.exit_code, str(stop))
        raise
    except Exception as error:
        on_end.run(1, f"crashed: {type(error).__name__}: {error}")
        raise
    on_end.run(DONE, "")


def read_plan(home: Path, more: list[str]) -> tuple[Path, dict[str, Any]]:
    """Return folder and plan of a sweep that exists."""
    plan = read_json(home / PLAN)
    if not {"declared", "storage", "name"} <= plan.keys() or not isinstance(plan["declared"], dict):
        raise UserError(f"{home} is not a sweep folder", got=f"no whole {PLAN} in it", needed="the folder that a sweep printed",
                        next="ls -d runs/*/sweep-*")  # fmt: skip
    more, trials = take_number(more, "--trials")
    if more:
        needed = "its folder, and --trials N for more of them"
        raise UserError("a sweep that continues takes no settings", got=" ".join(more), needed=needed)
    plan["declared"]["trials"] = max(trials or 0, plan["declared"]["trials"])
    return home, plan


def list_ranges(words: list[str], output: dict[str, Any]) -> None:
    """Print the settings of a recipe that can be searched without a range, and those ranges."""
    _, cfg, _ = open_recipe("sweep", words)
    found = {name: spaces.ranged(cfg, name, given) for name, given in ranges.known(cfg).items()}
    output |= {name: asdict(one) for name, one in found.items()}
    now = config.flat(config.to_dict(cfg))
    rows = [("setting", "range", "scale", "now")]
    for name, r in found.items():
        scale = "values" if r.values else "log" if r.log else "linear"
        rows.append((name, r.words().partition("=")[2], scale, str(now[name])))
    print(table(rows) + f"\n\nnext   trainworthy sweep {shlex.join(words)} --nuisance {next(iter(found))}")


def take_roles(words: list[str], flag: str) -> tuple[list[str], dict[str, str | None]]:
    """`words` without every `flag NAME=VALUE`, and those. A nuisance setting may come without a value."""
    found: dict[str, str | None] = {}
    while True:
        words, given = config.take(words, flag)
        if given is None:
            return words, found
        name, equals, value = given.partition("=")
        if not value and (equals or flag != "--nuisance"):
            raise UserError(f"{flag} needs a setting and its values", got=given, needed=f"{flag} optim.name=adamw,sgd")
        found[name.removeprefix("--").replace("-", "_")] = value or None


def make_plan(words: list[str]) -> tuple[Path, dict[str, Any]]:
    """Return folder and plan of a new sweep. Settings that cannot work raise before a folder is created."""
    from accelerate import Accelerator
    from trainworthy.core.recipe import loading
    from trainworthy.core.session import stages

    target, words = words[0], words[1:]
    words, scientific = take_roles(words, "--scientific")
    words, nuisance = take_roles(words, "--nuisance")
    words, file = config.take(words, "--space")
    words, trials = take_number(words, "--trials")
    words, seeds = take_number(words, "--seeds")
    words, name = config.take(words, "--name")
    words, storage = config.take(words, "--storage")
    words, bayes = take_flag(words, "--bayes")
    fixed, test = take_flag(words, "--range-test")
    if file:
        read = spaces.read_file(Path(file))
        own = spaces.words(read.get("fixed") or {})
        scientific, nuisance = (read.get("scientific") or {}) | scientific, (read.get("nuisance") or {}) | nuisance
        fixed, trials, seeds = [*own, *fixed], trials or read.get("trials"), seeds or read.get("seeds")
        bayes = bayes or bool(read.get("bayes"))
    loaded = loading.load(target)
    cfg, preset = config.parse(loaded.module, fixed, prog=f"trainworthy sweep {target}")
    if name is not None and not all(c.isalnum() or c in "._-" for c in name):
        needed = "letters, digits, dots and dashes"
        raise UserError("the name of a study is the name of a folder", got=name, needed=needed)
    name = name or time.strftime("%Y%m%d-%H%M%S")
    home = cfg.run.out / loaded.slug / f"sweep-{name}"
    space = spaces.declare(cfg, scientific, nuisance)
    searched = {n for n, _ in space.scientific} | {r.name for r in space.nuisance}
    fixed = fixed_words(loaded.module, cfg, preset, fixed, searched)
    if masking.words(fixed) != fixed:
        raise UserError("a sweep keeps its settings in a file, and secrets are never written", got=shlex.join(masking.words(fixed)),
                        needed="a fork that reads the secret from the environment")  # fmt: skip
    if test:
        space = with_tested_ranges(home, loaded.target, cfg, fixed, space)
    for share in (0.0, 1.0):  # both ends of every range, every scientific value
        for chosen in space.compared:
            point = spaces.words(chosen | {r.name: r.at(share) for r in space.nuisance})
            one, _ = config.parse(loaded.module, [*fixed, *point], prog="trainworthy sweep")
            settings_check.check_values(one, processes=1)
    metric = stages.untrained(loaded, cfg, Accelerator(cpu=True))[-1][1].metric
    declared = {"recipe": loaded.target, "fixed": fixed, **space.plain(), "trials": int(trials or TRIALS),
                "seeds": int(seeds or 1), "bayes": bayes, "metric": metric.name, "higher_is_better": metric.higher_is_better}  # fmt: skip
    name = f"{loaded.slug}-{name}"
    return home, {"declared": declared, "storage": storage or "", "floor": metric.floor, "name": name}


def fixed_words(module: Any, cfg: config.Config, preset: str, fixed: list[str], searched: set[str]) -> list[str]:
    """Return the fixed settings as words, those of a `--config` file one by one: the file may change while the study goes on."""
    given = {w[2:].split("=")[0].replace("-", "_") for w in fixed if w.startswith("--")}
    if "run.seed" in given | searched:
        raise UserError("a sweep sets run.seed itself: each trial gets the seeds 0 to N-1", needed="--seeds N")
    if both := sorted(given & searched):
        raise UserError(f"{both[0]} is fixed and searched", needed="one of them")
    if config.take(fixed, "--config")[1] is None:
        return fixed
    changed = config.flat(differing(config.to_dict(getattr(module, preset)()), config.to_dict(cfg)))
    if cfg.init_from:  # the command line would lower these two for a run that starts from a file
        changed |= {"optim.lr": cfg.optim.lr, "optim.warmup": cfg.optim.warmup}
    own = {"run.seed", "train.precision"} | searched  # set by each trial, by the launcher, and by the search
    return ["--preset", preset, *spaces.words({k: v for k, v in changed.items() if k not in own})]


def with_tested_ranges(home: Path, recipe: str, cfg: config.Config, fixed: list[str], space: Any) -> Any:
    """Return the space with the rates' ranges from a learning-rate range test; those of the study, if it was made before."""
    before = read_json(home / PLAN).get("declared")
    if before:
        known = {r.name: r for r in Space.of(before).nuisance}
        return replace(space, nuisance=tuple(known.get(r.name, r) for r in space.nuisance))
    if not any(r.name in ranges.rates(cfg) for r in space.nuisance):
        raise UserError("--range-test gives the range of a peak rate, and none is searched", got=", ".join(r.name for r in space.nuisance),
                        needed=f"--nuisance {ranges.rates(cfg)[0]}")  # fmt: skip
    found, lines = ranges.tested(recipe, fixed, space.compared, spaces.words)
    for line in lines:
        Console().say(f"  {line}")
    tested = (spaces.ranged(cfg, r.name, found[r.name]) if r.name in found else r for r in space.nuisance)
    return replace(space, nuisance=tuple(tested))


def work(home: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Run trials until none is left for this process; return the findings."""
    from trainworthy.core.session import multi_seed

    declared, console = plan["declared"], Console()
    space = Space.of(declared)
    multi_seed.made(home)
    study = studies.open_study(plan["storage"] or str(home / "study.journal"), plan["name"], declared, space)
    declared["trials"] = study.user_attrs[studies.DECLARED]["trials"]  # another process may have asked for more
    write_whole(home / PLAN, json.dumps(plan, indent=1))
    on_end.run_folder(home)
    many = f", {declared['seeds']} seeds each" if declared["seeds"] > 1 else ""
    console.say(f"{declared['recipe']} · {declared['trials']} trials{many}, into {home}\n  {shlex.join(space.words())}")
    with multi_seed.signals() as arrived:
        while not arrived:
            with studies.next_trial(study, home, declared["trials"]) as trial:
                if trial is None:
                    break
                run_trial(home, declared, study, space, trial, console, arrived)
    found = report_findings(home, plan, study, space, console)
    if arrived:
        raise Interrupted(f"{arrived[0]}: its running trial continues when the sweep is started again\n"
                          f"  next:         trainworthy sweep {home}")  # fmt: skip
    if not found["best"] and all(t["state"] == "infeasible" for t in found["trials"]):
        raise GateFailed(f"no trial of {len(found['trials'])} is feasible, first: {found['trials'][0]['reason']}\n"
                         f"  evidence:     {home / 'report.html'}")  # fmt: skip
    return found


def run_trial(
    home: Path, declared: dict[str, Any], study: Any, space: Any, trial: Any, console: Console, arrived: list[str]
) -> None:
    from optuna.trial import TrialState
    from trainworthy.core.sweep import findings, trials

    point = point_of(space, trial)
    fixed, seeds = declared["fixed"], list(range(declared["seeds"]))
    off = "--gates.no-enabled" in fixed
    failed = "" if off else trials.gates_of(home, declared["recipe"], fixed, space.structure(point), console)
    if failed:
        outcome = trials.Outcome(kind="gates", reason=f"gate failed: {failed}")
    else:
        own = [*fixed, *spaces.words(point), *([] if off else ["--gates.no-enabled"])]
        folder = folder_of(home, trial.number)
        outcome = trials.run(declared["recipe"], own, seeds, folder, arrived)
    if outcome.interrupted:
        if not arrived:
            arrived.append("a run was ended from outside")
        return
    for name in ("values", "reason", "kind", "diagnosis", "seconds", "cost"):
        trial.set_user_attr(name, getattr(outcome, name))
    what = findings.describe(point)
    if outcome.values:
        study.tell(trial, outcome.mean)
        console.say(f"  trial {trial.number:<4} {declared['metric']} {outcome.mean:.4f}  {what}  [{outcome.diagnosis}]")
        return
    study.tell(trial, state=TrialState.FAIL)
    console.say(f"  trial {trial.number:<4} infeasible  {what}  [{outcome.reason}]")
    rows = findings.rows_of(study)
    if outcome.kind == "broken" and len(rows) >= 3 and all(r.state == "infeasible" for r in rows):
        raise UserError(f"none of the first {len(rows)} trials could run", got=outcome.reason,
                        next=shlex.join(["trainworthy", "run", declared["recipe"], *fixed, *spaces.words(point)]))  # fmt: skip


def point_of(space: Any, trial: Any) -> dict[str, Any]:
    """Return the settings of a trial. If a killed worker did not store them, they are computed again and are the same."""
    point = {name: trial.suggest_categorical(name, values) for name, values in space.scientific}
    for r in space.nuisance:
        if r.values:
            point[r.name] = trial.suggest_categorical(r.name, r.values)
        elif r.whole:
            point[r.name] = trial.suggest_int(r.name, int(r.low), int(r.high), log=r.log)
        else:
            point[r.name] = trial.suggest_float(r.name, r.low, r.high, log=r.log)
    return point


def report_findings(home: Path, plan: dict[str, Any], study: Any, space: Any, console: Console) -> dict[str, Any]:
    """Print the last lines and write the page. Only the chosen trial's test score is read, once every trial has ended."""
    from trainworthy.core.sweep import findings, page

    d = plan["declared"]
    f = findings.find(study, space, d["metric"], d["higher_is_better"])
    f.floor = plan.get("floor")
    ended = sum(r.state != "running" for r in f.rows)
    lost, command = sum(r.state == "infeasible" for r in f.rows), ""
    lines = [f"{ended} of {d['trials']} trials have ended, {lost} infeasible."]
    if spent := cost.words(f.cost):
        lines.append(f"Cost of all trials: {spent}.")
    if f.best is not None:
        best = f"trial {f.best.number}, {d['metric']} {f.best.value:.4f} with {findings.describe(f.best.point)}"
        lines.append(f"Best on validation data: {best}.")
        lines += findings.cautions(f)
        if ended == d["trials"]:
            lines += on_test_split(home, study, f.best.number, list(range(d["seeds"])))
        if not findings.is_at_chance(f):
            command = shlex.join(
                ["trainworthy", "run", d["recipe"], *d["fixed"], *spaces.words(f.best.point), "--seeds", "5"]
            )
    if (more := findings.wider(f)) is not None:
        again = ["trainworthy", "sweep", d["recipe"], *d["fixed"], *more.words(), "--trials", str(d["trials"])]
        again += ["--seeds", str(d["seeds"])] if d["seeds"] > 1 else []
        f.wider_command = shlex.join([*again, "--bayes"] if d["bayes"] else again)
    where = page.write(home, d["recipe"], f, lines, command)
    for text in ("", *lines, *(e.words() for e in f.edges), *findings.comparison(f)):
        console.say(text)
    nexts = "".join(f"\nnext   {c}" for c in (f.wider_command, command) if c)
    console.say(f"\nreport {where}{nexts}")
    return page.plain(f, lines, command)


def on_test_split(home: Path, study: Any, best: int, seeds: list[int]) -> list[str]:
    """Return sentences on the best trial's score on the test split, or why there is none. The study notes whose score was read."""
    from trainworthy.core.sweep import trials

    folder = folder_of(home, best)
    if not any(folder.glob("seed-*")):
        where = f"Trial {best} ran on another machine, in {folder}"
        return [f"{where}: run this command there for its score on the test split, if it has one."]
    test = trials.test_score(folder, seeds)
    if test is None:
        return [
            "No test split: the best of many validation scores is optimistic. Confirm it with new seeds or fresh data."
        ]
    found = [f"On the test split ({test[1]:,} samples), read once, for this trial alone: {test[0]:.4f}."]
    others = [n for n in study.user_attrs.get("tested", []) if n != best]
    if others:
        again = f"Trial {others[0]} was the best of fewer trials and its test score was read, too"
        found.append(f"{again}: this is not the first look at the test split.")
    study.set_user_attr("tested", [*others, best])
    return found
