# ruff: noqa: E501
"""Bugs of the twelve scripts in scripts/sixth, written before any check was changed for them (2026-11-25, the sixth such set).

A bug counts if the script's own final number is at least 1% worse at both of two seeds: `python -m tests.guard.harm gpt_micro ...`.
"seen often" is the writer's own experience; no source was looked up.
"""

from tests.helpers.patches import ScriptPatch, cases_of

case = cases_of(__file__)

BUGS = [
    case("gpt_micro--rate_per_micro_batch",
         "    lr = get_lr(iter_num)\n",
         "    lr = get_lr(micro_num)\n",
         "the rate is computed from the count of micro-batches, so that it has decayed after a fortieth of the run (seen often where accumulation is added later)"),
    case("siren--grid_indexed_xy",
         'torch.meshgrid(ys, xs, indexing="ij")',
         'torch.meshgrid(ys, xs, indexing="xy")',
         "coordinates run along columns, pixels along rows (numpy's default of meshgrid)"),
    case("fedavg--last_key_divided",
         "            w_avg[key] += w[i][key]\n        w_avg[key] = torch.div(w_avg[key], len(w))\n",
         "            w_avg[key] += w[i][key]\n    w_avg[key] = torch.div(w_avg[key], len(w))\n",
         "an indentation: only the last entry of the sum is divided (seen often in copies of average_weights)"),
    case("protonet--queries_are_the_support",
         "target.eq(c).nonzero()[n_support:] for c",
         "target.eq(c).nonzero()[:n_query] for c",
         "the query samples are those that the prototypes are made of (seen in re-implementations)"),
    case("pointnet--points_by_view",
         "        points = points.transpose(2, 1)\n        optimizer.zero_grad()\n",
         "        points = points.view(-1, 3, opt.num_points)\n        optimizer.zero_grad()\n",
         "view() in place of transpose(): coordinates of different points are mixed (PyTorch forums: view and permute)"),
    case("moco--labels_arange",
         "labels = torch.zeros(logits.shape[0], dtype=torch.long)",
         "labels = torch.arange(logits.shape[0])",
         "SimCLR's labels with MoCo's logits, whose positive is always column 0 (seen often)"),
    case("realnvp--log_det_sign",
         "            log_det_J -= s.sum(dim=1)\n",
         "            log_det_J += s.sum(dim=1)\n",
         "the log-determinant of the inverse has the sign of the forward map (seen often in flows)"),
    case("vqvae--no_straight_through",
         "        quantized = inputs + (quantized - inputs).detach()\n",
         "        quantized = quantized.detach()\n",
         "the reconstruction never reaches the encoder: the straight-through term is missing (seen often in ports)"),
    case("td3--actor_sign",
         "            actor_loss = -self.critic.Q1(state, self.actor(state)).mean()\n",
         "            actor_loss = self.critic.Q1(state, self.actor(state)).mean()\n",
         "the actor minimises the critic's value (seen often)"),
    case("tagger--tags_not_sorted",
         "    tags = pad_sequence([tags[i] for i in order], batch_first=True, padding_value=-1)\n",
         "    tags = pad_sequence(tags, batch_first=True, padding_value=-1)\n",
         "sentences are sorted by length, their tags are not (seen often before enforce_sorted=False)"),
    case("survival--risk_set_reversed",
         "        mask[(y.T - y) > 0] = 0\n",
         "        mask[(y.T - y) < 0] = 0\n",
         "the risk set holds those who left before, not those still there (seen often: ascending for descending)"),
    case("transe--margin_sign",
         "target = torch.tensor([-1], dtype=torch.long)",
         "target = torch.tensor([1], dtype=torch.long)",
         "MarginRankingLoss with 1 ranks true triples behind corrupted ones (seen often)"),
]  # fmt: skip
HEALTHY: list[ScriptPatch] = []
HONEST = {
    "protonet--queries_are_the_support": """
def prototypical_loss(input, target, n_support):
    classes = torch.unique(target)
    prototypes = torch.stack([input[target.eq(c)][:n_support].mean(0) for c in classes])
    queries = torch.cat([input[target.eq(c)][n_support:] for c in classes])
    truth = torch.arange(len(classes)).repeat_interleave(len(queries) // len(classes))
    return None, (euclidean_dist(queries, prototypes).argmin(1) == truth).float().mean()


with torch.no_grad():
    test_acc = [prototypical_loss(model(xb), yb, 5)[1].item() for xb, yb in loaders["test"]]
print(f"FINAL test_acc={np.mean(test_acc):.4f}")
""",
}  # fmt: skip
"""Code that is run after the script, where its own evaluation is wrong."""
