"""What goes wrong without each safeguard, in numbers: bugs planted in a recipe, gates off, trained to the end.

    python bench/harm.py vision/classify --seeds 0 1 2 --to docs/recipes/vision-classify.harm.json
    python bench/harm.py distill/whisper --seeds 0 --jobs 1 --to docs/recipes/distill-whisper.harm.json

`loss` is the mean over the last tenth of the training, `reported` what the run itself says, `honest` its export
on the untouched held-out data, read without the recipe; of generators the class that the classifier sees in 500 samples at guidance 2,
beside their `distance` from held-out digits and the same `unguided`. The same seeds for every case; runs of all recipes but
the first are shorter than their own, by the settings that stand in the file. `--only CASE ... --seeds 1 2` adds to
what stands there.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.diffusion import healthy_flow, planted_flow, planted_latent, planted_pixel  # noqa: E402
from tests.distill import planted_whisper  # noqa: E402
from tests.vision import planted_detect, planted_segment  # noqa: E402
from tests.vision.planted_classify import CLIP, IMAGE, MEAN_LOSS, PLANTS, UPDATE, own_loop  # noqa: E402
from tests.vlm import planted_instruct  # noqa: E402

LOADING = threading.Lock()  # torch.export.load keeps global state, pipelines copy a file to one place
MORE = (planted_detect, planted_segment, planted_whisper, planted_instruct, planted_pixel, planted_flow, planted_latent)
BY_ID = {p.id: p for p in [*PLANTS, *(p for module in MORE for p in module.PLANTS)]}
BARE = "        baselines=baselines,\n"  # left out of every case: not looked at here


@dataclass
class Case:
    """One way to train without a safeguard."""

    id: str
    rows: str
    what: str
    hunks: list[tuple[str, str]] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    alone: bool = False
    """It changes the stage that the other cases take as given."""


def planted(id: str, what: str, *settings: str) -> Case:
    """A case from the suite of planted bugs."""
    return Case(id, BY_ID[id].row, what, [BY_ID[id].hunk], list(settings))


MIXED = "        train_data, val_data = mixing.Mixed(train_data, cfg.mix, near), mixing.Mixed(val_data, cfg.mix)\n"
CLIPPED = (
    """        def clipped(image, other, lam, generator):
            n, half = image.shape[-1], int(image.shape[-1] * (1 - lam).sqrt()) // 2
            y, x = torch.randint(n, (2,), generator=generator).tolist()
            image, box = image.clone(), (slice(max(0, y - half), y + half), slice(max(0, x - half), x + half))
            image[:, *box] = other[:, *box]
            return image, lam

        mixing.pasted = clipped
"""
    + MIXED
)  # as the paper's own code before it corrected the share by what the border had cut off

HEALTHY = Case("healthy", "", "nothing changed")
NO_AUGMENTATION = Case("no-augmentation", "default", "no augmentation", settings=["--no-augment"])
NO_AVERAGE = Case("no-average", "DF2", "no average of the weights", settings=["--ema", "0"])
NO_MIN_SNR = Case("no-min-snr", "DF7", "every level of one weight", settings=["--noise.snr-gamma", "inf"])

CASES = [
    HEALTHY,
    NO_AUGMENTATION,
    Case("no-smoothing", "default", "no label smoothing", settings=["--label-smoothing", "0"]),
    planted("loud-head", "output layer starts with std 2"),
    planted("centred-on-batch", "inputs centred on their batch"),
    planted("head-only", "optimiser over the head alone"),
    planted("no-zero-grad", "zero_grad missing"),
    planted("softmax-twice", "softmax before cross-entropy"),
    planted("normalised-twice-in-training", "training images divided by 255 twice"),
    planted("noisy-copies", "validation made of training images with faint noise"),
    planted("functional-dropout", "dropout 0.2 without its training flag"),
    Case("decay-everywhere", "C3", "weight decay on norms, biases and the head's offsets, too",
         [("core.make_optimizer(model, cfg.optim)",
           "torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)")]),
    Case("cutmix", "", "healthy with CutMix", settings=["--mix.cutmix", "1"]),
    Case("cutmix-share-as-drawn", "", "CutMix whose label has the drawn share, not the pasted area's",
         [(MIXED, CLIPPED)], ["--mix.cutmix", "1"]),
    Case("rate-1e-5", "", "healthy at a rate of 1e-5", settings=["--optim.lr", "1e-5"]),
    planted("bf16-weights", "bf16 weights at a rate of 1e-5", "--optim.lr", "1e-5"),
    Case("nan-unguarded", "C17", "41 training images with a NaN pixel, a loop without the finite check",
         [(IMAGE, IMAGE + "        if generator is not None and index % 97 == 5:\n            image[0, 3, 3] = torch.nan\n"),
          (UPDATE, own_loop("optimizer.zero_grad()", MEAN_LOSS, "loss.backward()", CLIP, "optimizer.step()"))]),
    Case("nan-guarded", "C17", "5 training images with a NaN pixel, run.update as it is",
         [(IMAGE, IMAGE + "        if generator is not None and index % 971 == 5:\n            image[0, 3, 3] = torch.nan\n")]),
]  # fmt: skip


SEGMENT = [
    HEALTHY,
    Case("no-dice", "default", "no Dice loss", settings=["--dice", "0"]),
    NO_AUGMENTATION,
    planted("seg-void-learnt", "void learnt as the last class"),
    planted("seg-zero-is-void", "ids shifted: 0 read as void"),
    planted("seg-mirrored-apart", "half of the masks mirrored without their pictures"),
    planted("seg-mask-behind", "masks ten pixels off, in both paths"),
    planted("seg-mean-over-pictures", "a mean over windows of their own IoU"),
    planted("seg-normalised-twice", "normalised twice"),
    Case("batch-norm", "V7", "batch norm over four windows at a time",
         settings=["--norm", "batch", "--train.accumulate", "4"]),
]  # fmt: skip
DETECT = [
    HEALTHY,
    NO_AUGMENTATION,
    planted("det-xyxy-as-xywh", "boxes in another format, in training and evaluation alike"),
    planted("det-normalised-boxes", "boxes divided by the picture's side"),
    planted("det-canvas-learnt", "boxes and truth of a picture of another size"),
    planted("det-statistics-of-255", "mean and deviation of 0-255 for pictures of 0-1"),
    planted("det-class-offset-scored", "class ids one off where they are scored"),
]
SCALED = "self.offset, self.scale = nn.Parameter(mean.clone()), nn.Parameter(std.clone())"
UPSAMPLED = "x = F.gelu(self.upsample(x)).unflatten(-1, (5, -1)).flatten(1, 2)"
NEAREST = ("x = x.unflatten(-1, (2, -1)).flatten(1, 2)\n"
           "        x = x[:, torch.arange(x.shape[1] * 5 // 2, device=x.device) * 2 // 5]")  # fmt: skip
LAYER = "self.upsample = nn.Linear(2 * d, 5 * d)  # two frames of 50 ms are five of 20 ms\n"
STARTED = ("        nn.init.zeros_(self.upsample.bias)\n"
           "        with torch.no_grad():\n"
           "            self.upsample.weight.copy_(torch.cat([torch.eye(2 * d)[:d]] * 3 + [torch.eye(2 * d)[d:]] * 2))\n")  # fmt: skip
PREVIOUS = planted_whisper.PREVIOUS
FRESH = ("source = data[\"train\"].source\n    model = Student(cfg.width, cfg.depth, (source.ears_mean, source.ears_std), "
         "measures.mean, measures.std, source.rest)\n")  # fmt: skip
WHISPER = [
    HEALTHY,
    Case("error-alone", "W2", "squared error alone", settings=["--cosine", "0"]),
    Case("cosine-alone", "W2", "cosine alone", settings=["--mse", "0"]),
    planted("pads-in-one-term", "pads in the squared error"),
    Case("zeros-after-the-end", "W2", "zeros where the recording has ended",
         [('("rest", rest)', '("rest", 0 * rest)')]),
    planted("no-offset", "an offset that starts at zero"),
    planted("scale-of-a-fresh-layer", "a scale that starts fifty times too small"),
    Case("no-offset-no-scale", "W3", "neither offset nor scale",
         [(SCALED, "self.offset, self.scale = 0 * mean, torch.ones_like(std)")]),
    Case("nearest-frame", "W4", "each frame repeated in place of learnt upsampling", [(UPSAMPLED, NEAREST)]),
    Case("upsampling-from-repetition", "W4", "learnt upsampling that starts as repetition (Aitken 2017), without GELU",
         [(LAYER, LAYER + STARTED), (UPSAMPLED, UPSAMPLED.replace("F.gelu(self.upsample(x))", "self.upsample(x)"))]),
    planted("stretched-over-the-canvas", "stretched over the canvas"),
    Case("no-second-stage", "W1", "no second stage", settings=["--task.epochs", "0.1", "--task.lr", "1e-9"]),
    Case("no-first-stage", "W1", "no first stage", [(PREVIOUS, FRESH)], ["--features.epochs", "0"]),
    Case("no-first-stage-loose", "W1 W3", "no first stage, no offset, no scale",
         [(PREVIOUS, FRESH), (SCALED, "self.offset, self.scale = 0 * mean, torch.ones_like(std)")],
         ["--features.epochs", "0"]),
    Case("no-first-stage-longer", "W1", "no first stage, the second four times as long",
         [(PREVIOUS, FRESH)], ["--features.epochs", "0", "--task.epochs", "4"]),
    Case("ramp", "", "words that come in by and by", settings=["--ramp", "0.5"]),
    planted("decoder-trains-too", "the teacher's decoder learns, too"),
    planted("teacher-in-train-mode", "the teacher in train mode, dropout 0.1"),
    planted("transcript-shifted-twice", "the transcript shifted twice"),
    planted("features-of-another-recording", "features of another recording"),
]  # fmt: skip
REFUSED = "if previous is None and not cfg.model:\n"
EVERYTHING = '{"encoder": cfg.optim.lr, "projector": cfg.optim.lr, "language": cfg.optim.lr}'
VLM = [
    HEALTHY,
    Case("no-first-stage", "X2", "no stage one", [(REFUSED, "if False:\n")], ["--align.epochs", "0"]),
    planted("projector-made-anew", "the projector of stage one lost"),
    planted("language-hot-in-stage-one", "the language model learns in stage one, too"),
    Case("all-from-the-start", "X1", "everything learns from the start, at one rate",
         [(planted_instruct.ALIGN_RATES, EVERYTHING + ", start"), (planted_instruct.INSTRUCT_RATES, f"rates = {EVERYTHING}\n")]),
    Case("encoder-in-stage-two", "X1", "the encoder learns in stage two at the projector's rate",
         [(planted_instruct.INSTRUCT_RATES, planted_instruct.INSTRUCT_RATES.replace("{", '{"encoder": cfg.optim.lr, '))]),
    planted("one-rate-for-all", "one rate for projector and language model"),
    planted("language-model-hot", "the language model at a hundred times its rate"),
    Case("language-frozen", "X1", "the language model frozen in stage two",
         [(planted_instruct.INSTRUCT_RATES, 'rates = {"projector": cfg.optim.lr}\n')]),
    planted("vlm-04-projector-frozen-with-the-tower", "the projector frozen in stage two"),
    Case("third-stage", "X1", "healthy, with half an epoch of stage three", settings=["--unfreeze.epochs", "0.5"]),
    Case("projector-not-sized", "X2", "a projector without norm and gain",
         [("return self.gain * self.out(self.layers(self.norm(features)))", "return self.layers(self.norm(features))")]),
    planted("random-encoder", "a random encoder, frozen"),
    planted("vlm-01-places-scored", "questions and places scored, too"),
    planted("answers-cut", "the ends of the rows cut"),
    planted("answers-seen-ahead", "attention that sees ahead"),
    planted("unbalanced-questions", "questions whose answers are mostly the same"),
    planted("one-picture-for-all", "one picture for all"),
]  # fmt: skip


PIXEL = [
    HEALTHY,
    NO_AVERAGE,
    planted("dif-01-average-never-stepped", "the average never updated"),
    planted("raw-weights-exported", "raw weights exported"),
    planted("dif-04-condition-never-dropped", "the class never hidden"),
    planted("dif-05-constant-timestep", "one noise level for all"),
    planted("dif-07-velocity-with-another-sign", "the velocity's sign turned"),
    NO_MIN_SNR,
    planted("dif-06-weight-of-another-prediction", "min-SNR of another prediction type"),
    planted("dif-09-sampler-inherits-clipping", "an evaluation that clips (`clip_sample`, inherited)"),
]  # fmt: skip
FLOW = [
    HEALTHY,
    NO_AVERAGE,
    planted("flow-average-never-stepped", "the average never updated"),
    Case("flow-levels-uniform", "DF7", "levels uniform instead of logit-normal", [healthy_flow.UNIFORM]),
    planted("flow-weighed-as-a-diffusion", "weighed by min-SNR as a diffusion"),
    planted("flow-velocity-turned", "the velocity's sign turned"),
    planted("flow-time-reversed", "time reversed: the net told 1000 - t"),
    planted("flow-told-a-share", "the net told 0 to 1 where its sampler tells 0 to 1,000"),
    planted("flow-exported-with-another-shift", "another `shift` in the exported scheduler (3 for 1)"),
]  # fmt: skip
LATENT = [
    HEALTHY,
    planted("latent-factor-five-times", "latents five times too large"),
    planted("latent-dif-03-factor-of-another-autoencoder", "Stable Diffusion's 0.18215, no shift"),
    planted("latent-shifted", "latents shifted by one"),
    NO_AVERAGE,
    planted("latent-class-never-dropped", "the class never hidden"),
    NO_MIN_SNR,
    Case("no-l1", "default", "stage one: no mean absolute error", settings=["--vae.l1", "0"], alone=True),
    Case("no-divergence", "default", "stage one: no divergence", settings=["--vae.kl", "0"], alone=True),
    planted("latent-cached-with-a-draw", "cached with a draw"),
]


def program(export: Path):
    """The exported program."""
    import torch

    with LOADING:
        return torch.export.load(export / "model.pt2").module()


def classified(export: Path, torch) -> float:
    """Accuracy on the held-out digits."""
    from trainworthy.recipes.shared import digits

    images, labels = digits.load()
    held_out = digits.split(labels)[1]
    right = program(export)(images[held_out].float() / 255).argmax(1) == labels[held_out]
    return right.float().mean().item()


def segmented(export: Path, torch) -> float:
    """IoU of the nuclei in the right third: windows of 64 every 32 pixels, their answers added up."""
    from trainworthy.recipes.shared import nuclei

    picture, mask = (t[:, nuclei.LEARN :] for t in nuclei.load())
    x, (h, w) = picture.float()[None, None] / 255, mask.shape
    net, total = program(export), torch.zeros(2, h, w)
    for top in (*range(0, h - 64, 32), h - 64):
        for left in (*range(0, w - 64, 32), w - 64):
            part = slice(top, top + 64), slice(left, left + 64)
            total[:, *part] += net(x[..., *part])[0].softmax(0)
    said, truth = total.argmax(0) == 1, mask == 1
    return ((said & truth).sum() / (said | truth).sum()).item()


def detected(export: Path, torch) -> float:
    """COCO's average precision on the held-out scenes, their boxes as they were composed."""
    from torchmetrics.detection import MeanAveragePrecision
    from torchvision.ops import batched_nms
    from trainworthy.recipes.vision.data import pasted

    net, metric = program(export), MeanAveragePrecision(backend="faster_coco_eval")
    for i in range(pasted.HELD_OUT):
        scene = pasted.scene("val", i)
        where, score = (t[0] for t in net(pasted.render("val", scene)[None].float() / 255))
        row, label = (score > 0.2).nonzero(as_tuple=True)
        kept = batched_nms(where[row], score[row, label], label, 0.6)[:100]
        said = {"boxes": where[row][kept], "scores": score[row, label][kept], "labels": label[kept]}
        truth = {
            "boxes": torch.tensor([o.box for o in scene.items]).float(),
            "labels": torch.tensor([o.digit for o in scene.items]),
        }
        metric.update([said], [truth])
    return max(0.0, float(metric.compute()["map"]))


def transcribed(export: Path, torch) -> float:
    """Word error rate of the held-out sentences: the exported student, read by Whisper as it was published."""
    from trainworthy.recipes.distill.data import recordings
    from trainworthy.recipes.shared import whisper

    said = recordings.load(recordings.Source())
    held_out = said.held_out.nonzero()[:, 0].tolist()
    net, envelopes = program(export), torch.stack([said.read(i)[0] for i in held_out])
    features = torch.cat([net(part) for part in envelopes.split(25)])
    return whisper.word_error_rate([said.texts[i] for i in held_out], whisper.load("tiny.en", 6).write(features))


def answered(export: Path, torch) -> float:
    """Share of held-out counterfactual pairs both of whose questions are answered right, each asked alone, by `generate`."""
    from trainworthy.recipes.vlm.data.scenes import QUESTIONS, Scenes
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with LOADING:
        eyes = torch.export.load(export / "vision.pt2").module()
    tokenizer, model = (kind.from_pretrained(export / "language") for kind in (AutoTokenizer, AutoModelForCausalLM))
    embed, scenes, right = model.get_input_embeddings(), Scenes("val", 250), []
    for kind, question in enumerate(QUESTIONS.values()):
        which = [2 * k + i for k in range(kind, 250, len(QUESTIONS)) for i in (0, 1)]
        seen = eyes(torch.stack([scenes.image(i) for i in which]).float() / 255)
        asked = tokenizer(f"\n{question}", add_special_tokens=False, return_tensors="pt").input_ids
        start, words = (
            embed(ids).expand(len(which), -1, -1) for ids in (torch.tensor([[tokenizer.bos_token_id]]), asked)
        )
        said = model.generate(inputs_embeds=torch.cat([start, seen, words], 1), max_new_tokens=4, do_sample=False)
        answers = [scenes.questions(i)[kind].answer for i in which]
        hit = [a == b for a, b in zip(tokenizer.batch_decode(said, skip_special_tokens=True), answers, strict=True)]
        right += [a and b for a, b in zip(hit[::2], hit[1::2], strict=True)]
    return statistics.fmean(right)


def drawn_at(side: int) -> Callable:
    """The exported pipeline's samples of digits of `side` pixels, the same noise for every case."""

    def judged(export: Path, torch) -> dict[str, float]:
        from diffusers import DiffusionPipeline
        from trainworthy.recipes.diffusion.evaluation.scores import frechet
        from trainworthy.recipes.shared import classifier, digits

        with LOADING:
            pipe, sees = DiffusionPipeline.from_pretrained(export, trust_remote_code=True), classifier.load(side)
        pipe.set_progress_bar_config(disable=True)
        images, labels = digits.load()
        real = sees(digits.small(images[digits.split(labels)[1]], side))[1]
        asked, found = torch.arange(10).repeat(50), {}
        for scale in (2.0, 1.0):
            draws = torch.Generator().manual_seed(0)
            made = [pipe(c, guidance_scale=scale, num_inference_steps=25, generator=draws, output_type="pt").images
                    for c in asked.split(100)]  # fmt: skip
            said, features = sees(torch.cat(made) * 2 - 1)
            found[scale] = (said == asked).float().mean().item(), frechet(features, real)
        return {"honest": found[2.0][0], "distance": found[2.0][1], "unguided": found[1.0][0]}

    return judged


@dataclass
class Recipe:
    """How cases of a recipe are run and judged."""

    cases: list[Case]
    classifier: Callable
    settings: list[str]
    reported: str = ""
    """The metric that is beside the classifier's, where it is not the recipe's own."""
    given: str = ""
    """Part of the export of a healthy run that the other cases take as given,"""
    made: tuple[str, ...] = ()
    """by these settings,"""
    taken: tuple[str, ...] = ()
    """with these, and last its folder."""


SHORT = ["--train.epochs", "6", "--train.eval-every", "6", "--sampling.scales", "2"]
RECIPES = {
    "vision/classify": Recipe(CASES, classified, ["--train.eval-every", "30"]),
    "vision/segment": Recipe(SEGMENT, segmented, ["--train.epochs", "10", "--train.eval-every", "10"]),
    "vision/detect": Recipe(DETECT, detected, ["--data.scenes", "1600", "--train.epochs", "1"]),
    "distill/whisper": Recipe(WHISPER, transcribed, ["--features.epochs", "4", "--features.eval-every", "4",
                                                     "--task.epochs", "1", "--task.eval-every", "1"]),
    "vlm/instruct": Recipe(VLM, answered, ["--align.epochs", "0.25", "--instruct.epochs", "0.5"], "pairs"),
    "diffusion/pixel": Recipe(PIXEL, drawn_at(16), SHORT),
    "diffusion/flow": Recipe(FLOW, drawn_at(16), SHORT),
    "diffusion/latent": Recipe(
        LATENT, drawn_at(32),
        ["--autoencoder.epochs", "4", "--autoencoder.eval-every", "4", "--latent.epochs", "8", "--latent.eval-every", "8",
         "--sampling.scales", "2"],
        given="vae", made=("--latent.epochs", "0.02", "--sampling.every", "50"),
        taken=("--autoencoder.epochs", "0.02", "--autoencoder.lr", "1e-30", "--vae.path"),
    ),
}  # fmt: skip


def honest(folder: Path, classifier: Callable) -> dict[str, float]:
    """What `classifier` says of the export."""
    import torch

    with torch.no_grad():
        said = classifier(folder / "export", torch)
    return said if isinstance(said, dict) else {"honest": said}


def trained(recipe: str, case: Case, seed: int, name: str, *settings: str) -> Path:
    """The run folder of one case with one seed, in folder `name`."""
    source = (ROOT / "recipes" / f"{recipe}.py").read_text().replace(BARE, "")
    for old, new in case.hunks:
        assert source.count(old) == 1, (case.id, source.count(old))
        source = source.replace(old, new)
    (Path(name) / "mine.py").write_text(source)
    bare = ["--gates.no-enabled", "--run.no-tensorboard", "--loader.workers", "0", "--run.seed", str(seed)]
    known = [*RECIPES[recipe].settings, *case.settings, *settings]
    command = [sys.executable, "-m", "trainworthy.launch", "mine.py", *bare, *known]
    env = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=name, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case.id}, seed {seed}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return next(Path(name).glob("runs/mine/*"))


class Given:
    """What cases of a seed share, trained once."""

    def __init__(self, recipe: str, folder: str):
        self.recipe, self.folder, self.locks = recipe, folder, defaultdict(threading.Lock)

    def settings(self, case: Case, seed: int) -> tuple[str, ...]:
        """With which `case` takes it."""
        known, home = RECIPES[self.recipe], Path(self.folder, str(seed))
        if case.alone or not known.given:
            return ()
        with self.locks[seed]:
            if not home.exists():
                with tempfile.TemporaryDirectory() as name:
                    run = trained(self.recipe, known.cases[0], seed, name, *known.made)
                    shutil.copytree(run / "export" / known.given, home)
        return *known.taken, str(home)


def measure(recipe: str, case: Case, seed: int, given: Given) -> dict[str, float]:
    """Train one case with one seed."""
    known, more = RECIPES[recipe], given.settings(case, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = trained(recipe, case, seed, name, *more)
        summary = json.loads((folder / "summary.json").read_text())
        steps = [json.loads(line)["step/loss"] for line in (folder / "step_metrics.jsonl").read_text().splitlines()]
        loss = statistics.fmean(steps[-max(1, len(steps) // 10) :])
        reported = summary["metrics"][known.reported or summary["metric"]]
        return {"loss": loss, "reported": reported, **honest(folder, known.classifier)}


def main() -> None:
    """Every case with every seed; a table and a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--to", type=Path)
    args = parser.parse_args()
    chosen = [c for c in RECIPES[args.recipe].cases if not args.only or c.id in args.only]
    rows = json.loads(args.to.read_text())["cases"] if args.only and args.to and args.to.exists() else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        given = Given(args.recipe, folder)
        jobs = {c.id: [pool.submit(measure, args.recipe, c, s, given) for s in args.seeds] for c in chosen}
        for case in chosen:
            found = [job.result() for job in jobs[case.id]]
            values = {k: [round(f[k], 4) for f in found] for k in found[0]}
            rows[case.id] = {"rows": case.rows, "what": case.what, **joined(rows.get(case.id, {}), args.seeds, values)}
            spread = ", ".join(f"{k} {statistics.mean(v):.3f} [{min(v):.3f}-{max(v):.3f}]" for k, v in values.items())
            print(f"{case.id:<30} {spread}", flush=True)
            if args.to:
                keep(args.to, args.recipe, rows)


def joined(before: dict, seeds: list[int], values: dict[str, list[float]]) -> dict[str, list]:
    """The figures of these seeds, and of others that the file has already, in the order of the seeds."""
    others = [i for i, seed in enumerate(before.get("seeds", [])) if seed not in seeds]
    each = {"seeds": seeds, **values}
    both = {k: [before[k][i] for i in others] + v for k, v in each.items()}
    order = sorted(range(len(both["seeds"])), key=both["seeds"].__getitem__)
    return {k: [v[i] for i in order] for k, v in both.items()}


def keep(file: Path, recipe: str, rows: dict[str, dict]) -> None:
    """The table so far: a case costs half a minute or more."""
    from trainworthy.core.recipe.loading import versions

    ordered = {c.id: rows[c.id] for c in RECIPES[recipe].cases if c.id in rows}
    kept = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "settings": RECIPES[recipe].settings,
        "cases": ordered,
    }
    file.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
