"""Healthy variants of vision/classify, among them those that look like bugs."""

from tests.helpers.plant import Healthy
from tests.vision.planted_classify import IMAGE, LOOP, LOSS, MODEL, STAGES, TRAIN_DATA, UPDATE, staged

NORM = "nn.GroupNorm(8, n_out)\n        self.conv2"
BATCH_NORM = """
def batch_norm(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        setattr(module, name, nn.BatchNorm2d(child.num_channels) if isinstance(child, nn.GroupNorm) else batch_norm(child))
    return module


"""

DROPOUT_BY_FUNCTION = (
    "return self.head(x.mean((2, 3)))",
    "x = F.dropout(x, 0.1, self.training)\n        return self.head(F.dropout(x.mean((2, 3)), 0.1, self.training))",
)
VARIANTS = [
    Healthy("ok-05-no-smoothing", ("--label-smoothing", "0")),
    Healthy("ok-05-much-smoothing", ("--label-smoothing", "0.3"), naive="the loss does not reach zero"),
    Healthy("ok-11-batch-of-two", ("--train.batch-size", "2"), naive="batch too small for the norm"),
    Healthy("ok-11-batch-of-one", ("--train.batch-size", "1"), naive="batch too small for the norm"),
    Healthy("sgd", ("--optim.name", "sgd", "--optim.lr", "0.05")),
    Healthy("adafactor", ("--optim.name", "adafactor", "--optim.lr", "0.1")),
    Healthy("accumulate", ("--train.accumulate", "4")),
    Healthy("bf16", ("--train.precision", "bf16"), naive="gradients differ between cuts"),
    Healthy("ok-13-long-warmup", ("--optim.warmup", "0.3"), naive="the first steps do not move the weights"),
    Healthy("ok-13-constant", ("--optim.schedule", "constant")),
    Healthy("no-clip", ("--optim.clip", "inf")),
    Healthy("tight-clip", ("--optim.clip", "0.05"), naive="always clipped"),
    Healthy("no-workers", ("--loader.workers", "0")),
    Healthy("two-workers", ("--loader.workers", "2")),
    Healthy("no-augmentation", ("--no-augment",)),
    Healthy("small-evaluation-batches", ("--train.eval-batch-size", "7")),
    Healthy("ok-23-strong-augmentation",
            hunk=("12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10,",
                  "30, translate=(0.2, 0.2), scale=(0.6, 1.4), shear=30,"),
            naive="validation better than training: a leak"),
    Healthy("ok-02-declared-frozen-block",
            hunk=(STAGES, staged('stage.model.blocks[0].requires_grad_(False)\n'
                                 'stage.optimizers = {"main": core.make_optimizer(stage.model, cfg.optim)}\n'
                                 'stage.expect.frozen = ("blocks.0.",)')), naive="parameters without gradient"),
    Healthy("perceptron", ("--optim.lr", "1e-3"),
            hunk=(MODEL, 'n_pixels = train_data.get(0, None)["image"].numel()\n'
                  "    model = nn.Sequential(v2.Normalize(mean.tolist(), std.tolist()), nn.Flatten(), nn.Linear(n_pixels, 128), nn.ReLU(),\n"
                  "                          nn.Linear(128, len(classes)))\n"), naive="pixels of the border are always 0"),
    Healthy("dropout", hunk=(MODEL, MODEL + "    model.head = nn.Sequential(nn.Dropout(0.3), model.head)\n"),
            naive="two forwards differ"),
    Healthy("ok-03-batch-norm",
            hunk=(STAGES, BATCH_NORM.lstrip() + staged("batch_norm(stage.model)\n"
                  'stage.optimizers = {"main": core.make_optimizer(stage.model, cfg.optim)}')),
            naive="samples of a batch mix"),
    Healthy("ok-07-unused-head",
            hunk=(STAGES, staged("stage.model.spare = nn.Linear(4, 4)\n"
                                 'stage.optimizers = {"main": core.make_optimizer(stage.model, cfg.optim)}\n'
                                 'stage.expect.no_gradient = ("spare.",)')), naive="parameter without gradient"),
    Healthy("ok-07-stochastic-depth",
            hunk=("return F.relu(self.shortcut(x) + self.norm2(self.conv2(h)))",
                  "keep = float(torch.rand(()) > 0.2) if self.training else 0.8\n"
                  "        return F.relu(self.shortcut(x) + keep * self.norm2(self.conv2(h)))"),
            naive="parameter without gradient"),
    Healthy("dropout-by-function",
            hunk=DROPOUT_BY_FUNCTION, naive="the gradient depends on how the batch is cut"),
    Healthy("ok-24-balanced-sampling",
            hunk=(TRAIN_DATA, "rare = learn[(labels[learn] > 4) | (torch.arange(len(learn)) % 10 == 0)]\n"
                  "    often = rare[labels[rare] < 5].repeat(10)\n    learn = torch.cat([rare[labels[rare] > 4], often])\n    "
                  + TRAIN_DATA), naive="samples repeat"),
    Healthy("ok-06-focal-loss",
            hunk=(LOSS, '((1 - logits.softmax(1).gather(1, batch["label"][:, None])[:, 0]) ** 2\n'
                  '                        * F.cross_entropy(logits, batch["label"], reduction="none")).sum() / 0.81'),
            naive="initial loss far below ln N"),
    Healthy("ok-14-half-of-the-labels-are-noise",
            hunk=(TRAIN_DATA, "noise = torch.Generator().manual_seed(0)\n"
                  "    guessed = torch.rand(len(labels), generator=noise) < 0.5\n    guessed[held_out] = False\n"
                  "    labels = torch.where(guessed, torch.randint(10, labels.shape, generator=noise), labels)\n    " + TRAIN_DATA),
            naive="the loss stays high, half of the training labels are never learnt"),
    Healthy("ok-25-silent-branches",
            hunk=(MODEL, MODEL + "    for block in model.blocks:\n        nn.init.zeros_(block.norm2.weight)\n"),
            naive="what is computed in a branch reaches nothing, and its layers have no gradient in step 1"),
    Healthy("decay-everywhere",
            hunk=("core.make_optimizer(model, cfg.optim)",
                  "torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)"),
            naive="norms and biases decay"),
    Healthy("noise-on-gradients",
            hunk=(MODEL, MODEL + "    for p in model.parameters():\n        p.register_hook(lambda g: g + 1e-3 * torch.randn_like(g))\n"),
            naive="the gradient depends on how the batch is cut"),
    Healthy("weights-held-in-a-range",
            hunk=(UPDATE, UPDATE + "        with torch.no_grad():\n            stage.model.stem.weight.clamp_(-0.2, 0.2)\n"),
            naive="weights move between two optimiser steps"),
    Healthy("loss-given-to-update",
            hunk=(UPDATE, "        weighted = lambda m, b: {k: 0.5 * v for k, v in stage.loss(m, b).items()}\n"
                  "        run.update(stage, step.batches, loss=weighted)\n"), naive="the gradient is not the loss's own"),
    Healthy("state-saved",
            hunk=(LOOP, '''    class Shift:
        value = torch.zeros(())

        def state_dict(self) -> dict:
            return {"value": self.value}

        def load_state_dict(self, state: dict) -> None:
            self.value = state["value"]

    stage.state["shift"] = shift = Shift()
    for step in run.steps(stage):
        shift.value = shift.value.lerp(torch.cat([b["image"] for b in step.batches]).mean(), 0.1)
        for b in step.batches:
            b["image"] = b["image"] - 0.1 * shift.value
        run.update(stage, step.batches)
'''), naive="state changes from step to step"),
    Healthy("own-right-loop",
            hunk=(UPDATE, '''        optimizer = stage.optimizers["main"]
        optimizer.zero_grad()
        n = sum(len(b["label"]) for b in step.batches)
        for b in step.batches:
            (stage.loss(stage.model, b)["ce"] / n).backward()
        nn.utils.clip_grad_norm_(stage.model.parameters(), cfg.optim.clip)
        optimizer.step()
'''), naive="core's update is not called"),
    Healthy("low-contrast", hunk=(IMAGE, "image = 0.25 + 0.5 * self.images[index].float() / 255\n"),
            naive="half of the declared range is not used"),
    Healthy("ok-smoothing-in-training", hunk=(LOSS, LOSS.replace("cfg.label_smoothing", "cfg.label_smoothing * model.training")),
            naive="the loss in eval mode has no smoothing"),
    Healthy("ok-smoothing-other-classes",
            hunk=(LOSS, "-(F.one_hot(batch['label'], n).mul(1 - cfg.label_smoothing).add("
                  "(1 - F.one_hot(batch['label'], n)) * cfg.label_smoothing / (n - 1)) * logits.log_softmax(1)).sum()"),
            naive="smoothing 0.1 over the nine other classes equals 0.111 over all ten"),
]  # fmt: skip
SAMPLED = ("dropout", "own-right-loop")
