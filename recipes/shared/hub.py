"""Models and data sets by folder or hub id. Errors come before anything is built and name the setting of the value."""

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from trainworthy.core.base import network, planning
from trainworthy.core.base.errors import UserError

TOKENIZER = "tokenizer.json or tokenizer.model or vocab.json"


def locate(
    name: str, setting: str, *, packaged: str, needs: tuple[str, ...] = (TOKENIZER,), weights: bool = True
) -> str:
    """Return a complete folder or a readable hub id, as `from_pretrained` takes it. `packaged`: the name that is
    neither; `needs`: files next to config.json and the weights, alternatives joined by "or"; without `weights` they are
    the only files needed."""
    if Path(name).is_dir():
        return complete(Path(name), setting, needs, weights=weights)
    if name.count("/") != 1 or name.startswith((".", "/")):
        needed = f"{packaged}, a folder that from_pretrained reads, or owner/name on the hub"
        raise UserError(f"{setting} {name}: no such folder", needed=needed)
    return allowed(name, setting)


def complete(folder: Path, setting: str, needs: tuple[str, ...], *, weights: bool = True) -> str:
    """Return the folder if it has the files in `needs` and, with `weights`, the configuration and every weight file."""
    index = folder / "model.safetensors.index.json"
    parts = ["model.safetensors"]
    if index.is_file():
        parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    every = ("config.json",) if planning.active else ("config.json", *needs, *parts) if weights else needs
    if missing := _missing(folder, every):
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
        cause, step = _why_incomplete(folder, setting, every)
        raise UserError(
            f"{setting} {folder}: a file is missing",
            got=found or "nothing",
            needed=", ".join(missing),
            cause=cause,
            next=step,
        )
    return str(folder)


def _missing(folder: Path, every: tuple[str, ...]) -> list[str]:
    return [some for some in every if not any((folder / name).is_file() for name in some.split(" or "))]


def _why_incomplete(folder: Path, setting: str, every: tuple[str, ...]) -> tuple[str, str]:
    """Return (likely cause, next step) for a folder without some of the files in `every`. A run's folder holds its model two levels down."""
    for inside in (folder / "export" / "merged", folder / "merged", folder / "export"):
        if inside.is_dir() and not _missing(inside, every):
            return "the model is in a folder inside this one", f"{setting} {inside}"
    for one in (folder, folder / "export"):
        if (one / "adapter_config.json").is_file():
            base = json.loads((one / "adapter_config.json").read_text()).get("base_model_name_or_path") or "BASE"
            step = (
                f"{setting} {base}, or train the adapters again with --merge-adapters, which also exports a whole model"
            )
            return f"{one} holds adapters without their base", step
    return "a download or copy that was cut off", "fetch the folder again"


def configuration(where: str, **own: Any) -> Any:
    """Return the model's config.json with `own` settings. A plan reads with another tokenizer, so the model keeps its vocabulary."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(
        where, **{k: v for k, v in own.items() if k != "vocab_size" or not planning.active}
    )


@cache
def allowed(name: str, setting: str, file: str = "config.json") -> str:
    """Return the hub id if this machine may read it, or has its `file` in the cache. This is checked once, before minutes
    of set-up. The token is never shown."""
    from huggingface_hub import auth_check, get_token, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    silent = network.hub_silent()
    if isinstance(try_to_load_from_cache(name, file), str):
        return name
    token = "a token is set, but it has no access" if get_token() else "no token is set"
    how = "accept its terms on its page, then `hf auth login`, or set HF_TOKEN"
    try:
        auth_check(name)
    except GatedRepoError:
        needed = "a token of an account that may read it"
        raise UserError(f"{setting} {name} is gated", got=token, needed=needed, next=how) from None
    except RepositoryNotFoundError:
        raise UserError(f"{setting} {name} does not exist, or is private", got=token, next=how) from None
    except Exception as error:  # httpx's own exceptions are no OSError
        if not isinstance(error, OSError) and not network.unreachable(error):
            raise
        raise UserError(
            f"{setting} {name} cannot be fetched", got=silent or type(error).__name__, needed="the hub within reach",
            cause="no network (HF_HUB_OFFLINE, a proxy?)",
            next=f"where there is a network: hf download {name} --local-dir FOLDER, then {setting} FOLDER",
        ) from None  # fmt: skip
    return name


def absolute(path: str) -> str:
    """Return a file, or `hub:` and a folder, with its absolute path, so that a run can be resumed from any folder;
    anything else unchanged."""
    if not path.startswith("hub:"):
        return str(Path(path).resolve()) if Path(path).is_file() else path
    folder, configuration = named(path)
    whole = f"hub:{Path(folder).resolve()}" + (f":{configuration}" if configuration else "")
    return whole if Path(folder).is_dir() else path


def folder(name: str) -> str:
    """Return a folder with its absolute path, so that a run can be resumed and queried from any folder; another name is returned unchanged."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def named(path: str) -> tuple[str, str | None]:
    """Return `hub:owner/name:configuration` as arguments of `load_dataset`; a set with one configuration needs no
    name."""
    name, _, configuration = path.removeprefix("hub:").partition(":")
    return name, configuration or None


def ask(path: str) -> None:
    """Put the hub's libraries offline if `hub:owner/name` is no folder and the hub does not answer."""
    if not Path(named(path)[0]).exists():
        network.hub_silent()


def tables(path: str) -> Any:
    """Read the splits of the data set `hub:owner/name` (or `hub:` and a folder in the hub's layout; after another colon
    its configuration) with `datasets`, including one for training."""
    import datasets

    datasets.disable_progress_bars()
    ask(path)
    try:
        found = datasets.load_dataset(*named(path))
    except Exception as error:
        if not isinstance(error, (OSError, ValueError, datasets.exceptions.DatasetsError)) and not network.unreachable(
            error
        ):
            raise
        message = " ".join(str(error.__cause__ or error).splitlines()[:2])
        raise UserError(f"--data.path {path} cannot be read", got=message[:200],
                        needed="a data set on the hub that this machine may read", cause="no network (HF_HUB_OFFLINE, a proxy?), a "
                        "misspelt, private or gated name, or a set of several configurations (hub:owner/name:configuration)",
                        next="with a network: hf download --repo-type dataset OWNER/NAME --local-dir FOLDER, then "
                             "--data.path hub:FOLDER") from None  # fmt: skip
    if "train" not in found:
        raise UserError(f"--data.path {path} has no split to learn from", got=", ".join(found), needed="train")
    return found


def unreadable(file: Path, error: Exception, setting: str = "--data.path") -> UserError:
    """Build the message for a table that `datasets` cannot read."""
    error = error.__cause__ or error
    encoding = isinstance(error, UnicodeDecodeError)
    return UserError(f"{setting} {file} cannot be read", got=str(error).splitlines()[0], needed=f"a {file.suffix} file in UTF-8",
                     cause="another encoding" if encoding else "rows that are not whole",
                     next=f"iconv -f ENCODING -t UTF-8 {shlex.quote(str(file))} > utf8{file.suffix}, where ENCODING is the file's own: CP1252 "
                     "for Western Europe, CP1251 for Cyrillic, GB18030 for Chinese" if encoding else None)  # fmt: skip
