"""Gates of pretraining on packed documents: those of packing.py, z-loss (L6), perplexity (L7), the export (L5)."""

import math
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import place_weights
from trainworthy.core.gates.causes.gradient import ratio
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.causes.scores import Scores
from trainworthy.core.gates.checks import formula
from trainworthy.core.gates.checks.export_weights import export_to
from trainworthy.core.gates.gate import Gate, GateContext, fetch
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.llm.data.packing import IGNORED, Packed
from trainworthy.recipes.llm.gates import numerics
from trainworthy.recipes.llm.gates.packing import (
    causal,
    divided,
    document_spans,
    felt,
    isolation,
    mixed,
    packed,
    scored,
    some,
)

KEYS = ("input_ids", "labels", "position_ids")
SHIFT = 10.0  # added to all logits: softmax does not change, log Z does
UNPLACED = "position_ids are not passed to the model: the documents of a row see each other"
OUTSIDE = "the loss changes the model's logits before the softmax (a cap, a temperature); the model and its export return them unchanged"
PLACES = 64  # that are compared at once, in double precision
BIGGEST = 300_000_000  # parameters; larger models are not written to disk for a gate


def of(z_loss: float) -> list[Gate]:
    """Return the gates of a recipe that trains on packed documents, with this weight of the z-loss."""
    return [scored, FORMULA, causal, isolation, numerics.phases(beginning), z(z_loss), perplexity, export]


def stated(context: GateContext, stage: Stage, batch: dict) -> formula.Statements:
    """Negative log-likelihood of each scored token after those before it, summed over a row, and the z-loss (PaLM 2022). Another form passes
    if it pulls every scored token, and no other, to its own class."""
    out = stage.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    log_z, following = out.logits[:, :-1].float().logsumexp(-1), batch["labels"][:, 1:]
    scored = following != IGNORED
    own = log_z - out.logits[:, :-1].float().gather(-1, following.clamp_min(0)[..., None])[..., 0]

    def row(each: Tensor) -> Tensor:
        return (each * scored).sum(1)

    wrong = {
        "a mean over the tokens of a row": row(own) / scored.sum(1).clamp_min(1),
        "the squared loss of each token": row(own.square()),
        "the loss is in bits, not in nats": row(own) / math.log(2),
        "tokens that are not scored count": own.sum(1),
    }
    unplaced = _without_positions(stage, batch)
    wrong[UNPLACED] = row(F.cross_entropy(unplaced.transpose(1, 2), following.clamp_min(0), reduction="none"))
    smooth = log_z - out.logits[:, :-1].float().mean(-1)
    right = {"negative log-likelihood": row(own)} | {
        f"cross-entropy with label smoothing {e:g}": row((1 - e) * own + e * smooth) for e in (0.01, 0.05, 0.1, 0.2)
    }
    right["poly-1 (Leng 2022)"] = row(own + 1 - (-own).exp())
    terms = {"ce": formula.Statement(right, wrong, own=lambda: _pulls(stage, batch))}
    if weight := getattr(context.cfg, "z_loss", 0.0):
        changed = _changed_logits(stage, batch, out.logits[:, :-1])
        wrong = {UNPLACED: weight * row(unplaced.logsumexp(-1).square())}
        wrong |= {} if changed is None else {OUTSIDE: weight * row(changed.logsumexp(-1).square())}
        terms["z"] = formula.Statement({"z-loss": weight * row(log_z.square())}, wrong, optional=True, setting="z_loss")
    return terms


def _without_positions(stage: Stage, batch: dict) -> Tensor:
    """Return the logits (B, T - 1, V) of a call that leaves the position ids to the model, which then counts on through a row."""
    return stage.model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()


def _changed_logits(stage: Stage, batch: dict, logits: Tensor) -> Tensor | None:
    """Return the logits (B, T - 1, V) that the loss takes the softmax of, if they are not those of the model."""
    with Scores() as scores:
        stage.loss(stage.model, batch)
    found = next((s.float() for s, _ in scores.seen if s.shape == logits.shape), None)
    return None if found is None or torch.allclose(found, logits.float(), 1e-4, 1e-4) else found


def _pulls(stage: Stage, batch: dict) -> str:
    """Return what is wrong if a loss of a fork's own (focal, weighted tokens) does not pull scored tokens to their own classes; else ""."""
    following = batch["labels"][:, 1:]
    scored = following != IGNORED

    def logits() -> Tensor:
        return stage.model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits.float()

    def total() -> Tensor:
        terms = stage.loss(stage.model, batch)
        return formula.term_of(terms, "ce", ("ce", "z"))

    def plain() -> Tensor:
        return F.cross_entropy(
            logits()[:, :-1].flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    slope = place_weights.slopes(stage.model, total)
    if slope is None or slope.shape[:2] != batch["labels"].shape:
        return "the gradient of single tokens cannot be read"
    with torch.no_grad():
        scores = logits()
    pattern = place_weights.named(stage.model, total, plain, 1e-4)
    words = "tokens", "tokens that are not scored"
    return place_weights.astray(slope[:, :-1], scores[:, :-1], following.clamp_min(0), scored, words, pattern)


FORMULA = formula.gate_of(
    stated, rows="L2 L6",
    causes="losses of single tokens are clamped, weighted or left out\na mean, a smoothing or a penalty that the settings do not name",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- what the recipe shows
def mark_context(tokenizer: Any, row: tuple[Tensor, Tensor, Tensor]) -> str:
    """Return a row as text: documents separated by a bar, tokens that are read but not scored in (parentheses)."""
    ids, labels, positions = row
    found = []
    for a, b in document_spans(positions):
        scored = (labels[a:b] != IGNORED).nonzero().flatten()
        if len(scored):
            first = a + int(scored[0])
            found.append(f"({tokenizer.decode(ids[a:first])}){tokenizer.decode(ids[first:b])}")
    return " | ".join(found)


def floor(batch: dict) -> float:
    """Return the lowest possible mean loss on these rows: different continuations of the same beginning cannot be predicted."""
    after: dict[tuple[int, ...], Counter[int]] = {}
    total = 0
    for ids, labels, positions in zip(*(batch[k].tolist() for k in KEYS), strict=True):
        start = 0
        for i in range(1, len(ids)):
            start = start if positions[i] == positions[i - 1] + 1 else i
            if labels[i] != IGNORED:
                after.setdefault(tuple(ids[start:i]), Counter())[labels[i]] += 1
                total += 1
    return sum(n * math.log(c.total() / n) for c in after.values() for n in c.values()) / max(1, total)


def overfit(batch: dict, first: float) -> float:
    """Return the bits per byte at the loss that overfitting must reach, from an initial loss of `first` nats per token."""
    lowest = floor(batch)
    tokens = (batch["labels"][:, 1:] != IGNORED).sum().item()
    return (lowest + 0.03 * abs(first - lowest)) * tokens / math.log(2) / batch["bytes"].sum().item()


# ---------------------------------------------------------------------------------------------------------------- gates
def beginning(context: GateContext) -> tuple[Run, Stage, Tensor, int]:
    """Return (run, stage, the first tokens of a document (1, T), tokens per row) after a few training steps."""
    run, stage, _ = rehearsed(context)
    data = stage.data["train"]
    document = max(data.documents[:100], key=len)[: numerics.WINDOW]
    return run, stage, torch.from_numpy(document.astype(np.int64))[None].to(run.device), data.context


def z(weight: float) -> Gate:
    title = "z-loss is weight x log^2 Z of the raw logits, in value and gradient"

    @gate("z-loss", rows="L6", title=title, reads="data model loss")
    def check(context: GateContext) -> Finding:
        """A short run does not show a z-loss at its usual weight. So the gate compares the gradient of the recipe's loss with respect to the
        logits, as they are and with 10 added to each, which does not change the cross-entropy."""
        if not weight:
            raise Skip("no z-loss: --z-loss 0")
        run, stage = context.look()
        batch = packed(stage.data["train"], some(stage.data["train"], context.cfg.run.seed), run)
        sums, log_zs, penalty = torch.zeros(5, dtype=torch.float64), [], 0.0
        for part in divided(batch, context):
            logits, gradient, terms = felt(stage, part)
            logits, gradient, penalty = logits.cpu(), gradient.cpu(), penalty + terms.get("z", math.nan)
            shifted = felt(stage, part, SHIFT)[1].cpu()
            for places in (gradient.abs().sum(-1) > 0).nonzero().split(PLACES):
                at = tuple(places.T)
                p, log_z = to_double(logits[at]).softmax(-1), to_double(logits[at]).logsumexp(-1, keepdim=True)
                target = torch.zeros_like(p).scatter_(-1, gradient[at].argmin(-1, keepdim=True), 1.0)
                plain = p - target + 2 * weight * log_z * p
                due = 2 * weight * SHIFT * p  # effect of the shift: 2 w log Z softmax is linear in log Z
                got = to_double(shifted[at] - gradient[at])
                found = (got * due, due.square(), (got - due).square(), (gradient[at] - plain).square(), plain.square())
                sums += torch.stack([one.sum().cpu() for one in found])
                log_zs.append(log_z.cpu())
            del logits, gradient, shifted
        both, dues, differences, off, plains = sums.tolist()
        added, gap, own, log_z = both / dues, (differences / dues) ** 0.5, (off / plains) ** 0.5, torch.cat(log_zs)
        value = weight * log_z.square().sum().item()
        alone = abs(penalty - value) <= 1e-3 * value  # smoothing or a focus changes the rest of the gradient
        ok = gap < 0.02 and (own < 1e-3 or alone)
        return Finding(
            ok,
            f"adding {SHIFT:g} to every logit adds {added:.3f} times 2 w {SHIFT:g} softmax to the gradient (error {gap:.1e}); the gradient "
            f"equals softmax - target + 2 w log Z softmax within {own:.1e}{', z is w log^2 Z' * alone}; mean log Z {log_z.mean().item():.2f}",
            "1 within 0.02, and an error below 1e-3, or a term z of w log^2 Z",
            "log Z is computed from logits that are already normalised, so it is always 0\n"
            "the term has the wrong sign or another weight, or log Z is not squared\n"
            "the term is a mean, but the loss is a sum over tokens (core divides); or it counts padding",
            evidence={"added": added, "gap": gap, "own": own},
        )  # fmt: skip

    return check


@gate(
    "perplexity",
    rows="L7",
    title="bits per byte and perplexity equal those computed token by token",
    reads="data model evaluate train",
)
def perplexity(context: GateContext) -> Finding:
    """Compares the recipe's evaluation of a few validation documents, one longer than a row, at two batch sizes, with a reference. The
    reference reads one window up to each token, without packing, padding and labels."""
    run, stage, _ = rehearsed(context)
    data, model = stage.data["val"], stage.model
    width, stride = data.context, data.stride
    longest = max(data.documents, key=len)[: width + stride + 9]
    short = sorted((d for d in data.documents if len(d) <= width // 2), key=len)
    documents = [longest, *(d[: width // 4] for d in short[:: max(1, len(short) // 3)][-3:])]
    rows: list[tuple[int, float, int]] = []  # tokens before it in its window, nats, bytes
    with evaluating(model), run.autocast():
        for document in documents:
            ids = torch.from_numpy(document.astype(np.int64)).to(run.device)
            for i in range(1, len(ids)):
                start = stride * max(0, (i - width) // stride + 1)  # start of the first window that contains token i
                logits = to_double(model(input_ids=ids[None, start:i], use_cache=False).logits[0, -1])
                rows.append((i - start, -logits.log_softmax(-1)[int(ids[i])].item(), int(data.sizes[document[i]])))
    nll, tokens, size = sum(n for _, n, _ in rows), len(rows), sum(b for _, _, b in rows)
    due = {"bits_per_byte": nll / math.log(2) / size, "perplexity": math.exp(nll / tokens)}
    far = [n for before, n, _ in rows if before >= (getattr(context.cfg, "original_context", 0) or width)]
    due |= {"perplexity_beyond": math.exp(sum(far) / len(far))} if far else {}
    some, kept, got = data.among(documents), run.cfg.train.eval_batch_size, {}
    for batch_size in (1, 2):
        run.cfg.train.eval_batch_size = batch_size
        try:
            got[batch_size] = run.measure(stage, some)
        finally:
            run.cfg.train.eval_batch_size = kept
    limit = 1e-4 if run.precision == "fp32" else 1e-2
    wrong = [f"{name} is {found[name]:.5f} in batches of {n}, {value:.5f} token by token" for n, found in got.items()
             for name, value in due.items() if name in found and abs(found[name] - value) > limit * value]  # fmt: skip
    wrong += ["perplexity_beyond is reported, and no token is beyond the original context"] * (
        "perplexity_beyond" in got[1] and not far
    )
    measured = ", ".join(f"{name} {value:.4f}" for name, value in due.items())
    steady = all(abs(got[1][k] - got[2][k]) <= limit * value for k, value in due.items() if k in got[1])
    bits = {
        "bits per token: nats are divided by tokens, where bytes are meant": size / tokens,
        "nats per byte: the division by ln 2 is missing": math.log(2),
        "nats per token: divided by tokens and not by ln 2": math.log(2) * size / tokens,
        "a mean over documents: nats are divided by their number": size / len(documents),
        "a sum: nats are not divided by bytes": size,
    }
    off, total = [], [w for w in wrong if not w.startswith("perplexity_beyond")]
    if total:
        found = [f["bits_per_byte"] for f in got.values() if "bits_per_byte" in f]
        off = [ratio(value, due["bits_per_byte"], bits) for value in found] + [
            left_out({*found} or {math.nan}, rows, limit)
        ]
        off += [averaged_rows(run, stage, some, got[1], limit)] if steady else []
    elif wrong:
        off = ["tokens within the original context count as beyond it, or the other way round"]
    why = mixed(model, data, run) if total else ""
    why = why or next((f"{cause}\n" for cause in off if cause), "")
    return Finding(
        not wrong, "; ".join(wrong) or f"{measured} on {len(documents)} documents of {tokens} tokens, equal to those token by token",
        f"equal within {limit:g} for every batch size",
        why + order_causes(
            (steady, "tokens that two windows share are counted twice, or windows restart without the tokens before them"),
            (not steady, "a mean of means: sum nats and tokens over all batches, divide once"),
            (True, "padding, or the first token of a document, is counted; bytes are those of another tokenizer or text")),
        evidence={"due": due, "got": got, "tokens": tokens, "bytes": size},
    )  # fmt: skip


def averaged_rows(run: Run, stage: Stage, some: Packed, got: dict[str, float], limit: float) -> str:
    """Return that a metric of `got` is a mean over rows of each row's own mean; "" if none is. Rows differ in tokens and bytes."""
    rows = []
    for i in range(len(some)):
        batch = fetch(some, [i], None, run.device)
        labels = batch["labels"][:, 1:]
        with evaluating(stage.model), torch.no_grad(), run.autocast():
            out = stage.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        log_p = to_double(out.logits[:, :-1]).log_softmax(-1)
        own = -log_p.gather(-1, labels.clamp_min(0)[..., None].to(log_p.device))[..., 0]
        scored = (labels != IGNORED).to(log_p.device)
        rows.append(((own * scored).sum().item(), scored.sum().item(), int(batch["bytes"].sum())))
    rows = [row for row in rows if row[1] and row[2]]
    nats, tokens, size = torch.tensor(rows, dtype=torch.float64).T
    per_token = (nats / tokens).mean()
    means = {
        "bits_per_byte": ((nats / size).mean() / math.log(2), per_token * tokens.sum() / size.sum() / math.log(2)),
        "perplexity": (per_token.exp(), (nats / tokens).exp().mean()),
    }
    for name, known in means.items():
        if any(abs(got.get(name, math.nan) - x.item()) <= limit * x.item() for x in known):
            return (f"{name} is a mean over {len(rows)} rows of each row's own mean, so that a short row counts as much as a full one: sum nats, "
                    "tokens and bytes over all rows, divide once")  # fmt: skip
    return ""


def left_out(got: Collection[float], rows: Sequence[tuple[int, float, int]], limit: float) -> str:
    """Return how all bits per byte `got` follow from `rows` (tokens before it, nats, bytes of each token) without the tokens that have little
    context; "" if they do not."""
    size, nearest, cause = sum(b for _, _, b in rows), limit, ""
    for k in range(2, max(before for before, _, _ in rows) + 1):
        some = [(n, b) for before, n, b in rows if before >= k]
        nats, fewer = sum(n for n, _ in some) / math.log(2), sum(b for _, b in some)
        for of, also in ((size, ", and their bytes are in the denominator"), (fewer, "")):
            off = max(abs(x - nats / of) / nats * of for x in got)
            if off < nearest:
                left = f"{len(rows) - len(some)} of {len(rows)}"
                nearest, cause = off, f"tokens with fewer than {k} tokens before them are left out ({left}){also}"
    return cause


@gate(
    "export", rows="L5 L3", title="the export is the trained model with its tokenizer", reads="data model export train"
)
def export(context: GateContext) -> Finding:
    """Loads the export of the rehearsed model with `AutoModelForCausalLM` and `AutoTokenizer` alone, and compares logits, settings and
    tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, stage, _ = rehearsed(context)
    model, data = stage.model, stage.data["val"]
    if run.world > 1 or sum(p.numel() for p in model.parameters()) > BIGGEST:
        raise Skip("several processes, or the model is too large to be saved and loaded by a gate")
    document = max(data.documents[:100], key=len)[: data.context]
    ids = torch.from_numpy(document.astype(np.int64))[None]
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        changed = export_to(stage, Path(name))
        loaded = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(name)
    with evaluating(model):
        there = model(input_ids=ids.to(run.device), use_cache=False).logits.float().cpu()
        here = loaded(input_ids=ids, use_cache=False).logits
    gap = ((here - there).norm() / there.norm()).item()
    if gap > 1e-4:
        wrong.append(
            f"the loaded model's logits differ by {gap:.2g} (relative): its settings or weights are not those in memory"
        )
    again = tokenizer(tokenizer.decode(document[1:-1]), add_special_tokens=False)["input_ids"]
    plain = data.tokenizer(data.tokenizer.decode(document[1:-1]), add_special_tokens=False)["input_ids"]
    if again != plain:
        wrong.append("the exported tokenizer splits a text differently from the tokenizer of training")
    rows = loaded.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        wrong.append(f"the tokenizer has {len(tokenizer):,} tokens, the model {rows:,}")
    for kind in ("bos", "eos", "pad"):
        ours = getattr(data.tokenizer, f"{kind}_token_id")
        theirs = getattr(loaded.generation_config, f"{kind}_token_id")
        if theirs not in (ours, [ours]):
            wrong.append(f"generation uses {theirs} as {kind} token, the documents have {ours}")
    return Finding(
        not wrong,
        "; ".join(wrong) or f"equal logits within {gap:.1e}, {len(tokenizer):,} tokens, end token {data.tokenizer.eos_token!r}",
        "equal logits, tokens and special tokens after loading",
        "a setting was changed on the model's config after the model was built, or on the model and not on its config\n"
        "the model has weights that its architecture lacks (a bias on its head): loading drops them\n"
        "the exported tokenizer is not the one that made the tokens",
        evidence={"gap": gap}, cause=changed if gap > 1e-4 else "",
    )  # fmt: skip
