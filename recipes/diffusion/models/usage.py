"""The Python code of an export's card that samples with it: diffusers alone."""

from collections.abc import Sequence
from typing import Any

SAMPLE = """from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("export", trust_remote_code=True)  # its source is export/pipeline.py
classes = {classes}  # in the order of their numbers
wanted = [0, {last}]
images = pipe(wanted, guidance_scale={scale:g}, num_inference_steps={steps}).images
for number, image in zip(wanted, images, strict=True):
    image.save(f"sample-{{number}}.png")
    print(number, classes[number], image.size)"""


def card(classes: Sequence[str], data: str, *, scale: float, steps: int) -> dict[str, Any]:
    """Return the header of the export's model card (`core.Stage.model_card`), with code that samples two classes. The exported pipeline
    takes their numbers, and the export has their names nowhere else."""
    code = SAMPLE.format(classes=[*classes], last=len(classes) - 1, scale=scale, steps=steps)
    return {"library_name": "diffusers", "data": data.removeprefix("hub:").rpartition("/")[2], "usage": code}
