"""How much a generated answer is like the one that is wanted, by name: for every script, and for a function of the user's.

F1, ROUGE-L and exact match count words; a word is what its script's readers take for one: letters and their marks between other
signs, each sign of a script without spaces (Chinese, Japanese, Thai, ...), and in names what capitals, underscores and digits part.
"""

import importlib.util
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import numpy as np
from torch import Tensor
from trainworthy.core.data import texts
from trainworthy.core.report.intervals import bootstrap, wilson
from trainworthy.recipes.shared import functions

from trainworthy import core

Score = Callable[[str, str], float]
UNSPACED = re.compile(f"[{texts.UNSPACED}]")
NAMES = "exact, f1, rouge1, rouge2, rouge (ROUGE-L), bleu, chrf, perplexity, module:function or file.py:function"


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    if text.isascii():
        return [w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", text)]
    found: list[str] = []
    kind = ""  # of the word that is being read: letters, digits, or none
    for sign in unicodedata.normalize("NFC", text):
        category = unicodedata.category(sign)
        if UNSPACED.match(sign) and category[0] in "LMN":
            new, now = category[0] != "M", ""  # a mark belongs to the sign before it
        else:
            now = {"L": "letters", "M": "letters", "N": "digits"}.get(category[0], "")
            capital = category == "Lu" and found and kind == "letters" and not found[-1][-1].isupper()
            follows = (
                category == "Ll" and found and len(found[-1]) > 1 and found[-1].isupper()
            )  # HTTPS·erver, as in ASCII
            new = now != kind or capital or follows
            if not now:
                kind = ""
                continue
        if new or not found:
            found.append(sign)
        else:
            found[-1] += sign
        kind = now
    return [w.casefold() for w in found]


def scripts(texts: list[str]) -> str:
    """The scripts that texts are written in, by their share of the letters: `latin 93%, cyrillic 7%`."""
    signs = Counter(sign for text in texts for sign in text if sign.isalpha())
    found: Counter[str] = Counter()
    for sign, n in signs.items():
        found[unicodedata.name(sign, "other").split()[0].split("-")[0].lower()] += n
    return ", ".join(
        f"{name} {n / found.total():.0%}" for name, n in found.most_common(4) if n >= 0.005 * found.total()
    )


def f1(prediction: str, wanted: str) -> float:
    """F1 over words (SQuAD's, Rajpurkar 2016), which is ROUGE-1."""
    return overlap(prediction, wanted, 1)


def exact(prediction: str, wanted: str) -> float:
    """The very text."""
    return float(prediction == wanted)


def rouge(prediction: str, wanted: str) -> float:
    """ROUGE-L (Lin 2004): F1 of the longest common subsequence of words."""
    a, b = words(prediction), words(wanted)
    row = [0] * (len(b) + 1)
    for x in a:
        last = 0
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], last + 1 if x == y else max(row[j], row[j - 1])
    return 2 * row[-1] / (len(a) + len(b)) if row[-1] else float(prediction == wanted)


def bleu(prediction: str, wanted: str) -> float:
    """Sentence BLEU with sacrebleu's smoothing (Post 2018), over the words of `words`; 0 to 1. Its mean is not corpus BLEU."""
    import sacrebleu

    if not words(prediction) or not words(wanted):
        return float(prediction == wanted)
    return sacrebleu.sentence_bleu(" ".join(words(prediction)), [" ".join(words(wanted))], tokenize="none").score / 100


def chrf(prediction: str, wanted: str) -> float:
    """chrF2 (Popović 2015) by sacrebleu; 0 to 1."""
    import sacrebleu

    return sacrebleu.sentence_chrf(prediction, [wanted]).score / 100


def overlap(prediction: str, wanted: str, n: int) -> float:
    """ROUGE-N (Lin 2004): F1 of the sequences of n words."""
    a, b = (Counter(zip(*(found[i:] for i in range(n)), strict=False)) for found in (words(prediction), words(wanted)))
    shared = (a & b).total()
    return 2 * shared / (a.total() + b.total()) if shared else float(prediction == wanted)


KNOWN: dict[str, Score] = {"exact": exact, "f1": f1, "rouge1": f1, "rouge2": partial(overlap, n=2), "rouge": rouge, "rougeL": rouge,
                           "bleu": bleu, "chrf": chrf}  # fmt: skip


class Seen:
    """The values of each sample at the last evaluation, for the intervals of their means."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}

    def means(self, values: dict[str, Tensor | tuple[Tensor, Tensor]]) -> dict[str, float]:
        """{metric: its mean over the samples}. A pair is (nats, tokens) of each sample: their perplexity."""
        self.values, found = {}, {}
        for name, value in values.items():
            sums, counts = value if isinstance(value, tuple) else (value, None)
            self.values[name] = (sums.cpu().numpy(), None if counts is None else counts.cpu().numpy())
            found[name] = sums.mean().item() if counts is None else (sums.sum() / counts.sum()).exp().item()
        return found

    def intervals(self) -> dict[str, tuple[float, float]]:
        """{metric: 95% interval} of the last `means`; empty: there was none."""
        found = {}
        for name, (sums, counts) in self.values.items():
            if (
                counts is None and np.isin(sums, (0.0, 1.0)).all()
            ):  # a share: resampling none of 36 would give an interval of no width
                found[name] = wilson(round(sums.sum()), len(sums))
                continue
            low, high = bootstrap(sums, counts)
            found[name] = (low, high) if counts is None else (math.exp(low), math.exp(high))
        return found


def named(metrics: str) -> list[str]:
    """The names of `f1,rouge`; the first is what the best checkpoint is chosen by."""
    found = [name.strip() for name in metrics.split(",") if name.strip()]
    if not found:
        raise core.UserError("--metric names no metric", needed=NAMES)
    for name in found:
        if name != "perplexity":
            score(name)
    return list(dict.fromkeys(found))


@cache
def score(name: str) -> Score:
    """The function of a name: score(said, wanted), 0 to 1."""
    if name in KNOWN:
        if name in ("bleu", "chrf") and importlib.util.find_spec("sacrebleu") is None:
            raise core.UserError(f"--metric {name} needs the package 'sacrebleu', which is not installed",
                                 next="pip install 'trainworthy[llm]'")  # fmt: skip
        return KNOWN[name]
    if ":" not in name:
        raise core.UserError(f"--metric {name}: no such metric", needed=NAMES)
    found = functions.imported(name, "--metric", NAMES)

    def own(prediction: str, wanted: str) -> float:
        try:
            value = float(found(prediction, wanted))
        except Exception as error:
            raise core.UserError(f"--metric {name} raised {type(error).__name__}: {error}", got=f"answer {prediction!r}, wanted {wanted!r}",
                                 needed="a number for any two texts") from error  # fmt: skip
        if not math.isfinite(value):
            raise core.UserError(f"--metric {name} returned {value}", got=f"answer {prediction!r}, wanted {wanted!r}",
                                 needed="a finite number; 1 is the best")  # fmt: skip
        return value

    return own


def metric(name: str, question: str, vocabulary: int) -> core.Metric:
    """What the best checkpoint is chosen by."""
    if name == "perplexity":  # of one that gives every token the same probability: the vocabulary
        return core.Metric(name, "how surely are the wanted answers expected?", floor=float(vocabulary), ceiling=1.0,
                           higher_is_better=False)  # fmt: skip
    questions = {"f1": question, "exact": "how many answers are the wanted one?", "rouge": "how long is the part that answers share?",
             "bleu": "how many word sequences are the wanted answer's?",
             "chrf": "how many letter sequences are the wanted answer's?"}  # fmt: skip
    return core.Metric(key(name), questions.get(name, f"{name} of the answers"), floor=0.0, ceiling=1.0)


def key(name: str) -> str:
    """The name of a metric's values: without a module's path."""
    return name.rpartition(":")[2]
