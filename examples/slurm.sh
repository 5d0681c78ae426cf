#!/bin/bash
# Trains under SLURM on one or more nodes; `sbatch --nodes 1` changes their number. Its arguments are those of `grpo fit`:
#
#   sbatch examples/slurm.sh --config configs/quickstart.yaml
#
# The job continues by itself after its time limit, a preemption and a failure. Ten minutes before the limit SLURM sends
# SIGUSR1: the running step ends, is saved, and `grpo fit` ends with exit code 75, so a step must take less than that.
# After any other exit code the job is requeued only if this start has saved a step: a mistake is not repeated forever.
# `scancel` ends the job for good.
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=08:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=grpo-%j.log

suspended=75
# On a disk that all nodes share. A requeued job keeps its number.
run=${RUN:-runs/$SLURM_JOB_ID}
mkdir -p "$run"
started=$run/started
touch "$started"
told=

# A preemption sends SIGTERM; srun passes signals on to all ranks.
trap 'told=yes; kill -USR1 $!' TERM USR1
# One rank per GPU. A minute after the first has ended the others end too: time to save a step, when all are suspended.
srun --kill-on-bad-exit=0 --wait=60 grpo fit "$@" \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" \
    --trainer.default_root_dir "$run" --ckpt_path last &
step=$!
wait "$step"
code=$?
while [ -n "$told" ]; do # a signal ends a wait before its time
    told=
    wait "$step"
    code=$?
done

if [ "$code" -eq 0 ]; then
    exit 0
elif scontrol show job "$SLURM_JOB_ID" | grep -q "JobState=CANCELLED"; then
    echo "the job was cancelled; sbatch it again with RUN=$run to continue"
elif [ "$code" -eq "$suspended" ] || [ "$run/checkpoints/last.ckpt" -nt "$started" ]; then
    echo "exit code $code: the job is requeued, and continues with $run/checkpoints/last.ckpt"
    scontrol requeue "$SLURM_JOB_ID"
else
    echo "exit code $code, and no step was saved: the job is not requeued"
fi
exit "$code"
