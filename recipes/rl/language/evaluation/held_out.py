"""What greedy answers to held-out questions are scored by, next to whether they are right."""

import math
from collections.abc import Callable
from typing import Any

from trainworthy.recipes.llm.evaluation import metrics
from trainworthy.recipes.rl.language.data import problems

from trainworthy import core

ALWAYS = ("accuracy", "ended", "tokens")
Said = list[tuple[str, int, bool]]
"""(answer, its tokens, did it end by itself?) of each question."""


class HeldOut:
    """The metrics that `--metric` names; the first selects the best checkpoint."""

    def __init__(self, names: str, reward: problems.Reward, own: str, put: Callable[[str], Any]):
        self.names = [n.strip() for n in names.split(",") if n.strip()]
        self.reward = reward
        self.own = own
        self.put = put
        if "perplexity" in self.names:
            raise core.UserError("--metric perplexity: there is no wanted text whose tokens could be expected",
                                 needed=f"accuracy, reward, or {metrics.NAMES}".replace("perplexity, ", ""))  # fmt: skip
        if not {"accuracy", "reward"} >= {*self.names} or not self.names:
            metrics.named(",".join(n for n in self.names if n not in ("accuracy", "reward")))
        self.columns = [*ALWAYS, *(metrics.key(n) for n in self.names if n != "accuracy")]

    def rows(self, batch: dict[str, Any], answers: Said) -> list[list[float]]:
        """The values of each question of a batch, in the order of `columns`."""
        texts, due = [text for text, _, _ in answers], list(batch["answer"])
        each = [[problems.right(text, wanted), ended, n] for (text, n, ended), wanted in zip(answers, due, strict=True)]
        for name in self.names:
            if name == "reward":
                given = {k: list(v) for k, v in batch.items() if k != "prompt"}
                values = self.reward(prompts=[self.put(p) for p in batch["prompt"]], completions=texts, **given)
            elif name != "accuracy":
                values = [metrics.score(name)(text.strip(), wanted) for text, wanted in zip(texts, due, strict=True)]
            else:
                continue
            each = [[*row, value] for row, value in zip(each, values, strict=True)]
        return each

    def metric(self) -> core.Metric:
        """What the best checkpoint is chosen by."""
        if self.names[0] == "accuracy":
            return core.Metric("accuracy", "which share of unseen questions is answered right?", floor=0.0, ceiling=1.0)
        if self.names[0] == "reward":  # of `exact` a share; of a user's own nothing is known
            ends = (0.0, 1.0) if self.own == "exact" else (-math.inf, math.inf)
            return core.Metric("reward", "what do greedy answers to unseen questions earn?", *ends)
        return metrics.metric(self.names[0], "which words are in the answer?", 0)
