"""Bugs planted in rates, clipping and loss terms of a fork of vision/classify; the words were fixed before the gates were run on
them."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import CLIP, LOOP, MEAN_LOSS, NORMALISE, STAGES, UPDATE, own_loop, staged

SAME = NORMALISE + " + 0"  # the bug is in the settings


MATH = "    import math\n\n"


def rate(expression: str, head: str = "") -> str:
    """A loop that sets the rate by itself."""
    return (f"    total = run.total_steps(stage)\n{head}    for step in run.steps(stage):\n"
            '        for group in stage.optimizers["main"].param_groups:\n'
            f'            group["lr"] = group["peak_lr"] * ({expression})\n' + UPDATE)  # fmt: skip


def scaled(*before_step: str) -> str:
    """A user's loop with a gradient scaler; what stands between its backward and its step."""
    body = ("optimizer.zero_grad()", MEAN_LOSS, "scaler.scale(loss).backward()", *before_step, "scaler.step(optimizer)",
            "scaler.update()")  # fmt: skip
    return f'    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)\n    for step in run.steps(stage):\n{own_loop(*body)}'


def two_terms(weight: str, *more: str) -> str:
    """A second term beside the cross-entropy: squared distance of probabilities to the truth (Brier 1950), 0.9 when untrained."""
    return staged(f"""
ce = stage.loss


def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
    p, truth = model(batch["image"]).softmax(1), F.one_hot(batch["label"], 10)
    return {{**ce(model, batch), "match": (p - truth).square().sum() * ({weight})}}


stage.loss = loss
stage.expect.initial_loss += 0.9 * {weight}
{chr(10).join(more)}
""")


SCHEDULE = [
    Plant("scheduler-once-per-process", "schedule", "C11", LOOP,
          rate("0.5 * (1 + math.cos(math.pi * min(4 * step.index, total) / total))", MATH),
          ("steps more than once", "once per process"), source="GEN-03 huggingface/transformers PR#24088",
          harm="the last three quarters of the run train nothing", before=("wiring",), why="its four steps train nothing either"),
    Plant("cosine-too-short", "schedule", "C11", LOOP, rate("0.5 * (1 + math.cos(2 * math.pi * step.index / total))", MATH),
          ("it rises again",), source="GEN-03 ContextualAI/HALOs PR#33"),
    Plant("no-schedule", "schedule", "C11", LOOP, rate("1.0"), ("the schedule says", "run.steps() sets it")),
    Plant("own-warm-up-on-top", "schedule", "C11", LOOP, rate("min(1.0, (step.index + 1) / 500)"), ("the schedule says",)),
    Plant("rate-in-epochs", "schedule", "C11", LOOP, rate("0.9 ** step.epoch"), ("once per epoch",)),
    Plant("updated-twice", "schedule", "C9", UPDATE, 2 * UPDATE, ("stepped 2 times in iteration 1",),
          harm="twice as many steps as planned, each batch seen twice"),
    Plant("betas-exchanged", "schedule", "C9", NORMALISE, SAME, ("averages the gradient over 1,000 steps", "two betas are exchanged"),
          argv=("--optim.betas", "0.999", "0.9")),
    Plant("warm-up-without-end", "schedule", "C11", NORMALISE, SAME, ("warm-up takes 90%",), argv=("--optim.warmup", "0.9")),
    Plant("clip-before-backward", "schedule", "C9", UPDATE,
          own_loop("optimizer.zero_grad()", CLIP, MEAN_LOSS, "loss.backward()", "optimizer.step()"),
          ("clipped before backward()",), harm="nothing is ever clipped"),
    Plant("clip-after-step", "schedule", "C9", UPDATE,
          own_loop("optimizer.zero_grad()", MEAN_LOSS, "loss.backward()", "optimizer.step()", CLIP),
          ("after the step",), harm="nothing is ever clipped"),
    Plant("not-clipped", "schedule", "C9", UPDATE,
          own_loop("optimizer.zero_grad()", MEAN_LOSS, "loss.backward()", "optimizer.step()"), ("--optim.clip inf",)),
    Plant("clip-before-unscale", "wiring", "C9", LOOP, scaled(CLIP), ("norm", "the loss's own"),
          source="GEN-02 Lightning-AI/pytorch-lightning#9599",
          harm="every step is clipped 65,536 times too low"),
]  # fmt: skip

TERMS = [
    Plant("mean-over-classes-and-pixels", "terms", "C16", STAGES, two_terms("1 / 7840"),
          ("a mean over classes, pixels", "match"), source="DST-03 attention-transfer#18", harm="the term does nothing"),
    Plant("swamped", "terms", "C16", STAGES, two_terms("1e5"), ("match dominates ce",)),
    Plant("detached-term", "terms", "C16", STAGES, two_terms("1.0").replace(".sum()", ".sum().detach()"), ("detach()",)),
    Plant("no-term-has-a-gradient", "terms", "C16", STAGES,
          two_terms("0").replace("**ce(model, batch)", '"ce": 0 * ce(model, batch)["ce"]'), ("no term has a gradient",),
          before=("initial-loss", "wiring", "schedule"), why="a loss of nothing shows at once"),
]  # fmt: skip

RANGE = [
    Plant("rate-hundred-times-too-high", "range-test", "C11", NORMALISE, SAME, ("chosen for another optimiser", "blows up"),
          argv=("--optim.lr", "0.3"), before=("overfit", "baseline"), why="eight samples are not learnt at that rate either",
          harm="accuracy 0.10 after three epochs, 0.69 at 3e-3"),
    Plant("sgd-rate-hundred-times-too-high", "range-test", "C11", NORMALISE, SAME, ("chosen for another optimiser", "blows up"),
          argv=("--optim.name", "sgd", "--optim.lr", "5"), before=("overfit", "baseline"), why="as above",
          harm="accuracy 0.10 after three epochs, 0.79 at 0.05"),
    Plant("rate-thousand-times-too-low", "range-test", "C11", NORMALISE, SAME, ("chosen for another optimiser",),
          argv=("--optim.lr", "3e-6"), before=("overfit", "baseline"), why="eight samples are not learnt at that rate either",
          harm="accuracy 0.16 after three epochs, 0.69 at 3e-3"),
    Plant("rate-of-adam-for-adafactor", "range-test", "C11", NORMALISE, SAME, ("chosen for another optimiser",),
          argv=("--optim.name", "adafactor", "--optim.lr", "1e-3"), before=("overfit", "baseline"), why="as above",
          harm="accuracy 0.21 after three epochs, 0.58 at 0.1"),
]  # fmt: skip

PLANTS = [*SCHEDULE, *TERMS, *RANGE]
RELATIVES = ["rate-thousand-times-too-low", "no-schedule", "own-warm-up-on-top",
             "rate-in-epochs", "clip-after-step", "not-clipped", "swamped",
             "sgd-rate-hundred-times-too-high", "rate-of-adam-for-adafactor"]  # fmt: skip
