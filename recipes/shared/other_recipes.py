"""Names the recipes that read a kind of data, for the message of a recipe that does not."""

from collections import Counter
from itertools import islice
from pathlib import Path

TEXTS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".md", ".rst", ".gz")
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")
SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".m4a")
LOOKED_AT = 1000  # files of a folder: one with a million pictures must not delay an error message

READERS = (
    ("files of a language model", "llm/sft, llm/dpo, llm/reward and rl/grpo train one (--model FOLDER, and the texts as --data.path). "
     "No recipe distils one: docs/recipes/distill-logits.md#language-models"),
    ("texts", "llm/sft reads conversations, llm/dpo and llm/reward preferences, llm/pretrain plain text; vlm/instruct questions "
              "about pictures (docs/own-data.md)"),
    ("pictures", "vision/classify reads folders of classes, vision/segment masks, vision/detect boxes, vlm/instruct questions about "
                 "pictures (docs/own-data.md)"),
    ("sounds", "distill/whisper and distill/compress read recordings with their transcripts (docs/own-data.md)"),
)  # fmt: skip


def that_read(path: str | Path, own: str) -> str:
    """Return which recipes read what is at `path`. Empty if it is `own` (texts, pictures or sounds), or nothing that is known."""
    kind = _kind(Path(path))
    found = dict(READERS)
    return f"{kind} in {path}: {found[kind]}" if kind in found and kind != own else ""


def _kind(path: Path) -> str:
    """The kind of most files at `path`."""
    files = [path] if path.is_file() else list(islice((p for p in path.rglob("*") if p.is_file()), LOOKED_AT))
    names = {p.name for p in files}
    if "tokenizer.json" in names or "tokenizer_config.json" in names:
        return READERS[0][0]
    if "config.json" in names:  # another model's
        return ""
    kinds = {"texts": TEXTS, "pictures": PICTURES, "sounds": SOUNDS}
    found = Counter(k for p in files for k, endings in kinds.items() if p.suffix.lower() in endings)
    return found.most_common(1)[0][0] if found else ""
