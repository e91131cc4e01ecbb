"""Checks of a script that was followed to its end: a later model's optimiser, the inputs of each evaluation, the weights that are
kept."""

import os
from collections import Counter

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.checks import behaviour
from trainworthy.guard.checks.results import ENDED, finding, joined, skip
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.measures.data import row_invariants, token_pairs
from trainworthy.guard.measures.data.class_numbers import CAUSE, numbering
from trainworthy.guard.measures.data.scales import SCALE, begins_otherwise, fault, goes_on, pooled
from trainworthy.guard.measures.models import averages
from trainworthy.guard.measures.records import Group
from trainworthy.guard.measures.scores import best_weights
from trainworthy.guard.observing.to_the_end import Evaluation, Following, inside, kind

QUALITY = ("learning",)  # the training before was short
COMPARED, GOOD = 60, 0.6  # rows of an evaluation, and their share of right answers
BEYOND = 0.1  # more right answers than with the most frequent class
EMPTY = 4  # steps in a row without a gradient


def check(seen: Following) -> dict:
    """Join the faults that are seen in a whole script."""
    faults = [fault for find in FINDERS if (fault := find(seen))]
    sources = len({(e.kind, e.source) for e in seen.evaluations})
    return joined(
        "ending",
        faults,
        f"followed to its end: {length(seen)}; evaluations: {len(seen.evaluations)}, sources of their data: {sources}, "
        f"states loaded: {sum(not one.path for one in seen.loads)}",
    )


def cut_short(seen: Following) -> tuple[list, float]:
    """Return the passes of training that were cut short, and how many steps the script makes; 0 if that is unknown."""
    cut = [p for p in seen.passes if p.training and p.was_cut]
    more = sum(p.steps * (p.length / p.got - 1) for p in cut if p.length and p.got)
    return cut, seen.steps + more if all(p.length for p in cut) else 0.0


def length(seen: Following) -> str:
    """Return how many steps were made, and how many the script makes whose passes were cut short."""
    cut, steps = cut_short(seen)
    if not cut:
        return f"{seen.steps} steps"
    whole = f" of about {steps:.0f}" if steps else ""
    passes = "a pass of training was" if len(cut) == 1 else f"{len(cut)} passes of training were"
    return f"{seen.steps}{whole} steps, because {passes} cut short"


def second(record: dict) -> dict:
    """Return one verdict on a later training from the verdicts on what was watched of it."""
    if record.get("why") in (None, "it raised") or record.get("error") or record["steps"] < 8:
        return skip(
            "later", f"with the passes before it cut short it was not reached: {record.get('why', 'no record')}"
        )
    found = [f for f in record["findings"] if f["id"] not in QUALITY]
    wrong = [f for f in found if not f.get("ok", True)]
    measured = "; ".join(f"{f['id']}: {f['measured']}" for f in wrong)
    count = sum("skip" not in f for f in found)
    measured = (
        measured
        or f"{record['steps']} steps of the training with optimiser {record['plan']['later']}: {count} checks passed"
    )
    return finding("later", measured, "\n".join(f["cause"] for f in wrong))


def answer(watch: dict, record: dict, late: bool, output: str, seconds: float, code: int | None = None) -> dict:
    """Return the verdict on the record of such a rehearsal; it is skipped where the script did not end."""
    if not late and not record:
        last = (output.strip().splitlines() or ["nothing was printed"])[-1]
        return skip(
            "ending", f"the process that followed the script ended without a record (exit code {code}): {last}"[:300]
        )
    if late or record["why"] not in (ENDED, "it raised"):
        if record and record.get("sampled"):  # it needs no end
            return finding("ending", *record["sampled"])
        return skip(
            "ending", f"the script did not reach its end within {seconds:.0f} s, its passes over loaders cut short"
        )
    if record["why"] == "it raised" or record.get("exit"):
        why = record.get("raised")
        if not why:
            return skip(
                "ending",
                f"the script ends with exit code {record.get('exit')}, its own or because passes over loaders are cut short",
            )
        return skip("ending", f"with its passes over loaders cut short the script fails: {why}"[:300])
    if record["steps"] < max(1, min(4, watch["steps"])) or record.get("error"):
        return skip("ending", f"only {record['steps']} steps were made")
    found = record["findings"][0]
    measured, cause = best_weights.check(record.get("rounds", []), output)
    if not found.get("ok"):
        return found
    return finding(
        "ending",
        f"{found['measured']}; {measured or 'kept by a printed score: none'}" if not cause else measured,
        cause,
    )


def stranger(seen: Following) -> Fault | None:
    """Find an optimiser that steps without gradients while another model of its shapes trains."""
    for i, n in seen.streaks.items():
        group: Group = seen.groups[i]
        if n >= EMPTY and group.steps >= n + EMPTY:
            return (
                f"from step {group.steps - n + 1} of {group.steps} on, the optimiser's tensors get no gradient; those of another "
                f"{seen.other} do, and are in no optimiser",
                "a new model is trained with the optimiser of the one before: build the optimiser with the model, in every fold or stage",
            )
    return None


def unfrozen(seen: Following) -> Fault | None:
    """Find tensors that get gradients from some step on, while the optimiser of their model goes on without them."""
    for group in seen.groups.values():
        since, names = seen.joined.get(id(group), (0, []))
        if since >= EMPTY and group.steps >= since + EMPTY:
            return (
                f"from step {since + 1} of {group.steps} on, {len(names)} more tensors of the model get gradients ({names[0]}, ...); no optimiser "
                "has them",
                "they are unfrozen during the training, and the optimiser was built before: optimizer.add_param_group(...) is missing",
            )
    return None


def scales(seen: Following) -> Fault | None:
    """Find an evaluation whose inputs have another scale than all batches of training."""
    for (what, *source), rows in seen.sources.items():
        if what not in seen.trained or (source[0] == 0 and rows.losses < 0.5 * rows.calls):
            continue
        steps = sorted({e.step for e in seen.evaluations if e.kind == what and list(e.source) == source})
        ours, theirs = seen.trained[what].measures, rows.measures
        cause = "this evaluation's data are scaled or normalised differently from the training data, or not at all"
        if measured := fault(ours, theirs):
            return f"evaluation after step {steps[0]} of {seen.steps}: {measured}", cause
        if len(ours.rows) < 4 or not theirs.rows:
            continue
        low, high = min(s for _, s in ours.rows), max(s for _, s in ours.rows)
        mean, std = pooled(theirs.rows)
        nearest = min(abs(mean - m) for m, _ in ours.rows)
        if std != std or high != high:
            continue
        far = std > SCALE * high or std < low / SCALE or nearest > SCALE * max(std, high)
        read = [
            (p.loader, p.got) for p in seen.passes if p.calls and not p.backwards and id(p.loader.dataset) in source
        ]
        if far and not goes_on(ours, theirs) and not begins_otherwise(read, ours.dim):
            other = [sum(r[i] for r in ours.rows) / len(ours.rows) for i in (0, 1)]
            return (
                f"inputs of the evaluation after step {steps[0]} of {seen.steps}: mean {mean:.3g}, std {std:.3g}; "
                f"in training mean {other[0]:.3g}, std {other[1]:.3g}",
                cause,
            )
    return None


def samples(seen: Following) -> Fault | None:
    """Find inputs that are prepared sample by sample in training, and in no evaluation of other data."""
    own = {(id(p.loader.dataset),) for p in seen.passes if p.training}
    for what, trained in seen.trained.items():
        others = [
            rows.marks for (one, *source), rows in seen.sources.items() if one == what and tuple(source) not in own
        ]
        if measured := row_invariants.lost(trained.marks, others):
            return (
                measured,
                "samples of the evaluation are not normalised as those of training are, each by its own values",
            )
    return None


def vocabulary(seen: Following) -> Fault | None:
    """Find an evaluation whose texts have training's tokens in other pairs than training's texts, new ones among them, have."""
    for (what, *source), rows in seen.sources.items():
        trained = seen.trained.get(what)
        late = trained.fresh[len(trained.fresh) // 2 :] if trained is not None else []
        count = sum(n for n, _ in late)
        if trained is None or count < token_pairs.PAIRS or rows.losses < 0.5 * rows.calls:
            continue
        if measured := token_pairs.foreign(trained.pairs, sum(n for _, n in late) / count, rows.pairs):
            steps = sorted({e.step for e in seen.evaluations if e.kind == what and list(e.source) == source})
            return f"texts of the evaluation after step {steps[0]} of {seen.steps}: {measured}", token_pairs.CAUSE
    return None


def worst(seen: Following) -> Fault | None:
    """Find weights that are kept although they are the worst that were evaluated."""
    for one in seen.loads:
        later = seen.grad_modes[one.trained :]
        if not one.path and any(i == one.model for _, i, _ in later):
            continue  # it trains on: not the end
        for kept in [e for e in seen.evaluations[: one.at] if e.kind == one.kind and e.weights == one.weights]:
            end = len(seen.evaluations) if one.path else one.at
            like = (kept.model, kept.source, kept.calls)
            rows = [e for e in seen.evaluations[:end] if (e.model, e.source, e.calls) == like]
            if len({e.weights for e in rows}) < 3 or not far_below(kept, rows):
                continue
            measured = f"{'saved as ' + os.path.basename(one.path) if one.path else 'kept at the end'}: the weights after step {kept.step}"
            numbers = [f"loss {kept.loss:.3g}, at best {min(e.loss for e in rows):.3g}"] if kept.losses else []
            numbers += [f"{kept.accuracy:.2f} right, at best {max(e.accuracy for e in rows):.2f}"] if kept.rows else []
            return (
                f"{measured}, the worst of {len(rows)} evaluations ({'; '.join(numbers)})",
                "the best weights are chosen in the wrong direction (mode='min' for a score, 'max' for a loss, or < for >)",
            )
    return None


def far_below(kept: Evaluation, rows: list[Evaluation]) -> bool:
    """Return whether an evaluation is clearly the worst, by every number that is known."""
    by_loss = bool(kept.losses) and all(e.losses for e in rows)
    by_rows = bool(kept.rows) and all(e.rows for e in rows)
    if by_loss and (
        kept.loss < max(e.loss for e in rows) or not min(e.loss for e in rows) < (0.8 if by_rows else 0.6) * kept.loss
    ):
        return False
    if by_rows:
        best, own = max(e.accuracy for e in rows), kept.accuracy
        error = (best * (1 - best) / kept.rows + own * (1 - own) / kept.rows) ** 0.5
        if own > min(e.accuracy for e in rows) or best - own < max(0.03 if by_loss else 0.1, 4 * error):
            return False
    return by_loss or by_rows


def renumbered(seen: Following) -> Fault | None:
    """Find an evaluation whose answers are right if the classes of its data get other numbers, beside one of other data that is good by then. A
    model that gives all samples one class is right with another number, too, where most of them are of one class."""
    for e in seen.evaluations:
        others = [o for o in seen.evaluations if o.kind == e.kind and o.source != e.source and o.step <= e.step]
        good = [o for o in others if o.rows >= COMPARED and o.accuracy >= GOOD]
        if e.rows < COMPARED or e.accuracy >= GOOD / 2 or not good:
            continue
        truth, answer = map(torch.cat, zip(*e.answers, strict=True))
        found = numbering(truth, answer)
        most = float(truth.unique(return_counts=True)[1].max() / len(truth))
        if found is not None and found.exchanged and found.right >= max(GOOD, most + BEYOND):
            return (
                f"{e.accuracy:.2f} of {e.rows:,} answers right in the evaluation after step {e.step} of {seen.steps}, {found.right:.2f} with "
                f"{found.moved} classes numbered differently; {good[-1].accuracy:.2f} in that of other data",
                CAUSE,
            )
    return None


def untrained(seen: Following) -> Fault | None:
    """Find a test of a model that was built anew, never trained and never loaded, in place of the trained one."""
    learners = {i: inside(seen.roots[i]) for _, i, _ in seen.grad_modes}
    trained, models = {id(m) for m in learners.values()}, {id(inside(m)): inside(m) for m in seen.roots.values()}
    tested = {(e.source, e.step) for e in seen.evaluations if e.model in trained}
    for e in seen.evaluations:
        model, twins = models[e.model], [m for m in learners.values() if kind(m) == e.kind]
        if e.model in trained or not twins or (e.source, e.step) in tested or not (e.losses or e.rows):
            continue
        own = large(model)
        if not own or any(id(p) in seen.loaded for p in parameters_of(model)):
            continue
        alike = max(
            abs(float(torch.cosine_similarity(a, b, 0))) for m in twins for a, b in zip(own, large(m), strict=True)
        )
        if alike < 0.2:
            return (
                f"the {type(model).__name__} of the evaluation after step {e.step} of {seen.steps} was neither trained nor loaded, and "
                f"has nothing in common with the trained one (cosine of their weights at most {alike:.2f})",
                "the model is built again, and load_state_dict() is missing",
            )
    return None


def average(seen: Following) -> Fault | None:
    """Find an average of weights that is evaluated without its buffers, or while it still is mostly what it began with."""
    if stale := averages.buffers(seen.trail):
        return stale
    _, whole = cut_short(seen)
    return averages.fault(seen.trail.found, seen.steps, whole) if whole and not seen.from_file else None


def sampled(seen: Following) -> Fault | None:
    """Find samples that are drawn with the time running backwards."""
    models = {id(inside(m)): inside(m) for m in seen.roots.values()}
    noised = {kind(models[i]): i for i in seen.evidence.sampling.noised if i in models}
    return seen.evidence.sampling.fault({i: noised[kind(m)] for i, m in models.items() if kind(m) in noised})


def large(module: nn.Module) -> list[Tensor]:
    """Return a model's weight matrices as vectors."""
    return [p.detach().flatten().float() for p in parameters_of(module) if p.numel() >= 256 and p.dim() > 1]


def calm(seen: Following) -> Fault | None:
    """Find a pass over other data than training's whose model was left in train mode, and states that are no copies. Two such passes
    without a step in between are draws on purpose."""
    trained = {id(p.loader.dataset) for p in seen.passes if p.training}
    others = [p for p in seen.passes if p.started and p.calls and not p.training and not p.refreshing]
    others = [p for p in others if id(p.loader.dataset) not in trained and p.calls <= 1.5 * p.got]
    wrong = [
        p for p in others if sum(bool(on and (drops or norms)) for _, on, drops, norms in p.modes) > 0.5 * len(p.modes)
    ]
    times = Counter((p.started, id(p.loader.dataset)) for p in wrong)
    once = next((p for p in wrong if times[p.started, id(p.loader.dataset)] == 1), None)
    if once is not None:
        return (
            f"in the evaluation after step {once.started} of {seen.steps} the model is in train mode, with dropout or batch statistics",
            "model.eval() is missing before this evaluation",
        )
    found = behaviour.state(seen)
    return (found["measured"], found["cause"]) if found.get("ok") is False else None


def padded(seen: Following) -> Fault | None:
    """Find prompts that end with padding."""
    return seen.generations.fault()


FINDERS = (
    padded, stranger, unfrozen, untrained, renumbered, scales, samples, vocabulary, worst, average, sampled, calm,
)  # fmt: skip
