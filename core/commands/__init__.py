"""Commands with their own module. `trainworthy COMMAND --help` prints its docstring; `main(argv)` runs the command.

`core.launch` starts those that need a stage (run, data, lr), so that they run under accelerate.
"""

import argparse

from trainworthy.core.base.config import take_number as take_number


def argument_parser(page: str) -> argparse.ArgumentParser:
    """Return a parser for the command whose help is `page`: its first line is the usage."""
    usage = page.splitlines()[0].removeprefix("usage: ")
    prog = " ".join(usage.split()[:2])
    return argparse.ArgumentParser(prog=prog, usage=usage, add_help=False, allow_abbrev=False)


def take_flag(argv: list[str], flag: str) -> tuple[list[str], bool]:
    """Return `argv` without `flag`, and whether it was there."""
    return [word for word in argv if word != flag], flag in argv
