"""The half of twentyfourth_set.py that was closed to whoever changes checks: ids whose SHA-256 ends with an odd digit."""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("doc_encoder--schedule_in_epochs",
         "            self.optimizer.step()\n"
         "            self.scheduler.step()\n",
         "            self.optimizer.step()\n"
         "        self.scheduler.step()\n",
         "the scheduler steps once an epoch, its warm-up and total are counted in steps: the rate never rises"),
    case("char_lstm--target_is_input",
         "source[i + 1 : i + 1 + length]",
         "source[i : i + length]",
         "the target is the present character and not the next one"),
    case("char_lstm--mean_loss_over_count",
         'y.flatten(), reduction="sum").item()',
         "y.flatten()).item()",
         "the evaluation adds mean losses and divides them by the number of characters"),
    case("date_translator--no_causal_mask",
         "x, memory, tgt_mask=causal, memory_key",
         "x, memory, memory_key",
         "the decoder has no causal mask"),
    case("date_translator--target_not_shifted",
         "logits = model(src, tgt[:, :-1])",
         "logits = model(src, tgt[:, 1:])",
         "the decoder's input is not shifted: it holds the token to predict"),
    case("date_translator--mask_inverted",
         "encoder(x, src_key_padding_mask=src == PAD)",
         "encoder(x, src_key_padding_mask=src != PAD)",
         "the padding mask of the encoder is true for tokens, as in transformers, and not for padding"),
    case("date_translator--positions_over_batch",
         "return x + self.table[: x.size(1)]",
         "return x + self.table[: x.size(0)].unsqueeze(1)",
         "positions of a time-first tutorial in a batch-first model: they count the rows of the batch"),
    case("ddpm_digits--average_not_used",
         "diffusion.sample(ema.eval(), labels)",
         "diffusion.sample(model.eval(), labels)",
         "the samples come from the raw weights and not from their average"),
    case("ddpm_digits--roots_missing",
         "        return bar.sqrt() * x0 + (1 - bar).sqrt() * noise\n",
         "        return bar * x0 + (1 - bar) * noise\n",
         "the forward process lacks the square roots"),
    case("hard_triplets--eval_mode_missing",
         "    model.eval()\n",
         "",
         "model.eval() is missing: batch norm uses the statistics of batches that hold one class"),
    case("hard_triplets--normalised_over_batch",
         "self.features(x)), dim=1)",
         "self.features(x)), dim=0)",
         "embeddings are normalised over the batch and not over their entries"),
    case("hard_triplets--eval_not_normalised",
         "            image = torch.roll(image, (dx, dy), dims=(1, 2))\n"
         "        return (image - 0.13) / 0.31, self.labels[i]\n",
         "            image = (torch.roll(image, (dx, dy), dims=(1, 2)) - 0.13) / 0.31\n"
         "        return image, self.labels[i]\n",
         "only the training images are normalised"),
    case("hf_char_tags--padding_is_other",
         'f["labels"] + [-100] * gap',
         'f["labels"] + [0] * gap',
         "padding is labelled as the class other: it is trained and scored"),
]  # fmt: skip

HEALTHY = [
    case("doc_encoder--max_pooling",
         "        kept = (~padding).unsqueeze(-1).float()\n"
         "        return self.head((x * kept).sum(1) / kept.sum(1))\n",
         "        return self.head(x.masked_fill(padding.unsqueeze(-1), -1e9).max(1).values)\n",
         "the maximum over the words, padding excluded"),
    case("date_translator--mask_by_hand",
         "        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), dtype=torch.bool)\n",
         "        causal = torch.arange(tgt.size(1))[:, None] < torch.arange(tgt.size(1))[None]\n",
         "the causal mask is written by hand"),
    case("a2c_cartpole--rewards_scaled",
         "rewards.append(torch.as_tensor(reward, dtype=torch.float32))",
         "rewards.append(0.1 * torch.as_tensor(reward, dtype=torch.float32))",
         "rewards are divided by ten for the critic's sake"),
    case("hf_char_tags--smoothed",
         "        weight_decay=0.01,\n",
         "        weight_decay=0.01,\n"
         "        label_smoothing_factor=0.05,\n",
         "label smoothing by the trainer"),
]  # fmt: skip

HARMFUL = {
    "doc_encoder--schedule_in_epochs",
    "char_lstm--target_is_input",
    "char_lstm--mean_loss_over_count",
    "date_translator--no_causal_mask",
    "date_translator--target_not_shifted",
    "date_translator--mask_inverted",
    "date_translator--positions_over_batch",
    "ddpm_digits--average_not_used",
    "ddpm_digits--roots_missing",
    "hard_triplets--eval_mode_missing",
    "hard_triplets--normalised_over_batch",
    "hard_triplets--eval_not_normalised",
    "hf_char_tags--padding_is_other",
}

HONEST: dict[str, str] = {}
