"""Plain scripts of ten kinds (scripts/twentyfifth): a recipe for images, a physics-informed network, a normalising flow, reinforcement learning,
word vectors, graphs, detection, flow matching, fine-tuning by accelerate, forecasts.

Written on 2026-11-30 by someone who had not read the checks. Ids whose SHA-256 ends with an even digit; the others are in
twentyfifth_set_heldout.py. A bug counts if its number is at least 1% worse than the unchanged script's, or is wrong itself.
Measured at seed 0.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("mnist_recipe--wiped_before_step",
         "            loss.backward()\n",
         "            loss.backward()\n"
         "            optimizer.zero_grad()\n",
         "gradients are cleared between the backward pass and the step: nothing is learnt"),
    case("mnist_recipe--last_batch_counted_full",
         "        total += len(target)\n",
         "        total += loader.batch_size\n",
         "the evaluation divides by the batch size for each batch; the last batch is smaller"),
    case("heat_pinn--mixed_derivative",
         "torch.autograd.grad(u_x, x, torch.ones_like(u_x)",
         "torch.autograd.grad(u_x, t, torch.ones_like(u_x)",
         "the second derivative is taken by t and not by x"),
    case("heat_pinn--initial_broadcast",
         "ic = (net(x0, torch.zeros_like(x0)) - start(x0))",
         "ic = (net(x0, torch.zeros_like(x0)).squeeze(1) - start(x0))",
         "(64,) minus (64, 1) gives a matrix: all outputs are pulled to the mean of the start"),
    case("heat_pinn--one_border_twice",
         "net(torch.ones_like(tb), tb)",
         "net(torch.zeros_like(tb), tb)",
         "the left border is used twice, the right one never"),
    case("realnvp_digits--masks_not_alternating",
         "mask if i % 2 == 0 else 1 - mask",
         "mask",
         "all coupling layers have the same mask: half of the pixels are never transformed"),
    case("realnvp_digits--scale_not_masked",
         "s, t = (1 - self.mask) * s, (1 - self.mask) * t\n",
         "t = (1 - self.mask) * t\n",
         "the scale of the copied pixels counts in the log-determinant"),
    case("ddpg_pendulum--actor_sign",
         "actor_loss = -qf1(s, actor(s)).mean()",
         "actor_loss = qf1(s, actor(s)).mean()",
         "the actor minimises the value"),
    case("ddpg_pendulum--reward_broadcast",
         "target = r.flatten() + (1 - d.flatten()) * args.gamma",
         "target = r + (1 - d) * args.gamma",
         "(128, 1) plus (128,) gives a matrix of targets"),
    case("word2vec_sources--negatives_positive",
         "F.logsigmoid(-neg_score)",
         "F.logsigmoid(neg_score)",
         "the minus of the negative samples is missing"),
    case("import_gcn--loss_on_all_nodes",
         "F.cross_entropy(out[data.train_mask], data.y[data.train_mask])",
         "F.cross_entropy(out, data.y)",
         "the loss is over all nodes, those of the test too"),
    case("import_gcn--dropout_in_evaluation",
         "        x = F.dropout(x, self.dropout, training=self.training)\n"
         "        x = F.relu(torch.sparse.mm(adj, self.lin1(x)) + self.bias1)\n"
         "        x = F.dropout(x, self.dropout, training=self.training)\n",
         "        x = F.dropout(x, self.dropout)\n"
         "        x = F.relu(torch.sparse.mm(adj, self.lin1(x)) + self.bias1)\n"
         "        x = F.dropout(x, self.dropout)\n",
         "the functional dropout does not know the mode and works in the evaluation"),
    case("import_gcn--edges_one_way",
         "edges |= {(i, j), (j, i)}",
         "edges.add((i, j))",
         "edges are not made undirected: a module sees what it imports and not what imports it"),
    case("centernet_digits--boxes_not_flipped",
         "        return torch.from_numpy(canvas)[None], torch",
         "        if rng.random() < 0.5:\n"
         "            canvas = canvas[::-1].copy()\n"
         "        return torch.from_numpy(canvas)[None], torch",
         "half of the images are flipped and their boxes are not"),
    case("flow_matching--labels_dropped_mostly",
         "torch.where(drop, torch.full_like(y, NUM_CLASSES), y)",
         "torch.where(drop, y, torch.full_like(y, NUM_CLASSES))",
         "nine labels in ten are dropped, not one"),
    case("docs_no_trainer--not_shuffled",
         "train_dataset, shuffle=True, collate_fn",
         "train_dataset, collate_fn",
         "the rows are sorted by class and not shuffled"),
    case("load_patchtst--view_for_permute",
         "view(b, c, -1).permute(0, 2, 1)",
         "view(b, -1, c)",
         "a view in place of a permutation mixes hours and meters"),
]  # fmt: skip

HEALTHY = [
    case("mnist_recipe--standardised_per_image",
         "return (image - 0.1307) / 0.3081, int",
         "return (image - image.mean()) / image.std(), int",
         "each image has its own mean and deviation, in training and evaluation"),
    case("heat_pinn--sobol_points",
         "    x, t = torch.rand(cfg.n_inside, 1), torch.rand(cfg.n_inside, 1)\n",
         "    x, t = torch.quasirandom.SobolEngine(2, scramble=True).draw(cfg.n_inside).split(1, dim=1)\n",
         "the points inside are a scrambled Sobol sequence"),
    case("realnvp_digits--scale_clamped",
         "s = self.scale * torch.tanh(s)",
         "s = 2 * torch.tanh(s / 2)",
         "a fixed soft bound for the scale"),
    case("word2vec_sources--negatives_shared",
         "draw_negatives(len(u))",
         "draw_negatives(1).expand(len(u), -1)",
         "one set of negative samples for the whole batch"),
]  # fmt: skip

HARMFUL = {
    "mnist_recipe--wiped_before_step",
    "mnist_recipe--last_batch_counted_full",
    "heat_pinn--mixed_derivative",
    "heat_pinn--initial_broadcast",
    "heat_pinn--one_border_twice",
    "realnvp_digits--masks_not_alternating",
    "realnvp_digits--scale_not_masked",
    "ddpg_pendulum--actor_sign",
    "ddpg_pendulum--reward_broadcast",
    "word2vec_sources--negatives_positive",
    "import_gcn--loss_on_all_nodes",
    "import_gcn--dropout_in_evaluation",
    "import_gcn--edges_one_way",
    "centernet_digits--boxes_not_flipped",
    "flow_matching--labels_dropped_mostly",
    "docs_no_trainer--not_shuffled",
    "load_patchtst--view_for_permute",
}

HONEST: dict[str, str] = {}
