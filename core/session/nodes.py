"""`--nodes`, `--node-rank` and `--address`: the words that the command passes to torchrun.

torchrun (torch.distributed.run) lets the machines meet and starts the processes. This module does not import torch, because the
`trainworthy` command uses it before it starts a process.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError

VERBS = ("run", "check", "lr", "resume")


@dataclass
class Nodes:
    """The machines of one run, as the command line gives them."""

    nodes: int = 1
    rank: int = 0
    host: str = ""
    port: int = 0

    @property
    def wanted(self) -> bool:
        """Whether torchrun has to start the processes."""
        return self.nodes > 1

    def words(self, processes: int) -> list[str]:
        """torchrun and its options, before what each of this machine's `processes` runs."""
        return ["-m", "torch.distributed.run", "--nnodes", str(self.nodes), "--nproc-per-node", str(processes),
                "--node-rank", str(self.rank), "--master-addr", self.host, "--master-port", str(self.port)]  # fmt: skip

    def line(self, total: int) -> str:
        """What this machine does before it waits for the others."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"node {self.rank} of {self.nodes}, {total} processes in all: meeting at {host}:{self.port} (each node runs the same "
            "command with its own --node-rank)"
        )


def take(argv: list[str]) -> tuple[list[str], Nodes]:
    """Return `argv` without these options, and what they say."""
    argv, nodes = _number(argv, "--nodes", least=1)
    argv, rank = _number(argv, "--node-rank", least=0)
    argv, address = config.take(argv, "--address")
    given = {"--nodes": nodes, "--node-rank": rank, "--address": address}
    missing = [flag for flag, value in given.items() if value is None]
    if 0 < len(missing) < 3 and nodes != 1:
        raise UserError("several machines must know where to meet", got="without " + ", ".join(missing),
                        needed="--nodes, --node-rank (0 on the first machine) and --address, one address of the first machine that all "
                        "others reach", next="on each machine: trainworthy run RECIPE --nodes 2 --node-rank 0 --address HOST:29500 "
                        "-n PROCESSES_OF_A_MACHINE")  # fmt: skip
    found = Nodes(nodes=nodes or 1, rank=rank or 0)
    if found.rank >= found.nodes:
        raise UserError("--node-rank is the number of this machine, from 0", got=f"{found.rank} of {found.nodes} machines",
                        needed=f"0 to {found.nodes - 1}")  # fmt: skip
    if address is not None:
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]]+)):(\d{1,5})", address)
        if match is None or not 0 < int(match[3]) < 2**16:
            raise UserError("--address is where the machines meet", got=address, needed="HOST:PORT of the first machine, such as "
                            "10.0.0.1:29500 or [fd00::1]:29500")  # fmt: skip
        found.host, found.port = match[1] or match[2], int(match[3])
    return argv, found


def assert_usable(found: Nodes, argv: Sequence[str], *, config_file: str | None) -> None:
    """Raise UserError if the command cannot run on several machines, or names them twice."""
    if not found.wanted:
        return
    if argv[0] not in VERBS:
        raise UserError(f"{argv[0]} does not take --nodes", needed=f"one of {', '.join(VERBS)}")
    if config_file is not None:
        raise UserError("--nodes and --accelerate-config name the machines twice", got=config_file,
                        needed="one of them: num_machines, machine_rank and main_process_ip in the file, or --nodes without a file")  # fmt: skip
    if any(word.split("=")[0] == "--seeds" for word in argv):
        raise UserError("--seeds does not work with --nodes", cause="each seed is a run of its own",
                        needed="--run.seed N with --nodes, or --seeds on one machine")  # fmt: skip


def processes_here(found: Nodes, n: str | None, saved: str | None) -> int:
    """Return how many processes this machine starts: `n`, or its share of the `saved` number of a resumed run."""
    if n is not None:
        return int(n)
    total = int(saved or found.nodes)
    if total % found.nodes:
        raise UserError("the processes of this run cannot be divided over the machines", got=f"{total} over {found.nodes}",
                        needed="-n, the number of processes of each machine")  # fmt: skip
    return total // found.nodes


def _number(argv: list[str], flag: str, *, least: int) -> tuple[list[str], int | None]:
    argv, value = config.take(argv, flag)
    if value is not None and (not value.isdigit() or int(value) < least):
        raise UserError(f"{flag} needs a number", got=value, needed=f"{least} or more")
    return argv, None if value is None else int(value)
