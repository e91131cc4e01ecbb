"""Silent bugs of public projects, each planted in a fork of some recipe, and healthy things that look like bugs.

`python -m tests.helpers.catalogue` writes docs/catalogue.md from this and from what plants and lookalikes say of themselves; a test holds
the two together.

A plant says which bug it is in `source` ("LLM-01 owner/project#1") or in its name ("dif-01-..."), a lookalike in its name.
"""

import re
from pathlib import Path

from tests.conftest import collected
from tests.helpers.plant import Healthy, Plant

PAGE = Path(__file__).parents[2] / "docs" / "catalogue.md"

BUGS = {
    "LLM-01": "labels are shifted by hand, then again in the loss: token t + 2 is learnt",
    "LLM-02": "labels are not shifted: each logit is scored on the token it has just read",
    "LLM-03": "the end token is masked because it is the pad, too: the model never stops",
    "LLM-04": "the mask over the prompt is lost: prompts are learnt",
    "LLM-05": "answers are sought as text: whoever quotes the marker moves the mask",
    "LLM-06": "a length limit cuts every label of a sample away: its loss is 0.0",
    "LLM-07": "documents packed into one row attend to each other",
    "LLM-08": "template text gets a second beginning, or none where the model is asked",
    "LLM-09": "padding on the wrong side, or positions that count it",
    "LLM-10": "a head that was loaded is drawn again",
    "LLM-11": "checkpointing behind frozen embeddings: adapters get no gradient",
    "LLM-12": "DPO over the mean of token log-probabilities",
    "LLM-13": "dropout between a policy and what it is compared with",
    "LLM-14": "DPO without its reference",
    "LLM-15": "what stands behind an answer's end is learnt as answer",
    "LLM-16": "a metric that averages averages, or counts padding",
    "LLM-17": "a base that was asked for in four bits stays in full precision, whole or in part",
    "LLM-18": "packed weights are read with scales that are not theirs",
    "LLM-19": "adapters of a base in four bits are merged into other weights than they were trained on",
    "VIS-01": "pixels are normalised or divided by 255 twice",
    "VIS-02": "training augmentation on validation pictures",
    "VIS-03": "masks resized by interpolation: classes that do not exist",
    "VIS-04": "void is scored, or a class has the number of void",
    "VIS-05": "softmax before cross-entropy",
    "VIS-06": "the picture is resized, its boxes are not",
    "VIS-07": "class ids off by one between data, model and evaluation",
    "VIS-08": "mixup multiplies boxes by its share, like pixels",
    "VIS-09": "CutMix keeps the drawn share where the border cut its box",
    "VIS-10": "frozen batch norm thaws at the next train()",
    "DIF-01": "the average of the weights is exported and was never updated",
    "DIF-02": "averaged weights stay in the model after an evaluation",
    "DIF-03": "latents scaled by another autoencoder's factor",
    "DIF-04": "the condition is never dropped",
    "DIF-05": "one timestep for all",
    "DIF-06": "min-SNR weights of another prediction type",
    "DIF-07": "loss and sampler disagree on the sign of the velocity",
    "DIF-08": "pictures in [0, 1] where [-1, 1] is read",
    "DIF-09": "the sampler inherits the training schedule's clipping",
    "RL-01": "the target network never moves, or is the network itself",
    "RL-02": "a time limit is taken for an end, or an end for a step",
    "RL-03": "(B,) meets (B, 1): every sample is compared with every other",
    "RL-04": "a squashed Gaussian without its correction",
    "RL-05": "the statistics of a normaliser move during evaluation",
    "RL-06": "the statistics of a normaliser are not saved",
    "RL-07": "the KL penalty has the wrong sign",
    "RL-08": "the reward is paid, or read, at another token than the last",
    "RL-09": "advantages are whitened over padding",
    "VLM-01": "image placeholders are scored",
    "VLM-02": "a tower is thawed and its forward stays under no_grad",
    "VLM-03": "a tower is frozen but for a table that no list names",
    "VLM-04": "the projector is frozen together with the tower",
    "VLM-05": "a length limit cuts image placeholders away",
    "VLM-06": "the batch is flattened before the shift",
    "VLM-07": "stage two starts without stage one's projector",
    "DST-01": "the teacher is in train mode",
    "DST-02": "teacher.eval() reaches modules that the student trains",
    "DST-03": "a divergence averaged over classes",
    "DST-04": "padding counts in a term",
    "DST-05": "the teacher reads pictures normalised for the student",
    "DST-06": "the decoder's first token stands twice",
    "DST-07": "speech labels that are aligned already are shifted",
    "GEN-01": "accumulation averages micro-batches instead of tokens",
    "GEN-02": "gradients are clipped before they are unscaled",
    "GEN-03": "the schedule ticks once per process, or ends early",
    "GEN-04": "workers or epochs repeat each other's draws",
    "GEN-05": "every epoch has one order",
    "GEN-06": "the model stays in eval mode after the first evaluation",
    "GEN-07": "functional dropout without the training flag",
    "GEN-08": "a resumed run draws its order anew: some samples twice, others never",
    "GEN-09": "the schedule begins anew after a stop",
    "GEN-10": "validation samples stand in the training set",
    "GEN-11": "bf16 weights without an fp32 copy: updates are rounded away",
    "GEN-12": "pretrained weights are not loaded, for a prefix",
    "GEN-13": "a stream that every worker reads whole",
    "GEN-14": "zero_grad is missing",
    "GEN-15": "weight decay on norms and biases",
}

CONTROLS = {
    "OK-01": "a tower is frozen on purpose",
    "OK-02": "adapters: nearly everything frozen, and no gradient in half of the rest at the first step",
    "OK-03": "batch norm mixes the samples of a batch",
    "OK-04": "bf16 weights beside an fp32 copy",
    "OK-05": "label smoothing: the loss has a floor",
    "OK-06": "focal loss: the first loss is far below ln N",
    "OK-07": "layers that are not used, always or by chance",
    "OK-08": "every token is scored where there is no prompt",
    "OK-09": "the pad is the end token, and the mask goes by lengths",
    "OK-10": "packed rows with positions that begin anew",
    "OK-11": "a batch of one or two under GroupNorm",
    "OK-12": "diffusion without a condition: nothing to drop",
    "OK-13": "steps at a rate of nearly nothing",
    "OK-14": "half of the training labels are noise, on purpose",
    "OK-15": "reward that hardly ever comes",
    "OK-16": "groups of answers that all earn the same",
    "OK-17": "GRPO's loss, which stays at zero",
    "OK-18": "padding on the left without positions, where only distances count",
    "OK-19": "DPO's first loss is ln 2 whatever it reads",
    "OK-20": "latents that need no factor",
    "OK-21": "log-probabilities averaged where the loss says so",
    "OK-22": "speech padded without a mask, as its model was trained",
    "OK-23": "validation better than training under strong augmentation",
    "OK-24": "samples that repeat under a balanced sampler",
    "OK-25": "branches and heads that begin at zero",
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
    """The plants of each bug, in the order of their names."""
    found: dict[str, list[Plant]] = {bug: [] for bug in BUGS}
    for plant in sorted(collected("planted_*.py", "PLANTS"), key=lambda p: (p.recipe, p.id)):
        for bug in named(f"{plant.id} {plant.source}"):
            found[bug].append(plant)
    return found


def looked() -> dict[str, list[Healthy]]:
    """The healthy variants of each control."""
    found: dict[str, list[Healthy]] = {control: [] for control in CONTROLS}
    for healthy in sorted(collected("healthy_*.py", "LOOKALIKES"), key=lambda h: (h.recipe, h.id)):
        for control in named(healthy.id):
            found[control].append(healthy)
    return found


def page() -> str:
    """docs/catalogue.md."""
    bugs, controls = planted(), looked()
    n, all_of_it = sum(map(bool, bugs.values())), len(collected("planted_*.py", "PLANTS"))
    more = len(collected("healthy_*.py", "LOOKALIKES"))
    lines = [
        "# The catalogue of silent bugs", "",
        "Bugs that public projects had, none of which raises an exception or a warning: the run ends well, and the result is",
        "spoilt. Each is planted in forks of the recipes, and a test asserts which gate stops it, before anything is trained, and",
        "with which words. Below them, healthy things that look like bugs: no gate may fail them. This page is written by",
        "`python -m tests.helpers.catalogue`, and a test holds it against the suite.", "",
        f"{n} of {len(BUGS)} bugs are planted, {sum(map(bool, controls.values()))} of {len(CONTROLS)} controls stand as healthy "
        f"variants. The suite has {all_of_it} plants and {more} healthy",
        "variants in all: the others were found here, or stand for rows of the [gates](gates.md) for which no public project's bug",
        "was found. What was run over five seeds, and what at one, is in [verify](verify.md).", "",
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
    return "\n".join(lines) + "\n"


WITHOUT = {
    "VIS-09": "no harm here, so no plant: accuracy 98.7% (five seeds, 98.4-99.0%), with the share corrected 97.7% (97.6-98.0%); "
    "vision/classify with CutMix, `bench/harm.py`, 2026-11-22",
    "GEN-15": "no harm here, so no plant: accuracy 98.8% (five seeds, 98.5-99.2%), with matrices alone decayed 98.9% (98.4-99.4%); "
    "vision/classify, `bench/harm.py`, 2026-11-22",
}
"""Bugs that are not planted, and why."""

if __name__ == "__main__":
    PAGE.write_text(page())
