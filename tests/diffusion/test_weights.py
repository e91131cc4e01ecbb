"""Published weights of timesteps, which a fork writes into its loss."""

import pytest
import torch
from trainworthy.recipes.diffusion.gates.objective import published_weights

LOSS = "(process.weights(t) * error)"


@pytest.mark.parametrize(
    ("kind", "unit"), [("noise", lambda s: 1.0), ("velocity", lambda s: s / (s + 1)), ("picture", lambda s: s)]
)
def test_published_weights_are_known_up_to_a_factor(kind: str, unit):
    snr = torch.logspace(-5, 4, 300)
    assert published_weights(3 * unit(snr) / (1 + snr), kind, snr).startswith("P2 of gamma 1")
    assert published_weights(unit(snr) * snr.clamp_min(1) / snr, kind, snr).startswith("truncated SNR")
    assert "bias -2" in published_weights(0.1 * unit(snr) / (1 + snr * 7.389), kind, snr)
    for other in (
        torch.ones_like(snr) * (kind != "picture"),
        unit(snr) * snr.clamp(max=5) / snr,
        unit(snr) / (1 + snr.flip(0)),
        0 * snr,
    ):
        assert not published_weights(other, kind, snr)
    assert not published_weights(1 / (1 + snr), "flow", snr)


def test_p2_weights_in_the_loss_are_quiet(launch, fork):
    """They are no setting of the recipe, and were taken for min-SNR of another prediction type."""
    fork(
        (LOSS, "(4 * (process.alpha[t] * process.sigma[t]).square() * error)"), recipe="diffusion/pixel"
    )  # SNR / (1 + SNR)^2
    done = launch("check", "mine.py", "--only", "weighting", code=0)
    assert "P2 of gamma 1" in done.verdicts()[0]["measured"], done.shown
