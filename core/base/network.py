"""One message for a model or data set that cannot be downloaded, with the way to use local files."""

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from trainworthy.core.base import config, masking
from trainworthy.core.base.errors import UserError

CLIENTS = ("httpx", "httpcore", "requests", "urllib3", "aiohttp", "fsspec")  # their exceptions: connection errors
NAMES = {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "HfHubHTTPError", "URLError", "gaierror",
         "IncompleteSnapshotError"}  # fmt: skip
WORDS = re.compile(
    r"couldn.t (connect|reach)|cannot reach|connection error|offline mode|name resolution|name or service not known"
    r"|cannot find the requested files in the (disk|local) cache",
    re.IGNORECASE,
)
ANSWER = 5.0  # seconds in which the hub must begin to answer
HUB = re.compile(r"(hub:)?[\w.-]+/[\w.-]+(:[\w.-]+)?")


@cache
def hub_silent() -> str:
    """Return why the hub does not answer, or "". The hub's libraries are then put offline, so that they read their caches at once:
    huggingface_hub's client has no time limit, and `datasets` tries each request five times."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER)
    except Exception as error:  # httpx's own exceptions are no OSError
        if not unreachable(error):
            raise
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # of processes that this one starts
        if datasets := sys.modules.get("datasets"):
            datasets.config.HF_HUB_OFFLINE = True
        kind = type(error).__name__
        return f"no answer within {ANSWER:g} s" if "Timeout" in kind else kind
    return ""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Give sockets that are opened here a time limit for each answer, where a library sets none (torch.hub)."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(4 * ANSWER)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def unreachable(error: BaseException | None) -> bool:
    """Return whether the error, or its cause, is a connection error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if any(k.__module__.startswith(CLIENTS) or k.__name__ in NAMES for k in type(error).__mro__):
            return True
        if isinstance(error, ConnectionError):
            return True
        if isinstance(error, (OSError, ValueError)) and WORDS.search(str(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def refusal(what: str, error: BaseException, settings: dict[str, Any]) -> UserError:
    """Build the error that `what` cannot be downloaded. It names the settings with hub names, and how to get their
    files."""
    texts = {name: value for name, value in config.flat(settings).items() if isinstance(value, str)}
    texts = {k: v for k, v in texts.items() if HUB.fullmatch(v) and not Path(v.removeprefix("hub:")).exists()}
    names = sorted((masking.flag(name), value) for name, value in texts.items())
    given = ", ".join(f"{flag} {value}" for flag, value in names)
    how = []
    for flag, value in names:
        is_data = value.startswith("hub:")
        kind, folder = "--repo-type dataset " if is_data else "", "hub:FOLDER" if is_data else "FOLDER"
        name = value.removeprefix("hub:").split(":")[0]
        how.append(f"hf download {kind}{name} --local-dir FOLDER, then {flag} {folder}")
    lines = str(error).strip().splitlines()
    return UserError(
        f"{what} cannot be fetched" + (f": {given}" if given else ""),
        got=f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__,
        needed="the network, files in the cache of an earlier run, or a folder on this machine",
        cause="no network (HF_HUB_OFFLINE, a proxy, a firewall?)",
        next="where there is a network: " + ("\n                ".join(how) or "fetch the files, then give their folder")
        + "\n                (from the cache alone: HF_HUB_OFFLINE=1)",
    )  # fmt: skip
