"""Bugs and healthy variants of the eight scripts in scripts/twelfth, for `trainworthy.check(make_script)` (2026-11-27).

Scripts and patches were written before their author read a gate. A bug counts if the script's own final number is at least 1% worse, measured
at seed 0 only: `python -m tests.guard.harm house_prices ...`. Kinds by the writer's own experience; no source was looked up.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("house_prices--squeeze_missing",
         "torch.cat([numbers, *embedded], dim=1)).squeeze(-1)",
         "torch.cat([numbers, *embedded], dim=1))",
         "predictions of shape (batch, 1) meet targets of shape (batch,): every prediction is compared with every target"),
    case("house_prices--scaler_without_axis",
         "\"mean\": numbers.mean(0), \"std\": numbers.std(0)",
         "\"mean\": numbers.mean(), \"std\": numbers.std()",
         "the axis is forgotten: all columns are scaled by one mean and one deviation"),
    case("bike_windows--batch_first_missing",
         "nn.LSTM(4, hidden, batch_first=True)",
         "nn.LSTM(4, hidden)",
         "the LSTM walks along the batch"),
    case("bike_windows--first_state",
         "self.head(out[:, -1])",
         "self.head(out[:, 0])",
         "the head reads the state after the first hour"),
    case("reviews--vocabulary_of_each_split",
         "train, val = Reviews(train_rows, vocab), Reviews(val_rows, vocab)\n",
         "train, val = Reviews(train_rows, vocab), Reviews(val_rows, build_vocab([text for text, _ in val_rows]))\n",
         "the validation is encoded by a vocabulary of its own"),
    case("reviews--sorted_without_labels",
         "    texts, labels = zip(*samples)\n",
         "    texts, labels = zip(*samples)\n    texts = sorted(texts, key=len, reverse=True)\n",
         "the collate sorts the texts by length, as packing once needed, and not the labels"),
    case("siamese--labels_inverted",
         "(same * distance**2 + (1 - same) * F.relu(MARGIN - distance) ** 2)",
         "((1 - same) * distance**2 + same * F.relu(MARGIN - distance) ** 2)",
         "the formula is of the paper, where 1 means different"),
    case("siamese--normalised_over_batch",
         "F.normalize(self.head(self.features(x)), dim=1)",
         "F.normalize(self.head(self.features(x)), dim=0)",
         "embeddings are normalised over the batch"),
    case("genres--cross_entropy",
         "nn.BCEWithLogitsLoss(pos_weight=((1 - positive) / positive).sqrt())",
         "nn.CrossEntropyLoss()",
         "a softmax over genres that do not exclude each other"),
    case("genres--threshold_of_logits",
         "predicted.append(torch.sigmoid(model(x)) > 0.5)",
         "predicted.append(model(x) > 0.5)",
         "the metric compares logits with a probability"),
    case("leaves--image_alone",
         "        image, mask = self.transform(image, tv_tensors.Mask(torch.from_numpy(mask)))\n",
         "        image, mask = self.transform(image), torch.from_numpy(mask)\n",
         "the transforms move the picture and not its mask"),
    case("leaves--reshaped",
         "torch.from_numpy(image).permute(2, 0, 1)",
         "torch.from_numpy(image).reshape(3, SIZE, SIZE)",
         "the channels are moved to the front by a reshape"),
    case("denoise--noisy_target",
         "mse_loss(model(noisy), clean)",
         "mse_loss(model(noisy), noisy)",
         "the noise is the target, too"),
    case("denoise--optimizer_of_encoder",
         "torch.optim.Adam(model.parameters(), lr=2e-3)",
         "torch.optim.Adam(model.encoder.parameters(), lr=2e-3)",
         "the decoder is in no optimiser"),
    case("gan--optimizer_of_both",
         "torch.optim.Adam(G.parameters(), lr=5e-4",
         "torch.optim.Adam([*G.parameters(), *D.parameters()], lr=5e-4",
         "the generator's step trains the discriminator to be deceived"),
]  # fmt: skip

HEALTHY = [
    case("bike_windows--change_of_last",
         "return self.head(out[:, -1])",
         "return self.head(out[:, -1]) + x[:, -1:, 0]",
         "the net predicts the change since the last hour"),
    case("house_prices--squared_error",
         "nn.functional.huber_loss(model(batch[\"numbers\"], batch[\"categories\"]), batch[\"target\"])",
         "(model(batch[\"numbers\"], batch[\"categories\"]) - batch[\"target\"]).square().mean()",
         "the squared error, written out"),
    case("reviews--max_pooling",
         "pooled = (states * mask).sum(1) / mask.sum(1)",
         "pooled = states.masked_fill(~mask, -torch.inf).amax(1)",
         "the maximum over the words"),
    case("leaves--dice_added",
         "    return F.cross_entropy(model(images), masks)\n",
         "    logits = model(images)\n    p, t = logits.softmax(1), F.one_hot(masks, CLASSES).movedim(-1, 1)\n"
         "    dice = (2 * (p * t).sum((2, 3)) + 1) / ((p + t).sum((2, 3)) + 1)\n"
         "    return F.cross_entropy(logits, masks) + 1 - dice.mean()\n",
         "Dice of each picture is added to the cross-entropy"),
    case("denoise--residual",
         "return self.decoder(self.encoder(x)).sigmoid()",
         "return x - self.decoder(self.encoder(x))",
         "the net predicts the noise"),
    case("gan--hinge",
         "loss_g = criterion(D(fake), ones)",
         "loss_g = -D(fake).mean()",
         "the generator's loss of a hinge GAN"),
]  # fmt: skip

RAISES = "house_prices--squeeze_missing"  # its metric joins batches of two sizes
HARMFUL = {c.id for c in BUGS} - {RAISES}
HONEST: dict[str, str] = {}
"""Code that is run after the script, where its own evaluation is wrong."""
