"""Gates on text: the language model's chat template is applied once (L8), and evaluation uses the prompts of training (L1, C12)."""

from typing import Any

import torch
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.learning import OVERFIT_SAMPLES, overfitted
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.gates.chat import heard
from trainworthy.recipes.vlm.data import questions, rows, turns
from trainworthy.recipes.vlm.gates.scoring import EXACT


@gate("template", rows="L8", title="the language model's chat template is applied exactly once", reads="data")
def template(context: GateContext) -> Finding:
    """Compares the ids of a few rows, without image places, with the tokenizer's own rendering of the same turns; scored text is marked."""
    _, stage = context.look()
    data = stage.data["train"]
    if not data.tokenizer.chat_template or data.varied:
        raise Skip(
            "the processor makes the rows"
            if data.varied
            else "no chat template: questions and answers are lines of text"
        )
    chat, wrong, example = turns.chat(data.tokenizer), [], ""
    for i in pick(data, min(8, len(data)), context.cfg.run.seed):
        row, k = {key: data.peek(i, key) for key in ("ids", "labels", "segment")}, data.kept[i]
        pairs, system = data.source.questions(k), data.source.system(k) if data.talks else ""
        alone = [(system, pairs)] if data.talks else [("", [turns.placed(one)]) for one in pairs]
        for q, (before, some) in enumerate(alone, 1):
            mine = (row["segment"] == 0) | (row["segment"] == q)
            text = "".join(piece for piece, _ in turns.rendered(chat, before, some))
            due = [t for piece in text.split(rows.PLACE) for t in chat.ids(piece)]
            got = [t for t in row["ids"][mine].tolist() if t != rows.IMAGE]
            same = data.tokenizer.decode(got, **EXACT) == data.tokenizer.decode(due, **EXACT)
            if not same:  # some tokenizers merge characters across turns: then the texts must agree
                at = next(
                    (n for n, (a, b) in enumerate(zip(got, due, strict=False)) if a != b), min(len(got), len(due))
                )
                here, there = (data.tokenizer.decode(x[max(0, at - 4) : at + 8], **EXACT) for x in (got, due))
                wrong.append(f"sample {i} differs from token {at} on: {here!r}, the template gives {there!r}")
            example = example or _marked(data.tokenizer, row["ids"][mine].tolist(), row["labels"][mine].tolist())
    return Finding(
        not wrong, "; ".join(wrong[:2]) or f"rows equal the template's rendering (scored text in double brackets): {example!r}",
        "the result of the tokenizer's own apply_chat_template for the same turns, with the pictures at their positions",
        "questions and answers are joined as strings, without the roles that the model was trained on\n"
        "special tokens are added to a text that has them (a second BOS), or the template is applied twice",
        evidence={"example": example},
    )  # fmt: skip


def _marked(tokenizer: Any, ids: list[int], labels: list[int]) -> str:
    """Return a row as text: <image> for image features, scored text in [[double brackets]]."""
    text, inside = "", False
    for n, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if (label != rows.IGNORE) != inside:
            text += "]]" if inside else "[["
            inside = not inside
        if token != rows.IMAGE:
            text += tokenizer.decode([token], **EXACT)
        elif not n or ids[n - 1] != rows.IMAGE:
            text += rows.PLACE
    return text + "]]" * inside


@gate(
    "prompts",
    rows="L8 L1",
    title="evaluation generates answers after the same prompt as in training",
    reads="data model evaluate",
)
def prompts(context: GateContext) -> Finding:
    """Compares the ids that `evaluate` generates from with each question's training row up to its answer."""
    run, stage = context.look()
    data, wrong, due = stage.data["train"], [], []
    indices = pick(data, min(3, len(data)), context.cfg.run.seed)
    batch = fetch(data, indices, None, torch.device("cpu"))
    net = stage.model.net[0] if data.varied else stage.model.language
    with heard(net) as ids:
        run.measure(stage, View(data, indices), probe=True)
    if not any(one.shape[1] == 1 for one in ids):
        raise Skip("the evaluation generates nothing")
    for b, i in enumerate(indices):
        number = rows.numbered(batch["labels"][b])
        for q in range(1, int(number.max()) + 1):
            before = questions.prompt(batch, b, q, number)
            if (batch["ids"][b, ~before] == rows.IMAGE).any():
                continue  # later images: the rows differ in the number of image places only
            due.append((i, batch["ids"][b, before].tolist()))
    drop = {0, rows.IMAGE, *([stage.model.image] if data.varied else [])}  # padding and image places
    ends = [[t for t in row.tolist() if t not in drop] for one in ids for row in one]
    for i, text in due:
        plain = [t for t in text if t not in drop]
        if not any(row[-len(plain) :] == plain for row in ends):
            wrong.append(
                f"in training, sample {i}'s answer follows {data.tokenizer.decode(plain[-24:], **EXACT)!r}; no evaluation prompt ends like this"
            )
    return Finding(
        not wrong, wrong[0] if wrong else f"{len(due)} prompts end with the same tokens",
        "every evaluation prompt ends with the tokens before the answer in training",
        "the generation prompt (the assistant's header) is missing in training or evaluation\n"
        "prompts are padded on the right for generation: the answer then continues the padding\n"
        "only one of training and evaluation applies the template or adds a BOS",
        evidence={"prompts": len(due)},
    )  # fmt: skip


@gate("generation", rows="C12 X5", title="accuracy is measured on the model's own generated answers")
def generation(context: GateContext) -> Finding:
    """Evaluation scores each token after the right tokens before it. This gate gives the model that memorised eight samples their questions
    alone, generates with transformers' `generate`, and compares the verdicts."""
    run, stage, _ = overfitted(context)
    data, answers = stage.data["train"], []
    with evaluating(stage.model), torch.no_grad(), run.autocast():
        for i in pick(data, min(OVERFIT_SAMPLES, len(data)), context.cfg.run.seed):
            batch = fetch(data, [i], None, run.device)
            right, number = rows.right(stage.model(batch), batch)[0], rows.numbered(batch["labels"][0])
            for q in range(1, int(number.max()) + 1):
                before = questions.prompt(batch, 0, q, number)
                if (batch["ids"][0, ~before] == rows.IMAGE).any():
                    continue  # an image of a later turn would be among the images now
                answer = batch["labels"][0, number == q]
                alone = {**batch, **{k: batch[k][:, before] for k in rows.FILL}}
                answer_ids = stage.model.speak(alone, len(answer), data.ends)[0]
                answers.append(
                    (bool(right[q - 1]), answer.tolist() == answer_ids.tolist(), data.tokenizer.decode(answer_ids))
                )
    if not answers:
        raise Skip("every answer has a picture after it")
    differ = [s for s in answers if s[0] != s[1]]
    return Finding(
        len(differ) <= (0 if run.precision == "fp32" else len(answers) // 8),
        f"{len(answers)} answers: {sum(s[0] for s in answers)} count as right, {sum(s[1] for s in answers)} are right when generated"
        + (f"; e.g. {differ[0][2]!r} is generated" if differ else ""),
        "equal results for each answer" + ", except one in eight in half precision" * (run.precision != "fp32"),
        "a token sees later ones (the attention mask is not causal), or the question contains its answer\n"
        "position ids or a start token that `generate` does not use", evidence={"said": answers},
    )  # fmt: skip
