"""Bugs of the twelve scripts in scripts/eighth, the half kept away from whoever changes checks: ids whose CRC-32 is odd.

A bug counts if the script's own final number is at least 1% worse at both of two seeds: `python -m tests.guard.harm diabetes_mlp ...`.
"seen often" is the writer's own experience; no source was looked up.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("diabetes_mlp--best_not_copied",
         "best_state = copy.deepcopy(model.state_dict())",
         "best_state = model.state_dict()",
         "state_dict() is no copy: the weights \"of the best epoch\" are those of the last (seen often with early stopping)"),
    case("diabetes_mlp--relu_on_output",
         "            nn.Linear(hidden, 1),\n",
         "            nn.Linear(hidden, 1),\n"
         "            nn.ReLU(),\n",
         "a ReLU after the last layer of a regression whose target is standardised: no value below the mean can be predicted (seen often)"),
    case("digits_cnn--relu_on_logits",
         "        x = self.fc2(x)\n",
         "        x = F.relu(self.fc2(x))\n",
         "a ReLU on the scores that go into cross-entropy (seen often)"),
    case("resnet_onecycle--step_per_epoch",
         "        scheduler.step()\n"
         "        running += loss.item()\n",
         "        running += loss.item()\n"
         "    scheduler.step()\n",
         "OneCycleLR of epochs * steps is stepped once an epoch: the rate stays at the start of its warm-up (seen often)"),
    case("resnet_onecycle--test_not_normalised",
         "test_transform = transforms.Compose(\n"
         "    [\n"
         "        transforms.Normalize((0.3,), (0.37,)),\n"
         "    ]\n"
         ")\n",
         "test_transform = None\n",
         "Normalize is in the transform of training only (seen often)"),
    case("transfer--optimizer_before_head",
         "model.fc = nn.Linear(model.fc.in_features, len(NEW_CLASSES))\n"
         "model.fc.apply(init_weights)\n"
         "optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)\n",
         "optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)\n"
         "model.fc = nn.Linear(model.fc.in_features, len(NEW_CLASSES))\n"
         "model.fc.apply(init_weights)\n",
         "the head is replaced after the optimiser was made, so that the old head's weights are the ones it holds (seen often)"),
    case("transfer--init_of_all",
         "model.fc.apply(init_weights)",
         "model.apply(init_weights)",
         "the initialisation of the new head is applied to the whole model: the loaded features are lost, and they are frozen (seen often)"),
    case("lstm_docs--last_column",
         "        _, (hidden, _) = self.lstm(packed)\n"
         "        features = torch.cat((hidden[-2], hidden[-1]), dim=1)\n",
         "        output, _ = self.lstm(packed)\n"
         "        output, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)\n"
         "        features = output[:, -1]\n",
         "the last column of the padded outputs is taken: zeros for each text but the longest of its batch (seen often)"),
    case("lm_transformer--batch_first_lost",
         ", norm_first=True, batch_first=True)",
         ", norm_first=True)",
         "without batch_first the encoder attends over the samples of a batch; mask and batch are of equal size, so nothing raises (seen often)"),
    case("denoise--noisy_target",
         "loss = criterion(output, img)",
         "loss = criterion(output, noisy)",
         "the noisy picture is the target (seen often)"),
    case("box_regression--box_in_pixels",
         "dtype=torch.float32) / SIZE",
         "dtype=torch.float32)",
         "boxes in pixels for outputs of a sigmoid (seen often)"),
    case("reinforce--rewards_kept",
         "    del policy.rewards[:]\n"
         "    del policy.saved",
         "    del policy.saved",
         "rewards are not cleared after an episode; zip() pairs the first ones, of old episodes, with the new actions (seen often)"),
    case("imbalanced--weights_per_class",
         "WeightedRandomSampler(samples_weight, ",
         "WeightedRandomSampler(torch.from_numpy(weight), ",
         "one weight per class where the sampler wants one per sample: only the samples 0 and 1 are drawn (seen often)"),
]  # fmt: skip
HEALTHY = [
    case("digits_cnn--smoothing_and_weights",
         "        loss = F.cross_entropy(model(data), target)\n",
         "        class_weights = 1 + 0.1 * torch.arange(10.0)\n"
         "        loss = F.cross_entropy(model(data), target, weight=class_weights, label_smoothing=0.1)\n",
         "label smoothing and class weights in training only"),
    case("resnet_onecycle--cutout",
         "        transforms.RandomAffine(degrees=10, translate=(0.1, 0.1)),\n",
         "        transforms.RandomAffine(degrees=10, translate=(0.1, 0.1)),\n"
         "        transforms.RandomErasing(p=0.3, scale=(0.02, 0.15)),\n",
         "random erasing in training"),
    case("transfer--base_thaws",
         "for p in model.features.parameters():\n"
         "    p.requires_grad = False\n",
         "for p in model.features[0].parameters():\n"
         "    p.requires_grad = False\n",
         "only the first layer stays frozen"),
    case("lstm_docs--mean_of_states",
         "        _, (hidden, _) = self.lstm(packed)\n"
         "        features = torch.cat((hidden[-2], hidden[-1]), dim=1)\n",
         "        output, _ = self.lstm(packed)\n"
         "        output, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)\n"
         "        features = output.sum(dim=1) / lengths.unsqueeze(1)\n",
         "mean of the states over the real words"),
    case("unet_digits--dice",
         "        loss = loss_fn(pred, y)\n",
         "        p = torch.sigmoid(pred)\n"
         "        dice = (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)\n"
         "        loss = loss_fn(pred, y) + 1 - dice\n",
         "BCE and Dice"),
]  # fmt: skip
HARMFUL = {
    "diabetes_mlp--best_not_copied",
    "diabetes_mlp--relu_on_output",
    "digits_cnn--relu_on_logits",
    "resnet_onecycle--test_not_normalised",
    "transfer--optimizer_before_head",
    "transfer--init_of_all",
    "lstm_docs--last_column",
    "lm_transformer--batch_first_lost",
    "denoise--noisy_target",
    "box_regression--box_in_pixels",
    "reinforce--rewards_kept",
    "imbalanced--weights_per_class",
}
"""Bugs with a final number at least 1% worse at both seeds."""
HONEST: dict[str, str] = {}
