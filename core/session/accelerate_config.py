"""Checks which parts of an Accelerate configuration are supported, from its file or from the launcher's environment,
and refuses the others at once.

It does not import torch, because the `trainworthy` command uses it before it starts a process.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import yaml
from trainworthy.core.base.errors import UserError

ENGINES = {
    "FSDP": "fully sharded data parallel (FSDP)",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "PARALLELISM_CONFIG": "tensor, context or sequence parallel (parallelism_config)",
    "XLA": "torch_xla",
    "TPU": "torch_xla",
}
PRECISIONS = ("no", "fp32", "fp16", "bf16")


def refuse(kinds: list[str], precision: str, where: str) -> None:
    """Raise an error with an alternative if an engine in `kinds` or the precision is not supported."""
    for kind in kinds:
        if kind in ENGINES:
            raise UserError(
                f"{ENGINES[kind]} is not supported", got=where,
                needed="data parallel: each process holds the whole model (distributed_type MULTI_GPU or NO)",
                cause="it would train wrongly, or silently as something else: gates, checkpoints and the exact division of the "
                      "loss are not verified for sharded models",
                next="trainworthy run RECIPE -n PROCESSES, with --shard full if the recipe can be sharded (FSDP2); what does not fit "
                     "one device: --train.accumulate N, "
                     "--train.precision bf16, LoRA or four bits where the recipe has them (trainworthy batch RECIPE)",
            )  # fmt: skip
    if precision not in PRECISIONS:
        raise UserError(f"mixed precision {precision} is not supported", got=where, needed=" or ".join(PRECISIONS),
                        next="mixed_precision: bf16, or --train.precision bf16")  # fmt: skip


FSDP_SETTINGS = ("fsdp_version", "fsdp_reshard_after_forward", "fsdp_sharding_strategy", "fsdp_offload_params",
                 "fsdp_activation_checkpointing")  # fmt: skip
STRATEGIES = {"FALSE": "grad", "SHARD_GRAD_OP": "grad", "2": "grad", "NO_SHARD": "none", "3": "none"}
"""What FSDP's settings are called here; any other value cuts the parameters, too. The numbers are those of FSDP 1."""


def refuse_fsdp(found: Mapping[str, str | None], where: str, processes: str | None) -> None:
    """Refuse FSDP in an Accelerate configuration, and name the command that shards in the same way."""
    again, before = found["fsdp_reshard_after_forward"], found["fsdp_sharding_strategy"]  # of FSDP 2, of FSDP 1
    strategy = ((again or before if found["fsdp_version"] == "2" else before or again) or "TRUE").upper()
    shard = STRATEGIES.get(strategy, "full")
    more = [name for name in FSDP_SETTINGS[3:] if (found[name] or "false").lower() == "true"]
    more += ["hybrid sharding: --shard full cuts over all processes"] * ("HYBRID" in strategy or strategy in ("4", "5"))
    raise UserError(
        f"{ENGINES['FSDP']} in an Accelerate configuration is not supported", got=where,
        needed=f"--shard {shard}, torch's FSDP2 (fully_shard), for the recipes of docs/scale.md"
               + (f"; not built: {', '.join(more)}" if more else ""),
        cause="Accelerate would wrap a model that the optimiser already refers to, and on CPUs it trains whole copies without a word",
        next=f"trainworthy run RECIPE -n {processes or 'PROCESSES'} --shard {shard}, without --accelerate-config",
    )  # fmt: skip


def from_environment(env: Mapping[str, str] = os.environ) -> None:
    """Refuse unsupported choices of `accelerate launch`. On CPUs, Accelerate drops them without a message."""
    if env.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1"):
        settings = {name: env.get(name.upper()) for name in FSDP_SETTINGS}
        refuse_fsdp(settings, "the settings of accelerate launch: ACCELERATE_USE_FSDP", env.get("WORLD_SIZE"))
    kinds = [kind for kind in ENGINES if env.get(f"ACCELERATE_USE_{kind}", "false").lower() in ("true", "1")]
    refuse(kinds, env.get("ACCELERATE_MIXED_PRECISION", "no").lower(), "the settings of accelerate launch")


class Setup:
    """Processes and machines in a file of `accelerate config`."""

    def __init__(self, file: Path):
        if not file.is_file():
            raise UserError(f"no accelerate config {file}", next="accelerate config --config_file FILE")
        self.file = file
        try:  # BaseLoader leaves every value as it is written: `NO` is no truth value
            self._values = yaml.load(file.read_text(), yaml.BaseLoader)
        except yaml.YAMLError:
            self._values = None
        if not isinstance(self._values, dict):
            raise UserError(f"{file} is no accelerate config", next="accelerate config --config_file FILE")
        kinds = [(self._read("distributed_type") or "NO").upper()]
        if kinds == ["FSDP"]:
            own = self._values.get("fsdp_config")
            settings = {k: _value(own, k) if isinstance(own, dict) else None for k in FSDP_SETTINGS}
            refuse_fsdp(settings, f"{file}: distributed_type FSDP", self._read("num_processes"))
        kinds += ["PARALLELISM_CONFIG"] * bool(self._values.get("parallelism_config"))
        refuse(kinds, (self._read("mixed_precision") or "no").lower(), f"{file}: distributed_type {kinds[0]}")
        self.processes, self.machines = self._read("num_processes"), int(self._read("num_machines") or 1)
        needed = ("machine_rank", "main_process_ip", "main_process_port", "num_processes")
        self.rank, self.address, self.port, _ = (self._read(k) for k in needed)
        missing = [k for k in needed if not self._read(k)]
        if self.machines > 1 and missing:
            raise UserError(f"{file}: several machines must know where to meet", got=f"num_machines: {self.machines}, without "
                            + ", ".join(missing), needed="on every machine main_process_ip and main_process_port of the first, "
                            "num_processes of all together, and its own machine_rank from 0", next=f"edit {file}, or accelerate "
                            f"config --config_file {file}")  # fmt: skip

    def meeting_message(self, processes: str | None) -> str:
        """What is printed before the machines meet."""
        return (f"machine {self.rank} of {self.machines}, {processes} processes in all: meeting at {self.address}:{self.port} "
                "(each machine runs the same command with its own machine_rank)")  # fmt: skip

    def _read(self, name: str) -> str | None:
        return _value(self._values, name)


def _value(settings: dict, name: str) -> str | None:
    """Return a setting as it is written; None if it is missing or null."""
    found = settings.get(name)
    return None if found in ("", "null", "~") else found
