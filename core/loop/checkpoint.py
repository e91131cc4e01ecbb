"""Checkpoints that survive a kill at any moment: write to a temporary folder, add a manifest with hashes, fsync,
rename, then delete old ones.

Layout of `checkpoints/<stage>/`: `step-<n>/` complete states (the last `keep`, and the first in every `keep_every` steps),
`latest` a link to the newest complete one, `best-step-<n>/` weights only, `best_val_<metric>` a link to the best of them. Weights
and moments of a sharded run are in the `.distcp` files of torch.distributed.checkpoint, one for each process. A part that never
changes again (`Segment`) is written once. Later checkpoints hold hard links to its file, so each checkpoint is complete, and a
file disappears with its last link.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from trainworthy.core.base.errors import DISK_FULL, Stop, UserError
from trainworthy.core.data.assets import sha256
from trainworthy.core.loop.checkpoint_survey import (
    ALONE,
    LATEST,
    MANIFEST,
    SAVED,
    Readers,
    put_back,
    step_of,
    steps,
    survey,
    verify,
)
from trainworthy.core.loop.weights import load_weights, save_weights, weights

SEGMENT = "file of a segment"  # key of a segment's placeholder in state.pt


class Segment:
    """A part of a state that never changes again, anywhere in the result of `state_dict`; `load_state_dict` gets one
    back. Its keys identify it: within a run, the same keys mean the same tensors, so only the first checkpoint reads
    them. Segments next to each other in one dict are consecutive parts of one whole."""

    def __init__(self, read: Callable[[], dict[str, Tensor]]):
        self.read = read


def swap(tree: Any, change: Callable[[str, Any], Any], *keys: Any) -> Any:
    """Return nested dicts with `change(name, leaf)` in place of every leaf; `name` joins the leaf's keys."""
    if isinstance(tree, dict) and SEGMENT not in tree:
        return {k: swap(v, change, *keys, k) for k, v in tree.items()}
    return change(".".join(map(str, keys)), tree)


def snapshot(tree: Any) -> Any:
    """Return a copy of nested state on the host, which a writer can read while training continues."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {k: snapshot(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(snapshot(v) for v in tree)
    return tree


class Checkpoints:
    """Writes and reads one stage's checkpoints. Only one process may write."""

    def __init__(self, folder: Path, *, keep: int = 2, keep_every: int = 0):
        self.folder, self.keep, self.keep_every = folder, keep, keep_every
        self.group: Any = None  # of torch.distributed, for the threads that write shards
        self._writer = ThreadPoolExecutor(1)  # one thread, so that files are written in order
        self._pending: dict[str, Future] = {}
        """Unfinished saves: `state`, a complete state, and `best`, weights only."""
        self._held: dict[str, tuple[Path, dict]] = {}  # segments of the newest checkpoint: (file, its manifest's entry)

    def save(
        self, step: int, model: nn.Module, state: dict[str, Any], info: dict[str, Any], *, without: Collection[str] = ()
    ) -> None:
        """Write a complete state. Only the copy to the host blocks; a thread writes it, and the next save waits for
        that thread. No save waits for weights that `save_best` writes.

        `state` is loaded with weights_only=True: tensors, numbers, strings, lists, dicts, and segments in dicts. `info`
        becomes JSON. `without` names weights that the recipe can load again from their own source.
        """
        self._wait_for("state")  # this save links to files of the one before
        tensors, aliases = weights(model, without=without)
        segments: dict[str, Segment] = {}

        def take_out(name: str, leaf: Any) -> Any:
            if not isinstance(leaf, Segment):
                return leaf
            segments[f"{name}.safetensors"] = leaf
            return {SEGMENT: f"{name}.safetensors"}

        tensors, state = snapshot(tensors), snapshot(swap(state, take_out))
        held = {name: self._held[name] for name in segments if name in self._held and self._held[name][0].exists()}
        fresh = {name: snapshot(one.read()) for name, one in segments.items() if name not in held}

        def write(folder: Path) -> None:
            save_weights(folder / "model.safetensors", tensors, aliases)
            torch.save(state, folder / "state.pt")
            _write_info(folder, step, info)
            for name, rows in fresh.items():
                save_weights(folder / name, rows, {})
            for name, (file, _) in held.items():
                _link(file, folder / name)

        def job() -> None:
            files = self._publish(f"step-{step}", write, link=LATEST, known={n: e for n, (_, e) in held.items()})
            self._held = {name: (self.folder / f"step-{step}" / name, files[name]) for name in segments}
            self._prune_steps(step)

        self.write_later(job)

    def save_best(
        self,
        step: int,
        model: nn.Module,
        info: dict[str, Any],
        *,
        metric: str,
        best: list[int],
        without: Collection[str] = (),
        written: Path | None = None,
    ) -> None:
        """Write weights only. `best` lists the steps to keep, best first, including this one. `written`: a file of them, which is
        moved there; `model` is not read then."""
        tensors, aliases = ({}, {}) if written else weights(model, without=without)
        tensors = snapshot(tensors)

        def write(folder: Path) -> None:
            if written:
                os.rename(written, folder / "model.safetensors")
            else:
                save_weights(folder / "model.safetensors", tensors, aliases)
            _write_info(folder, step, info)

        def job() -> None:
            self._publish(f"best-step-{step}", write, link=f"best_val_{metric}" if best[0] == step else None)
            keep = {f"best-step-{s}" for s in best}
            self._prune([p for p in self.folder.glob("best-step-*") if p.name not in keep])

        self._wait_for("best")  # at most one copy of the weights is queued
        self._pending["best"] = self._writer.submit(job)

    def unfinished(self, step: int) -> Path:
        """Return the folder in which the state of `step` is put together."""
        return self.folder / f".writing-step-{step}"

    def begin(self, step: int) -> None:
        """Create the folder into which sharded processes write. `complete` gives it its name."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)
        self.unfinished(step).mkdir(parents=True)

    def write_later(self, job: Callable[[], None]) -> None:
        """Let the thread write a state; the next save, or `wait`, waits for it and raises its error."""
        self._pending["state"] = self._writer.submit(job)

    def complete(self, step: int, state: dict[str, Any], info: dict[str, Any], known: dict[str, dict]) -> None:
        """Add to what sharded processes wrote the rest of the state and the manifest; then rename. `known`: manifest
        entries of their files. Runs in the thread."""

        def write(folder: Path) -> None:
            torch.save(state, folder / "state.pt")
            _write_info(folder, step, info)

        self._publish(f"step-{step}", write, link=LATEST, known=known, begun=True)
        self._held = {}
        self._prune_steps(step)

    def wait(self) -> None:
        """Wait until all saves are on disk; raise their errors."""
        self._wait_for("state")
        self._wait_for("best")

    def _wait_for(self, kind: str) -> None:
        if (pending := self._pending.pop(kind, None)) is None:
            return
        try:
            pending.result()
        except (OSError, RuntimeError, SafetensorError) as error:  # each writer reports a full disk differently
            raise self.failed(error) from None

    def failed(self, error: Exception) -> Stop:
        """Return the end of a run that could not write a checkpoint."""
        return Stop(
            f"cannot write a checkpoint to {self.folder}: {'the disk is full' if is_full(error, self.folder) else error}\n"
            f"  the last complete checkpoint is {self.newest() or 'none yet'}\n"
            f"  next:         free some space, then: trainworthy resume {self.folder.parent.parent}"
        )

    def close(self) -> None:
        """Finish writing and end the thread."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def steps(self) -> list[Path]:
        """Folders of full checkpoints, oldest first, complete or not."""
        return steps(self.folder)

    def survey(self, readers: Readers = ALONE) -> tuple[Path | None, dict[str, str]]:
        """Return (newest full checkpoint with matching hashes, {name of a newer one: what is wrong with it})."""
        return survey(self.folder, readers)

    def clean(self) -> None:
        """Create the folder if needed, and remove what a kill left incomplete. Only the writing process may call
        this."""
        self.folder.mkdir(parents=True, exist_ok=True)
        put_back(self.folder)
        for left in (*self.folder.glob(".trash-*"), *self.folder.glob(".writing-*")):
            shutil.rmtree(left, ignore_errors=True)
        for file in (*self.folder.glob(".link-*"), *self.folder.glob(".best-*")):
            file.unlink()

    def newest(self) -> Path | None:
        """Return the newest complete full checkpoint."""
        return self.survey()[0]

    def best_weights(self, metric: str) -> Path:
        """Return the file with the weights of the best evaluation by `metric`. Raises UserError if it is not as it was written."""
        folder = self.folder / f"best_val_{metric}"
        if why := verify(folder):
            raise UserError(f"the best weights in {folder} are not those that were saved", got=why, needed="files that match their hashes",
                            cause="a disk that lost data, or another file was put there", next=f"put them back, then: trainworthy "
                            f"resume {self.folder.parent.parent}; the weights of the last steps are in {self.folder}")  # fmt: skip
        return folder / "model.safetensors"

    def load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
        """Return (model state dict, state, info) of a complete checkpoint. Later saves continue from it."""
        info, files = (json.loads((folder / name).read_text()) for name in ("info.json", MANIFEST))
        self._held = {}

        def back(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, dict):
                return leaf
            file = folder / leaf[SEGMENT]
            self._held[file.name] = (file, files["files"][file.name])
            return Segment(lambda: load_weights(file))

        state = swap(torch.load(folder / "state.pt", weights_only=True), back)
        return load_weights(folder / "model.safetensors"), state, info

    def _publish(
        self,
        name: str,
        write: Callable[[Path], None],
        *,
        link: str | None,
        known: Mapping[str, dict] | None = None,
        begun: bool = False,
    ) -> dict[str, dict]:
        """Return the manifest's entries. Hashes of files in `known` are not computed again. `begun`: the temporary
        folder already has some of the files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".writing-{name}"
        if not begun:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        try:
            write(temporary)
            files = {p.name: (known or {}).get(p.name) or entry(p) for p in sorted(temporary.iterdir())}
            (temporary / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
            for path in (*temporary.iterdir(), temporary):
                _fsync(path)
        except BaseException as error:
            full = is_full(error, temporary)  # looked at before the removal makes room
            shutil.rmtree(temporary, ignore_errors=True)
            if full and not getattr(error, "errno", None):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            raise
        final, trash = self.folder / name, self.folder / f".trash-{name}"
        # A resumed run repeats this step; the old folder stays complete until the new one has its name
        if final.exists():
            shutil.rmtree(trash, ignore_errors=True)
            os.rename(final, trash)
        os.rename(temporary, final)
        shutil.rmtree(trash, ignore_errors=True)
        if link:
            spare = self.folder / f".link-{link}"
            spare.unlink(missing_ok=True)
            spare.symlink_to(name)
            target = self.folder / link
            # A run folder that was copied without links has a whole folder there
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            os.replace(spare, target)
        if link == LATEST:
            (self.folder.parent / SAVED).touch()
        _fsync(self.folder)
        return files

    def _prune_steps(self, step: int) -> None:
        """Remove states up to `step`, but for the last `keep` and the first in every `keep_every` steps."""
        found = [p for p in self.steps() if step_of(p) <= step]
        lasting = set()
        if every := self.keep_every:
            before = [0, *map(step_of, found)]
            lasting = {p for p, last in zip(found, before, strict=False) if step_of(p) // every > last // every}
        self._prune([p for p in found[: -self.keep] if p not in lasting])

    def _prune(self, folders: list[Path]) -> None:
        for folder in folders:
            trash = folder.with_name(f".trash-{folder.name}")
            shutil.rmtree(trash, ignore_errors=True)
            os.rename(folder, trash)  # renamed first, so that a kill leaves nothing that looks like a checkpoint
            shutil.rmtree(trash, ignore_errors=True)


def _write_info(folder: Path, step: int, info: dict[str, Any]) -> None:
    (folder / "info.json").write_text(json.dumps({"step": step, **info}, indent=1))


def _link(file: Path, to: Path) -> None:
    """Hard-link the file; copy it if the file system has no hard links."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)


def is_full(error: BaseException, folder: Path) -> bool:
    """Return whether `error`, raised while a file was written into `folder`, comes from a full disk. torch's writer says only that a
    position is unexpected, so the free space counts too; call this before anything is removed."""
    text = str(error)
    if getattr(error, "errno", None) in DISK_FULL or "No space left" in text or "Errno 28" in text:
        return True
    return not isinstance(error, KeyboardInterrupt | SystemExit) and shutil.disk_usage(folder).free < 2**20


def entry(path: Path) -> dict[str, Any]:
    """Return what the manifest says of a file."""
    return {"sha256": sha256(path), "bytes": path.stat().st_size}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
