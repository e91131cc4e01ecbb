"""Redirects what a rehearsed script writes to a temporary folder, so that its own files stay unchanged.

The guarded process sees one file system: a file that it wrote is found under the name it used; all others are the
user's. Redirected are Python's own ways to write (`open`, `os`, `pathlib`, `shutil`) and the C++ writers of torch and
safetensors. Other programs, and libraries that open files in C (HDF5, LMDB, OpenCV), are not redirected.
`Sandbox.escaped` lists what an audit hook saw, and `changed` compares the working directory before and after.
"""

import builtins
import contextlib
import functools
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TRACKERS = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "COMET_START_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "TRACKIO_DISABLED": "1",
    "SWANLAB_MODE": "disabled",
    "AIM_TRACKING_DISABLED": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
"""Environment variables that disable experiment trackers and telemetry."""

OUTSIDE = ("/dev/", "/proc/", "/sys/")
UPLOADS = ("upload_file", "upload_folder", "upload_large_folder", "create_commit", "create_repo", "delete_repo")
CACHES = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR",
          "MPLCONFIGDIR")  # fmt: skip
"""Variables with folders of downloads. These are written as usual, so that a rehearsal's downloads serve the run."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
LIMIT = 20_000  # files of a working directory that are compared


class Sandbox:
    """Redirects writes of this process and its forks to `scratch`."""

    def __init__(self, scratch: Path):
        self.scratch = str(scratch.absolute())
        self.own = str(scratch.absolute().parent)
        self.caches = tuple(os.path.abspath(p) + "/" for p in map(os.environ.get, CACHES) if p)
        self.caches += (os.path.expanduser("~/.cache/"),)
        self.gone: set[str] = set()
        self.written: list[str] = []
        self.escaped: list[str] = []
        self.off = self.moved = False
        self._stat, self._open, self._mkdir = os.stat, io.open, os.mkdir

    def inside(self, path: Any) -> str | None:
        """Return the path in the scratch folder; None if `path` is not redirected."""
        if isinstance(path, int) or path is None or self.off:
            return None
        try:
            text = os.fspath(path)
        except TypeError:
            return None
        if isinstance(text, bytes):
            text = os.fsdecode(text)
        full = self.virtual(text)
        if f"{full}/".startswith((f"{self.own}/", *self.caches, *OUTSIDE)):  # the folders themselves, too
            return None
        return self.scratch + full

    def virtual(self, path: Any) -> str:
        """Return the path as the script knows it; its folder may exist in the scratch folder only."""
        return os.path.abspath(os.fsdecode(os.fspath(path))).removeprefix(self.scratch) or "/"

    def there(self, path: str) -> bool:
        """Return whether this real path exists (without the redirected `os.stat`)."""
        try:
            self._stat(path)
        except OSError:
            return False
        return True

    def reading(self, path: Any) -> Any:
        """Return the path to read from: the scratch copy if the script wrote one."""
        copy = self.inside(path)
        if copy is None:
            return path
        if copy in self.gone:
            return copy  # deleted by the script: it must not be found again
        return copy if self.there(copy) else self.virtual(path) if self.moved else path

    def writing(self, path: Any, *, keep: bool = False) -> Any:
        """Return the path to write to; with `keep`, copy an existing file first."""
        copy = self.inside(path)
        if copy is None:
            return path
        parent, real = os.path.dirname(copy), self.virtual(path)
        if not self.there(parent) and self.there(os.path.dirname(real)):
            self._mkdirs(parent)
        if keep and not self.there(copy) and copy not in self.gone and self.there(real):
            with self._open(real, "rb") as source, self._open(copy, "wb") as target:
                shutil.copyfileobj(source, target)
        self.gone.discard(copy)
        self.written.append(real)
        return copy

    def _mkdirs(self, path: str) -> None:
        if not self.there(path):
            self._mkdirs(os.path.dirname(path))
            self._mkdir(path)

    def install(self) -> None:
        """Replace Python's ways to write by redirecting ones."""
        original, sandbox = io.open, self

        def redirected(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if any(letter in mode for letter in "wax+"):
                return original(sandbox.writing(file, keep="a" in mode or "+" in mode), mode, *args, **kwargs)
            return original(sandbox.reading(file), mode, *args, **kwargs)

        builtins.open = io.open = redirected
        self._numpy()
        self._low_level()
        self._folders()
        self._torch()
        sys.addaudithook(self._audit)

    def _numpy(self) -> None:
        """Its text files are opened by the `open` of its own import."""

        def elsewhere(original: Callable, place: Callable) -> Callable:
            def run(fname: Any, *args: Any, **kwargs: Any) -> Any:
                return original(place(fname) if isinstance(fname, (str, os.PathLike)) else fname, *args, **kwargs)

            return run

        for name, place in (("savetxt", self.writing), ("loadtxt", self.reading), ("genfromtxt", self.reading)):
            setattr(np, name, functools.update_wrapper(elsewhere(getattr(np, name), place), getattr(np, name)))

    def _low_level(self) -> None:
        real_open = os.open

        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is None:
                path = self.writing(path, keep=not flags & os.O_TRUNC) if flags & WRITES else self.reading(path)
            return real_open(path, flags, mode, dir_fd=dir_fd)

        os.open = opened
        for name in ("stat", "lstat", "statvfs", "access", "readlink", "utime", "chmod"):
            setattr(os, name, self._first(getattr(os, name)))
        for name in ("listdir", "scandir"):
            setattr(os, name, self._listing(getattr(os, name), merge=name == "listdir"))

    def _first(self, function: Callable) -> Callable:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            return function(path if kwargs.get("dir_fd") is not None else self.reading(path), *args, **kwargs)

        return call

    def _listing(self, function: Callable, *, merge: bool) -> Callable:
        def call(path: Any = ".") -> Any:
            copy = self.inside(path)
            if copy is None or not self.there(copy):
                return function(path)
            if not merge or not self.there(self.virtual(path)):
                return function(copy)
            return sorted({*function(path), *function(copy)})

        return call

    def _folders(self) -> None:
        mkdir, rmtree = os.mkdir, shutil.rmtree

        def made(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            copy = self.inside(path)
            if dir_fd is not None or copy is None:
                return mkdir(path, mode, dir_fd=dir_fd)
            if copy not in self.gone and self.there(self.virtual(path)):
                raise FileExistsError(17, "File exists", os.fspath(path))
            return mkdir(self.writing(path), mode)

        def removing(remove: Callable) -> Callable:
            def removed(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
                copy = self.inside(path)
                if dir_fd is not None or copy is None:
                    return remove(path, dir_fd=dir_fd)
                found = self.there(copy)
                if copy in self.gone or not (found or self.there(self.virtual(path))):
                    raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
                if found:
                    remove(copy)
                self.gone.add(copy)
                return None

            return removed

        def whole(path: Any, *args: Any, **kwargs: Any) -> None:
            copy = self.inside(path)
            if copy is None:
                return rmtree(path, *args, **kwargs)
            if self.there(copy):
                rmtree(copy, ignore_errors=True)
            self.gone.add(copy)
            return None

        chdir, getcwd = os.chdir, os.getcwd

        def moved(path: Any) -> None:
            chdir(self.reading(path))
            self.moved = True

        os.chdir, os.getcwd = moved, lambda: getcwd().removeprefix(self.scratch) or "/"
        os.mkdir, shutil.rmtree = made, whole
        os.remove = os.unlink = removing(os.remove)
        os.rmdir = removing(os.rmdir)
        for name in ("rename", "replace", "link", "symlink"):
            setattr(os, name, self._pair(getattr(os, name), moves=name in ("rename", "replace")))

    def _pair(self, function: Callable, *, moves: bool) -> Callable:
        def call(source: Any, target: Any, **kwargs: Any) -> None:
            if self.inside(target) is None and self.inside(source) is None:
                return function(source, target, **kwargs)
            found = self.writing(source, keep=True) if moves else self.reading(source)
            function(found, self.writing(target), **kwargs)
            if moves and self.inside(source) is not None:
                self.gone.add(self.inside(source))
            return None

        return call

    def _torch(self) -> None:
        """torch.save writes in C++ when it is given a name; so does safetensors."""
        import torch

        rebind(torch.save, self.saving(torch.save))
        rebind(torch.load, self.loading(torch.load))
        after_import("tokenizers", self._tokenizers)
        try:
            import safetensors.torch as st
        except ImportError:
            return
        # what save_file() and load_file() call, whoever has imported these by name
        keep, take = st.serialize_file, st.safe_open
        rebind(keep, lambda tensors, filename, *a, **k: keep(tensors, self.writing(filename), *a, **k))
        rebind(take, lambda filename, *a, **k: take(self.reading(filename), *a, **k))

    def saving(self, save: Callable) -> Callable:
        """Return torch.save for files in the scratch folder."""
        return lambda obj, f, *args, **kwargs: save(
            obj, self.writing(f) if isinstance(f, (str, os.PathLike)) else f, *args, **kwargs
        )

    def loading(self, load: Callable) -> Callable:
        """Return torch.load, which finds these files."""
        return lambda f, *args, **kwargs: load(
            self.reading(f) if isinstance(f, (str, os.PathLike)) else f, *args, **kwargs
        )

    def _tokenizers(self, module: Any) -> None:
        """Their files are opened in Rust; the class's own namespace takes no assignment, so its dict is changed."""
        import ctypes
        import gc

        own = gc.get_referents(module.Tokenizer.__dict__)[0]
        save, read = own["save"], module.Tokenizer.from_file

        def saved(one: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            return save(one, str(self.writing(str(path))), *args, **kwargs)

        own["save"] = saved
        own["from_file"] = staticmethod(
            lambda path, *args, **kwargs: read(str(self.reading(str(path))), *args, **kwargs)
        )
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(module.Tokenizer))

    def _audit(self, event: str, args: tuple) -> None:
        """Writes that were not redirected, and uploads to the hub."""
        if event != "open":
            return
        path, mode, flags = args
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else bool(flags and flags & WRITES)
        if writes and isinstance(path, str) and self.inside(path) and len(self.escaped) < 20:
            self.escaped.append(path)


def rebind(original: Any, replacement: Any) -> None:
    """Put a replacement wherever a module has the original by its name: `from torch import save` before the sandbox keeps no old one."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(original.__name__) is original:
            setattr(module, original.__name__, replacement)


def hold_uploads() -> None:
    """Disable the hub's uploads in a rehearsal; reads still work."""

    def patch(module: Any) -> None:
        for one in UPLOADS:
            if hasattr(module.HfApi, one):
                setattr(module.HfApi, one, lambda *a, **k: None)

    after_import("huggingface_hub.hf_api", patch)


def after_import(wanted: str, patch: Callable[[Any], None]) -> None:
    """Call `patch(module)` once the script has imported the module."""
    import importlib.util

    if wanted in sys.modules:
        return patch(sys.modules[wanted])
    if importlib.util.find_spec(wanted.partition(".")[0]) is None:
        return None

    class Finder:
        """Finds the one module, and patches it after its execution. Many libraries only ask whether a module can be found."""

        inside = done = False

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name != wanted or self.inside or self.done:
                return None
            self.inside = True
            try:
                spec = importlib.util.find_spec(name)
            finally:
                self.inside = False
            if spec is None or spec.loader is None:
                return spec
            run = spec.loader.exec_module

            def execute(module: Any) -> None:
                run(module)
                if not self.done:
                    self.done = True
                    patch(module)

            spec.loader.exec_module = execute
            return spec

    sys.meta_path.insert(0, Finder())
    return None


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file below `folder` (the first 20,000), without hidden folders, environments, and the file that
    this process prints to."""
    found: dict[str, tuple[int, int]] = {}
    own = terminals()
    for root, dirs, files in os.walk(folder):
        dirs[:] = [
            d for d in dirs if not d.startswith(".") and d not in ("__pycache__", "node_modules", "site-packages")
        ]
        for name in files:
            path = os.path.join(root, name)
            try:
                stat = os.lstat(path)
            except OSError:
                continue
            if (stat.st_dev, stat.st_ino) not in own:
                found[path] = (stat.st_size, stat.st_mtime_ns)
            if len(found) >= LIMIT:
                return found
    return found


def terminals() -> set[tuple[int, int]]:
    """Return device and number of the files that this process prints to: `trainworthy guard train.py > log.txt`."""
    found = set()
    for number in (1, 2):
        with contextlib.suppress(OSError):
            stat = os.fstat(number)
            found.add((stat.st_dev, stat.st_ino))
    return found


def changed(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    """Return files that are new, deleted or different."""
    return sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
