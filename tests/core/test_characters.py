"""Texts of one split that were cleaned in another way than those of the other."""

import random
from pydoc_data.topics import topics

import pytest
from trainworthy.core.data.characters import misread, unknown

PAGES = sorted(topics.values())


def split(seed: int, n: int = 40) -> tuple[list[str], list[str]]:
    rows = [*PAGES]
    random.Random(seed).shuffle(rows)
    return rows[n:], rows[:n]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("cleaned", "kind"),
    [
        (lambda text: " ".join(text.split()), "a line break"),
        (str.lower, "a capital letter"),
        (lambda text: "".join(c for c in text if c.isalnum() or c.isspace()), "punctuation"),
    ],
)
def test_training_texts_that_were_cleaned_alone(cleaned, kind: str, seed: int):
    train, val = split(seed)
    assert unknown([cleaned(text) for text in train], val)[0] == kind
    assert unknown([cleaned(text) for text in train], [cleaned(text) for text in val]) is None
    assert unknown(train, [cleaned(text) for text in val]) is None, "training has more than is asked for"


@pytest.mark.parametrize("seed", range(5))
def test_a_random_split_and_small_ones_are_no_fault(seed: int):
    train, val = split(seed)
    assert unknown(train, val) is None
    assert unknown([text.lower() for text in train[:15]], val) is None, "too few to say never"
    assert unknown([text.lower() for text in train], [*map(str.lower, val[:35]), *val[35:]]) is None, "five of forty"
    assert unknown([], val) is None


def test_bytes_of_utf_8_that_were_read_as_letters():
    """In Latin-1 (with controls) and in Windows-1252; texts in other letters are as they should be."""
    russian, english = "Привет, мир", "It\u2019s a caf\u00e9 \u2013 \u201cfine\u201d"
    windows = "".join(bytes([b]).decode("cp1252", "ignore") or chr(b) for b in english.encode())
    assert misread([russian.encode().decode("latin-1")]) == (1, 1, "Привет")
    assert misread([windows])[:2] == (1, 1)
    assert misread([russian, english, "plain", "\u4f60\u597d", "na\u00efve"]) == (0, 4, "")
