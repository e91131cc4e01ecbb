"""Gates of reward models: the reward is read at the answer's end, the loss is Bradley-Terry's, the export equals the trained
model, and the reward is not the number of tokens."""

import copy
import math
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data.loader import to_device
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import place_weights
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.checks.formula import limit as formula_limit
from trainworthy.core.gates.checks.learning import overfitted
from trainworthy.core.gates.gate import Gate, GateContext, total_loss
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.monitoring.monitors import monitor
from trainworthy.core.recipe.stage import Metric, Stage, View
from trainworthy.recipes.llm.data.pairs import Chat
from trainworthy.recipes.llm.gates import preference, turned_pairs
from trainworthy.recipes.llm.gates.chat import backbone, felt, quoting, reference, rows, rows_of, some

FIRST_LOSS = math.log(2)  # all answers have the same reward
FOLLOWS = (
    0.5  # limit of the rank correlation of rewards with lengths: measured -0.07 healthy, 0.82 trained on length alone
)
ANSWERS = ("chosen", "rejected")
SLIGHT = 0.2  # of the largest gradient: smoothed labels push back a pair that is far enough ahead
MANY = 64  # pairs that are asked whether their margins differ


def first_loss(batch: dict) -> float:
    """Return the loss of equal rewards: ln 2, or with margins of the pairs' own (TRL's column `margin`) the mean of ln(1 + e^margin)."""
    margin = own_margins(batch)
    return FIRST_LOSS if margin is None else F.softplus(margin.float()).mean().item()


def own_margins(batch: dict) -> Tensor | None:
    """Return the margins (B,) of a batch's pairs (Touvron 2023, "Llama 2": pairs whose answers differ more need a larger difference). None
    without margins, or if all are equal: these shift every reward difference, and say nothing about a pair."""
    margin = batch["inputs"].get("margin")
    return None if margin is None or bool((margin == margin[0]).all()) else margin


def metric(name: str) -> Metric:
    """Return the metric that selects the best checkpoint."""
    if name == "nll":
        return Metric(name, "the loss on held-out pairs", floor=FIRST_LOSS, ceiling=0.0, higher_is_better=False)
    return Metric(name, preference.CHOICE, floor=0.5, ceiling=1.0)


def loaded(folder: Path) -> nn.Module:
    """Load an exported reward model as its page tells users to; fp32, on the CPU."""
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # silences the message that the base model has no head
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if not (folder / "adapter_config.json").exists():
                return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
            more = {"num_labels": 1, "pad_token_id": AutoTokenizer.from_pretrained(folder).pad_token_id}
            return AutoPeftModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **more).eval()
    finally:
        logging.set_verbosity(level)


def alone(model: nn.Module, chat: Chat, prompt: str, answer: str, device: torch.device) -> Tensor:
    """Return the reward of an answer alone, without padding: the head on the last hidden state of its last token."""
    before, after = reference(chat, prompt, answer)
    ids = torch.tensor([before + after], device=device)
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    return to_double(bare.score(backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0, -1])).squeeze()


def exchanged(samples: Iterable[dict]) -> list[dict]:
    """Return pairs with their answers exchanged."""
    return [{**s, "chosen": s["rejected"], "rejected": s["chosen"]} for s in samples]


def place(chat: Chat) -> Gate:
    title = "the reward is read at the token that ends the answer, and nowhere else"

    @gate("place", rows="L2 L3", title=title, reads="data model loss train", explains=True)
    def check(context: GateContext) -> Finding:
        """Reads where the loss of the overfit model has a gradient with respect to the last hidden states. This is what the loss does,
        whatever pad token and configuration say. The head of an overfit model is no longer zero."""
        run, stage, _ = overfitted(context)
        data, wrong = stage.data["train"], []
        samples = {f"sample {i}": data.get(i, None) for i in some(data, context.cfg.run.seed)}
        named, sample = next(reversed(samples.items()))
        samples[f"{named} with an answer quoted in its prompt"] = quoting(chat, sample, ANSWERS[0])
        batch = to_device(data.collate([*samples.values()]), run.device)
        turned = exchanged(samples.values())
        with evaluating(stage.model):
            read = felt(run, stage, batch)  # (2B, T)
            if not read.any(1).all():  # a hinge has no gradient where the preferred answer is far enough ahead
                read |= felt(run, stage, to_device(data.collate(turned), run.device)).roll(len(turned), 0)
        batch, padding, several = rows_of(batch), False, False
        for row, (name, prompt, text) in enumerate(rows(samples, ANSWERS)):
            before, answer = reference(chat, prompt, text)
            end = int(batch["attention_mask"][row].argmax()) + len(before) + len(answer) - 1
            got = read[row].nonzero().flatten().tolist()
            if got != [end]:
                ids = batch["input_ids"][row].tolist()
                near = chat.tokenizer.decode([ids[p] for p in got[:6]])
                pads = sum(not bool(batch["attention_mask"][row][p]) for p in got)
                padding, several = padding or pads > 0, several or len(got) > 1
                wrong.append(
                    f"{name} is read at {len(got)} token(s), {pads} of them padding: {near!r} at {got[:6]}, not at {end}"
                )
        return Finding(
            not wrong,
            "; ".join(wrong[:3]) or f"{len(read)} answers, each read at the {chat.tokenizer.decode([answer[-1]])!r} that ends it",
            "only the token that ends the answer has a gradient",
            order_causes(
                (bool(wrong) and not padding and not several, "the pad is also the end of a turn: the last token that is not the pad is the "
                 "one before it"),
                (padding, "the model's pad_token_id is not the pad that the collator writes: the reward is that of padding"),
                (padding, "padding is on the left, but the reward is read as if it were on the right, or the other way round"),
                (several, "rewards are averaged over tokens, or read at the first token or in the prompt")),
            evidence={"read": [r.nonzero().flatten().tolist() for r in read]}, batch=batch,
        )  # fmt: skip

    return check


def bradley_terry(chat: Chat, cfg: Any) -> Gate:
    title = "the loss is that of Bradley and Terry, with each answer's reward computed alone"

    def formula(rewards: Tensor, margin: Tensor | float) -> float:
        """Return the loss of rewards (N, 2) of chosen and rejected answers, with the pairs' margins (N,) and TRL's centering term (Eisenstein
        2023)."""
        centering = cfg.center_rewards_coefficient * rewards.sum(1) ** 2
        return (-F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margin) + centering).mean().item()

    @gate(
        "bradley-terry",
        rows="R1 L1",
        title=title,
        reads="data model loss evaluate train",
        explains=True,
        compares_loss=True,
    )
    def check(context: GateContext) -> Finding:
        """Compares the loss before training and after a few pairs were memorised, in order and exchanged, with the formula. Its rewards come
        from each answer alone, without padding. The evaluation's margin is compared, too. A loss of another form passes if it reads these
        rewards, and never falls when a chosen one falls or a rejected one rises."""
        _, start = context.look()
        run, learnt, found = overfitted(context)
        data = View(start.data["train"], found["indices"])
        all_of = [data.get(i, None) for i in range(len(data))]
        more = [start.data["train"].get(i, None) for i in range(min(MANY, len(start.data["train"])))]
        varied = own_margins(data.collate(more)) is not None  # a few pairs may have equal ones by chance
        gaps, listed, same, strayed = {}, [], [], []
        limit = formula_limit(run, 1e-4)
        for name, stage, samples in (("before training", start, all_of[:2]), ("after", learnt, all_of)):
            turned, both = exchanged(samples), []
            with evaluating(stage.model), run.autocast():
                rewards = torch.stack([torch.stack([alone(stage.model, chat, s["prompt"], s[k], run.device) for k in ANSWERS])
                                       for s in samples]).cpu()  # (N, 2)  # fmt: skip
                for order, those, due in (("", samples, rewards), (", exchanged", turned, rewards.flip(1))):
                    batch = to_device(data.collate(those), run.device)
                    terms, counts = stage.loss(stage.model, batch), stage.counts(batch)
                    got = sum(float(v) / float(counts.get(k, counts.get("*"))) for k, v in terms.items())
                    margin = to_double(batch["inputs"].get("margin", torch.zeros(len(due)))).cpu()
                    right, moved = formula(due, margin if varied else 0.0), formula(due, margin)
                    gaps[name + order] = abs(got - right) / max(1.0, abs(right))
                    same.append(abs(got - moved) <= 1e-3 * max(1.0, abs(moved)) and float(margin[0]))
                    listed.append(f"{name}{order} {got:.5f}, by the formula {right:.5f}")
                    both.append((batch, due))
            strayed.append(_astray(run, stage, both) if max(gaps.values()) > limit else "")
        margins = rewards[:, 0] - rewards[:, 1]
        metrics = run.measure(learnt, data)
        measured = metrics.get("margin", math.nan)
        one_way, unturned = turned_pairs.astray(run, learnt, data, metrics, limit)
        gaps["evaluation"] = abs(measured - margins.mean().item()) / max(1.0, abs(margins.mean().item()))
        listed.append(
            f"margins {', '.join(f'{m:+.2f}' for m in margins.tolist())}; the evaluation's mean margin {measured:+.3f}"
        )
        shifted = all(same) and not varied  # the same margin for every pair
        own = not any(strayed) and not shifted and gaps["evaluation"] <= limit and max(gaps.values()) > limit
        listed += (
            [one_way] * bool(one_way)
            + ["a form of its own, which prefers the chosen answers"] * own
            + sorted({w for w in strayed if w})
        )
        return Finding(
            (own or all(gap <= limit for gap in gaps.values())) and not one_way, "; ".join(listed),
            f"-log sigmoid(chosen - rejected{' - margin of the pair' * varied}), within {limit:g}, or another loss that prefers the chosen "
            "answer; the margin changes its sign if the answers are exchanged",
            "the reward depends on the padding, its side or the other answers of the batch\n"
            "the reward is read at another token than the last\n"
            "chosen and rejected are exchanged, in all pairs or in some\n"
            "the loss has a margin, is averaged over tokens, or is another one",
            evidence={"gaps": gaps},
            cause=f"the loss has a margin: {same[0]:g} for every pair, so rewards are no log-odds (margins that differ from pair to pair, "
                  "in a field of the data, are compared with the formula)" if shifted else unturned,
        )  # fmt: skip

    return check


def _astray(run: Run, stage: Stage, both: list[tuple[dict, Tensor]]) -> str:
    """Return what is wrong if a loss of a fork's own (a hinge, smoothed labels) does not prefer the chosen answers; else "". `both`: a batch
    and the rewards (N, 2) of its answers alone, in order and exchanged."""
    slopes = []
    for batch, rewards in both:
        slope = place_weights.slopes(stage.model, lambda b=batch: total_loss(run, stage, b))
        inputs = {k: v for k, v in batch["inputs"].items() if k in ("input_ids", "attention_mask")}
        with evaluating(stage.model), torch.no_grad(), run.autocast():
            scores = to_double(stage.model(**inputs, use_cache=False).logits)
        if slope is None or slope.shape != scores.shape or slope.shape[1:] != (1,):
            return "the gradient of single rewards cannot be read"
        due = rewards.T.flatten().to(scores.device)
        if (scores[:, 0] - due).abs().max() > formula_limit(run, 1e-4) * due.abs().max().clamp_min(1):
            return "the rewards of the batch are not those of each answer alone"
        slopes.append(slope[:, 0].cpu())
    over = SLIGHT * torch.cat(slopes).abs().max()
    for slope, (_, rewards) in zip(slopes, both, strict=True):
        chosen, rejected = slope.chunk(2)
        if lost := int(((chosen > over) | (rejected < -over)).sum()):
            return f"in {lost} of {len(chosen)} pairs the loss falls when the chosen answer's reward falls, or the rejected one's rises"
        if ((rewards[:, 0] <= rewards[:, 1]) & (chosen == 0) & (rejected == 0)).any():
            return "pairs whose rejected answer has the higher reward have no gradient"
    return ""


def exported(chat: Chat) -> Gate:
    title = "the exported model, loaded from its files, gives the same rewards"

    @gate("exported", rows="L5", title=title, reads="data model export train")
    def check(context: GateContext) -> Finding:
        """Compares rewards of the overfit model's answers, each alone, with those of its export in one batch, padded by the exported
        tokenizer on either side."""
        from transformers import AutoTokenizer

        run, stage, found = overfitted(context)
        if stage.export is None:
            raise Skip("the recipe has no export")
        samples = [stage.data["train"].get(i, None) for i in found["indices"]]
        pairs = [(s["prompt"], s[k]) for s in samples for k in ANSWERS]
        # The export is fp32: a run in bf16 is compared without its own rounding.
        exact = stage.model if run.precision == "fp32" else copy.deepcopy(stage.model).float()
        with evaluating(exact):
            due = torch.stack([alone(exact, chat, *a, run.device) for a in pairs]).cpu()
        with tempfile.TemporaryDirectory() as folder:
            stage.export(Path(folder))
            net, tokenizer = loaded(Path(folder)), AutoTokenizer.from_pretrained(folder)
        ids = [before + answer for before, answer in (reference(chat, *a) for a in pairs)]
        gaps = {}
        for side in ("right", "left"):
            batch = tokenizer.pad({"input_ids": ids}, padding_side=side, return_tensors="pt")
            with torch.inference_mode():
                got = to_double(net(**batch).logits).squeeze(-1)
            gaps[side] = ((got - due).abs().max() / due.abs().max().clamp_min(1.0)).item()
        limit = 1e-3 if run.precision == "fp32" else 5e-2
        return Finding(
            max(gaps.values()) <= limit,
            f"rewards {_few(due)}, from the files {_few(got)}; difference {gaps['right']:.1e} padded on the right, {gaps['left']:.1e} on the left",
            f"equal within {limit:g}",
            "the head is not saved with the adapters (modules_to_save), so loading initialises it again\n"
            "the exported configuration has no pad token, or another one than the exported tokenizer\n"
            "the saved weights are those of another step, or have fewer bits",
            evidence={"gaps": gaps},
        )  # fmt: skip

    return check


def _few(rewards: Tensor) -> str:
    return ", ".join(f"{r:+.2f}" for r in rewards[:4].tolist())


@monitor("length", rows="R1", title="rewards do not follow the number of tokens")
def follows_length(history: list[dict[str, float]]) -> Finding:
    """Compares rewards with the number of tokens on validation answers: rank correlation, and accuracy on pairs whose preferred answer is
    the less likely one by length."""
    last = history[-1]
    follows = last["val/follows_length"]
    against = {k: last.get(f"val/accuracy/chosen is {k}", math.nan) for k in ("shorter", "longer")}
    return Finding(
        abs(follows) <= FOLLOWS,
        f"rank correlation of rewards with the number of tokens {follows:+.2f}; right in {against['shorter']:.0%} of the pairs whose "
        f"preferred answer is shorter, in {against['longer']:.0%} of those where it is longer",
        f"a rank correlation between -{FOLLOWS:g} and {FOLLOWS:g}",
        "the reward counts tokens, and a policy would learn to write long answers: use pairs of nearly equal length, or a term for length",
        evidence={"follows": follows, **against},
    )  # fmt: skip
