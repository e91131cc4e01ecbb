"""In a checkout, `core` and `recipes` are other names of `trainworthy.core` and `trainworthy.recipes`: one copy of every module."""

import sys
from collections.abc import Sequence
from importlib import import_module, util
from importlib.abc import InspectLoader, Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

SHORT = ("core", "recipes")


class Alias(Loader):
    """Finds `core.x` as the module `trainworthy.core.x`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, _ = name.partition(".")
        if parent not in SHORT or sys.modules.get(parent) is not sys.modules.get(f"trainworthy.{parent}"):
            return None
        found = util.find_spec(f"trainworthy.{name}")
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(name, self, origin=found.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"trainworthy.{spec.name}")
        spec.loader_state = module.__spec__  # the import system is about to write `spec` over it
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__:
            module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """What `python -m core.launch` runs."""
        found = util.find_spec(f"trainworthy.{name}")
        loader = found and found.loader
        return loader.get_code(f"trainworthy.{name}") if isinstance(loader, InspectLoader) else None


def alias(name: str) -> None:
    """Make `name` the module `trainworthy.<name>`, and `name.x` the modules below it."""
    sys.modules[name] = import_module(f"trainworthy.{name}")
    if not any(isinstance(finder, Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, Alias())
