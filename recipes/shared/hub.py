"""Models by folder or hub id: what can fail is asked before anything is built, and told by the setting that named them."""

import json
from functools import cache
from pathlib import Path

from core.errors import UserError

TOKENIZER = "tokenizer.json or tokenizer.model or vocab.json"


def locate(
    name: str, setting: str, *, packaged: str, needs: tuple[str, ...] = (TOKENIZER,), weights: bool = True
) -> str:
    """A folder that lacks no file, or a hub id that may be read, as `from_pretrained` takes it. `packaged`: the name that is
    neither; `needs`: files beside config.json and the weights, alternatives joined by "or"; without `weights` they are all."""
    if Path(name).is_dir():
        return complete(Path(name), setting, needs, weights=weights)
    if name.count("/") != 1 or name.startswith((".", "/")):
        needed = f"{packaged}, a folder that from_pretrained reads, or owner/name on the hub"
        raise UserError(f"{setting} {name}: no such folder", needed=needed)
    return allowed(name, setting)


def complete(folder: Path, setting: str, needs: tuple[str, ...], *, weights: bool = True) -> str:
    """The folder, if those in `needs`, and with `weights` configuration and every file of them, are in it."""
    index = folder / "model.safetensors.index.json"
    parts = ["model.safetensors"]
    if index.is_file():
        parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    every = ("config.json", *needs, *parts) if weights else needs
    missing = [some for some in every if not any((folder / name).is_file() for name in some.split(" or "))]
    if missing:
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
        raise UserError(f"{setting} {folder}: a file is missing", got=found or "nothing", needed=", ".join(missing),
                        cause="a download or copy that was cut off, or an adapter without its base",
                        next="fetch the folder again")  # fmt: skip
    return str(folder)


@cache
def allowed(name: str, setting: str) -> str:
    """The hub id, if this machine may read it: asked once, before minutes of set-up. The token itself is never shown."""
    from huggingface_hub import auth_check, get_token, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
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
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"{setting} {name} cannot be fetched", got=type(error).__name__, needed="the hub within reach",
                        cause="no network (HF_HUB_OFFLINE, a proxy?)",
                        next=f"{setting} FOLDER with the files of the hub") from None  # fmt: skip
    return name
