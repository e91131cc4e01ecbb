"""Bugs around an average of the weights, planted in a fork of vision/classify; the words were fixed before the gates were run."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import STAGES, staged

AVERAGED = ("--ema", "0.99")
UPDATED = '            stage.state["ema"].update(stage.model)\n'

PLANTS = [
    Plant("average-never-updated", "overfit", "C4", UPDATED, "            pass\n", ("average", "updated"), argv=AVERAGED,
          harm="what is evaluated and exported are the initial weights"),
    Plant("average-not-resumed", "resume", "C13", STAGES,
          staged('stage.state["ema"].load_state_dict = lambda state: None'), ("differ",), argv=AVERAGED,
          harm="a resumed run exports an average that forgot all that was before"),
]  # fmt: skip
