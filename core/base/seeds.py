"""Randomness as a pure function of the seed. No state is carried between steps, so a resumed run draws the same numbers
as an uninterrupted one.

order = f(seed, epoch) · sample = f(seed, epoch, index) · model = f(seed, step, rank)
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(*parts: int | str) -> int:
    """Derive a 63-bit seed from the parts (BLAKE2b); different tuples give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seed_global(*parts: int | str) -> torch.Generator:
    """Seed torch's global generators from `parts`; return the CPU one.

    The default generator is seeded directly, because `torch.manual_seed` does more and takes 100 times as long. Library
    code that draws from the global generator (torchvision's transforms, dropout) is covered, as is code that uses the
    returned generator.
    """
    seed = derive(*parts)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    return torch.default_generator.manual_seed(seed)


def seed_sample(*parts: int | str) -> torch.Generator:
    """Seed only the CPU generator, for the draws of one sample (1 us)."""
    return torch.default_generator.manual_seed(derive(*parts))


def seed_all(seed: int) -> None:
    """Seed the global CPU generators of torch, numpy and `random`."""
    seed_sample(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def state() -> list[torch.Tensor]:
    """Return the states of torch's global generators: the CPU's, and the device's if there is one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def restore(states: list[torch.Tensor]) -> None:
    """Set the generators to what `state` returned."""
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state(states[1])


@contextmanager
def kept_draws() -> Iterator[None]:
    """Restore the states of `random` and of numpy's generator after."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def permutation(n: int, *parts: int | str) -> torch.Tensor:
    """Return a permutation of range(n) (n,) that depends on `parts` only."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(derive(*parts)))
