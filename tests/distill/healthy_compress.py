"""Healthy variants of distill/compress."""

from tests.distill.planted_compress import COMPRESS, FEW
from tests.helpers.plant import Healthy

SKIPS = ("fabricated", "initial-loss", "batch-norm", "range-test", "tiny-data")


def healthy(id: str, *argv: str, naive: str = "") -> Healthy:
    return Healthy(f"compress-{id}", (*FEW, *argv), None, naive, recipe=COMPRESS, may_skip=SKIPS)


VARIANTS = [
    Healthy("ok-22-padded-without-a-mask", FEW, recipe=COMPRESS, may_skip=SKIPS, naive="padding is attended to"),
    healthy("encoder-whole", "--encoder", "0", naive="the encoder does not train, and is asked once for both"),
    healthy("one-layer-each", "--encoder", "1", "--decoder", "1", naive="the last layer is not kept"),
    healthy("temperature-1", "--temperature", "1"),
    healthy("read-ahead", "--loader.threads", "4", naive="samples are made in other threads"),
]
SAMPLED: tuple[str, ...] = ()  # make verify has them all
