"""Asks an exported language model: what `trainworthy predict` and `trainworthy chat` use. A recipe's `speaker` builds it."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trainworthy.recipes.llm.data import conversations, files, formats, pairs, templates
from trainworthy.recipes.llm.models import loading
from trainworthy.recipes.shared import hub, language_models

from trainworthy import core

MAX_BAD = 0.01  # share of rows of a file that may be unusable
UNSAID = 256  # tokens of an answer where an export does not say how many
Turns = list[dict[str, Any]]
ASKED = {"messages", "conversations", "prompt", "completion", "chosen", "rejected", "instruction", "input", "output",
         "history", "system", "tools", "functions"}  # fmt: skip


@dataclass
class Speaker:
    """An export, and how it is asked."""

    called: str
    model: nn.Module
    tokenizer: Any
    ids: Callable[[Turns, Any], list[int]]
    """(turns, tools) -> the tokens that the answer goes on from."""
    read_answer: Callable[[list[int]], str]
    """Tokens of an answer, without its end -> its text."""
    ends: list[int]
    most: int
    """Most tokens of an answer."""
    chats: bool = True
    """It reads conversations; else what was said last."""
    columns: str = ""
    """`--data.columns` of the run: names of columns that the file may have, too."""
    unspoken = ""
    """Why `trainworthy chat` cannot talk with it; empty: it can."""
    noun = "answers"

    def answers(self, rows: list[dict[str, Any]], size: int) -> Iterator[dict[str, Any]]:
        """Each row with its answer, `size` of them at once."""
        for i in range(0, len(rows), size):
            some = rows[i : i + size]
            prompts = [self.ids(row["messages"], row.get("tools")) for row in some]
            with torch.no_grad():
                found = loading.generate(
                    self.model, prompts, pad=self.tokenizer.pad_token_id, ends=self.ends, most=self.most
                )
            for row, (ids, ended) in zip(some, found, strict=True):
                columns = (
                    {"prompt": row["prompt"]}
                    if "prompt" in row
                    else {k: row[k] for k in ("messages", "tools") if k in row}
                )
                yield {
                    **row.get("columns", {}),
                    **columns,
                    "answer": self.read_answer(ids),
                    "ended": ended,
                    "tokens": len(ids),
                }

    def cut(self, n: int, of: int) -> str:
        """What to say of answers that did not end; empty: all did."""
        return cut(n, of, self.most)

    def too_long(self, turns: Turns, tools: Any = None) -> str:
        """Why these turns leave no room for an answer; empty: they do."""
        context = language_models.context(self.model.config)
        n = len(self.ids(turns, tools))
        return f"{n} tokens, and {self.most} for the answer, are more than the model's context of {context}" if (
            n + self.most > context) else ""  # fmt: skip

    def read(self, file: Path) -> list[dict[str, Any]]:
        """Rows of a file as turns that end with a question (`messages`, `tools`; `prompt` where that is all a row has). All that is
        wrong is said at once."""
        return usable(file, self._asked, self.columns, what="asked",
                      needed="prompt (str), or messages (list of turns) with a question at their end")  # fmt: skip

    def _asked(self, row: dict[str, Any]) -> dict[str, Any]:
        found = formats.question(row)
        found["columns"] = {k: v for k, v in row.items() if k not in ASKED}
        found["columns"] |= {"reference": due} if (due := formats.reference(row)) else {}
        if wrong := conversations.unasked(found["messages"]):
            raise formats.BadRow(wrong)
        found["messages"] = [{"content": ""} | {k: v for k, v in t.items() if v is not None} for t in found["messages"]]
        try:
            long = self.too_long(found["messages"], found.get("tools"))
        except templates.REFUSED as error:
            raise formats.BadRow("the chat template refuses it", f"{type(error).__name__}: {error}") from None
        if long:
            raise formats.BadRow("too long", long)
        return found


def cut(n: int, of: int, most: int) -> str:
    """What to say of `n` answers that did not end within `most` tokens; empty: all did."""
    if not n:
        return ""
    many = of > 1
    which = (
        f"{n} of {of} ({n / of:.0%}) were cut at {most} tokens before they"
        if many
        else f"cut at {most} tokens before it"
    )
    return f"; {which} ended: --max-new-tokens {2 * most}"


def usable(
    file: Path, one: Callable[[dict[str, Any]], dict[str, Any]], columns: str, *, what: str, needed: str
) -> list[dict[str, Any]]:
    """What `one` makes of each row of a file, whose columns may have the names of `columns`. All bad rows are in one message: a note on
    standard error up to the share `MAX_BAD`, as the recipes leave such rows out of training; else an error."""
    rows = _read(file)
    names, good = formats.mapping(columns), []
    bad: dict[str, list[tuple[str, str]]] = {}
    for i, row in enumerate(rows):
        try:
            if isinstance(row, formats.Unread):
                raise row.fault
            row = {"prompt": row} if isinstance(row, str) else row
            if not isinstance(row, dict):
                raise formats.BadRow(f"a row is {type(row).__name__}, neither an object nor a text")
            own = {a: row[b] for a, b in names.items() if b in row}
            good.append(one({k: v for k, v in row.items() if k not in names.values()} | own))
        except formats.BadRow as fault:
            bad.setdefault(fault.why, []).append((formats.place(rows, i), fault.seen))
    if not rows:
        raise core.UserError(f"{file} has no rows", needed="one prompt or conversation at least")
    n = sum(map(len, bad.values()))
    if 0 < n <= MAX_BAD * len(rows):
        print(f"{n} of {len(rows)} rows of {file} left out: {'; '.join(formats.kinds(bad))}", file=sys.stderr)
    elif bad:
        raise core.UserError(f"{n} of {len(rows)} rows of {file} cannot be {what}", cause="\n".join(formats.kinds(bad)), needed=needed,
                             next="correct these rows, or remove them")  # fmt: skip
    return good


def _read(file: Path) -> list[Any]:
    """Rows of a file; of JSON any values, so that a line may be a text in quotes."""
    if files.kind(file) not in files.LINES:
        return files.tables(str(file), "FILE")["train"]
    try:
        return files.lines(file)
    except ValueError as error:
        raise hub.unreadable(file, error, "FILE") from None


def loaded(cfg: Any, export: Path, *, base: str = "") -> tuple[nn.Module, dict[str, Any]]:
    """(the exported model on the accelerator if there is one, the generation settings beside it). `base`: where an adapter's base
    is, else --model is looked up. Weights have the type that training kept them in."""
    from transformers import GenerationConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rank = getattr(cfg, "lora_rank", 0) if (export / "adapter_config.json").is_file() else 0
    try:
        path = base or (loading.locate(cfg.model) if rank else "")
    except core.UserError as gone:
        raise core.UserError(
            f"the base of these adapters: {gone}", next="--model BASE, the folder or hub id where it is now"
        ) from None
    dtype = loading.kept_in(rank, "bf16" if cfg.train.precision == "bf16" and device.type == "cuda" else "fp32")
    if rank and getattr(cfg, "load_in_4bit", False):
        from peft import PeftModel
        from trainworthy.recipes.llm.models import quantized

        model = PeftModel.from_pretrained(quantized.load(path, dtype, device), export)
    else:
        model = loading.exported(export, path, dtype)
    file = export / "generation_config.json"
    how = GenerationConfig.from_pretrained(export).to_dict() if file.is_file() else {}
    return model.to(device).eval(), how


def limit(cfg: Any, how: dict[str, Any], model: nn.Module) -> int:
    """Most tokens of an answer: as the export says, as the run was set, or what half of the context has room for."""
    half = language_models.context(model.config) / 2
    return how.get("max_new_tokens") or getattr(cfg, "max_new_tokens", 0) or int(min(UNSAID, half))


def chatting(cfg: Any, export: Path, system: str) -> Speaker:
    """The export of a recipe that trains on chats, asked by the chat template beside it."""
    model, how = loaded(cfg, export)
    tokenizer = loading.tokenizer(str(export), "", cfg.eos_token)
    chat = pairs.Chat(tokenizer, system, conversations=True, every_turn=False)

    def ids(turns: Turns, tools: Any) -> list[int]:
        prompt = json.dumps({"messages": turns, **({"tools": tools} if tools else {})})
        return chat.ask(chat.turns(prompt), prompt)

    return Speaker(
        str(export),
        model,
        tokenizer,
        ids,
        lambda ids: chat.reply(tokenizer.decode(ids)),
        chat.ends,
        limit(cfg, how, model),
        columns=cfg.data.columns,
    )


def going_on(cfg: Any, export: Path, put: Callable[[Any, str], list[int]] | None = None, *, ends: Callable[[Any], list[int]] | None = None,
             base: str = "") -> Speaker:  # fmt: skip
    """The export of a recipe that trains on plain text: it goes on with what was said last (`put`: as tokens)."""
    model, how = loaded(cfg, export, base=base)
    tokenizer = loading.plain(str(export))
    put = put or (lambda tokenizer, text: tokenizer(text)["input_ids"])
    stops = ends(tokenizer) if ends else [tokenizer.eos_token_id]
    return Speaker(str(export), model, tokenizer, lambda turns, tools: put(tokenizer, turns[-1]["content"]),
                   lambda ids: tokenizer.decode(ids, skip_special_tokens=True), stops, limit(cfg, how, model), chats=False,
                   columns=getattr(cfg.data, "columns", ""))  # fmt: skip
