"""What a name says: its words, and for a metric whether more or less of it is better."""

import re

LESS = ("loss", "losses", "error", "errors", "err", "mse", "mae", "nll", "ppl", "perplexity")
"""Ends of words of which less is better."""
LESS_WORDS = {"wer", "cer", "ter", "fid", "kid", "lpips", "ece", "brier", "mape", "smape", "bits", "bpb", "bpc"}
MORE = ("acc", "accuracy", "recall", "precision", "iou", "bleu", "auc", "auroc")
MORE_WORDS = {"f1", "dice", "map", "ap", "r2", "psnr", "ssim", "exact", "chrf", "rouge", "rouge1", "rouge2", "rougel", "rougelsum", "ndcg",
              "mrr", "mcc", "matthews", "pearson", "pearsonr", "spearman", "spearmanr", "kappa", "corr", "correlation"}  # fmt: skip


def words(name: str) -> list[str]:
    """Return the words of a name in small letters: `val_loader`, `valLoader`, `VAL_LOADER`."""
    return [w for w in re.split(r"[_\W]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) if w]


def more_is_better(name: str) -> bool | None:
    """Return which way a metric is better by its name: False for `val_loss` and `dice_loss`, True for `eval/f1_macro` and `mIoU`; None where
    the name does not say it (`score`, `neg_mean_squared_error`)."""
    found = {*words(name), *re.split(r"[_\W]+", name.lower())}
    found = (found | {w.rstrip("0123456789") for w in found}) - {""}  # err1, acc5
    if found & {"neg", "negative", "minus"}:
        return None
    one = " " not in name.strip()  # else it may be `accuracy if best else loss`
    if one and any(w.endswith(("loss", "losses")) for w in found):
        return False
    less = any(w.endswith(LESS) or w in LESS_WORDS for w in found)
    more = any(w.endswith(MORE) or w in MORE_WORDS for w in found)
    return more if less != more else None
