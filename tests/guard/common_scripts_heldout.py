"""Half B of common_scripts.py: scored once before anybody mended a check for half A."""

from tests.helpers.patches import ScriptPatch


def case(id: str, old: str, new: str, cause: str) -> ScriptPatch:
    """One bug or healthy variant; the script's name is the first part of its id."""
    return ScriptPatch(id, f"{id.partition('--')[0]}.py", old, new, "outside", "common_scripts_heldout.py", cause)


BUGS = [
    case("keras_trainer--val_uint8", '    x = x.reshape(-1, 1, 8, 8).astype("float32")',
         '    x = x.reshape(8, 8, 1, -1).transpose(3, 2, 0, 1).astype("float32")',
         "reshape where the axes are in another order (StackOverflow)"),
    case("skipgram--sum_first", "F.logsigmoid(-neg).sum(1)",
         "F.logsigmoid(-neg.sum(1))",
         "the scores are summed before logsigmoid (DSKSD/DeepNLP-models-Pytorch#15)"),
    case("lstm_windows--batch_first", "num_layers, batch_first=True)",
         "num_layers)",
         "batch_first is missing (PyTorch forums)"),
    case("lstm_windows--relu_out", "        out = self.fc(out[:, -1, :])\n",
         "        out = torch.relu(self.fc(out[:, -1, :]))\n",
         "a ReLU after the last layer, targets are standardised (StackOverflow: network only predicts zero)"),
    case("kfold_tabular--model_once", "        model = MLP(x.shape[1])\n",
         "        if fold == 0:\n            model = MLP(x.shape[1])\n",
         "the model is not made anew per fold (BMEII-AI/RadImageNet#5)"),
    case("kfold_tabular--index_mix", "y_trn, y_val = (y[trn_idx] - mean) / std, (y[val_idx] - mean) / std",
         "y_trn, y_val = (y[: len(trn_idx)] - mean) / std, (y[len(trn_idx) :] - mean) / std",
         "rows are chosen by index, targets by position (common: reset_index forgotten)"),
    case("simclr--no_mask", "    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)\n",
         "",
         "the similarity with itself stays in the denominator (lightning-bolts#695)"),
    case("simclr--same_view", "        k = self.base_transform(x)\n",
         "        k = q\n",
         "both views are the same picture (common)"),
    case("simclr--interleaved", "targets = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])",
         "targets = torch.arange(2 * n) ^ 1",
         "targets for interleaved views, views are concatenated (issues of SimCLR ports)"),
    case("simclr--norm_dim", "torch.cat([z1, z2], dim=0), dim=1)",
         "torch.cat([z1, z2], dim=0), dim=0)",
         "normalised over the batch (common)"),
    case("simclr--temperature_times", "sim = z @ z.t() / temperature",
         "sim = z @ z.t() * temperature",
         "multiplied by the temperature (common)"),
    case("ddpm--cumprod_betas", "self.alphas_cumprod = torch.cumprod(self.alphas, dim=0)",
         "self.alphas_cumprod = torch.cumprod(self.betas, dim=0)",
         "the product of the betas (LuChengTHU/dpm-solver#13, there in a comment)"),
    case("ddpm--sampler_sqrt", "coef = self.betas[i] / (1 - self.alphas_cumprod[i]).sqrt()",
         "coef = self.betas[i] / (1 - self.alphas_cumprod[i])",
         "a root is missing in the sampler (common)"),
    case("ddpm--noise_uniform", "        noise = torch.randn_like(x0)\n",
         "        noise = torch.rand_like(x0)\n",
         "rand for randn (common typo)"),
    case("cgan--g_label", "        g_loss = adversarial_loss(discriminator(gen_imgs, gen_labels), valid)\n",
         "        g_loss = adversarial_loss(discriminator(gen_imgs, gen_labels), fake)\n",
         "the generator's target is zero (ptran1203/pytorch-animeGAN#17 asks)"),
    case("cgan--d_real_zero", "adversarial_loss(discriminator(gen_imgs.detach(), gen_labels), fake)",
         "adversarial_loss(discriminator(real_imgs, gen_labels), fake)",
         "the critic never sees a generated picture (common copy and paste)"),
    case("multitask--overwritten", "            total = total + torch.exp",
         "            total = torch.exp",
         "the sum of the losses is overwritten (common)"),
    case("sentiment--not_packed", "        _, (hidden, _) = self.rnn(packed)\n"
         "        hidden = self.dropout(torch.cat((hidden[-2], hidden[-1]), dim=1))\n",
         "        output, _ = self.rnn(embedded)\n        hidden = self.dropout(output[:, -1])\n",
         "the last step of padded reviews is read (seungminnam.github.io/DL-Projects: 51%)"),
    case("ddqn--no_done", "GAMMA * next_q * (1 - dones)",
         "GAMMA * next_q",
         "done is not used (navneet-nmk/pytorch-rl#2)"),
    case("ddqn--plus_mask", "GAMMA * next_q * (1 - dones)",
         "GAMMA * (1 - dones) + next_q",
         "plus for times (ikostrikov/pytorch-ddpg-naf#16)"),
    case("ddqn--same_state", "        agent.memory.push(state, action, reward, next_state, terminated)\n"
         "        state = next_state\n",
         "        state = next_state\n"
         "        agent.memory.push(state, action, reward, next_state, terminated)\n",
         "the state is overwritten before it is stored (common)"),
    case("ddqn--max_q", "self.policy_net(states).gather(1, actions).squeeze(1)",
         "self.policy_net(states).max(1).values",
         "the best action's value is trained, not the one taken (common)"),
]  # fmt: skip
HEALTHY = [
    case("simclr--one_pass", "            loss = nt_xent(model(x1), model(x2), args.temperature)\n",
         "            z1, z2 = model(torch.cat([x1, x2])).chunk(2)\n"
         "            loss = nt_xent(z1, z2, args.temperature)\n",
         "both views go through the net as one batch"),
    case("ddpm--antithetic_times", "        t = torch.randint(0, self.timesteps, (x0.shape[0],))\n",
         "        t = torch.randint(0, self.timesteps, (x0.shape[0] // 2,))\n"
         "        t = torch.cat([t, self.timesteps - 1 - t])\n",
         "times in antithetic pairs (ermongroup/ddim)"),
    case("multitask--frozen_first", "        model.train()\n        running",
         "        model.train()\n"
         "        model.backbone.requires_grad_(epoch > 0)\n"
         "        running",
         "the trunk is frozen in the first epoch"),
    case("ddqn--hard_update", "            target.data.copy_(TAU * param.data + (1 - TAU) * target.data)\n",
         "            if self.steps_done % 200 == 0:\n"
         "                target.data.copy_(param.data)\n",
         "the target is copied every 200 steps"),
]  # fmt: skip
