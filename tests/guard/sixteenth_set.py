"""Bugs that people posted about, in scripts/sixteenth: the open half (2026-11-28).

Each bug is one that a thread found in code that ran without an error (`SOURCES`): forums, questions and answers, issues and pull requests.
The scripts were written anew in the askers' style by someone who had read no check. Halves: the last hexadecimal digit of the SHA-256 sum of
the id; odd ones are in sixteenth_set_heldout.py. HARMFUL: the last number of the script is clearly worse, or clearly wrong, at seed 0.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("digits_cnn--softmax-before-cross-entropy",
         "        return self.fc2(x)\n",
         "        return F.softmax(self.fc2(x), dim=1)\n",
         "the network ends in a softmax and the loss applies another"),
    case("digits_cnn--scheduler-every-batch",
         "        optimizer.step()\n"
         "        running_loss += loss.item()\n"
         "    scheduler.step()\n",
         "        optimizer.step()\n"
         "        scheduler.step()\n"
         "        running_loss += loss.item()\n",
         "a scheduler that counts epochs is stepped after every batch"),
    case("digits_cnn--gamma-zero",
         "step_size=4, gamma=0.5)",
         "step_size=4, gamma=0.0)",
         "the scheduler that stands for no schedule multiplies the rate by zero"),
    case("digits_cnn--best-by-reference",
         "best_weights = copy.deepcopy(model.state_dict())",
         "best_weights = model.state_dict()",
         "state_dict() is a reference: the best weights are overwritten by the last"),
    case("digits_cnn--sorted-unshuffled",
         "train_loader = as_loader(x_train, y_train, True)\n",
         "by_class = np.argsort(y_train)\n"
         "train_loader = as_loader(x_train[by_class], y_train[by_class], False)\n",
         "the training data are grouped by label and not shuffled"),
    case("digits_cnn--no-eval-mode",
         "    model.eval()\n"
         "    correct, total = 0, 0\n",
         "    correct, total = 0, 0\n",
         "evaluation runs in training mode and updates the batch norm"),
    case("digit_rows_lstm--view-to-time-first",
         "        out, (h_n, c_n) = self.lstm(x)\n",
         "        out, (h_n, c_n) = self.lstm(x.view(x.size(1), x.size(0), -1).transpose(0, 1))\n",
         "view() in place of transpose() mixes the rows of different digits"),
    case("words_char_gpt--labels-not-shifted",
         "        shift_logits, shift_labels = logits[:, :-1], labels[:, 1:]\n",
         "        shift_logits, shift_labels = logits, labels\n",
         "the labels are the inputs: the model learns to copy"),
    case("words_char_gpt--softmax-over-queries",
         "att = F.softmax(att, dim=-1)",
         "att = F.softmax(att, dim=-2)",
         "attention is normalised over the queries"),
    case("ring_gan--generator-towards-fake",
         "    errG = criterion(output, real_label)\n",
         "    errG = criterion(output, fake_label)\n",
         "the generator is trained towards the label of the fakes"),
    case("ring_gan--discriminator-not-zeroed",
         "    netD.zero_grad()\n",
         "",
         "gradients of the discriminator accumulate, those of the generator's step too"),
    case("ring_gan--both-schedulers-one-optimizer",
         "schedulerD = torch.optim.lr_scheduler.MultiStepLR(optimizerD,",
         "schedulerD = torch.optim.lr_scheduler.MultiStepLR(optimizerG,",
         "the discriminator's scheduler has the generator's optimiser"),
    case("blobs_unet--mask-not-flipped",
         "image, mask = image[:, ::-1], mask[:, ::-1]",
         "image = image[:, ::-1]",
         "the picture is flipped and its mask is not"),
    case("blobs_unet--relu-at-the-end",
         "        return self.out(x)\n",
         "        return torch.relu(self.out(x))\n",
         "a ReLU ends the network: no pixel can be background"),
    case("blobs_unet--reshape-to-channels-first",
         "np.transpose(image, (2, 0, 1))",
         "np.reshape(image, (2, SIZE, SIZE))",
         "reshape() in place of transpose() mixes the channels"),
    case("blobs_unet--eval-from-first-validation",
         "for epoch in range(10):\n"
         "    model.train()\n",
         "model.train()\n"
         "for epoch in range(10):\n",
         "no call of train() follows the validation"),
    case("season_forecast--true-values-in-evaluation",
         "        forecast = model(past)\n",
         "        forecast = model(past, future)\n",
         "the evaluation gives the decoder the true values of the days before"),
    case("season_forecast--decoder-gets-zeros",
         "        value = past[:, -1]\n"
         "        outputs = []\n"
         "        for t in range(HORIZON):\n"
         "            h, c = self.decoder(value, (h, c))\n",
         "        value = past[:, -1]\n"
         "        outputs = []\n"
         "        for t in range(HORIZON):\n"
         "            h, c = self.decoder(torch.zeros_like(value), (torch.zeros_like(h), c * 0))\n",
         "the decoder's input is zeros and the encoder's state does not reach it"),
    case("blocks_gcn--loss-on-all-nodes",
         "loss = F.nll_loss(output[train_mask], y[train_mask])",
         "loss = F.nll_loss(output, y)",
         "the loss is taken on all nodes, those of the test too"),
    case("corridor_dqn--ends-ignored",
         " * (1 - d.float())",
         "",
         "the value after the end of an episode is added"),
    case("corridor_dqn--reward-kept",
         "        self.reward = -0.02\n",
         "        self.reward += -0.02\n",
         "the reward is kept and summed in the environment"),
    case("digits_siamese--labels-exchanged",
         "y_true * distance**2 + (1 - y_true) * F.relu(margin - distance) ** 2",
         "(1 - y_true) * distance**2 + y_true * F.relu(margin - distance) ** 2",
         "equal pairs are pushed apart and different ones together"),
    case("moons_ddpm--beta-not-scaled",
         "scale = 1000 / timesteps",
         "scale = 1",
         "the betas of 1000 steps are used with 100: the last step is far from noise"),
]  # fmt: skip

HEALTHY = [
    case("season_forecast--always-forced",
         "if future is not None and torch.rand(1).item() < 0.5:",
         "if future is not None:",
         "the decoder gets the true value of the day before in training"),
    case("corridor_dqn--double-q",
         "            with torch.no_grad():\n"
         "                expected = r.float() + gamma * target_net(s2).max(1).values * (1 - d.float())\n",
         "            with torch.no_grad():\n"
         "                best = policy_net(s2).argmax(1, keepdim=True)\n"
         "                expected = r.float() + gamma * target_net(s2).gather(1, best).squeeze(1) * (1 - d.float())\n",
         "the action is chosen by the one network and its value is the other's"),
]  # fmt: skip

SOURCES = {
    "digits_cnn--softmax-before-cross-entropy": "https://discuss.pytorch.org/t/cross-entropy-loss-is-not-decreasing/43814",
    "digits_cnn--scheduler-every-batch": "https://github.com/Lornatang/SRGAN-PyTorch/issues/1",
    "digits_cnn--gamma-zero": "https://github.com/LINCellularNeuroscience/VAME/issues/26",
    "digits_cnn--best-by-reference": "https://github.com/WenjieDu/PyPOTS/issues/667",
    "digits_cnn--sorted-unshuffled": "https://github.com/BVLC/caffe/issues/1445",
    "digits_cnn--no-eval-mode": "https://github.com/microsoft/robustdg/issues/30",
    "digit_rows_lstm--view-to-time-first": "https://github.com/HHTseng/video-classification/issues/42",
    "words_char_gpt--labels-not-shifted": "https://github.com/huggingface/transformers/issues/27517",
    "words_char_gpt--softmax-over-queries": "https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/146",
    "ring_gan--generator-towards-fake": "https://github.com/mlpack/mlpack/pull/1933",
    "ring_gan--discriminator-not-zeroed": "https://github.com/Adversarial-Deep-Learning/code-soup/issues/69",
    "ring_gan--both-schedulers-one-optimizer": "https://github.com/Lornatang/ESRGAN-PyTorch/issues/39",
    "blobs_unet--mask-not-flipped": "https://github.com/divamgupta/image-segmentation-keras/issues/115",
    "blobs_unet--relu-at-the-end": "http://www.dtcms.com/a/394596.html",
    "blobs_unet--reshape-to-channels-first": "https://github.com/IcedDoggie/Micro-Expression-with-Deep-Learning/issues/7",
    "blobs_unet--eval-from-first-validation": "https://github.com/fartashf/vsepp/issues/4",
    "season_forecast--true-values-in-evaluation": "https://github.com/NourozR/Stock-Price-Prediction-LSTM/issues/5",
    "season_forecast--decoder-gets-zeros": "https://openillumi.com/en/en-pytorch-transformer-multidim-output-same-fix",
    "blocks_gcn--loss-on-all-nodes": "https://github.com/dmlc/dgl/pull/181",
    "corridor_dqn--ends-ignored": "https://github.com/cyoon1729/deep-Q-networks/pull/5",
    "corridor_dqn--reward-kept": "https://ai.stackexchange.com/questions/24024/reinforcement-learning-simple-problem-agent-not-learning-wrong-action",
    "digits_siamese--labels-exchanged": "https://github.com/keras-team/keras/issues/1866",
    "moons_ddpm--beta-not-scaled": "https://github.com/huggingface/diffusers/pull/12341",
}  # fmt: skip

HARMFUL = {
    "blobs_unet--mask-not-flipped",
    "blobs_unet--reshape-to-channels-first",
    "blocks_gcn--loss-on-all-nodes",
    "digit_rows_lstm--view-to-time-first",
    "digits_cnn--gamma-zero",
    "digits_cnn--scheduler-every-batch",
    "digits_cnn--sorted-unshuffled",
    "digits_siamese--labels-exchanged",
    "ring_gan--discriminator-not-zeroed",
    "ring_gan--generator-towards-fake",
    "season_forecast--decoder-gets-zeros",
    "words_char_gpt--labels-not-shifted",
    "words_char_gpt--softmax-over-queries",
}

HONEST: dict[str, str] = {
    "season_forecast--true-values-in-evaluation":
    "\n"
    "model.eval()\n"
    "errors = []\n"
    "truth = torch.tensor((test_part - mean) / std, dtype=torch.float32)\n"
    "with torch.no_grad():\n"
    "    for i in range(len(truth) - HISTORY - HORIZON + 1):\n"
    "        past, future = truth[None, i : i + HISTORY, None], truth[None, i + HISTORY : i + HISTORY + HORIZON, None]\n"
    "        errors.append((model(past) - future).abs() * std)\n"
    "print(f\"FINAL mae={torch.cat(errors).mean().item():.4f}\")\n",
}  # fmt: skip
