"""Gates of class-conditional diffusion: the sampler inverts the training target (DF4), EMA (DF2), dropped classes (DF5), weight and
frequency of timesteps (DF7), two samplers agree (DF6); and monitors of sample quality (DF1, DF6).

The gates measure the objective from the loss itself. They pass the output of a constant net to the loss and take its gradient at two
constants. The loss is quadratic, so the gradient's zero is the target at that timestep, and its slope is the weight. The declaration to
compare with is `cfg.noise` (`weights`, `below`); the inverse is the exported scheduler, of a diffusion or a flow.
"""

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, Proof, fetch, pick
from trainworthy.core.loop.run import Plan, Run, evaluating
from trainworthy.core.monitoring.monitors import monitor
from trainworthy.core.recipe.stage import Data, Stage, View
from trainworthy.recipes.diffusion.gates import walks

LEVELS = 512  # training samples whose timesteps represent the schedule
EXACT = 0.02  # rms error of a picture in [-1, 1] recovered in one step
WALKED = 0.05  # the same along the trajectory of an exported pipeline, at levels between those that were measured
LEFT = 0.1  # signal left at the noisiest level: cosine 0%, linear with 1,000 steps 0.6%, Stable Diffusion 6.8%, linear with 250 steps 28%
UPDATES = 2000  # most EMA updates that are simulated to see where the decay's ramp ends; a twentieth for nets larger than SMALL
SMALL = 5_000_000  # parameters
REMEMBERED = 15  # an EMA must average over 1/15 of its updates; the ramp (1 + n) / (10 + n) averages over 1/9, diffusers' ramps over more
EDGE = 16  # levels
FEW = 4  # samples drawn from an exported pipeline
MANY = 64  # most captions whose picture the answering net knows; there may be as many captions as pictures
KNOWN = 200  # real pictures that the classifier is evaluated on
SHORT = 60  # training steps after which a net denoises a little
DRAWN = 2.5  # limit of the largest distance between distribution functions times sqrt(n): exceeded by chance 7 times in a million
EARLY = 0.05  # rms between two samplers after SHORT steps: 0.015 healthy, 0.133 with clipping at guidance 2
LATE = 0.25  # the same at the end of a run
BRIGHT = 0.06  # difference of means, pictures in [-1, 1]
RICH = 0.1  # difference of standard deviations
INHERITED = (
    "an option that the sampler inherits from the training scheduler (clip_sample clips the picture but keeps the noise of the "
    "unclipped one)\none of them takes too few steps\na scheduler for another objective"
)


class Constant(nn.Module):
    """A net that returns one number everywhere, and keeps its inputs."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def forward(self, sample: Tensor, timestep: Tensor, class_labels: Tensor | None = None) -> SimpleNamespace:
        self.output = torch.full_like(sample, self.value, requires_grad=True)
        self.noisy, self.timestep = sample.detach(), torch.as_tensor(timestep, device=sample.device).expand(len(sample))
        return SimpleNamespace(sample=self.output)


@dataclass
class Objective:
    """The training target and its weight, per sample, as measured from the loss."""

    batch: dict
    clean: Tensor
    """(B, C, H, W) pictures or latents before noise."""
    noisy: Tensor
    """(B, C, H, W) the net's input."""
    timestep: Tensor
    """(B,) the timestep that the net got."""
    target: Tensor
    """(B, C, H, W) the prediction at which the gradient is zero."""
    weight: Tensor
    """(B,) loss per mean square error of 1."""
    alpha: Tensor
    sigma: Tensor
    """(B,) noisy = alpha image + sigma noise, as fitted."""
    of_image: Tensor
    of_noise: Tensor
    """(B,) target = of_image image + of_noise noise, as fitted."""

    @property
    def kind(self) -> str:
        """Name of the target, or its shares of picture and noise if it has none."""
        known = {
            "noise": (0.0, 1.0),
            "velocity": (-self.sigma, self.alpha),  # Salimans & Ho 2022
            "flow": (-1.0, 1.0),
            "picture": (1.0, 0.0),
        }
        miss = {
            k: ((self.of_image - x).abs() + (self.of_noise - e).abs()).median().item() for k, (x, e) in known.items()
        }
        kind = min(miss, key=miss.get)
        shares = f"{self.of_image.median():.2g} picture {self.of_noise.median():+.2g} noise"
        return kind if miss[kind] < 0.1 else shares


def clean_key(data: Data) -> str:
    """Return the field that noise is added to."""
    return data.process.clean_key


def asked_for(data: Data) -> tuple[str, int]:
    """Return (field of the condition, number of its values): classes or captions."""
    key = data.process.asked
    return key, len(data.fields[key].classes) if key in data.fields else data.null


def objective(proof: Proof) -> Objective:
    """Measure the objective from the loss, on samples of the training path."""

    def read() -> Objective:
        run, stage = proof.build(Plan(steps=1))
        data = stage.data["train"]
        batch = fetch(data, pick(data, min(LEVELS, len(data)), proof.cfg.run.seed), proof.cfg.run.seed, run.device)
        slopes = []
        for value in (0.0, 1.0):
            net = Constant(value)
            total = sum(stage.loss(net, batch).values())
            slopes.append(torch.autograd.grad(total, net.output)[0])
        steep = slopes[1] - slopes[0]
        target = torch.where(steep > 0, -slopes[0] / steep, 0.0)
        weight = steep.flatten(1).mean(1) * steep[0].numel() / 2
        clean = batch[clean_key(data)]
        basis = torch.stack([clean.flatten(1), batch["noise"].flatten(1)], 2).double()  # (B, CHW, 2)

        def fitted(y: Tensor) -> tuple[Tensor, Tensor]:
            return torch.linalg.lstsq(basis, y.flatten(1)[..., None].double()).solution[..., 0].unbind(1)

        return Objective(batch, clean, net.noisy, net.timestep, target, weight, *fitted(net.noisy), *fitted(target))

    return proof.once("diffusion objective", read)


class Knowing(nn.Module):
    """A net that returns the exact answer: one picture for each of `classes` (default: all, in order), and their mean for any other
    condition. Its prediction type is that of the measured objective."""

    def __init__(self, asked: Objective, pictures: Tensor, classes: list[int] | None = None):
        super().__init__()
        order = asked.timestep.argsort()
        self.at = asked.timestep[order].double()
        self.curves = torch.stack([asked.alpha, asked.sigma, asked.of_image, asked.of_noise])[:, order]
        self.pictures = torch.cat([pictures, pictures.mean(0, keepdim=True)])
        self.row = {c: i for i, c in enumerate(classes if classes is not None else range(len(pictures)))}
        self.met: set[float] = set()
        """Timesteps at which it was called."""
        self.alpha = 1.0
        """Signal level at the last timestep."""

    def forward(self, sample: Tensor, timestep: Tensor, class_labels: Tensor) -> SimpleNamespace:
        t = timestep.double()
        self.met.update(t.tolist())
        right = torch.searchsorted(self.at, t).clamp(1, len(self.at) - 1)
        left = right - 1
        # Beyond the measured levels, extrapolate from the EDGE nearest ones: samplers begin and end there.
        left = torch.where(t > self.at[-1], max(0, len(self.at) - EDGE), left)
        right = torch.where(t < self.at[0], min(EDGE, len(self.at) - 1), right)
        share = ((t - self.at[left]) / (self.at[right] - self.at[left]).clamp_min(1e-9)).clamp(
            -4, 5
        )  # equal levels: no slope
        level = torch.lerp(self.curves[:, left], self.curves[:, right], share).float()[..., None, None, None]
        alpha, sigma, of_image, of_noise = level.unbind(0)
        sigma = torch.where(sigma.abs() < 1e-3, 1e-3, sigma)
        self.alpha = alpha.abs().median().item()
        picture = self.pictures[[self.row.get(c, len(self.row)) for c in class_labels.tolist()]]
        return SimpleNamespace(sample=of_image * picture + of_noise * (sample - alpha * picture) / sigma)


def undone(scheduler, prediction: Tensor, t: float, noisy: Tensor) -> Tensor:
    """Return the clean picture (C, H, W) that one step of an exported scheduler implies at timestep t. For a flow it is where the step
    would end if it continued in a straight line to zero noise."""
    if not scheduler.timesteps.is_floating_point():
        scheduler.set_timesteps(scheduler.config.num_train_timesteps)
        t = min(max(int(t), 0), scheduler.config.num_train_timesteps - 1)
        return scheduler.step(prediction[None], t, noisy[None]).pred_original_sample[0]
    scheduler.set_timesteps(1000)
    i = scheduler.timesteps.sub(t).abs().flip(0).argmin()  # Heun lists each timestep twice; a step starts at the second
    i = len(scheduler.timesteps) - 1 - int(i)
    scheduler.set_begin_index(i)
    moved = scheduler.step(prediction[None], scheduler.timesteps[i], noisy[None]).prev_sample[0] - noisy
    level, after = scheduler.sigmas[i : i + 2].tolist()
    return noisy + moved * level / (level - after)


def walk(asked: Objective, folder: Path, val: Data, ones: dict, ask: walks.Ask, steps: int) -> walks.Walk | None:
    """Return the trajectory of the exported pipeline in `folder` with answering nets, or None if it cannot be called with them."""
    pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True).to(asked.clean.device)
    key = clean_key(val)
    each = [{k: v[i : i + 1] for k, v in ones.items()} for i in range(min(FEW, len(ones[key])))]
    try:
        return walks.walked(pipe, [Knowing(asked, one[key], []) for one in each], each, key, ask, steps)
    except (TypeError, KeyError, AttributeError):  # a fork's pipeline with another signature
        return None


def noise_process(judge: Callable[[Tensor], tuple[Tensor, Tensor]] | None, ask: walks.Ask = walks.by_class) -> Gate:
    """Return the gate that compares training target and sampler.

    `judge` classifies pictures, and tells which share of the clean ones can be recognised at all. With None, samples are not classified
    and the evaluation is one step of denoising. `ask` calls the exported pipeline."""

    @gate(
        "noise-process",
        rows="DF4",
        title="sampling inverts the training target at every noise level",
        reads="data model loss counts evaluate export train",
        explains=True,
    )
    def prove(proof: Proof) -> Finding:
        """Measures the training target at 512 noise levels and checks that sampling inverts it:

        - One step of the exported scheduler from the target must return the clean picture.
        - The evaluation of a net that knows one picture per class must show these pictures.
        - Every step of the exported pipeline with such a net must imply its picture, at timesteps that the evaluation uses, too. If the
          pipeline can be run, this replaces the first check: a recipe may use another convention (time reversed) consistently.
        - The noisiest level must be nearly pure noise, because sampling begins there.
        - train() must draw a timestep for each sample, over the whole schedule."""
        asked, run, stage = objective(proof), *proof.build(Plan(steps=1))
        with tempfile.TemporaryDirectory() as name:
            stage.export(Path(name))
            shipped = DiffusionPipeline.from_pretrained(name, trust_remote_code=True).scheduler
            val, steps = stage.data["val"], proof.cfg.sampling.steps
            few = fetch(val, pick(val, min(FEW, len(val)), proof.cfg.run.seed), None, run.device)
            way = walk(asked, Path(name), val, few, ask, steps)
        stage.model.to(run.device)
        total, t = shipped.config.num_train_timesteps, asked.timestep.tolist()
        wrong = [
            undone(shipped, p, i, x).sub(clean).square().mean().sqrt().item()
            for p, i, x, clean in zip(asked.target.cpu(), t, asked.noisy.cpu(), asked.clean.cpu(), strict=True)
        ]
        worst = max(range(len(wrong)), key=wrong.__getitem__)
        key, n = asked_for(val)
        n = min(n, MANY)
        first = {int(val.peek(i, key)): i for i in reversed(pick(val, min(4 * n, len(val)), proof.cfg.run.seed))}
        classes = sorted(first)
        ones = fetch(val, [first[c] for c in classes], None, run.device)
        one = ones[clean_key(val)]
        knowing = Knowing(asked, one, classes)
        with evaluating(stage.model):
            each = (
                proof.cfg.sampling.every
            )  # the evaluation samples for every `each`-th: repeat, so that two of each class remain
            some = [i for i in pick(val, min(2 * n, len(val)), proof.cfg.run.seed) for _ in range(each)]
            some = [i for i in some if int(val.peek(i, key)) in first]
            known = stage.evaluate(knowing, View(val, some))[stage.metric.name]
        shipped.set_timesteps(steps)
        met, left = torch.tensor(sorted(knowing.met)), walks.left_over(shipped)
        strays = sum((met - i).abs().min().item() > 1e-3 for i in (way.met if way else shipped.timesteps.tolist()))
        undoes = way.worst <= WALKED and way.end <= WALKED if way else wrong[worst] <= EXACT
        seen = watched(proof)
        spread = torch.histc(seen.timesteps, bins=4, min=0, max=total) / len(seen.timesteps)
        below = val.process.noise.below(torch.arange(1, 4) * total / 4)
        declared = torch.cat([below.new_zeros(1), below, below.new_ones(1)]).diff()
        alone, spread_ok = seen.distinct >= 0.5, (spread >= 0.4 * declared).all() and seen.timesteps.max() <= total
        middle = one.mean(0)  # guidance leads from the mean to the picture and, at a scale above 1, beyond it
        ends = middle + proof.cfg.sampling.guidance_scale * (one - middle)
        recognised = (judge(ends)[0] == ones["label"]).double().mean().item() if judge else 1.0
        along = f"; along the exported pipeline's trajectory {way.worst:.1e}, at its end {way.end:.1e}" if way else ""
        floor = 0.75 * stage.metric.ceiling * recognised
        return Finding(
            undoes and known >= floor and not strays and alone and bool(spread_ok) and left <= LEFT,
            f"target: {asked.kind}, inverted in one step by {type(shipped).__name__} to an rms error of at most {wrong[worst]:.1e} "
            f"(t {t[worst]:.0f}){along}; its noisiest level keeps {left:.1%} of the signal; "
            f"samples of a net that knows the answer: {stage.metric.name} {known:.2f} "
            f"(of the pictures it knows: {recognised:.2f}); the evaluation does not use {strays} of the export's timesteps; "
            f"{seen.distinct:.0%} of a batch's timesteps differ, "
            f"{' '.join(f'{s:.0%}' for s in spread.tolist())} in each quarter of {total}",
            f"rms at most {WALKED:g} along the exported pipeline's trajectory (if it cannot be run, {EXACT:g} at every level); at "
            f"most {LEFT:.0%} of the signal left where sampling begins; {stage.metric.name} at least {floor:.2f}; the same scheduler "
            "in evaluation and export; a timestep for each sample, at least "
            f"{' '.join(f'{0.4 * s:.0%}' for s in declared.tolist())} in each quarter of the sampler's schedule",
            "the sampler is not built from the training scheduler's config: another schedule, shift, number of timesteps or "
            "prediction type\n"
            "the target has another sign or form than the scheduler inverts\n"
            "the net gets another timestep in training than in sampling: another scale, or time reversed\n"
            "one timestep for the whole batch, or a constant\n"
            "the noisiest level is not pure noise, but sampling begins there: --noise.schedule and --noise.timesteps belong together "
            "(linear needs 1,000 timesteps)",
            evidence={"kind": asked.kind, "levels": t, "rms": wrong, "known": known, "quarters": spread.tolist(), "left": left,
                      "walk": way and {"worst": way.worst, "end": way.end, "met": sorted(way.met)}},
        )  # fmt: skip

    return prove


@dataclass
class Seen:
    """The net's inputs in a few steps of train()."""

    timesteps: Tensor = field(default_factory=lambda: torch.zeros(0))
    hidden: list[bool] = field(default_factory=list)
    """For each sample: does the net get another class than the sample's?"""
    null: set[int] = field(default_factory=set)
    """The values that it gets instead."""
    distinct: float = 1.0
    """Number of different timesteps in a batch over its size, at the worst step."""


def _flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in net.parameters()])


def _decay(before: Tensor, raw: Tensor, now: Tensor) -> tuple[float, float]:
    """Return (the decay between two averages, relative distance of the new one from the line between the old one and the weights)."""
    gap = before - raw
    decay = ((now - raw) @ gap / (gap @ gap).clamp_min(1e-30)).item()
    return decay, ((now - raw - decay * gap).norm() / gap.norm().clamp_min(1e-30)).item()


def _memory(stage: Stage, updates: int) -> float | None:
    """Return the decay of the last of `updates` updates by the EMA object in `stage.state`, or None if there is no such object. One
    weight changes before each update, so that the decay can be measured."""
    keeper = next(
        (o for o in stage.state.values() if getattr(o, "model", None) is stage.ema_model and hasattr(o, "update")), None
    )
    if keeper is None:
        return None
    some = next(p for p in stage.model.parameters() if p.is_floating_point())
    for i in range(updates):
        with torch.no_grad():
            some.add_((-1.0) ** i)
        before = _flat(stage.ema_model) if i == updates - 1 else None
        keeper.update(stage.model)
    return _decay(before, _flat(stage.model), _flat(stage.ema_model))[0]


def watched(proof: Proof) -> Seen:
    """Return the net's inputs in a short run of train()."""
    return trained(proof)[2]


def trained(proof: Proof) -> tuple[Run, Stage, Seen]:
    """Run train() for SHORT steps; return (run, stage, the net's inputs)."""

    def rehearse() -> tuple[Run, Stage, Seen]:
        run, stage = proof.build(Plan(steps=SHORT, batch_size=max(32, proof.accelerator.num_processes)))
        own, seen, key = stage.loss, Seen(), asked_for(stage.data["train"])[0]

        def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
            def note(_: nn.Module, args: tuple, kwargs: dict) -> None:
                t = kwargs.get("timestep", args[1] if len(args) > 1 else None)
                given = kwargs.get("class_labels", args[2] if len(args) > 2 else None)
                t = torch.as_tensor(t).expand(len(batch[key])).cpu()
                seen.timesteps = torch.cat([seen.timesteps, t.float()])
                if len(t) >= 8:
                    seen.distinct = min(seen.distinct, len(t.unique()) / len(t))
                if given is not None:
                    other = (given != batch[key]).tolist()
                    seen.hidden += other
                    seen.null |= {c for c, o in zip(given.tolist(), other, strict=True) if o}

            hook = stage.model.register_forward_pre_hook(note, with_kwargs=True)
            try:
                return own(model, batch)
            finally:
                hook.remove()

        stage.loss = loss
        proof.train(proof.cfg, run, stage)
        stage.loss = own
        return run, stage, seen

    return proof.once("diffusion short run", rehearse)


@gate(
    "hidden-class",
    rows="DF5",
    title="the class is dropped at the declared rate, and the net denoises without it",
    reads="data model loss counts optimizers train",
)
def hidden_class(proof: Proof) -> Finding:
    """Counts how often the net gets another class than the sample's in sixty steps of train(), and which value replaces it. Then it
    compares that net's loss and predictions with the class and without it."""
    cfg = proof.cfg
    run, stage, seen = trained(proof)
    if cfg.drop == 0 and cfg.sampling.guidance_scale == 1:
        raise Skip("no class dropout and no guidance: --drop 0 --sampling.guidance-scale 1")
    share, n = sum(seen.hidden) / max(1, len(seen.hidden)), max(1, len(seen.hidden))
    slack = 4 * math.sqrt(max(cfg.drop * (1 - cfg.drop), 0.01) / n)
    data = stage.data["val"]
    batch = fetch(data, pick(data, min(128, len(data)), cfg.run.seed), None, run.device)
    key, classes = asked_for(data)
    null = next(iter(seen.null), classes)
    losses, predictions = [], []
    with evaluating(stage.model), run.autocast():
        for condition in (batch[key], torch.full_like(batch[key], null)):
            predictions.append(stage.model(batch["noisy"], batch["timestep"], condition).sample.float())
            total = sum(stage.loss(stage.model, {**batch, "condition": condition}).values())
            losses.append(total.item() / len(condition))
    apart = ((predictions[0] - predictions[1]).norm() / predictions[0].norm().clamp_min(1e-9)).item()
    enough = 0.7 * data.process.initial_loss(batch)
    instead = " ".join(map(str, sorted(seen.null)[:5])) or "nothing"
    hidden = share > 0 and abs(share - cfg.drop) <= slack and len(seen.null) == 1 and null >= classes
    return Finding(
        hidden and apart > 1e-3 and losses[1] <= enough,
        f"the class is dropped in {share:.1%} of {n:,} samples (value instead: {instead}); after {SHORT} steps the loss is "
        f"{losses[0]:.3f} with the class and {losses[1]:.3f} without; the predictions differ by {apart:.1%}",
        f"dropped in {cfg.drop:.0%} +- {slack:.1%}, always replaced by the same value, which is no class; a loss below {enough:.3f} "
        "without it; different predictions",
        "the drop mask is drawn but not applied to the net's input\n"
        "the class never reaches the net\nthe null class is a real class",
        evidence={"hidden": share, "null": sorted(seen.null), "with": losses[0], "without": losses[1], "apart": apart},
    )  # fmt: skip


def _raw(proof: Proof, run: Run, stage: Stage) -> Finding:
    """Without an EMA: the export after six steps of train() must be the trained net."""
    proof.train(proof.cfg, run, stage)
    with tempfile.TemporaryDirectory() as name:
        stage.export(Path(name))
        shipped = _flat(DiffusionPipeline.from_pretrained(name, trust_remote_code=True).unet)
    own = _flat(getattr(stage.eval_model, "unet", stage.eval_model)).cpu()
    if len(own) != len(shipped):
        raise Skip("no EMA (--ema 0), and the export has other tensors: adapters were merged")
    differs = (shipped - own).abs().max().item()
    return Finding(
        differs <= 1e-6, f"no EMA (--ema 0); exported weights differ from the trained ones by at most {differs:.2g}",
        "at most 1e-6", "export() writes another net: a newly built one, or a copy from before training",
        evidence={"exported_differs": differs},
    )  # fmt: skip


@gate(
    "average",
    rows="DF2",
    title="samples and export use an EMA of the weights with the declared decay",
    reads="model evaluate optimizers ema_model state export train",
)
def average(proof: Proof) -> Finding:
    """Measures the EMA's decay at each of six steps of train(); a ramp must advance. Then it makes as many updates as the run will (at
    most 2,000): by then the EMA must average over 1/15 of the run, or over as much as --ema allows. Finally it changes the raw weights:
    evaluation and export must not change."""
    cfg, steps = proof.cfg, []
    run, stage = proof.build(Plan(steps=6, batch_size=max(8, proof.accelerator.num_processes), peak=True))
    if stage.ema_model is None:
        return _raw(proof, run, stage)

    def watch(stage: Stage, _step: int) -> bool:
        steps.append((_flat(stage.model), _flat(stage.ema_model)))
        return False

    before = _flat(stage.ema_model)
    run.plan.watch = watch
    proof.train(cfg, run, stage)
    decays, off = [], 0.0
    for raw, now in steps:
        decay, beside = _decay(before, raw, now)
        off = max(off, beside)
        decays.append(decay)
        before = now
    view = View(stage.data["val"], pick(stage.data["val"], 16, cfg.run.seed))
    first = run.measure(stage, view)
    with torch.no_grad():
        for p in stage.model.parameters():
            p.add_(1.0)
    moved = [k for k, v in run.measure(stage, view).items() if v != first[k] and v == v]
    with tempfile.TemporaryDirectory() as name:
        stage.export(Path(name))
        shipped = _flat(DiffusionPipeline.from_pretrained(name, trust_remote_code=True).unet)
    differs = (shipped - before.cpu()).abs().max().item()
    wrong = []
    if any(d >= 1 for d in decays) or off > 1e-2:
        late = next((i + 1 for i, d in enumerate(decays) if d >= 1), None)
        wrong.append(
            f"the average is not updated at step {late}"
            if late
            else "the new average is not between the old one and the weights"
        )
    elif not all(0 <= d <= cfg.ema + 1e-3 for d in decays):
        wrong.append("the decay is not the one of --ema")
    elif decays[0] < cfg.ema - 1e-3 and decays[-1] <= decays[0] + 1e-3:
        wrong.append(
            f"the decay stays at {decays[-1]:.2f}: its ramp does not advance, so the average is almost the newest weights"
        )
    updates = max(
        6, min(Run(cfg, proof.accelerator).total_steps(stage), UPDATES if before.numel() < SMALL else UPDATES // 20)
    )
    late, due = _memory(stage, updates), max(0.0, 1 - max(1 - cfg.ema, REMEMBERED / updates))
    if late is not None and not wrong and late < due - 1e-3:
        wrong.append(f"after {updates:,} updates, as many as the run makes, the decay is {late:.4f}, below {due:.4f}")
    if moved:
        wrong.append(f"the evaluation uses the raw weights ({moved[0]} changed with them)")
    if differs > 1e-6:
        wrong.append(f"the exported weights are not the average (largest difference {differs:.2g})")
    lag = f"decays {' '.join(f'{d:.2f}' for d in decays)} over six steps"
    lag += "" if late is None else f", {late:.4f} after {updates:,} updates"
    return Finding(
        not wrong, f"{'; '.join(wrong)}; {lag}" if wrong else f"{lag}; evaluation and export use the average",
        f"each average between the last one and the weights, with a decay of at most {cfg.ema:g}, at the end of the ramp at least "
        f"{due:.4f}; the average is evaluated and exported",
        "the EMA update is missing in train(), or comes before the optimiser's step\n"
        "the decay's ramp restarts at every update, or stops below --ema: the counter of updates is lost or reset\n"
        "evaluate() or export() uses the model instead of the average",
        evidence={"decays": decays, "off": off, "exported_differs": differs, "late": late, "updates": updates},
    )  # fmt: skip


def declared_weights(noise, kind: str, snr: Tensor) -> Tensor:
    """Return the declared weight of the mean square error for this prediction type at these signal-to-noise ratios.

    Hang 2023: min(SNR, gamma) is the weight of the picture's error. An error of 1 in the noise is one of 1 / SNR in the picture; in the
    velocity, 1 / (SNR + 1). Stated here independently of the recipe. The weight is 1 if no gamma is declared (a flow)."""
    gamma = getattr(noise, "snr_gamma", math.inf)
    if not math.isfinite(gamma):
        return torch.ones_like(snr)
    per = {"noise": snr, "velocity": snr + 1}.get(kind, torch.ones_like(snr))
    return torch.minimum(snr, torch.full_like(snr, gamma)) / per


def _by_formula(proof: Proof, asked: Objective, weight: Tensor) -> tuple[float, int]:
    """Return (largest relative difference between a sample's loss and weight * mean((prediction - target)^2), number of samples), for
    the net after sixty steps of train(), one sample per batch."""
    _, stage, _ = trained(proof)
    net, few, worst, outputs = stage.model, min(16, len(asked.timestep)), 0.0, []
    hook = net.register_forward_hook(lambda _, args, out: outputs.append(out.sample.detach().double()))
    try:
        with evaluating(net), torch.no_grad():
            for i in range(few):
                one = {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in asked.batch.items()}
                loss = sum(stage.loss(net, one).values()).item()
                error = (outputs[-1][0] - asked.target[i].double()).square().mean().item()
                due = weight[i].item() * error
                worst = max(worst, abs(loss - due) / max(abs(due), 1e-4))
    finally:
        hook.remove()
    return worst, few


@gate(
    "weighting",
    rows="DF7",
    title="each timestep has the declared weight and frequency",
    reads="data model loss counts train",
    explains=True,
)
def weighting(proof: Proof) -> Finding:
    """Compares weights and timesteps with their declaration:

    - The loss's curvature at 512 noise levels with the declared weight (min-SNR for a diffusion, 1 for a flow). Prediction type and SNR
      are measured from the target and the noisy pictures.
    - The loss of each of 16 single samples, after sixty steps of train(), with that weight times the mean square error.
    - The distribution of the net's timesteps with the declared one (Kolmogorov-Smirnov)."""
    asked, noise = objective(proof), proof.look()[1].data["train"].process.noise
    expected = declared_weights(noise, asked.kind, (asked.alpha / asked.sigma).square())
    apart_from, of = _by_formula(proof, asked, expected)
    gap = ((asked.weight - expected).abs() / expected.clamp_min(0.01)).cpu()
    t, i = asked.timestep.tolist(), int(gap.argmax())
    values, counts = watched(proof).timesteps.unique(return_counts=True)
    n = int(counts.sum())
    apart, limit = (counts.cumsum(0) / n - noise.below(values)).abs().max().item(), DRAWN / math.sqrt(n)
    return Finding(
        gap[i].item() <= 0.02 and apart <= limit and apart_from <= 0.02,
        f"target: {asked.kind}; weights differ by at most {gap[i]:.1%} (t {t[i]:.0f}: {asked.weight[i]:.3f}, declared "
        f"{expected[i]:.3f}); the losses of {of} single samples by at most {apart_from:.1%}; "
        f"the distribution of {n:,} timesteps by at most {apart:.3f}",
        f"at most 2% at every level and for every sample; at most {limit:.3f} for the distribution",
        "the weight is that of another prediction type: min(SNR, gamma) over SNR is min-SNR for the noise, over SNR + 1 for the "
        "velocity\n"
        "the weight belongs to another sample's timestep, or to the reversed schedule\n"
        "timesteps are drawn from another distribution than declared: uniform instead of logit-normal, another mean or deviation\n"
        "on purpose: --noise.snr-gamma inf (a diffusion), --noise.mean and --noise.std (a flow)",
        evidence={"kind": asked.kind, "levels": t, "weights": asked.weight.tolist(), "expected": expected.tolist(), "apart": apart},
    )  # fmt: skip


@gate(
    "samplers",
    rows="DF6",
    title="two samplers lead from the same noise to the same picture",
    reads="data model loss counts evaluate train",
)
def two_samplers(proof: Proof) -> Finding:
    """Measures `samplers_apart` of evaluate() after sixty steps of train(). A net overshoots under guidance by then."""
    run, stage, _ = trained(proof)
    val = stage.data["val"]
    apart = run.measure(stage, View(val, pick(val, 32, proof.cfg.run.seed)))["samplers_apart"]
    return Finding(
        apart <= EARLY, f"rms difference {apart:.3f} after {SHORT} steps, pictures in [-1, 1]", f"at most {EARLY:g}", INHERITED,
        evidence={"apart": apart},
    )  # fmt: skip


def judged(judge: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Gate:
    """Return the gate on the classifier that scores samples."""

    @gate(
        "judge",
        rows="DF1 DF3",
        title="the scoring model classifies the recipe's real images correctly",
        reads="data",
    )
    def prove(proof: Proof) -> Finding:
        """Its accuracy on validation pictures must be at least halfway from chance to 1. A classifier that does not recognise real
        pictures cannot score samples."""
        run, stage = proof.look()
        val = stage.data["val"]
        batch = fetch(val, pick(val, min(KNOWN, len(val)), proof.cfg.run.seed), None, run.device)
        share = (judge(batch["image"])[0] == batch["label"]).double().mean().item()
        needed = (1 + stage.metric.floor) / 2
        return Finding(
            share >= needed, f"right on {share:.1%} of {len(batch['label'])} real pictures", f"{needed:.0%} or more",
            "the classifier expects another scale ([0, 1] instead of [-1, 1], inverted, another normalisation)\n"
            "it was trained with another class order\nit is not accurate enough itself",
            batch={k: v for k, v in batch.items() if isinstance(v, Tensor)},
        )  # fmt: skip

    return prove


def of(judge: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Gate]:
    """Return the gates of a recipe whose samples `judge` classifies."""
    return [judged(judge), noise_process(judge), hidden_class, average, weighting, two_samplers]


# ------------------------------------------------------------------------------------------------------------- monitors
@monitor("samples", rows="DF1", title="sample quality follows the loss")
def samples(history: list[dict[str, float]]) -> Finding:
    """Compares one-step denoising and samples of the first and the last evaluation."""
    first, last = history[0], history[-1]
    good = last["val/agreement"] >= 0.8
    return Finding(
        good,
        f"one step recovers {last['val/denoised']:.0%} of a picture's variance (first evaluation {first['val/denoised']:.0%}); "
        f"{last['val/agreement']:.1%} of the samples show the requested class, Frechet distance {last['val/frechet']:.2f} "
        f"(first evaluation {first['val/agreement']:.1%}, {first['val/frechet']:.2f})",
        "the requested class in at least 80% of the samples",
        "train longer; then look at the samples: blurred (use a larger net), other classes (more guidance), saturated (less guidance)",
    )  # fmt: skip


@monitor("light", rows="DF1", title="samples have the brightness and contrast of the data")
def light(history: list[dict[str, float]]) -> Finding:
    """Compares mean and standard deviation of the samples' pixels with validation pictures, at the last evaluation."""
    brighter, richer = history[-1]["val/brighter"], history[-1]["val/richer"]
    return Finding(
        abs(brighter) <= BRIGHT and abs(richer) <= RICH,
        f"the samples' mean differs by {brighter:+.3f}, their standard deviation by {richer:+.3f}, pictures in [-1, 1]",
        f"means within {BRIGHT:g}, standard deviations within {RICH:g}",
        "the schedule does not end at pure noise, but sampling begins there: --noise.schedule, --noise.timesteps\n"
        "too much guidance (saturated) or too little training (grey): --sampling.guidance-scale, --train.epochs",
    )  # fmt: skip


@monitor("samplers", rows="DF6", title="two samplers lead from the same noise to the same picture")
def samplers(history: list[dict[str, float]]) -> Finding:
    """Rms difference between pictures of the exported sampler and of a second-order sampler."""
    apart = history[-1]["val/samplers_apart"]
    return Finding(
        apart <= LATE, f"rms difference {apart:.3f}, pictures in [-1, 1]", f"at most {LATE:g}", INHERITED,
    )  # fmt: skip
