#!/bin/bash
#SBATCH --job-name=rlft
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@900
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
first=$(hostname -I | cut -d ' ' -f 1)
port=$((20000 + SLURM_JOB_ID % 20000))
ray start --head --node-ip-address="$first" --port="$port" || exit
others=$((SLURM_NNODES - 1))
srun --overlap --nodes="$others" --ntasks="$others" --exclude="$(hostname)" ray start --address="$first:$port" --block &
for _ in $(seq 60); do
  [ "$(ray status | grep -c ' node_')" -ge "$SLURM_NNODES" ] && break
  sleep 5
done

rlft train +recipe=grpo_gsm8k resume=auto hydra.run.dir=runs/gsm8k checkpoint.on_signal=600 \
  cluster=ray cluster.address="$first:$port" cluster.engines=24 cluster.ranks=8 &
run=$!
trap 'kill -TERM "$run"' TERM
while kill -0 "$run" 2>/dev/null; do
  wait "$run"  # which a signal to this script ends, before the run has ended
done
wait "$run"
code=$?
ray stop
[ "$code" -eq 130 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
