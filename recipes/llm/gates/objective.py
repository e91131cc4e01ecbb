"""Gates of fine-tuned language models: the value of the loss, the export, and how answers end."""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import place_weights
from trainworthy.core.gates.checks.learning import overfitted
from trainworthy.core.gates.gate import Gate, GateContext, fetch
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.monitoring.monitors import Monitor, monitor
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.llm.data.pairs import Chat
from trainworthy.recipes.llm.gates import served
from trainworthy.recipes.llm.gates.chat import answered, reference, some, state_slopes

ALONG = 0.5  # cosine of gradients: a smoothed target and a z-loss add a little of another direction
BIGGEST = 2_000_000_000  # parameters
Loaders = dict[str, Callable[[Path], nn.Module]]
"""Name of the exported model: the class that loads it from the export's folder."""


def objective(chat: Chat) -> Gate:
    title = "the loss is the negative log-likelihood of each answer alone"

    @gate("objective", rows="L2 L3 L1", title=title, reads="data model loss train", explains=True, compares_loss=True)
    def check(context: GateContext) -> Finding:
        """Compares the recipe's loss of a batch with log-probabilities from plain logits: each sample alone, without padding or mask, with
        ids and answers from the tokenizer's own template. If they differ, it also computes the loss with known bugs. A loss of another form
        passes if it is the sum of its samples' and pulls every token of an answer, and no other, to its own id."""
        run, stage = context.look()
        data = stage.data["train"]
        indices = some(data, context.cfg.run.seed)
        batch = fetch(data, indices, context.cfg.run.seed, run.device)

        def one(i: int) -> tuple[dict[str, float], Place]:
            sample = data.get(i, None)
            before, answer = reference(chat, sample["prompt"], sample["completion"])
            ids = torch.tensor([before + answer], device=run.device)
            each = to_double(stage.model(input_ids=ids, use_cache=False).logits[0, :-1]).log_softmax(-1)
            due = sorted(
                {p - 1 for p in (*answered(chat, sample["prompt"], before), *range(len(before), ids.shape[1]))}
            )
            return _alternatives(each, ids[0, 1:].cpu(), due), (i, ids[0, 1:], due)

        with evaluating(stage.model), run.autocast(), torch.no_grad():
            got = sum(v for v in stage.loss(stage.model, batch).values()).item()
            parts, places = zip(*map(one, indices), strict=True)
        sums = {k: sum(p[k] for p in parts) for k in parts[0]}
        whole, n = sums.pop(RIGHT), int(sums.pop("tokens"))
        gap, limit = abs(got - whole) / whole, 1e-5 if run.precision == "fp32" else 2e-2
        like = min(sums, key=lambda k: abs(got - sums[k]))
        known = f"; it equals that of {like}" if gap > limit and abs(got - sums[like]) <= limit * whole else ""
        right = gap <= limit or (bool(known) and like == DFT)
        if not right and not known:
            fault = _own_form(run, stage, places, got, limit)
            right = not fault
            known = f"; {fault or 'a form of its own, which pulls each scored token to its id'}"
        return Finding(
            right, f"loss {got:.5f} over {n} tokens; {whole:.5f} from plain logits of each sample alone (difference {gap:.1e}){known}",
            f"equal within {limit:g}, or each token of an answer, and no other, pulled to its id",
            "labels are not the ids that follow: they are overwritten, shifted, or all the same id\n"
            "padding is scored or attended to: the attention mask is not passed, or is not the batch's own\n"
            "the first or the last token of an answer is left out, or its prompt is scored\n"
            "the trainer adds label smoothing, a weight or a mean",
            evidence={"loss": got, "due": whole, "gap": gap, "alternatives": sums},
        )  # fmt: skip

    return check


RIGHT = "the answers as they are"
DFT = "tokens weighted by their probabilities (DFT, Wu 2025)"
Place = tuple[int, Tensor, list[int]]
"""A sample's index, the ids (T,) that follow its tokens, and the positions that must be scored."""


def _own_form(run: Run, stage: Stage, places: Sequence[Place], got: float, limit: float) -> str:
    """Return what is wrong if a loss of a fork's own (label smoothing, focal, a z-loss) does not move the tokens of answers as the
    log-likelihood does, or is not the sum over its samples; else "". Compared are gradients of the last hidden states."""
    data, total = stage.data["train"], 0.0
    for i, following, due in places:
        batch, seen = fetch(data, [i], run.cfg.run.seed, run.device), []

        def loss(batch: dict = batch, seen: list = seen) -> Tensor:
            seen.append(sum(stage.loss(stage.model, batch).values()))
            return seen[-1]

        def plain(
            batch: dict = batch, following: Tensor = following, due: list[int] = due, seen: list = seen
        ) -> Tensor:
            inputs = {k: batch[k] for k in ("input_ids", "attention_mask", "position_ids") if k in batch}
            log_p = stage.model(**inputs, use_cache=False).logits[0, due].float().log_softmax(-1)
            own = log_p.gather(-1, following[due][:, None])[:, 0]
            seen.append(own.detach().exp())
            return -own.sum()

        with evaluating(stage.model):
            mine, theirs = (state_slopes(run, stage.model, f)[0] for f in (loss, plain))  # (T, H)
        if mine.shape != theirs.shape:
            return "the gradient of single tokens cannot be read"
        size, likely = mine.norm(dim=-1), seen[1]
        outside = torch.ones_like(size, dtype=torch.bool).index_fill(0, torch.tensor(due, device=size.device), False)
        if (size[outside] > place_weights.ASCENT * size.max()).any():
            return "tokens outside the answers change the loss"
        unsure, along = likely < place_weights.UNSURE, torch.cosine_similarity(mine[due], theirs[due], -1)
        if away := int((unsure & (size[due] > 0) & (along < ALONG)).sum()):
            return f"{away} of {len(due)} tokens are not moved towards their ids"
        dead = size[due] == 0
        if (dead & unsure).any() and likely[dead].mean() < likely[~dead].mean():
            return f"{dead.float().mean():.0%} of the tokens, the less sure ones, get no gradient"
        total += seen[0].item()
    return "" if abs(total - got) <= limit * abs(got) else "the loss of the batch is not the sum of its samples'"


def floor(trainer: Any) -> float:
    """Return the lowest loss of a token, in nats: 0, or the entropy of a smoothed target."""
    smoother = getattr(trainer, "label_smoother", None)
    if smoother is None:
        return 0.0
    n, other = trainer.model.config.get_text_config().vocab_size, smoother.epsilon
    own = 1 - other + other / n
    return -own * math.log(own) - (n - 1) * other / n * math.log(other / n)


def _alternatives(log_p: Tensor, following: Tensor, due: list[int]) -> dict[str, float]:
    """Return the loss of one sample in nats, and its value with known bugs. `log_p` (T, V) at each token, `following` (T,) the next tokens,
    `due` the scored positions."""

    def nll(targets: Tensor, places: list[int]) -> float:
        return -log_p[places].gather(-1, targets[places][:, None]).sum().item()

    last = torch.cat([following[1:], following[-1:]])
    own = log_p[due].gather(-1, following[due][:, None])
    return {
        RIGHT: nll(following, due), "tokens": len(due),
        "the prompts as well": nll(following, list(range(len(following)))),
        "answers without the token that ends them": nll(following, due[:-1]),
        "answers without their first token": nll(following, due[1:]),
        "the token after the next (labels shifted twice)": nll(last, due[:-1]),
        "each answer's own mean": nll(following, due) / len(due),
        DFT: -(own.exp() * own).sum().item(),
    }  # fmt: skip


def exported(
    chat: Chat, name: str, load: Callable[[Path], nn.Module], untrained: Callable[[], nn.Module] | None
) -> Gate:
    """Return the gate on one exported model. `untrained` builds the model before training, if that is not the trained one without its
    adapters."""
    title = {
        "merged": "the merged export, loaded from its files, gives the log-probabilities of the model with its adapters"
    }.get(name, "the export, loaded from its files, gives the log-probabilities of the trained model")

    @gate(name, rows="L5", title=title, reads="data model export train")
    def check(context: GateContext) -> Finding:
        """Compares log-probabilities of the overfit model and of its export at each answer token, relative to what training changed."""
        run, stage, found = overfitted(context)
        if sum(p.numel() for p in stage.model.parameters()) > BIGGEST:
            raise Skip("the model is too large to be saved and loaded before each run")
        samples = [stage.data["train"].get(i, None) for i in found["indices"]]
        references = [reference(chat, s["prompt"], s["completion"]) for s in samples]

        def log_probs(model: nn.Module, device: torch.device) -> Tensor:
            """Return log-probabilities, (tokens of all answers, vocabulary)."""
            with torch.no_grad():
                each = [model(input_ids=torch.tensor([a + b], device=device), use_cache=False).logits[0, len(a) - 1 : -1]
                        for a, b in references]  # fmt: skip
            return torch.cat(each).float().log_softmax(-1).cpu()

        with tempfile.TemporaryDirectory() as folder:
            stage.export(Path(folder))
            loaded = load(Path(folder)).eval()
            whole, missing = log_probs(loaded, torch.device("cpu")), unended(loaded, chat)
            asked = served.of_chat(chat, [s["prompt"] for s in samples])
            other = served.otherwise(context, stage.model, Path(folder), asked)
        with evaluating(stage.model), run.autocast():
            trained = log_probs(stage.model, run.device)
            if untrained is None:
                with stage.model.disable_adapter():
                    before = log_probs(stage.model, run.device)
            else:
                before = log_probs(untrained().eval(), torch.device("cpu"))
        gap = ((whole - trained).norm() / (trained - before).norm()).item()
        limit = 0.01 if run.precision == "fp32" else 0.05  # relative to the rounding of the model in memory
        on = f"; `generate` of the export does not stop at {', '.join(map(repr, missing))}" if missing else ""
        return Finding(
            gap <= limit and not missing and not other, f"log-probabilities of {len(trained)} tokens differ by {gap:.1%} of the change by "
            f"{'the adapters' if untrained is None else 'training'}{on}{f'; {other}' if other else ''}",
            f"at most {limit:.0%}; generation_config.json of the export names each token that ends a turn{served.NEEDED}",
            ("generation_config.json names other end tokens than the chat template writes: a server continues after the answer\n"
             if missing else "") + "adapters of a base in four bits are merged into the weights of its file, or packed into four bits again\n"
            "adapters are merged twice, at another scale, or into another model\n"
            "the export is a newly built model, has other weights than the trained ones, or only a part of them",
            evidence={"gap": gap}, cause=served.CAUSE if other and gap <= limit and not missing else "",
        )  # fmt: skip

    return check


def unended(model: nn.Module, chat: Chat) -> list[str]:
    """Tokens that end a turn of the chat, and at which `generate` would not stop. An adapter's files hold no such setting: it is the
    base's, which the recipe does not write."""
    if hasattr(model, "peft_config"):
        return []
    known = getattr(model.generation_config, "eos_token_id", None)
    known = known if isinstance(known, list) else [known]
    return [chat.tokenizer.decode([i]) for i in chat.ends if i not in known]


def ended(longest: int) -> Monitor:
    """Return the monitor of answers that are cut at `longest` tokens."""

    @monitor("ends", rows="L3", title="held-out answers end by themselves")
    def check(history: list[dict[str, float]]) -> Finding:
        """Reads the share of answers that ended by themselves at the last evaluation that generated some."""
        seen = [row["val/stops"] for row in history if "val/stops" in row]
        if not seen:  # with --metric perplexity, a run that stopped early
            raise Skip("no answers were generated")
        return Finding(
            seen[-1] >= 0.9, f"{seen[-1]:.0%} of the held-out answers end within {longest} tokens; {1 - seen[-1]:.0%} are cut there",
            "at least 90% end",
            f"answers are cut, and scored as they are: --max-new-tokens {2 * longest}\n"
            "the model does not learn the token that ends an answer (gate `scored`), or needs more steps",
            evidence={"stops": seen},
        )  # fmt: skip

    return check
