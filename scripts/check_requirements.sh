#!/usr/bin/env bash
# Resolves requirements.txt with pip, without installing anything: once as a machine with nothing but the public package
# index would (on Linux that gives torch's CUDA build, which requires one exact triton), once with this machine's
# settings of pip (which may know of CPU builds). Says which torch and triton each gives.
# Exits 1 if a resolution fails although the index answers; where no index answers, it says so and exits 0.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
export PIP_DISABLE_PIP_VERSION_CHECK=1
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
status=0

isolated_pip() { PIP_CONFIG_FILE=/dev/null "$python" -m pip --isolated "$@"; }
own_pip() { "$python" -m pip "$@"; }

# check NAME PIP: resolve with PIP, one of the functions above.
check() {
    local name="$1" pip="$2"
    if "$pip" install --dry-run --ignore-installed -r requirements.txt >"$log" 2>&1; then
        echo "requirements, $name:$(grep '^Would install' "$log" | grep -oE ' (torch|triton)-[^ ]*' | tr -d '\n')"
    elif ! "$pip" download --quiet --no-deps --dest "$(mktemp -d)" pip >/dev/null 2>&1; then
        echo "requirements, $name: not checked, since no package index answers"
    else
        echo "requirements, $name: they cannot be resolved"
        grep -A 8 -m 1 '^ERROR' "$log"
        status=1
    fi
}

check "public index" isolated_pip
check "this machine's index" own_pip
exit "$status"
