"""Healthy fine-tuning that looks like a loading bug."""

from tests.core.planted_init import loaded
from tests.helpers.plant import Healthy
from tests.vision.planted_classify import STAGES

VARIANTS = [
    Healthy("declared-fresh-head",
            hunk=(STAGES, loaded("stage.model.load_state_dict(file)\nnn.init.zeros_(stage.model.head.weight)\n"
                                 'stage.expect.new_parameters = ("head.",)')), naive="the head is not the file's"),
    Healthy("own-statistics",
            hunk=(STAGES, loaded("stage.model.load_state_dict(file)\nstage.model.mean += 0.01\n"
                                 "nn.init.zeros_(stage.model.head.weight)\n"
                                 'stage.expect.new_parameters = ("head.",)')), naive="buffers differ from the file's"),
]  # fmt: skip
SAMPLED = ()
