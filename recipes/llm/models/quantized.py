"""A frozen 4-bit base model under adapters (QLoRA, Dettmers 2023), and the gate that it represents the weights of its file.

bitsandbytes packs every linear layer except the head as NF4: two weights per byte, scaled by the largest of each 64, with 8-bit scales.
Adapters are trained on top of the packed weights, which differ from the file. So they are merged into the packed weights (`whole`), not
into those of the file.
"""

import importlib.util

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.console import list_names
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.recipes.llm.models import loading

from trainworthy import core

BLOCK, SCALES = 64, 256  # weights per scale, scales per second-level scale
HALF_GAP = 0.152  # half of NF4's widest gap, between -1 and -0.6962
HALF_STEP = 0.0071  # the same for the 8-bit scales (bitsandbytes' dynamic map): 64 values between 0.1 and 1
NEEDED = 0.9  # share of the matrices' weights that must be packed, without embeddings and head


def load(path: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the model on `device` with its linear layers except the head in four bits; other weights and the computation in `dtype`."""
    from transformers import AutoConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise core.UserError("--load-in-4bit needs the package 'bitsandbytes', which is not installed",
                             next="pip install 'trainworthy[llm,qlora]'")  # fmt: skip
    if hasattr(AutoConfig.from_pretrained(path), "quantization_config"):
        raise core.UserError(f"--load-in-4bit: {path} is already quantised", needed="the model that it was made from",
                             cause="what its weights were cannot be read back, nor compared")  # fmt: skip
    model = loading.load(path, dtype, quantization_config=nf4(dtype), device_map={"": device})
    for name, layer in packed(model).items():
        if device.type == "cpu" and layer.in_features % BLOCK:
            raise core.UserError(f"--load-in-4bit on a CPU: {name} has rows of {layer.in_features} weights",
                                 needed=f"multiples of {BLOCK}, or an accelerator",
                                 cause="bitsandbytes' kernel for AVX-512 then reads scales of other rows",
                                 next="--no-load-in-4bit")  # fmt: skip
        # On a CPU with AVX512-BF16 an evaluation would repack the weights for a kernel without gradients, and leave them so.
        layer.support_avx512bf16_for_cpu = False
    return model


def nf4(dtype: torch.dtype) -> object:
    """Settings of QLoRA."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                              bnb_4bit_compute_dtype=dtype)  # fmt: skip


def packed(model: nn.Module) -> dict[str, nn.Module]:
    """Return the 4-bit layers by name."""
    from bitsandbytes.nn import Linear4bit

    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def whole(path: str, model: nn.Module) -> nn.Module:
    """Return the model at `path`, fp32 on the CPU, with the values of the packed matrices of `model` instead of the file's. Adapters trained
    on them belong to these weights."""
    base = loading.load(path, torch.float32)
    for name, layer in packed(model).items():
        own = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        base.get_submodule(own).weight.data.copy_(multiplied(layer))
    return base


@gate(
    "four-bit",
    rows="C14",
    title="the 4-bit base approximates the weights of its file, and all of it is quantised",
    reads="data model optimizers expect pretrained train",
)
def four_bit(context: GateContext) -> Finding:
    """Reads what each packed matrix multiplies by, from products with unit vectors after a few steps of `train()`, and compares it with the
    file. The largest weight of each block is exact up to its scale's 8 bits; the others may be rounded by half of NF4's widest gap in
    addition."""
    _, stage, _ = rehearsed(context)
    model, layers = stage.model, {f"{n}.weight": layer for n, layer in packed(stage.model).items()}
    words = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m}
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad and id(p) not in words]
    file = {n: stage.pretrained[n] for n in frozen if n in stage.pretrained and stage.pretrained[n].dim() > 1}
    sizes = {n: t.numel() for n, t in file.items() if n in layers}
    share = sum(sizes.values()) / max(1, sum(t.numel() for t in file.values()))
    wrong, worst, scales = [], 0.0, 0.0
    if share < NEEDED:
        wrong.append(
            f"{share:.0%} of the weights are in four bits; not {list_names([n for n in file if n not in layers])}"
        )
    for name in sizes:
        value, scale = errors(multiplied(layers[name]), file[name])
        worst, scales = max(worst, value), max(scales, scale)
        if value > HALF_GAP or scale > 0:
            off = f"scales are off by {scale:.1%} beyond their rounding" if scale > 0 else f"weights by {value:.1%}"
            wrong.append(f"{name}: {off}")
    held = sum(t.nbytes for n, t in model.state_dict().items() if n.startswith(tuple(layers)))
    bits = 8 * held / max(1, sum(sizes.values()))
    measured = f"{len(layers)} matrices, {bits:.2f} bits a weight with its scales, off by {worst:.1%} of its block's largest at most"
    return Finding(
        not wrong, f"{len(wrong)} wrong: {list_names(wrong)}" if wrong else measured,
        f"{NEEDED:.0%} of the weights in four bits, within {HALF_GAP:.1%} of their block's largest, plus the rounding of scales",
        "the model was loaded without its quantization_config, or its layers are of a kind that is not packed (experts)\n"
        "weights of another model or layer, or scales that were not loaded with them\n"
        "on a CPU: rows that are no multiple of 64, which bitsandbytes reads with other rows' scales",
        evidence={"share": share, "bits": bits, "worst": worst, "scales": scales, "wrong": wrong[:20]},
    )  # fmt: skip


def multiplied(layer: nn.Module, rows: int = 1024) -> Tensor:
    """Return the matrix (out, in) that a packed layer multiplies by, from products with unit vectors, without its bias."""
    from bitsandbytes import matmul_4bit

    unit = torch.eye(layer.in_features, dtype=layer.compute_dtype, device=layer.weight.device)
    with torch.no_grad():
        columns = [matmul_4bit(part, layer.weight, quant_state=layer.weight.quant_state) for part in unit.split(rows)]
    return torch.cat(columns).T


def errors(got: Tensor, due: Tensor) -> tuple[float, float]:
    """Return (largest error of a weight relative to its block's largest, error of a block's largest weight), beyond what 8-bit scales and
    the rounding of `got` explain."""
    if got.shape != due.shape:
        return float("inf"), float("inf")
    rounding = max(2 * torch.finfo(got.dtype).eps, 2e-3)  # products in fp32 may use TF32
    got, due = (F.pad(t.to(got).float().flatten(), (0, -t.numel() % BLOCK)).view(-1, BLOCK) for t in (got, due))
    largest = due.abs().amax(1)
    far = (largest - largest.mean()).abs()
    far = F.pad(far, (0, -len(far) % SCALES)).view(-1, SCALES).amax(1)
    allowed = HALF_STEP * far.repeat_interleave(SCALES)[: len(largest)] + rounding * largest
    values, scales = (got - due).abs().amax(1), (got.abs().amax(1) - largest).abs()
    return tuple(((x - allowed) / largest.clamp_min(1e-30)).max().item() for x in (values, scales))
