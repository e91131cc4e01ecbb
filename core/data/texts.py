"""Finds what the texts of two splits share: equal texts, shared chunks of four or more words, near duplicates. Writes
exclusion lists.

Words are compared without case and punctuation. Only rare chunks show that two texts have a common origin: a chunk that
occurs in more than `RARE` training texts is a common phrase or a template.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainworthy.core.base.errors import UserError

MIN = 4  # words; any two texts of one language share shorter chunks
RARE = 3  # training texts
# A validation text is a near duplicate if one training text has this fraction of its rare chunks. Found: copies with a tenth of
# the words changed: 105 of 117; windows that overlap by half: all; sentences of known words (a grammar): none.
KNOWN = 0.4
COMPARED = 500  # training texts that are looked for among the others
# Different lengths that texts must have, and the share that ends at the longest, to call them cut
LENGTHS, CUT = 30, 0.05
SHORT, DIFFERENT = 5, 50  # lengths of short texts, different texts of the longest
MOST, SOME = 0.3, 0.1  # their share, if they are twice as many as those of any other length, or four times
# Scripts whose words no space parts: Thai, Lao, Burmese, Khmer, Chinese and Japanese
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(rf"(?=\w)[{UNSPACED}]|[^\W{UNSPACED}]+")
LISTS = {"texts": "exclude_texts.json", "chunks": f"exclude_chunks_min{MIN}.json"}


def words(text: str) -> list[str]:
    """Return the words, without case and punctuation. In scripts without spaces each sign is one: a clause is no word."""
    return WORD.findall(_without_keys(text).casefold())


def _without_keys(text: str) -> str:
    """Return a text with conversations in JSON, one a line, replaced by what their turns say: a reader must not find `role content` among
    the words that two splits share."""
    if '"role"' not in text:
        return text
    return "\n".join(_turns(line) if line.startswith(("{", "[")) else line for line in text.splitlines())


def _turns(line: str) -> str:
    try:
        found = json.loads(line)
    except ValueError:
        return line
    turns = found.get("messages") if isinstance(found, dict) else found
    spoken = isinstance(turns, list) and turns and all(isinstance(t, dict) and "role" in t for t in turns)
    return "\n".join(_values(found)) if spoken else line


def _values(found: Any) -> Iterator[str]:
    """Yield every text and number in a conversation, without the names of their places and without roles."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key not in ("role", "type"):
                yield from _values(value)
    elif isinstance(found, list):
        for value in found:
            yield from _values(value)
    elif isinstance(found, str | int | float) and not isinstance(found, bool):
        yield str(found)


def normal(text: str) -> str:
    """Return the normalised text; two texts are equal if theirs are."""
    return " ".join(words(text))


def chunks(text: list[str]) -> list[tuple[str, ...]]:
    """Return every run of `MIN` words."""
    return [tuple(text[i : i + MIN]) for i in range(len(text) - MIN + 1)]


def cut_at(texts: list[str], tokens: list[int] | None = None) -> tuple[int, int] | None:
    """Return (characters, how many texts) if many texts end at one length, the longest of all: they were cut there. With `tokens` (how many
    each text has), a length is a number of tokens."""
    each = tokens or [len(t) for t in texts]
    sizes = Counter(each)
    if len(sizes) < SHORT:
        return None if tokens else _all_cut_at(texts, sizes)
    longest = max(sizes)
    if len(sizes) < LENGTHS:
        return _short_cut_at([t for t, n in zip(texts, each, strict=True) if n == longest], sizes)
    near = sum(n for size, n in sizes.items() if 0.8 * longest <= size < longest)
    usual = near / (0.2 * longest)  # texts of one length, a little below it
    whole = sizes[longest]
    return (longest, whole) if whole >= CUT * len(texts) and whole > 10 * max(1.0, usual) else None


def _all_cut_at(texts: list[str], sizes: Counter[int]) -> tuple[int, int] | None:
    """The same for texts that nearly all have one length, or one character less (a space at the cut). Different texts of several words have
    one length if all were cut, or if a template wrote them; texts of a template end with one of a few words."""
    longest = max(sizes, default=0)
    ends = [t for t in texts if len(t) >= longest - 1]
    if len(ends) < 0.95 * len(texts) or len(set(ends)) < DIFFERENT:
        return None
    if sum(len(t.split()) >= 3 for t in ends) < MOST * len(ends):
        return None
    last = {t.split()[-1] for t in ends if t.split()}
    return None if _are_codes(ends) or len(last) < 0.2 * len(set(ends)) else (longest, len(ends))


def _are_codes(texts: list[str]) -> bool:
    """Return whether a twentieth of the characters are digits: codes, dates and numbers have one length by nature."""
    characters = "".join(texts)
    return sum(c.isdigit() for c in characters) >= 0.05 * len(characters)


def _short_cut_at(ends: list[str], sizes: Counter[int]) -> tuple[int, int] | None:
    """The same for texts of few lengths: many of them, and many different ones, must end at the longest. `ends`: those that do."""
    longest = max(sizes)
    rest = max(n for size, n in sizes.items() if size < longest)
    many = len(ends) > max(MOST * sizes.total(), 2 * rest) or len(ends) > max(SOME * sizes.total(), 4 * rest)
    return (longest, len(ends)) if many and len(set(ends)) >= DIFFERENT and not _are_codes(ends) else None


@dataclass
class Shared:
    """What `val` has in common with `train`; positions are those in the compared lists."""

    total: int
    """Distinct texts in `val`."""
    exact: list[tuple[int, int]] = field(default_factory=list)
    """(position in val, in train) of equal texts, for every copy in val."""
    near: list[tuple[int, int, float]] = field(default_factory=list)
    """(position in val, in train, fraction of the rare chunks) of near duplicates, and of equal texts of at least `MIN`
    words."""
    expected: float | None = None
    """How many near duplicates a random split of the training texts has, if there are several."""
    closest: float = 0.0
    """Largest fraction of a text's rare chunks that one training text has."""
    texts: list[str] = field(default_factory=list)
    """The equal texts, normalised."""
    chunks: list[str] = field(default_factory=list)
    """Longest runs of at least `MIN` words that are rare in `train`, longest first."""
    common: int = 0
    """Chunks of `MIN` words that occur in more than `RARE` training texts; they do not count."""
    usual: int = 0
    """Texts in val that equal one in train but identify no sample (`yes`, a class name); they do not count."""

    def report(self) -> dict[str, Any]:
        """For data.json: counts, and the first twenty of each."""
        expected = {} if self.expected is None else {"expected_near": round(self.expected, 1)}
        return {"texts": self.total, "exact": len(self.exact), "exact_pairs": self.exact[:20], "near": len(self.near),
                "near_pairs": self.near[:20], "closest": round(self.closest, 4), "chunks": len(self.chunks),
                "longest_chunks": self.chunks[:20], "common_chunks": self.common, "usual": self.usual, **expected}  # fmt: skip


def shared(train: list[str], val: list[str], *, whole: bool = True) -> Shared:
    """Compare two splits. A near duplicate shares at least `MIN` rare chunks with one training text, and the fraction
    `KNOWN` of all its rare chunks. `whole`: each text is a sample's whole input. If not (an answer, a question about a picture), an
    equal text identifies a sample only if it has at least `MIN` words and occurs in at most `RARE` training samples."""
    out = _compare(train, val, whole)
    if len(out.near) > len(out.exact) + 1:
        out.expected = _expected_near(train, out.total)
    return out


def _compare(train: list[str], val: list[str], whole: bool) -> Shared:
    known = _unique(train)
    usual = set() if whole else {t for t, at in known.items() if len(t.split()) < MIN or len(at) > RARE}
    held_out = _unique(val)
    first, where = [at[0] for at in known.values()], _places(known, held_out)
    out = Shared(len(held_out), common=sum(len(w) > RARE for w in where.values()))
    runs: set[str] = set()
    for text, at in held_out.items():
        if text in usual:
            out.usual += len(at)
            continue
        if text in known:
            out.texts.append(text)
            out.exact += [(v, known[text][0]) for v in at]
        rare = {c: where.get(c, []) for c in chunks(text.split()) if len(where.get(c, [])) <= RARE}
        runs.update(_runs(text.split(), rare))
        share, best = _source(rare)
        source = first[best]
        if text in known:
            share, source = float(bool(chunks(text.split()))), known[text][0]
        out.closest = max(out.closest, share)
        if share >= KNOWN:
            out.near += [(v, source, round(share, 4)) for v in at]
    out.chunks = sorted(runs, key=lambda c: (-len(c.split()), c))
    return out


def _places(known: Iterable[str], texts: Iterable[str], most: int = RARE) -> dict[tuple[str, ...], list[int]]:
    """Return {chunk of `texts`: positions of the texts in `known` that have it}, at most `most` + 1 of them."""
    wanted = {c for text in texts for c in chunks(text.split())}
    where: dict[tuple[str, ...], list[int]] = {}
    for i, text in enumerate(known):
        for chunk in set(chunks(text.split())) & wanted:
            found = where.setdefault(chunk, [])
            if len(found) <= most:
                found.append(i)
    return where


def _expected_near(train: list[str], n: int) -> float:
    """Return how many of `n` texts have a near duplicate in `train` if they are a random part of the same texts: the share of training texts
    that are a near duplicate of another one, times `n`. Equal texts do not count."""
    known = [*_unique(train)]
    some = range(0, len(known), max(1, len(known) // COMPARED))
    where, alike = _places(known, [known[i] for i in some], RARE + 1), 0  # one of them is the text itself
    for i in some:
        others = {c: [j for j in where[c] if j != i] for c in chunks(known[i].split())}
        rare = {c: ids for c, ids in others.items() if len(ids) <= RARE}
        alike += _source(rare)[0] >= KNOWN
    return alike / max(1, len(some)) * n


def _source(rare: dict[tuple[str, ...], list[int]]) -> tuple[float, int]:
    """Return (fraction, training text) of the text with most of these chunks; nothing if it has fewer than `MIN` of
    them."""
    ((best, n),) = Counter(i for ids in rare.values() for i in ids).most_common(1) or [(0, 0)]
    return (n / len(rare), best) if n >= MIN else (0.0, 0)


def _unique(texts: list[str]) -> dict[str, list[int]]:
    """Return {normalised text: positions}, without texts that have no word."""
    found: dict[str, list[int]] = {}
    for i, text in enumerate(texts):
        if plain := normal(text):
            found.setdefault(plain, []).append(i)
    return found


def _runs(text: list[str], rare: dict[tuple[str, ...], list[int]]) -> Iterator[str]:
    """Join consecutive chunks that are in the same training text."""
    start, inside = 0, set()
    for i, chunk in enumerate([*chunks(text), ()]):
        now = set(rare.get(chunk, ()))
        if inside and not inside & now:
            yield " ".join(text[start : i + MIN - 1])
            inside = set()
        if not inside:
            start, inside = i, now
        else:
            inside &= now


class Exclusions:
    """Lists of texts and chunks that must stay out of training, because validation contains them."""

    def __init__(self, texts: list[str], chunks: list[str]):
        self.texts = {normal(t) for t in texts}
        self.chunks: dict[tuple[str, ...], list[list[str]]] = {}
        for chunk in chunks:
            self.chunks.setdefault(tuple(words(chunk)[:MIN]), []).append(words(chunk))

    def __call__(self, text: str) -> bool:
        """Return whether `text` must stay out of training."""
        all_words = words(text)
        return " ".join(all_words) in self.texts or any(
            all_words[i : i + len(c)] == c
            for i, start in enumerate(chunks(all_words))
            for c in self.chunks.get(start, ())
        )


def load_exclusions(folder: str | Path) -> Exclusions:
    """Load the lists in `folder`, each a JSON list of strings; a missing list excludes nothing.

    In a recipe: `skip = core.load_exclusions(folder)`, then keep the training texts for which `skip(text)` is false.
    """
    if not Path(folder).is_dir():
        raise UserError(
            f"no folder {folder} with exclusion lists",
            cause="`data` has not written them",
            next="trainworthy data RECIPE",
        )
    return Exclusions(**{kind: _read(Path(folder) / name) for kind, name in LISTS.items()})


def write_exclusions(folder: Path, found: list[Shared]) -> Exclusions:
    lists = {
        "texts": sorted({t for s in found for t in s.texts}),
        "chunks": sorted({c for s in found for c in s.chunks}),
    }
    for kind, name in LISTS.items():
        (folder / name).write_text(json.dumps(lists[kind], indent=1, ensure_ascii=False))
    return Exclusions(**lists)


def _read(path: Path) -> list[str]:
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} cannot be read", got=error, needed="a JSON list of texts") from None
    if not isinstance(found, list) or not all(isinstance(t, str) for t in found):
        raise UserError(f"{path} is not an exclusion list", got=type(found).__name__, needed="a JSON list of texts",
                        next="trainworthy data RECIPE")  # fmt: skip
    return found
