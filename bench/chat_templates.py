"""docs/chat-templates.md: what each chat template that TRL ships does, and whether it can be trained as it is generated from.

python bench/chat_templates.py            writes the page
python bench/chat_templates.py --check    exit 1 if the page is not what it would write
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainworthy.recipes.llm.data import formats, pairs, templates  # noqa: E402

from tests.llm import chat_models  # noqa: E402

PAGE = ROOT / "docs" / "chat-templates.md"
PAIR = {"prompt": "What is one and one?", "completion": "It is two.", "source": "a"}
THOUGHT = PAIR | {"completion": "<think>\nOne and one.\n</think>\n\nIt is two."}
TALK = {"messages": [{"role": "user", "content": "What is one and one?"}, {"role": "assistant", "content": "It is two."},
                     {"role": "user", "content": "And one more?"}, {"role": "assistant", "content": "Three."}]}  # fmt: skip
HEAD = """# Chat templates

How the language recipes handle each chat template that TRL 1.16 ships: what is scored, where an answer ends, and which templates are
refused. Measured on the tests' tokenizer, with the special tokens that each template's model publishes. `python bench/chat_templates.py`
makes the table; `tests/llm/test_chat_templates.py` checks it and compares the ids, as the gate `template` does.

`--chat-template trl:NAME` uses one of these templates in place of the model's own, `--chat-template FILE` any other.

The columns:

- **end**: the token that ends an answer. It is scored, and generation stops at it.
- **around**: text that the template puts before an answer (after its generation prompt) or between the answer and its end. It is scored.
- **system**: `own`: the template has a system role. `first question`: it has none, so the text goes before the first question.
- **conversation**: `in place`: every answer is scored in one row. `by answer`: the template changes an answer once another turn follows it (it
  drops the reasoning, or ends the answer differently), so each answer becomes a row in which it is the last one.
- **marks**: `yes` if the template has `{% generation %}` marks and what is scored is within them.

| template | end | around | system | arguments | conversation | marks |
|---|---|---|---|---|---|---|
"""


def code(text: str) -> str:
    """A text in a table's cell."""
    return "`" + text.replace("\n", "⏎").replace("|", "\\|") + "`" if text else ""


def row(name: str) -> list[str]:
    """The cells of one template."""
    tokenizer = chat_models.tokenizer(name)
    form = templates.form(tokenizer)
    around = " … ".join(filter(None, (code(form.lead), code(form.close))))
    arguments = ", ".join(f"{k}={v}" for k, v in form.arguments.items())
    chat = pairs.Chat(tokenizer, "")
    try:
        found = chat.rows(PAIR)
    except formats.BadRow:
        try:
            found = chat.rows(THOUGHT)
            state = "only answers with reasoning: the prompt opens a reasoning block"
        except formats.BadRow:
            state = "refused: the prompt opens a reasoning block, and the template drops the reasoning of every answer"
            return [name, code(form.end), "", "", "", state, ""]
    else:
        n = len(pairs.Chat(tokenizer, "", conversations=True).rows(TALK))
        state = "in place" if n == 1 else "by answer"
    system = "own" if form.system else "first question"
    return [name, code(form.end) + " *" * form.borrowed, around, system, arguments, state, marks(chat, found[0])]


def marks(chat: pairs.Chat, row: dict[str, str]) -> str:
    """Does the template mark, as an assistant's, what is scored?"""
    if "generation" not in chat.tokenizer.chat_template.replace("add_generation_prompt", ""):
        return ""
    missing = unmarked(chat, row["prompt"], row["completion"])
    return "yes" if missing == [] else f"without {chat.tokenizer.decode(missing)!r}" if missing else ""


def unmarked(chat: pairs.Chat, prompt: str, completion: str) -> list[int] | None:
    """Ids that are scored of an answer, but lie outside the template's own `{% generation %}` marks; None: it has none."""
    turns = [*chat.turns(prompt), {"role": "assistant", "content": completion}]
    told = chat.render(turns, prompt, return_dict=True, return_assistant_tokens_mask=True)
    if not any(mask := told["assistant_masks"]):
        return None
    made, ids = chat.example(prompt, completion), told["input_ids"]
    places = zip(made["input_ids"], made["labels"], mask, strict=False)
    same = made["input_ids"][: len(ids)] == ids[: len(made["input_ids"])]
    return [i for i, label, inside in places if label != -100 and not inside] if same else None


def page() -> str:
    """The whole page."""
    lines = [f"| {' | '.join(row(name))} |" for name in chat_models.names()]
    return (
        HEAD + "\n".join(lines) + "\n\n\\* No token ends the last answer: the one that opens the next turn is added.\n"
    )


if __name__ == "__main__":
    made = page()
    if "--check" in sys.argv:
        sys.exit(made != PAGE.read_text())
    PAGE.write_text(made)
