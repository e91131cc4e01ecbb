"""Randomness as a pure function: nothing is carried from step to step, so a resumed run draws what a straight one draws.

order = f(seed, epoch) · sample = f(seed, epoch, index) · model = f(seed, step, rank)
"""

import hashlib

import torch


def derive(*parts: int | str) -> int:
    """A 63-bit seed from its parts; unrelated for any two different tuples (BLAKE2b)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seed_global(*parts: int | str) -> torch.Generator:
    """Seed torch's global generators from `parts`; returns the CPU one.

    The default generator is seeded directly: `torch.manual_seed` does more and costs 100 times as much. Library code
    that draws from the global generator (torchvision's transforms, dropout) follows it as well as code that is handed
    the returned generator.
    """
    seed = derive(*parts)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    return torch.default_generator.manual_seed(seed)


def seed_sample(*parts: int | str) -> torch.Generator:
    """Seed the CPU generator alone, for the draws of one sample (1 us)."""
    return torch.default_generator.manual_seed(derive(*parts))


def permutation(n: int, *parts: int | str) -> torch.Tensor:
    """A permutation of range(n) (n,) that depends on `parts` only."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(derive(*parts)))
