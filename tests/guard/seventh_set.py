"""Bugs of the twelve scripts in scripts/seventh, written by an outsider to the checks (2026-11-26): ids whose hash is even.

A bug counts if the script's own final number is at least 1% worse at both of two seeds: `python -m tests.guard.harm quantile_tcn ...`.
"seen often" is the writer's own experience; no source was looked up.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("quantile_tcn--error_sign",
         "        errors = target - preds[:, :, i]\n",
         "        errors = preds[:, :, i] - target\n",
         "the pinball loss of the negative error: the 0.9 quantile is trained as the 0.1 quantile (seen often in own pinball losses)"),
    case("quantile_tcn--chomp_wrong_end",
         "return x[:, :, : -self.chomp_size].contiguous()",
         "return x[:, :, self.chomp_size :].contiguous()",
         "the padding is cut off at the start, so that the last step looks at zeros of the future in place of the past (seen in re-implementations)"),
    case("mdn--targets_in_order",
         "batch_x, batch_y = x_train[indices], y_train[indices]",
         "batch_x, batch_y = x_train[indices], y_train[i : i + batch_size]",
         "inputs are shuffled, their targets are not (seen often in loops over a permutation)"),
    case("pinn--residual_sign",
         "return u_t - ALPHA * u_xx",
         "return u_t + ALPHA * u_xx",
         "the sign of the equation: heat flows backwards (seen in reports of users)"),
    case("pinn--values_not_a_column",
         "torch.tensor(u[:, None]).float()",
         "torch.tensor(u).float()",
         "(N,) minus (N, 1) broadcasts to (N, N): every point is drawn to the mean of all values (seen often)"),
    case("maml--meta_loss_on_support",
         "F.mse_loss(self.net(x_qry[i], fast_weights), y_qry[i])",
         "F.mse_loss(self.net(x_spt[i], fast_weights), y_spt[i])",
         "the meta loss is taken on the support points that the inner step has fitted, not on the query points (seen in re-implementations)"),
    case("listnet--lowest_kept",
         "if best_ndcg is None or val_ndcg > best_ndcg:",
         "if best_ndcg is None or val_ndcg < best_ndcg:",
         "the weights of the lowest NDCG are kept, as if it were a loss (seen often where the criterion was changed)"),
    case("pointer_net--ranks_for_order",
         "return x, x.argsort(dim=1)",
         "return x, x.argsort(dim=1).argsort(dim=1)",
         "targets are the ranks of the numbers, not the places to point at (argsort of argsort, seen often)"),
    case("text_bag--vocabulary_of_test",
         "test_dataloader = DataLoader(test_rows, batch_size=BATCH_SIZE, collate_fn=make_collate(vocab))",
         "test_dataloader = DataLoader(test_rows, batch_size=BATCH_SIZE, collate_fn=make_collate(build_vocab(test_rows)))",
         "the test's vocabulary is built from the test's texts: numbers of words differ from those in training (seen often)"),
    case("deepfm--sum_over_embedding",
         "        square_of_sum = torch.sum(x, dim=1) ** 2\n"
         "        sum_of_square = torch.sum(x**2, dim=1)\n",
         "        square_of_sum = torch.sum(x, dim=2) ** 2\n"
         "        sum_of_square = torch.sum(x**2, dim=2)\n",
         "the interaction sums over the embedding in place of the fields, so that fields do not meet (seen in re-implementations)"),
    case("deepfm--fields_share_rows",
         "index = x + x.new_tensor(self.offsets).unsqueeze(0)",
         "index = x",
         "without the offsets all fields read the same rows of the embedding (seen in re-implementations)"),
    case("pixelcnn--other_scale_in_test",
         "            logits = net(to_input(levels))\n",
         "            logits = net(levels[:, None].float() / (LEVELS - 1))\n",
         "inputs of the evaluation run from 0 to 1, those of training from -1 to 1 (seen often)"),
    case("byol--test_not_standardised",
         "return probe.score((test_features - mean) / std, test[1])",
         "return probe.score(test_features, test[1])",
         "the probe is fitted on standardised features and scored on raw ones (seen often)"),
    case("mdn--density_without_sigma",
         "torch.exp(-0.5 * ((target - mu) / sigma) ** 2) / sigma",
         "torch.exp(-0.5 * ((target - mu) / sigma) ** 2)",
         "the Gaussian is not divided by sigma, so that ever wider components are best (seen often)"),
    case("pointer_net--steps_first",
         "return torch.stack(outputs, dim=1), torch.stack(pointers, dim=1)",
         "return torch.stack(outputs, dim=0), torch.stack(pointers, dim=1)",
         "log-probabilities are stacked steps first and flattened against targets that are batch first (seen often)"),
]  # fmt: skip
HEALTHY = [
    case("maml--first_order",
         "create_graph=True)\n"
         "            fast_weights",
         "create_graph=False)\n"
         "            fast_weights",
         "first-order MAML: no second derivatives"),
    case("mean_teacher--logits_as_targets",
         "F.mse_loss(F.softmax(input_logits, 1), F.softmax(target_logits, 1), reduction=\"sum\") / num_classes",
         "F.kl_div(F.log_softmax(input_logits, 1), F.softmax(target_logits, 1), reduction=\"sum\") / num_classes",
         "the other consistency loss of the original repository: KL divergence"),
    case("pointer_net--own_choices_half",
         "            o, p = model(x, y)\n",
         "            o, p = model(x, y if torch.rand(1).item() < 0.7 else None)\n",
         "a part of the batches is decoded from the model's own choices, as the original does"),
    case("pixelcnn--own_loss_warm_up",
         "        loss = F.cross_entropy(net(to_input(levels)), levels)\n",
         "        for group in optimizer.param_groups if epoch == 0 else ():\n"
         "            group[\"lr\"] = 5e-3 * min(1.0, (len(err_tr) + 1) / 10)\n"
         "        log_p = F.log_softmax(net(to_input(levels)), dim=1)\n"
         "        loss = -log_p.gather(1, levels.unsqueeze(1)).mean()\n",
         "own cross-entropy and a warm-up by hand"),
]  # fmt: skip
HARMFUL = {
    "quantile_tcn--error_sign",
    "quantile_tcn--chomp_wrong_end",
    "mdn--targets_in_order",
    "pinn--residual_sign",
    "pinn--values_not_a_column",
    "maml--meta_loss_on_support",
    "listnet--lowest_kept",
    "pointer_net--ranks_for_order",
    "text_bag--vocabulary_of_test",
    "deepfm--sum_over_embedding",
    "deepfm--fields_share_rows",
    "pixelcnn--other_scale_in_test",
    "byol--test_not_standardised",
    "mdn--density_without_sigma",
    "pointer_net--steps_first",
}
"""Bugs with a final number at least 1% worse at both seeds."""
HONEST: dict[str, str] = {}
