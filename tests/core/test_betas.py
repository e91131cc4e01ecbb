"""Adam's two betas in the wrong order."""

import pytest
import torch
from trainworthy.core.gates.causes import own_rates


@pytest.mark.parametrize(("betas", "wrong"), [((0.999, 0.9), True), ((0.99, 0.9), True), ((0.9, 0.999), False), ((0.95, 0.95), False),
                                              ((0.0, 0.9), False), ((0.9, 0.8), False)])  # fmt: skip
def test_exchanged_betas_are_named(betas, wrong):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=betas)
    fault, cause = own_rates.exchanged_betas({"main": optimizer})
    assert bool(fault) is wrong
    assert ("the two betas are exchanged" in cause) is wrong


def test_optimisers_without_betas_are_quiet():
    assert own_rates.exchanged_betas({"main": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)}) == (
        "",
        "",
    )
