"""Conversations about images, with any number of turns and images in a sample and every answer scored, in the formats of LLaVA and
of the hub.

{"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}
{"images": ["a.jpg", "b.jpg"], "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text",
"text": "Which is larger?"}]}, {"role": "assistant", "content": "The first."}]}

Content may be one text with `<image>` in it, and a part may have its own "path". Images without a place in the text come before the
first question.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.vision.data.pictures import decode
from trainworthy.recipes.vlm.data.rows import PLACE, Question

OPENED = 5000  # pictures that are opened before training
ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


class Conversation(NamedTuple):
    """One conversation."""

    pictures: tuple[str, ...]
    turns: tuple[tuple[str, str], ...]
    """Questions, with PLACE for each image, and answers."""
    system: str = ""
    unanswered: bool = False
    """Whether a last question without an answer was left off."""


class BadLine(ValueError):
    """Why a line is not a conversation."""


def conversation(line: dict[str, Any]) -> Conversation:
    """Parse a line with `conversations` or `messages`. Raises `BadLine`."""
    name = "messages" if "messages" in line else "conversations"
    if not isinstance(line[name], list) or not all(isinstance(turn, dict) for turn in line[name]):
        raise BadLine(f"{name} is {type(line[name]).__name__}, not a list of turns")
    images = line.get("images", line.get("image", []))
    pictures, own, turns, system = [images] if isinstance(images, str) else list(images or ()), [], [], ""
    for k, turn in enumerate(line[name]):
        role = ROLES.get(turn.get("role", turn.get("from")))
        text, brought = _content(turn.get("content", turn.get("value")), k)
        own += brought
        if role == "system" and not k:
            system = text
        elif role != ("user", "assistant")[len(turns) % 2]:
            raise BadLine(
                f"turn {k} is of {turn.get('role', turn.get('from'))!r}: a user and the assistant take turns, the user first"
            )
        elif role == "assistant" and turn.get("weight", 1) not in (None, 1):
            raise BadLine(f"turn {k} has the weight {turn['weight']}, and every answer is trained alike")
        elif not text.strip():
            raise BadLine(f"turn {k}, of the {role}, is empty")
        elif role == "assistant" and PLACE in text:
            raise BadLine(f"turn {k}: {PLACE} in an answer")
        else:
            turns.append(text)
    unanswered = len(turns) % 2 == 1  # a last question without an answer is left off, and counted
    turns = turns[: len(turns) // 2 * 2]
    if not turns:
        raise BadLine("it has no answer")
    pictures = pictures or own
    if not all(isinstance(p, str) for p in pictures):
        raise BadLine(f"a picture is a {type(pictures[0]).__name__}, not a path")
    places = sum(text.count(PLACE) for text in turns) + system.count(PLACE)
    if pictures and not places:
        turns[0] = PLACE * len(pictures) + turns[0]
    elif len(pictures) != places:
        raise BadLine(f"{places} {PLACE} for {len(pictures)} pictures")
    return Conversation(tuple(pictures), tuple(zip(turns[::2], turns[1::2], strict=True)), system, unanswered)


def _content(content: Any, k: int) -> tuple[str, list[str]]:
    """Return (text with PLACE for each image, paths of its images)."""
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadLine(f"turn {k} says {content!r:.40}, neither a text nor a list of parts")
    text, own = "", []
    for part in content:
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        elif part.get("type") == "image":
            text += PLACE
            own += [part[key] for key in ("path", "image", "url") if part.get(key)][:1]
        else:
            raise BadLine(f"turn {k} has a part of type {part.get('type')!r}: text and image are known")
    return text, own


class Conversations:
    """Conversations of one split, with their images. Those without an image are left out and counted: they belong to llm/sft."""

    def __init__(self, root: Path, talks: list[Conversation], kinds: tuple[str, ...]):
        self.talks = [t for t in talks if t.pictures]
        self.kinds, self.root, self.note = kinds, root, ""
        if out := len(talks) - len(self.talks):
            self.note = f"{out:,} of {len(talks):,} conversations have no picture and are left out"
        if not self.talks:
            raise UserError(f"no conversation mentions a picture in {root}", got=self.note, needed="image or images next to the turns",
                            next="trainworthy run llm/sft, for text alone")  # fmt: skip
        names = list(dict.fromkeys(name for t in self.talks for name in t.pictures))
        self.found = looked_over(root, names)
        self.unopened = self.found.note

    def __len__(self) -> int:
        return len(self.talks)

    def questions(self, index: int) -> list[Question]:
        """Return its questions with their answers; later ones follow earlier ones."""
        return [Question(self._kind(q), q, a) for q, a in self.talks[index].turns]

    def _kind(self, question: str) -> int:
        text = plain(question)
        return self.kinds.index(text) if text in self.kinds else 0

    def system(self, index: int) -> str:
        """Return the text before the first question."""
        return self.talks[index].system

    def count(self, index: int) -> int:
        """Return its number of images."""
        return len(self.talks[index].pictures)

    def sizes(self, index: int) -> list[tuple[int, int]]:
        """Return (height, width) of each image."""
        return [self.found[name] for name in self.talks[index].pictures]

    def images(self, index: int) -> list[Tensor]:
        """Return its images, (3, H, W) in 0-255 each."""
        return [opened(self.root / name) for name in self.talks[index].pictures]


def plain(question: str) -> str:
    """Return a question without its image places."""
    return question.replace(PLACE, "").strip()


class SingleQuestions:
    """A source with independent questions about one image, each as its own conversation."""

    note = ""

    def __init__(self, source: Any):
        self.source, self.kinds = source, source.kinds
        self.of = [(i, q) for i in range(len(source)) for q in range(len(source.questions(i)))]

    def __len__(self) -> int:
        return len(self.of)

    def questions(self, index: int) -> list[Question]:
        """Return the only question, after its image."""
        i, q = self.of[index]
        one = self.source.questions(i)[q]
        return [one._replace(question=PLACE + one.question)]

    def system(self, index: int) -> str:
        """Return the empty text."""
        return ""

    def count(self, index: int) -> int:
        """One image."""
        return 1

    def sizes(self, index: int) -> list[tuple[int, int]]:
        """Return (height, width) of the image."""
        return [self.source.size(self.of[index][0])]

    def images(self, index: int) -> list[Tensor]:
        """Return the image, (3, H, W) in 0-255."""
        return [self.source.image(self.of[index][0])]


class Sizes(dict):
    """(height, width) of each image by its name; images that were not opened before training are read when needed."""

    note = ""

    def __init__(self, root: Path, found: dict[str, tuple[int, int]]):
        super().__init__(found)
        self.root = root

    def __missing__(self, name: str) -> tuple[int, int]:
        if isinstance(size := looked_at(self.root / name), str):
            raise UserError(f"cannot read a picture in {self.root}", got=size, needed="a picture that Pillow opens")
        self[name] = size
        return size


def looked_over(root: Path, names: list[str]) -> Sizes:
    """Return (height, width) of each image. Unreadable images raise UserError with their number."""
    sizes, bad = examined(root, names)
    if bad:
        raise UserError(f"{len(bad):,} of {len(names):,} pictures in {root} cannot be read", got=next(iter(bad.values())),
                        needed="a picture that Pillow opens; paths are the folder's")  # fmt: skip
    return sizes


def examined(root: Path, names: list[str]) -> tuple[Sizes, dict[str, str]]:
    """Return (height and width of each image, {name: why} of those that cannot be read). At most OPENED images are opened, evenly spaced;
    of the others it is known that they exist."""
    some = names if len(names) <= OPENED else [names[i * len(names) // OPENED] for i in range(OPENED)]
    others = set(names) - set(some)
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(some, pool.map(looked_at, (root / name for name in some)), strict=True))
        there = dict(zip(others, pool.map(os.path.isfile, (root / name for name in others)), strict=True))
    bad = {name: why for name, why in found.items() if isinstance(why, str)}
    bad |= {name: f"{name}: no such file" for name, is_there in there.items() if not is_there}
    sizes = Sizes(root, {name: size for name, size in found.items() if name not in bad})
    if others:
        sizes.note = f"{len(some):,} of {len(names):,} were opened before training; the others are there, and read when they are needed"
    return sizes, bad


def looked_at(path: Path) -> tuple[int, int] | str:
    """Return (height, width) of an image after its EXIF rotation, or why it cannot be read."""
    try:
        with Image.open(path) as image:
            turned = "exif" in image.info and image.getexif().get(274, 1) > 4
            size = image.size if turned else image.size[::-1]
            image.verify()
    except FileNotFoundError:
        return f"{path.name}: no such file"
    except Exception as error:  # Pillow raises many types on damaged files
        return f"{path.name}: {error}"
    return size


def opened(path: Path) -> Tensor:
    """Read an image, (3, H, W) in 0-255."""
    try:
        return decode(Image.open(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the picture {path}", got=error, needed="a whole picture", cause="a file that was cut off"
        ) from None
