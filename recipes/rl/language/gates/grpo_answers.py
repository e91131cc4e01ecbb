"""What the gates of GRPO share: their subject, and answers of the untrained policy, sampled once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.adapters.hosted import Hosted
from trainworthy.core.base import seeds
from trainworthy.core.base.modes import in_mode
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.loop.optim import exact
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.llm.gates import served
from trainworthy.recipes.rl.language.data.problems import Asker, Reward
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

FIRST = 8  # tokens of each answer whose distribution is kept as it was sampled from


@dataclass
class Subject:
    """What the gates of a stage check."""

    cfg: Any
    asker: Asker
    reward: Reward
    """The declared reward function."""

    def asked(self, stage: Stage) -> list[served.Asked]:
        """Return some questions as a user gives them, and their tokens in training."""
        rows = stage.data["questions"].rows[: served.SOME]
        return served.of_texts([(row["prompt"], self.asker.ids(row["prompt"])) for row in rows])


@dataclass
class Unit:
    """Answers of the untrained policy to two questions of different lengths, sampled by the trainer as in training; one row for each answer."""

    run: Run
    stage: Hosted
    rows: list[dict]
    batch: dict[str, Tensor]
    ids: list[tuple[list[int], list[int]]]
    """(prompt, answer) without padding."""
    drawn_from: list[Tensor]
    """Logits (answers, vocabulary) that the first tokens of the answers were drawn from; empty if another program generates."""


def unit(s: Subject, context: GateContext) -> Unit:
    """Sample the answers, once for all gates."""

    def make() -> Unit:
        run, stage = context.look()
        rows = [dict(r) for r in stage.ask(0)]
        for row in rows[
            s.cfg.num_generations :
        ]:  # a longer prompt: padding on the wrong side then changes the shorter ones
            solved = {"prompt": rows[0]["question"], "answer": rows[0]["answer"]}
            row["prompt"] = s.asker.put(s.asker.after(solved, row["question"]))
        seeds.seed_global(context.cfg.run.seed, "unit")
        with (
            in_mode(stage.model, training=True),
            torch.no_grad(),
            run.autocast(),
            generating(stage.model, len(rows)) as drawn_from,
        ):
            batch = stage.trainer._generate_and_score_completions(rows)
        sides = [[ids[mask.bool()].tolist() for ids, mask in zip(batch[f"{k}_ids"], batch[f"{k}_mask"], strict=True)]
                 for k in ("prompt", "completion")]  # fmt: skip
        if stage.trainer.args.mask_truncated_completions:
            # What was cut is not learnt from (DAPO), and is as long as allowed
            sides[1] = [ids or row.tolist() for ids, row in zip(sides[1], batch["completion_ids"], strict=True)]
        return Unit(
            run, stage, rows, {k: v for k, v in batch.items() if v.dim()}, list(zip(*sides, strict=True)), drawn_from
        )

    return context.once("unit", make)


@contextmanager
def generating(model: nn.Module, n: int) -> Iterator[list[Tensor]]:
    """Record the last logits (n, vocabulary) of the first forwards of `generate`: one on the prompts, then one on each new token. A
    forward on whole texts, which computes log-probabilities, ends the record."""
    seen: list[Tensor] = []
    over: list[bool] = []

    def listen(_module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        fits = ids is not None and len(ids) == n and (not seen or ids.shape[1] == 1)
        if not over and fits and len(seen) < FIRST:
            seen.append(exact(out.logits[:, -1].detach()))
        elif not fits:
            over.append(True)

    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    with bare.register_forward_hook(listen, with_kwargs=True):
        yield seen


def alone(u: Unit, temperature: float) -> list[Tensor]:
    """Return log-probabilities (tokens, vocabulary) at each answer's tokens, computed alone, without padding, from plain logits."""

    def read(before: list[int], after: list[int]) -> Tensor:
        ids = torch.tensor([before + after], device=u.run.device)
        logits = u.stage.model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1]
        return (exact(logits) / temperature).log_softmax(-1)

    with evaluating(u.stage.model), u.run.autocast():
        return [read(*row) for row in u.ids]


def truncated(u: Unit, log_probs: list[Tensor], temperature: float) -> list[Tensor]:
    """Return the distributions (tokens, vocabulary) of `log_probs`, at `temperature`, as the trainer's arguments restrict them for sampling."""
    args = u.stage.trainer.args
    warpers = [TopKLogitsWarper(args.top_k)] if args.top_k else []
    warpers += [TopPLogitsWarper(args.top_p)] if args.top_p < 1 else []
    warpers += [MinPLogitsWarper(args.min_p)] if args.min_p else []
    penalty = RepetitionPenaltyLogitsProcessor(args.repetition_penalty) if args.repetition_penalty != 1 else None
    if not warpers and penalty is None:
        return log_probs
    found = []
    for (before, after), log_p in zip(u.ids, log_probs, strict=True):
        rows = []
        for t, each in enumerate(log_p):
            ids, scores = torch.tensor([before + after[:t]], device=log_p.device), temperature * each[None]
            scores = (penalty(ids, scores) if penalty else scores) / temperature
            for warper in warpers:
                scores = warper(ids, scores)
            rows.append(scores[0].log_softmax(-1))
        found.append(torch.stack(rows))
    return found


def one_answer(u: Unit, log_probs: list[Tensor], temperature: float) -> str:
    """Return what shows that a low temperature leaves hardly more than one answer to each question, so that few groups have a gradient;
    else "". A policy that is as sure at a temperature of 1 has nothing to learn here, which is no fault of the setting. `log_probs`: its
    log-probabilities at `temperature`."""

    def given(log_p: list[Tensor]) -> float:
        return sum(p.gather(-1, torch.tensor(after, device=p.device)[:, None]).sum().exp().item()
                   for (_, after), p in zip(u.ids, log_p, strict=True)) / len(log_p)  # fmt: skip

    if temperature >= 1:
        return ""
    drawn, free = given(log_probs), given([(temperature * p).log_softmax(-1) for p in log_probs])
    return (
        f"--temperature {temperature:g} gives the answers it drew a probability of {drawn:.0%} each, 1 would give them {free:.0%}"
        * (drawn > 0.6 and free < drawn / 2)
    )
