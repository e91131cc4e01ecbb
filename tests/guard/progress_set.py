"""Bugs after which a script's own score ends below that of its untrained model, and healthy scripts that look so for a while.

All were written before the check `progress` (2026-11-26). The healthy ones are the scripts of scripts/progress: those of the bugs, and
`LOOKALIKES`, whose losses rise or whose scores begin high. No source was looked up.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("rank_pairs--gap_sign", "F.softplus(-gap)", "F.softplus(gap)", "the better document of a pair is ranked lower"),
    case("two_tower--distance_as_logits", "logits = -torch.cdist", "logits = torch.cdist",
         "distances are given to the cross-entropy as similarities"),
    case("denoise--noise_sign", "((net(noisy) - noise) ** 2)", "((net(noisy) + noise) ** 2)",
         "the net learns the negative noise, which the evaluation subtracts"),
    case("growth--likelihood_minimised", ", maximize=True", "", "the likelihood is minimised"),
    case("corridor--minus_missing", "loss = -(torch.stack(logs)", "loss = (torch.stack(logs)",
         "the minus of the policy gradient is missing"),
    case("factors--scale_reversed", "loss = ((model(a, b) - rating)", "loss = ((model(a, b) - (6 - rating))",
         "1 is the best rating in training, 5 in the evaluation"),
]  # fmt: skip
LOOKALIKES = ("ring_gan", "small_objects", "rare_class", "annealed_vae", "slow_dqn", "overfitting", "byol")
