"""Private names of other libraries: each that we use is listed here, exists in the installed version, and its library has an
upper bound in pyproject.toml. A minor version may change a private name without a word."""

import ast
import importlib
import importlib.util
import re
import tomllib
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.conftest import ROOT

NAMES = {
    "torch": [
        "torch._foreach_add_",
        "torch._foreach_copy_",
        "torch._foreach_lerp_",
        "torch._foreach_mul_",
        "torch._foreach_norm",
        "torch._fused_adamw_",
        "torch.autograd._profiler_enabled",
        "torch.nn.modules.batchnorm._BatchNorm",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.nn.modules.conv._ConvNd",
        "torch.nn.modules.dropout._DropoutNd",
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.Tensor._base",
        "torch.utils._pytree._deregister_pytree_node",
        "torch.utils._pytree.register_pytree_node",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_flatten_with_path",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map_only",
        "torch.utils._pytree.tree_unflatten",
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "torch/utils/data/dataloader.py:_iterator",
        "torch/utils/data/dataloader.py:_shutdown_workers",
        "torch/utils/data/dataloader.py:_workers",
        "torch/nn/modules/module.py:_backward_hooks",
        "torch/nn/modules/module.py:_buffers",
        "torch/nn/modules/module.py:_forward_hooks",
        "torch/nn/modules/module.py:_forward_pre_hooks",
        "torch/nn/modules/module.py:_modules",
        "torch/nn/modules/module.py:_parameters",
        "torch/distributed/fsdp/_fully_shard/_fsdp_state.py:_lazy_init",
        "torch/distributed/fsdp/_fully_shard/_fully_shard.py:_get_fsdp_state",
        "torch/distributed/tensor/_api.py:_local_tensor",
        "torch/optim/lr_scheduler.py:_schedulers",
        "torch/optim/optimizer.py:_optimizer_step_post_hooks",
        "torch/optim/optimizer.py:_optimizer_step_pre_hooks",
        "torch/optim/adamw.py:AdamW",  # its step is unwrapped and called as a function
        "torch/_ops.py:_schema",
        "torch/amp/grad_scaler.py:_step_supports_amp_scaling",
        "torch.Tensor._version",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.ops.aten._index_put_impl_",
        "torch.ops.aten._local_scalar_dense",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "torch.ops.aten._unique2",
        "torch.ops.aten._unsafe_index_put",
        "torch/distributed/tensor/_api.py:_local_tensor",
        "torch/optim/lr_scheduler.py:_schedulers",
    ],
    "transformers": [
        "transformers/configuration_utils.py:_attn_implementation",
        "transformers/distributed/fsdp.py:_is_fsdp_managed_module",
        "transformers/configuration_utils.py:_name_or_path",
        "transformers/models/auto/auto_factory.py:_model_mapping",
        "transformers/trainer.py:_get_collator_with_removed_columns",
        "transformers/trainer_seq2seq.py:_gen_kwargs",
        "transformers/trainer.py:_get_num_items_in_batch",
        "transformers/trainer.py:_globalstep_last_logged",
        "transformers/trainer.py:_prepare_inputs",
        "transformers/trainer.py:_remove_unused_columns",
        "transformers/trainer.py:_tr_loss",
    ],
    "trl": [
        "trl/trainer/grpo_trainer.py:_buffered_inputs",
        "trl/trainer/grpo_trainer.py:_generate_and_score_completions",
        "trl/trainer/grpo_trainer.py:_step",
        "trl/trainer/utils.py:_use_triton",
    ],
    "datasets": ["datasets/arrow_dataset.py:_fingerprint"],
    "optuna": ["optuna/trial/_frozen.py:_trial_id"],
    "python": ["atexit._run_exitfuncs", "os._exit"],
}
"""Library -> dotted names to import, or `file:name` for what only an object has."""
OTHERS = {"accelerate", "bitsandbytes", "diffusers", "peft", "torchvision"}
"""Used by their public names only: bounded by the next major version."""
PUBLIC = {
    "_replace",
    "_fields",
    "_saved_mat2",
    "_saved_self",
    "_saved_self_sym_sizes",
}  # of named tuples, and of graph nodes (torch's notes on autograd): documented
OURS = {
    "_global",
    "_scaler",
    "_plan",
    "_sum_up",
    "_watch",
}  # of Run, the guard's Observer and Guard, used in another file


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def used() -> dict[str, str]:
    """Every private name that is not defined in the file that uses it -> where it is used. Imported names are dotted."""
    found = {}
    for path in sorted(p for room in ("core", "guard", "recipes", "trainworthy") for p in (ROOT / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for name, line in private_names(tree):
            found.setdefault(name, f"{path.relative_to(ROOT)}:{line}")
    return found


def private_names(tree: ast.Module) -> list[tuple[str, int]]:
    """(name, line) of what a file imports or reads under a private name and does not define itself."""
    imported, own = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node, ast.Name) or getattr(node.value, "id", "") in ("self", "cls")
            own |= {getattr(node, "attr", getattr(node, "id", ""))} if is_own else set()
    found = []
    for name in imported.values():
        if not name.startswith("trainworthy.") and any(map(is_private, name.split("."))):
            found.append((name, 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = ast.unparse(node)
            first, _, rest = chain.partition(".")
            if first in imported and re.fullmatch(r"[\w.]+", rest) and not imported[first].startswith("trainworthy."):
                found.append((f"{imported[first]}.{rest}", node.lineno))
            elif node.attr not in own:
                found.append((node.attr, node.lineno))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and name not in own:
                found.append((name, node.lineno))
    return found


def last(name: str) -> str:
    return re.split(r"[.:]", name)[-1]


def test_every_private_name_is_listed():
    listed = {name for names in NAMES.values() for name in names}
    short = {last(name) for name in listed}
    new = {
        name: where for name, where in used().items() if last(name) not in short | PUBLIC | OURS and name not in listed
    }
    assert not new, f"private names of other libraries: use a public one, or list them here: {new}"


def test_every_listed_name_is_used():
    names = {last(name) for name in used()}
    stale = [n for one in NAMES.values() for n in one if last(n) not in names and not last(n)[0].isupper()]
    assert not stale, f"no longer used: {stale}"


def test_a_new_private_name_is_found():
    source = "from torch.nn import functional as F\nimport trl\nF._canonical_mask\nbatch.config._hidden\ngetattr(x, '_seen')\n"
    source += "class Own:\n    def __init__(self):\n        self._mine = 0\n    def step(self, other):\n        return other._mine\n"
    found = {name for name, _ in private_names(ast.parse(source))}
    assert found == {"torch.nn.functional._canonical_mask", "_hidden", "_seen"}


@pytest.mark.parametrize("library", NAMES)
def test_private_names_exist(library: str):
    gone = []
    for name in NAMES[library]:
        if ":" in name:
            file, attribute = name.split(":")
            package = Path(importlib.util.find_spec(library).submodule_search_locations[0]).parent
            if not re.search(rf"\b{attribute}\b", (package / file).read_text()):
                gone.append(name)
        else:
            module, _, rest = name.partition(".")
            for end in range(name.count(".") + 1, 0, -1):  # the longest importable part, then attributes
                module, rest = ".".join(name.split(".")[:end]), ".".join(name.split(".")[end:])
                try:
                    owner = importlib.import_module(module)
                except ImportError:
                    continue
                try:
                    attrgetter(rest)(owner) if rest else owner
                except AttributeError:
                    gone.append(name)
                break
    assert not gone, f"not in the installed {library}: {gone}"


def requirements() -> dict[str, list[Requirement]]:
    """Name -> every requirement of it in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {}
    for text in project["dependencies"] + [w for words in project["optional-dependencies"].values() for w in words]:
        one = Requirement(text)
        found.setdefault(one.name.lower(), []).append(one)
    return found


def constraints() -> dict[str, Version]:
    """Name -> version in constraints.txt."""
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {name.lower(): Version(version) for name, _, version in lines}


def test_the_tested_versions_are_allowed():
    outside = [
        str(one) for name, all_of in requirements().items() for one in all_of
        if name in constraints() and not one.specifier.contains(constraints()[name])
    ]  # fmt: skip
    assert not outside


@pytest.mark.parametrize("library", sorted({*NAMES, *OTHERS} - {"python"}))
def test_libraries_have_an_upper_bound(library: str):
    """The next minor version where private names are used, else the next major one."""
    version = constraints()[library]
    minor = f"{version.major}.{version.minor + 1}"
    for one in requirements()[library]:
        assert not one.specifier.contains(f"{version.major + 1}.0"), f"{one}: <{version.major + 1}"
        if library in NAMES:
            assert not one.specifier.contains(minor), f"{one}: private names are used, so <{minor}"
