"""Gate on positions: rotary phases at the longest position in use, tested with a shift that must not change the
result."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Stage

WINDOW = 16  # tokens that are shifted; few enough that their own positions are exact in any precision
LIMIT = 0.02  # relative to the effect of reordering the same tokens
RELATIVE = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotary embeddings whose angles depend on the position only; others change with the length."""


def turns(model: nn.Module) -> bool:
    """Return whether positions are rotary, of a kind that does not change with the length."""
    kinds = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kind = kinds.get("rope_type", "default") if isinstance(kinds, dict) else "default"
    return any("rotary" in name for name, _ in model.named_modules()) and kind in RELATIVE


@torch.no_grad()
def moved(model: nn.Module, ids: Tensor, far: int) -> dict[str, float]:
    """Return how much the last logits of `ids` (1, T) change if all positions are one, or `far`, later; relative to reordering the tokens
    before the last one."""

    def last(ids: Tensor, shift: int) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)[None] + shift
        return to_double(model(input_ids=ids, position_ids=places, use_cache=False).logits[0, -1])

    plain = last(ids, 0)
    turned = torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], 1)
    scale = (last(turned, 0) - plain).norm().item()
    return {name: (last(ids, n) - plain).norm().item() / max(scale, 1e-12) for name, n in (("one", 1), ("far", far))}


def phases(find: Callable[[GateContext], tuple[Run, Stage, Tensor, int]]) -> Gate:
    """Return the gate. `find` returns (run, stage, ids (1, T) of a text, length in use)."""

    @gate("phases", rows="L5", title="rotary phases are exact at the longest position in use", reads="data model train")
    def check(context: GateContext) -> Finding:
        """Attention with rotary positions depends on distances only, so shifting a short text must not change the logits. Phases kept in
        half precision satisfy this at small positions only."""
        run, stage, ids, length = find(context)
        if not turns(stage.model):
            raise Skip("positions are not rotary, or depend on the length of the text")
        if length < 4 * WINDOW:
            raise Skip(f"texts have at most {length} tokens, too few for phases to lose precision")
        far = length - ids.shape[1]
        with evaluating(stage.model), run.autocast():
            gaps = moved(stage.model, ids, far)
        ok = gaps["far"] <= max(LIMIT, 10 * gaps["one"])
        return Finding(
            ok, f"{ids.shape[1]} tokens shifted to position {far:,}: the last logits change by {gaps['far']:.1e} of the change by "
            f"reordering the tokens (shifted by one position: {gaps['one']:.1e})",
            f"at most {LIMIT:g}, or ten times the change by one position",
            "rotary phases (positions times frequencies, or their cosines) are computed in bf16 or fp16: keep them in fp32\n"
            "position ids are cast to a half precision type, or overflow\n"
            "the model also has a table of absolute positions",
            evidence=gaps,
        )  # fmt: skip

    return check
