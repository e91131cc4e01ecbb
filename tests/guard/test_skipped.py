"""Lines that a call does not execute: an input that a setting switches off is no forgotten one."""

import torch
from torch import nn
from trainworthy.guard.source.skipped import skipped

CONDITIONED = False


class Switched(nn.Module):
    def forward(self, noise, real):
        if CONDITIONED:
            return noise + real
        return 2 * noise


class Overwritten(nn.Module):
    def forward(self, noise, real):
        real = real * 1.0
        if real is not None:
            real = noise
        return 2 * real


class Forgotten(nn.Module):
    def forward(self, noise, real):
        return 2 * noise


def found(model: nn.Module) -> bool:
    x = torch.ones(2)
    return skipped(model.forward, "real", lambda: model(x, x))


def test_only_an_input_behind_a_setting_is_left_out_on_purpose():
    assert found(Switched())
    assert not found(Overwritten())
    assert not found(Forgotten())
