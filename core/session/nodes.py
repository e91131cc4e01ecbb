"""`--nodes`, `--node-rank`, `--address` and `--restarts`: the options that the command passes to torchrun, and how a restarted run
continues.

torchrun (torch.distributed.run) lets the machines meet, starts the processes, and starts all of them again when one is lost. It does not
restart a run that has ended as planned: finished, refused, stopped by a gate or by a signal of the user.

The command imports this module, so it imports torch only inside the functions of a training process.
"""

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainworthy.core.base import config, masking
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.files import write_whole

VERBS = ("run", "check", "lr", "resume")
RESTART = 75
"""Exit code of a process that torchrun shall start again (EX_TEMPFAIL of sysexits.h)."""
RESTARTS = "TRAINWORTHY_RESTARTS"
NOTE = "TRAINWORTHY_EXIT"
NAME_SECONDS = 60.0


# ----------------------------------------------------------------------------------------------------------- the command
@dataclass
class Nodes:
    nodes: int = 1
    rank: int = 0
    host: str = ""
    port: int = 0
    restarts: int = 0

    @property
    def wanted(self) -> bool:
        """Whether torchrun has to start the processes."""
        return self.nodes > 1 or self.restarts > 0

    def words(self, processes: int) -> list[str]:
        """torchrun and its options, before what each of this machine's `processes` runs."""
        found = ["-m", "torch.distributed.run", "--nnodes", str(self.nodes), "--nproc-per-node", str(processes),
                 "--max-restarts", str(self.restarts)]  # fmt: skip
        if self.nodes == 1:
            found += ["--standalone"]
        elif self.restarts:
            # A fixed rank for each machine (`static`) cannot start again, so torchrun numbers them.
            found += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self._address, "--rdzv-id", f"trainworthy-{self.port}",
                      "--rdzv-conf", f"is_host={int(self.rank == 0)}",
                      "--local-addr", own_address(self.host, self.port)]  # fmt: skip
        else:
            found += ["--node-rank", str(self.rank), "--master-addr", self.host, "--master-port", str(self.port)]
        return found

    def variables(self) -> dict[str, str]:
        """What the training processes of a run that may restart find in their environment."""
        # torchrun 2.14 would hand the store of the lost processes to the new ones, which then call on old addresses.
        return {RESTARTS: str(self.restarts), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.restarts else {}

    def meeting_message(self, total: int) -> str:
        """What this machine does before it waits for the others."""
        return (
            f"node {self.rank} of {self.nodes}, {total} processes in all: meeting at {self._address} (each node runs the same "
            "command with its own --node-rank)"
        )

    @property
    def _address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def take(argv: list[str]) -> tuple[list[str], Nodes]:
    """Return `argv` without these options, and what they say."""
    argv, nodes = config.take_number(argv, "--nodes")
    argv, rank = config.take_number(argv, "--node-rank", 0)
    argv, address = config.take(argv, "--address")
    argv, restarts = config.take_number(argv, "--restarts", 0)
    given = {"--nodes": nodes, "--node-rank": rank, "--address": address}
    missing = [flag for flag, value in given.items() if value is None]
    if 0 < len(missing) < 3 and nodes != 1:
        raise UserError("several machines must know where to meet", got="without " + ", ".join(missing),
                        needed="--nodes, --node-rank (0 on the first machine) and --address, one address of the first machine that all "
                        "others reach", next="on each machine: trainworthy run RECIPE --nodes 2 --node-rank 0 --address HOST:29500 "
                        "-n PROCESSES_OF_A_MACHINE")  # fmt: skip
    found = Nodes(nodes=nodes or 1, rank=rank or 0, restarts=restarts or 0)
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
    flag = "--nodes" if found.nodes > 1 else "--restarts"
    if argv[0] not in VERBS:
        raise UserError(f"{argv[0]} does not take {flag}", needed=f"one of {', '.join(VERBS)}")
    if config_file is not None:
        raise UserError(f"{flag} and --accelerate-config name the launcher's settings twice", got=config_file,
                        needed=f"one of them: num_machines, machine_rank and main_process_ip in the file, or {flag} without a file")  # fmt: skip
    if any(word.split("=")[0] == "--seeds" for word in argv):
        raise UserError(f"--seeds does not work with {flag}", cause="each seed is a separate run",
                        needed=f"--run.seed N with {flag}, or --seeds on one machine")  # fmt: skip


def processes_here(found: Nodes, n: str | None, saved: str | None) -> int:
    """Return how many processes this machine starts: `n`, or its share of the `saved` number of a resumed run."""
    if n is not None:
        return int(n)
    total = int(saved or found.nodes)
    if total % found.nodes:
        raise UserError("the processes of this run cannot be divided over the machines", got=f"{total} over {found.nodes}",
                        needed="-n, the number of processes of each machine")  # fmt: skip
    return total // found.nodes


def own_address(host: str, port: int) -> str:
    """Return the address from which this machine reaches `host`; nothing is sent. Wait up to `NAME_SECONDS` for the name, because a
    container's name resolves only seconds after its start; then raise UserError."""
    ends = time.monotonic() + NAME_SECONDS
    while True:
        try:
            family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                return probe.getsockname()[0]
        except OSError as error:
            if time.monotonic() > ends:
                raise UserError("the machines cannot meet", got=f"--address {host}:{port}: {error}",
                                needed="a name or an address of the first machine that this one can reach") from None  # fmt: skip
        time.sleep(1.0)


# ------------------------------------------------------------------------------------------------- the training processes
def restarts_left() -> int:
    """Return how often torchrun will start this run again."""
    if RESTARTS not in os.environ:
        return 0
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) - int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def user_stopped() -> bool:
    """Return whether the command forwarded a signal of the user. torchrun sends SIGTERM, too, before it starts a run again."""
    return stop_note(Path(os.environ[NOTE])).exists() if NOTE in os.environ else True


def stop_note(note: Path) -> Path:
    """The file that the command makes before it forwards a signal."""
    return note.with_name("asked")


def keep_folder(folder: Path) -> None:
    """Note, for a restart, the folder of this machine's run."""
    if RESTARTS in os.environ and NOTE in os.environ:
        write_whole(Path(os.environ[NOTE]).with_name("run-folder"), str(folder.absolute()))


def continued(argv: list[str]) -> list[str]:
    """Return `argv` of a new run, or, in processes that torchrun started again, the command that continues what was saved. All ranks
    return the same; a machine that was replaced has no note of the folder, so the other machines send it."""
    if argv[:1] != ["run"] or RESTARTS not in os.environ or NOTE not in os.environ:
        return argv
    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    cpu = parse_flag_from_env("ACCELERATE_USE_CPU")  # as the Accelerator that follows reads it
    world = PartialState(cpu=cpu).num_processes
    note = Path(os.environ[NOTE]).with_name("run-folder")
    every: list[Any] = [note.read_text() if note.exists() else ""] * world
    if world > 1:
        dist.all_gather_object(every, every[0])
    folder = Path(next(filter(None, every), os.devnull))
    saved = [any(folder.glob("checkpoints/*/step-*/manifest.json"))]
    if world > 1:
        dist.broadcast_object_list(saved, src=0)
    if not saved[0]:
        return argv
    kept = [word for word in argv if word == "--board"]
    for i, word in enumerate(argv):
        if word.startswith("--") and masking.is_secret(word.split("=")[0]):  # args.json has no secrets
            kept += [word] if "=" in word else argv[i : i + 2]
    return ["resume", str(folder), *kept]
