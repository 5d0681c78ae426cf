#!/bin/bash
# Trains on the first node and draws on the others under SLURM: `grpo fit` here, a `vllm serve` on each of the rest.
# The first argument is the policy's folder, the others are those of `grpo fit`:
#
#   sbatch examples/slurm_servers.sh Qwen/Qwen2.5-1.5B --config configs/quickstart.yaml --loop.source OneStepOffPolicy
#
# A server that ends is started again, and gets the weights after the next update. The job ends with the training; sbatch
# it again with RUN=... to continue. Weights travel through a folder that all nodes see.
#SBATCH --job-name=grpo-ahead
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=08:00:00
#SBATCH --output=grpo-%j.log

policy=$1
shift
run=${RUN:-runs/$SLURM_JOB_ID}
weights=${WEIGHTS:-$run/weights}
port=${PORT:-8000}
mkdir -p "$weights"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
servers=()
urls=
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" bash -c 'while :; do "$@"; sleep 5; done' server \
        env VLLM_SERVER_DEV_MODE=1 vllm serve "$policy" --port "$port" --tokens-only --dtype bfloat16 \
        --logprobs-mode processed_logprobs > "$run/server-$node.log" 2>&1 &
    servers+=($!)
    urls+=${urls:+, }http://$node:$port
done
trap 'kill "${servers[@]}" 2>/dev/null' EXIT

srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" grpo fit "$@" --model.policy.path "$policy" \
    --trainer.precision bf16-mixed --trainer.default_root_dir "$run" --ckpt_path last \
    --model.engine VLLMServerEngine --model.engine.urls "[$urls]" --model.engine.wait 1800 \
    --model.engine.transfer.folder "$weights"
