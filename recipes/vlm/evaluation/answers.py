"""Scores of answers about images: token by token against the right ones, and of generated text; what eight samples must reach."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.doubles import to_double
from trainworthy.core.gates.gate import fetch
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Data, Expect, Metric, Probe, Tile
from trainworthy.recipes.llm.evaluation import metrics
from trainworthy.recipes.vlm.data import questions, rows
from trainworthy.recipes.vlm.data.questions import Questions

LONG = 5  # words
MEMORISED = 0.9  # accuracy on long answers: one word in ten may differ when the loss has closed


def chosen(metric: str, val: Questions) -> list[str]:
    """Return the names of the metrics; the first selects the best checkpoint."""
    if metric:
        names = [name.strip() for name in metric.split(",")]
        if others := ",".join(n for n in names if n != "accuracy"):
            metrics.named(others)
        return names
    return ["f1"] if longer(val, LONG) else ["accuracy"]


def longer(val: Questions, words: int) -> bool:
    """Return whether more than a tenth of the held-out answers have more than this number of words."""
    some = val.representative(min(questions.SEEN, len(val)))
    answers = [one.answer for i in some for one in val.source.questions(val.kept[i])]
    return sum(len(metrics.words(text)) > words for text in answers) > 0.1 * len(answers)


class Answers:
    """How a stage's answers are scored. `metric`: names, or empty to choose; `longest`: most generated tokens, 0 for the data's longest."""

    def __init__(self, run: Run, train: Questions, val: Questions, *, metric: str, longest: int):
        self.run, self.train, self.val = run, train, val
        self.guess = questions.majority(train.source)
        self.names = chosen(metric, val)
        self.in_words = longer(val, 1)  # answers are texts, not single words
        self.generated = [n for n in self.names if n not in ("accuracy", "perplexity")]
        own = 0 if self.names == ["accuracy"] else max(train.longest_answer(), val.longest_answer())
        self.longest = longest or own
        self.seen = metrics.Seen()

    def evaluate(self, model: nn.Module, data: Data) -> dict[str, float]:
        """Return the metrics over all processes."""
        return self.scores(model, data, self.generated)

    def scores(self, model: nn.Module, data: Data, generated: list[str]) -> dict[str, float]:
        """Return accuracy, loss and the metrics of generated text that are named."""
        run = self.run
        found, nats, heard = [], [], [torch.zeros(0, 1 + len(generated), device=run.device)]
        for batch in run.batches(data):
            logits = model(batch)
            found.append(questions.verdicts(logits, batch))
            nats.append(questions.surprise(logits, batch["labels"]))
            heard += [self.listen(model, batch, generated)] if generated else []
        each, right = to_double(run.gather(torch.cat(nats))), run.gather(torch.cat(found))
        lost, tokens = each.sum(0).tolist()
        values = {"accuracy": to_double(right[:, 0])}
        scores = questions.score(right, self.train.source.kinds)
        scores |= {"nll": lost / tokens}
        values |= {"perplexity": each.unbind(1)} if "perplexity" in self.names else {}
        if generated:
            gathered = to_double(run.gather(torch.cat(heard)))
            values |= dict(zip(("stops", *map(metrics.key, generated)), gathered.unbind(1), strict=True))
        return scores | self.seen.means(values)

    def listen(self, model: Any, batch: dict, generated: list[str]) -> Tensor:
        """Return (answer ended by itself, metrics) of generated answers, (answers, 1 + metrics)."""
        prompt_rows, table, train = questions.prompts(batch), [], self.train
        if prompt_rows is None:
            return torch.zeros(0, 1 + len(generated), device=self.run.device)
        heard = model.speak(prompt_rows.batch, self.longest, train.ends).tolist()
        for answer, due in zip(heard, prompt_rows.answers, strict=True):
            end = next((i for i, token in enumerate(answer) if token in train.ends), len(answer))
            texts = train.texts(answer[:end]), train.texts(due)
            table.append([float(end < len(answer)), *(metrics.score(name)(*texts) for name in generated)])
        return torch.tensor(table, device=self.run.device)

    def preview(self, batch: dict) -> list[Tile]:
        """Return each sample's image with its right answers."""
        return [
            Tile(text, image)
            for text, image in zip(self._texts(batch["labels"]), self.train.images_of(batch), strict=True)
        ]

    def predict(self, model: nn.Module, batch: dict) -> list[Tile]:
        """Return the most likely tokens at the places of the answers, and the share of right answers."""
        logits = model(batch)
        best = logits[:, :-1].argmax(-1).masked_fill(batch["labels"][:, 1:] < 0, -1)
        share = (rows.right(logits, batch) & (batch["kind"] >= 0)).sum(1) / (batch["kind"] >= 0).sum(1)
        return [Tile(text, score=s) for text, s in zip(self._texts(best), share.tolist(), strict=True)]

    def figures(self, model: nn.Module, data: Data) -> dict[str, list[Tile]]:
        """Return the first images with the model's answers."""
        batch = fetch(data, list(range(min(16, len(data)))), None, self.run.device)
        seen = self.preview({k: v.cpu() for k, v in batch.items()})
        return {"Pictures and their counterfactuals: what the model answers": [
            Tile(answer.caption, tile.image, score=answer.score)
            for answer, tile in zip(self.predict(model, batch), seen, strict=True)]}  # fmt: skip

    def _texts(self, ids: Tensor) -> list[str]:
        return [self.train.tokenizer.decode(row[row >= 0].tolist(), skip_special_tokens=True) for row in ids]

    def commonest(self) -> dict[str, float]:
        """Return the scores of the most common answer to each question."""
        blind = {n: questions.blindly(self.val.source, self.guess, n) for n in ("accuracy", *self.generated)}
        return {metrics.key(k): v for k, v in blind.items()} | {"pairs": 0.0}

    def metric(self, name: str, vocabulary: int) -> Metric:
        """Return a metric, and its score without looking at images."""
        if name == "accuracy":
            return Metric(name, "what does the picture show?", ceiling=1.0,
                          floor=questions.blindly(self.train.source, self.guess))  # fmt: skip
        found = metrics.metric(name, "which words of the expected answers occur?", vocabulary)
        if name != "perplexity":
            found.floor = questions.blindly(self.train.source, self.guess, name)
        return found

    def probe(self, vocabulary: int) -> Probe | None:
        """Return F1 as the gates' metric if the stage's is perplexity. Gates ask whether the answer follows the image, which perplexity
        of long answers cannot show: their words follow from one another."""
        if self.names[0] != "perplexity":
            return None
        return Probe(self.metric("f1", vocabulary), lambda model, data: self.scores(model, data, ["f1"]))


def expected(
    stage: str, metric: Metric, halfway: Callable[[dict], float], *, in_words: bool = False, **declared: Any
) -> Expect:
    """Return what eight samples must reach by `metric` in this stage. `halfway`: half of the untrained model's loss on a batch;
    `in_words`: answers have several words."""
    found = Expect(overfit_steps=200 if stage == "align" else 110, **declared)
    if metric.name == "accuracy" and not (in_words and stage == "align"):
        # A projector alone, in front of a frozen language model, gets 30 of 32 answers at two of five seeds.
        found.overfit_metric = 0.9 if stage == "align" else None
    elif stage == "align":
        # It cannot make that model produce texts word by word: half of the initial loss is enough, and `aligned` checks that the
        # answers depend on the image. Texts of a few words are scored whole, so none need be right.
        found.loss_floor, found.overfit_metric = halfway, 0.0 if metric.name == "accuracy" else metric.floor
        found.solvable_without_input = (
            "answers of several words from a frozen language model; `aligned` compares pictures by the loss"
        )
    else:
        found.overfit_metric, found.overfit_longer = max(MEMORISED, (1 + metric.floor) / 2), True
    return found
