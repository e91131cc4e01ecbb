"""The attention mask of models of transformers, against the tokens that it hides: 1 is for tokens, 0 for padding."""

from torch import Tensor, nn

CALLS = 3  # calls with padding that must agree
DIFFERENT = 5  # ids at hidden places: padding is one id


class Masks:
    """Calls whose mask hides one id, or everything but one."""

    def __init__(self) -> None:
        self.right = self.inverted = 0

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note a model's call with ids and a mask of their shape. Other models may give `attention_mask` another meaning."""
        mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids", args[0] if args else None)
        known = hasattr(getattr(getattr(module, "module", module), "config", None), "model_type")
        if not known or not isinstance(mask, Tensor) or not isinstance(ids, Tensor) or mask.shape != ids.shape:
            return
        visible = mask.bool()
        if bool(visible.all()) or not bool(visible.any()):
            return
        kept, hidden = ids[visible].unique().numel(), ids[~visible].unique().numel()
        self.inverted += kept == 1 and hidden >= DIFFERENT
        self.right += kept > 1

    def fault(self) -> tuple[str, str] | None:
        if self.inverted < CALLS or self.right:
            return None
        return (f"the attention mask hides all tokens but one id in all {self.inverted} calls with padding",
                "the mask is inverted: models of transformers want 1 for tokens and 0 for padding; torch's own layers (key_padding_mask) want "
                "True for padding")  # fmt: skip
