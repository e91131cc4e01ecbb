# ruff: noqa: E501
"""Bugs of the twelve scripts in scripts/seventh, the half kept away from whoever changes checks: ids whose hash is odd.

A bug counts if the script's own final number is at least 1% worse at both of two seeds: `python -m tests.guard.harm quantile_tcn ...`.
"seen often" is the writer's own experience; no source was looked up.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("maml--inner_step_uphill",
         "[p - self.update_lr * g for g, p in zip(grad, self.net.parameters())]",
         "[p + self.update_lr * g for g, p in zip(grad, self.net.parameters())]",
         "the inner step of training goes up the gradient, that of the test goes down"),
    case("listnet--arguments_swapped",
         "loss = listNet(model(xb), yb)",
         "loss = listNet(yb, model(xb))",
         "scores and labels change places in the loss; padding is no longer masked (seen often with own losses)"),
    case("mean_teacher--teacher_in_eval",
         "    model.train()\n"
         "    ema_model.train()\n",
         "    model.train()\n"
         "    ema_model.eval()\n",
         "the teacher never runs in training mode, so that its batch norm statistics stay those of the start; only parameters are averaged (seen often)"),
    case("mean_teacher--average_into_student",
         "        update_ema_variables(model, ema_model, args.ema_decay, global_step)\n",
         "        update_ema_variables(ema_model, model, args.ema_decay, global_step)\n",
         "arguments swapped: the student is averaged into the teacher's untrained weights (seen often)"),
    case("world_model--stored_after_update",
         "        memory.append((obs, action, next_obs))\n"
         "        obs = next_obs\n",
         "        obs = next_obs\n"
         "        memory.append((obs, action, next_obs))\n",
         "the state moves on before the transition is stored, so that every stored change is zero (seen often in own loops)"),
    case("world_model--scaled_by_inputs",
         "* self.out_sigma + self.out_mu",
         "* self.in_sigma[:3] + self.out_mu",
         "predicted changes are scaled back with the spread of the observations, not of the changes"),
    case("pixelcnn--first_mask_b",
         "MaskedConv2d(\"A\", 1, fm, 5, 1, 2, bias=False)",
         "MaskedConv2d(\"B\", 1, fm, 5, 1, 2, bias=False)",
         "the first layer sees the pixel that it predicts (seen often)"),
    case("byol--pixels_not_scaled_in_views",
         "        x = x + 0.1 * torch.randn_like(x)\n",
         "        x = x + 0.1 * torch.randn_like(x) * 16\n",
         "the noise has the size for pixels of 0 to 16, where pixels run from 0 to 1: views show nothing of the digit (seen where the scaling was changed)"),
    case("text_bag--lengths_by_split",
         "offsets.append(processed_text.size(0))",
         "offsets.append(len(_text.split()))",
         "lengths are counted by split(), words by another tokenizer: borders of texts drift apart within a batch (seen often where a tokenizer was replaced)"),
]  # fmt: skip
HEALTHY = [
    case("quantile_tcn--clip_and_smoothing",
         "        loss.backward()\n"
         "        optimizer.step()\n",
         "        loss.backward()\n"
         "        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)\n"
         "        optimizer.step()\n",
         "gradients are clipped by value"),
    case("mdn--halves_accumulated",
         "            pi, sigma, mu = model(batch_x)\n"
         "            loss = mdn_loss(pi, sigma, mu, batch_y)\n"
         "            loss.backward()\n"
         "            optimizer.step()\n",
         "            loss = 0\n"
         "            for half_x, half_y in zip(batch_x.chunk(2), batch_y.chunk(2)):\n"
         "                part = mdn_loss(*model(half_x), half_y) / 2\n"
         "                part.backward()\n"
         "                loss = loss + part.detach()\n"
         "            optimizer.step()\n",
         "own accumulation over two halves of a batch"),
    case("text_bag--batches_listed",
         "    for label, text, offsets in dataloader:\n"
         "        optimizer.zero_grad()\n",
         "    for label, text, offsets in list(dataloader):\n"
         "        optimizer.zero_grad(set_to_none=False)\n",
         "all batches of an epoch are made before it"),
    case("deepfm--two_optimisers",
         "    optimizer = torch.optim.Adam(params=model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)\n",
         "    tables = [p for n, p in model.named_parameters() if \"embedding\" in n or \"linear\" in n]\n"
         "    dense = list(model.mlp.parameters())\n"
         "\n"
         "    class Both:\n"
         "        parts = (torch.optim.Adam(tables, lr=args.learning_rate, weight_decay=1e-4), torch.optim.AdamW(dense, lr=2e-3))\n"
         "\n"
         "        def step(self):\n"
         "            for part in self.parts:\n"
         "                part.step()\n"
         "\n"
         "    optimizer = Both()\n",
         "one optimiser for the tables, one for the dense layers, behind one step()"),
]  # fmt: skip
HARMFUL = {
    "maml--inner_step_uphill",
    "listnet--arguments_swapped",
    "mean_teacher--teacher_in_eval",
    "mean_teacher--average_into_student",
    "world_model--stored_after_update",
    "world_model--scaled_by_inputs",
    "pixelcnn--first_mask_b",
}
"""Bugs with a final number at least 1% worse at both seeds."""
HONEST = {
    "pixelcnn--first_mask_b": """
total = 0.0
with torch.no_grad():
    for levels in te:
        for k in range(64):
            known = levels.flatten(1).clone()
            known[:, k:] = 0
            logits = net(to_input(known.view(-1, 8, 8)))[:, :, k // 8, k % 8]
            total += F.cross_entropy(logits, levels.flatten(1)[:, k], reduction="sum").item()
print(f"FINAL bits={total / 64 / len(te.dataset) / math.log(2):.4f}")
""",
}  # fmt: skip
"""Code that is run after the script, where its own evaluation is wrong."""
