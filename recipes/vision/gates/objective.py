"""The objectives of classification, segmentation and detection, written from their papers, independently of the recipes.

The gate `formula` compares a loss with them, sample by sample and with its gradient, at weights that have moved. Nothing here is shared
with a recipe's `loss`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.gates.causes import place_weights
from trainworthy.core.gates.checks import formula
from trainworthy.core.gates.checks.formula import Statement, Statements
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.vision.data.masks import IGNORE

COUNTED = 100_000  # training samples at most whose labels are counted for logit adjustment
UNEVEN = 1.5  # ratio of the largest class to the smallest from which on it is looked for
SUBTRACTED = (
    "the logarithms of the classes' shares are subtracted from the logits of training, where they are to be added (logit adjustment, Menon 2020): "
    "rare classes get the smaller loss"
)
# Published values of label smoothing and of focal loss
SMOOTHINGS, GAMMAS = ((0.0, 0.05, 0.1, 0.2), (1.0, 2.0, 3.0, 5.0))


# -------------------------------------------------------------------------------------------------------- classification
def unsmoothed(batch: dict, n: int) -> Tensor:
    """Return (B, n): the target of each sample before smoothing, spread over both classes where pictures are mixed."""
    truth = F.one_hot(batch["label"], n).float()
    if "label2" not in batch:
        return truth
    lam = batch["lam"].float()[:, None]
    return lam * truth + (1 - lam) * F.one_hot(batch["label2"], n)


def classify(context: GateContext, stage: Stage, batch: dict) -> Statements:
    """Cross-entropy with the smoothed target (Szegedy 2016), which is mixed where pictures are, times the class weights; or focal loss.
    Another objective passes if it pulls every sample towards its own class."""
    cfg, logits, label = context.cfg, stage.model(batch["image"]).float(), batch["label"]
    n, log_p = logits.shape[1], logits - logits.logsumexp(1, keepdim=True)
    truth = unsmoothed(batch, n)
    weighted = cfg.balance.by == "weights"
    weights = _class_weights(stage) if weighted or len(stage.data["train"]) <= COUNTED else torch.ones(n)
    weight = weights[label.cpu()].to(logits.device) if weighted else torch.ones_like(log_p[:, 0])
    gamma, eps = (cfg.balance.gamma, 0.0) if cfg.balance.by == "focal" else (0.0, cfg.label_smoothing)

    def ce(eps: float, log_p: Tensor = log_p, truth: Tensor = truth) -> Tensor:
        return -weight * ((truth * (1 - eps) + eps / n) * log_p).sum(1)

    def focused(gamma: float, base: Tensor) -> Tensor:
        return base**gamma * ce(0.0)

    own = (truth * log_p).sum(1).exp()  # (B,) probability of the own class, unless pictures are mixed
    declared = f"focal loss, gamma {gamma:g}" if gamma else f"cross-entropy with label smoothing {eps:g}"
    each = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").sum(1)
    right = {declared: focused(gamma, 1 - own) if gamma else ce(eps)}
    right |= {f"cross-entropy with label smoothing {e:g}": ce(e) for e in SMOOTHINGS}
    right |= {f"focal loss, gamma {g:g}": focused(g, 1 - own) for g in GAMMAS} | {
        "binary cross-entropy of each class": each
    }
    wrong = {}
    if weights.max() >= UNEVEN * weights.min():
        shares = (1 / (n * weights)).log().to(logits.device)
        right["cross-entropy with logit adjustment (Menon 2020)"] = ce(eps, (logits + shares).log_softmax(1))
        wrong[SUBTRACTED] = ce(eps, (logits - shares).log_softmax(1))
    return {
        "ce": Statement(
            right,
            {**wrong,
             **{f"the focal weight is p^{g:g} where (1 - p)^{g:g} is meant": focused(g, own) for g in GAMMAS},
             "the softmax is taken twice": ce(eps, log_p.exp().log_softmax(1)),
             "the softmax runs over the batch, not over the classes": torch.zeros_like(own),
             "classes are one off": ce(eps, truth=truth.roll(1, 1)),
             "the target's probabilities are smoothed twice": ce(1 - (1 - eps) ** 2) if eps else torch.zeros_like(own),
             "the class weights are not applied": ce(eps) / weight},
            own=lambda: _pulls(stage, batch),
        )
    }  # fmt: skip


def _class_weights(stage: Stage) -> Tensor:
    """Return (n,): one over the share of each class in the training set, divided by the number of classes."""
    data = stage.data["train"]
    labels = torch.tensor([int(data.peek(i, "label")) for i in range(len(data))])
    sizes = torch.bincount(labels, minlength=len(data.fields["label"].classes))
    return len(labels) / (len(sizes) * sizes.clamp_min(1))


def _pulls(stage: Stage, batch: dict) -> str:
    """Return what is wrong if the loss of a sample that is not sure of its class falls when the score of its class falls; else ""."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple, out: object) -> object:
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != len(batch["label"]):
            return out
        seen.append(out.detach().requires_grad_())
        return seen[-1]

    with stage.model.register_forward_hook(keep), torch.enable_grad():
        total = sum(stage.loss(stage.model, batch).values())
        slopes = torch.autograd.grad(total, seen, allow_unused=True) if seen and total.requires_grad else ()
    found = [(logits, slope) for logits, slope in zip(seen, slopes, strict=bool(slopes)) if slope is not None]
    if not found or "label2" in batch:
        return ""
    logits, slope = found[0][0], sum(s for _, s in found)
    own = (batch["label"][:, None] == torch.arange(logits.shape[1], device=logits.device)[None]).float()
    p, rises = (own * logits.softmax(1)).sum(1), (own * slope).sum(1)
    astray = (p < place_weights.UNSURE) & (rises > place_weights.ASCENT * slope.abs().max())
    if not astray.any():
        return ""
    i = int(astray.int().argmax())
    return (f"{int(astray.sum())} of {len(p)} samples are pushed away from their own class: at a probability of {p[i]:.2g} the loss "
            "falls when the score of the own class falls")  # fmt: skip


CLASSIFY = formula.gate_of(
    classify, rows="V1 C1",
    causes="an inverted weight: it grows with the probability that it should lower\n"
    "the labels of other samples or other classes\na softmax, a smoothing or a weight that the settings do not name",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- segmentation
def segment(context: GateContext, stage: Stage, batch: dict) -> Statements:
    """Cross-entropy of each pixel that is not void, focal (Lin 2017) if it is set, and Dice (Milletari 2016) of each class that
    occurs in a window: sums over a window. Another form of a term passes if it pulls every pixel towards its own class."""
    cfg, logits, mask = context.cfg, stage.model(batch["image"]).float(), batch["mask"]
    known, n = mask != IGNORE, logits.shape[1]
    truth = F.one_hot(mask.where(known, 0), n).permute(0, 3, 1, 2) * known[:, None]  # (B, n, H, W)
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    own = -(truth * (logits - logits.logsumexp(1, keepdim=True))).sum(1)  # (B, H, W), 0 where void

    def window(each: Tensor) -> Tensor:
        return each.flatten(1).sum(1)

    def focal(power: float) -> Tensor:
        return window(own * (1 - (-own).exp()) ** power) if power else window(own)

    smooth = -(logits - logits.logsumexp(1, keepdim=True)).mean(1) * known
    statements = {
        "ce": Statement(
            {"cross-entropy" if not cfg.focal else f"focal loss, gamma {cfg.focal:g}": focal(cfg.focal),
             **{f"cross-entropy with label smoothing {e:g}": (1 - e) * window(own) + e * window(smooth) for e in (0.05, 0.1, 0.2)}},
            {"void is learnt as class 0": window(F.cross_entropy(logits, mask.where(known, 0), reduction="none")),
             "--focal is not applied": window(own),
             "a mean over the pixels of a window": window(own) / window(known.float()).clamp_min(1),
             "the softmax is taken twice": window(F.cross_entropy(p, mask, ignore_index=IGNORE, reduction="none")),
             "the softmax runs over the batch, not over the classes": torch.zeros_like(window(own))},
            own=lambda: _pulls_pixels(stage, batch, "ce"),
        )
    }  # fmt: skip
    if not cfg.dice:
        return statements

    def dice(p: Tensor, *, void: bool = False, absent: bool = False, power: int = 1) -> Tensor:
        seen = p if void else p * known[:, None]
        both, predicted, there = ((x.flatten(2).sum(2)) for x in (p * truth, seen**power, truth.float()))
        each = 1 - 2 * both / (predicted + there).clamp_min(1)
        return cfg.dice * (each if absent else each * (there > 0)).sum(1)

    statements["dice"] = Statement(
        {"Dice": dice(p), "Dice with squares (V-Net)": dice(p, power=2)},
        {"the softmax runs over the batch, not over the classes": dice(torch.ones_like(p)),
         "a sigmoid of each class, where classes exclude each other: a softmax is meant": dice(logits.sigmoid()),
         "the softmax runs over rows of the picture, not over the classes": dice(logits.softmax(2)),
         "the softmax runs over columns of the picture, not over the classes": dice(logits.softmax(3)),
         "logits instead of probabilities": dice(logits),
         "void pixels count as predicted": dice(p, void=True),
         "classes that do not occur in a window count": dice(p, absent=True)},
        own=lambda: _pulls_pixels(stage, batch, "dice"), setting="dice",
    )  # fmt: skip
    return statements


def _pulls_pixels(stage: Stage, batch: dict, term: str) -> str:
    """Return what is wrong if a loss term of a fork's own (Tversky, weighted classes, hard pixels alone) does not pull the pixels towards
    their own classes; else ""."""

    def total() -> Tensor:
        return formula.term_of(stage.loss(stage.model, batch), term, ("ce", "dice"))

    mask, slope = batch["mask"], place_weights.slopes(stage.model, total)
    if slope is None or slope.ndim != 4 or slope.shape[-2:] != mask.shape[-2:]:
        return "the gradient of single pixels cannot be read"
    with torch.no_grad():
        logits = stage.model(batch["image"]).float()
    known = mask != IGNORE

    def plain() -> Tensor:
        return F.cross_entropy(stage.model(batch["image"]).float(), mask, ignore_index=IGNORE, reduction="sum")

    weighted = place_weights.named(stage.model, total, plain, 1e-4)
    slope, logits, own = slope.movedim(1, -1), logits.movedim(1, -1), mask.where(known, 0)
    if fault := place_weights.astray(slope, logits, own, known, ("pixels", "void pixels"), weighted):
        return fault
    if weighted.startswith(place_weights.BY_CLASS):
        p, rises = (x.gather(-1, own[..., None])[..., 0] for x in (logits.softmax(-1), slope))  # (B, H, W) both
        seen = [c for c in range(logits.shape[-1]) if (mask == c).any()]
        often, rare = (pick(seen, key=lambda c: int((mask == c).sum())) for pick in (max, min))
        weight = {c: (rises[mask == c].sum() / (p[mask == c] - 1).sum()).item() for c in (often, rare)}
        if weight[often] > 1.01 * weight[rare]:
            return f"{weighted}, and the most frequent class {often} counts more than the rarest, {rare}"
    return ""


SEGMENT = formula.gate_of(
    segment, rows="V5",
    causes="a softmax or a sum over another axis\nvoid, or classes that do not occur, are counted\n"
    "a weight, a smoothing or a mean that the settings do not name",
)  # fmt: skip
