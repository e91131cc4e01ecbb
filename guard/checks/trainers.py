"""What is wrong with a trainer of transformers or TRL that the script built: its columns, tokens, pairs, rewards, last layer, metric and division by
micro-batches."""

from collections.abc import Callable, Mapping
from typing import Any

from trainworthy.guard.measures.trainers import (
    preferred_tokens,
    trainer_columns,
    trainer_counts,
    trainer_outputs,
    trainer_scores,
    trainer_tokens,
)
from trainworthy.guard.measures.trainers.at_work import spread, trainer_of
from trainworthy.guard.observing.observer import Observer

ROWS, FEW = 64, 8  # samples of a batch that is read; samples of which the loss is computed


def at_work(seen: Observer) -> Any:
    """Return the trainer that trains: the one that a rehearsal has kept, or the last one that is alive."""
    return seen.trainer or trainer_of({id(p) for g in seen.groups.values() if g.steps for p in g.parameters})


def faults(seen: Observer) -> dict[str, tuple[str, str]]:
    """Return (what is wrong, its cause) by the check that it belongs to."""
    trainer = at_work(seen)
    if trainer is None:
        return {}
    trainer.dropped_rows = seen.evidence.dropped_rows.rows
    measures: list[tuple[str, Callable[[Any], tuple[str, str] | None]]] = [
        ("dependency", trainer_columns.dropped),
        ("direction", trainer_columns.told_apart),
        ("direction", trainer_columns.contradicted),
        ("direction", preferred_tokens.exchanged),
        ("direction", trainer_columns.misplaced),
        ("gradients", trainer_counts.undivided),
        ("frozen", trainer_tokens.frozen_head),
        ("frozen", trainer_outputs.shared_reference),
        ("targets", trainer_counts.dropped),
        ("targets", trainer_columns.spans_cut_off),
        ("targets", trainer_columns.ambiguous),
        ("targets", _tokens),
        ("metric", trainer_scores.selection),
        ("metric", trainer_outputs.lost_rows),
        ("metric", trainer_outputs.cut_short),
        ("metric", _scores),
    ]
    wrong: dict[str, tuple[str, str]] = {}
    for id, measure in measures:
        try:
            fault = measure(trainer)
        except Exception as error:  # another version of the library, or a trainer that changes what is read here
            seen.notes.append(f"the trainer's {id} could not be read: {type(error).__name__}: {error}"[:200])
            continue
        if fault and id not in wrong:
            wrong[id] = fault
    return wrong


def _scores(trainer: Any) -> tuple[str, str] | None:
    made = trainer_scores.answered(trainer)
    compared = None if made is None else trainer_scores.compared(trainer, *made)
    return compared if compared and compared[1] else None


def _tokens(trainer: Any) -> tuple[str, str] | None:
    rows = trainer.train_dataset
    if not callable(trainer.processing_class) or not hasattr(rows, "column_names") or not hasattr(rows, "__len__"):
        return None
    kept = trainer._remove_unused_columns(rows, "training")
    batches = []
    for count in (ROWS, FEW):
        batches.append(trainer.data_collator(spread(kept, count)[:count]))
    if not all(isinstance(b, Mapping) for b in batches):
        return None
    wrong = trainer_tokens.faults(trainer, trainer.model, *(dict(b) for b in batches))
    return wrong[0] if wrong else None
