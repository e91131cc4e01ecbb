"""Gates on the rows of a batch: every image feature has a position in its row (X4), the loss scores the answers alone (X4, L2)."""

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.loop.run import Rehearsal, Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.vlm.data import questions, rows

LOOKED_AT = 2000  # samples of a split whose rows are counted
ORDER = 1e-3  # of the change by one feature: rounding, if the features' order does not matter
EXACT = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}  # decoder options


def _through(stage: Stage, run: Run, batch: dict, module: nn.Module) -> Tensor:
    """Return the gradient of the loss with respect to a module's output, (.., d)."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple, out: Tensor) -> None:
        kept.append(out)
        out.retain_grad()

    _differentiate(stage, run, batch, module.register_forward_hook(keep))
    return kept[0].grad


def _differentiate(stage: Stage, run: Run, batch: dict, hook: RemovableHandle) -> None:
    """Call backward() on the loss of a batch under a hook; the parameters keep no gradient."""
    try:
        with hook, evaluating(stage.model), torch.enable_grad(), run.autocast():
            sum(stage.loss(stage.model, batch).values()).backward()
    finally:
        stage.model.zero_grad()


def _own_places(stage: Stage, run: Run, batch: dict, read: int) -> int:
    """Return how many image positions hold vectors of the model's own, if the loss reads every other one: LLaVA-NeXT ends each line of
    features with a learnt vector, and drops the features of padding. 0 if it does not, or for our own towers."""
    if not hasattr(stage.model, "net"):
        return 0
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple, kwargs: dict) -> None:
        kept.append(kwargs["inputs_embeds"])
        kept[0].retain_grad()

    decoder = stage.model.language["decoder"]
    _differentiate(stage, run, batch, decoder.register_forward_pre_hook(keep, with_kwargs=True))
    places = kept[0].grad[batch["ids"] == rows.IMAGE]
    return len(places) - read if 0 < read < len(places) and (places.abs().amax(-1) > 0).all() else 0


@gate(
    "image-tokens",
    rows="X4",
    title="every image feature has its position, every question its answer",
    reads="data model loss",
)
def image_tokens(context: GateContext) -> Finding:
    """Counts image positions in every row of the data set and in collated batches, and compares them with the features that the loss really
    uses."""
    run, stage, wrong, cut = *context.build(Rehearsal(steps=1)), [], []
    data = stage.data["train"]
    grad = _through(stage, run, fetch(data, [0], None, run.device), stage.model.projector)
    each = grad.flatten(0, -2).shape[0] // data.pictures(0)  # per image, from the model
    looked = 0
    for name, data in stage.data.items():
        some = range(len(data)) if len(data) <= questions.EVERY else [*dict.fromkeys(data.representative(LOOKED_AT))]
        looked += len(some)
        picked = pick(data, min(16, len(data)), context.cfg.run.seed)
        needed = {i: data.places(i) if data.varied else each * data.pictures(i) for i in {*some, *picked}}
        wrong_count = [i for i in some if int((data.peek(i, "ids") == rows.IMAGE).sum()) != needed[i]]
        unanswered = [i for i in some if _answers(data.peek(i, "labels")) != len(data.source.questions(data.kept[i]))]
        batch = fetch(data, picked, None, run.device)
        found = (batch["ids"] == rows.IMAGE).sum(1).tolist()
        short = sum(n != needed[i] for n, i in zip(found, picked, strict=True))
        without_answer = sum(
            _answers(row) != int((kinds >= 0).sum()) for row, kinds in zip(batch["labels"], batch["kind"], strict=True)
        )
        for many, what in (
            (wrong_count, f"without {needed[(wrong_count or picked)[0]]} image positions"),
            (unanswered, "with a question whose answer is cut"),
        ):
            if many:
                wrong.append(f"{name}: {len(many):,} of {len(some):,} samples {what}, e.g. sample {many[0]}")
        if short or without_answer:
            wrong.append(
                f"{name}: of {len(found)} collated rows, {short} lack a position for some feature, {without_answer} are unanswered"
            )
        cut += [f"{name}: {note}" for note in data.notes.values() if "left out" in note]
    if not wrong:
        grad = _through(stage, run, batch, stage.model.projector).flatten(0, -2)
        read = int((grad.abs().amax(-1) > 0).sum())
        own = 0 if read == sum(found) else _own_places(stage, run, batch, read)
        if read + own != sum(found):
            wrong.append(f"the loss reads {read} of {sum(found)} features of {len(found)} samples")
        elif own:
            cut.append(f"{own} of {sum(found)} positions of {len(found)} samples hold vectors of the model's own")
    complete = f"each feature has its position ({each} for the first picture) in all {looked:,} samples"
    return Finding(
        not wrong, "; ".join(wrong) or "; ".join([complete, *cut]),
        "in every row as many image positions as features, and an answer to every question",
        "a row was cut to a length: leave out long samples completely, and count them\n"
        "rows are cut in collate(), and their features with them\nthe encoder gives another number of features than rows have positions",
        evidence={"features": each}, batch=batch if wrong else None,
    )  # fmt: skip


def _answers(labels: Tensor) -> int:
    """Return the number of scored answers in a row (T,)."""
    return int(rows.numbered(labels[1:]).max())  # the first token of a row has none before it


@gate(
    "token-per-feature",
    rows="X4",
    title="each image feature goes to exactly one position of the row",
    reads="data model",
    explains=True,
)
def token_per_feature(context: GateContext) -> Finding:
    """Changes one feature of the encoder: exactly one of the language model's input embeddings must change. A reshape that should be a
    transpose keeps the shape and mixes positions. A projector that reads all features at once (a resampler) must not depend on their order."""
    run, stage = context.look()
    model, data = stage.model, stage.data["train"]
    if not hasattr(model, "embedded"):
        raise Skip("the model gives no access to its embeddings (a complete model of the hub)")
    batch, out, change, order = fetch(data, [0], None, run.device), [], [None], [None]

    def altered(_module: nn.Module, _args: tuple, features: Tensor) -> Tensor:
        out[:] = [features.shape]
        if order[0] is not None:
            return features[:, order[0]]
        if change[0] is not None:
            features = features.clone()
            features[0, change[0]] = features[0, change[0]] + 3 * features.std() * torch.randn(
                features.shape[-1:], generator=draws
            ).to(features)
        return features

    def read(place: int | None) -> Tensor:
        change[0] = place
        with evaluating(model), torch.no_grad(), run.autocast():
            return model.embedded(batch)[0].float()

    draws = torch.Generator().manual_seed(0)
    with model.encoder.register_forward_hook(altered):
        own = read(None)
        places = (batch["ids"][0] == rows.IMAGE).nonzero().flatten().tolist()
        n = out[0][1] if len(out[0]) == 3 else 0
        if n < 2 or len(places) < n:
            raise Skip("features do not have the shape (B, n, width), or the projector joins several of them")
        moved = [(read(k) - own).norm(dim=-1) for k in (0, n // 2, n - 1)]
        change[0], order[0] = None, torch.arange(n - 1, -1, -1)
        turned = (read(None) - own).norm(dim=-1)
    hit = [[i for i, p in enumerate(places) if m[p] > 1e-3 * m.max()] for m in moved]
    differ = (own[places] - own[places[0]]).norm(dim=-1).max()  # a mean over positions gives the same everywhere
    if (
        all(len(h) == len(places) for h in hit)
        and turned.max() <= ORDER * max(m.max() for m in moved)
        and differ > ORDER * own.norm()
    ):
        return Finding(
            True,
            f"the projector reads all {n} features for each of {len(places)} embeddings, in any order",
            "one embedding each",
        )
    wrong = [
        f"feature {k} of {n} changes {len(h)} embeddings"
        for k, h in zip((0, n // 2, n - 1), hit, strict=True)
        if len(h) != 1
    ]
    return Finding(
        not wrong, "; ".join(wrong) or f"features 0, {n // 2} and {n - 1} of {n} each change one embedding", "one embedding each",
        "features are transposed and reshaped: view() or reshape() where transpose() or permute() is meant\n"
        "a softmax, a norm or a mean over positions, or over the pictures of a batch\n"
        "on purpose (a resampler that reads all features): --gates.waive token-per-feature --gates.because \"...\"",
        evidence={"moved": hit}, batch=batch if wrong else None,
    )  # fmt: skip


@gate("answers", rows="X4 L2", title="the loss scores every answer and nothing else", reads="data loss")
def answers_alone(context: GateContext) -> Finding:
    """Reads scored tokens from the loss's gradient with respect to the logits: where it is not zero, the next token is scored. Those tokens
    must be the answers with their ends, as the data set has them."""
    run, stage = context.build(Rehearsal(steps=1))
    data = stage.data["train"]
    indices = pick(data, min(8, len(data)), context.cfg.run.seed)
    batch = fetch(data, indices, None, run.device)
    grad = _through(stage, run, batch, stage.model)
    scored = grad.abs().amax(-1) > 0  # (B, T)
    wrong, words, measured = [], data.tokenizer, ""
    for row, index in enumerate(indices):
        ids = batch["ids"][row].tolist()
        found = [ids[i + 1] if i + 1 < len(ids) else -1 for i in scored[row].nonzero().flatten().tolist()]
        needed = "".join(
            words.decode(words.encode(a, add_special_tokens=False), **EXACT) for a in data.wanted(data.kept[index])
        )
        answer_text = words.decode([t for t in found if t >= 0], **EXACT) or "nothing"
        measured = measured or f"sample {index}: {answer_text!r}"
        if rows.IMAGE in found or "".join(answer_text.split()) != "".join(needed.split()):
            image = sum(t == rows.IMAGE for t in found)
            wrong.append(f"sample {index}: {len(found)} tokens are scored, {image} of them image positions"
                         f" ({answer_text[:60]!r}); its answers are {needed[:60]!r}")  # fmt: skip
    return Finding(
        not wrong, wrong[0] if wrong else measured, "scored are the tokens of every answer and its end token",
        "labels are a copy of ids with only the padding masked: also mask image positions and questions\n"
        "the row was cut, or labels are shifted twice\nthe end token of an answer is masked with the padding",
        evidence={"wrong": wrong}, batch=batch if wrong else None,
    )  # fmt: skip
