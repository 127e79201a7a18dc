"""`apex serve` as its users meet it: a process that says where it listens, answers, and stops when it is told to."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from apex.cli import main
from apex.cli.serve import start_message
from swiftllm.server.messages import ServiceLimits
from swiftllm.server.settings import ServerSettings
from swiftllm.server.tool_calls import FORMATS
from tests.reference.missing_package import error_without
from tests.reference.tiny_model import make_tiny_llama

REPO = Path(__file__).resolve().parents[3]


def test_help_tells_of_server_and_limits_and_loads_neither_torch_nor_fastapi():
    code = (
        "import sys; from apex.cli import main\n"
        "try: main(['serve', '--help'])\nfinally: print({'torch', 'fastapi', 'uvicorn', 'pydantic'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    for flag in ("--port", "--host", "--api-key", "--max-queued-requests", "--drain-timeout-s", "--num-gpu-blocks"):
        assert f"{flag} " in answer.stdout
    assert answer.stdout.endswith("set()\n")


def test_a_port_in_use_and_a_host_of_others_are_said_before_anything_loads(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "/nowhere", "--port", str(port)]) == 2
    assert f"--port {port}: another program listens there" in capsys.readouterr().err
    assert main(["serve", "/nowhere", "--host", "192.0.2.1"]) == 2  # an address for documentation: nobody has it
    assert "no such address" in capsys.readouterr().err
    assert main(["serve", "/nowhere", "--port", "70000"]) == 2
    assert capsys.readouterr().err == "apex: port=70000 must be in 0..65535\n"


@pytest.mark.parametrize("package", ["fastapi", "prometheus_client"])
def test_a_package_that_is_missing_is_said(package):
    error = error_without(package, "serve", "/nowhere", "--port", "0")
    assert f"the server needs the package {package}: type `make setup`" in error


def ask(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as answer:
        return answer.read().decode()


def test_a_form_of_calls_that_is_not_known_is_said_once(tmp_path):
    ready = SimpleNamespace(
        description={"system": "vllm", "model": "m", "device": "cpu", "dtype": "float32", "weights": "float32"},
        limits=ServiceLimits(), request_limits=SimpleNamespace(longest_request=100), max_num_seqs=4,
    )  # fmt: skip
    client, template = SimpleNamespace(ready=ready, tokenizer=None), tmp_path / "template"
    for text, is_unknown in (
        ("{{ tools }}<tool_call>", False),
        ("{{ tools }}<arg_key>", True),
        ("{{ messages }}", False),
    ):
        template.write_text(text)
        said = start_message(client, ServerSettings(chat_template=str(template)), {})
        assert said.count("in a form that is not known") == said.count("tool calls: not known") == is_unknown
        assert not is_unknown or f"--tool-call-parser names a form: {', '.join(FORMATS)}" in said
        said = start_message(client, ServerSettings(chat_template=str(template), tool_call_parser="none"), {})
        assert "tool calls: none" in said and "not known" not in said


def test_it_serves_until_it_is_told_to_stop(tmp_path):
    model = make_tiny_llama(tmp_path / "tiny", vocab_size=256)
    options = tmp_path / "serve.yaml"
    options.write_text(
        f"model: {model}\nserved-model-name: tiny\nnum-gpu-blocks: 8\nnum-cpu-blocks: 16\ndtype: float32\n"
        "gpu-batch-threads: 1\n"
    )
    flags = ["--config", str(options), "--port", "0", "--max-num-batched-tokens", "32"]
    process = subprocess.Popen(
        [sys.executable, "-m", "apex", "serve", *flags],
        cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={"APEX_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip
    try:
        said = []
        while not said or "Ctrl-C" not in said[-1]:
            said.append(process.stdout.readline())
            assert said[-1], process.stderr.read()
        text = "".join(said)
        assert "apex serves" in text
        assert "257 tokens a request, 256 with KV cache at once, 1024 running or waiting" in text
        assert "no tokenizer: prompts are lists of token ids" in text
        url = re.search(r"http://127\.0\.0\.1:\d+", text).group()
        said = []
        while not said or "running on" not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        assert "GPU tier: 8 blocks of 16" in "".join(said) and "CPU tier: 16 blocks" in "".join(said)
        answer = json.loads(ask(f"{url}/v1/completions", {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4,
                                                          "ignore_eos": True}))  # fmt: skip
        assert answer["usage"]["completion_tokens"] == 4
        series = 'vllm:generation_tokens_total{model_name="tiny",service_class="latency-sensitive"} 4.0'
        assert series in ask(f"{url}/metrics")
        assert "<title>APEX</title>" in ask(f"{url}/")
        state = json.loads(ask(f"{url}/status.json"))
        assert state["records"] and state["model"] == "tiny" and state["now"]["finished"] == {"length": 1}
        ask(f"{url}/v1/completions", {"model": "tiny", "prompt": [1, 2], "max_tokens": 8, "ignore_eos": True})
        assert json.loads(ask(f"{url}/status.json"))["timeline"]["duration_ms"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.communicate()
