"""The check of a script's source by its names: arguments in the order of their parameters, each split read by its own name."""

from collections.abc import Callable
from pathlib import Path

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.checks.results import finding, skip
from trainworthy.guard.source import (
    averages,
    caches,
    exchanged,
    formulas,
    loops,
    masks,
    no_effect,
    noise_levels,
    numbering,
    rows,
    scores,
    sequences,
    shared_objects,
    splits,
    terms,
    transitions,
    values,
)
from trainworthy.guard.source.reading import Source, read

RULES: tuple[Callable[[Source], Fault | None], ...] = (
    exchanged.arguments, exchanged.keywords, exchanged.library, exchanged.unpacked, exchanged.samples, splits.twin,
    values.lost_input, splits.shared, splits.again, splits.in_function, sequences.path_in_wrong_order, rows.mixed,
    values.same_input, transitions.first_kept, transitions.unread_actions, transitions.overwritten,
    transitions.other_state, formulas.turned_weight, scores.plateau, values.unused, values.rebound,
    sequences.returns_in_wrong_order, sequences.redrawn, values.replaced, scores.unbeatable, rows.misaligned,
    rows.interleaved, formulas.temperature, transitions.shifted, scores.metric, formulas.back_alone,
    formulas.forwards, rows.larger, values.carried, formulas.turned_sign, caches.reread, no_effect.uncalled,
    no_effect.compared, no_effect.dropped, no_effect.misspelt, no_effect.unread_rate, no_effect.replaced_seed,
    no_effect.always_true, no_effect.text_for_a_flag, no_effect.unread_option, shared_objects.late_bound,
    shared_objects.repeated_layer, shared_objects.repeated_list, shared_objects.misplaced, loops.same_net,
    loops.first_turn, loops.begun_in_each_turn, loops.never_begun_again, loops.stale, loops.used_up,
    rows.shuffled_twice, rows.grouped, exchanged.parts, loops.reseeded, values.lost_bias, values.doubled,
    scores.contrary, formulas.added_score, formulas.coupled_decay, rows.parted, rows.unpermuted,
    numbering.two_orders, numbering.each_batch, numbering.each_split, numbering.reordered, numbering.first_row,
    no_effect.unmerged, shared_objects.assigned_weights, noise_levels.by_variance, noise_levels.roots_missing,
    masks.preferred, averages.unread, scores.means_over_samples, terms.other_variable, terms.counted_twice,
    terms.dropped_labels, splits.all_rows, scores.sorted_once,
    loops.state_dropped, scores.best_is_worst, terms.uncounted,
)  # fmt: skip
"""In their order: the first fault that one finds is the result of the check."""


def check(script: Path, argv: list[str] | None = None, entry: str = "") -> dict:
    """Read the script and the modules of its folder that it imports. Nothing is run. `argv`: the arguments that it is started with.
    `entry`: a function of the script that is called from elsewhere."""
    source = read(script, entry)
    source.argv = argv or []
    if not source.trees:
        return skip("names", "the script's source cannot be read")
    for rule in RULES:
        if fault := rule(source):
            return finding("names", *fault)
    calls, files = source.calls, len(source.trees)
    measured = f"{len(calls.reached):,} calls of {len(calls.functions):,} functions in {files} file{'s' * (files != 1)}"
    return finding("names", measured + values.unread(source))
