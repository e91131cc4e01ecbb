"""Commands with their own module. `trainworthy COMMAND --help` prints its docstring; `main(argv)` runs the command.

`core.launch` starts those that need a stage (run, data, lr), so that they run under accelerate.
"""

import argparse
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainworthy.core.base.as_json import results
from trainworthy.core.base.config import parse  # not `config`: that is a command here
from trainworthy.core.base.config import take_number as take_number
from trainworthy.core.base.errors import UserError

if TYPE_CHECKING:
    from trainworthy.core.base.config import Config
    from trainworthy.core.recipe.loading import Recipe


def prints_json(work: Callable[[list[str], dict[str, Any]], None]) -> Callable[[list[str]], None]:
    """Turn `work(argv, found)` into a command. With `--json`, rank 0 prints what it puts into `found`, also if it raises."""

    @functools.wraps(work)
    def main(argv: list[str]) -> None:
        argv, as_json = take_flag(argv, "--json")
        with results(as_json, speaks=os.environ.get("RANK", "0") == "0") as found:
            work(argv, found)

    return main


def open_recipe(command: str, words: list[str], *, options: str = "") -> "tuple[Recipe, Config, str]":
    """Return the recipe that `words` begin with, its settings with the other words, and the preset's name."""
    from trainworthy.core.recipe import loading

    if not words or words[0].startswith("-"):
        needed = "a recipe: an id, or the path of a fork"
        raise UserError(f"{command} what?", needed=needed, next=f"trainworthy {command} --help")
    loaded = loading.load(words[0])
    return loaded, *parse(loaded.module, words[1:], prog=f"trainworthy {command} {words[0]}", options=options)


def argument_parser(page: str) -> argparse.ArgumentParser:
    """Return a parser for the command whose help is `page`: its first line is the usage."""
    usage = page.splitlines()[0].removeprefix("usage: ")
    prog = " ".join(usage.split()[:2])
    return argparse.ArgumentParser(prog=prog, usage=usage, add_help=False, allow_abbrev=False)


def take_flag(argv: list[str], flag: str) -> tuple[list[str], bool]:
    """Return `argv` without `flag`, and whether it was there."""
    return [word for word in argv if word != flag], flag in argv
