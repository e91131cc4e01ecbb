"""Ways to read and augment that look like repeated samples or draws, and are none."""

from tests.core.planted_loader import AUGMENT, REPLACEMENT, ordered
from tests.helpers.plant import Healthy
from tests.vision.planted_classify import IMAGE, SAMPLE, STAGES, TRAIN_DATA

VARIANTS = [
    Healthy("rarely-augmented", hunk=(AUGMENT, "image = image.flip(2) if torch.rand(()) < 0.02 else image\n"),
            naive="a sample looks the same in both epochs"),
    Healthy("few-outcomes", hunk=(AUGMENT, "image = image.roll(int(torch.randint(2, ())), 2)\n"), naive="draws repeat"),
    Healthy("handed-generator",
            hunk=(AUGMENT, "image = (image + 0.1 * torch.randn(image.shape, generator=generator)).clamp(0, 1)\n"),
            naive="the global generator is not used"),
    Healthy("numpy-seeded-by-the-key",
            hunk=(AUGMENT, 'draws = __import__("numpy").random.default_rng(generator.initial_seed())\n'
                  "            image = image * float(draws.uniform(0.7, 1.0))\n"), naive="numpy's own generator"),
    Healthy("decoded-once", hunk=(IMAGE, "kept = self.__dict__.setdefault('kept', {})\n"
                                  "        image = kept.setdefault(index, self.images[index].float() / 255)\n"),
            naive="the data set keeps state"),
    Healthy("fixed-permutation",
            hunk=(SAMPLE, "order = torch.randperm(28, generator=torch.Generator().manual_seed(0))\n"
                  '        return {"image": image[:, order], "label": self.labels[index]}'),
            naive="every sample draws the same numbers"),
    Healthy("declared-sampler", hunk=(STAGES, ordered(REPLACEMENT, "stage.expect.sampling = 'drawn with replacement'")),
            naive="samples repeat in an epoch"),
    Healthy("shuffled-in-windows",
            hunk=(STAGES, ordered("torch.cat([i + core.base.seeds.permutation(500, *parts, i) for i in range(0, n, 500)])")),
            naive="the order hardly changes"),
    Healthy("copies-not-augmented", ("--no-augment",), hunk=(TRAIN_DATA, "learn = torch.cat([learn, learn[:400].repeat(5)])\n    "
                                                             + TRAIN_DATA), naive="samples repeat in an epoch"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all
