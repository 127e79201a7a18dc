#!/usr/bin/env bash
# Everything a newcomer needs, in stages that do nothing when they are up to date:
#
#   venv           a virtual environment, from Python 3.11 or 3.12 on PATH or from PYTHON=...
#   tools          what the native build needs of requirements.txt
#   requirements   torch first and alone, then the rest of requirements.txt
#   model          SmolLM2-135M-Instruct as a Hugging Face folder (scripts/prepare_model.py)
#   ispc           beside these two: the ISPC compiler, optional (scripts/install_ispc.sh)
#   llamafile      the source of Mozilla's sgemm, optional (scripts/fetch_llamafile.py)
#   native         the CPU attention kernels: python setup.py build_ext --inplace
#   command        `apex` in the virtual environment: pip install --editable
#
# VENV=folder chooses the environment (default .venv). VENV= (empty) uses PYTHON or python3 as it is, installs no
# package, and does not insist on the model: for machines that have torch already and no network.
# TORCH_BUILD=cuda or cpu chooses torch's build; by default cuda with an NVIDIA GPU, else cpu where it can be had.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV-.venv}"
state="${venv:-build}/.setup" # one stamp per stage, holding the hash of what the stage was made from
cache="${APEX_CACHE_DIR:-${HOME:?is not set: set it or APEX_CACHE_DIR}/.cache/apex}"
export PIP_DISABLE_PIP_VERSION_CHECK=1
export PYTHONDONTWRITEBYTECODE= # empty: Python keeps what it compiles

say() { echo "setup: $*"; }
fail() {
    say "$1" >&2
    say "what to do: $2" >&2
    exit 1
}
digest() { sha256sum | cut -c 1-16; }

# stage NAME KEY_FUNCTION RUN_FUNCTION: run unless the stamp holds the key. The key is taken again afterwards,
# because it also covers what the stage leaves behind.
stage() {
    local name="$1" key="$2" run="$3" start=$SECONDS
    if [ "$(cat "$state/$name" 2>/dev/null)" = "$("$key")" ]; then
        say "$name: up to date"
        return
    fi
    say "$name ..."
    "$run"
    mkdir -p "$state"
    "$key" >"$state/$name"
    say "$name: done in $((SECONDS - start)) s"
}

# A version manager's shim may be on PATH and still fail, so the candidate has to run.
python_works() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}

python_key() { "$python" -c 'import sys; print(sys.executable, sys.version)' 2>/dev/null || echo missing; }
make_venv() {
    if [ -e "$venv" ]; then
        python_works "$venv/bin/python" && return
        fail "$venv exists but holds no working Python 3.11 or 3.12" "rm -rf $venv, then try again"
    fi
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
        if python_works "$candidate" && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            say "creating $venv with $("$candidate" --version)"
            "$candidate" -m venv "$venv" && return
            rm -rf "$venv"
        fi
    done
    fail "no working Python 3.11 or 3.12 with the venv module among: ${PYTHON:-python3.11 python3.12 python3 python}" \
        "install python3.12 and python3.12-venv, or name one with PYTHON=/path/to/python; later versions are not tested"
}

advice="check the network and pip's settings (PIP_INDEX_URL, proxies), then try again"
# Most modules are never imported: Python compiles those that are.
pip_install() {
    "$python" -m pip install --no-compile --progress-bar off "$@" \
        | sed -u '/^Requirement already satisfied/d; /^Looking in/d'
}
native_tools() { sed -n '/^# native build/,/^$/s/^[a-z].*/&/p' requirements.txt; }
tools_key() { native_tools | digest; }
install_tools() {
    local tools
    mapfile -t tools < <(native_tools)
    pip_install "${tools[@]}" || fail "pip could not install ${tools[*]}" "$advice"
}
requirements_key() { { cat requirements.txt && echo "$torch_build"; } | digest; }
pulls_cuda() {
    "$python" -m pip install --quiet --dry-run --report - "$1" 2>/dev/null | grep -q '"name": *"nvidia-'
}
# The public index has only torch's CUDA build for Linux on x86-64, gigabytes larger than the CPU build. uv knows where
# PyTorch keeps its CPU builds; PIP_EXTRA_INDEX_URL may name a CPU-only index for pip instead.
install_torch() {
    if [ "$torch_build" = cpu ] && pulls_cuda "$1"; then
        say "pip would fetch torch's CUDA build: trying uv for the CPU build"
        pip_install "$(grep '^uv==' requirements.txt)" \
            && "$python" -m uv pip install --python "$python" --torch-backend cpu "$1" && return
        say "no CPU build within reach: going on with the CUDA build (several GB), which works without a GPU, too."
        say "to avoid that, stop now and set PIP_EXTRA_INDEX_URL to an index that has CPU builds of torch."
    fi
    pip_install "$1"
}
install_requirements() {
    local torch
    torch="$(grep '^torch==' requirements.txt)"
    install_torch "$torch" || fail "pip could not install $torch" "$advice"
    pip_install -r requirements.txt || fail "pip could not install requirements.txt" "$advice"
    "$python" -m pip check || fail "the installed packages contradict each other" "rm -rf $venv, then try again"
    check_imports "rm -rf $venv, then try again"
    "$python" -c 'import fastapi, hypothesis, matplotlib.pyplot, openai, pandas, pytest, uvicorn' \
        || fail "$python cannot import what is needed" "rm -rf $venv, then try again"
    if [ "$torch_build" = cuda ] && [ "$("$python" -c 'import torch; print(torch.version.cuda)')" = None ]; then
        fail "pip's settings gave torch's CPU build" \
            "rm -rf $venv, then try again with PIP_CONFIG_FILE=/dev/null, or with TORCH_BUILD=cpu to stay without a GPU"
    fi
}
check_imports() {
    "$python" -c 'import torch, numpy, safetensors, tokenizers, transformers, pybind11, setuptools
build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
print(f"setup: torch {torch.__version__}, {build} build,", "sees a GPU" if torch.cuda.is_available() else "sees no GPU")' \
        || fail "$python cannot import what is needed" "$1"
}

# The first line of output: which build of torch, why, and how to get the other.
say_torch_build() {
    local why="no NVIDIA GPU is here" other=cuda
    [ ! -e /dev/nvidiactl ] || why="an NVIDIA GPU is here"
    [ -z "${TORCH_BUILD:-}" ] || why="TORCH_BUILD says so"
    [ "$torch_build" = cpu ] || other=cpu
    say "torch: the ${torch_build^^} build, since $why (the other: rm -rf $venv, then TORCH_BUILD=$other make setup)"
}

check_own_packages() {
    check_imports "install the missing package, or run without VENV= to get a virtual environment"
}

find_ispc() { command -v ispc || { [ -x "$cache/ispc/bin/ispc" ] && echo "$cache/ispc/bin/ispc"; } || echo none; }
# A failed attempt is remembered too, so that a machine without network does not wait for one every time.
ispc_key() { { cat scripts/install_ispc.sh && find_ispc; } | digest; }
install_ispc() {
    scripts/install_ispc.sh
    [ "$(find_ispc)" != none ] || say "to try again later: rm $state/ispc"
}

# Remembers failed attempts, too.
llamafile_key() { { cat scripts/fetch_llamafile.py && ls "$cache"/llamafile/*/sgemm.cpp 2>/dev/null || true; } | digest; }
fetch_llamafile() {
    "$python" scripts/fetch_llamafile.py
    ls "$cache"/llamafile/*/sgemm.cpp >/dev/null 2>&1 || say "to try again later: rm $state/llamafile"
}

# setup.py compiles only what has changed, so it runs every time.
build_native() {
    say "native ..."
    "$python" setup.py --quiet build_ext --inplace \
        || fail "the native build failed" "read the first error above; it needs a C++17 compiler (Debian: apt install g++)"
    say "native: up to date"
}

command_made_from="setup.py pyproject.toml requirements.txt scripts/setup.sh"
command_key() { { cat $command_made_from && ls "$venv/bin/apex" 2>/dev/null || true; } | digest; }
# In compat mode this is a path, not an import hook: what is imported is what lies there, and nothing else.
install_command() {
    pip_install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat --editable . \
        || say "the command \`apex\` could not be installed; python -m apex is the same"
}

prepare_model() {
    if "$python" scripts/prepare_model.py; then return; fi
    [ -z "$venv" ] || fail "the model could not be prepared" "read the message above, then try again"
    say "going on without the default model: tests that need it are skipped, commands need --model FOLDER"
}

prepare_native() {
    stage ispc ispc_key install_ispc
    stage llamafile llamafile_key fetch_llamafile
    build_native
}
# It prints at its end, since another stage prints meanwhile.
begin_native() {
    native_log="$(mktemp)"
    prepare_native >"$native_log" 2>&1 &
    native=$!
    trap 'kill "$native" 2>/dev/null || true; rm -f "$native_log"' EXIT
}
end_native() {
    local status=0
    wait "$native" || status=$?
    cat "$native_log"
    [ "$status" -eq 0 ] || exit "$status"
}

start=$SECONDS
torch_build="${TORCH_BUILD:-$([ -e /dev/nvidiactl ] && echo cuda || echo cpu)}"
case "$torch_build" in cuda | cpu) ;; *) fail "TORCH_BUILD=$torch_build is unknown" "set it to cuda or cpu" ;; esac
if [ -n "$venv" ]; then
    python="$venv/bin/python"
    say_torch_build
    stage venv python_key make_venv
    stage tools tools_key install_tools
    begin_native
    stage requirements requirements_key install_requirements
    prepare_model
    end_native
    stage command command_key install_command
else
    python="${PYTHON:-python3}"
    python_works "$python" || fail "$python is not a working Python 3.11 or 3.12" \
        "name one with PYTHON=/path/to/python; later versions are not tested"
    say "torch: the one that $python has, since VENV= is empty (another: install it there, or run without VENV=)"
    stage packages python_key check_own_packages
    prepare_native
    prepare_model
fi
say "ready after $((SECONDS - start)) s"
