"""Start `apex serve`, ask it a question through OpenAI's API, and stop it.

.venv/bin/python examples/server_and_client.py [MODEL]

MODEL is a Hugging Face folder or a name on its hub; by default the 135M-parameter model that `make setup` prepares. The
client is the package `openai`, or `urllib` where that is not installed.
"""

import json
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from swiftllm.files import cache_dir
from swiftllm.processes import reserved_port

MODEL = cache_dir() / "models/SmolLM2-135M-Instruct"
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
LIMITS = {"max_tokens": 32, "temperature": 0.0}


def main(model: str | Path = MODEL) -> None:
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        sizes = ["--num-gpu-blocks", "64", "--num-cpu-blocks", "1000"]
        command = [sys.executable, "-m", "apex", "serve", str(model), "--port", str(port), *sizes]
        server = subprocess.Popen(command)
        try:
            wait_until_ready(server, url)
            print("answer:", ask_by_openai(url) if find_spec("openai") else ask_by_urllib(url))
        finally:
            server.terminate()
            server.wait()


def wait_until_ready(server: subprocess.Popen, url: str) -> None:
    """Return when the server answers. The first start with a model measures this machine, which takes a while."""
    while True:
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            if server.poll() is not None:
                raise SystemExit("the server has ended: see its message above") from None
            time.sleep(0.1)


def ask_by_openai(url: str) -> str:
    """The answer, as it streams."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none is needed")
    name = client.models.list().data[0].id
    chunks = client.chat.completions.create(model=name, messages=MESSAGES, stream=True, **LIMITS)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def ask_by_urllib(url: str) -> str:
    """The whole answer."""
    body = json.dumps({"messages": MESSAGES, **LIMITS}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


if __name__ == "__main__":
    main(*sys.argv[1:])
