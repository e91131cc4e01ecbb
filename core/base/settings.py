"""The settings that every recipe has. The docstring of a field is its help text."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainworthy.core.base.errors import UserError


@dataclass
class Train:
    """Length of the training, and how the global batch is divided."""

    epochs: float = 10.0
    """Passes over the training set; fractions are fine."""
    batch_size: int = 64
    """Samples per optimiser step, over ALL processes and micro-batches. The result does not depend on the division."""
    max_steps: int = 0
    """Train at most this many steps in each stage; the schedule fits them. 0: no limit. `--max-steps` is short for it. A step
    is an update on one batch. Where a recipe makes its own samples, it is an iteration: samples, and all updates on them."""
    accumulate: int = 1
    """Micro-batches into which each process divides its part of the batch (less memory, same gradient)."""
    eval_every: float = 1.0
    """Epochs between two evaluations. The last step is always evaluated."""
    patience: float = 0.0
    """End the run after this many epochs without a new best evaluation; 0: never. To keep the best weights without
    stopping early, use `--run.export best`."""
    eval_batch_size: int = 256
    """Samples per forward in evaluations. A gate checks that no metric depends on it."""
    precision: Literal["launcher", "fp32", "bf16", "fp16"] = "launcher"
    """Autocast type of the forward. `launcher` takes the value of `accelerate launch --mixed_precision`, or fp32."""
    gradient_checkpointing: bool = False
    """Compute the activations of each block again in the backward pass instead of keeping them: less memory, the same
    gradient, about a third more time. Recipes without blocks refuse it."""
    compile: bool = False
    """Run the loss through torch.compile in the full run. Gates run uncompiled, since each would spend minutes on
    compiling."""


@dataclass
class Optim:
    """Optimiser and schedule. Schedules count optimiser steps."""

    name: Literal["adamw", "adamw8bit", "sgd", "adafactor", "muon"] = "adamw"
    """AdamW; AdamW of bitsandbytes, whose moments have 8 bits (tensors below 4,096 numbers: 32); SGD with Nesterov
    momentum; Adafactor (least memory); Muon for matrices of numbered layers and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 1e-4
    """Decoupled weight decay; not applied to norm layers and biases."""
    layer_decay: float = 1.0
    """Layer-wise learning rate decay: each layer's rate is this factor times the rate of the layer above (fine-tuning:
    0.65-0.9). 1: the same rate everywhere."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    momentum: float = 0.9
    """Nesterov momentum of SGD."""
    clip: float = 1.0
    """Maximum global gradient norm. The logged norm is the one before clipping. `inf` disables clipping."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Learning rate after the warmup: cosine, warmup-stable-decay, linear, or constant. The first three fall to zero, or to
    --optim.min-lr-ratio."""
    warmup: float = 0.06
    """Fraction of all steps in linear warmup (from scratch 0.05-0.10, fine-tuning 0.02-0.05)."""
    decay: float = 0.2
    """Fraction of all steps in which `wsd` decays."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of the schedule, as a share of the peak (pretraining of language models: often 0.1)."""


@dataclass
class Phase:
    """Settings of one of several stages. A setting left out (None) takes the value of --train.*, --optim.* or
    --run.*."""

    epochs: float | None = None
    """--train.epochs of this stage; 0 skips the stage."""
    batch_size: int | None = None
    """--train.batch-size of this stage."""
    accumulate: int | None = None
    """--train.accumulate of this stage."""
    eval_every: float | None = None
    """--train.eval-every of this stage."""
    eval_batch_size: int | None = None
    """--train.eval-batch-size of this stage."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """--train.precision of this stage."""
    lr: float | None = None
    """--optim.lr of this stage."""
    weight_decay: float | None = None
    """--optim.weight-decay of this stage."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] | None = None
    """--optim.schedule of this stage."""
    warmup: float | None = None
    """--optim.warmup of this stage."""
    save_every: float | None = None
    """--run.save-every of this stage."""
    hand_on: Literal["final", "best"] = "final"
    """Weights from which the next stage starts: those of the last step, or of the best evaluation."""


@dataclass
class Loader:
    """How data are read. These settings change the speed, never the samples."""

    workers: int = 0
    """Worker processes; 0 reads in the training process (fastest for data in memory)."""
    eval_workers: int = 0
    """Worker processes in evaluations; useful if reading a sample takes longer than its forward (image files)."""
    pin_memory: bool = True
    """Page-locked host memory for faster copies; used with an accelerator only."""
    prefetch: int = 4
    """Batches that each worker keeps ready."""
    threads: int = 0
    """Threads that read files ahead in the training process when `workers` is 0. They help with a slow disk or a
    network, for data sets that implement `Data.read`."""
    window: int = 64
    """Samples that the threads may hold at once, read or being read. It bounds their memory."""

    def __post_init__(self):
        if self.threads and self.window < self.threads:
            raise UserError("--loader.window holds fewer samples than there are threads to read them", got=self.window,
                            needed=f"{self.threads} or more")  # fmt: skip


@dataclass
class RunSettings:
    """Seed, output files and safety limits."""

    seed: int = 0
    """Seed of every random draw."""
    threads: int = 0
    """CPU threads of torch; 0: torch's default. Results repeat bitwise only with the same number of threads."""
    shard: Literal["full", "grad", "none"] = "none"
    """What is divided over several processes (`-n 2`) with FSDP2; the result stays the same. `full`: parameters,
    gradients and optimiser state; `grad`: gradients and optimiser state, while parameters are whole from the forward
    to the backward pass; `none`: nothing (DDP). `--shard` is short for it."""
    out: Path = Path("runs")
    """Folder that will hold the run's folder."""
    save_every: float = 1.0
    """Epochs between two full checkpoints. The end of the run always saves one."""
    save_steps: int = 0
    """Also save every this many optimiser steps; 0: off."""
    save_minutes: float = 0.0
    """Also save when the last checkpoint is this many minutes old; 0: off."""
    keep_checkpoints: int = 2
    """Number of complete checkpoints to keep (at least 2, so that one good checkpoint always remains)."""
    keep_every: int = 0
    """Also keep, for good, the first checkpoint in every this many steps; 0: none."""
    keep_best: int = 3
    """Number of best evaluations whose weights are kept (weights only)."""
    export: Literal["final", "best"] = "final"
    """Weights to export and report. `best` is chosen on the validation set, `final` is not."""
    max_nonfinite_steps: int = 10
    """Stop with exit code 4 after this many consecutive steps with a NaN or infinite loss or gradient."""
    stop_outside_band: bool = False
    """Stop with exit code 4 if the metric falls clearly behind the recipe's healthy runs (for a fork: those of its
    original)."""
    check_memory: bool = True
    """Refuse to start (exit code 2) if weights, gradients and the optimiser's state alone exceed the device's memory."""
    tensorboard: bool = True
    """Write TensorBoard files to tb/."""
    log_every: int = 10
    """Steps whose metrics are read back together (on an accelerator: one synchronisation). A single process with slow
    steps reads every five seconds."""


@dataclass
class GateSettings:
    """Which gates must pass before the full run."""

    enabled: bool = True
    """Run the gates. Switch off for debugging only; the card shows it."""
    waive: tuple[str, ...] = ()
    """Ids of gates whose failure you accept; needs --gates.because."""
    because: str = ""
    """Reason for the waiver; the report and the card show it."""
    remember: bool = True
    """Reuse passed gates of an identical recipe, data set and environment instead of running them again."""
    jobs: int = 1
    """Processes that run the gates in parallel, each on an accelerator or share of the cores of its own, with its own copy of the model. With
    `-n`, the processes of the training count as one: they run the gates that compare them, and the others take the rest."""


@dataclass
class Config:
    """Settings that every recipe has. A recipe's own Config adds fields."""

    SEARCH_RANGES = "optim.weight_decay=1e-4:0.3 optim.warmup=0:0.2 optim.clip=0.1:10"
    """Ranges of `trainworthy sweep --nuisance NAME` without a range. Those of a recipe's Config are added to these."""
    train: Train = field(default_factory=Train)
    optim: Optim = field(default_factory=Optim)
    loader: Loader = field(default_factory=Loader)
    run: RunSettings = field(default_factory=RunSettings)
    gates: GateSettings = field(default_factory=GateSettings)
    init_from: str | None = None
    """Start from these weights (a .safetensors file, a run folder, a folder with model.safetensors), with a fresh
    optimiser and schedule. Defaults change: --optim.lr is a seventh of the preset's, --optim.warmup is 0.03."""
    trust_pickle: bool = False
    """Allow --init-from to open a .pt, .pth or .bin file. Opening a pickle can run arbitrary code."""
    track: str = ""
    """Also log to these trackers: wandb, mlflow, trackio (separate several with commas)."""
