#!/usr/bin/env bash
# Tries the clients of chat and agents against the server, and prints a Markdown table: client, what was tried, and
# "works" or the message.
#
# usage: scripts/try_clients.sh [--model FOLDER] [--url URL] [CLIENT...]
#
#   --model   the model to serve, by default the one of `make setup`
#   --url     a server that runs already, without /v1; --model is then the model's name there
#   CLIENT    by default all: openai openai_agents langchain llama_index instructor pydantic_ai litellm anthropic
#             node/openai node/ai
#
# Each client is installed in an environment of its own below ${APEX_CACHE_DIR:-~/.cache/apex}/clients: some 1.5 GB and
# five minutes in all. Those for Node need node and npm. The exit status is 0 if everything works.
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | head -n -1
    exit
fi
cd "$(dirname "$0")/.."
model="${APEX_CACHE_DIR:-${HOME:?is not set: set it or APEX_CACHE_DIR}/.cache/apex}/models/SmolLM2-135M-Instruct"
url=""
while [[ "${1:-}" == --* ]]; do
    case "$1" in
    --model) model="$2" ;;
    --url) url="${2%/}" ;;
    *)
        echo "try_clients: $1 is unknown; see --help" >&2
        exit 2
        ;;
    esac
    shift 2
done
clients=("$@")
if [ $# -eq 0 ]; then
    clients=(openai openai_agents langchain llama_index instructor pydantic_ai litellm anthropic node/openai node/ai)
fi
folder="${APEX_CACHE_DIR:-${HOME:?is not set: set it or APEX_CACHE_DIR}/.cache/apex}/clients"
mkdir -p "$folder"
export PIP_DISABLE_PIP_VERSION_CHECK=1 no_proxy=127.0.0.1,localhost
export OPENAI_API_KEY=none ANTHROPIC_API_KEY=none # some look for them before they look at their arguments
export LITELLM_LOCAL_MODEL_COST_MAP=True DO_NOT_TRACK=1 OPENAI_AGENTS_DISABLE_TRACING=1
unset OPENAI_BASE_URL ANTHROPIC_BASE_URL ANTHROPIC_AUTH_TOKEN

packages() {
    case "$1" in
    openai) echo openai==3.54.0 ;;
    openai_agents) echo openai-agents==0.24.0 ;;
    langchain) echo langchain-openai==1.7.4 ;;
    llama_index) echo llama-index-llms-openai-like==0.8.1 ;;
    instructor) echo instructor==1.17.0 ;;
    pydantic_ai) echo "pydantic-ai-slim[openai,anthropic]==2.68.0" ;;
    litellm) echo litellm==1.110.2 ;;
    anthropic) echo anthropic==2.14.0 ;;
    node/openai | node/ai) ;;
    *)
        echo "try_clients: no such client: $1" >&2
        exit 2
        ;;
    esac
}

# Installs a client; what it prints is in install.log. A stamp with the versions is written last.
install() {
    local place="$folder/${1%%/*}" wanted
    case "$1" in
    node/*)
        mkdir -p "$place"
        wanted="$(cat scripts/clients/node/package.json)"
        [ "$(cat "$place/stamp" 2>/dev/null)" = "$wanted" ] && return
        cp scripts/clients/node/package.json "$place/" && npm install --prefix "$place" --no-audit --no-fund || return
        ;;
    *)
        wanted="$(packages "$1")"
        [ "$(cat "$place/stamp" 2>/dev/null)" = "$wanted" ] && return
        "${PYTHON:-python3}" -m venv --clear "$place" && "$place/bin/python" -m pip install "$wanted" || return
        ;;
    esac
    echo "$wanted" >"$place/stamp"
}

run() {
    case "$1" in
    node/*)
        cp scripts/clients/node/*.mjs "$folder/node/"
        (cd "$folder/node" && timeout 600 node "use_${1#node/}.mjs" "$url" "$name")
        ;;
    *) timeout 600 "$folder/$1/bin/python" -W ignore -m scripts.clients.run "$1" "$url" "$name" ;;
    esac
}

for client in "${clients[@]}"; do packages "$client" >/dev/null; done

name="$model"
if [ -z "$url" ]; then
    name="$(basename "$model")"
    port="$(.venv/bin/python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')"
    url="http://127.0.0.1:$port"
    .venv/bin/apex serve "$model" --port "$port" --tool-call-parser json >"$folder/server.log" 2>&1 &
    server=$!
    trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null || true' EXIT
    for _ in $(seq 600); do
        if .venv/bin/python -c "import httpx; assert httpx.get('$url/health', trust_env=False).is_success" 2>/dev/null; then
            break
        fi
        if ! kill -0 "$server" 2>/dev/null; then
            echo "try_clients: the server did not start; see $folder/server.log" >&2
            exit 1
        fi
        sleep 0.5
    done
fi

status=0
echo "| client | what | result |"
echo "|---|---|---|"
for client in "${clients[@]}"; do
    if [ "${client%%/*}" = node ] && ! command -v npm >/dev/null; then
        echo "| $client | | not tried: there is no npm |"
        continue
    fi
    if ! install "$client" >"$folder/install.log" 2>&1; then
        echo "| $client | installing | $(tail -n 1 "$folder/install.log" | cut -c 1-200) |"
        status=1
        continue
    fi
    run "$client" 2>"$folder/${client##*/}.log" || status=1
done
exit "$status"
