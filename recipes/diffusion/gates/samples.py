"""Gates of class-conditional diffusion: what the loss asks for and the sampler undoes (DF4), the average (DF2), the hidden class
(DF5), the weight and the share of each timestep (DF7), the sampler (DF6); and monitors of what only a trained net shows (DF1, DF6).

They read the objective off the loss itself: a net that says a constant gets the loss's gradient, and where that gradient is zero,
and how steep it is, is what the loss asks for at that timestep and how much it weighs. What was declared is `cfg.noise`'s to say
(`weights`, `below`), and what undoes it is the exported scheduler, of a diffusion or of a flow.
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

LEVELS = 512  # training samples whose timesteps stand for the schedule
EXACT = 0.02  # rms of a picture in [-1, 1] that is undone in one step
WALKED = 0.05  # the same along the way of an exported pipeline, whose net is asked between the levels that were read
LEFT = 0.1  # of the signal at the noisiest level: cosine keeps 0%, linear of 1,000 0.6%, Stable Diffusion's 6.8%, linear of 250 28%
UPDATES = (
    2000  # most updates of an average that are made to see where its ramp ends; a twentieth of a net larger than SMALL
)
SMALL = 5_000_000  # parameters
REMEMBERED = 15  # an average must remember a fifteenth of its updates; (1 + n) / (10 + n) remembers a ninth, diffusers' ramps more
EDGE = 16  # levels
FEW = 4  # samples that an exported pipeline is asked for
MANY = 64  # of captions, which may be as many as pictures: those that a net is taught the answer to
KNOWN = 200  # real pictures that the judge is asked about
SHORT = 60  # steps after which a net denoises at all
DRAWN = 2.5  # largest gap of a distribution function times sqrt(n): by chance in 7 of a million samples
EARLY = 0.05  # rms between two samplers then: 0.015 healthy, 0.133 with clipping at guidance 2
LATE = 0.25  # at the end of a run
BRIGHT = 0.06  # difference of means, of pictures in [-1, 1]
RICH = 0.1  # difference of standard deviations
INHERITED = (
    "an option the sampler inherits from the training scheduler (clip_sample: it clips the picture and keeps the noise that "
    "belonged to the unclipped one)\ntoo few steps for one of them\na scheduler of another objective"
)


class Constant(nn.Module):
    """A net that says one number everywhere, and keeps what it was given."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def forward(self, sample: Tensor, timestep: Tensor, class_labels: Tensor | None = None) -> SimpleNamespace:
        self.said = torch.full_like(sample, self.value, requires_grad=True)
        self.noisy, self.told = sample.detach(), torch.as_tensor(timestep, device=sample.device).expand(len(sample))
        return SimpleNamespace(sample=self.said)


@dataclass
class Objective:
    """What the loss asks of the net, sample by sample."""

    batch: dict
    clean: Tensor
    """(B, C, H, W) what was noised: pictures or latents."""
    noisy: Tensor
    """(B, C, H, W) what the net got."""
    told: Tensor
    """(B,) the timestep it was told."""
    target: Tensor
    """(B, C, H, W) the prediction at which the gradient is zero."""
    weight: Tensor
    """(B,) how much a mean square error of 1 adds to the loss."""
    alpha: Tensor
    sigma: Tensor
    """(B,) noisy = alpha image + sigma noise, as fitted."""
    of_image: Tensor
    of_noise: Tensor
    """(B,) target = of_image image + of_noise noise, as fitted."""

    @property
    def kind(self) -> str:
        """What the target turns out to be: by name, or by its shares of picture and noise."""
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
    """Name of what is noised."""
    return data.process.clean_key


def asked_for(data: Data) -> tuple[str, int]:
    """(name of what each sample is asked for by, how many there are of it): classes, or captions."""
    key = data.process.asked
    return key, len(data.fields[key].classes) if key in data.fields else data.null


def objective(proof: Proof) -> Objective:
    """Read off the loss, on samples of the training path."""

    def read() -> Objective:
        run, stage = proof.build(Plan(steps=1))
        data = stage.data["train"]
        batch = fetch(data, pick(data, min(LEVELS, len(data)), proof.cfg.run.seed), proof.cfg.run.seed, run.device)
        slopes = []
        for value in (0.0, 1.0):
            net = Constant(value)
            total = sum(stage.loss(net, batch).values())
            slopes.append(torch.autograd.grad(total, net.said)[0])
        steep = slopes[1] - slopes[0]
        target = torch.where(steep > 0, -slopes[0] / steep, 0.0)
        weight = steep.flatten(1).mean(1) * steep[0].numel() / 2
        clean = batch[clean_key(data)]
        basis = torch.stack([clean.flatten(1), batch["noise"].flatten(1)], 2).double()  # (B, CHW, 2)

        def fitted(y: Tensor) -> tuple[Tensor, Tensor]:
            return torch.linalg.lstsq(basis, y.flatten(1)[..., None].double()).solution[..., 0].unbind(1)

        return Objective(batch, clean, net.noisy, net.told, target, weight, *fitted(net.noisy), *fitted(target))

    return proof.once("diffusion objective", read)


class Knowing(nn.Module):
    """A net that knows the answer: one picture for each of `classes` (default: all, in their order), and the mean of them where any
    other, or none, is asked for. It speaks the loss's own language, whichever that is."""

    def __init__(self, asked: Objective, pictures: Tensor, classes: list[int] | None = None):
        super().__init__()
        order = asked.told.argsort()
        self.at = asked.told[order].double()
        self.curves = torch.stack([asked.alpha, asked.sigma, asked.of_image, asked.of_noise])[:, order]
        self.pictures = torch.cat([pictures, pictures.mean(0, keepdim=True)])
        self.row = {c: i for i, c in enumerate(classes if classes is not None else range(len(pictures)))}
        self.met: set[float] = set()
        """Timesteps at which it was asked."""
        self.alpha = 1.0
        """Share of the signal at the one it was asked last."""

    def forward(self, sample: Tensor, timestep: Tensor, class_labels: Tensor) -> SimpleNamespace:
        t = timestep.double()
        self.met.update(t.tolist())
        right = torch.searchsorted(self.at, t).clamp(1, len(self.at) - 1)
        left = right - 1
        # A sampler begins and ends beyond the levels that were read: on the line through the EDGE of these that are nearest.
        left = torch.where(t > self.at[-1], max(0, len(self.at) - EDGE), left)
        right = torch.where(t < self.at[0], min(EDGE, len(self.at) - 1), right)
        share = ((t - self.at[left]) / (self.at[right] - self.at[left]).clamp_min(1e-9)).clamp(
            -4, 5
        )  # no level has no slope
        level = torch.lerp(self.curves[:, left], self.curves[:, right], share).float()[..., None, None, None]
        alpha, sigma, of_image, of_noise = level.unbind(0)
        sigma = torch.where(sigma.abs() < 1e-3, 1e-3, sigma)
        self.alpha = alpha.abs().median().item()
        picture = self.pictures[[self.row.get(c, len(self.row)) for c in class_labels.tolist()]]
        return SimpleNamespace(sample=of_image * picture + of_noise * (sample - alpha * picture) / sigma)


def undone(scheduler, prediction: Tensor, t: float, noisy: Tensor) -> Tensor:
    """The picture (C, H, W) that one step of an exported scheduler from timestep t implies. A flow's names none: it is where the
    step would end if it went on straight to no noise."""
    if not scheduler.timesteps.is_floating_point():
        scheduler.set_timesteps(scheduler.config.num_train_timesteps)
        t = min(max(int(t), 0), scheduler.config.num_train_timesteps - 1)
        return scheduler.step(prediction[None], t, noisy[None]).pred_original_sample[0]
    scheduler.set_timesteps(1000)
    i = scheduler.timesteps.sub(t).abs().flip(0).argmin()  # Heun's come twice: a step starts at the second
    i = len(scheduler.timesteps) - 1 - int(i)
    scheduler.set_begin_index(i)
    moved = scheduler.step(prediction[None], scheduler.timesteps[i], noisy[None]).prev_sample[0] - noisy
    level, after = scheduler.sigmas[i : i + 2].tolist()
    return noisy + moved * level / (level - after)


def walk(asked: Objective, folder: Path, val: Data, ones: dict, ask: walks.Ask, steps: int) -> walks.Walk | None:
    """The way of the exported pipeline in `folder` with nets that know what it is asked for; None if it cannot be asked so."""
    pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True).to(asked.clean.device)
    key = clean_key(val)
    each = [{k: v[i : i + 1] for k, v in ones.items()} for i in range(min(FEW, len(ones[key])))]
    try:
        return walks.walked(pipe, [Knowing(asked, one[key], []) for one in each], each, key, ask, steps)
    except (TypeError, KeyError, AttributeError):  # a pipeline of the fork's own that is called in another way
        return None


def noise_process(judge: Callable[[Tensor], tuple[Tensor, Tensor]] | None, ask: walks.Ask = walks.by_class) -> Gate:
    """The gate on what is learnt and undone; `judge` also says which of the clean things it works with can be recognised at all.
    None: samples are not judged, and what is evaluated is one step of denoising. `ask`: how the exported pipeline is asked."""

    @gate(
        "noise-process",
        rows="DF4",
        title="sampling inverts the training target at every noise level",
        reads="data model loss counts evaluate export train",
        explains=True,
    )
    def prove(proof: Proof) -> Finding:
        """The loss's own target, fed to the exported scheduler, gives the clean picture back in one step, at 512 noise levels and
        the timesteps that the net is told. A net that knows one picture per class is evaluated: sampling with it must show those
        pictures. The exported pipeline is run with such a net: every step must imply the picture, at timesteps that the evaluation
        asks for, too; where that could be run it decides, because a recipe may speak with its net by another convention (time
        reversed) as long as all of its parts do. The sampler begins at pure noise: so must the schedule end. And train() must draw
        a timestep for each sample, over the whole schedule."""
        asked, run, stage = objective(proof), *proof.build(Plan(steps=1))
        with tempfile.TemporaryDirectory() as name:
            stage.export(Path(name))
            shipped = DiffusionPipeline.from_pretrained(name, trust_remote_code=True).scheduler
            val, steps = stage.data["val"], proof.cfg.sampling.steps
            few = fetch(val, pick(val, min(FEW, len(val)), proof.cfg.run.seed), None, run.device)
            way = walk(asked, Path(name), val, few, ask, steps)
        stage.model.to(run.device)
        total, t = shipped.config.num_train_timesteps, asked.told.tolist()
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
            )  # an evaluation samples for one of so many: two of each class come at that distance
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
        middle = one.mean(0)  # guidance at a scale s leads from there to the picture and, above 1, beyond it
        ends = middle + proof.cfg.sampling.guidance_scale * (one - middle)
        recognised = (judge(ends)[0] == ones["label"]).double().mean().item() if judge else 1.0
        along = f"; along the exported pipeline's way {way.worst:.1e}, at its end {way.end:.1e}" if way else ""
        floor = 0.75 * stage.metric.ceiling * recognised
        return Finding(
            undoes and known >= floor and not strays and alone and bool(spread_ok) and left <= LEFT,
            f"asked for: {asked.kind}, undone in one step by {type(shipped).__name__} to rms {wrong[worst]:.1e} at worst "
            f"(t {t[worst]:.0f}){along}; its noisiest level keeps {left:.1%} of the signal; "
            f"samples of a net that knows the answer: {stage.metric.name} {known:.2f} "
            f"(of what it must end at: {recognised:.2f}); {strays} of the export's "
            f"timesteps are not the evaluation's; {seen.distinct:.0%} of a batch's timesteps differ, "
            f"{' '.join(f'{s:.0%}' for s in spread.tolist())} in each quarter of {total}",
            f"rms at most {WALKED:g} along the exported pipeline's way (where that cannot be run, {EXACT:g} at every level); at "
            f"most {LEFT:.0%} of the signal left where sampling begins; {stage.metric.name} at least {floor:.2f}; sampled and "
            "exported with one scheduler; timesteps of their own, at least "
            f"{' '.join(f'{0.4 * s:.0%}' for s in declared.tolist())} in each quarter of the sampler's schedule",
            "the sampler is not built from the training scheduler's config: another schedule, shift, number of timesteps or "
            "prediction type\n"
            "the target has another sign or form than the scheduler undoes\n"
            "the net is told another timestep than its sampler will tell it: on another scale, or with time reversed\n"
            "one timestep for the whole batch, or a constant in its place\n"
            "the sampler starts at another noise level than pure noise: --noise.schedule and --noise.timesteps belong together "
            "(linear wants 1,000 timesteps)",
            evidence={"kind": asked.kind, "levels": t, "rms": wrong, "known": known, "quarters": spread.tolist(), "left": left,
                      "walk": way and {"worst": way.worst, "end": way.end, "met": sorted(way.met)}},
        )  # fmt: skip

    return prove


@dataclass
class Seen:
    """What reached the net in a few steps of train()."""

    timesteps: Tensor = field(default_factory=lambda: torch.zeros(0))
    hidden: list[bool] = field(default_factory=list)
    """Of each sample: is the class that the net gets not the sample's own?"""
    null: set[int] = field(default_factory=set)
    """What it got instead."""
    distinct: float = 1.0
    """Different timesteps of a batch over its size, worst step."""


def _flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in net.parameters()])


def _decay(before: Tensor, raw: Tensor, now: Tensor) -> tuple[float, float]:
    """(the decay that leads from one average to the next one, how far that is from the line between average and weights)."""
    gap = before - raw
    decay = ((now - raw) @ gap / (gap @ gap).clamp_min(1e-30)).item()
    return decay, ((now - raw - decay * gap).norm() / gap.norm().clamp_min(1e-30)).item()


def _memory(stage: Stage, updates: int) -> float | None:
    """The decay of the last of so many updates by the object in `stage.state` that makes the average; None if there is none such.
    The weights it is given move each time, or nothing could be read off it."""
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
    """A short run of train(), its net's inputs noted beside the labels of the batch."""
    return trained(proof)[2]


def trained(proof: Proof) -> tuple[Run, Stage, Seen]:
    """The run and stage of that short run, too."""

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
    """What reaches the net in sixty steps of train(): how often is the class not the sample's own, and by what is it replaced? Then
    that net's predictions with the class, without it, and with another."""
    cfg = proof.cfg
    run, stage, seen = trained(proof)
    if cfg.drop == 0 and cfg.sampling.guidance_scale == 1:
        raise Skip("nothing is hidden, and nothing is guided: --drop 0 --sampling.guidance-scale 1")
    share, n = sum(seen.hidden) / max(1, len(seen.hidden)), max(1, len(seen.hidden))
    slack = 4 * math.sqrt(max(cfg.drop * (1 - cfg.drop), 0.01) / n)
    data = stage.data["val"]
    batch = fetch(data, pick(data, min(128, len(data)), cfg.run.seed), None, run.device)
    key, classes = asked_for(data)
    null = next(iter(seen.null), classes)
    losses, said = [], []
    with evaluating(stage.model), run.autocast():
        for condition in (batch[key], torch.full_like(batch[key], null)):
            said.append(stage.model(batch["noisy"], batch["timestep"], condition).sample.float())
            total = sum(stage.loss(stage.model, {**batch, "condition": condition}).values())
            losses.append(total.item() / len(condition))
    apart = ((said[0] - said[1]).norm() / said[0].norm().clamp_min(1e-9)).item()
    enough = 0.7 * data.process.initial_loss(batch)
    instead = " ".join(map(str, sorted(seen.null)[:5])) or "nothing"
    hidden = share > 0 and abs(share - cfg.drop) <= slack and len(seen.null) == 1 and null >= classes
    return Finding(
        hidden and apart > 1e-3 and losses[1] <= enough,
        f"hidden from {share:.1%} of {n:,} samples at the net's input (instead: {instead}); after {SHORT} steps a loss of "
        f"{losses[0]:.3f} with the class, {losses[1]:.3f} without, predictions {apart:.1%} apart",
        f"hidden from {cfg.drop:.0%} +- {slack:.1%}, always by one value that is no class; without it a loss below {enough:.3f}; "
        "predictions that differ",
        "the drop mask is drawn and not used, or used on something else than what the net gets\n"
        "the class never reaches the net\nthe null class is one of the real ones",
        evidence={"hidden": share, "null": sorted(seen.null), "with": losses[0], "without": losses[1], "apart": apart},
    )  # fmt: skip


def _raw(proof: Proof, run: Run, stage: Stage) -> Finding:
    """Where no average is kept: what is exported after six steps of train() is the net that was trained."""
    proof.train(proof.cfg, run, stage)
    with tempfile.TemporaryDirectory() as name:
        stage.export(Path(name))
        shipped = _flat(DiffusionPipeline.from_pretrained(name, trust_remote_code=True).unet)
    own = _flat(getattr(stage.eval_model, "unet", stage.eval_model)).cpu()
    if len(own) != len(shipped):
        raise Skip("no average is kept (--ema 0), and the export's net has other tensors: adapters that were merged")
    differs = (shipped - own).abs().max().item()
    return Finding(
        differs <= 1e-6, f"no average is kept (--ema 0); exported weights differ from the trained ones by at most {differs:.2g}",
        "at most 1e-6", "export() writes another net: one that was built anew, or a copy from before training",
        evidence={"exported_differs": differs},
    )  # fmt: skip


@gate(
    "average",
    rows="DF2",
    title="samples and export use an EMA of the weights with the declared decay",
    reads="model evaluate optimizers ema_model state export train",
)
def average(proof: Proof) -> Finding:
    """Weights and average after each of six steps of train(): the decay that leads from one average to the next; a ramp must
    advance. What keeps the average is then updated as often as the run will (at most 2,000 times): it must remember a fifteenth of
    the run by then, or as much as --ema says. Then the raw weights are spoilt: neither the evaluation nor the export may notice."""
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
            else "the average does not lie between itself and the weights"
        )
    elif not all(0 <= d <= cfg.ema + 1e-3 for d in decays):
        wrong.append("the average does not lag as --ema says")
    elif decays[0] < cfg.ema - 1e-3 and decays[-1] <= decays[0] + 1e-3:
        wrong.append(
            f"the decay stays at {decays[-1]:.2f}: its ramp does not advance, and the average is the newest weights"
        )
    updates = max(
        6, min(Run(cfg, proof.accelerator).total_steps(stage), UPDATES if before.numel() < SMALL else UPDATES // 20)
    )
    late, due = _memory(stage, updates), max(0.0, 1 - max(1 - cfg.ema, REMEMBERED / updates))
    if late is not None and not wrong and late < due - 1e-3:
        wrong.append(
            f"after {updates:,} updates, as many as the run makes, its decay is {late:.4f}: less than {due:.4f}"
        )
    if moved:
        wrong.append(f"the evaluation reads the raw weights ({moved[0]} changed with them)")
    if differs > 1e-6:
        wrong.append(f"the exported weights are not the average (largest difference {differs:.2g})")
    lag = f"decays {' '.join(f'{d:.2f}' for d in decays)} over six steps"
    lag += "" if late is None else f", {late:.4f} after {updates:,} updates"
    return Finding(
        not wrong, f"{'; '.join(wrong)}; {lag}" if wrong else f"{lag}; evaluation and export are the average's",
        f"each average between the last one and the weights, with a decay of at most {cfg.ema:g} (ramped at first, and by the "
        f"end at least {due:.4f}); evaluated and "
        "exported weights are the average",
        "the update of the average is missing in train(), or stands before the optimiser's step\n"
        "the ramp of its decay starts again at every update, or is cut off below --ema: the counter of updates is lost or reset\n"
        "evaluate() or export() uses the model instead of the average",
        evidence={"decays": decays, "off": off, "exported_differs": differs, "late": late, "updates": updates},
    )  # fmt: skip


def declared_weights(noise, kind: str, snr: Tensor) -> Tensor:
    """Weight of the mean square error of a prediction of this kind at these signal-to-noise ratios, by the formula of Hang 2023:
    min(SNR, gamma) weighs the picture's error, of which an error in the noise makes 1 / SNR, one in the velocity 1 / (SNR + 1).
    Written out here, so that it is no copy of what the recipe computes; 1 where no gamma is declared (a flow)."""
    gamma = getattr(noise, "snr_gamma", math.inf)
    if not math.isfinite(gamma):
        return torch.ones_like(snr)
    per = {"noise": snr, "velocity": snr + 1}.get(kind, torch.ones_like(snr))
    return torch.minimum(snr, torch.full_like(snr, gamma)) / per


def _by_formula(proof: Proof, asked: Objective, weight: Tensor) -> tuple[float, int]:
    """(largest relative difference between a sample's loss and weight * mean((prediction - target)^2), samples), of the net that
    sixty steps of train() left, each sample a batch of its own."""
    _, stage, _ = trained(proof)
    net, few, worst, said = stage.model, min(16, len(asked.told)), 0.0, []
    hook = net.register_forward_hook(lambda _, args, out: said.append(out.sample.detach().double()))
    try:
        with evaluating(net), torch.no_grad():
            for i in range(few):
                one = {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in asked.batch.items()}
                loss = sum(stage.loss(net, one).values()).item()
                error = (said[-1][0] - asked.target[i].double()).square().mean().item()
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
    """Curvature of the loss at 512 noise levels against the declared weight, of min-SNR for a diffusion, 1 for a flow; what the net
    predicts is read off the target, the SNR off the noisy pictures. After sixty steps of train() the loss of each of 16 samples
    alone against that weight times the mean square error of the net's own prediction. Then the timesteps that reached the net
    against the declared share below each (Kolmogorov-Smirnov)."""
    asked, noise = objective(proof), proof.look()[1].data["train"].process.noise
    expected = declared_weights(noise, asked.kind, (asked.alpha / asked.sigma).square())
    apart_from, of = _by_formula(proof, asked, expected)
    gap = ((asked.weight - expected).abs() / expected.clamp_min(0.01)).cpu()
    t, i = asked.told.tolist(), int(gap.argmax())
    values, counts = watched(proof).timesteps.unique(return_counts=True)
    n = int(counts.sum())
    apart, limit = (counts.cumsum(0) / n - noise.below(values)).abs().max().item(), DRAWN / math.sqrt(n)
    return Finding(
        gap[i].item() <= 0.02 and apart <= limit and apart_from <= 0.02,
        f"asked for: {asked.kind}; weights off by {gap[i]:.1%} at worst (t {t[i]:.0f}: {asked.weight[i]:.3f}, declared "
        f"{expected[i]:.3f}); the loss of {of} samples, each alone, off by {apart_from:.1%} at worst; "
        f"of {n:,} timesteps drawn the share below one is off by at most {apart:.3f}",
        f"at most 2% at every level and of every sample; a share off by {limit:.3f} or less",
        "the weight is that of another prediction type: min(SNR, gamma) over SNR is min-SNR for the noise, over SNR + 1 for the "
        "velocity\n"
        "the weight is that of another sample's timestep, or of the schedule read backwards\n"
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
    """What evaluate() calls `samplers_apart`, after sixty steps of train(): such a net overshoots under guidance already."""
    run, stage, _ = trained(proof)
    val = stage.data["val"]
    apart = run.measure(stage, View(val, pick(val, 32, proof.cfg.run.seed)))["samplers_apart"]
    return Finding(
        apart <= EARLY, f"rms {apart:.3f} apart after {SHORT} steps, pictures in [-1, 1]", f"at most {EARLY:g}", INHERITED,
        evidence={"apart": apart},
    )  # fmt: skip


def judged(judge: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Gate:
    """The gate on who judges the samples."""

    @gate(
        "judge",
        rows="DF1 DF3",
        title="the scoring model classifies the recipe's real images correctly",
        reads="data",
    )
    def prove(proof: Proof) -> Finding:
        """Its agreement with the labels of held-out pictures, at least halfway from chance to perfect: what it does not recognise
        among real ones it cannot miss among samples."""
        run, stage = proof.look()
        val = stage.data["val"]
        batch = fetch(val, pick(val, min(KNOWN, len(val)), proof.cfg.run.seed), None, run.device)
        share = (judge(batch["image"])[0] == batch["label"]).double().mean().item()
        needed = (1 + stage.metric.floor) / 2
        return Finding(
            share >= needed, f"right on {share:.1%} of {len(batch['label'])} real pictures", f"{needed:.0%} or more",
            "pictures on another scale than it reads ([0, 1] instead of [-1, 1], inverted, another normalisation)\n"
            "classes in another order than it was trained with\na judge that is not good enough itself",
            batch={k: v for k, v in batch.items() if isinstance(v, Tensor)},
        )  # fmt: skip

    return prove


def of(judge: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Gate]:
    """The gates of a recipe whose samples `judge` judges."""
    return [judged(judge), noise_process(judge), hidden_class, average, weighting, two_samplers]


# ------------------------------------------------------------------------------------------------------------- monitors
@monitor("samples", rows="DF1", title="sample quality follows the loss")
def samples(history: list[dict[str, float]]) -> Finding:
    """One-step error and samples side by side, first and last evaluation."""
    first, last = history[0], history[-1]
    good = last["val/agreement"] >= 0.8
    return Finding(
        good,
        f"one step sees {last['val/denoised']:.0%} of a picture's variance (at first {first['val/denoised']:.0%}); of the samples "
        f"{last['val/agreement']:.1%} show the class asked for, Frechet distance {last['val/frechet']:.2f} "
        f"({first['val/agreement']:.1%}, {first['val/frechet']:.2f})",
        "an agreement of 80% or more",
        "train longer; then look at the samples: blurred (a larger net), of other classes (more guidance), burnt (less guidance)",
    )  # fmt: skip


@monitor("light", rows="DF1", title="samples have the brightness and contrast of the data")
def light(history: list[dict[str, float]]) -> Finding:
    """Mean and standard deviation of the samples' pixels against those of held-out pictures, last evaluation."""
    brighter, richer = history[-1]["val/brighter"], history[-1]["val/richer"]
    return Finding(
        abs(brighter) <= BRIGHT and abs(richer) <= RICH,
        f"samples' mean is {brighter:+.3f} from the data's, their deviation {richer:+.3f}, of pictures in [-1, 1]",
        f"a mean within {BRIGHT:g}, a deviation within {RICH:g}",
        "a schedule that does not end at pure noise, where sampling begins: --noise.schedule, --noise.timesteps\n"
        "too much guidance (burnt) or too little training (grey): --sampling.guidance-scale, --train.epochs",
    )  # fmt: skip


@monitor("samplers", rows="DF6", title="two samplers lead from the same noise to the same picture")
def samplers(history: list[dict[str, float]]) -> Finding:
    """Rms difference between the pictures of the sampler that is exported and those of a second-order one."""
    apart = history[-1]["val/samplers_apart"]
    return Finding(
        apart <= LATE, f"rms {apart:.3f} apart, of pictures in [-1, 1]", f"at most {LATE:g}", INHERITED,
    )  # fmt: skip
