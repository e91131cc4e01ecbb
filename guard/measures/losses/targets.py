"""Facts about a loss function's arguments: probabilities instead of logits, alignment of targets with inputs, classes,
accuracy."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from trainworthy.guard.hooks.addresses import home_of
from trainworthy.guard.measures.data.interpolated import seams
from trainworthy.guard.measures.losses.supervision import masking, one_for_all, other_side, padded, plateaus, unmasked

ZEROS = 0.05  # share of scores
GOALS = ("target", "targets", "label", "labels", "y", "tgt", "trg", "goal", "goals")


def floored(calls: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Find scores of classes that are never negative and often exactly 0."""
    zeros = [row["zeros"] for row in calls if "zeros" in row]
    if len(zeros) < 8 or min(zeros) < ZEROS:
        return None
    return (
        f"cross_entropy gets scores that are never negative, {sum(zeros) / len(zeros):.0%} of them exactly 0, in all {len(zeros)} calls",
        "a ReLU after the last layer: a class at 0 gets no gradient, and no score can fall below that of chance. Remove it",
    )


def describe(
    name: str, input: Tensor, target: Tensor, kwargs: dict, root: tuple | None, grad_fn: Any = None, body: tuple | None = None
) -> dict[str, Any]:  # fmt: skip
    """Return facts about one call of a loss function, as plain values. `root`: the last model call; `body`: the last one on what the batch
    has, where heads are called by themselves."""
    row: dict[str, Any] = {"loss": name, "prob": looks_like_probabilities(name, input)}
    if name in ("ctc_loss", "nll_loss") and input.dim() > 1:
        total = input.float().logsumexp(1 if name == "nll_loss" else -1)
        row["raw"] = bool((total.abs() > 0.1).float().mean() > 0.9)
    if name in ("kl_div", "nll_loss") and input.dim() == 2:
        over = [bool((input.float().logsumexp(i).abs() < 1e-3).all()) for i in (0, 1)]
        row["over_batch"] = over[0] and not over[1]
    if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
        flat = target.flatten()
        ignore = kwargs.get("ignore_index", -100)
        valid = flat[flat != ignore]
        row["n"], row["scored"], row["ignore"] = flat.numel(), valid.numel(), ignore
        row["classes"] = input.shape[1] if input.dim() > 1 else input.shape[0]
        row["distinct"] = valid.unique().tolist()[:50] if valid.numel() else []
        row |= {"one_left": ignore} if row["classes"] == 2 and 0 <= ignore < 2 else {}
        if row["classes"] <= 200:
            row["counts"] = torch.bincount(valid, minlength=row["classes"]).tolist()
        logits = input.movedim(1, -1).reshape(-1, row["classes"]) if input.dim() > 1 else input[None]
        hits = (logits.argmax(1) == flat) & (flat != ignore)
        row["right"] = int(hits.sum())
        logs = torch.log_softmax(logits.float(), 1) if name == "cross_entropy" else logits.float()
        rows = torch.nonzero(flat != ignore).flatten()[:4096]
        row["nll"] = float(-logs[rows, flat[rows]].mean()) if len(rows) else 0.0
        least = name == "cross_entropy" and float(input.min()) == 0
        row["zeros"] = float((input == 0).float().mean()) if least else 0.0
        row["shift"], row["seams"] = shifts(flat, ignore, root), seams(target, ignore)
        if input.dim() == 2 and 8 <= len(flat) < row["classes"] and torch.equal(flat.cpu(), torch.arange(len(flat))):
            row["first"] = float((input[:, 0] > input.float().quantile(0.9, dim=1)).float().mean())
        if input.dim() == 2 and len(input) == row["classes"] and len(row["distinct"]) == 1:
            row["pairs"] = is_product(grad_fn)
        row["made"] = target.dim() == 1 and made_by_the_loop(flat)
        ids, facts = of_tokens(root, body, flat, ignore, kwargs)
        row |= facts
        weight = kwargs.get("weight")
        if isinstance(weight, Tensor) and weight.shape == (row["classes"],) and "counts" in row:
            row["weight"] = weight.tolist()
        if 1 in (row["shift"] or ()) and 0 <= ignore < row["classes"]:
            row["ignored"], row["inside"] = ignore, alone(ids, target, ignore)
    elif name == "cross_entropy" and input.dim() == 2 and target.shape == input.shape:
        hard = target.argmax(1)
        row |= {"n": len(hard), "scored": len(hard), "classes": input.shape[1], "distinct": hard.unique().tolist()[:50]}
        row["counts"] = torch.bincount(hard, minlength=input.shape[1]).tolist()
        row["right"] = int((input.argmax(1) == hard).sum())
        row["nll"] = float(-(target * torch.log_softmax(input.float(), 1)).sum(1).mean())
        row["soft"] = True
    elif name == "ctc_loss":
        # Targets (N, S) are padded
        row["blank"] = int((target == kwargs.get("blank", 0)).sum()) if target.dim() == 1 else 0
        row["symbols"] = target.numel()
    elif name in ("binary_cross_entropy_with_logits", "binary_cross_entropy"):
        row |= binary(target, kwargs)
    return row


def of_tokens(
    root: tuple | None, body: tuple | None, flat: Tensor, ignore: int, kwargs: dict
) -> tuple[Tensor | None, dict[str, Any]]:
    """Return the tokens of the last call, if it has some, and facts about class targets that belong to tokens."""
    ids, scored = tokens_of(*root) if root else None, flat != ignore
    facts = {"masking": masking(ids, flat, scored), "other_side": other_side(ids, flat, ignore)}
    facts["unmasked"] = unmasked(tokens_of(*body) if ids is None and body else ids, flat, scored)
    if kwargs.get("reduction", "mean") != "none" and kwargs.get("weight") is None:
        facts["padded"] = padded(ids, flat, ignore)
    return ids, facts


def alone(ids: Tensor, target: Tensor, ignore: int) -> list[int]:
    """Return how often the ignored token is between two others in `ids` (B, T), in how many rows, and the number of rows."""
    first = target.numel() == ids.numel() and fits(ids.t(), target.view(ids.shape).t(), 1, ignore)
    ids = ids.t() if first else ids
    found = (ids[:, 1:-1] == ignore) & (ids[:, 2:] != ignore) & (ids[:, :-2] != ignore)
    return [int(found.sum()), int(found.any(1).sum()), len(ids)]


def binary(target: Tensor, kwargs: dict) -> dict[str, Any]:
    """Return facts about the targets of a binary loss."""
    row: dict[str, Any] = {}
    row["low"], row["high"] = float(target.min()), float(target.max())
    row["shared"], row["rows"] = one_for_all(target), len(target) if target.dim() else 1
    row["empty"] = target.dim() == 2 and target.shape[1] > 2 and row["high"] == 0
    row["levels"], row["plateaus"] = len(target.flatten()[:100_000].unique()), plateaus(target)
    weight = kwargs.get("pos_weight")
    if isinstance(weight, Tensor) and target.shape[-1:] == weight.shape and target.dim() > 1:
        row["pos_weight"], row["positive"] = weight.tolist(), target.float().flatten(0, -2).mean(0).tolist()
    elif isinstance(weight, Tensor) and weight.numel() == 1:  # one weight for all positives
        row["pos_weight"], row["positive"] = [float(weight)], [float(target.float().mean())]
    return row


def made_by_the_loop(flat: Tensor) -> bool:
    """Return whether targets are all the same, or count the rows (places of the positive in a contrastive loss), or the classes of an episode:
    each as often as the others, one after the other or in turns."""
    n, row = len(flat), torch.arange(len(flat))
    if n < 8 or bool((flat == flat[0]).all()):
        return n >= 8
    classes = int(flat.max()) + 1
    if n % classes:
        return False
    return any(torch.equal(flat.cpu(), places) for places in (row // (n // classes), row % classes))


def argument(module: torch.nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return facts about the labels that a model got as an argument, before it computes its own loss."""
    labels = kwargs["labels"].detach()
    valid = labels[labels != -100]
    row = {"loss": "labels", "n": labels.numel(), "scored": valid.numel(), "prob": None, "classes": int(1e9)}
    row["distinct"] = valid.unique().tolist()[:50] if valid.numel() and not valid.is_floating_point() else []
    inner = getattr(module, "module", module)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    ids = tokens_of(inner, args, kwargs)
    if "CausalLM" in type(inner).__name__ and ids is not None and ids.shape == labels.shape:  # it shifts by itself
        row["shift"] = [s + 1 for s in range(-1, 3) if fits(ids, labels, s, -100)]
    return row


def forced(target: Tensor, module: torch.nn.Module, args: tuple, kwargs: dict) -> bool:
    """Return whether a model gets its targets (N, T) as an input, as the decoder of a translation does. Its `labels` are only for the
    loss, unless it makes the decoder's input of them."""
    config = getattr(getattr(module, "module", module), "config", None)
    home, makes = home_of(target), bool(getattr(config, "is_encoder_decoder", False))
    given = [(k, x) for k, x in (*enumerate(args), *kwargs.items()) if isinstance(x, Tensor) and x.dim() > 1]
    return any(home_of(x) == home and (k != "labels" or makes) for k, x in given)


def looks_like_probabilities(name: str, x: Tensor) -> bool | None:
    """Return whether the values look like outputs of softmax or sigmoid, although the loss needs logits (or their
    logarithms). None: too few values."""
    if not x.is_floating_point() or x.numel() < 8:
        return None
    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 1:
        return False
    if name in ("cross_entropy", "nll_loss"):
        if x.dim() < 2 or x.shape[1] < 2:
            return False
        sums = x.float().sum(1)
        return bool((sums - 1).abs().max() < 1e-2)
    if name == "kl_div":
        return bool((x.float().sum(-1) - 1).abs().max() < 1e-2) and x.shape[-1] > 1
    return name == "binary_cross_entropy_with_logits" and high > low


def of_a_layer(scores: Tensor) -> bool:
    """Return whether class scores come from a layer with weights, and not from products of embeddings with each other."""
    node = chain_end(scores.grad_fn)
    below = [chain_end(n) for n, _ in node.next_functions] if node is not None else []
    return any(hasattr(n, "variable") and n.variable.dim() > 1 for n in below)


MOVES = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0", "MulBackward0", "DivBackward0",
         "AddBackward0")  # fmt: skip


def is_product(node: Any, depth: int = 8) -> bool:
    """Return whether values are a matrix product that was at most scaled, shifted or transposed: its rows and columns are in the order of
    its factors, which no weights are among."""
    if node is None or not depth:
        return False
    if node.name() in ("MmBackward0", "BmmBackward0"):
        below = [chain_end(n) for n, _ in node.next_functions]
        return all(n is not None and not hasattr(n, "variable") for n in below)
    return node.name() in MOVES and any(is_product(n, depth - 1) for n, _ in node.next_functions)


def chain_end(node: Any) -> Any:
    """Follow a graph from a node to the first one that has no input or several inputs."""
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node


def shifts(flat: Tensor, ignore: int, root: tuple | None) -> list[int] | None:
    """Return by how many positions the targets are ahead of the model's input tokens (every offset that fits); None: no
    tokens."""
    if root is None:
        return None
    ids = tokens_of(*root)
    if ids is None and single(root[1], flat):
        return [0]
    if ids is None or ids.numel() < 16 or len(ids.unique()) < 4:
        return None
    found = set()
    for tokens in (ids, ids.t()) if ids.shape[0] > 1 else (ids,):
        rows, length = tokens.shape
        for width in {length, length - 1, length - 2, length - 3} if length > 4 else {length}:
            if width > 0 and flat.numel() == rows * width:
                found |= {s for s in range(-1, 4) if fits(tokens, flat.view(rows, width), s, ignore)}
        if flat.numel() == ids.numel() and tokens is not ids:  # time first, in the targets as well
            found |= {s for s in range(-1, 4) if fits(tokens, flat.view(ids.shape).t(), s, ignore)}
        if flat.numel() == rows * length - 1 and bool((tokens.reshape(-1)[1:] == flat).all()):
            found.add(99)
    return sorted(found)


def single(args: tuple, flat: Tensor) -> bool:
    """Return whether the first input are tokens (B,) of one step, and the targets these themselves."""
    first = args[0] if args else None
    is_step = isinstance(first, Tensor) and first.dtype == torch.int64 and first.shape == flat.shape and len(flat) >= 8
    return is_step and len(flat.unique()) >= 4 and torch.equal(first, flat)


def tokens_of(module: torch.nn.Module, args: tuple, kwargs: dict) -> Tensor | None:
    """Return the token ids (B, T) that a model reads: its first such argument whose name is not a target's."""
    try:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = dict(enumerate(args)) | kwargs
    for name, value in [*given.items(), *given.get("kwargs", {}).items()]:
        if is_tokens(value) and str(name).lower() not in GOALS:
            return value
    return None


def is_tokens(x: Any) -> bool:
    """Return whether a model's argument has the type and the shape of token ids (B, T)."""
    return isinstance(x, Tensor) and x.dtype == torch.int64 and x.dim() == 2


def decoder_tokens(
    flat: Tensor, ignore: int, module: torch.nn.Module, args: tuple, kwargs: dict, shift: int = 1
) -> Tensor | None:
    """Return what a decoder of a model with several inputs of tokens reads: those whose next ones are the targets, or these themselves."""
    first = tokens_of(module, args, kwargs)
    for x in (*args, *kwargs.values()):
        if is_tokens(x) and x is not first and x.numel() == flat.numel():
            y = flat.view(x.shape)
            if min(x.shape) > 1 and (fits(x, y, shift, ignore) or fits(x.t(), y.t(), shift, ignore)):
                return x
    return None


def fits(tokens: Tensor, target: Tensor, shift: int, ignore: int) -> bool:
    """Return whether target[:, t] is the token at t + shift, wherever both exist and count."""
    length, width = tokens.shape[1], target.shape[1]
    start, end = max(0, -shift), min(width, length - shift)
    if end - start < 2:
        return False
    a, b = target[:, start:end], tokens[:, start + shift : end + shift]
    valid = (a != ignore) & (a >= 0)
    count = int(valid.sum())
    # Where answers alone are scored, few places are, but of many tokens
    if count < 8 or (count < 0.5 * valid.numel() and (count < 64 or len(a[valid].unique()) < 4)):
        return False
    return bool((a == b)[valid].all())


def following(ids: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield tokens and their targets as (B, T): the time is the first axis of `ids`, then the second. A model that shifts its labels itself
    has no target for the last token."""
    for time_first, tokens in ((True, ids.t()), (False, ids)):
        rows, length = tokens.shape
        width = next((n for n in (length, length - 1) if n > 1 and target.numel() == rows * n), 0)
        flat = target.view(width, rows).t() if time_first and width else target.view(rows, width) if width else None
        yield tokens, flat


def constant_losses(rows: list[dict]) -> list[float]:
    """Return the loss of the best constant answer at each call: of the frequencies of the classes in all of them. Empty where they are
    unknown."""
    counts = [r.get("counts") or [] for r in rows]
    if not counts or not counts[0] or len(counts[0]) > 1000 or len({len(c) for c in counts}) > 1:
        return []
    table = torch.tensor(counts, dtype=torch.float32)
    surprise = -(table.sum(0) / table.sum().clamp_min(1)).clamp_min(1e-12).log()
    return ((table @ surprise) / table.sum(1).clamp_min(1)).tolist()
