"""usage: trainworthy config RECIPE [settings] [--changed] [--json]

Writes all settings of a recipe as a file to keep in git.

  trainworthy config vision/classify > run.yaml               every setting of the preset `tiny`
  trainworthy config vision/classify --optim.lr 0.01 > run.yaml    with settings as `trainworthy run` takes them
  trainworthy config vision/classify --preset full --json > run.json
  trainworthy config ./mine.py --optim.lr 0.01 --changed       only what differs from the preset
  trainworthy run vision/classify --config run.yaml --max-steps 100    train with it; the command line wins

`--config` takes YAML (by the ending .yaml or .yml) or JSON, this command's files and the args.json of a run. A file may name some
settings only: the others are those of the preset that it names (without one: `tiny`). Values of secrets are never written: a run
asks for them. Exit codes: 0, or 2 for bad usage."""

import json
import sys
from typing import Any

from trainworthy.core.base import config, masking
from trainworthy.core.commands import open_recipe


def main(argv: list[str]) -> None:
    words = [w for w in argv[1:] if w not in ("--json", "--changed")]
    loaded, cfg, preset = open_recipe("config", words)
    settings = masking.settings(config.to_dict(cfg))
    if "--changed" in argv:
        settings = differing(config.to_dict(getattr(loaded.module, preset)()), settings)
    found = {"recipe": loaded.target, "preset": preset, "settings": settings}
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if "--json" in argv else as_yaml(found))


def differing(base: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Nested `settings` without those that `base` has, too."""
    found = {}
    for name, value in settings.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            value = differing(base[name], value)
            if not value:
                continue
        elif value == base.get(name):
            continue
        found[name] = value
    return found


def as_yaml(found: dict[str, Any]) -> str:
    """The file: recipe, preset and settings in their own order, with the command that uses it."""
    import yaml

    head = f"# trainworthy run {found['recipe']} --config THIS_FILE\n"
    return head + yaml.safe_dump(found, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)
