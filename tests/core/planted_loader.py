"""Bugs planted in how samples are read: by workers, over epochs, by processes; most show in no single read of a sample."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import INIT, LOOP, SAMPLE, STAGES, TRAIN_DATA, UPDATE, staged

AUGMENT = "image = self.augment(image)  # torchvision draws from torch's global generator, which is seeded per sample\n"
OWN_LOOP = """    data = stage.data["train"]
    n, size = len(data), cfg.train.batch_size
    order = torch.randperm(n, generator=torch.Generator().manual_seed(cfg.run.seed)).tolist()
    for step in run.steps(stage):
        rows = ROWS
        run.update(stage, [data.collate([data.get(i, torch.default_generator) for i in rows])])
"""
OWN_DRAWS = """self.images, self.labels = images, labels
        draws = __import__("numpy").random.default_rng(0)
        self.augment = augment and (lambda x: x.roll(int(draws.integers(-3, 4)), 2))
"""
REPLACEMENT = "torch.randint(n, (n,), generator=torch.Generator().manual_seed(core.base.seeds.derive(*parts)))"
SCHEMA = "a sample read twice in one process differs as well"
WIRING = "what does not train on step.batches is stopped by whatever compares the gradient with theirs"


def ordered(expression: str, *more: str) -> str:
    """The training set in an order of its own."""
    return staged("\n".join(["data, n = stage.data['train'], len(stage.data['train'])",
                             f"data.order = lambda *parts: {expression}", *more]))  # fmt: skip


PLANTS = [
    Plant("generator-in-constructor", "loader", "C15", INIT, OWN_DRAWS, ("both workers repeat one sequence", "made in __init__"),
          source="GEN-04 pytorch/pytorch#5059", before=("schema",), why=SCHEMA, harm="half of the variety with two workers"),
    Plant("worker-seeds-itself", "loader", "C15", AUGMENT,
          "worker = torch.utils.data.get_worker_info()\n            if worker is not None:\n"
          "                torch.manual_seed(worker.seed)\n            " + AUGMENT, ("in another worker", "seeds a generator"),
          source="GEN-04 Lightning-AI/pytorch-lightning#20412", before=("overfit",),
          why="workers and the evaluation path give the eight samples different draws",
          harm="one augmentation per worker for the whole run"),
    Plant("seeded-by-index", "loader", "C15", AUGMENT, "torch.manual_seed(index)\n            " + AUGMENT,
          ("the same in both epochs", "seeds a generator"), source="GEN-04 CenterNet#233",
          harm="thirty epochs of the same 4,000 pictures"),
    Plant("seeded-for-all", "loader", "C15", AUGMENT, "torch.manual_seed(0)\n            " + AUGMENT,
          ("the same in both epochs", "those of every other sample"), source="GEN-04 CenterNet#233",
          harm="one augmentation for all"),
    Plant("augmented-once", "loader", "C15", AUGMENT,
          "kept = self.__dict__.setdefault('kept', {})\n            if index not in kept:\n"
          "                kept[index] = self.augment(image)\n            image = kept[index]\n",
          ("in another worker", "stores augmented samples"), harm="thirty epochs of the same 4,000 pictures"),
    Plant("numpy-global", "loader", "C15", AUGMENT,
          'image = self.augment(image) * __import__("numpy").float32(__import__("numpy").random.uniform(0.7, 1.0))\n',
          ("in another worker", "numpy's"), source="GEN-04 pytorch/pytorch#5059", before=("schema",), why=SCHEMA),
    Plant("stream-in-every-worker", "loader", "C15", SAMPLE,
          "turns = self.__dict__.setdefault('turns', __import__('itertools').cycle(range(len(self))))\n"
          "        index = next(turns) if generator is not None else index\n"
          '        return {"image": self.images[index].float() / 255, "label": self.labels[index]}',
          ("both workers repeat one sequence",), source="GEN-13 huggingface/datasets#3423", before=("schema",), why=SCHEMA,
          harm="an epoch is two copies of one half"),
    Plant("order-without-epoch", "loader", "C15", STAGES,
          ordered("torch.randperm(n, generator=torch.Generator().manual_seed(cfg.run.seed))"),
          ("the order of the first", "set_epoch"), source="GEN-05 pytorch/pytorch#31771", harm="worse mixing"),
    Plant("order-drawn-anew", "loader", "C15", STAGES, ordered("torch.randperm(n)"),
          ("differs from call to call", "after a stop"), source="GEN-08 transgenic#59",
          harm="after a stop some samples come twice in an epoch, others never"),
    Plant("drawn-with-replacement", "loader", "C15", STAGES, ordered(REPLACEMENT),
          ("is repeated after", "expect.sampling"),
          harm="a third of the samples left out each epoch"),
    Plant("same-order-in-the-loop", "loader", "C15", LOOP,
          OWN_LOOP.replace("ROWS", "[order[(step.index * size + i) % n] for i in range(size)]"),
          ("the order of the first", "set_epoch"), source="GEN-05 KAIR PR#106", before=("wiring",), why=WIRING),
    Plant("first-batch-again", "loader", "C15", UPDATE,
          "        run.first = getattr(run, 'first', step.batches)\n        run.update(stage, run.first)\n",
          ("is repeated after 8 others", "the same batch again and again"), before=("wiring",), why=WIRING,
          harm="next(iter(loader)) in the loop: one batch is learnt by heart"),
    Plant("split-twice", "loader", "C15", TRAIN_DATA, "learn = learn[run.rank :: run.world]\n    " + TRAIN_DATA,
          ("process 2 of 2 sees another data set", "2,000 samples", "core splits it again"),
          harm="on two processes an epoch reads half of the data"),
]  # fmt: skip
RELATIVES = ("numpy-global", "seeded-for-all", "same-order-in-the-loop", "stream-in-every-worker", "worker-seeds-itself",
             "generator-in-constructor", "drawn-with-replacement", "first-batch-again")  # fmt: skip
