"""The gates of each stage of vlm/instruct: on its towers, its batches, its prompts, and the use of the image.

They require: a model with three parts `encoder`, `projector` and `language`; data of questions.Questions.
"""

from trainworthy.core.gates.gate import Gate
from trainworthy.recipes.vlm.gates.fresh_export import exported
from trainworthy.recipes.vlm.gates.image_use import aligned, language_prior, pairs
from trainworthy.recipes.vlm.gates.prompts import generation, prompts, template
from trainworthy.recipes.vlm.gates.scoring import answers_alone, image_tokens, token_per_feature
from trainworthy.recipes.vlm.gates.towers import rates, towers_gate

LEARN = {
    "align": ("projector",),
    "instruct": ("projector", "language"),
    "unfreeze": ("encoder", "projector", "language"),
}
"""Towers that train in each stage, stated here independently of the rates, which a fork may have changed."""


def gates(stage: str, towers: tuple[str, ...], *, first: bool) -> list[Gate]:
    """Return the towers of a stage by its name; for a stage that a fork has named, by its own `towers`. `first`: no stage comes before it."""
    learn = LEARN.get(stage, towers)
    found = [towers_gate(learn), rates, image_tokens, token_per_feature, template, answers_alone, prompts, generation]
    found = [*found, language_prior] if first else [aligned, *found]
    # A stage that trains the projector alone is followed by another, whose export users load.
    return found if learn == ("projector",) else [*found, pairs, exported]
