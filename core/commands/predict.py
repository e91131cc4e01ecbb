"""usage: trainworthy predict RUN_FOLDER FILE ... [--out FILE] [--max-new-tokens N] [--batch-size N] [--model BASE]

Answers each row of FILE with the language model that a run exported, as the run's own evaluation generates answers. If the export has
a script `use.py` (vision recipes), the files are pictures, or folders of them: one line of JSON for each.

  trainworthy predict runs/llm-sft/20260101-120000-ab12 prompts.jsonl                    answers on standard output
  trainworthy predict runs/llm-sft/20260101-120000-ab12 chats.jsonl --out answers.jsonl  answers in a file
  trainworthy predict runs/vision-classify/20260101-120000-ab12 new/ other.jpg           class and probabilities of each picture

For a language model, FILE is .jsonl, .json, .csv or .parquet: a column `prompt`, or conversations in any form that `llm/sft` reads (`messages`,
ShareGPT, Alpaca), under their own names or those of the run's --data.columns. If a row already has an answer, it is generated again.
Each line of the output is the row with `answer`, `ended` (false: cut at --max-new-tokens), `tokens`, and `reference`: the answer
that the row had. A run of `llm/reward` gives rewards: `reward` of an answer, or `chosen_reward` and `rejected_reward`. A run of
`vlm/instruct` answers questions about pictures: `image` (a path from FILE's folder) and `question`, or conversations with images.

Up to 1% of the rows may be unusable: they are left out and named on standard error.

--max-new-tokens defaults to the run's own, --batch-size to 8. --model: the base of an adapter, if it moved since the run.
Exit codes: 0, 2 for a run without such an export, for rows without a question, or for a picture that cannot be read."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import take_number
from trainworthy.core.recipe import loading as recipes
from trainworthy.core.recipe.registry import recipes as every
from trainworthy.core.report.folder import args_of, read_json


def main(argv: list[str]) -> None:
    rest, out = config.take(argv[1:], "--out")
    rest, size = take_number(rest, "--batch-size")
    rest, options = take_options(rest)
    if rest:
        assert_folder(Path(rest[0]))
    script = _script(Path(rest[0])) if rest else None
    if len(rest) < 2 or (len(rest) > 2 and script is None):
        raise UserError("predict needs a run folder and a file", got=" ".join(rest) or "nothing",
                        needed="trainworthy predict RUN_FOLDER FILE", next="trainworthy predict --help")  # fmt: skip
    file = Path(rest[1])
    if script is None and not file.is_file():
        raise UserError(f"{file}: no such file", needed="prompts or conversations: .jsonl, .json, .csv or .parquet")
    if out and not Path(out).absolute().parent.is_dir():
        raise UserError(f"--out {out}: no such folder", needed="a file in a folder that is there")
    if script:
        return _run_script(script, [Path(one) for one in rest[1:]], out)
    speaker = speaker_of(Path(rest[0]), **options)
    rows, cut = speaker.read(file), 0
    with Path(out).open("w", encoding="utf-8") if out else contextlib.nullcontext(sys.stdout) as target:
        for i, answer in enumerate(speaker.answers(rows, size or 8), 1):
            cut += not answer.get("ended", True)
            target.write(json.dumps(answer, ensure_ascii=False) + "\n")
            target.flush()
            if sys.stderr.isatty():
                print(f"\r  {i} of {len(rows)}", end="", file=sys.stderr)
    where = f" in {out}" if out else ""
    print(f"{count(len(rows), speaker.noun)}{where}" + speaker.cut(cut, len(rows)), file=sys.stderr)


def _script(folder: Path) -> Path | None:
    """Return `use.py` of a run's export if its recipe has neither `speaker` nor `asker`, else None."""
    run = folder.parent if folder.name == "export" else folder
    if not (script := run / "export" / "use.py").is_file() or not (run / "args.json").is_file():
        return None
    module = recipes.load(args_of(run)["recipe"]).module
    return None if hasattr(module, "speaker") or hasattr(module, "asker") else script


def _run_script(script: Path, given: list[Path], out: str | None) -> None:
    """Run the script of an export on files, and on the files of folders, but hidden ones, in a process of its own."""
    if missing := [p for p in given if not p.exists()]:
        raise UserError(f"{missing[0]}: no such file", needed="files, or folders of them")
    files = [f for p in given for f in (sorted(p.rglob("*")) if p.is_dir() else [p]) if f.is_file()]
    files = [f for f in files if not f.name.startswith(".") or f in given]
    if not files:
        raise UserError(f"{given[0]}: an empty folder", needed="files, or folders of them")
    with Path(out).open("w", encoding="utf-8") if out else contextlib.nullcontext(None) as target:
        failed = 0
        for start in range(0, len(files), 500):  # a command line has a largest length
            argv = [sys.executable, str(script), *map(str, files[start : start + 500])]
            failed = max(failed, subprocess.run(argv, stdout=target).returncode)
    if failed:
        raise UserError("not every file was answered", got=f"exit code {failed} of {script}", needed="files that it can read",
                        cause=f"see the lines with `error` {f'in {out}' if out else 'above'}")  # fmt: skip
    if out:
        print(f"{count(len(files), 'files')} in {out}", file=sys.stderr)


def count(n: int, noun: str) -> str:
    """Return a number with its noun, of which the first word is in the plural."""
    first, *others = noun.split()
    return " ".join([f"{n:,}", first.removesuffix("s") if n == 1 else first, *others])


def take_options(argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return `argv` without the options of both commands, and those as arguments of `speaker_of`."""
    rest, most = take_number(argv, "--max-new-tokens")
    rest, model = config.take(rest, "--model")
    if unknown := [word for word in rest if word.startswith("-")]:
        needed = "--max-new-tokens, --model; of predict also --out, --batch-size"
        raise UserError(f"unknown option {unknown[0]}", needed=needed)
    return rest, {"most": most, "model": model}


def assert_folder(folder: Path) -> None:
    """Raise UserError if there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder", needed="a folder under runs/<recipe>/", next="ls -d runs/*/*")


def speaker_of(folder: Path, most: int | None = None, model: str | None = None) -> Any:
    """Load what a finished run exported, by its recipe's `speaker`, or its `asker` if one cannot chat with it. UserError: there is no
    run or no export, or it is not a language model."""
    assert_folder(folder)
    if (folder / "seeds.json").is_file():
        names = ", ".join(sorted(p.name for p in folder.glob("*/"))[:6])
        raise UserError(f"{folder} holds several runs", got=names, needed="one of them")
    if folder.name == "export" and (folder.parent / "args.json").is_file():
        folder = folder.parent
    if not (folder / "args.json").is_file() and any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} is a model without its run", got="weights, and no args.json in it or above it",
                        needed="the run folder: its settings say how the model is asked",
                        next=f"{folder}/README.md shows how to load it in Python")  # fmt: skip
    saved, export = args_of(folder), folder / "export"
    loaded = recipes.load(saved["recipe"])
    make = next((getattr(loaded.module, name) for name in ("speaker", "asker") if hasattr(loaded.module, name)), None)
    if make is None and export.is_dir():  # else the run has not ended, whatever its recipe
        able = [e.id for e in every() if re.search(r"^def (speaker|asker)\(", e.path.read_text(encoding="utf-8"), re.M)]
        packaged = "/" in loaded.id and not loaded.id.endswith(".py")
        page = f"docs/recipes/{loaded.slug}.md" if packaged else "its recipe's `export`"
        how, got = f"load {export} as {page} shows", f"{folder}, without export/use.py"
        if (export / "use.py").is_file():
            how, got = f"trainworthy predict {folder} FILE", str(folder)
        raise UserError(f"{loaded.id} exports no language model that could be asked in words", got=got,
                        needed=f"a run of {', '.join(able)}", next=how)  # fmt: skip
    if not export.is_dir() or not any(export.rglob("*.safetensors")):
        failed = [v["id"] for v in read_json(folder / "gates.json").get("gates", []) if v["verdict"] == "fail"]
        if failed:
            raise UserError(f"{folder} has no export", needed="a finished run", cause=f"the gate {failed[0]} stopped it before training",
                            next=f"what {folder}/report.html names, then a new run")  # fmt: skip
        raise UserError(f"{folder} has no export", got="no weights in export/" if export.is_dir() else "no folder export/",
                        needed="a finished run", cause="it was stopped by a gate, interrupted, or is still running",
                        next=f"trainworthy resume {folder}")  # fmt: skip
    cfg = config.read_args(folder / "args.json", loaded.module.Config)
    if model:
        cfg.model = model
    found = make(cfg, export)
    if most and not found.most:
        raise UserError(f"--max-new-tokens {most}: {loaded.id} rewards answers and generates none")
    found.most = most or found.most
    return found
