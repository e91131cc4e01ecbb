"""usage: trainworthy chat RUN_FOLDER [--max-new-tokens N] [--model BASE]

Talks to the language model that a run exported. Each line is a message; the answer is generated as in the run's evaluation.

  trainworthy chat runs/llm-sft/20260101-120000-ab12
  echo "Write a file and count its lines." | trainworthy chat runs/llm-sft/20260101-120000-ab12

Earlier turns are kept. `/new` starts another conversation, `/quit` or Ctrl-D ends. Recipes without a chat template
(`llm/pretrain`, `rl/rlhf`) continue each line by itself. If the input is not a terminal, it is read line by line, and standard
output contains only the answers.

--max-new-tokens defaults to the run's own. --model: the base of an adapter, if it moved since the run.
Exit codes: 0, 2 for a run without such an export."""

import sys
from pathlib import Path

from trainworthy.core.base.errors import UserError
from trainworthy.core.commands.predict import speaker_of, take_options


def main(argv: list[str]) -> None:
    """Run `chat RUN_FOLDER ...` in the process that core.launch started."""
    rest, options = take_options(argv[1:])
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
    turns: list[dict[str, str]] = []
    while (message := next_message(by_hand)) is not None:
        if message.strip() in ("/quit", "/exit"):
            return
        if message.strip() == "/new":
            turns = []
        elif message.strip():
            turns = turns if speaker.chats else []
            turns.append({"role": "user", "content": message})
            if speaker.too_long(turns) and len(turns) > 1:
                turns = turns[-1:]
                note = "(the conversation is longer than the model's context: earlier turns are left out)"
                print(note, file=sys.stderr)
            if why := speaker.too_long(turns):
                print(f"({why})", file=sys.stderr)
                turns.pop()
                continue
            answer = next(speaker.answers([{"messages": turns}], 1))
            turns.append({"role": "assistant", "content": answer["answer"]})
            print(answer["answer"], flush=True)
            if not answer["ended"]:
                print(f"({speaker.cut(1, 1).removeprefix('; ')})", file=sys.stderr)


def next_message(by_hand: bool) -> str | None:
    """The next line of the input; None at its end."""
    try:
        return input("> ") if by_hand else next(sys.stdin).rstrip("\n")
    except (EOFError, StopIteration):
        if by_hand:
            print()
        return None
