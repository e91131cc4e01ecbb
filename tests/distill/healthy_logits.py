"""Healthy variants of distill/logits."""

from tests.helpers.plant import Healthy

SKIPS = ("fabricated", "init", "terms")


def healthy(id: str, *argv: str, naive: str = "") -> Healthy:
    return Healthy(id, argv, None, naive, recipe="distill/logits", may_skip=SKIPS)


VARIANTS = [
    healthy("ok-kd-temperature-1", "--temperature", "1"),
    healthy("ok-kd-temperature-8", "--temperature", "8", naive="nearly even targets: the first loss is small"),
    healthy("ok-kd-teacher-alone", "--weight", "1", naive="no label is read"),
    healthy("ok-kd-every-label", "--labelled", "1"),
    healthy("ok-kd-no-augmentation", "--no-augment"),
]
SAMPLED = ()  # make verify has them all
