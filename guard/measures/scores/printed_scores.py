"""Reads the scores that a script prints: every place of its output that shows a number under a known name, with all its values."""

import math
import re
from dataclasses import dataclass, field

SCORES = {
    "acc": r"acc\w*",
    "r2": r"r2|r\^2|r²|r_squared|r2_score|explained_variance",
    "auc": r"\w*auc|auroc|auc_score",
    "ap": r"m?ap|average_precision\w*",
    "f1": r"\w*f1(?:_score)?|f1-score",
    "dice": r"dice\w*",
    "iou": r"m?iou|jaccard\w*",
}
NUMBER = re.compile(
    r"(?<![\w@.\-])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?=db\b|(?![\w.]*[a-z_]{2}))|(?<![\w.])(?:nan|-?inf)(?!\w)",
    re.IGNORECASE,
)
KINDS = {
    "accuracy": (1, [SCORES["acc"], r"exact(?:_match)?", r"em", r"prec(?:_\d+)?", r"top_?[135]", r"rank_?1"]),
    "overlap": (
        1, [SCORES["f1"], SCORES["dice"], SCORES["iou"], r"recall", r"precision", r"sensitivity", r"specificity", r"kappa", r"mcc"]
    ),
    "ranking": (1, [SCORES["auc"], r"c_?index", r"concordance\w*"]),
    "score": (
        1, [SCORES["ap"], r"m?ap_?\d+", r"ndcg\w*", r"mrr\w*", r"h(?:its?|r)(?:_?(?:rate|at))?(?:_?\d+)?", r"(?:recall|precision|r|p)_\d+",
            r"p?snr", r"ssim", r"bleu\w*", r"rouge\w*", r"meteor", r"nmi", r"ari", r"ami", r"silhouette"],
    ),
    "fit": (1, [SCORES["r2"], r"spearman\w*", r"pearson\w*", r"corr(?:elation)?"]),
    "return": (1, [r"rewards?", r"returns?", r"(?:av(?:era)?ge?|mean|episodic|episode|total)_scores?"]),
    "error": (
        -1, [r"r?mse", r"mae", r"s?mape", r"rmsle", r"r[as]e", r"mean_rank", r"err(?:or)?(?:_rate|_\d+)?", r"chamfer\w*", r"[wc]er", r"eer",
             r"fid", r"kid", r"lpips", r"hausdorff\w*", r"emd", r"brier\w*", r"crps"],
    ),
    "likelihood": (1, [r"(?:log_?)?likelihood", r"elbo", r"log_?p_x", r"ll"]),
    "loss": (-1, [r"\w*loss(?:es)?", r"nll", r"ppl", r"perplexity", r"bp[cbd]", r"bits(?:_per)?_dim", r"cross_entropy", r"b?ce", r"nelbo"]),
}  # fmt: skip
"""What is known of a number by its name: its kind -> 1 where more is better, and the names."""
OBJECTIVES = ("loss", "likelihood")
"""Kinds that a training may minimise itself: they count only where no other score is printed."""
BOUNDED = ("accuracy", "overlap", "ranking")
OTHER = re.compile(
    r"(?:^|_)(?:best|min|max|lowest|highest|baseline|random|chance|naive|untrained|initial|before|previous|old|target|threshold|goal|"
    r"d|g|dis|disc|discriminator|critic|gen|generator|real|fake|domain|adv|adversarial|actor|policy|value|td|bellman|q|kl|"
    r"neg|negative|minus|std|var|lr|time)(?:_|$)"
)
"""Names of numbers that need not get better: of an opponent or a reference, the best so far, a spread."""
HELD_OUT = re.compile(r"(?:^|_)(?:vali?|valid|validation|test|eval|evaluation|dev|held_?out|holdout)(?:_|$)")


@dataclass
class Series:
    """One place of the output."""

    name: str
    kind: str
    sign: int
    held_out: bool
    """Named as that of a validation or test set."""
    values: list[float] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """The values, percent of a score from 0 to 1 as shares."""
        percent = self.kind in BOUNDED and max(map(abs, self.values)) > 1.5
        return [x / 100 for x in self.values] if percent else self.values


def series(output: str) -> dict[str, Series]:
    """Return the numbers under a known name by the text before them in their line, its digits left out."""
    found: dict[str, Series] = {}
    for line in output.splitlines():
        if "%|" in line or "Errno" in line:  # a progress bar ("Map: 40%|"), an error of the system and its number
            continue
        end, skipped = 0, -1
        for number in NUMBER.finditer(line[:2000]):
            before, label, begin = line[: number.start()], line[end : number.start()], number.start()
            end = number.end()
            if begin == skipped or (known := kind_of(label)) is None:
                continue
            value = float(number[0])
            if (share := re.match(r"\s*/\s*(\d+)\b", line[end:])) and known[1] in BOUNDED and int(share[1]):
                value, skipped = value / int(share[1]), end + share.start(1)
            key = re.sub(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|-?inf", "#", " ".join(before.split()))[-200:]
            held_out = bool(HELD_OUT.search(plain(before))) and "train" not in plain(label)
            one = found.setdefault(key, Series(*known, held_out))
            one.values.append(value)
    return found


def kind_of(label: str) -> tuple | None:
    """Return name, kind and sign of the number after `label`; None where it is unknown which way is better."""
    words = "_".join(plain(label).split("_")[-5:])
    if OTHER.search(words) or re.search(r"(?:^|[\s(])-(?:elbo|log|ll)", label.lower()):
        return None
    rows = []
    for kind, (sign, names) in KINDS.items():
        for match in re.finditer(rf"(?:^|_)(?:{'|'.join(names)})(?=_|$)", words):
            rows.append((kind == "loss", match.end(), kind, sign))
    if not rows:
        return None
    _, _, kind, sign = max(rows)
    return words.replace("_", " ").strip(), kind, sign


def plain(text: str) -> str:
    """Return a label as words in small letters with _ between them."""
    text = re.sub(r"([a-z])([A-Z][a-z])", r"\1_\2", text).replace("²", "2").lower()
    return re.sub(r"[^a-z0-9]+", "_", text).strip("_")


def comparable(ours: dict[str, Series], others: dict[str, Series]) -> list[tuple[Series, list[float], list[float]]]:
    """Return the places whose numbers differ between two outputs, with the numbers of both, percent as shares. Where the second
    output has fewer scores (it stopped early), their mean stands for the others."""
    rows = []
    for key, one in ours.items():
        if key not in others or not all(map(math.isfinite, (*one.values, *others[key].values))):
            continue
        a, b = one.values, others[key].values[: len(one.values)]
        if one.kind in OBJECTIVES:
            a = a[: len(b)]
        b = b + [sum(b) / len(b)] * (len(a) - len(b))
        if one.kind in BOUNDED and max(map(abs, (*a, *b))) > 1.5:
            a, b = [x / 100 for x in a], [x / 100 for x in b]
        if a != b:
            rows.append((one, a, b))
    return rows


def printed(output: str, span: list[int]) -> float | None:
    """The best accuracy, from 0 to 1, in what was printed between the last whole evaluation and the next batch."""
    if not span:
        return None
    text = printed_between(output, span)
    found = re.findall(r"(?i)\bacc\w*\b[^\d\n]{0,16}(?:(\d+)\s*/\s*(\d+)|(\d+(?:\.\d+)?)\s*(%)?)", text)
    values = []
    for right, of, number, percent in found:
        if right:
            values += [int(right) / int(of)] if int(of) else []
        else:
            values.append(float(number) / 100 if percent or float(number) > 1 else float(number))
    return max(values, default=None)


def scores(text: str) -> dict[str, float]:
    """Return the best of each score that a text names."""
    found = {}
    for name, pattern in SCORES.items():
        rows = re.findall(rf"(?i)(?<![a-z0-9])(?:{pattern})\b[^\d\n-]{{0,12}}(-?\d+(?:\.\d+)?)\s*(%?)", text)
        values = [float(x) / (100 if percent or float(x) > 1.5 else 1) for x, percent in rows]
        if values:
            found[name] = max(values)
    return found


def printed_between(output: str, span: list[int]) -> str:
    """Return what was printed between the end of the last whole evaluation and the next batch."""
    return output.encode()[span[0] : span[1] if span[1] >= 0 else None].decode(errors="replace")
