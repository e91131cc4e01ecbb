"""Averages, copies and entries of a batch that look odd, and are fine."""

from tests.core.planted_kept import AVERAGE, WEIGHTS
from tests.helpers.plant import Healthy
from tests.vision.planted_classify import STAGES, staged

COPY = """
class Held(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.register_buffer("first", torch.cat([p.detach().flatten() for p in net.parameters()]))


"""
BATCH = """for data in stage.data.values():
    data.collate = lambda samples, own=data.collate: {
        **own(samples), "place": torch.arange(len(samples)), "dark": torch.stack([1 - s["image"].mean() for s in samples])}"""

VARIANTS = [
    Healthy("average-for-a-short-run", ("--ema", "0.9"), naive="the newest weights"),
    Healthy("average-every-other-step", ("--ema", "0.99"),
            hunk=(AVERAGE, AVERAGE.replace("            stage", "            if step.index % 2:\n                stage", 1)),
            naive="the average does not move"),
    Healthy("first-weights-kept", hunk=(STAGES, COPY.lstrip() + staged('stage.state["first"] = Held(stage.model)')),
            naive="a copy of the weights that train"),
    Healthy("entries-for-display", hunk=(STAGES, staged(BATCH)), naive="the loss does not read them"),
    Healthy("weights-that-weigh", hunk=(STAGES, staged(WEIGHTS.replace('(batch["weight"] / batch["weight"]).mean()', "1.0"))),
            naive="an entry that is only carried"),
]  # fmt: skip
SAMPLED = ("entries-for-display",)
