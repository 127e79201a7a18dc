#!/usr/bin/env bash
# Checks and measures the GPU path on this machine and writes results/<gpu>/<date>/, small enough to commit.
#
# usage: scripts/gpu_check.sh [--rehearse] [OUTPUT_FOLDER]
#
#   --rehearse   the same parts on the CPU with a tiny model: shows that the script works
#
# Needs a GPU, g++, and a python3 (or $PYTHON) with torch, Triton, pybind11, numpy, safetensors, transformers and
# matplotlib; no network. Every part has a time limit and may fail without stopping the others; all of it ends within
# 9 minutes. The exit status is that of the worst part.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
DEVICE=cuda CASES=(llama-2-7b llama-3.1-8b) RANDOM_LOAD_S=40 REHEARSE=()
if [ "${1:-}" = --rehearse ]; then
    DEVICE=cpu CASES=(rehearsal) RANDOM_LOAD_S=1 REHEARSE=(--rehearse)
    shift
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"

gpu=rehearsal
if [ "$DEVICE" = cuda ]; then
    if ! gpu=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))'); then
        echo "gpu_check: torch sees no GPU here; scripts/gpu_check.sh --rehearse runs the same parts on the CPU" >&2
        exit 2
    fi
fi
FOLDER="${1:-results/$gpu/$(date -u +%Y-%m-%d-%H%M)}"
mkdir -p "$FOLDER/end_to_end"
: > "$FOLDER/parts.txt"
worst=0
start=$SECONDS

# part NAME LIMIT_S COMMAND...: run it within its limit and within what is left of the whole.
part() {
    local name=$1 limit=$2 left=$((TOTAL_S - SECONDS + start)) before=$SECONDS status result=ok
    shift 2
    [ "$left" -lt "$limit" ] && limit=$left
    echo "== $name (at most $limit s)"
    if [ "$limit" -lt 5 ]; then
        status=124
    else
        timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$FOLDER/$name.log" | tail -n 40
        status=${PIPESTATUS[0]}
    fi
    [ "$status" -ne 0 ] && result="failed ($status)" && worst=1
    [ "$status" -eq 124 ] && result="time limit"
    [ "$status" -eq 0 ] && rm -f "$FOLDER/$name.log"
    printf '%s\t%s\t%s\n' "$name" "$result" "$((SECONDS - before))" >> "$FOLDER/parts.txt"
}

TOTAL_S=510

part build 120 "$PYTHON" setup.py --quiet build_ext --inplace
part checks 150 "$PYTHON" -m tests.gpu --device "$DEVICE" --seconds "$RANDOM_LOAD_S"
part kernels 90 "$PYTHON" benchmarks/bench_gpu.py "${REHEARSE[@]}" --output "$FOLDER/kernels.json"
for case in "${CASES[@]}"; do
    for system in swiftllm neo apex; do
        part "$system-$case" 75 "$PYTHON" evaluation/gpu_check.py \
            --system "$system" --case "$case" --limit 30 --folder "$FOLDER/end_to_end"
    done
done
if [ "$DEVICE" = cuda ] && command -v compute-sanitizer > /dev/null; then
    part compute-sanitizer 60 compute-sanitizer --error-exitcode 3 "$PYTHON" -m tests.gpu rows blocks
fi
"$PYTHON" evaluation/gpu_report.py "$FOLDER" || worst=1
echo "gpu_check: $((SECONDS - start)) s, results in $FOLDER (to commit them: git add --force $FOLDER)"
exit "$worst"
