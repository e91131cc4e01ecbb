"""Bugs planted in a fork of a recipe, here of vision/classify, one textual replacement each, and the gate that must stop them.

`words` and `row` were fixed before the gates were run on them. `source` is a public project that had the bug.
"""

from tests.helpers.plant import Plant

# Texts of vision/classify that several plants replace.
IMAGE = "image = self.images[index].float() / 255\n"
SAMPLE = 'return {"image": image, "label": self.labels[index]}'
INIT = "self.images, self.labels, self.augment = images, labels, augment\n"
TRAIN_DATA = "train_data = Images(images[learn], labels[learn], classes, augment if cfg.augment else None)\n"
VAL_DATA = "val_data = Images(images[held_out], labels[held_out], classes)\n"
SPLIT = "learn, held_out = digits.split(labels)\n"
MODEL = "model = ResNet(mean, std, cfg.widths, len(classes))\n"
COUNTS = "        counts = torch.bincount(truth * n + logits.argmax(1), minlength=n * n).view(n, n).cpu().double()\n"
NORMALISE = "x = (images - self.mean) / self.std"
POOL = "return self.head(x.mean((2, 3)))"
LOSS = 'F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")'
TRUTH = 'truth.append(batch["label"])\n'
STAGES = "STAGES = [classify]\n"
UPDATE = "        run.update(stage, step.batches)\n"
EVALUATE = "            run.evaluate(stage)\n"
LOOP = "    for step in run.steps(stage):\n" + UPDATE


def staged(body: str) -> str:
    """STAGES replaced by one stage that calls classify() and then changes what it returned, as `body` says."""
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.strip("\n").splitlines())
    head = "def changed(cfg: Config, run: core.Run, previous=None) -> core.Stage:\n    stage = classify(cfg, run, previous)\n"
    return f"{head}{lines}    return stage\n\n\nSTAGES = [changed]\n"


def forgetful(make: str, kept: str) -> str:
    """STAGES replaced by the stage that `make` makes, of which a resumed run gets nothing back of what it `kept`."""
    return f"""def forgetful(cfg, run, previous=None):
    stage = {make}(cfg, run)
    stage.state["{kept}"].load_state_dict = lambda state: None
    return stage


STAGES = [forgetful]
"""


def own_loop(*body: str) -> str:
    """A loop written by a user who does not call run.update."""
    return "".join(f"        {line}\n" for line in ('optimizer = stage.optimizers["main"]', *body))


MEAN_LOSS = (
    'loss = sum(stage.loss(stage.model, b)["ce"] for b in step.batches) / sum(len(b["label"]) for b in step.batches)'
)
CLIP = "nn.utils.clip_grad_norm_(stage.model.parameters(), cfg.optim.clip)"
ROWS = '''
class WithSide(nn.Module):
    """The net, with what the archive knows of a picture beside the picture."""

    def __init__(self, net: nn.Module, width: int):
        super().__init__()
        self.net, self.side = net, nn.Embedding(64, width)

    def forward(self, images: Tensor, side: Tensor) -> Tensor:
        n = self.net
        x = n.blocks(F.relu(n.norm(n.stem((images - n.mean) / n.std)))).mean((2, 3))
        return n.head(x + self.side(side))


def changed(cfg: Config, run: core.Run, previous=None) -> core.Stage:
    stage = classify(cfg, run, previous)

    def with_side(data: Images):
        get = data.get
        data.get = lambda i, g: {**get(i, g), "side": SIDE}

    for data in stage.data.values():
        with_side(data)
    stage.model = WithSide(stage.model, cfg.widths[-1])
    stage.optimizers = {"main": core.make_optimizer(stage.model, cfg.optim)}
    stage.preview = stage.predict = stage.figures = stage.export = None

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        logits = model(batch["image"], batch["side"])
        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        hits = [(model(b["image"], b["side"]).argmax(1) == b["label"]).float() for b in run.batches(data)]
        return {"accuracy": run.gather(torch.cat(hits)).mean().item()}

    stage.loss, stage.evaluate = loss, evaluate
    return stage


STAGES = [changed]
'''

FROZEN_BN = """
def changed(cfg: Config, run: core.Run, previous=None) -> core.Stage:
    stage = classify(cfg, run, previous)
    stage.model.norm = nn.BatchNorm2d(cfg.widths[0])
    stage.model.stem.requires_grad_(False)
    stage.model.norm.requires_grad_(False)
    stage.optimizers = {"main": core.make_optimizer(stage.model, cfg.optim)}
    stage.expect.frozen = ("stem", "norm.")
    return stage


STAGES[:] = [changed]


def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    for step in run.steps(stage):
"""

SCHEMA = [
    Plant("own-generator", "schema", "C7", INIT,
          "self.images, self.labels = images, labels\n"
          "        draws = torch.Generator().manual_seed(0)\n"
          "        self.augment = augment and (lambda x: x.roll(int(torch.randint(-2, 3, (), generator=draws)), 2))\n",
          ("'image'", "differs between two reads", "one of its own"), source="GEN-04 pytorch/pytorch#5059", batch=True,
          harm="every worker and every epoch repeats the same draws"),
    Plant("python-random", "schema", "C7", "image = self.augment(image)",
          'image = image * __import__("random").uniform(0.7, 1.0)', ("differs between two reads", "random"),
          source="GEN-04 CenterNet#233"),
    Plant("label-dtype", "schema", "C7", VAL_DATA,
          "val_data = Images(images[held_out], labels[held_out].to(torch.uint8), classes)\n", ("'label'", "uint8", "int64"),
          harm="label * n_classes + prediction wraps at 256 from 17 classes on"),
    Plant("augmented-evaluation", "schema", "V2", "if generator is not None and self.augment is not None:\n"
          "            image = self.augment(image)",
          "if True:\n            image = v2.RandomAffine(12, translate=(0.1, 0.1))(image)",
          ("evaluation path draws at random",), source="VIS-02 udacity/deep-learning-v2-pytorch#132", batch=True,
          harm="the validation number is noisy and too low"),
    Plant("loss-per-sample", "schema", "C7", LOSS, LOSS.replace('"sum"', '"none"'), ("not a scalar sum", "'ce'")),
    Plant("smoothing-decays-by-calls", "dependency", "C2",
          f'        logits = model(batch["image"])\n        return {{"ce": {LOSS}}}\n',
          '        loss.calls = getattr(loss, "calls", 0) + 1\n        logits = model(batch["image"])\n        return {"ce": '
          + LOSS.replace("cfg.label_smoothing", "cfg.label_smoothing * 0.999**loss.calls") + "}\n",
          ("changes from call to call", "no checkpoint holds"), harm="a resumed run starts the decay again"),
    Plant("nll-of-probabilities", "reported", "C12", 'logits.append(model(batch["image"]).float())',
          'logits.append(model(batch["image"]).float().softmax(1))', ("a second softmax",),
          harm="a perfect answer has an nll of 1.46"),
]  # fmt: skip

DATA = [
    Plant("normalised-for-0-255", "scale", "V1", "(images - self.mean) / self.std", "(images * 255 - self.mean) / self.std",
          ("mean", "0-255"), source="VIS-01", harm="the stem sees values in the hundreds: slow and rough at first, then hidden"),
    Plant("normalised-twice-in-training", "data", "V1", "image = self.augment(image)", "image = self.augment(image) / 255",
          ("'image'", "another scale in training"), source="VIS-01 imagenet-multiGPU.torch PR#18",
          harm="the net is evaluated on inputs 255 times larger than those it was trained on"),
    Plant("labels-from-one", "data", "C7", SAMPLE, SAMPLE.replace("[index]}", "[index] + 1}"), ("not class ids", "10"),
          before=("schema",), why="torch refuses class 10 in the loss, if one of the two samples of the batch is a nine",
          source="VIS-07 PaddlePaddle/PaddleDetection PR#1457"),
    Plant("background-class", "data", "C7", "return pictures.Labelled(images, labels, digits.CLASSES, ",
          'return pictures.Labelled(images, labels + 1, ("background", *digits.CLASSES), ', ("no sample of class background",),
          source="VIS-07 supervisely-ecosystem/RT-DETRv2 PR#52"),
    Plant("nan-pixels", "data", "C7", IMAGE, IMAGE + "        if index % 97 == 5:\n            image[0, 3, 3] = torch.nan\n",
          ("nan", "'image'"), harm="one such sample poisons every weight"),
    Plant("bytes", "data", "C7", IMAGE, "image = self.images[index].float()\n", ("is 255", "above 1"),
          source="VIS-01 magenta/magenta PR#925"),
    Plant("divided-twice", "data", "C7", IMAGE, "image = self.images[index].float() / 255 / 255\n", ("'image'", "range"),
          source="VIS-01 detecto#16"),
    Plant("missing-class", "data", "C7", VAL_DATA,
          "held_out = held_out[labels[held_out] != 9]\n    " + VAL_DATA, ("val", "no sample of class 9"),
          harm="the metric never asks about one class"),
    Plant("sorted-split", "data", "C7", SPLIT, "learn, held_out = torch.arange(4000), torch.arange(4000, 5000)\n",
          ("train", "no sample of class 8, 9"), source="GEN-10 marin-community/marin PR#2700",
          harm="trained on eight digits, judged on the two others"),
    Plant("target-in-corner", "data", "C7", IMAGE, IMAGE + "        image[0, 0, 0] = self.labels[index] / 9\n",
          ("of the input alone predicts the target",), harm="the net reads a pixel instead of the digit"),
    Plant("blank", "data", "C7", IMAGE, "image = torch.zeros(self.images[index].shape)\n",
          ("same in every sample",), batch=False),
    Plant("turned-by-any-angle", "data", "C7", "v2.RandomAffine(12, translate", "v2.RandomAffine(180, translate",
          ("'6' turned by half is '9'",), harm="accuracy 0.256 instead of 0.693 after 3 epochs: a 6 and a 9 are one picture"),
    Plant("inverted-in-training", "data", "V1", "image = self.augment(image)", "image = 1 - self.augment(image)",
          ("another scale in training", "inverts its inputs"), harm="evaluated on negatives of what it was trained on"),
    Plant("inverted-validation", "data", "V1", VAL_DATA,
          "val_data = Images(255 - images[held_out], labels[held_out], classes)\n", ("'image'", "val"),
          harm="judged on negatives of what it was trained on"),
]  # fmt: skip

LEAKAGE = [
    Plant("unsplit", "leakage", "C6", TRAIN_DATA,
          "train_data = Images(images, labels, classes, augment if cfg.augment else None)\n", ("1000 exact", "unsplit"),
          source="GEN-10 ratschlab/aestetik PR#12", batch=True, harm="validation flatters"),
    Plant("noisy-copies", "leakage", "C6", VAL_DATA,
          "again = (images[learn[::4]].float() + 5 * torch.randn(1000, *images.shape[1:])).clamp(0, 255).to(torch.uint8)\n"
          "    val_data = Images(again, labels[learn[::4]], classes)\n", ("near duplicates",),
          source="GEN-10 OpenRLHF/OpenRLHF#1089", batch=True),
    Plant("darker-copies", "leakage", "C6", VAL_DATA,
          "val_data = Images((images[learn[::4]] * 0.7).to(torch.uint8), labels[learn[::4]], classes)\n",
          ("near duplicates",), batch=True),
    Plant("group-on-both-sides", "leakage", "C6", VAL_DATA,
          VAL_DATA + "    for data, rows in ((train_data, learn), (val_data, held_out)):\n"
          '        data.fields = {**data.fields, "writer": core.Field("group")}\n'
          '        data.get = lambda i, g, get=data.get, rows=rows: {**get(i, g), "writer": rows[i] % 250}\n',
          ("shared groups", "writer", "split by group"), harm="the same hand stands on both sides"),
]  # fmt: skip

INITIAL = [
    Plant("loud-head", "initial-loss", "C1", "nn.init.zeros_(self.head.weight)", "nn.init.normal_(self.head.weight, std=2.0)",
          ("last layer's initial weights are too large",)),
    Plant("thousand-outputs", "initial-loss", "C1", MODEL, "model = ResNet(mean, std, cfg.widths, 1000)\n",
          ("number of outputs is not the number of classes", "6.908")),
    Plant("mean-loss", "initial-loss", "C1", LOSS, LOSS.replace(', reduction="sum"', ""), ("a sum where it should be a mean",),
          source="GEN-01 huggingface/blog PR#2414", harm="the gradient is 64 times too small"),
    Plant("focal-weight-turned", "formula", "C1", LOSS, "(lambda nll: ((-nll).exp() ** 2 * nll).sum())("
          'F.cross_entropy(logits, batch["label"], reduction="none"))', ("the focal weight is p^2 where (1 - p)^2 is meant",),
          before=("initial-loss",), why="its first loss is 0.023, where theory gives 2.303"),
    Plant("softmax-over-batch", "initial-loss", "C1", LOSS, 'F.nll_loss(logits.log_softmax(0), batch["label"], reduction="sum")',
          ("5.5",)),
]  # fmt: skip

WIRING = [
    Plant("keep-prob", "wiring", "C3", POOL, "return self.head(F.dropout(x.mean((2, 3)), 0.9, self.training))",
          ("dropout drops 90%", "0.9 is the share to keep"), harm="accuracy 0.264 instead of 0.693 after 3 epochs"),
    Plant("detached-head", "wiring", "C3", POOL, "return self.head(x.mean((2, 3)).detach())",
          ("never got a gradient", "detach")),
    Plant("head-only", "wiring", "C3", "core.make_optimizer(model, cfg.optim)", "core.make_optimizer(model.head, cfg.optim)",
          ("in no optimiser", "built over a part of the model")),
    Plant("head-replaced", "wiring", "C3", STAGES,
          staged("stage.model.head = nn.Linear(cfg.widths[-1], 10)\nnn.init.zeros_(stage.model.head.weight)\n"
                 "nn.init.zeros_(stage.model.head.bias)"),
          ("in no optimiser", "before it was replaced"), harm="the new head keeps its random weights"),
    Plant("no-zero-grad", "wiring", "C3", UPDATE,
          own_loop(MEAN_LOSS, "loss.backward()", CLIP, "optimizer.step()"), ("zero_grad() is missing", "at step 2"),
          source="GEN-14 NVIDIA/Megatron-LM PR#6871"),
    Plant("zero-grad-late", "wiring", "C3", UPDATE,
          own_loop(MEAN_LOSS, "loss.backward()", "optimizer.zero_grad()", "optimizer.step()"), ("never got a gradient",)),
    Plant("bf16-weights", "wiring", "C3", MODEL,
          "model = ResNet(mean, std, cfg.widths, len(classes)).bfloat16()\n"
          "    model.register_forward_pre_hook(lambda m, a: (a[0].bfloat16(),))\n",
          ("hardly move", "bf16 weights"), argv=("--optim.lr", "1e-5"),
          source="GEN-11 pytorch/ao PR#1124", harm="updates are rounded away"),
    Plant("frozen-block", "wiring", "C3", MODEL, MODEL + "    model.blocks[0].requires_grad_(False)\n",
          ("in no optimiser", "blocks.0"), source="VLM-04 hiyouga/LlamaFactory#6754"),
    Plant("thawed-batch-norm", "wiring", "C3", "def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:\n"
          '    """The loop; the gates rehearse this very function."""\n    for step in run.steps(stage):\n',
          FROZEN_BN.lstrip() + "        stage.model.train()\n", ("frozen tensors moved", "norm.running", "batch norm of a frozen part"),
          source="VIS-10 virtex#16", harm="frozen features drift"),
    Plant("divided-twice-in-loop", "wiring", "C3", UPDATE,
          own_loop("optimizer.zero_grad()", MEAN_LOSS, "(loss / len(step.batches[0]['label'])).backward()", CLIP,
                   "optimizer.step()"), ("norm", "the loss's own")),
    Plant("loss-clipped", "wiring", "C9", UPDATE,
          own_loop("optimizer.zero_grad()", MEAN_LOSS, "loss.clamp(max=cfg.optim.clip).backward()", "optimizer.step()"),
          ("never got a gradient",)),
    Plant("clipped-by-value", "wiring", "C9", UPDATE,
          own_loop("optimizer.zero_grad()", MEAN_LOSS, "loss.backward()",
                   "nn.utils.clip_grad_value_(stage.model.parameters(), 1e-3)", "optimizer.step()"),
          ("another direction", "cosine")),
    Plant("no-grad-body", "wiring", "C3", "x = self.blocks(", "with torch.no_grad():\n            x = self.blocks(",
          ("never got a gradient", "no_grad"), source="VLM-02 BAAI-DCAI/Bunny#130"),
]  # fmt: skip

DEPENDENCY = [
    Plant("centred-on-batch", "dependency", "C2", NORMALISE, "x = (images - images.mean(0)) / self.std",
          ("statistics over the batch axis",), harm="the answer depends on the neighbours"),
    Plant("broadcast", "dependency", "C2", LOSS,
          '(-logits.log_softmax(1).gather(1, batch["label"][:, None])\n'
          '                        * torch.linspace(0.5, 1.5, 10)[batch["label"]]).mean(0).sum()',
          ("(B, 1) with (B,)",), harm="every sample gets the mean weight"),
    Plant("attention-over-batch", "dependency", "C2", POOL,
          "h = x.mean((2, 3))\n        return self.head((h @ h.T).softmax(1) @ h)", ("batch axis",)),
    Plant("view-for-permute", "dependency", "C2", POOL,
          "return self.head(x.reshape(x.shape[1], x.shape[0], -1).mean(2).T)", ("reshape that mixes samples",)),
    Plant("rolled-in-loss", "dependency", "C2", LOSS, LOSS.replace('batch["label"]', 'batch["label"].roll(1)'),
          ("flattened before a shift",), source="VLM-06 huggingface/transformers#47394",
          harm="every image is trained on its neighbour's label"),
]  # fmt: skip

OVERFIT = [
    Plant("softmax-twice", "overfit", "C4", LOSS, LOSS.replace("logits", "logits.softmax(1)"), ("softmax before cross-entropy",),
          source="VIS-05 Pytorch-Deeplab#2", batch=True, harm="tiny gradients, a floor of 1.46"),
    Plant("classes-turned-in-loss", "overfit", "C4", LOSS, LOSS.replace('batch["label"]', '(batch["label"] + 1) % 10'),
          ("evaluation reads other inputs, labels or classes",), batch=True, harm="accuracy 0 with a falling loss"),
    Plant("argmin", "overfit", "C4", "logits.argmax(1)", "logits.argmin(1)", ("evaluation reads other",), batch=True),
    Plant("off-by-one-in-evaluation", "overfit", "C4", TRUTH, 'truth.append((batch["label"] - 1).clamp_min(0))\n',
          ("evaluation reads other",), source="VIS-07 PaddlePaddle/PaddleDetection PR#1457", batch=True),
    Plant("input-lost", "overfit", "C4", NORMALISE, "x = (torch.ones_like(images) - self.mean) / self.std",
          ("gradients do not arrive",), batch=True, harm="chance accuracy"),
    Plant("rate-too-low", "overfit", "C4", NORMALISE, NORMALISE + " + 0",
          ("rate is far too low",), argv=("--optim.lr", "1e-6"), batch=True),
    Plant("adafactor-crawls", "overfit", "C4", NORMALISE, NORMALISE + " + 0", ("rate is far too low",), batch=True,
          argv=("--optim.name", "adafactor", "--optim.lr", "0.01"),
          harm="its rate is relative to the weights and the head starts at zero: accuracy 0.20 after 3 epochs, AdamW 0.69"),
]  # fmt: skip

BASELINE = [
    Plant("shard-number", "baseline", "C5", STAGES,
          ROWS.replace("SIDE}", "torch.tensor(int(data.labels[i]) * len(data) // 10 // 400)}")
              .replace("int(data.labels[i]) * len(data) // 10 // 400", "i * 10 // len(data)"),
          ("another way", "index"), batch=False,
          harm="the archive is sorted: the shard number is the class"),
    Plant("label-as-input", "baseline", "C5", STAGES, ROWS.replace("SIDE}", "data.labels[i]}"), ("another way",),
          harm="perfect in the lab, useless outside"),
]  # fmt: skip

EVALUATION = [
    Plant("least-sure-not-scored", "evaluation", "C12", COUNTS,
          "        sure = logits.softmax(1).amax(1)\n        clear = sure >= sure.quantile(0.1)\n"
          + COUNTS.replace("truth *", "truth[clear] *").replace("logits.", "logits[clear]."),
          ("no influence on any score", "leaves samples out"),
          harm="of 1,000 digits 6 are wrong (99.4%), 99.9% are printed"),
    Plant("functional-dropout", "evaluation", "C12", POOL, "return self.head(F.dropout(x.mean((2, 3)), 0.2))",
          ("two evaluations", "dropout"), source="GEN-07 nanoGPT PR#240", before=("dependency", "overfit"),
          why="a forward that draws at random in eval mode also blurs every comparison of two forwards",
          harm="evaluation noisy and too low"),
    Plant("stays-in-eval", "evaluation", "C12", EVALUATE, "            stage.model.eval()\n" + EVALUATE,
          ("eval mode", "step 3"), source="GEN-06 ermongroup/ncsn#2", harm="dropout off for the rest of the run"),
    Plant("evaluated-weights-not-put-back", "evaluation", "C12", EVALUATE,
          "            with torch.no_grad():\n                stage.model.stem.weight.mul_(0.9)\n" + EVALUATE,
          ("other weights than before the evaluation",), source="DIF-02 huggingface/diffusers PR#7599",
          harm="training jumps at each evaluation"),
    Plant("evaluates-in-train-mode", "evaluation", "C12", STAGES,
          staged("stage.model.head = nn.Sequential(nn.Dropout(0.2), stage.model.head)\nevaluate = stage.evaluate\n"
                 "stage.evaluate = lambda model, data: evaluate(model.train(), data)"),
          ("two evaluations", "dropout"), before=("overfit",),
          why="dropout at evaluation can keep the overfit batch from closing"),
    Plant("evaluation-moves-buffer", "evaluation", "C12", TRUTH,
          TRUTH + '            model.mean.lerp_(batch["image"].mean(), 0.1)\n', ("evaluation changed", "mean"),
          harm="statistics fitted on validation data"),
    Plant("mean-of-means", "evaluation", "C12", "F.cross_entropy(logits, truth).item()",
          "sum(F.cross_entropy(l, y) for l, y in zip(logits.split(cfg.train.eval_batch_size),\n"
          "                        truth.split(cfg.train.eval_batch_size))).item() / -(-len(truth) // cfg.train.eval_batch_size)",
          ("depends on the evaluation batch size", "mean over batch means"), source="LLM-16 axolotl Perplexity callback"),
    Plant("last-batch-only", "evaluation", "C12", TRUTH, TRUTH + "            logits, truth = logits[-1:], truth[-1:]\n",
          ("depends on the evaluation batch size",), harm="the number of the last batch is taken for all"),
    Plant("batch-norm-in-train-mode", "evaluation", "C12", STAGES,
          staged("stage.model.norm = nn.BatchNorm2d(cfg.widths[0])\n"
                 'stage.optimizers = {"main": core.make_optimizer(stage.model, cfg.optim)}\nevaluate = stage.evaluate\n'
                 "stage.evaluate = lambda model, data: evaluate(model.train(), data)"),
          ("evaluation changed", "norm.running_mean", "batch norm")),
]  # fmt: skip

ACCUMULATION = [
    Plant("mean-of-micro-batches", "accumulation", "C10", STAGES,
          staged("sums = stage.loss\nstage.counts = lambda batch: {\"*\": 1.0}\n"
                 'stage.loss = lambda m, b: {k: v / len(b["label"]) for k, v in sums(m, b).items()}'),
          ("returns a mean", "return SUMS"), source="GEN-01 allenai/open-instruct PR#1161", before=("dependency",),
          why="a mean over the batch is not the sum over its rows: the dependency gate sees it first"),
    Plant("forgets-to-divide", "accumulation", "C10", UPDATE,
          own_loop("optimizer.zero_grad()", "for batch in step.batches:",
                   '    (stage.loss(stage.model, batch)["ce"] / len(batch["label"])).backward()', CLIP, "optimizer.step()"),
          ("micro-batches are averaged",), source="GEN-01 huggingface/transformers#37766"),
    Plant("first-micro-batch-only", "accumulation", "C10", UPDATE, "        run.update(stage, step.batches[:1])\n",
          ("step.batches[1:]",), harm="most of every batch is thrown away"),
]  # fmt: skip

RESUME = [
    Plant("local-counter", "resume", "C13", LOOP,
          "    seen = 0\n    for step in run.steps(stage):\n        seen += 1\n"
          '        for group in stage.optimizers["main"].param_groups:\n            group["lr"] *= 0.995**seen\n' + UPDATE,
          ("local variable",), source="GEN-09 ultralytics/yolov5#292", harm="the rate jumps up after a restart",
          before=("schedule",), why="the rates are not the schedule's"),
    Plant("own-noise", "resume", "C13", LOOP,
          "    noise = torch.Generator().manual_seed(0)\n    for step in run.steps(stage):\n        for b in step.batches:\n"
          '            b["image"] = b["image"] + 0.05 * torch.randn(b["image"].shape, generator=noise)\n' + UPDATE,
          ("generator",)),
    Plant("normaliser-not-saved", "resume", "C13", LOOP,
          "    shift = torch.zeros(())\n    for step in run.steps(stage):\n        for b in step.batches:\n"
          '            shift = shift.lerp(b["image"].mean(), 0.1)\n            b["image"] = b["image"] - shift\n' + UPDATE,
          ("not in stage.state",), source="RL-06 isaac-sim/IsaacLab#2635", before=("accumulation",),
          why="the statistics move from micro-batch to micro-batch, so the cut of a batch changes its gradient"),
    Plant("own-optimizer", "resume", "C13", LOOP,
          "    own = torch.optim.AdamW(stage.model.parameters(), lr=cfg.optim.lr)\n    for step in run.steps(stage):\n"
          "        own.zero_grad()\n        " + MEAN_LOSS + "\n        loss.backward()\n        own.step()\n",
          ("tensors differ",), source="lightly-ai/lightly-train PR#301", harm="momentum is lost at every restart",
          before=("schedule",), why="the stage's optimiser never steps"),
]  # fmt: skip

SMOOTHING = [
    Plant("smoothing-left-out", "smoothing", "C16", LOSS, LOSS.replace("label_smoothing=cfg.label_smoothing, ", ""),
          ("label smoothing 0,", "--label-smoothing"), harm="the setting has no effect: a sweep over it compares equal runs"),
    Plant("smoothing-of-a-constant", "smoothing", "C16", LOSS, LOSS.replace("cfg.label_smoothing", "0.1"),
          ("label smoothing 0.1,", "--label-smoothing 0.2"), argv=("--label-smoothing", "0.2"),
          harm="the setting has no effect; at its default nothing is seen"),
]  # fmt: skip
PLANTS = [
    *SCHEMA,
    *DATA,
    *LEAKAGE,
    *INITIAL,
    *WIRING,
    *DEPENDENCY,
    *OVERFIT,
    *BASELINE,
    *EVALUATION,
    *ACCUMULATION,
    *RESUME,
    *SMOOTHING,
]

# Close relatives of other plants: `make verify` runs them, `make test` (a few minutes) does not.
RELATIVES = [
    "smoothing-of-a-constant",
    "first-micro-batch-only",
    "functional-dropout",
    "evaluates-in-train-mode",
    "mean-of-means",
    "classes-turned-in-loss",
    "rate-too-low",
    "divided-twice",
    "target-in-corner",
    "loss-clipped",
    "bf16-weights",
    "nan-pixels",
    "bytes",
    "thawed-batch-norm",
    "divided-twice-in-loop",
    "off-by-one-in-evaluation",
    "evaluation-moves-buffer",
    "normaliser-not-saved",
    "own-optimizer",
    "rolled-in-loss",
    "noisy-copies",
    "python-random",
    "background-class",
    "darker-copies",
    "thousand-outputs",
    "no-grad-body",
    "zero-grad-late",
    "clipped-by-value",
    "head-replaced",
    "view-for-permute",
    "attention-over-batch",
    "argmin",
    "input-lost",
    "adafactor-crawls",
    "batch-norm-in-train-mode",
    "last-batch-only",
    "own-noise",
    "missing-class",
    "blank",
    "label-as-input",
    "loud-head",
    "frozen-block",
]
