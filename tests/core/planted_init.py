"""Fine-tuning that does not start where it claims to, planted in a fork that loads its weights by itself."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import STAGES, staged

# Stands for a file: weights that are not the ones the recipe draws, with a head that is not zero.
DONOR = """
donor = ResNet(stage.model.mean, stage.model.std, cfg.widths, 10)
nn.init.normal_(donor.head.weight, std=0.05)
file = donor.state_dict()
"""


def loaded(body: str) -> str:
    """STAGES with a stage that starts from the donor's weights as `body` says and declares them."""
    return staged(DONOR + body.strip("\n") + "\nstage.pretrained = file")


PLANTS = [
    Plant("prefix-not-strict", "init", "C14", STAGES,
          loaded('file = {"module." + k: v for k, v in file.items()}\nstage.model.load_state_dict(file, strict=False)'),
          ("0.6% of the parameters", "'module.'", "strict=false"), source="GEN-12 pytorch/pytorch#141256",
          harm="fine-tuning from noise"),
    Plant("head-drawn-again", "init", "C14", STAGES,
          loaded("stage.model.load_state_dict(file)\nnn.init.normal_(stage.model.head.weight, std=0.05)"),
          ("head.weight", "initialised again", "expect.new_parameters"), source="LLM-10 huggingface/transformers PR#45079",
          harm="the head's pretraining is lost"),
    Plant("body-drawn-again", "init", "C14", STAGES,
          loaded("stage.model.load_state_dict(file)\n"
                 "stage.model.blocks.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Conv2d) else None)"),
          ("blocks.0.conv1.weight", "initialised again"), source="LLM-10"),
    Plant("half-the-blocks", "init", "C14", STAGES,
          loaded('file = {k: v for k, v in file.items() if not k.startswith("blocks.2")}\n'
                 "stage.model.load_state_dict(file, strict=False)"),
          ("26.0%", "not in the file", "blocks.2.conv1.weight"), source="VLM-07 LLaVA#808"),
    Plant("old-momentum", "init", "C14", STAGES,
          loaded("old = core.make_optimizer(donor, cfg.optim)\nfor p in donor.parameters():\n"
                 '    p.grad = torch.full_like(p, 1e-3)\nold.step()\nstage.model.load_state_dict(file)\n'
                 'stage.optimizers["main"].load_state_dict(old.state_dict())'),
          ("exp_avg", "before its first step", "resume")),
]  # fmt: skip
RELATIVES = ["body-drawn-again", "prefix-not-strict"]
