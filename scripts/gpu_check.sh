#!/usr/bin/env bash
# Checks and measures the GPU path on this machine and writes results/<gpu>/<date>/, small enough to commit.
#
# usage: scripts/gpu_check.sh [--rehearse] [OUTPUT_FOLDER]
#
#   --rehearse   the same parts on the CPU with a tiny model: shows that the script works
#
# Needs a GPU, g++, and a python3 (or $PYTHON) with torch, numpy, Triton, pybind11 and setuptools; matplotlib draws the
# pictures where it is there; no network. Every part is a process of its own with a time limit and may fail without
# stopping the others; all of it ends within 9 minutes, so what tells most comes first. The exit status is that of the
# worst part.
set -uo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
DEVICE=cuda CASES=(llama-3.1-8b llama-2-7b) RANDOM_LOAD_S=40 REHEARSE=()
if [ "${1:-}" = --rehearse ]; then
    DEVICE=cpu CASES=(rehearsal) RANDOM_LOAD_S=1 REHEARSE=(--rehearse)
    shift
fi
export PYTHONUNBUFFERED=1
unset NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE # float32 is checked to its last bits

if ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    echo "gpu_check: $PYTHON has no torch: set PYTHON=.venv/bin/python, or another Python that has it" >&2
    exit 2
fi
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
# Profiles are measured here and now, none is taken from an earlier run.
APEX_CACHE_DIR=$(mktemp -d)
export APEX_CACHE_DIR
trap 'rm -rf "$APEX_CACHE_DIR"' EXIT

part operations 120 "$PYTHON" -m tests.gpu --device "$DEVICE" rows blocks prefill-attention decode-attention sampling
part tokens 90 "$PYTHON" -m tests.gpu --device "$DEVICE" tokens-float32 tokens-float16
part kernels 90 "$PYTHON" benchmarks/bench_gpu.py "${REHEARSE[@]}" --output "$FOLDER/kernels.json"
part random-load 75 "$PYTHON" -m tests.gpu --device "$DEVICE" --seconds "$RANDOM_LOAD_S" random-load
for case in "${CASES[@]}"; do
    # Between the models: the second one has what time is left.
    if [ "$case" = "${CASES[-1]}" ] && [ "$DEVICE" = cuda ] && command -v compute-sanitizer > /dev/null; then
        part compute-sanitizer 60 compute-sanitizer --error-exitcode 3 "$PYTHON" -m tests.gpu rows blocks
    fi
    for system in apex swiftllm neo; do  # apex first: the others find the profile that it has measured
        part "$system-$case" 75 "$PYTHON" evaluation/gpu_check.py \
            --system "$system" --case "$case" --limit 25 --folder "$FOLDER/end_to_end"
    done
done
"$PYTHON" evaluation/gpu_report.py "$FOLDER" || worst=1
echo "gpu_check: $((SECONDS - start)) s, results in $FOLDER (to commit them: git add --force $FOLDER)"
exit "$worst"
