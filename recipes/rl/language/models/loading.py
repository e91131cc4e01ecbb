"""Language models that learn from rewards, as transformers' own classes: by folder, hub id, or `prose`, the small one that
llm/pretrain makes of the manual and the docstrings of the running Python.

`prose` is a built asset: made by the real recipe behind its own gates on first use, then cached under what it depends on.
"""

import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trainworthy.core.data import assets
from trainworthy.core.recipe.registry import find
from trainworthy.recipes.llm.data import prose
from trainworthy.recipes.shared import exports, hub, language_models, smollm
from trainworthy.recipes.shared.language_models import Attention as Attention
from trainworthy.recipes.shared.language_models import attend as attend


def locate(name: str, passes: float) -> str:
    """`prose` (after so many passes over its texts), `smollm2`, a folder or a hub id as what `from_pretrained` takes."""
    if name == "prose":
        return str(built(passes))
    return str(smollm.folder()) if name == "smollm2" else hub.locate(name, "--model", packaged="prose, smollm2")


@cache
def built(passes: float) -> Path:
    """A folder with the small language model, its tokenizer and what it says of itself."""
    recipe = find("llm/pretrain").path
    parts = [
        recipe,
        *(recipe.parent / f"{n}.py" for n in ("data/documents", "data/packing", "evaluation/ngrams")),
        prose.__file__,
    ]
    key = {"passes": passes, "torch": torch.__version__, "python": sys.version_info[:3]}
    return assets.built("prose-llama", key, lambda folder: _build(folder, passes), sources=parts, takes="about 2 min")


def _build(folder: Path, passes: float) -> None:
    """The export of llm/pretrain is kept, and what it says of itself."""
    settings = ["--train.epochs", str(passes), "--train.eval-every", str(passes), "--data.no-test"]
    with tempfile.TemporaryDirectory() as out:
        run = exports.made("llm/pretrain", settings, out, what="the small language model")
        for file in [*(run / "export").iterdir(), run / "summary.json"]:
            os.replace(file, folder / file.name)


def tokenizer(path: str) -> Any:
    """The tokenizer, padding on the left: what is generated goes on where a prompt ends."""
    return language_models.tokenizer(path, "left")


def load(path: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The causal language model, on the CPU, without dropout: the ratio of two forwards of one text must be 1."""
    return language_models.load(path, dtype, dropout=False)
