"""Uses the export of vlm/instruct. It needs torch, torchvision, transformers and Pillow, and nothing of Trainworthy.

  python export/use.py picture.jpg "What is it?"     prints the answer

A run copies this file into its export as `use.py`. The picture and the question become a row as in the evaluation, from config.json;
the answer is generated greedily.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

Ask = Callable[[str, str], str]


def open_export(folder: str) -> Ask:
    """Return a function of a picture file and a question, which returns the answer."""
    config = json.loads((Path(folder) / "config.json").read_text())
    how = {
        "do_sample": False,
        "max_new_tokens": config["max_new_tokens"],
        "eos_token_id": config["ends"],
        "pad_token_id": config["ends"][0],
    }
    return (whole if (Path(folder) / "model").is_dir() else parts)(Path(folder), config, how)


def read(file: str) -> Image.Image:
    """Return a picture as training reads it: upright by its EXIF tag, RGB, alpha on white, 16 bits as 8."""
    image = ImageOps.exif_transpose(Image.open(file))
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def parts(folder: Path, config: dict, how: dict) -> Ask:
    """A vision encoder with a projector (vision.pt2), and a language model (language/)."""
    eyes = torch.export.load(folder / "vision.pt2").module()
    model = AutoModelForCausalLM.from_pretrained(folder / "language", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "language")

    def words(text: str) -> torch.Tensor:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return model.get_input_embeddings()(torch.tensor([ids], dtype=torch.long))

    @torch.no_grad()
    def ask(file: str, question: str) -> str:
        image = torch.from_numpy(np.array(read(file))).permute(2, 0, 1).float() / 255
        if image.shape[1:] != (config["side"], config["side"]):
            image = F.interpolate(image[None], (config["side"],) * 2, mode="bicubic", antialias=True)[0].clamp(0, 1)
        before, after = config["prompt"].split("<image>")
        row = torch.cat([words(before), eyes(image[None]), words(after.replace("{question}", question.strip()))], 1)
        out = model.generate(inputs_embeds=row, attention_mask=torch.ones(row.shape[:2], dtype=torch.long), **how)
        return tokenizer.decode(out[0], skip_special_tokens=True).rpartition("</think>")[2].strip()

    return ask


def whole(folder: Path, config: dict, how: dict) -> Ask:
    """A model of the hub with its own processor (model/)."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder / "model")

    @torch.no_grad()
    def ask(file: str, question: str) -> str:
        content = [{"type": "image", "image": read(file)}, {"type": "text", "text": question.strip()}]
        row = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
                                            return_tensors="pt")  # fmt: skip
        out = model.generate(**row, **how)[0, row["input_ids"].shape[1] :]
        return processor.tokenizer.decode(out, skip_special_tokens=True).strip()

    return ask


if __name__ == "__main__":
    print(open_export(str(Path(__file__).parent))(*sys.argv[1:]))
