"""Several processes, by the real command: what is refused, what stops a run whose ranks train apart, two machines."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.commands import QUICK, assert_refused, holds, machines, run_folder, trainworthy
from tests.vision.planted_classify import LOOP

CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: {precision}
num_machines: 1
num_processes: 2
use_cpu: true
"""
ALONE = """    for step in run.steps(stage):
        stage.optimizers["main"].zero_grad()
        for b in step.batches:
            (stage.loss(stage.model, b)["ce"] / len(b["label"])).backward()
        stage.optimizers["main"].step()
"""
"""A loop that forwards through the bare model: nothing exchanges its gradients."""


# -------------------------------------------------------------------------------------------------- what is not supported
@pytest.mark.parametrize(
    ("kind", "precision", "words"),
    [("FSDP", "'no'", "FSDP"), ("DEEPSPEED", "bf16", "DeepSpeed"), ("MEGATRON_LM", "'no'", "Megatron-LM"),
     ("MULTI_GPU", "fp8", "precision fp8"), ("XLA", "'no'", "torch_xla")],
)  # fmt: skip
def test_an_engine_that_does_not_train_here_is_refused_before_anything_starts(
    kind, precision, words, launch, tmp_path: Path
):
    config = tmp_path / "accelerate.yaml"
    config.write_text(CONFIG.format(kind=kind, precision=precision))
    done = launch("run", "vision/classify", *QUICK, "--accelerate-config", str(config), code=2)
    holds(done.stderr, f"{words}", "is not supported")
    assert "trainworthy run RECIPE -n" in done.stderr or "bf16" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("fsdp_version: 2\n  fsdp_reshard_after_forward: true", ("-n 2 --shard full",)),
        ("fsdp_version: 2\n  fsdp_reshard_after_forward: false", ("-n 2 --shard grad",)),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_reshard_after_forward: true", ("-n 2 --shard grad",)),
        ("fsdp_sharding_strategy: 3", ("-n 2 --shard none",)),
        ("fsdp_sharding_strategy: null\n  fsdp_reshard_after_forward: false", ("-n 2 --shard grad",)),
        (
            "fsdp_sharding_strategy: HYBRID_SHARD\n  fsdp_offload_params: true",
            ("fsdp_offload_params", "hybrid sharding"),
        ),
    ],
)
def test_fsdp_of_an_accelerate_config_is_refused_with_the_flag_that_does_the_same(
    settings: str, words: tuple, launch, tmp_path: Path
):
    config = tmp_path / "accelerate.yaml"
    config.write_text(CONFIG.format(kind="FSDP", precision="bf16") + f"fsdp_config:\n  {settings}\n")
    done = launch("run", "vision/classify", "--accelerate-config", str(config), code=2)
    holds(done.stderr, "distributed_type FSDP", "trainworthy run RECIPE", *words)
    assert not (tmp_path / "runs").exists()


def test_fsdp_on_a_cpu_which_accelerate_drops_in_silence_is_refused(launch, tmp_path: Path):
    """As `accelerate launch --use_fsdp` sets it for the processes it starts."""
    assert_refused(launch("run", "vision/classify", *QUICK, ACCELERATE_USE_FSDP="true"), "FSDP")
    assert not (tmp_path / "runs").exists()


# ----------------------------------------------------------------------------------------------------- ranks that train apart
@pytest.mark.slow
def test_ranks_that_train_alone_stop_at_once(fork, tmp_path: Path):
    fork((LOOP, ALONE))
    done = trainworthy("run", "mine.py", "-n", 2, *QUICK, cwd=tmp_path, code=4)
    holds(done.stderr, "ranks diverge: gradients are not exchanged", "after step 1 ", "run.update")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_gate_names_ranks_that_train_alone_first(fork, tmp_path: Path):
    fork((LOOP, ALONE))
    done = trainworthy("check", "mine.py", "-n", 2, "--only", "wiring", cwd=tmp_path, code=3)
    assert "try again:    trainworthy check mine.py --only wiring -n 2" in done.stdout + done.stderr
    (repro,) = tmp_path.glob("runs/*/checks/*/gates/wiring/repro.py")
    assert "'-n', '2'" in repro.read_text()
    shown = done.stdout.splitlines()
    (failed,) = [line for line in shown if "FAIL" in line]
    assert failed.split("wiring")[1].strip().startswith("ranks diverge: gradients are not exchanged")
    (cause,) = [line for line in shown if "likely causes" in line]
    assert "the loop calls the bare model" in cause


@pytest.mark.slow
def test_what_is_not_finite_on_one_rank_is_kept_by_that_rank(fork, tmp_path: Path):
    read = "        image = self.images[index].float() / 255\n"
    spoil = "        if generator is not None and index % 500 == 7:\n            image = image * float('nan')\n"
    fork((read, read + spoil))
    done = trainworthy("run", "mine.py", "-n", 2, *QUICK, "--run.max-nonfinite-steps", 1000, cwd=tmp_path, code=0)
    files = sorted((run_folder(tmp_path) / "postmortem").iterdir())
    assert files
    for file in files:
        assert "-rank-" in file.name
        assert not load_file(file)["0/image"].isfinite().all(), file
        rank = file.stem.split("-")[-1]
        assert f"not finite on rank {rank}; its batch is in" in done.stdout
    assert "non-finite values in sample" in done.stdout


# ---------------------------------------------------------------------------------------------------------- two machines
MACHINE = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
machine_rank: {rank}
main_process_ip: 127.0.0.1
main_process_port: {port}
mixed_precision: 'no'
num_machines: 2
num_processes: 2
use_cpu: true
"""


def test_machines_that_do_not_know_where_to_meet_are_told(launch, tmp_path: Path):
    config = tmp_path / "machine.yaml"
    config.write_text(CONFIG.format(kind="MULTI_GPU", precision="'no'").replace("num_machines: 1", "num_machines: 2"))
    done = launch("run", "vision/classify", "--accelerate-config", str(config), code=2)
    holds(done.stderr, "main_process_ip", "main_process_port", "machine_rank")


def two_machines(cwd: Path, *argv: str) -> list[tuple[int, str]]:
    """The same command on two machines that meet by an Accelerate config: (exit code, output) of each."""

    def settings(rank: int, port: int, own: Path) -> tuple[str, ...]:
        (own / "machine.yaml").write_text(MACHINE.format(rank=rank, port=port))
        return ("--accelerate-config", "machine.yaml")

    return machines(cwd, *argv, settings=settings, ACCELERATE_USE_CPU="true")


@pytest.mark.slow
def test_two_machines_without_a_shared_folder_are_told_so(tmp_path: Path):
    for code, said in two_machines(tmp_path, "check", "vision/classify", "--only", "resume"):
        assert code == 2, said
        holds(said, "the run folder is not shared by all machines", "--run.out")
        assert "Traceback" not in said


@pytest.mark.slow
def test_two_machines_with_private_temporary_folders_pass_the_gates(tmp_path: Path):
    shared = str(tmp_path / "shared")
    first, second = two_machines(tmp_path, "check", "vision/classify", "--only", "wiring,resume", "--run.out", shared)
    assert first[0] == second[0] == 0, first[1] + second[1]
    assert "6 steps = 3 + 3" in first[1]
    assert "machine 1 of 2" in second[1]
    assert not list(Path(shared).glob("**/.resume-*"))
