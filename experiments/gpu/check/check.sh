#!/usr/bin/env bash
# Everything that a first GPU should answer, in nine minutes: bash experiments/gpu/check/check.sh
# README.md one folder up tells what each stage answers. Settings, by environment variable:
#   OUT     folder of the results (gpu_check/): results.jsonl, stages.jsonl, logs.tgz, tests.xml
#   STAGES  those to run (all of them, the most valuable first)
#   LIMIT   seconds for all together (525)
#   PY      the interpreter (python3); SITE, a folder for the wheels of .whl/; WHL, the folder they are in
#   TRY=cpu tries every stage on a CPU, with ten times the limits
set -u
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../../.." && pwd)
TRY=${TRY:-cuda} TIMES=1
[ "$TRY" = cpu ] && TIMES=10
PY=${PY:-python3} LIMIT=${LIMIT:-$((525 * TIMES))} WHL=${WHL:-$ROOT/.whl} SITE=${SITE:-/tmp/gpu_check_site}
OUT=${OUT:-gpu_check} STAGES=${STAGES:-fit16 card decoding updating tests race fit32}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
WORK=$(mktemp -d)
mkdir "$WORK/logs"
cd "$ROOT"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUBLAS_WORKSPACE_CONFIG=:4096:8
export TRY RESULTS="$OUT/results.jsonl"
if ls "$WHL"/*.whl > /dev/null 2>&1; then
    "$PY" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$WHL"/*.whl || exit 3
fi
export PYTHONPATH=$ROOT:$SITE

stage() { # name, limit in seconds, command
    local name=$1 limit=$(($2 * TIMES)) left=$((LIMIT - SECONDS))
    shift 2
    [[ " $STAGES " == *" $name "* ]] || return 0
    if [ "$left" -lt 15 ]; then
        echo "{\"stage\": \"$name\", \"rc\": \"no time left\"}" >> "$OUT/stages.jsonl"
        return 0
    fi
    [ "$limit" -gt $((left - 5)) ] && limit=$((left - 5))
    local begun=$SECONDS
    timeout -k 5 "$limit" "$@" > "$WORK/logs/$name.txt" 2>&1
    local rc=$?
    echo "{\"stage\": \"$name\", \"rc\": $rc, \"seconds\": $((SECONDS - begun)), \"limit\": $limit}" >> "$OUT/stages.jsonl"
    tar czf "$OUT/logs.tgz" -C "$WORK/logs" .
    echo "== $name: rc $rc in $((SECONDS - begun)) s"
    grep -av 'it/s\]' "$WORK/logs/$name.txt" | tail -n 12 | cut -c1-220
}

ACCELERATOR=gpu
RACE=(--shape 0.5B --prompt-tokens 200 --new-tokens 64 --prompts 8 --trl-rows 32 --warm-up 1 --steps 2 --max-tokens 16384)
if [ "$TRY" = cpu ]; then
    ACCELERATOR=cpu
    RACE=(--accelerator cpu --shape tiny --prompt-tokens 16 --new-tokens 8 --prompts 2 --trl-rows 8 --warm-up 1 --steps 1)
fi
FIT=("$PY" -m grpo_lightning fit --config configs/quickstart.yaml --trainer.accelerator "$ACCELERATOR" --trainer.devices 1
    --trainer.max_epochs 4 --data.val_limit 64)
TESTS=(tests/gpu/test_kernels.py tests/gpu/test_waits.py tests/gpu/test_precision_on_gpu.py tests/gpu/test_runs.py)
stage fit16 75 "${FIT[@]}" --trainer.precision bf16-mixed --trainer.default_root_dir "$WORK/fit16"
stage card 70 "$PY" "$HERE/card.py"
stage decoding 120 "$PY" "$HERE/decoding.py"
stage updating 90 "$PY" "$HERE/updating.py"
stage tests 120 "$PY" -m pytest "${TESTS[@]}" -rfE -p no:cacheprovider --timeout 60 \
    --junitxml "$OUT/tests.xml" --durations 5
stage race 120 "$PY" experiments/gpu/gpu.py "${RACE[@]}" --sides ours trl
stage fit32 75 "${FIT[@]}" --trainer.default_root_dir "$WORK/fit32"
echo "== stages"
cat "$OUT/stages.jsonl"
echo "== results"
cut -c1-240 "$OUT/results.jsonl" 2> /dev/null
