"""Gate on the export of a causal language model: a fresh process loads it and computes what the trained model computes."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.processes import agreed
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.export_weights import exported_weights
from trainworthy.core.gates.checks.exported import query
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.llm.data.pairs import Chat
from trainworthy.recipes.llm.gates import served
from trainworthy.recipes.shared import language_reader

BIGGEST = 2_000_000_000  # parameters; a larger model is not written to disk just to be read again
READER = Path(language_reader.__file__)
ROWS, TOKENS = 3, 24
PROBE = "The quick brown fox: 12 + 35 = 47.\n"
# Relative change of log-probabilities by the rehearsal (a smaller one is near the rounding of two programs), and the largest
# difference as a share of it; on an accelerator or in 16 bits: ROUGH.
EXACT, ROUGH = (1e-4, 0.02), (0.05, 0.2)


def of_rows(chat: Chat) -> Callable[[Stage], list[served.Asked]]:
    """Return what gives some prompts of a stage whose training rows are prompts of a chat."""

    def prompts(stage: Stage) -> list[served.Asked]:
        data = stage.data["train"]
        return served.of_chat(chat, [data.get(i, None)["prompt"] for i in range(min(ROWS, len(data)))])

    return prompts


def exported(
    base: str, tokenizer: Any, lm: Callable[[nn.Module], nn.Module] = lambda model: model,
    prompts: Callable[[Stage], Iterable[served.Asked]] = lambda stage: (),
) -> Gate:  # fmt: skip
    """Return the gate. `base` is what adapters are loaded on, `lm` takes the language model out of the stage's model, `prompts` gives some
    prompts of training."""
    title = "the export, loaded in a fresh process, gives the log-probabilities of the trained model"

    @gate("exported", rows="C18 L5", title=title, reads="model export optimizers state loss counts train")
    def check(context: GateContext) -> Finding:
        """Exports the rehearsed model, whose weights have moved. A process that imports nothing of this project loads it with transformers
        and peft. Its log-probabilities are compared on random tokens, relative to what the rehearsal changed."""
        run, stage, _ = rehearsed(context)
        if sum(p.numel() for p in stage.model.parameters()) > BIGGEST:
            raise Skip("the model is too large to be saved and loaded before each run")
        draws = torch.Generator().manual_seed(context.cfg.run.seed)
        ids = torch.randint(len(tokenizer), (ROWS, TOKENS), generator=draws)

        def log_probs(model: nn.Module) -> Tensor:
            with evaluating(model), run.autocast():
                each = [lm(model)(input_ids=row[None].to(run.device), use_cache=False).logits[0] for row in ids]
            return torch.stack(each).float().log_softmax(-1).cpu()

        def compare() -> Finding | None:
            ours, before = log_probs(stage.eval_model), log_probs(context.look()[1].eval_model)
            needed = f"at most {limit:.0%} of the change by training, and the same tokens of a text{served.NEEDED}"
            samples = [{"ids": row.tolist(), "base": base, "text": PROBE} for row in ids]
            with tempfile.TemporaryDirectory() as name:
                stage.export(Path(name))
                other = served.otherwise(context, lm(stage.model), Path(name), prompts(stage))
                try:
                    found = query(READER, Path(name), samples)
                except RuntimeError as error:
                    return Finding(False, f"the export cannot be read in a fresh process: {error}", needed,
                                   "files that transformers or peft need are missing")  # fmt: skip
            theirs, change = torch.stack(found["log-probabilities"]), (ours - before).norm()
            if theirs.shape != ours.shape:
                return Finding(False, f"{theirs.shape[-1]} outputs; the trained model has {ours.shape[-1]}", needed,
                               "export() writes another model than the trained one")  # fmt: skip
            gap = ((theirs - ours).norm() / change).item()
            same = found["tokens"][0].long().tolist() == tokenizer(PROBE)["input_ids"]
            if same and not other and change < least * before.norm():
                return None
            return Finding(
                gap <= limit and same and not other,
                f"log-probabilities of {theirs[..., 0].numel()} tokens differ by {gap:.1%} of the change by training"
                + ("" if same else "; the exported tokenizer splits a text differently") + f"; {other}" * bool(other), needed,
                "export() writes another model than the trained one: the reference, a copy, or a newly built one\n"
                "adapters are exported under another name, at another scale, or for another base\n"
                "the exported tokenizer is not the one of training",
                evidence={"gap": gap},
                cause="the export holds the weights that training began with: its outputs equal those of the untrained model"
                if gap > limit and (theirs - before).norm() <= limit * change else served.CAUSE * bool(other and same and gap <= limit),
            )  # fmt: skip

        least, limit = EXACT if run.precision == "fp32" and run.device.type == "cpu" else ROUGH
        found = agreed(run.accelerator, compare() if run.rank == 0 else None)
        # The outputs hardly changed: compare the files
        return exported_weights.check(context) if found is None else found

    return check
