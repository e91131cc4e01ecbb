"""Classes of unequal size, whatever is done about them: healthy."""

from tests.helpers.plant import Healthy
from tests.vision.planted_balance import BY_SAMPLER, BY_WEIGHT, UNEVEN

VARIANTS = [
    Healthy("uneven-classes", UNEVEN, naive="one class twenty times another"),
    Healthy("uneven-classes-by-weight", BY_WEIGHT, naive="losses of one class count more"),
    Healthy("uneven-classes-by-sampler", BY_SAMPLER, naive="training samples stand twenty times in an epoch"),
    Healthy("uneven-classes-by-focal-loss", (*UNEVEN, "--balance.by", "focal"), naive="the first loss is not ln 10"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all
