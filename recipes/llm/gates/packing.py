"""Gates of packed documents: each token is a target once (L2, L3), and no logit depends on later tokens or other documents (L4)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.gate import GateContext, fetch, own_size
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.llm.data.packing import IGNORED, Packed
from trainworthy.recipes.llm.models import loading

OWN_ROWS = " (--data.no-packing gives each a row of its own)\n"

DOCUMENTS, PARTS = 12, 3  # whole documents that are checked, and most rows that a long one may fill


# ------------------------------------------------------------------------------------------------------- what gates read
def document_spans(positions: Tensor) -> list[tuple[int, int]]:
    """Return (start, end) of each document in a row (T,) of positions: a document starts where positions restart."""
    starts = [0, *(i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1)]
    return list(zip(starts, [*starts[1:], len(positions)], strict=True))


@contextmanager
def heard(model: nn.Module, shift: float = 0.0) -> Iterator[list[Tensor]]:
    """Record the logits (B, T, V) that the model returns (some cap or scale what the head gives), or those of the head where the loss
    uses it by itself; `shift` is added to all of them."""
    found: list[Tensor] = []
    inside = False

    def enter(_module, _args) -> None:
        nonlocal inside
        inside = True

    def leave(_module, _args, out: Any) -> Any:
        nonlocal inside
        inside = False
        found.append(out.logits + shift)
        out.logits = found[-1]
        return out

    def keep(_module, _args, out: Tensor) -> Tensor:
        if inside:
            return out
        found.append(out + shift)
        return found[-1]

    head = model.get_output_embeddings()
    with model.register_forward_pre_hook(enter), model.register_forward_hook(leave), head.register_forward_hook(keep):
        yield found


def felt(stage: Stage, batch: dict, shift: float = 0.0) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return (logits, gradient of the recipe's own loss with respect to them), (B, T, V) each, and the terms of that loss. A head that is
    used again, for later tokens, has logits of its own, which are left out."""
    with heard(stage.model, shift) as logits:
        terms = stage.loss(stage.model, batch)
    (gradient,) = torch.autograd.grad(sum(terms.values()), logits[:1])  # no gradient is left on the weights
    return logits[0].detach(), gradient, {name: value.item() for name, value in terms.items()}


def some(data: Packed, seed: int) -> list[np.ndarray]:
    """Return a few documents, among them the longest of a hundred that fills at most `PARTS` rows."""
    order = np.random.default_rng(seed).permutation(len(data.documents))[:100]
    found = sorted((data.documents[i] for i in order), key=len)
    fits = [d for d in found if len(d) <= PARTS * data.context] or [found[0][: PARTS * data.context]]
    return [fits[-1], *fits[:: max(1, len(fits) // DOCUMENTS)]]


def packed(data: Packed, documents: list[np.ndarray], run: Run) -> dict:
    """Return these documents as one batch, made by the recipe's own packing and collate."""
    rows = data.among(documents)
    return fetch(rows, list(range(len(rows))), None, run.device)


def divided(batch: dict, context: GateContext) -> Iterator[dict]:
    """Yield the batch in parts of at most half a micro-batch of the run: `felt` keeps more of a row than training does."""
    most = max(1, own_size(context) // 2)
    for start in range(0, len(batch["input_ids"]), most):
        yield {k: v[start : start + most] for k, v in batch.items()}


# ---------------------------------------------------------------------------------------------------------------- gates
@gate(
    "scored",
    rows="L2 L3",
    title="each token except a document's first is a target exactly once, after its predecessor",
    reads="data model loss",
    explains=True,
)
def scored(context: GateContext) -> Finding:
    """Reads targets from the loss's gradient with respect to the logits: which logit is increased after which token, whatever the labels
    are. Compares them with the documents themselves."""
    run, stage = context.look()
    data = stage.data["train"]
    documents = some(data, context.cfg.run.seed)
    batch = packed(data, documents, run)
    pulled_in: list[Tensor] = []
    for part in divided(batch, context):
        with run.autocast():
            _, gradient, _ = felt(stage, part)
        pulled_in.append(gradient.argmin(-1).masked_fill(gradient.abs().sum(-1) == 0, IGNORED))
        del gradient
    pulled, ids = torch.cat(pulled_in), batch["input_ids"]  # (B, T)
    got = Counter(
        (a, b) for a, b in zip(ids.flatten().tolist(), pulled.flatten().tolist(), strict=True) if b != IGNORED
    )
    due = Counter((a, b) for d in documents for a, b in zip(d[:-1].tolist(), d[1:].tolist(), strict=True))
    lost, extra = due - got, got - due
    wrong = []

    def pairs_as_text(pairs: Counter) -> str:
        return ", ".join(repr(data.tokenizer.decode(list(pair))) for pair in list(pairs)[:4])

    if lost:
        ends = sum(n for (_, b), n in lost.items() if b == data.tokenizer.eos_token_id)
        end = f", {ends} of them the end of a document" * bool(ends)
        wrong.append(
            f"{lost.total()} of {due.total()} tokens are never the target after their predecessor{end}: {pairs_as_text(lost)}"
        )
    if extra:
        wrong.append(
            f"{extra.total()} targets do not follow there in a document, or are repeated: {pairs_as_text(extra)}"
        )
    size = stage.model.get_input_embeddings().num_embeddings
    if ids.max() >= size or ids.min() < 0:
        wrong.append(f"token id {int(ids.max())}, but the embedding has {size:,} rows")
    return Finding(
        not wrong,
        "; ".join(wrong) or f"{due.total()} tokens of {len(documents)} documents in {len(ids)} rows, each a target once; {got.total()} of "
        f"{ids.numel()} positions have a target",
        "every token of a document except its first is a target exactly once, also its end token; no target across documents or in padding",
        _likely_causes(documents, ids, due, got, data.tokenizer.eos_token_id),
        evidence={"due": due.total(), "lost": lost.total(), "extra": extra.total()},
        batch=batch,
    )  # fmt: skip


def _likely_causes(documents: list[np.ndarray], ids: Tensor, due: Counter, got: Counter, eos: int) -> str:
    """Causes of targets that are not those of the documents, those whose symptom is measured first. `due`, `got`: pairs (token, target)."""
    lost, extra = due - got, got - due
    moved: Counter = Counter()
    for d in documents:
        moved += Counter(zip(d[:-2].tolist(), d[2:].tolist(), strict=True)) + Counter(
            zip(d.tolist(), d.tolist(), strict=True)
        )
    shifted = (extra & moved).total() > due.total() / 2
    only_ends = bool(lost) and all(b == eos for _, b in lost)
    in_rows = Counter(zip(ids[:, :-1].flatten().tolist(), ids[:, 1:].flatten().tolist(), strict=True))
    ignored = bool(lost) and not shifted and not only_ends and not lost - in_rows
    return order_causes(
        (shifted, "labels are shifted in the data and once more in the loss, or not at all"),
        (ignored, "tokens get no gradient from the loss: their losses are clamped, weighted with 0 or left out"),
        (bool(extra) and not lost, "the first token of a document is the target after the previous document's end: mask labels where a "
         "document begins"),
        (only_ends and not extra, "the end token is masked because it is also the pad: mask by length, never by id (the model then never "
         "stops)"),
        (bool(extra) != bool(lost), "tokens that two windows share are targets twice, or documents that were cut lose their tails"),
    )  # fmt: skip


@gate(
    "causal",
    rows="L4",
    title="logits depend neither on later tokens nor on their own target",
    reads="data model loss train",
    explains=True,
)
def causal(context: GateContext) -> Finding:
    """Exchanges one token in the middle of a document and keeps the labels: logits at earlier positions must not change. So no model can
    beat the entropy of random sequences. `scored` pairs the batch's ids with targets; this gate shows which ids the model reads."""
    run, stage, _ = rehearsed(context)  # untrained, the head is zero and no logit would change
    data = stage.data["train"]
    batch = packed(data, some(data, context.cfg.run.seed), run)
    ids, (start, end) = batch["input_ids"], max(document_spans(batch["position_ids"][0]), key=lambda p: p[1] - p[0])
    at = (start + end) // 2
    if at - start < 2:
        raise Skip("no document has four tokens")
    exchanged = ids.clone()
    exchanged[0, at] = next(int(t) for t in ids[0, start:].tolist() if t != int(ids[0, at]))

    def logits_of(one: dict) -> Tensor:
        with evaluating(stage.model), torch.no_grad(), run.autocast(), heard(stage.model) as logits:
            stage.loss(stage.model, one)
        return logits[0][0].float()

    before, after = logits_of(batch), logits_of({**batch, "input_ids": exchanged})
    moved = (before - after).norm(dim=-1)  # (T,)
    own = moved[at:].max().item()
    if own == 0:
        raise Skip("no logit depends on the exchanged token")
    leak, limit = moved[:at].max().item() / own, 1e-4 if run.precision == "fp32" else 5e-2
    first = int((moved[:at] > limit * own).nonzero()[0]) if leak > limit else at
    away = at - first
    return Finding(
        leak <= limit, f"exchanging token {at} changes the logits at earlier positions by {leak:.1e} of the change at its own"
        + (f"; the first is {away} before it" if leak > limit else ""), f"at most {limit:g}",
        ("the model reads its own target: inputs are shifted against the labels, or the target is the input\n"
         if 0 < away <= 2 else "") + "attention has no causal mask, or another mask replaces it\n"
        "a convolution, a norm or a mean over time in the model reads later tokens",
        evidence={"leak": leak, "first": first, "at": at}, batch={k: v for k, v in batch.items() if isinstance(v, Tensor)},
    )  # fmt: skip


@gate(
    "isolation",
    rows="L4",
    title="a packed document has the same logits as alone, on every attention backend",
    reads="data model loss train",
)
def isolation(context: GateContext) -> Finding:
    """Compares logits of two packed documents: with the first document exchanged, and with the second alone. It uses the rehearsed model,
    because an untrained one gives the same output for any input."""
    run, stage, _ = rehearsed(context)
    data, model = stage.data["train"], stage.model
    half, wrong, gaps = data.context // 2, [], {}
    first, other, second = _three(data)
    rows = {name: packed(data, docs, run) for name, docs in
            (("both", [first, second]), ("changed", [other, second]), ("alone", [second]))}  # fmt: skip
    if len(rows["both"]["input_ids"]) != 1:
        raise Skip("two documents of half a row each are not packed into one row, so nothing has to be isolated")
    used, limit = model.config._attn_implementation, _limit(run)
    for backend in loading.backends(model, run.device):
        model.set_attn_implementation(backend)
        seen: dict[str, dict[str, Tensor]] = {}
        try:
            with evaluating(model), run.autocast():
                for name, batch in rows.items():
                    with heard(model) as logits:
                        stage.loss(model, batch)
                    at = {
                        "second": _place(batch["input_ids"][0], second),
                        "first": _place(batch["input_ids"][0], first),
                    }
                    # the first document was exchanged
                    at["first"] = at["first"] if name == "both" else seen["both"]["where"]
                    seen[name] = {k: logits[0][0, a : a + half - 4].float() for k, a in at.items()} | {
                        "where": at["first"]
                    }
        finally:
            model.set_attn_implementation(used)
        both, scale = seen["both"], (seen["both"]["first"] - seen["changed"]["first"]).abs().max().item()
        if scale == 0:
            raise Skip("the model gives the same logits for every input")
        moved, difference = (
            (both["second"] - seen[k]["second"]).abs().max().item() / scale for k in ("changed", "alone")
        )
        gaps[backend] = {"moved": moved, "alone": difference, "scale": scale}
        if moved > limit:
            wrong.append(
                f"{backend}: exchanging document 1 changes the logits of document 2 by {moved:.2g} of the change of its own"
            )
        if difference > limit:
            wrong.append(
                f"{backend}: the logits of document 2 differ from those without document 1 by {difference:.2g} of that change"
            )
    worst = max(max(g["moved"], g["alone"]) for g in gaps.values())
    return Finding(
        not wrong,
        "; ".join(wrong) or f"with document 1 exchanged or left out, the logits of document 2 are equal on {', '.join(gaps)} ({worst:.1e})",
        f"at most {limit:g} of the change of the exchanged document's own logits",
        f"{mixed(model, data, run) if wrong else ''}position ids do not restart with each document, or are not passed to the model\n"
        "an attention mask of ones, or a cache, is passed: documents are then no longer separated by their position ids\n"
        "the attention backend or the architecture ignores position ids: use another (OPT, Falcon and Bloom always leak)",
        evidence={"gaps": gaps}, batch=rows["both"],
    )  # fmt: skip


def _limit(run: Run) -> float:
    return 1e-3 if run.precision == "fp32" else 5e-2


def _three(data: Packed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two texts of half a row that begin alike, and one that fits behind either."""
    half, longest = data.context // 2, sorted(data.documents[:400], key=len)[-3:]
    first, other, second = (np.resize(d, n) for d, n in zip(longest, (half, half, half - 3), strict=True))
    other[0] = first[0]
    return first, other, second


def mixed(model: nn.Module, data: Packed, run: Run) -> str:
    """Return the likely cause, with its line's end, where the architecture itself mixes texts that share a row: called directly, with position
    ids that restart. Empty where it does not."""
    if cause := loading.without_positions(model):
        return cause.replace("\n", OWN_ROWS)
    first, other, second = _three(data)
    places = torch.cat([torch.arange(len(first)), torch.arange(len(second))])[None].to(run.device)
    logits = []
    with evaluating(model), run.autocast():
        for before in (first, other):
            ids = torch.from_numpy(np.concatenate([before, second]).astype(np.int64))[None].to(run.device)
            logits.append(model(input_ids=ids, position_ids=places, use_cache=False).logits[0].float())
    change = (logits[0] - logits[1]).abs()
    if change[len(first) :].max() <= _limit(run) * change[: len(first)].max():
        return ""
    return f"{type(model).__name__} mixes texts that share a row even where its position ids restart: its layers do not read them{OWN_ROWS}"


def _place(row: Tensor, document: np.ndarray) -> int:
    """Return where a document starts in a row (T,); 0 if it is not there."""
    wanted = torch.from_numpy(document.astype(np.int64)).to(row.device)
    starts = row.unfold(0, len(wanted), 1)
    return int((starts == wanted).all(1).int().argmax())
