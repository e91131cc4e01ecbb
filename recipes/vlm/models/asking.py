"""Asks an exported vision-language model about pictures: what `trainworthy predict` uses for `vlm/instruct`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.data.loader import to_device
from trainworthy.recipes.llm.data.formats import BadRow
from trainworthy.recipes.llm.models import speaking
from trainworthy.recipes.vlm.data import conversations, questions
from trainworthy.recipes.vlm.data.questions import Questions
from trainworthy.recipes.vlm.data.rows import PLACE
from trainworthy.recipes.vlm.models import hub, language

ANYTHING = "?"  # in the place of an answer that is to be generated
LONGEST = 10**9  # tokens: a row that does not fit into the context fails there
KNOWN = ("question", "answer", "messages", "conversations")


class Eyes(nn.Module):
    """The exported encoder and projector in one."""

    def __init__(self, file: Path, side: int):
        super().__init__()
        self.program = (torch.export.load(file).module(),)  # in a tuple: a program has no train() or to()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        return self.program[0](images.cpu()).to(images.device)


@dataclass
class Asker:
    """An export, and how a row is asked."""

    called: str
    model: nn.Module
    device: torch.device
    made: Callable[[Any], Questions]
    """(conversations) -> their rows of tokens."""
    separator: str
    """What is between a picture's place and a question that is no conversation, as in training."""
    most: int
    images: str = ""
    """`--data.images` of the run; without it a file names pictures from its own folder."""
    unspoken = "it answers questions about pictures"
    noun = "answers"

    def read(self, file: Path) -> list[dict[str, Any]]:
        """Return the rows of a file with the conversation that each asks. One message lists every bad row."""
        root = Path(self.images) if self.images and Path(self.images).is_dir() else file.absolute().parent
        return speaking.usable(file, lambda row: self._row(row, root), "", what="asked",
                               needed="image (a path next to the file) and question, or messages with images")  # fmt: skip

    def _row(self, row: dict[str, Any], root: Path) -> dict[str, Any]:
        name = next((k for k in ("messages", "conversations") if k in row), "")
        due = row.get("answer")
        try:
            if name:
                turns = list(row[name]) if isinstance(row[name], list) else row[name]
                if isinstance(turns, list) and turns and isinstance(turns[-1], dict):
                    last = conversations.ROLES.get(turns[-1].get("role", turns[-1].get("from")))
                    if last == "assistant":
                        due = turns.pop()
                        due = due.get("content", due.get("value"))
                    turns = [*turns, {"role": "assistant", "content": ANYTHING}]
                talk = conversations.conversation(row | {name: turns})
            else:
                if not (
                    isinstance(row.get("image"), str)
                    and isinstance(row.get("question"), str)
                    and row["question"].strip()
                ):
                    raise conversations.BadLine(f"no image and question (it has {', '.join(row)})")
                question = f"{PLACE}{self.separator}{conversations.plain(row['question'])}"
                talk = conversations.Conversation((row["image"],), ((question, ANYTHING),))
        except conversations.BadLine as fault:
            raise BadRow(str(fault)) from None
        if not talk.pictures:
            raise BadRow("no picture")
        if wrong := [w for p in talk.pictures if isinstance(w := conversations.looked_at(root / p), str)]:
            raise BadRow("a picture cannot be read", wrong[0])
        kept = {k: v for k, v in row.items() if k not in KNOWN} | (
            {"question": row["question"]} if not name else {name: row[name]}
        )
        return {
            "row": kept | ({"reference": due} if isinstance(due, str) and due.strip() else {}),
            "talk": talk,
            "root": root,
        }

    def answers(self, rows: list[dict[str, Any]], size: int) -> Iterator[dict[str, Any]]:
        """Yield each row with the answer to its last question, `size` of them at once."""
        for i in range(0, len(rows), size):
            some = rows[i : i + size]
            data = self.made(conversations.Conversations(some[0]["root"], [one["talk"] for one in some], ("question",)))
            batch = to_device(data.collate([data.get(k, None) for k in range(len(data))]), self.device)
            prompt_rows = questions.prompts(batch)
            with torch.inference_mode():
                found = self.model.speak(prompt_rows.batch, self.most, data.ends).tolist()
            # Of several questions in a conversation, the last one
            last = dict(zip(prompt_rows.rows, found, strict=True))
            for k, one in enumerate(some):
                end = next((n for n, token in enumerate(last[k]) if token in data.ends), None)
                ids = last[k][:end]
                yield one["row"] | {"answer": data.texts(ids), "ended": end is not None, "tokens": len(ids)}

    def cut(self, n: int, of: int) -> str:
        """Return what to say of answers that did not end; empty: all did."""
        return speaking.cut(n, of, self.most)


def asker(cfg: Any, export: Path, towers: type[nn.Module]) -> Asker:
    """Load an export of `vlm/instruct`. `towers`: the recipe's class of three towers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = json.loads((export / "config.json").read_text())
    if cfg.model:
        name = str(export / "model")
        model = hub.Whole(name)
        made = lambda source: hub.Templated(source, name, takes=model.reads, longest=LONGEST)  # noqa: E731
    else:
        folder = str(export / "language")
        words = language.tokenizer(folder, "", cfg.eos_token)
        model = towers(Eyes(export / "vision.pt2", about["side"]), nn.Identity(), language.whole(folder))
        made = lambda source: Questions(source, words, features=model.features, side=about["side"], longest=LONGEST)  # noqa: E731
    separator = "" if about["conversations"] or cfg.model else "\n"
    return Asker(
        str(export), model.to(device).eval(), device, made, separator, about["max_new_tokens"], cfg.data.images
    )
