"""Gates of packed pretraining: targets, isolation of documents on every backend, z-loss, perplexity, the export."""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.diagnosis import ratio
from trainworthy.core.gates.gate import Gate, Proof, fetch
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.llm.data.packing import IGNORED, Packed
from trainworthy.recipes.llm.gates import numerics
from trainworthy.recipes.llm.models import loading

KEYS = ("input_ids", "labels", "position_ids")
SHIFT = 10.0  # added to all logits: softmax does not change, log Z does
DOCUMENTS, PARTS = 12, 3  # whole documents that are checked, and most rows that a long one may fill
BIGGEST = 300_000_000  # parameters; larger models are not written to disk for a gate


def of(z_loss: float) -> list[Gate]:
    """Return the gates of a recipe that trains on packed documents, with this weight of the z-loss."""
    return [asked, causal, isolation, numerics.phases(beginning), z(z_loss), perplexity, export]


# ------------------------------------------------------------------------------------------------- what the recipe shows
def parts(positions: Tensor) -> list[tuple[int, int]]:
    """Return (start, end) of each document in a row (T,) of positions: a document starts where positions restart."""
    starts = [0, *(i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1)]
    return list(zip(starts, [*starts[1:], len(positions)], strict=True))


def shown(tokenizer: Any, row: tuple[Tensor, Tensor, Tensor]) -> str:
    """Return a row as text: documents separated by a bar, tokens that are read but not scored in (parentheses)."""
    ids, labels, positions = row
    found = []
    for a, b in parts(positions):
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


# ------------------------------------------------------------------------------------------------------- what gates read
@contextmanager
def heard(model: nn.Module, shift: float = 0.0) -> Iterator[list[Tensor]]:
    """Record the logits (B, T, V) at the head, after adding `shift` to all of them."""
    found: list[Tensor] = []

    def keep(_module, _args, out: Tensor) -> Tensor:
        found.append(out + shift)
        return found[-1]

    hook = model.get_output_embeddings().register_forward_hook(keep)
    try:
        yield found
    finally:
        hook.remove()


def felt(stage: Stage, batch: dict, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return (logits, gradient of the recipe's own loss with respect to them), (B, T, V) each."""
    with heard(stage.model, shift) as logits:
        total = sum(stage.loss(stage.model, batch).values())
    (gradient,) = torch.autograd.grad(total, logits)  # no gradient is left on the weights
    return logits[0].detach(), gradient


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


def beginning(proof: Proof) -> tuple[Run, Stage, Tensor, int]:
    """Return (run, stage, the first tokens of a document (1, T), tokens per row) after a few training steps."""
    run, stage, _ = rehearsed(proof)
    data = stage.data["train"]
    document = max(data.documents[:100], key=len)[: numerics.WINDOW]
    return run, stage, torch.from_numpy(document.astype(np.int64))[None].to(run.device), data.context


# ---------------------------------------------------------------------------------------------------------------- gates
@gate(
    "asked",
    rows="L2 L3",
    title="each token except a document's first is a target exactly once, after its predecessor",
    reads="data model loss",
    explains=True,
)
def asked(proof: Proof) -> Finding:
    """Reads targets from the loss's gradient with respect to the logits: which logit is increased after which token, whatever the labels
    are. Compares them with the documents themselves."""
    run, stage = proof.look()
    data = stage.data["train"]
    documents = some(data, proof.cfg.run.seed)
    batch = packed(data, documents, run)
    with run.autocast():
        _, gradient = felt(stage, batch)
    pulled = gradient.argmin(-1).masked_fill(gradient.abs().sum(-1) == 0, IGNORED)  # (B, T)
    ids = batch["input_ids"]
    got = Counter(
        (a, b) for a, b in zip(ids.flatten().tolist(), pulled.flatten().tolist(), strict=True) if b != IGNORED
    )
    due = Counter((a, b) for d in documents for a, b in zip(d[:-1].tolist(), d[1:].tolist(), strict=True))
    lost, extra = due - got, got - due
    wrong = []

    def told(pairs: Counter) -> str:
        return ", ".join(repr(data.tokenizer.decode(list(pair))) for pair in list(pairs)[:4])

    if lost:
        ends = sum(n for (_, b), n in lost.items() if b == data.tokenizer.eos_token_id)
        end = f", {ends} of them the end of a document" * bool(ends)
        wrong.append(
            f"{lost.total()} of {due.total()} tokens are not asked for behind the token before them{end}: {told(lost)}"
        )
    if extra:
        wrong.append(f"{extra.total()} are asked for that do not follow there, or once more: {told(extra)}")
    size = stage.model.get_input_embeddings().num_embeddings
    if ids.max() >= size or ids.min() < 0:
        wrong.append(f"token {int(ids.max())} of a table of {size:,}")
    return Finding(
        not wrong,
        "; ".join(wrong) or f"{due.total()} tokens of {len(documents)} documents in {len(ids)} rows, each once; {got.total()} of "
        f"{ids.numel()} places ask",
        "every token that has one before it in its document, its end too, exactly once; nothing across documents, no padding",
        "labels are shifted by hand and once more in the loss, or not at all\n"
        "the first token of a document is asked of the last one's: mask labels where a document begins\n"
        "the end token is masked because it is also the pad: mask by length, never by id (the model then never stops)\n"
        "what two windows share is asked for twice, or cut documents lose their tails",
        evidence={"due": due.total(), "lost": lost.total(), "extra": extra.total()},
        batch=batch,
    )  # fmt: skip


@gate(
    "causal",
    rows="L4",
    title="no place sees a later token, nor the one that it is asked for",
    reads="data model loss train",
    explains=True,
)
def causal(proof: Proof) -> Finding:
    """One token in the middle of a document is exchanged, the labels stay: logits of the places before it must not move. So nothing
    can beat the entropy of random sequences. `asked` pairs the batch's ids with targets; this shows which ids the model was given."""
    run, stage, _ = rehearsed(proof)  # the head begins at zero: nothing would move any logit
    data = stage.data["train"]
    batch = packed(data, some(data, proof.cfg.run.seed), run)
    ids, (start, end) = batch["input_ids"], max(parts(batch["position_ids"][0]), key=lambda p: p[1] - p[0])
    at = (start + end) // 2
    if at - start < 2:
        raise Skip("no document of four tokens")
    exchanged = ids.clone()
    exchanged[0, at] = next(int(t) for t in ids[0, start:].tolist() if t != int(ids[0, at]))

    def said(one: dict) -> Tensor:
        with evaluating(stage.model), torch.no_grad(), run.autocast(), heard(stage.model) as logits:
            stage.loss(stage.model, one)
        return logits[0][0].float()

    before, after = said(batch), said({**batch, "input_ids": exchanged})
    moved = (before - after).norm(dim=-1)  # (T,)
    own = moved[at:].max().item()
    if own == 0:
        raise Skip("no logit depends on the token that was exchanged")
    leak, limit = moved[:at].max().item() / own, 1e-4 if run.precision == "fp32" else 5e-2
    first = int((moved[:at] > limit * own).nonzero()[0]) if leak > limit else at
    away = at - first
    return Finding(
        leak <= limit, f"exchanging token {at} moves the logits of earlier places by {leak:.1e} of what it moves its own"
        + (f", the first {away} before it" if leak > limit else ""), f"at most {limit:g}",
        ("the model is given the token that it is asked for: inputs are shifted against the labels, or the target is the input\n"
         if 0 < away <= 2 else "") + "attention without its causal mask, or with a mask that replaces it\n"
        "a convolution, a norm or a mean over time in the model reads tokens to come",
        evidence={"leak": leak, "first": first, "at": at}, batch={k: v for k, v in batch.items() if isinstance(v, Tensor)},
    )  # fmt: skip


@gate(
    "isolation",
    rows="L4",
    title="a packed document has the same logits as alone, on every attention backend",
    reads="data model loss train",
)
def isolation(proof: Proof) -> Finding:
    """Compares logits of two packed documents: with the first document exchanged, and with the second alone. It uses the rehearsed model,
    because an untrained one gives the same output for any input."""
    run, stage, _ = rehearsed(proof)
    data, model = stage.data["train"], stage.model
    half = data.context // 2
    own = sorted(data.documents[:400], key=len)[-3:]
    first, other, second = (np.resize(d, n) for d, n in zip(own, (half, half, half - 3), strict=True))
    other[0], wrong, gaps = first[0], [], {}
    rows = {name: packed(data, docs, run) for name, docs in
            (("both", [first, second]), ("changed", [other, second]), ("alone", [second]))}  # fmt: skip
    if len(rows["both"]["input_ids"]) != 1:
        raise Skip("two documents of half a row each are not packed into one: nothing to isolate")
    used, limit = model.config._attn_implementation, 1e-3 if run.precision == "fp32" else 5e-2
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
            raise Skip("the model answers the same whatever it reads: nothing to see yet")
        moved, apart = ((both["second"] - seen[k]["second"]).abs().max().item() / scale for k in ("changed", "alone"))
        gaps[backend] = {"moved": moved, "alone": apart, "scale": scale}
        if moved > limit:
            wrong.append(
                f"{backend}: exchanging document 1 moves the logits of document 2 by {moved:.2g} of what it moves its own"
            )
        if apart > limit:
            wrong.append(f"{backend}: document 2 has other logits than alone, by {apart:.2g} of that")
    worst = max(max(g["moved"], g["alone"]) for g in gaps.values())
    return Finding(
        not wrong,
        "; ".join(wrong) or f"document 1 exchanged, or left out: document 2 is unmoved on {', '.join(gaps)} ({worst:.1e})",
        f"no more than {limit:g} of what the exchanged document moves itself",
        "positions do not begin anew with each document, or are not handed to the model\n"
        "an attention mask of ones, or a cache, is passed along: documents are then no longer told apart by their positions\n"
        "an attention backend, or an architecture, that ignores positions: take another (OPT, Falcon and Bloom always leak)",
        evidence={"gaps": gaps}, batch=rows["both"],
    )  # fmt: skip


def _place(row: Tensor, document: np.ndarray) -> int:
    """Return where a document starts in a row (T,); 0 if it is not there."""
    wanted = torch.from_numpy(document.astype(np.int64)).to(row.device)
    starts = row.unfold(0, len(wanted), 1)
    return int((starts == wanted).all(1).int().argmax())


def z(weight: float) -> Gate:
    title = "z-loss is weight x log^2 Z of the raw logits, in value and gradient"

    @gate("z-loss", rows="L6", title=title, reads="data model loss")
    def prove(proof: Proof) -> Finding:
        """A short run does not show a z-loss at its usual weight. So the gate compares the gradient of the recipe's loss with respect to the
        logits, as they are and with 10 added to each, which does not change the cross-entropy."""
        if not weight:
            raise Skip("no z-loss: --z-loss 0")
        run, stage = proof.look()
        batch = packed(stage.data["train"], some(stage.data["train"], proof.cfg.run.seed), run)
        logits, gradient = felt(stage, batch)
        _, shifted = felt(stage, batch, SHIFT)
        rows = gradient.abs().sum(-1) > 0
        p, log_z = logits[rows].double().softmax(-1), logits[rows].double().logsumexp(-1, keepdim=True)
        target = torch.zeros_like(p).scatter_(-1, gradient[rows].argmin(-1, keepdim=True), 1.0)
        plain = p - target + 2 * weight * log_z * p
        due = 2 * weight * SHIFT * p  # effect of the shift: 2 w log Z softmax is linear in log Z
        got = (shifted[rows] - gradient[rows]).double()
        added = (got * due).sum().item() / due.square().sum().item()  # 1 if correct
        gap = ((got - due).norm() / due.norm()).item()
        own = ((gradient[rows] - plain).norm() / plain.norm()).item()
        ok = gap < 0.02 and own < 1e-3
        return Finding(
            ok,
            f"{SHIFT:g} more on every logit add {added:.3f} of 2 w s softmax to the gradient (off by {gap:.1e}); the whole is "
            f"softmax - target + 2 w log Z softmax to {own:.1e}; mean log Z {log_z.mean().item():.2f}",
            "1 within 0.02, and 1e-3",
            "log Z is taken of logits that are normalised already: it is always 0\n"
            "the term has the wrong sign, another weight, or lacks its square\n"
            "it is a mean where the loss is a sum over tokens (core divides), or counts padding",
            evidence={"added": added, "gap": gap, "own": own},
        )  # fmt: skip

    return prove


@gate(
    "perplexity",
    rows="L7",
    title="bits per byte and perplexity equal a computation token by token",
    reads="data model evaluate train",
)
def perplexity(proof: Proof) -> Finding:
    """Compares the recipe's evaluation of a few validation documents, one longer than a row, at two batch sizes, with a reference. The
    reference reads one window up to each token, without packing, padding and labels."""
    run, stage, _ = rehearsed(proof)
    data, model = stage.data["val"], stage.model
    width, stride = data.context, data.stride
    longest = max(data.documents, key=len)[: width + stride + 9]
    short = sorted((d for d in data.documents if len(d) <= width // 2), key=len)
    documents = [longest, *(d[: width // 4] for d in short[:: max(1, len(short) // 3)][-3:])]
    nll, tokens, size = 0.0, 0, 0
    with evaluating(model), run.autocast():
        for document in documents:
            ids = torch.from_numpy(document.astype(np.int64)).to(run.device)
            for i in range(1, len(ids)):
                start = stride * max(0, (i - width) // stride + 1)  # start of the first window that contains token i
                logits = model(input_ids=ids[None, start:i], use_cache=False).logits[0, -1].double()
                nll -= logits.log_softmax(-1)[ids[i]].item()
                tokens, size = tokens + 1, size + int(data.sizes[document[i]])
    due = {"bits_per_byte": nll / math.log(2) / size, "perplexity": math.exp(nll / tokens)}
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
    shown = ", ".join(f"{name} {value:.4f}" for name, value in due.items())
    bits = {
        "bits per token: nats are divided by tokens, where bytes are meant": size / tokens,
        "nats per byte: the division by ln 2 is missing": math.log(2),
        "nats per token: divided by tokens and not by ln 2": math.log(2) * size / tokens,
        "a mean over documents: nats are divided by their number": size / len(documents),
        "a sum: nats are not divided by bytes": size,
    }
    off = [
        ratio(f["bits_per_byte"], due["bits_per_byte"], bits) for f in got.values() if wrong and "bits_per_byte" in f
    ]
    why = next((f"{cause}\n" for cause in off if cause), "")
    return Finding(
        not wrong, "; ".join(wrong) or f"{shown} on {len(documents)} documents of {tokens} tokens, as token by token",
        f"the same to {limit:g}, whatever the batch size",
        why + "tokens that two windows share are counted twice, or windows restart without the tokens before them\n"
        "a mean of means: add up nats and tokens over all batches, divide once\n"
        "padding, or the first token of a document, is counted; bytes of another tokenizer or text",
        evidence={"due": due, "got": got, "tokens": tokens, "bytes": size},
    )  # fmt: skip


@gate(
    "export",
    rows="L5 L3",
    title="the export is the trained model with its tokenizer",
    reads="data model export train",
)
def export(proof: Proof) -> Finding:
    """Loads the export of the rehearsed model with `AutoModelForCausalLM` and `AutoTokenizer` alone, and compares logits, settings and
    tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, stage, _ = rehearsed(proof)
    model, data = stage.model, stage.data["val"]
    if run.world > 1 or sum(p.numel() for p in model.parameters()) > BIGGEST:
        raise Skip("several processes, or too large to be written and read again")
    document = max(data.documents[:100], key=len)[: data.context]
    ids = torch.from_numpy(document.astype(np.int64))[None]
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        stage.export(Path(name))
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
        wrong.append("the exported tokenizer cuts a text otherwise than the one that was trained with")
    rows = loaded.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        wrong.append(f"the tokenizer has {len(tokenizer):,} tokens, the model {rows:,}")
    for kind in ("bos", "eos", "pad"):
        ours, theirs = (
            getattr(data.tokenizer, f"{kind}_token_id"),
            getattr(loaded.generation_config, f"{kind}_token_id"),
        )
        if theirs not in (ours, [ours]):
            wrong.append(f"generation takes {theirs} as {kind}, the documents have {ours}")
    return Finding(
        not wrong,
        "; ".join(wrong) or f"the same logits to {gap:.1e}, {len(tokenizer):,} tokens, its end is {data.tokenizer.eos_token!r}",
        "equal logits, tokens and special tokens after loading",
        "a setting was changed on the model's config after the model was built, or on the model and not on its config\n"
        "weights that the architecture does not have (a bias on its head): they are dropped when it is loaded\n"
        "another tokenizer is exported than the one that made the tokens",
        evidence={"gap": gap},
    )  # fmt: skip
