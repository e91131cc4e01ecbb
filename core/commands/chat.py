"""usage: trainworthy chat RUN_FOLDER [--system TEXT] [--max-new-tokens N] [--model BASE]

Talks to the language model that a run exported. Each line is a message; the answer is generated as in the run's evaluation.

  trainworthy chat runs/llm-sft/20260101-120000-ab12
  echo "Write a file and count its lines." | trainworthy chat runs/llm-sft/20260101-120000-ab12

Earlier turns are kept. `/new` starts another conversation, `/system TEXT` one with this system message, `/quit` or Ctrl-D ends.
Without --system the conversation begins as those of the run did (its `--data.system`). Recipes without a chat template
(`llm/pretrain`, `rl/rlhf`) continue each line by itself. If the input is not a terminal, it is read line by line, and standard
output contains only the answers.

--max-new-tokens defaults to the run's own. --model: the base of an adapter, if it moved since the run.
Exit codes: 0, 2 for a run without such an export."""

import sys
from pathlib import Path
from typing import Any

from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands.predict import speaker_of, take_options


def main(argv: list[str]) -> None:
    rest, system = config.take(argv[1:], "--system")
    rest, options = take_options(rest)
    if len(rest) != 1:
        raise UserError("chat needs a run folder", got=" ".join(rest) or "nothing", needed="trainworthy chat RUN_FOLDER",
                        next="trainworthy chat --help")  # fmt: skip
    speaker = speaker_of(Path(rest[0]), **options)
    if speaker.unspoken:
        why = f"{speaker.called} cannot be talked with: {speaker.unspoken}"
        raise UserError(why, next=f"trainworthy predict {rest[0]} FILE")
    by_hand = sys.stdin.isatty()
    if by_hand:
        import readline  # noqa: F401  line editing and history of input()

        kept = "earlier turns are kept; /new starts another conversation" if speaker.chats else "each line by itself"
        end = ", " if speaker.chats else "; "
        print(f"{speaker.called}: {kept}{end}/quit or Ctrl-D ends", file=sys.stderr)
    first = opening(speaker, system)
    turns = list(first)
    while (message := next_message(by_hand)) is not None:
        command, _, text = message.strip().partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command == "/system":
            try:
                first = opening(speaker, text.strip())
            except UserError as error:
                print(error, file=sys.stderr)
                continue
        if command in ("/new", "/system") or not speaker.chats:
            turns = list(first)
        if command and command not in ("/new", "/system"):
            turns.append({"role": "user", "content": message})
            answer(speaker, turns, first)


def opening(speaker: Any, system: str | None) -> list[dict[str, str]]:
    """The turns that a conversation with this system message begins with. UserError: the export's chat template has none."""
    if not system:
        return []
    if not speaker.chats:
        raise UserError(f"{speaker.called} continues text and has no system message", got=f"--system {system!r}")
    turns = [{"role": "system", "content": system}]
    try:
        speaker.too_long([*turns, {"role": "user", "content": "?"}])
    except Exception as error:  # a chat template is code of its model: it refuses in its own way
        raise UserError(
            "the export's chat template refuses a system message", got=f"{type(error).__name__}: {error}"
        ) from None
    return turns


def answer(speaker: Any, turns: list[dict[str, str]], first: list[dict[str, str]]) -> None:
    """Print the answer to the last turn, and append it; `first`: the turns that stay when earlier ones are left out."""
    if speaker.too_long(turns) and len(turns) > len(first) + 1:
        turns[len(first) : -1] = []
        print("(the conversation is longer than the model's context: earlier turns are left out)", file=sys.stderr)
    if why := speaker.too_long(turns):
        print(f"({why})", file=sys.stderr)
        turns.pop()
        return
    found = next(speaker.answers([{"messages": turns}], 1))
    turns.append({"role": "assistant", "content": found["answer"]})
    print(found["answer"], flush=True)
    if not found["ended"]:
        print(f"({speaker.cut(1, 1).removeprefix('; ')})", file=sys.stderr)


def next_message(by_hand: bool) -> str | None:
    """The next line of the input; None at its end."""
    try:
        return input("> ") if by_hand else next(sys.stdin).rstrip("\n")
    except (EOFError, StopIteration):
        if by_hand:
            print()
        return None
