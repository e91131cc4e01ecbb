"""Bugs planted in what a stage keeps beside the weights that train: copies that are none, an average that does not average;
and entries of a batch that nothing depends on."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import STAGES, staged

LOOP_END = """        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__"""
RESTORED = """
            best = stage.model.state_dict()
    stage.model.load_state_dict(best or stage.model.state_dict())


if"""
KEPT = LOOP_END.replace("\n\n\nif", RESTORED)
SHADOW = """
class Shadow:
    def __init__(self, model: nn.Module):
        self.weights = [p.data for p in model.parameters()]

    def state_dict(self) -> dict:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict) -> None:
        for mine, theirs in zip(self.weights, state["weights"], strict=True):
            mine.copy_(theirs)


"""
AVERAGE = '            stage.state["ema"].update(stage.model)\n'
FIELDS = '"label": core.Field("target", classes=classes)}\n'
WEIGHTS = """for data in stage.data.values():
    data.collate = lambda samples, own=data.collate: {**own(samples), "weight": torch.stack([s["image"].mean() for s in samples])}
own = stage.loss
stage.loss = lambda model, batch: {"ce": own(model, batch)["ce"] * (batch["weight"] / batch["weight"]).mean()}"""

PLANTS = [
    Plant("best-weights-by-reference", "storage", "C12", LOOP_END, KEPT, ("the model's own memory", "clone"),
          source="pytorch forum: state_dict() is a reference", harm="the best weights the last ones"),
    Plant("shadow-by-reference", "storage", "C12", STAGES, SHADOW.lstrip() + staged('stage.state["shadow"] = Shadow(stage.model)'),
          ("state['shadow'] shares memory",), harm="what is kept to compare with is what is trained"),
    Plant("ramp-starts-again", "ema", "C12", AVERAGE, AVERAGE.replace("stage", 'stage.state["ema"].updates = 0\n            stage', 1),
          ("nearly the newest weights",), argv=("--ema", "0.999"), harm="no average: the newest weights"),
    Plant("averaged-once-an-epoch", "ema", "C12", AVERAGE,
          AVERAGE.replace("            stage", "            if step.index % 500 == 499:\n                stage", 1),
          ("does not move",), argv=("--ema", "0.999"), before=("overfit", "evaluation", "baseline", "tiny-data"),
          why="after eight samples the average is still the untrained net"),
    Plant("input-that-nobody-reads", "entries", "C7", FIELDS,
          FIELDS.replace("}\n", ', "turned": core.Field("input")}\n        turn = lambda sample: {**sample, "turned": sample["image"].flip(2)}\n'
                         "        own = self.get\n        self.get = lambda index, generator: turn(own(index, generator))\n"),
          ("turned: declared as input, and neither",), harm="half of the input is not used"),
    Plant("weight-over-itself", "entries", "C7", STAGES, staged(WEIGHTS), ("weight: the loss reads it", "cancels out"),
          harm="the weights of the samples do nothing"),
]  # fmt: skip

RELATIVES = ["averaged-once-an-epoch"]  # a minute; ramp-starts-again is of the same gate
