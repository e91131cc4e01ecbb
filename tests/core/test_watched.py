"""What gates measure does not change what they measure: a recorded rehearsal trains, bit for bit, what the same one trains alone."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from trainworthy.core.base import config
from trainworthy.core.gates import recorder
from trainworthy.core.gates.fingerprints import tensors
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.recipe import loading
from trainworthy.core.session import stages

from tests.helpers.sampling import sample

DROPS = "F.dropout({}, 0.1, self.training)"
FORKS = {
    "rl/dqn": (("x = self.body(x)\n", f"x = {DROPS.format('self.body(x)')}\n"), ("--learning-starts", "64", "--gradient-steps", "4")),
    "rl/ppo": (("(self.actor(x)), self.critic(x)", "(self.actor(x)), nn.functional.dropout(self.critic(x), 0.1, self.training)"),
               ("--num-steps", "16", "--train.batch-size", "64")),
    "vision/classify": (("self.head(x.mean((2, 3)))", f"self.head({DROPS.format('x.mean((2, 3))')})"), ("--train.batch-size", "16")),
}  # fmt: skip


@pytest.mark.parametrize("recipe", sample(FORKS, "rl/dqn", "vision/classify"))
def test_a_recorded_rehearsal_trains_what_one_alone_trains(recipe: str, fork, tmp_path: Path):
    """With dropout, so that every draw of the generators counts."""
    hunk, argv = FORKS[recipe]
    loaded = loading.load(str(fork(hunk, recipe=recipe)))
    cfg = config.parse(loaded.module, list(argv), prog="watched")[0]
    (spec,) = stages.specs(loaded, cfg)
    context = GateContext(
        spec.cfg, Accelerator(cpu=True), spec.factory(None), loaded.module.train, tmp_path, {}, {}, stage=spec.name
    )
    plan = recorder.rehearsal_plan(context)
    run, alone = context.build(plan)
    context.train(context.cfg, run, alone)
    before = {k: v.clone() for k, v in tensors(alone).items()}
    _, watched, record = recorder.rehearse(context, plan)
    after = tensors(watched)
    assert record.gradients
    assert before.keys() == after.keys()
    different = [k for k, v in before.items() if not torch.equal(v, after[k])]
    assert not different, different[:5]
