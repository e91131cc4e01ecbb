"""Whether `trainworthy predict` and `trainworthy chat` ask an export as training asked the model."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.llm.data.pairs import Chat
from trainworthy.recipes.llm.models import speaking

SOME = 4  # prompts
NEEDED = "; `predict` and `chat` ask the export with the tokens of training"
CAUSE = "the recipe's `speaker` asks the export in another way than training: another system message, template, examples or first token"


class Asked(NamedTuple):
    """A prompt as a user gives it, and what training made of it."""

    turns: list[dict[str, Any]]
    tools: Any
    ids: list[int]
    """Tokens before the answer."""


@contextlib.contextmanager
def _without_loading(model: nn.Module) -> Iterator[None]:
    """The export's weights are compared elsewhere, and are not loaded once more."""
    kept = speaking.loaded
    speaking.loaded = lambda cfg, export, base="": (model, {})
    try:
        yield
    finally:
        speaking.loaded = kept


def otherwise(context: GateContext, model: nn.Module, folder: Path, prompts: Iterable[Asked]) -> str:
    """Return how the recipe's `speaker` of the export in `folder` asks another question than training did; "" if it does not, or if there
    is none. `model`: the trained one."""
    make = inspect.unwrap(context.train).__globals__.get("speaker")
    if make is None:
        return ""
    with _without_loading(model):
        speaker = make(context.cfg, folder)
    for turns, tools, due in prompts:
        if (got := speaker.ids(turns, tools)) != due:
            same = next((i for i, (a, b) in enumerate(zip(got, due, strict=False)) if a != b), min(len(got), len(due)))
            here, there = (speaker.tokenizer.decode(ids[max(0, same - 3) : same + 8]) for ids in (got, due))
            return f"`predict` and `chat` ask with {len(got)} tokens, {here!r} from token {same}; training with {len(due)}, {there!r}"
    return ""


def of_chat(chat: Chat, some: Iterable[str]) -> list[Asked]:
    """Return prompts of a chat, plain texts or conversations."""
    given = [(chat.given(prompt), chat.ask(chat.turns(prompt), prompt)) for prompt in some]
    return [Asked(one["messages"], one.get("tools"), ids) for one, ids in given]


def of_texts(some: Iterable[tuple[str, list[int]]]) -> list[Asked]:
    """Return prompts of one text each, with their tokens in training."""
    return [Asked([{"role": "user", "content": text}], None, ids) for text, ids in some]


def of_prompts(stage: Stage) -> list[Asked]:
    """Return some prompts of a stage that keeps them as texts and as tokens (rl/rlhf)."""
    data = stage.data["prompts"]
    return of_texts(zip(data.texts[:SOME], data.ids[:SOME], strict=True))
