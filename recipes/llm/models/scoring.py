"""Scores answers with an exported reward model: what `trainworthy predict` uses for `llm/reward`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trainworthy.recipes.llm.data import formats, pairs, preferences
from trainworthy.recipes.llm.models import loading, speaking
from trainworthy.recipes.shared import language_models

ANSWERS = {"completion": "reward", "chosen": "chosen_reward", "rejected": "rejected_reward"}
"""{column with an answer: column of the output with its reward}."""


@dataclass
class Scorer:
    """An exported reward model, and how a row is read."""

    called: str
    model: nn.Module
    chat: pairs.Chat
    columns: str = ""
    """`--data.columns` of the run."""
    most: int = 0
    unspoken = "it rewards answers and gives none"
    noun = "rows with rewards"

    def read(self, file: Path) -> list[dict[str, Any]]:
        """Return rows of `prompt` and `completion`, or of `prompt`, `chosen` and `rejected`. One message lists every bad row."""
        return speaking.usable(file, self._row, self.columns, what="scored",
                               needed="a prompt with an answer (prompt and completion, messages), or with chosen and rejected")  # fmt: skip

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        if "chosen" in row or "rejected" in row:
            found = preferences.rendered(row, self.chat)
        else:
            (found,) = self.chat.rows(row)
        most = max(len(self._ids(found, key)) for key in ANSWERS if key in found)
        context = language_models.context(self.model.config)
        if most > context:
            raise formats.BadRow("longer than the model's context", f"{most} tokens, {context} positions")
        return {"row": row, **found}

    def _ids(self, row: dict[str, Any], key: str) -> list[int]:
        opening = self.chat.opening(self.chat.turns(row["prompt"]), row["prompt"])
        return self.chat.ids(opening) + self.chat.answer(row[key], opening)

    def answers(self, rows: list[dict[str, Any]], size: int) -> Iterator[dict[str, Any]]:
        """Yield each row with the rewards of its answers, computed for `size` rows at once."""
        for i in range(0, len(rows), size):
            some = rows[i : i + size]
            pairs = [(row, key) for row in some for key in ANSWERS if key in row]
            batch = self.chat.tokenizer.pad({"input_ids": [self._ids(*one) for one in pairs]}, return_tensors="pt")
            with torch.inference_mode():
                found = self.model(**batch.to(self.model.device)).logits.float().squeeze(-1).tolist()
            rewards = iter(found)
            for row in some:
                yield row["row"] | {name: next(rewards) for key, name in ANSWERS.items() if key in row}

    def cut(self, n: int, of: int) -> str:
        """Nothing is generated, so nothing is cut."""
        return ""


def scorer(cfg: Any, export: Path) -> Scorer:
    """Load the export of an `llm/reward` run, on the accelerator if there is one."""
    tokenizer = loading.scoring_tokenizer(str(export), "", cfg.eos_token)
    if (export / "adapter_config.json").is_file():
        model = loading.merged_scorer(loading.locate(cfg.model), export, torch.float32, tokenizer)
    else:
        from transformers import AutoModelForSequenceClassification

        model = language_models.read(AutoModelForSequenceClassification, str(export), torch.float32)[0]
    system = formats.system(cfg.data.system, cfg.data.path, preferences.SYSTEM)
    chat = pairs.Chat(tokenizer, system, conversations=True, every_turn=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Scorer(str(export), model.to(device).eval(), chat, cfg.data.columns)


USAGE = """import torch
from transformers import AutoTokenizer{imports}

tokenizer = AutoTokenizer.from_pretrained("export")
model = {load}
turns, answer = [{{"role": "user", "content": "..."}}], "..."
ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
ids += tokenizer({answer}, add_special_tokens=False)["input_ids"]  # nothing may follow the end of the answer
with torch.no_grad():
    print(model(input_ids=torch.tensor([ids])).logits.item())"""


def card(cfg: Any, path: str, chat: pairs.Chat) -> dict[str, Any]:
    """Return the header of the export's model card, and how the export is loaded and asked."""
    rank, form = 0 if cfg.merge_adapters else cfg.lora_rank, chat.form
    kind = "AutoPeftModelForSequenceClassification" if rank else "AutoModelForSequenceClassification"
    imports = f"\nfrom peft import {kind}" if rank else f", {kind}"
    more = ", num_labels=1, pad_token_id=tokenizer.pad_token_id" if rank else ""
    answer = f"{form.lead!r} + " * bool(form.lead) + f"answer + {form.close + form.end!r}"
    usage = USAGE.format(imports=imports, load=f'{kind}.from_pretrained("export"{more})', answer=answer)
    return loading.model_card(path, rank, cfg.data.path) | {"pipeline_tag": "text-classification", "usage": usage}
