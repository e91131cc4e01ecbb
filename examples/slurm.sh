#!/usr/bin/env bash
# One run on several nodes under SLURM: sbatch examples/slurm.sh
#
# One task per node; each starts the processes of its node through torchrun. Two minutes before the time limit SLURM sends SIGUSR1: the
# run saves and stops (exit code 5), and this script puts the job back into the queue, where it continues.
#SBATCH --job-name=trainworthy
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

# A folder that all nodes see under this path. A requeued job keeps its number, so it finds its run again.
OUT="${SHARED:?set SHARED to a folder that all nodes see}/job-$SLURM_JOB_ID"
ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):${PORT:-29500}"
export ADDRESS

RUN="$(ls -d "$OUT"/*/2*/ 2>/dev/null | tail -n 1)"
if [ -n "$RUN" ] && ls "$RUN"checkpoints/*/step-*/manifest.json >/dev/null 2>&1; then
  set -- resume "$RUN"
else
  set -- run llm/pretrain --preset full --train.no-compile --shard full --run.save-minutes 30 --run.out "$OUT"
fi

# shellcheck disable=SC2016  # the variables of each node
srun bash -c 'exec trainworthy "$@" --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --address "$ADDRESS" \
  -n "$SLURM_GPUS_ON_NODE"' trainworthy "$@"
CODE=$?

if [ "$CODE" -eq 5 ]; then # interrupted, but saved
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
