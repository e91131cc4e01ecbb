"""Gates of chat models: the chat template, which tokens are scored, generation prompts, padding."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from trainworthy.core.base.modes import hooked
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data.loader import to_device
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.learning import overfitted
from trainworthy.core.gates.gate import Gate, GateContext, fetch, pick
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Data, Stage, View
from trainworthy.recipes.llm.data.pairs import IGNORED, Chat
from trainworthy.recipes.llm.gates import rendering
from trainworthy.recipes.llm.gates.rendering import answered, excerpt, mark_scored, quoting, reference, rows, rows_of
from trainworthy.recipes.llm.models import loading

SAMPLES = 3


def of(chat: Chat, *, packed: bool) -> list[Gate]:
    """Return the gates of a recipe that generates, for pairs rendered by `chat`."""
    return [*of_answers(chat, ("completion",)), *[isolation] * packed, prompts(chat), padding()]


def of_answers(chat: Chat, answers: tuple[str, ...]) -> list[Gate]:
    """Return the gates on the loss's input. A batch has one row for each sample's first field of `answers`, then one for each second field."""
    return [template(chat, answers), scored(chat, answers), causal]


def backbone(model: nn.Module) -> nn.Module:
    """Return the transformer below the head, also inside an adapter."""
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    return bare.base_model


def state_slopes(run: Run, model: nn.Module, total: Callable[[], Tensor]) -> Tensor:
    """Return the gradient of a scalar with respect to the last hidden states, (rows, T, H). This is what a loss uses, whatever its labels
    are, and whether or not it computes all logits."""
    states: list[Tensor] = []

    def keep(_module, _args, out) -> None:
        if out.last_hidden_state.requires_grad:  # a reference model has no gradient
            states.append(out.last_hidden_state)

    with backbone(model).register_forward_hook(keep):
        with torch.enable_grad(), run.autocast():
            found = total()
        grads = torch.autograd.grad(found, states, allow_unused=True)  # no gradient is left on the weights
    return sum(g for g in grads if g is not None)


def felt(run: Run, stage: Stage, batch: dict) -> Tensor:
    """Return where the loss has a gradient with respect to the last hidden states, (rows, T)."""
    return state_slopes(run, stage.model, lambda: sum(stage.loss(stage.model, batch).values())).abs().sum(-1) > 0


def some(data: Data, seed: int) -> list[int]:
    """Return samples to check: the longest of 32, which truncation affects first, and others."""
    order = pick(data, 32, seed)
    longest = max(order, key=lambda i: sum(len(v) for v in data.get(i, None).values() if isinstance(v, str)))
    return [longest, *(i for i in order if i != longest)][:SAMPLES]


def template(chat: Chat, answers: tuple[str, ...]) -> Gate:
    @gate("template", rows="L8", title="the chat template is applied exactly once, without extra tokens", reads="data")
    def check(context: GateContext) -> Finding:
        """Compares the ids that reach the model with the tokenizer's own rendering of the same turns."""
        run, stage = context.look()
        data, wrong, causes = stage.data["train"], [], set()
        indices = some(data, context.cfg.run.seed)
        batch = fetch(data, indices, context.cfg.run.seed, run.device)
        seen = rows_of(batch)
        size = stage.model.get_input_embeddings().num_embeddings
        for row, (i, prompt, text) in enumerate(rows({f"sample {i}": data.get(i, None) for i in indices}, answers)):
            before, answer = reference(chat, prompt, text)
            due = before + answer
            ids = seen["input_ids"][row][seen["attention_mask"][row].bool()].tolist()
            if max(ids) >= size:
                wrong.append(f"{i} has token id {max(ids)}, but the embedding has {size:,} rows")
            if ids != due:
                causes.add(rendering.why_other(ids, before, answer))
                wrong.append(f"{i} differs {rendering.difference(chat.tokenizer, ids, due)}")
        example = excerpt(mark_scored(chat.tokenizer, batch)[-1])
        return Finding(
            not wrong, "; ".join(wrong) or f"{len(indices)} examples equal the template's rendering, e.g. {example!r}",
            "the ids of the tokenizer's own apply_chat_template, up to the end of the answer",
            "special tokens are added to a text that has them (a second BOS): add_special_tokens=False after a template\n"
            "the template was not applied (plain prompt + completion), or was applied twice\na pair is cut at --data.max-length",
            cause=causes.pop() if len(causes) == 1 else "", evidence={"example": example},
            batch={k: v for k, v in batch.items() if isinstance(v, Tensor)},
        )  # fmt: skip

    return check


def scored(chat: Chat, answers: tuple[str, ...]) -> Gate:
    title = "the answer and the token that ends it are scored, and nothing else"

    def words(batch: dict, row: int, places: set[int]) -> str:
        """Return the text that follows some positions."""
        ids = batch["input_ids"][row].tolist()
        return chat.tokenizer.decode([ids[p + 1] for p in sorted(places)[:12] if p + 1 < len(ids)])

    @gate("scored", rows="L2 L3", title=title, reads="data model loss train", explains=True)
    def check(context: GateContext) -> Finding:
        """Reads the scored tokens from the loss's gradient with respect to the last hidden states: each state predicts the next token. So it
        measures what the loss does, whatever the labels are."""
        run, stage = context.look()
        data, wrong = stage.data["train"], []
        samples = {f"sample {i}": data.get(i, None) for i in some(data, context.cfg.run.seed)}
        named, sample = next(reversed(samples.items()))
        samples[f"{named} with an answer quoted in its prompt"] = quoting(chat, sample, answers[0])
        batch = to_device(data.collate([*samples.values()]), run.device)
        read = felt(run, stage, batch)  # (rows, T)
        batch = rows_of(batch)
        if read.shape != batch["input_ids"].shape:  # packed: all samples in one row
            read = pad_sequence(read.flatten().split(batch["attention_mask"].sum(1).tolist()), batch_first=True)
        share = []
        for row, (name, prompt, text) in enumerate(rows(samples, answers)):
            before, answer = reference(chat, prompt, text)
            start = int(batch["attention_mask"][row].argmax()) - 1  # a state predicts the next token
            due = {start + i for i in (*answered(chat, prompt, before), *range(len(before), len(before) + len(answer)))}
            got = set(read[row].nonzero().flatten().tolist())
            share.append(len(got) / int(batch["attention_mask"][row].sum()))
            if extra := got - due:
                wrong.append(
                    f"{name} scores {len(extra)} tokens of the prompt or the padding: {words(batch, row, extra)!r}"
                )
            if lost := due - got:
                end = ", the one that ends it among them" * (max(due) in lost)
                wrong.append(
                    f"{name} leaves {len(lost)} tokens of the answer unscored{end}: {words(batch, row, lost)!r}"
                )
        # the token that each scored state predicts
        read_labels = torch.where(read.roll(1, dims=1), batch["input_ids"], IGNORED)
        example = excerpt(mark_scored(chat.tokenizer, {**batch, "labels": read_labels})[0])
        return Finding(
            not wrong, "; ".join(wrong) or f"{sum(share) / len(share):.0%} of the tokens are scored: {example!r}",
            "only the completion and its end-of-turn token have a gradient",
            "the end token is masked because it is also the pad: mask by length, never by id (the model then never stops)\n"
            "prompts are scored: labels are a copy of the ids (use prompt and completion, not one text)\n"
            "the answer is searched by its role marker as text, which a prompt may quote: count tokens instead\n"
            "labels are shifted in the data and once more in the loss, or not at all\n"
            "a pair is cut at a length limit and has lost its answer",
            evidence={"share": share, "example": example}, batch=batch,
        )  # fmt: skip

    return check


@gate(
    "isolation",
    rows="L4",
    title="a packed sample has the same hidden states as alone, on every attention backend",
    reads="data model loss train",
)
def isolation(context: GateContext) -> Finding:
    """Compares hidden states in the recipe's own loss for three packed samples: with the first sample exchanged, and with the last sample
    alone."""
    run, stage = context.look()
    data = stage.data["train"]
    indices = some(data, context.cfg.run.seed)
    batch = fetch(data, indices, context.cfg.run.seed, run.device)
    alone = fetch(data, indices[-1:], context.cfg.run.seed, run.device)
    sizes = batch["attention_mask"].sum(1).tolist()
    changed = {**batch, "inputs": {**batch["inputs"], "input_ids": batch["inputs"]["input_ids"].clone()}}
    changed["inputs"]["input_ids"][0, 1 : sizes[0]] = changed["inputs"]["input_ids"][0, 1 : sizes[0]].flip(0)
    net, wrong, gaps = backbone(stage.model), [], {}
    used, limit = net.config._attn_implementation, 1e-3 if run.precision == "fp32" else 5e-2
    for backend in loading.backends(net, run.device):
        net.set_attn_implementation(backend)
        seen: list[Tensor] = []
        keep = lambda _m, _a, out, seen=seen: seen.append(out.last_hidden_state.float())  # noqa: E731
        try:
            with net.register_forward_hook(keep), evaluating(stage.model), run.autocast():
                for one in (batch, changed, alone):
                    stage.loss(stage.model, one)
        finally:
            net.set_attn_implementation(used)
        both, other, single = (states.flatten(0, 1) for states in seen)  # (tokens, D)
        first, last = slice(1, sizes[0]), slice(-sizes[-1], None)
        scale = (both[first] - other[first]).abs().max().item()
        moved, difference = ((both[last] - x[last]).abs().max().item() / scale for x in (other, single))
        gaps[backend] = {"moved": moved, "alone": difference, "scale": scale}
        if moved > limit:
            wrong.append(
                f"{backend}: exchanging sample 1 changes the states of sample 3 by {moved:.2g} of the change of its own"
            )
        if difference > limit:
            wrong.append(
                f"{backend}: the states of sample 3 differ from those of sample 3 alone by {difference:.2g} of that change"
            )
    worst = max(max(g["moved"], g["alone"]) for g in gaps.values())
    return Finding(
        not wrong,
        "; ".join(wrong) or f"with sample 1 exchanged or left out, the states of sample 3 are equal on {', '.join(gaps)} ({worst:.1e})",
        f"at most {limit:g} of the change of the exchanged sample's own states",
        f"{loading.without_positions(net)}position ids do not restart with each sample, or are not passed to the model\n"
        "an attention mask of ones is passed: samples are then no longer separated by their position ids\n"
        "the attention backend or the architecture ignores position ids: use another (OPT, Falcon and Bloom always leak)",
        evidence={"gaps": gaps}, batch={k: v for k, v in batch.items() if isinstance(v, Tensor)},
    )  # fmt: skip


@gate("causal", rows="L4", title="hidden states do not depend on later tokens", reads="data model loss", explains=True)
def causal(context: GateContext) -> Finding:
    """Exchanges the last answer token of each sample in the input of the recipe's own loss. Hidden states before it must not change. If loss
    and reference read the model in the same way, no other gate notices a model that sees its target."""
    run, stage = context.look()
    data = stage.data["train"]
    batch = fetch(data, some(data, context.cfg.run.seed)[:2], context.cfg.run.seed, run.device)
    seen: list[Tensor] = []
    heard: list[Tensor] = []
    net = backbone(stage.model)
    hooks = [net.register_forward_hook(lambda _m, _a, out: seen.append(out.last_hidden_state.float())),
             stage.model.get_input_embeddings().register_forward_hook(lambda _m, args, _out: heard.append(args[0].detach()))]  # fmt: skip

    def states(one: dict) -> tuple[Tensor, Tensor]:
        """Return (ids, hidden states) of the first forward pass."""
        seen.clear()
        heard.clear()
        with evaluating(stage.model), run.autocast():
            stage.loss(stage.model, one)
        return heard[0], seen[0]

    with hooked(hooks):
        (ids, before), (moved, after) = states(batch), states(_last_token_exchanged(batch))
    if (
        ids.shape != moved.shape
        or before.shape != after.shape
        or before.shape[:2] != ids.shape
        or torch.equal(ids, moved)
    ):
        raise Skip("the model does not read the batch's ids directly, so no token can be exchanged")
    limit, leaks, own = 1e-4 if run.precision == "fp32" else 5e-2, [], []
    for a, b, x, y in zip(ids, moved, before, after, strict=True):
        places = (a != b).nonzero().flatten()
        if len(places):
            own.append((x[places] - y[places]).norm().item() / len(places) ** 0.5)
            first = int(places[0])
            leaks.append((x[:first] - y[:first]).norm(dim=-1).max().item() if first else 0.0)
    leak = max(leaks) / max(own)
    return Finding(
        leak <= limit, f"exchanging a token changes the states before it by {leak:.1e} of the change of its own state",
        f"at most {limit:g}",
        "attention has no causal mask, or another mask replaces it\n"
        "a convolution, a norm or a mean over time in the model reads later tokens: padding is missing on the left\n"
        "targets are inputs without a shift",
        evidence={"leak": leak}, batch={k: v for k, v in batch.items() if isinstance(v, Tensor)},
    )  # fmt: skip


def _last_token_exchanged(one: dict) -> dict:
    """Return the batch with the last answer token of each row replaced by the row's first token."""
    other = dict(one)
    if isinstance(one.get("inputs"), dict):
        other["inputs"] = _last_token_exchanged(one["inputs"])
    ids, scored = one.get("input_ids"), one.get("labels")
    if not isinstance(ids, Tensor):
        return other
    flat = ids.flatten(0, -2).clone()  # (rows, T)
    mask = one.get("completion_mask") if scored is None else scored != IGNORED
    mask = one.get("attention_mask") if mask is None else mask
    if mask is None or mask.shape != ids.shape:
        return other
    for row, inside in zip(flat, mask.flatten(0, -2).bool(), strict=True):
        last = inside.nonzero().flatten()
        if len(last):
            row[last[-1]] = row[last[0] - 1] if row[last[0] - 1] != row[last[-1]] else row[0]
    return {**other, "input_ids": flat.view_as(ids)}


class Enough(Exception):
    """Ends a forward pass once the input is recorded."""


@contextlib.contextmanager
def heard(model: nn.Module, *, once: bool = False) -> Iterator[list[Tensor]]:
    """Record all ids that enter the embedding. `once`: stop after the first."""
    seen: list[Tensor] = []

    def listen(_module: nn.Module, args: tuple, _out: Tensor) -> None:
        seen.append(args[0].detach().cpu())
        if once:
            raise Enough

    with model.get_input_embeddings().register_forward_hook(listen), contextlib.suppress(Enough):
        yield seen


def prompts(chat: Chat) -> Gate:
    title = "evaluations use the same prompts as training"

    @gate("prompts", rows="L8 L1", title=title, reads="data model loss evaluate")
    def check(context: GateContext) -> Finding:
        """Compares the ids that `evaluate` generates from with those that the loss sees before the answer of the same samples. The loss is
        aborted after its input is recorded."""
        run, stage = context.look()
        data = stage.data["train"]
        indices = some(data, context.cfg.run.seed)
        with heard(stage.model) as seen_ids:
            run.measure(stage, View(data, indices))
        generates = any(b.shape[1] in (1, a.shape[1] + 1) for a, b in pairwise(seen_ids))  # with a cache, or without
        wrong, forced = [], not generates
        for i in indices:
            sample = data.get(i, None)
            _, answer = reference(chat, sample["prompt"], sample["completion"])
            batch = fetch(data, [i], context.cfg.run.seed, run.device)
            with heard(stage.model, once=True) as learnt, evaluating(stage.model), run.autocast():
                stage.loss(stage.model, batch)
            read, mask = learnt[0][0], rows_of(batch)["attention_mask"][0].bool()
            trained = (read[mask] if mask.shape == read.shape else read).tolist()  # pad_to_multiple_of
            trained = trained[: len(trained) - len(answer)]
            ends = [row.tolist()[-len(trained) :] for ids in seen_ids for row in ids if ids.shape[1] >= len(trained)]
            if trained not in ends:
                forced &= any(_holds(row.tolist(), trained + answer[:-1]) for ids in seen_ids for row in ids)
                before = chat.tokenizer.decode(trained[-24:])
                wrong.append(
                    f"in training, sample {i}'s answer follows {before!r}; no evaluation prompt ends like this"
                )
        generated = chat.tokenizer.decode(seen_ids[0][0].tolist())
        return Finding(
            not wrong, "; ".join(wrong) or f"{len(indices)} prompts end with the same tokens",
            "every evaluation prompt ends with the tokens before the answer in training",
            "only one of training and evaluation applies the template or adds a BOS\n"
            "prompts are padded on the right for generation: the answer then continues the padding\n"
            "the generation prompt (the assistant's header) is missing in training or evaluation",
            evidence={"generated_from": generated},
            cause="the evaluation gives the model the true answer and reads its own off the same pass (teacher forcing): generate it instead"
            if wrong and forced else "",
        )  # fmt: skip

    return check


def _holds(ids: list[int], some: list[int]) -> bool:
    """Return whether `some` are consecutive in `ids`."""
    return any(ids[i : i + len(some)] == some for i in range(len(ids) - len(some) + 1))


def padding() -> Gate:
    title = "answers and losses in a batch equal those of each sample alone"

    @gate("padding", rows="L1", title=title, reads="data model loss evaluate")
    def check(context: GateContext) -> Finding:
        """Compares answers and loss of the overfit model, whose answers are certain, on a padded batch of three prompts and on each prompt
        alone."""
        run, stage, found = overfitted(context)
        if "loss" not in found or stage.predict is None:
            raise Skip("the overfit gate trained no model" if stage.predict else "the recipe answers no prompts")
        data = View(stage.data["train"], found["indices"])
        limit = 1e-3 if run.precision == "fp32" else 5e-2

        def see(rows: list[int]) -> tuple[list[str], float, Tensor]:
            """Return (answers, loss, scores (rows, V) of the first token of each answer)."""
            batch, first = fetch(data, rows, None, run.device), []
            head = stage.model.get_output_embeddings()
            with (
                head.register_forward_hook(lambda _module, _args, out: first.append(out[:, -1].float())),
                evaluating(stage.model),
                run.autocast(),
            ):
                answers = [t.caption for t in stage.predict(stage.model, batch)]
                return answers, sum(stage.loss(stage.model, batch).values()).item(), first[0]

        rows = list(range(min(SAMPLES, len(data))))
        together, loss, scores = see(rows)
        alone = [see([i]) for i in rows]
        differ = [(a, b[0]) for a, (b, _, _) in zip(together, alone, strict=True) if a != b[0]]
        single = sum(x for _, x, _ in alone)
        gap = abs(loss - single) / max(abs(single), 0.1)  # the loss of an overfit model is close to 0
        wrong = [f"answers differ: {differ[0][0]!r} in a batch, {differ[0][1]!r} alone"] if differ else []
        # An overfit model may give its answers in spite of padding; the scores show whether padding was read.
        own = torch.cat([x for _, _, x in alone])
        moved = ((scores - own).norm() / own.norm()).item() if scores.shape == own.shape else 0.0
        if moved > limit:
            wrong.append(
                f"scores of an answer's first token change by {moved:.1e} in a batch, so the model reads padding"
            )
        wrong += (
            [f"the loss of {len(rows)} samples is {loss:.4f} in a batch, {single:.4f} alone"] if gap > limit else []
        )
        return Finding(
            not wrong, "; ".join(wrong) or f"{len(rows)} answers equal (scores within {moved:.0e}), loss {loss:.4f} in a batch and "
            f"{single:.4f} alone",
            f"equal answers, losses and scores within {limit:g}",
            "padding is on the wrong side: generation needs it on the left, training on the right\n"
            "the attention mask is missing, or position ids count the padding",
            evidence={"together": together, "alone": [a for a, _, _ in alone], "scores": moved},
        )  # fmt: skip

    return check
