"""The closed half of fifteenth_set.py: ids whose SHA-256 begins with an odd byte."""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("digit_traits--cross-entropy",
         "    return F.binary_cross_entropy_with_logits(logits.float(), y)\n",
         "    return F.cross_entropy(logits.float(), y)\n",
         "a softmax over traits that do not exclude each other"),
    case("digit_traits--cleared-once-per-epoch",
         "            optimizer.step()\n"
         "            optimizer.zero_grad()\n",
         "            optimizer.step()\n",
         "gradients are cleared only at the start of the epoch"),
    case("pixel_rows--batch-first-missing",
         "nn.GRU(1, hidden, batch_first=True)",
         "nn.GRU(1, hidden)",
         "the GRU walks along the batch"),
    case("stdlib_gpt--not-causal",
         "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
         "F.scaled_dot_product_attention(q, k, v)",
         "every character sees those that follow"),
    case("stdlib_gpt--heads-not-moved-back",
         "self.proj(y.transpose(1, 2).reshape(b, t, c))",
         "self.proj(y.reshape(b, t, c))",
         "the axes of heads and positions are mixed by the reshape"),
    case("number_words--sources-sorted-alone",
         "    sources, targets = zip(*samples)\n",
         "    sources, targets = zip(*samples)\n"
         "    sources = sorted(sources, key=len, reverse=True)\n",
         "the collate sorts the sources by length, as packing once needed, and not the targets"),
    case("number_words--decoder-without-state",
         "self.decoder(self.target_emb(decoder_in), self.encode(source, lengths))",
         "self.decoder(self.target_emb(decoder_in))",
         "in training the decoder does not start from the encoder's state"),
    case("digits_simclr--interleaved-positives",
         "    positives = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])\n",
         "    positives = torch.arange(2 * n) ^ 1\n",
         "the positives are those of interleaved views; the views are stacked"),
    case("digits_vae--deviation-is-logvar",
         "z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)",
         "z = mu + logvar * torch.randn_like(mu)",
         "the log-variance is used as the deviation"),
    case("digits_vae--warm-up-never-advances",
         "            self.optimizer.step()\n"
         "            self.step += 1\n",
         "            self.optimizer.step()\n",
         "the step of the KL's warm-up is not counted: its weight stays 0"),
    case("digits_ddpm--alphas-not-cumulated",
         "a = alpha_bar[t].unsqueeze(1)",
         "a = alphas[t].unsqueeze(1)",
         "the noise of training is that of one step at every time"),
    case("digits_ddpm--ema-never-updated",
         "            self.optimizer.step()\n"
         "            self.update_ema()\n",
         "            self.optimizer.step()\n",
         "the average that is sampled from keeps its initial weights"),
    case("petal_unet--flip-image-only",
         "                image, mask = image[:, ::-1], mask[:, ::-1]\n",
         "                image = image[:, ::-1]\n",
         "the mask is not flipped with its picture"),
    case("petal_unet--dice-inverted",
         "F.binary_cross_entropy_with_logits(logits, mask) + dice.mean()",
         "F.binary_cross_entropy_with_logits(logits, mask) + 1 - dice.mean()",
         "1 - Dice is subtracted from 1 again: the loss falls as the overlap falls"),
    case("word_factors--squeeze-missing",
         "bias = self.module_bias(m).squeeze(-1) + self.word_bias(w).squeeze(-1)",
         "bias = self.module_bias(m) + self.word_bias(w)",
         "biases of shape (batch, 1) and products of shape (batch,) give a square"),
    case("word_factors--split-in-order",
         "table = table[np.random.default_rng(0).permutation(len(table))]\n",
         "",
         "the rows are split in the order of the modules: those of the validation never train"),
    case("tumour_cox--events-not-reordered",
         "    risk, event = risk[order], event[order]\n",
         "    risk = risk[order]\n",
         "the risks are sorted by time, the events are not"),
    case("digits_two_tasks--cosine-per-batch",
         "        train_epoch(model, optimizer, loader)\n"
         "        scheduler.step()\n",
         "        for batch in loader:\n"
         "            train_epoch(model, optimizer, [batch])\n"
         "            scheduler.step()\n",
         "a cosine of 12 epochs is stepped after every batch"),
    case("name_tagger--weights-are-frequencies",
         "np.sqrt(counts.sum() / (len(TAGS) * counts))",
         "counts / counts.sum()",
         "class weights are the frequencies and not their inverse"),
    case("name_tagger--mask-inverted",
         "\"attention_mask\": (input_ids != PAD).long()",
         "\"attention_mask\": (input_ids == PAD).long()",
         "the attention mask is 1 at the padding"),
]  # fmt: skip

HEALTHY: list = []
HARMLESS = {"pixel_rows--batch-first-missing", "tumour_cox--events-not-reordered"}
HARMFUL = {c.id for c in BUGS} - HARMLESS
HONEST: dict[str, str] = {}
"""Code that is run after the script, where its own evaluation is wrong."""
