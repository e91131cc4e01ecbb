"""Signals that end a command: as exceptions, so that it ends its children, removes its temporary folders and says how it ended."""

import contextlib
import shlex
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from trainworthy.core.base import masking
from trainworthy.core.base.errors import SIGNALS, Signalled


def raised(numbers: Iterable[int] = SIGNALS) -> contextlib.AbstractContextManager[None]:
    """Raise `Signalled` inside when one of these signals arrives. Those that are ignored (nohup) stay ignored."""
    main = threading.current_thread() is threading.main_thread()

    def arrive(name: str) -> None:
        raise Signalled(name)

    return handled(
        arrive, [n for n in numbers if main and signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)]
    )


@contextlib.contextmanager
def handled(arrive: Callable[[str], object], numbers: Iterable[int]) -> Iterator[None]:
    """Call `arrive(name)` inside when one of these signals arrives; afterwards they have their own handlers again."""
    before = {n: signal.signal(n, lambda number, _: arrive(signal.Signals(number).name)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ended(error: BaseException, argv: Sequence[str]) -> tuple[int, str]:
    """Return (exit code, message) of a command that a signal ended: the code that a shell reports, and how to start it again."""
    name = str(error) if isinstance(error, Signalled) else "SIGINT"
    again = masking.hide(shlex.join(["trainworthy", *argv]))
    return 128 + signal.Signals[name], f"\ninterrupted: {name}\n  next:         {again}"
