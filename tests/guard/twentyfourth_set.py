"""Plain scripts of several kinds (scripts/twentyfourth): text, images, diffusion, reinforcement learning, metric learning.

Written on 2026-11-30 by someone who had not read the checks. Ids whose SHA-256 ends with an even digit; the others are in
twentyfourth_set_heldout.py. A bug counts if its number is at least 1% worse than the unchanged script's, or is wrong itself.
Measured at seed 0.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("doc_encoder--padding_in_attention_and_mean",
         "        x = self.encoder(x, src_key_padding_mask=padding)\n"
         "        kept = (~padding).unsqueeze(-1).float()\n"
         "        return self.head((x * kept).sum(1) / kept.sum(1))\n",
         "        x = self.encoder(x)\n"
         "        return self.head(x.mean(1))\n",
         "no padding mask in the attention, and the mean is over padding too"),
    case("doc_encoder--sorted_without_labels",
         "        ids = [torch.tensor([CLS] + [vocab.get(w, UNK) for w in words])[: cfg.max_len] for words, _ in batch]\n",
         "        ids = [torch.tensor([CLS] + [vocab.get(w, UNK) for w in words])[: cfg.max_len] for words, _ in batch]\n"
         "        ids.sort(key=len, reverse=True)\n",
         "the collate function sorts the texts by length and leaves the labels in their old order"),
    case("doc_encoder--name_left_in_text",
         'text.lower().replace(name, ""))',
         "text.lower())",
         "the docstrings hold the name of the library, which is the label: target leakage"),
    case("char_lstm--gradients_kept",
         "            optimizer.zero_grad()\n"
         "            loss.backward()\n",
         "            loss.backward()\n",
         "zero_grad() is missing"),
    case("char_lstm--streams_across",
         "    return ids[: n * batch_size].view(batch_size, n).t().contiguous()\n",
         "    return ids[: n * batch_size].view(n, batch_size)\n",
         "the text is laid out along the batch: a stream's next character is the 32nd one"),
    case("ddpm_digits--target_is_image",
         "loss = F.mse_loss(predicted, noise)",
         "loss = F.mse_loss(predicted, x0)",
         "the loss compares with the image; the sampler takes the output for noise"),
    case("ddpm_digits--noise_by_variance",
         "mean + var.sqrt() * torch.randn_like(x)",
         "mean + var * torch.randn_like(x)",
         "the sampler scales its noise by the variance and not by the deviation"),
    case("nuclei_unet--mask_not_flipped",
         "                image, mask = image.flip(dim), mask.flip(dim)\n",
         "                image = image.flip(dim)\n",
         "the image is mirrored and its mask is not"),
    case("nuclei_unet--sigmoid_in_model",
         "        return self.head(h)\n",
         "        return self.head(h).sigmoid()\n",
         "the model ends with a sigmoid, and the losses and the evaluation apply another"),
    case("nuclei_unet--dice_sign",
         "    return (1 - (2 * inter + eps) / (p.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3)) + eps)).mean()\n",
         "    return ((2 * inter + eps) / (p.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3)) + eps)).mean()\n",
         "the dice coefficient is minimised: 1 - is missing"),
    case("nuclei_unet--mask_divided",
         '(np.asarray(Image.open(ROOT / "mask2d.tif")) > 0).astype(np.float32)',
         'np.asarray(Image.open(ROOT / "mask2d.tif")).astype(np.float32) / 255',
         "a mask of instance numbers is divided by 255 as if it were 0 and 255"),
    case("a2c_cartpole--ends_ignored",
         "        delta = rewards[t] + GAMMA * next_values[t] * (1 - terminated[t]) - values[t]\n"
         "        last = delta + GAMMA * LAMBDA * (1 - done[t]) * last\n",
         "        delta = rewards[t] + GAMMA * next_values[t] - values[t]\n"
         "        last = delta + GAMMA * LAMBDA * last\n",
         "returns and advantages run over the ends of episodes"),
    case("a2c_cartpole--values_not_detached",
         "torch.stack(rewards), values.detach(), torch",
         "torch.stack(rewards), values, torch",
         "advantages and returns carry the critic's gradient"),
    case("a2c_cartpole--rate_decays_on_itself",
         'group["lr"] = LR * (1 - update / UPDATES)',
         'group["lr"] *= 1 - update / UPDATES',
         "the annealing multiplies the rate that is annealed already"),
    case("a2c_cartpole--observation_not_advanced",
         "            obs, reward, terminated, truncated, info = envs.step(action.numpy())\n"
         "            done = terminated | truncated\n"
         "            after = obs.copy()\n",
         "            next_obs, reward, terminated, truncated, info = envs.step(action.numpy())\n"
         "            done = terminated | truncated\n"
         "            after = next_obs.copy()\n",
         "obs = next_obs is missing: all actions are chosen for the first observation"),
    case("hard_triplets--negative_is_itself",
         'masked_fill(same, float("inf")).min',
         "masked_fill(same, 0.0).min",
         "masked distances are 0 in a minimum: the hardest negative is always the sample itself"),
    case("hf_char_tags--labels_padded_left",
         'f["labels"] + [-100] * gap',
         '[-100] * gap + f["labels"]',
         "inputs are padded on the right and labels on the left"),
    case("hf_char_tags--metric_ignores_wrong_id",
         "    scored = labels != -100\n",
         "    scored = labels != PAD\n",
         "the metric leaves out label 0, which is a class, and scores the ignored places"),
    case("hf_char_tags--base_frozen",
         "    model = BertForTokenClassification(config)\n",
         "    model = BertForTokenClassification(config)\n"
         "    for parameter in model.bert.parameters():\n"
         "        parameter.requires_grad = False\n",
         "the encoder is frozen as in a fine-tuning guide, but it was drawn at random"),
]  # fmt: skip

HEALTHY = [
    case("char_lstm--state_dropped_at_times",
         "            state = repackage(state)\n",
         "            state = repackage(state) if torch.rand(()) > 0.02 else model.init_state(args.batch_size)\n",
         "the state starts from zero in two windows of a hundred"),
    case("ddpm_digits--average_starts_late",
         "decay=min(0.995, (1 + step) / (10 + step)))",
         "decay=0.0 if step < 200 else 0.99)",
         "the average is a copy for 200 steps and begins then"),
    case("nuclei_unet--mirrored_prediction",
         "    predicted = (model(image[None, None]).sigmoid() > 0.5).float()[0, 0]\n",
         "    x = image[None, None]\n"
         "    predicted = ((model(x) + model(x.flip(-1)).flip(-1)) > 0).float()[0, 0]\n",
         "the prediction is the mean over the image and its mirror image"),
    case("hard_triplets--soft_margin",
         "F.relu(hardest_positive - hardest_negative + MARGIN).mean()",
         "F.softplus(hardest_positive - hardest_negative).mean()",
         "the soft margin of the paper"),
]  # fmt: skip

HARMFUL = {
    "doc_encoder--sorted_without_labels",
    "doc_encoder--name_left_in_text",
    "char_lstm--gradients_kept",
    "char_lstm--streams_across",
    "ddpm_digits--target_is_image",
    "ddpm_digits--noise_by_variance",
    "nuclei_unet--mask_not_flipped",
    "nuclei_unet--sigmoid_in_model",
    "nuclei_unet--dice_sign",
    "nuclei_unet--mask_divided",
    "a2c_cartpole--ends_ignored",
    "a2c_cartpole--values_not_detached",
    "a2c_cartpole--rate_decays_on_itself",
    "a2c_cartpole--observation_not_advanced",
    "hard_triplets--negative_is_itself",
    "hf_char_tags--labels_padded_left",
    "hf_char_tags--metric_ignores_wrong_id",
    "hf_char_tags--base_frozen",
}

HONEST: dict[str, str] = {}
