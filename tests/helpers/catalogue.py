"""Silent bugs of public projects, each planted in a fork of some recipe, and healthy things that look like bugs.

`python -m tests.helpers.catalogue` writes docs/catalogue.md from this file, the planted bugs and the healthy variants; a test compares
the two.

A planted bug names its catalogue entry in `source` ("LLM-01 owner/project#1") or in its id ("dif-01-..."), a healthy variant in its id.
"""

import re
from pathlib import Path

from tests.conftest import collected
from tests.helpers.plant import Healthy, Plant

PAGE = Path(__file__).parents[2] / "docs" / "catalogue.md"

BUGS = {
    "LLM-01": "labels are shifted in the data and again in the loss: token t + 2 is learnt",
    "LLM-02": "labels are not shifted: each logit is scored on the token it has just read",
    "LLM-03": "the end token is masked because it is the pad, too: the model never stops",
    "LLM-04": "the mask over the prompt is lost: prompts are learnt",
    "LLM-05": "answers are found by a marker in the text: a prompt that quotes the marker moves the mask",
    "LLM-06": "a length limit removes every label of a sample: its loss is 0.0",
    "LLM-07": "documents packed into one row attend to each other",
    "LLM-08": "a text gets a second BOS in training, or no template in evaluation",
    "LLM-09": "padding is on the wrong side, or position ids count it",
    "LLM-10": "a loaded head is initialised again",
    "LLM-11": "activation checkpointing after frozen embeddings: adapters get no gradient",
    "LLM-12": "DPO over the mean of token log-probabilities",
    "LLM-13": "policy and reference differ by dropout",
    "LLM-14": "DPO without its reference",
    "LLM-15": "tokens after an answer's end are learnt as answer",
    "LLM-16": "a metric that averages averages, or counts padding",
    "LLM-17": "a base model that should be in four bits stays in full precision, all of it or a part",
    "LLM-18": "packed weights are dequantised with the scales of other weights",
    "LLM-19": "adapters of a base in four bits are merged into other weights than they were trained on",
    "VIS-01": "pixels are normalised or divided by 255 twice",
    "VIS-02": "validation pictures get the training augmentation",
    "VIS-03": "masks resized by interpolation: classes that do not exist",
    "VIS-04": "the void label is scored, or a class has its number",
    "VIS-05": "softmax before cross-entropy",
    "VIS-06": "the picture is resized, its boxes are not",
    "VIS-07": "class ids off by one between data, model and evaluation",
    "VIS-08": "mixup multiplies boxes by its share, like pixels",
    "VIS-09": "CutMix keeps the drawn share where the border cut its box",
    "VIS-10": "frozen batch norm trains again after the next train()",
    "DIF-01": "the average of the weights is exported and was never updated",
    "DIF-02": "averaged weights stay in the model after an evaluation",
    "DIF-03": "latents scaled by another autoencoder's factor",
    "DIF-04": "the condition is never dropped",
    "DIF-05": "one timestep for all",
    "DIF-06": "min-SNR weights of another prediction type",
    "DIF-07": "loss and sampler disagree on the sign of the velocity",
    "DIF-08": "pictures are in [0, 1], but the model expects [-1, 1]",
    "DIF-09": "the sampler inherits the training schedule's clipping",
    "RL-01": "the target network is never updated, or is the network itself",
    "RL-02": "truncation is treated as termination, or termination is ignored",
    "RL-03": "(B,) meets (B, 1): every sample is compared with every other",
    "RL-04": "a squashed Gaussian without its correction",
    "RL-05": "the statistics of a normaliser move during evaluation",
    "RL-06": "the statistics of a normaliser are not saved",
    "RL-07": "the KL penalty has the wrong sign",
    "RL-08": "the reward is added, or read, at another token than the last",
    "RL-09": "advantages are whitened over padding",
    "VLM-01": "image placeholders are scored",
    "VLM-02": "a tower is unfrozen, but its forward still runs under no_grad",
    "VLM-03": "a tower is frozen except for a table that no list names",
    "VLM-04": "the projector is frozen together with the tower",
    "VLM-05": "a length limit removes image placeholders",
    "VLM-06": "the batch is flattened before the shift",
    "VLM-07": "stage two starts without stage one's projector",
    "DST-01": "the teacher is in train mode",
    "DST-02": "teacher.eval() reaches modules that the student trains",
    "DST-03": "a divergence averaged over classes",
    "DST-04": "padding counts in a term",
    "DST-05": "the teacher reads pictures normalised for the student",
    "DST-06": "the decoder's first token occurs twice",
    "DST-07": "speech labels that are already aligned are shifted",
    "GEN-01": "accumulation averages micro-batches instead of tokens",
    "GEN-02": "gradients are clipped before they are unscaled",
    "GEN-03": "the schedule steps once per process, or ends early",
    "GEN-04": "workers or epochs repeat the same random draws",
    "GEN-05": "every epoch has the same order",
    "GEN-06": "the model stays in eval mode after the first evaluation",
    "GEN-07": "functional dropout without the training flag",
    "GEN-08": "a resumed run draws a new order: some samples are read twice, others never",
    "GEN-09": "the schedule restarts after a stop",
    "GEN-10": "validation samples are in the training set",
    "GEN-11": "bf16 weights without an fp32 copy: updates are rounded away",
    "GEN-12": "pretrained weights are not loaded because of a key prefix",
    "GEN-13": "every worker reads the whole stream",
    "GEN-14": "zero_grad is missing",
    "GEN-15": "weight decay on norms and biases",
}

CONTROLS = {
    "OK-01": "a tower is frozen on purpose",
    "OK-02": "adapters: nearly everything frozen, and no gradient in half of the rest at the first step",
    "OK-03": "batch norm mixes the samples of a batch",
    "OK-04": "bf16 weights with an fp32 copy",
    "OK-05": "label smoothing: the loss has a floor",
    "OK-06": "focal loss: the first loss is far below ln N",
    "OK-07": "layers that are never used, or skipped at random",
    "OK-08": "every token is scored because there is no prompt",
    "OK-09": "the pad is the end token, and the mask goes by lengths",
    "OK-10": "packed rows whose positions restart",
    "OK-11": "a batch of one or two under GroupNorm",
    "OK-12": "diffusion without a condition: nothing to drop",
    "OK-13": "steps at a rate of nearly 0",
    "OK-14": "half of the training labels are noise, on purpose",
    "OK-15": "sparse reward",
    "OK-16": "groups of answers with equal rewards",
    "OK-17": "GRPO's loss, which stays at zero",
    "OK-18": "padding on the left without position ids, if only distances count",
    "OK-19": "DPO's first loss is ln 2 for any data",
    "OK-20": "latents that need no factor",
    "OK-21": "log-probabilities averaged over tokens, as the loss defines",
    "OK-22": "speech padded without a mask, as its model was trained",
    "OK-23": "validation better than training under strong augmentation",
    "OK-24": "samples that repeat under a balanced sampler",
    "OK-25": "branches and heads that are initialised with zeros",
    "OK-26": "few timesteps, by design",
}

DOMAINS = {"GEN": "Any loop", "LLM": "Language", "VIS": "Vision", "DIF": "Diffusion", "RL": "Control and rewards",
           "VLM": "Vision and language", "DST": "Distillation"}  # fmt: skip
ID = re.compile(r"\b(?:LLM|VIS|DIF|RL|VLM|DST|GEN|OK)-\d\d\b")

PROJECT = re.compile("[a-z]{3}")  # a plant may name a row of the gates instead


def named(text: str) -> set[str]:
    """The ids in a text."""
    return set(ID.findall(text.upper()))


def planted() -> dict[str, list[Plant]]:
    """Return the planted bugs of each entry, in the order of their names."""
    found: dict[str, list[Plant]] = {bug: [] for bug in BUGS}
    for plant in sorted(collected("planted_*.py", "PLANTS"), key=lambda p: (p.recipe, p.id)):
        for bug in named(f"{plant.id} {plant.source}"):
            found[bug].append(plant)
    return found


def looked() -> dict[str, list[Healthy]]:
    """Return the healthy variants of each control."""
    found: dict[str, list[Healthy]] = {control: [] for control in CONTROLS}
    for healthy in sorted(collected("healthy_*.py", "VARIANTS"), key=lambda h: (h.recipe, h.id)):
        for control in named(healthy.id):
            found[control].append(healthy)
    return found


def page() -> str:
    """docs/catalogue.md."""
    bugs, controls = planted(), looked()
    n, all_of_it = sum(map(bool, bugs.values())), len(collected("planted_*.py", "PLANTS"))
    more = len(collected("healthy_*.py", "VARIANTS"))
    lines = [
        "# The catalogue of silent bugs", "",
        "Bugs that public projects had. None raises an exception or a warning: the run ends normally with a bad result. Each bug is",
        "planted in forks of the recipes. A test asserts which gate stops it before training, and which words the message has. The last",
        "table lists controls: healthy code that looks like a bug. No gate may fail it.", "",
        f"{n} of {len(BUGS)} bugs are planted; {sum(map(bool, controls.values()))} of {len(CONTROLS)} controls are healthy variants.",
        f"In all, the suite has {all_of_it} planted bugs and {more} healthy variants of recipes. Those that are not in these tables were found here,",
        "or cover rows of the [gates](gates.md) for which no bug of a public project was found. [Verify](verify.md) shows at which seeds",
        "each was run. This page is written by `python -m tests.helpers.catalogue`, and a test compares it with the suite.", "",
    ]  # fmt: skip
    for domain, title in DOMAINS.items():
        lines += [
            f"## {title}",
            "",
            "| bug | what goes wrong | seen in | planted in, stopped by |",
            "|---|---|---|---|",
        ]
        for bug, words in BUGS.items():
            if bug.startswith(f"{domain}-"):
                where = "; ".join(f"{p.recipe} `{p.id}`: `{p.gate}`" for p in bugs[bug]) or WITHOUT[bug]
                seen = ", ".join(
                    s for s in dict.fromkeys(ID.sub("", p.source).strip(" ,") for p in bugs[bug]) if PROJECT.search(s)
                )
                lines.append(f"| {bug} | {words} | {seen} | {where} |")
        lines.append("")
    lines += ["## Healthy, and suspicious", "", "| control | what looks like a bug | variants |", "|---|---|---|"]
    for control, words in CONTROLS.items():
        lines.append(f"| {control} | {words} | {'; '.join(f'{h.recipe} `{h.id}`' for h in controls[control])} |")
    lines += [
        "",
        "## Rows of the gates",
        "",
        "Gates and pages name kinds of bugs by these ids.",
        "",
        "| row | what goes wrong |",
        "|---|---|",
    ]
    for group, kinds in ROWS.items():
        lines += [f"| **{group}** | |", *(f"| {row} | {words} |" for row, words in kinds.items())]
    return "\n".join(lines) + "\n"


ROWS = {
    "Every recipe": {
        "C1": "the untrained loss is not the one that theory gives",
        "C2": "samples of a batch influence each other",
        "C3": "a parameter gets a wrong gradient or none, does not move, or trains although it should be frozen",
        "C4": "a few samples cannot be memorised: a wrong formula, target or evaluation",
        "C5": "the model does not need its input",
        "C6": "validation samples are in the training set",
        "C7": "the data do not match their declaration, or a part of a batch has no effect",
        "C8": "padding, interpolation or length give the answer away",
        "C9": "the optimiser steps too often or never, or gradients are clipped at the wrong place",
        "C10": "the gradient depends on how a batch is split",
        "C11": "the learning rate or its schedule does not fit",
        "C12": "the evaluation is random, changes the model, or scores other weights",
        "C13": "a resumed or sharded run differs",
        "C14": "fine-tuning starts from other weights",
        "C15": "samples are repeated or lost, or share random draws",
        "C16": "a term of the loss, or an entry of a batch, has no effect",
        "C17": "the run diverges, collapses, or is not finite",
        "C18": "the export is not what was scored",
        "C19": "what is learnt does not carry to held-out samples",
    },
    "Language": {
        "L1": "padding changes the result",
        "L2": "the wrong tokens are scored, or with wrong targets",
        "L3": "the token that ends a text is not trained, or is the wrong one",
        "L4": "a token sees tokens that it must not see",
        "L5": "the exported model or its positions differ from those of training",
        "L6": "the z-loss is wrong",
        "L7": "perplexity or bits per byte are computed wrongly",
        "L8": "the chat template is applied twice, partly, or not at all",
        "L9": "preferences: a wrong loss, reference or order of answers",
        "L10": "a gated model is not accessible",
    },
    "Rewards": {
        "R1": "the reward is wrong, or can be exploited",
        "R2": "the reference or the KL coefficient is wrong",
        "R3": "a term of the policy's loss or a normalisation is wrong",
        "R4": "environments, exploration or statistics are wrong, or are not saved",
        "R5": "returns, targets or stored steps are wrong",
        "R6": "a return that was reached is lost again",
    },
    "Vision": {
        "V1": "inputs have the wrong scale",
        "V2": "augmentation at evaluation, or of a picture without its target",
        "V3": "boxes or class ids are in another form than is assumed",
        "V4": "anchors, score threshold or NMS do not fit the boxes",
        "V5": "masks, void or their score are wrong",
        "V6": "rare classes are lost, or balanced wrongly",
        "V7": "batch norm has too few samples or steps",
    },
    "Diffusion": {
        "DF1": "samples do not show what they should, whatever the loss is",
        "DF2": "the average of the weights is not updated, evaluated or exported",
        "DF3": "latents have the wrong scale, or are of another autoencoder",
        "DF4": "target, sampler and timestep do not belong to one noise process",
        "DF5": "the condition is not dropped, not used, or encoded differently",
        "DF6": "the sampler is inexact",
        "DF7": "noise levels have the wrong weight or frequency",
    },
    "Distillation": {
        "W1": "the student's features carry no information",
        "W2": "a term of the distillation loss is wrong, or counts padding",
        "W3": "features have another size than the teacher's",
        "W4": "features are at another time than their input",
        "W5": "texts and ids do not belong to one vocabulary",
        "W6": "labels or features are not the teacher's, or of bad recordings",
        "W7": "the decoder cannot read the student's features",
        "W8": "the decoder repeats itself",
    },
    "Vision and language": {
        "X1": "the wrong parts train",
        "X2": "the second stage starts from an untrained projector",
        "X3": "parts share one learning rate",
        "X4": "image tokens and features do not match, or the wrong tokens are scored",
        "X5": "answers do not come from the picture",
    },
}
"""Kinds of bugs, by the ids that gates, planted bugs and pages name."""

WITHOUT = {
    "VIS-09": "no harm here, so it is not planted: accuracy 98.7% (five seeds, 98.4-99.0%), with the share corrected 97.7% (97.6-98.0%); "
    "vision/classify with CutMix, `bench/harm.py`, 2026-11-22",
    "GEN-15": "no harm here, so it is not planted: accuracy 98.8% (five seeds, 98.5-99.2%), with matrices alone decayed 98.9% (98.4-99.4%); "
    "vision/classify, `bench/harm.py`, 2026-11-22",
}
"""Bugs that are not planted, and why."""

if __name__ == "__main__":
    PAGE.write_text(page())
