"""Gates of distillation into Whisper: the training data, what the loss counts, time and scale of the student's features, and how the frozen
decoder reads them. A student maps envelopes (B, T, 16) to encoder features (B, frames, width)."""

from collections.abc import Callable

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.checks.learning import OVERFIT_SAMPLES, overfitted
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import Rehearsal, Run, evaluating
from trainworthy.core.monitoring.monitors import Monitor, monitor
from trainworthy.core.recipe.stage import Data, Stage, View
from trainworthy.recipes.distill.data import recordings
from trainworthy.recipes.distill.evaluation.measures import speech
from trainworthy.recipes.distill.gates import feature_formula
from trainworthy.recipes.distill.models.heads import reader
from trainworthy.recipes.shared import whisper

LISTENED = 48  # recordings that the teacher transcribes again
RANGE = 2.3  # natural log of energy (10 dB) between the quietest and the loudest frame; less is silence or hum
LOOPING = 0.05  # share of transcripts that may repeat themselves
DRAWN = 32  # recordings whose ends are compared with the augmentation of training
PULLED = 0.95  # share of the tokens of a text
STILL = 1e-6  # the same for a sensor of unknown unit: no change at all
# Word error rate that needs no further check; share by which it must fall per third of a run
PLATEAU, SLOPE = (0.05, 0.1)
# Centred cosine, share of different transcripts; nats per token that remain to be learnt
READABLE, VARIED, HEARD = (0.05, 0.5, 0.3)
TAUGHT = {"rehearsed": 0.5, "trained": 0.3, "none": 0.3}
"""Centred cosine that the first stage must have reached, on the eight samples of the gates or on validation samples."""


def read(run: Run, stage: Stage, batch: dict, canvas: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
    """Return the stage's loss terms divided by their counts, from its student or from features that replace its output."""
    counts = stage.counts(batch)
    with evaluating(stage.model), run.autocast():
        terms = stage.loss(canvas or stage.model, batch)
    return {k: (v / counts.get(k, counts.get("*"))).item() for k, v in terms.items()}


# --------------------------------------------------------------------------------------------------------- the recordings
@gate(
    "transcripts",
    rows="W6",
    title="the teacher transcribes the recordings correctly, and no recording is silent",
    reads="data model",
)
def agreement(context: GateContext) -> Finding:
    """Decodes the teacher's stored features again in the student's format, and measures the energy of every recording."""
    run, stage = context.build(Rehearsal(steps=1))
    data, teacher = stage.data["train"], whisper.load(context.cfg.data.teacher, context.cfg.data.seconds)
    batch = fetch(data, pick(data, LISTENED, context.cfg.run.seed), None, run.device)
    with evaluating(stage.model):
        rest = stage.model(torch.zeros_like(batch["envelope"]))
    heard = teacher.write(torch.where(speech(batch)[..., None], batch["features"], rest))
    wrong = [(t, h) for t, h in zip(batch["text"], heard, strict=True) if whisper.normalise(t) != whisper.normalise(h)]
    least = RANGE if data.source.arrays is None else STILL
    quiet = [i for i in range(len(data)) if _loudness(data.get(i, None)["envelope"]) < least]
    allowed = len(heard) // 24  # half precision may change a word
    example = f", e.g. '{wrong[0][0]}' as '{wrong[0][1]}'" if wrong else ""
    return Finding(
        len(wrong) <= allowed and not quiet,
        f"{len(wrong)} of {len(heard)} recordings transcribed wrongly{example}; {len(quiet)} of {len(data)} recordings silent",
        f"at most {allowed} wrong, none silent",
        "recordings were not filtered by the teacher's own transcript, or features belong to other recordings\n"
        "features after the end of speech are zeros, which the decoder has never seen, so that it repeats itself\n"
        "recordings are silent or broken, or a sensor was not connected",
        evidence={"misheard": wrong[:10], "silent": quiet[:20]}, batch=batch,
    )  # fmt: skip


def _loudness(envelope: Tensor) -> float:
    """Return the log-energy of the loudest frame minus the quietest, mean over bands; 0 without frames."""
    level = envelope[envelope.any(-1)].mean(-1)
    return (level.max() - level.min()).item() if len(level) else 0.0


@gate("vocabulary", rows="W5", title="texts and ids convert both ways, in the model's own vocabulary", reads="data")
def vocabulary(context: GateContext) -> Finding:
    """Encodes and decodes every transcript of both splits. Prompt and end must be in place, and all ids known to the model."""
    _, stage = context.build(Rehearsal(steps=1))
    teacher, wrong = whisper.load(context.cfg.data.teacher, context.cfg.data.seconds), []
    entries = teacher.model.proj_out.out_features
    for name, data in stage.data.items():
        for i in range(len(data)):
            sample = data.get(i, None)
            ids, text = sample["ids"].tolist(), sample["text"]
            label_ids, start = ids[: int(sample["words"])], teacher.prompt
            if label_ids[: len(start)] != start or label_ids.count(start[0]) != 1:
                wrong.append(f"{name}: '{text}' begins with {label_ids[: len(start) + 2]}, not with {start} and a word")
            elif label_ids[-1] != teacher.end or teacher.end in label_ids[:-1]:
                wrong.append(f"{name}: '{text}' does not end with {teacher.end} alone")
            elif max(ids) >= entries or min(ids) < 0:
                wrong.append(f"{name}: '{text}' has the id {max(ids)}, but the model has {entries:,} ids")
            elif teacher.text(ids) != text.strip() or teacher.ids(text) != label_ids:
                wrong.append(f"{name}: '{text}' is decoded as '{teacher.text(ids)}'")
    n = sum(map(len, stage.data.values()))
    return Finding(
        not wrong, f"{len(wrong)} of {n} transcripts: {wrong[0]}" if wrong else
        f"{n} transcripts encoded and decoded without change, start {teacher.prompt}, end {teacher.end}, {entries:,} ids",
        "every transcript is unchanged after encoding and decoding; one prompt, one end token",
        "ids of the other tokenizer (51,864 ids English-only, 51,865 multilingual): the same word has another id\n"
        "language and task are missing for a multilingual teacher, or given to an English-only one\n"
        "start or end is added twice, by the tokenizer and by the collator, or another id is stripped than was added\n"
        "pads are decoded as text, or the end is masked because it is also the pad", evidence={"wrong": wrong[:20]},
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- the loss
@gate(
    "loss-terms",
    rows="W2",
    title="padding is in no loss term; magnitude and direction of features both count",
    reads="data loss counts",
)
def counted(context: GateContext) -> Finding:
    """Compares the loss with noise in silent parts, with longer padding, and for features that replace the student's: the teacher's, 1.5
    times and 0.1 times as large, and 0.1 times as large in other directions."""
    run, stage = context.build(Rehearsal(steps=1))
    seed = context.cfg.run.seed
    batch = fetch(stage.data["train"], pick(stage.data["train"], 4, seed), seed, run.device)
    theirs, mask, draws = batch["features"], speech(batch)[..., None], torch.Generator().manual_seed(seed)
    noise = torch.randn(theirs.shape, generator=draws).to(theirs.device)
    longer = torch.nn.functional.pad(batch["envelope"], (0, 0, 0, 10))[:, : recordings.FPS * context.cfg.data.seconds]
    padded = {**batch, "features": torch.where(mask, theirs, noise), "envelope": longer}
    first, again = sum(read(run, stage, batch).values()), sum(read(run, stage, padded).values())

    def of(canvas: Tensor) -> float:
        return sum(read(run, stage, batch, lambda envelope: canvas).values())

    other = noise * theirs.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    equal, larger, small, astray = of(theirs), of(1.5 * theirs), of(0.1 * theirs), of(0.1 * other)
    # A weight of 0 is a choice: squared error alone and cosine alone are published losses.
    sized, turned = 0.05 * min(1.0, context.cfg.mse), min(0.6 * small, 0.5 * context.cfg.cosine)
    unsized, unturned = sized > 0 and larger - equal < sized, turned > 0 and astray - small < turned
    wrong = []
    if abs(again - first) > 1e-3 * first:
        wrong.append(f"with other and more padding the loss is {again:.4f} instead of {first:.4f}")
    if unsized:
        wrong.append(f"features 1.5 times as large raise the loss by only {larger - equal:.3f}")
    if unturned:
        wrong.append(
            f"small features in a wrong direction have a loss of {astray:.3f}, in the right direction {small:.3f}"
        )
    return Finding(
        not wrong, "; ".join(wrong) if wrong else
        f"padding changes the loss by {abs(again - first) / first:.0e}; loss of the teacher's own features {equal:.2f}, of 1.5 times them "
        f"{larger:.2f}, of a tenth {small:.2f}, of a tenth in another direction {astray:.2f}",
        f"padding changes nothing; 1.5 times the features cost at least {sized:.2g} more; another direction at least {turned:.2g} more",
        order_causes(
            (abs(again - first) > 1e-3 * first, "a term is not masked, or is divided by the whole length: silence is learnt"),
            (unsized, "the loss is cosine alone: the scale does not count"),
            (unturned, "the loss is squared error alone: direction hardly counts while features are small")),
        evidence={"loss": first, "padded": again, "teacher": equal, "larger": larger, "small": small, "astray": astray},
        batch=batch,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the student
@gate(
    "magnitude",
    rows="W3 W2",
    title="the student's features have the teacher's scale from the start",
    reads="model data",
)
def magnitude(context: GateContext) -> Finding:
    """Compares the norm of a frame, and of its part around the mean of its position, between student and teacher: before training, and after
    eight recordings were memorised."""
    run, stage = context.build(Rehearsal(steps=1))
    found = {"untrained": _sizes(run, stage, context)}
    _, taught, _ = overfitted(context)
    found["taught"] = _sizes(run, taught, context)
    (size, spread), (late, _) = found["untrained"], found["taught"]
    ok = 0.5 <= size <= 2 and 0.1 <= spread <= 4 and 0.8 <= late <= 1.25
    return Finding(
        ok, f"the student's norm over the teacher's: {size:.2f} before training ({spread:.2f} around the mean), {late:.2f} after eight samples",
        "0.5 to 2 before (0.1 to 4 around the mean), 0.8 to 1.25 after",
        order_causes(
            (not 0.1 <= spread <= 4, "the output scale does not start at the teacher's standard deviation (1.35 is Whisper base's, 1.1 "
             "tiny.en's)"),
            (not 0.5 <= size <= 2, "there is no offset for each position: most of a frame is the mean of its position"),
            (not 0.8 <= late <= 1.25, "the scale is not trained")),
        evidence=found,
    )  # fmt: skip


def _sizes(run: Run, stage: Stage, context: GateContext) -> tuple[float, float]:
    """Return (mean norm of the student's frames over the teacher's, the same around the mean of each position of the batch)."""
    data = View(
        stage.data["train"],
        pick(stage.data["train"], OVERFIT_SAMPLES, context.cfg.run.seed),
        draws=context.cfg.run.seed,
    )
    batch = fetch(data, list(range(len(data))), None, run.device)
    with evaluating(stage.model):
        ours = stage.model(batch["envelope"]).float()
    theirs, mask = batch["features"], speech(batch)[..., None].float()
    count = mask.sum(0).clamp_min(1)
    around = [((x - (x * mask).sum(0) / count).norm(dim=-1) * mask[..., 0]).sum() for x in (ours, theirs)]
    whole = [(x.norm(dim=-1) * mask[..., 0]).sum() for x in (ours, theirs)]
    return (whole[0] / whole[1]).item(), (around[0] / around[1]).item()


@gate("alignment", rows="W4", title="input at one time changes the features at that time", reads="model data train")
def alignment(context: GateContext) -> Finding:
    """Changes one frame of a recording, at eight places, and compares its time with that of the largest change in the features, in seconds.
    The sensor's frames must last as long as the teacher's, with the training path's augmentation, too."""
    run, stage, _ = rehearsed(context)
    data, seed = stage.data["val"], context.cfg.run.seed
    batch = fetch(data, pick(data, 8, seed), None, run.device)
    longest = int(batch["span"].argmax())
    one = batch["envelope"][longest : longest + 1]
    frames = int(one.any(-1).sum())
    places = torch.linspace(4, frames - 5, 8).round().long()
    changed = one.repeat(len(places), 1, 1)
    spread = one[one.any(-1)].std(0)
    changed[torch.arange(len(places)), places] += 2 * spread
    with evaluating(stage.model):
        moved = (stage.model(changed) - stage.model(one)).float().norm(dim=-1)  # (8, frames)
    peak = to_double(moved.argmax(1)) / whisper.FRAMES_PER_SECOND
    at = to_double(places) / recordings.FPS
    late = (peak - at).median().item()
    rate = ((peak - peak.mean()) * (at - at.mean())).sum().item() / (at - at.mean()).square().sum().item()
    drawn = fetch(stage.data["train"], pick(stage.data["train"], DRAWN, seed), seed, run.device)
    # a mask over the last frames of a few recordings is no other speed
    plain, seconds = _ends_apart(batch).max().item(), _ends_apart(drawn).quantile(0.75).item()
    ok = abs(late) <= 0.1 and abs(rate - 1) <= 0.1 and max(plain, seconds) <= 0.1
    return Finding(
        ok, f"features change {late:+.2f} s after the input, {rate:.2f} s per second of input; the ends differ by {plain:.2f} s, "
        f"with the augmentation of training by {seconds:.2f} s", "within 0.1 s, 0.9 to 1.1, within 0.1 s",
        "the upsampling assumes another sensor rate: from 20 to 50 frames per second it makes 5 frames of 2\n"
        "windows are not centred, a convolution is causal, or frames are dropped at the start",
        evidence={"input": at.tolist(), "features": peak.tolist()},
        cause="the augmentation changes the length of the input (its speed, a cut) and not that of the teacher's features"
        if seconds > 0.1 >= plain else "",
    )  # fmt: skip


def _ends_apart(batch: dict[str, Tensor]) -> Tensor:
    """Return the difference between the ends of a recording's input and its features, in seconds, (B,)."""
    sounds = batch["envelope"].any(-1)  # (B, frames)
    input_ends = (sounds * torch.arange(1, sounds.shape[1] + 1, device=sounds.device)).amax(1) / recordings.FPS
    return (input_ends - batch["span"] / whisper.FRAMES_PER_SECOND).abs()


# --------------------------------------------------------------------------------------------------------------- the task
@gate(
    "head",
    rows="W5 C4",
    title="the frozen decoder reads the transcript from the teacher's own features",
    reads="data loss counts",
)
def head(context: GateContext) -> Finding:
    """Computes the stage's loss for the teacher's features: it shows errors in ids, shift and mask."""
    run, stage = context.build(Rehearsal(steps=1))
    data, seed = stage.data["train"], context.cfg.run.seed
    batch = fetch(data, pick(data, min(16, context.cfg.train.batch_size), seed), seed, run.device)
    with evaluating(stage.model):
        rest = stage.model(torch.zeros_like(batch["envelope"]))
    canvas = torch.where(speech(batch)[..., None], batch["features"], rest)
    nats = sum(read(run, stage, batch, lambda envelope: canvas).values())
    low, remark = nats <= 0.5, ""
    if not low:  # smoothed labels have no loss near 0
        start = len(whisper.load(context.cfg.data.teacher, context.cfg.data.seconds).prompt)
        pulled = _pulled(run, stage, batch, canvas, start)
        if pulled:
            right, others = pulled
            low = right >= PULLED and not others
            remark = (
                f"; {right:.1%} of the tokens are pulled to their word"
                + "; the prompt or pads change the loss" * others
            )
            remark = (
                f"; a form of the recipe's own, which pulls {right:.1%} of the tokens to their word" if low else remark
            )
    return Finding(
        low, f"loss {nats:.2f} nats per token from the teacher's own features{remark}",
        f"at most 0.5, or a loss that pulls {PULLED:.0%} of the tokens to their word and nothing else",
        "labels are shifted twice, or not at all: the target is the token after the next, or the decoder's own input\n"
        "ids of another tokenizer, a start token twice, pads among the labels", evidence={"nats": nats}, batch=batch,
    )  # fmt: skip


def _pulled(run: Run, stage: Stage, batch: dict, canvas: Tensor, start: int) -> tuple[float, bool] | None:
    """Return (share of the text's tokens whose own score the loss raises most, where all scores are equal; whether another token changes
    the loss). None if the decoder's scores cannot be read."""
    seen: list[Tensor] = []

    def keep(_module: torch.nn.Module, _args: tuple, out: Tensor) -> Tensor:
        # Equal scores: smoothed labels lower the score of a word that is already likelier than its target.
        seen.append(torch.zeros_like(out).requires_grad_())
        return seen[-1]

    decoder, ids = stage.frozen_modules["teacher"].proj_out, batch["ids"]
    with decoder.register_forward_hook(keep), evaluating(stage.model), torch.enable_grad(), run.autocast():
        total = sum(stage.loss(lambda envelope: canvas, batch).values())
    if not total.requires_grad:
        return None
    found = [g for g in torch.autograd.grad(total, seen, allow_unused=True) if g is not None]
    if len(found) != 1 or found[0].shape[1] != ids.shape[1] - 1:
        return None
    slope, place = found[0], torch.arange(1, ids.shape[1], device=ids.device)
    scored = (place >= start) & (place < batch["words"][:, None])
    right = ((-slope).argmax(-1) == ids[:, 1:])[scored]
    return to_double(right).mean().item(), bool(slope[~scored].any())


@gate("collapse", rows="W1", title="the features carry enough for a frozen decoder, which attends to them",
      reads="model data")  # fmt: skip
def collapse(context: GateContext) -> Finding:
    """Measures the centred cosine between the initial student and the teacher, and the words that it decodes from eight recordings. (The raw
    cosine is useless: the teacher's mean alone has 0.7.)"""
    run, stage = context.build(Rehearsal(steps=1))
    teacher = whisper.load(context.cfg.data.teacher, context.cfg.data.seconds)
    follows, seed = context.follows, context.cfg.run.seed
    taught = stage.data["train" if follows == "rehearsed" else "val"]
    data = View(taught, pick(taught, OVERFIT_SAMPLES if follows == "rehearsed" else 64, seed))
    cosine = run.measure(stage, data)["centred_cosine"]
    eight = _eight(data)
    _, after, _ = overfitted(context)
    with evaluating(after.model):
        words = reader(after.model, teacher).write(after.model(eight["envelope"].to(run.device)))
    different, bar = len(set(words)), TAUGHT[follows]
    ok = cosine >= bar and different >= len(words) - 1
    return Finding(
        ok, f"centred cosine {cosine:.2f}; {different} different transcripts of {len(words)} recordings after training on the task loss",
        f"at least {bar:g}, at least {len(words) - 1}",
        "the first stage did not learn the features: more epochs, or another rate (a high raw cosine does not show that it did)\n"
        "the task loss trains on features without information: the decoder writes the same text whatever the input\n"
        "features lack the teacher's mean and scale (see magnitude)",
        evidence={"centred_cosine": cosine, "transcripts": words}, batch={k: v for k, v in eight.items() if isinstance(v, Tensor)},
    )  # fmt: skip


def _eight(data: Data) -> dict:
    """Eight samples on the evaluation path."""
    return data.collate([data.get(i, None) for i in range(min(OVERFIT_SAMPLES, len(data)))])


# -------------------------------------------------------------------------------------------------------------- the words
@monitor("repetition", rows="W8", title="transcripts end, and do not repeat")
def repetition(history: list[dict[str, float]]) -> Finding:
    """Measures the share of validation transcripts that repeat four ids or do not end, at the last evaluation."""
    share = history[-1]["val/repetition"]
    return Finding(
        share <= LOOPING, f"{share:.1%} of the transcripts repeat themselves or do not end", f"at most {LOOPING:.0%}",
        "the decoder cannot read the features and continues its own words: a longer first stage, more steps of the second\n"
        "recordings are longer than those of training\n"
        "--no-repeat-ngram-size 4 forbids that four ids repeat: it improves the text, not the features",
        evidence={"repetition": [row["val/repetition"] for row in history]},
    )  # fmt: skip


def ladder(fallback: str) -> Monitor:
    """Return the monitor that recommends `fallback` if the decoder does not read features that are close to the teacher's."""

    @monitor("ladder", rows="W7", title="the word error rate falls; otherwise the decoder must be trained too")
    def check(history: list[dict[str, float]]) -> Finding:
        """Compares the word error rate in the last third of the evaluations with the third before; at the end also whether transcripts
        differ and the loss can still fall."""
        third = len(history) // 3
        if third < 1:
            return Finding(True, f"{len(history)} evaluations", "3 or more evaluations for a curve")
        rates = [row["val/wer"] for row in history]
        before, now = (sum(part) / third for part in (rates[-2 * third : -third], rates[-third:]))
        cosine, different, nats = (history[-1][k] for k in ("val/centred_cosine", "val/different", "train/loss"))
        says = cosine >= READABLE and different >= VARIED
        # A short run of few recordings: the word error rate stands still only because the learning rate has come to its end.
        learning = rates[-1] < rates[0] / 2 and nats < (1 - SLOPE) * history[-1 - third]["train/loss"]
        stuck = now > PLATEAU and before - now < SLOPE * before and says and nats > HEARD and not learning
        return Finding(
            not stuck,
            f"word error rate {before:.1%}, then {now:.1%}; centred cosine {cosine:.2f}, {different:.0%} of the transcripts "
            f"different, {nats:.2f} nats per token in training",
            f"at most {PLATEAU:.0%}, or a tenth less than before (if the cosine is below {READABLE:g} or fewer than {VARIED:.0%} differ, the "
            f"first stage must be better; below {HEARD:g} nats, more recordings are needed)",
            "the decoder cannot read this student's features: train it, too, and watch the word error rate with the input of another recording",
            evidence={"fallback": fallback, "before": before, "now": now},
        )  # fmt: skip

    return check


FEATURES = [agreement, vocabulary, counted, feature_formula.FEATURES, magnitude, alignment]
TASK = [vocabulary, head, collapse]
