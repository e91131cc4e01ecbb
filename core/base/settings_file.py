"""Files of settings: args.json of an earlier run, JSON or YAML."""

import json
import re
from pathlib import Path
from typing import Any

from trainworthy.core.base.errors import UserError


def read_settings(path: Path) -> dict[str, Any]:
    """Return the content of a settings file: YAML by its suffix (.yaml, .yml), else JSON."""
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    try:
        text = path.read_text(encoding="utf-8")
        values = read_yaml(text) if is_yaml else json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the settings in {path}", got=error,
                        needed="an args.json of an earlier run, or a file of `trainworthy config RECIPE`") from None  # fmt: skip
    if not isinstance(values, dict) or not isinstance(values.get("settings", {}), dict):
        got = type(values if not isinstance(values, dict) else values["settings"]).__name__
        raise UserError(f"cannot read the settings in {path}", got=got, needed="a JSON object or a YAML mapping")
    return values


def check_recipe(values: dict[str, Any], module: str, file: str) -> None:
    """Raise UserError if the file names another packaged recipe than `module`. Forks may take the file of the recipe they came from."""
    package, named = "trainworthy.recipes.", values.get("recipe")
    own = module.removeprefix(package).replace(".", "/")
    if isinstance(named, str) and re.fullmatch(r"\w+/\w+", named) and module.startswith(package) and named != own:
        raise UserError(f"--config {file} holds the settings of another recipe", got=named, needed=own,
                        next=f"a file of `trainworthy config {own}`, or without its line `recipe`")  # fmt: skip


def read_yaml(text: str) -> Any:
    """Parse YAML without its constructors. Raises ValueError for invalid YAML."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def laid_over(under: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Nested `values` over the nested plain settings `under`; names that `under` lacks stay, for `from_dict` to refuse."""
    both = dict(under)
    for name, value in values.items():
        below = under.get(name)
        both[name] = laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both
