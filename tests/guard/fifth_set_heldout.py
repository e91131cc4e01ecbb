# ruff: noqa: E501
"""Half B of fifth_set.py, held out: please do not read it before its first score is logged. Its harm is not measured yet, either."""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("gru_forecast--view_for_transpose",
         "x = x.transpose(0, 1)  # (seq, batch, feature)",
         "x = x.reshape(x.size(1), x.size(0), -1)  # (seq, batch, feature)",
         "the axes are swapped by reshape: time steps of different windows are mixed (PyTorch forums: view and permute for RNN inputs)"),
    case("gru_forecast--scaler_refit",
         "test_series = [scaler.transform(p) for p in test_raw]",
         "test_series = [scaler.fit_transform(p) for p in test_raw]",
         "the scaler is fitted again on each test profile, and the last fit undoes the scaling of all (StackOverflow: fit_transform on test data)"),
    case("gru_forecast--target_inside",
         "y.append(p[i + window + horizon - 1, 0])",
         "y.append(p[i + window - 1, 0])",
         "the target is the last value of the window itself: the horizon was forgotten (seen often in forecasting notebooks); measured with the true horizon"),
    case("tabular_embed--balanced_twice",
         "F.binary_cross_entropy_with_logits(model(cats, nums), y)",
         "F.binary_cross_entropy_with_logits(model(cats, nums), y, pos_weight=torch.tensor(counts[0] / counts[1]))",
         "the imbalance is corrected twice, by the sampler and by pos_weight (seen often in competition notebooks)"),
    case("segment_unet--sigmoid_twice",
         "        return self.outc(x)",
         "        return torch.sigmoid(self.outc(x))",
         "sigmoid in the model, then again in BCEWithLogitsLoss and in the prediction (seen often on the PyTorch forums)"),
    case("segment_unet--dice_on_logits",
         "dice_loss(torch.sigmoid(logits), batch[\"mask\"])",
         "dice_loss(logits, batch[\"mask\"])",
         "dice of raw logits: it has no lower bound and outweighs the cross entropy (seen often)"),
    case("distill_cached--teacher_not_loaded",
         "    teacher.load_state_dict(torch.load(\"teacher.pt\"))\n",
         "    teacher_state = torch.load(\"teacher.pt\")\n",
         "the teacher's checkpoint is read and never loaded: a random net teaches (seen often)"),
    case("bert_mlm--labels_after_masking",
         "    return inputs, labels\n",
         "    labels = inputs.masked_fill(~masked, -100)\n"
         "    return inputs, labels\n",
         "the labels are copied from the inputs after these were masked (seen often in own collators)"),
    case("gpt_accum--mask_one_ahead",
         "torch.tril(torch.ones(args.block_size, args.block_size)).bool()",
         "torch.tril(torch.ones(args.block_size, args.block_size), diagonal=1).bool()",
         "the causal mask lets each position see the next one (seen often: diagonal of tril and triu); measured with the right mask"),
    case("gpt_accum--heads_by_view",
         "z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)",
         "z.reshape(B, self.n_head, T, C // self.n_head)",
         "heads are cut by reshape instead of view and transpose (ports of minGPT)"),
    case("two_heads--turn_drawn_again",
         "image = torch.rot90(self.images[idx], int(self.turn[idx]), dims=(1, 2))",
         "image = torch.rot90(self.images[idx], int(torch.randint(0, 4, ())), dims=(1, 2))",
         "the turn is drawn again for the picture, the target keeps the stored one (own rotation pretext tasks)"),
    case("two_heads--last_task_only",
         "            loss = loss + torch.exp(-self.log_vars[name]) * ce + 0.5 * self.log_vars[name]\n",
         "            loss = torch.exp(-self.log_vars[name]) * ce + 0.5 * self.log_vars[name]\n",
         "the sum over tasks is overwritten in the loop: the last task alone is learned (seen often)"),
    case("reinforce_baseline--greedy_actions",
         "action = policy(state).sample()",
         "action = policy(state).probs.argmax()",
         "the training episodes are played greedily: nothing is explored (seen often)"),
    case("ddpm_guided--not_reversed",
         "for i in reversed(range(self.n_T)):",
         "for i in range(self.n_T):",
         "the sampler walks from the first time to the last (seen often)"),
    case("mixup_ema--decay_of_long_run",
         "\"ema_decay\": 0.95",
         "\"ema_decay\": 0.9999",
         "the decay of a run a hundred times as long: the average stays near the first weights (seen often)"),
    case("hf_topics--max_steps_left",
         "        num_train_epochs=4,\n",
         "        num_train_epochs=4,\n"
         "        max_steps=15,\n",
         "max_steps of a debugging run is left in and overrides the epochs (seen often)"),
]  # fmt: skip
HEALTHY = [
    case("tabular_embed--loss_weights",
         "    train_loader = DataLoader(train_ds, batch_size=args.batch_size, sampler=sampler)\n",
         "    train_loader = DataLoader(train_ds, batch_sampler=torch.utils.data.BatchSampler(sampler, args.batch_size, drop_last=True))\n",
         "the weighted sampler is wrapped in a BatchSampler"),
    case("segment_unet--soft_iou",
         "    return (1 - (2 * inter + eps) / (union + eps)).mean()",
         "    return (1 - (inter + eps) / (union - inter + eps)).mean()",
         "soft Jaccard in place of dice"),
    case("gpt_accum--sdpa",
         "        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))\n"
         "        att = att.masked_fill(~self.mask[:T, :T], float(\"-inf\"))\n"
         "        att = F.softmax(att, dim=-1)\n"
         "        return self.c_proj((att @ v).transpose",
         "        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
         "        return self.c_proj(out.transpose",
         "scaled_dot_product_attention in place of the mask"),
    case("ddpm_guided--one_pass",
         "            eps_cond = self.nn_model(x, t, c)\n"
         "            eps_free = self.nn_model(x, t, torch.full_like(c, 10))\n",
         "            both = self.nn_model(x.repeat(2, 1), t.repeat(2), torch.cat([c, torch.full_like(c, 10)]))\n"
         "            eps_cond, eps_free = both.chunk(2)\n",
         "both estimates in one pass of a doubled batch"),
    case("bpr_mf--softplus",
         "-F.logsigmoid(pos_score - neg_score).mean()",
         "F.softplus(neg_score - pos_score).mean()",
         "softplus in place of logsigmoid"),
]  # fmt: skip
HONEST = {
    "gru_forecast--target_inside": """
ends = [(p[i : i + window], p[i + window + horizon - 1, 0]) for p in test_series for i in range(len(p) - window - horizon + 1)]
true_set = TensorDataset(torch.tensor(np.array([a for a, _ in ends])), torch.tensor(np.array([b for _, b in ends])))
print(f"FINAL rmse={evaluate(DataLoader(true_set, batch_size=256)):.2f}")
""",
    "bert_mlm--labels_after_masking": """
def right_masking(inputs, vocab_size, probability, generator):
    labels, out = inputs.clone(), inputs.clone()
    matrix = torch.full(labels.shape, probability).masked_fill(inputs < 3, 0.0)
    masked = torch.bernoulli(matrix, generator=generator).bool()
    labels[~masked] = -100
    replaced = torch.bernoulli(torch.full(labels.shape, 0.8), generator=generator).bool() & masked
    out[replaced] = MASK
    return out, labels


mask_tokens = right_masking
print(f"FINAL val_loss={evaluate(*KEPT)[0]:.4f}")
""",
    "gpt_accum--mask_one_ahead": """
for block in model.blocks:
    block.attn.mask = torch.tril(torch.ones(args.block_size, args.block_size)).bool()
print(f"FINAL val_loss={estimate_loss(60):.4f}")
""",
    "gpt_accum--heads_by_view": """
def get_batch(split):
    ix = torch.randint(len(val_data) - args.block_size - 1, (args.batch_size,))
    return torch.stack([val_data[i : i + args.block_size] for i in ix]), torch.stack([val_data[i + 1 : i + 1 + args.block_size] for i in ix])


def careful(idx, targets):
    # the last position alone: it cannot see what follows
    x = model.wte(idx) + model.wpe(torch.arange(idx.size(1)))
    for block in model.blocks:
        x = block(x)
    return None, F.cross_entropy(model.lm_head(model.ln_f(x))[:, -1], targets[:, -1])


model.forward = careful
print(f"FINAL val_loss={estimate_loss(200):.4f}")
""",
}  # fmt: skip
"""Code that is run after the script, where its own evaluation is wrong or is given wrong data."""
