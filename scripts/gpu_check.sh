#!/usr/bin/env bash
# Checks and measures the GPU path on this machine and writes results/<gpu>/<date>/, small enough to commit.
#
# usage: scripts/gpu_check.sh [--rehearse] [--stages NAMES] [--minutes N] [--archive FILE] [OUTPUT_FOLDER]
#
#   --rehearse   the same stages on the CPU with a tiny model: shows that the script works
#   --stages     run these stages alone: names or patterns, with commas; by default those not done in the folder
#   --minutes    all of this call; by default 9. A stage that is not reached is named in the results
#   --archive    the one file with all results; by default OUTPUT_FOLDER.tar.gz. It is written anew after every stage
#
# With the same folder the same command goes on with what is not done; `--minutes 40` does all in one call.
#
# Needs a GPU, g++, and a python3 (or $PYTHON) with its headers, torch, numpy, Triton, pybind11 and setuptools;
# matplotlib draws the pictures where it is there; no network. Every part is a process of its own with a time limit and
# may fail without stopping the others. The exit status is 0 if all that was run went well.
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1 # a part that crashes or hangs says where
ulimit -c 0                 # and leaves no image of its gigabytes
unset NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE # float32 is checked to its last bits
exec "${PYTHON:-python3}" -m evaluation.gpu.stages "$@"
