"""Attention hosts on a Ray cluster. The cluster itself takes half a minute: with APEX_SLOW_TESTS only."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from apex.cli import main
from tests.reference.missing_package import error_without
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

REPO = Path(__file__).resolve().parents[3]
SLOW = pytest.mark.skipif(not os.environ.get("APEX_SLOW_TESTS"), reason="APEX_SLOW_TESTS is not set: takes a minute")
PROMPTS = [f"{number} bottles of beer on the wall, {number} bottles" for number in range(24)]
POOLS = ["--num-gpu-blocks", "8", "--num-cpu-blocks", "16", "--max-model-len", "120"]


def test_without_ray_the_message_names_the_extra(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    model = str(make_tiny_llama(tmp_path / "tiny"))
    flags = ["--attention-hosts", "2", "--ray-address", "10.0.0.1:6379", "--num-cpu-blocks", "9"]
    error = error_without("ray", "generate", model, "a prompt", *flags)
    assert "pip install 'apex-llm-serving[ray]'" in error


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--attention-hosts", "2"], "needs a ray_address"),
        (["--ray-address", "auto"], "needs attention_hosts"),
        (["--attention-hosts", "here", "--num-cpu-blocks", "9"], "HOST:PORT"),
        (["--attention-hosts", "127.0.0.1:9", "--num-cpu-blocks", "9"], "127.0.0.1:9"),
        (["--attention-hosts", "127.0.0.1:9", "--system", "vllm"], "no effect on vllm"),
        (["--attention-hosts", "2", "--ray-address", "127.0.0.1:9", "--num-cpu-blocks", "9"], "no Ray cluster answers"),
    ],
)
def test_flags_that_cannot_work_are_said(capsys, monkeypatch, tmp_path, flags, words) -> None:
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    model = str(make_tiny_llama(tmp_path / "tiny"))
    assert main(["generate", model, "a prompt", "--num-gpu-blocks", "4", "--gpu-batch-threads", "1", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_no_cluster_listens_is_said_before_ray_tries_for_minutes(monkeypatch, scheme) -> None:
    ray = pytest.importorskip("ray")
    from swiftllm.remote.ray_hosts import RayHosts

    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray itself was asked"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ValueError, match=rf"at ray_address={scheme}127\.0\.0\.1:{port}: .*ray start"):
        RayHosts(f"{scheme}127.0.0.1:{port}", 2)


class Server:
    """An `apex serve` process."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "apex", "serve", str(model), "--port", "0", "--dtype", "float32", *POOLS]
        self.process = subprocess.Popen(
            [*command, "--gpu-batch-threads", "1", "--served-model-name", "tiny", *flags],
            cwd=REPO,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "APEX_CACHE_DIR": str(model.parent), "OMP_NUM_THREADS": "1"},
        )
        while not (found := re.search(r"API: (http://\S+)/v1", line := self.process.stdout.readline())):
            assert line, "it ended"
        self.url = found[1]

    def complete(self, prompt: str, max_tokens: int = 48) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        for _ in range(100):
            try:
                with urllib.request.urlopen(request) as answer:
                    return json.loads(answer.read())["choices"][0]["text"]
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read()) from error
            except urllib.error.URLError:  # it says where it listens just before it does
                time.sleep(0.1)
        raise AssertionError("the server does not answer")

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            values = [line for line in answer.read().decode().splitlines() if re.match(rf"{name}(_total)?{{", line)]
        return float(values[0].split()[-1])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(timeout=300) == 0
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def cluster(monkeypatch) -> Iterator:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(**small) for _ in range(2)]
        yield cluster, nodes
    finally:
        cluster.shutdown()


@SLOW
def test_a_killed_node_under_load(cluster, tmp_path) -> None:
    """Every request is answered with the right text, and the host is replaced within 20 s."""
    ray_cluster, nodes = cluster
    model = make_tiny_llama(tmp_path / "tiny")
    make_tiny_tokenizer(model)
    local = Server(model)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        expected = list(pool.map(local.complete, PROMPTS))
    local.stop()
    assert len(set(expected)) > len(PROMPTS) // 2
    server = Server(model, "--attention-hosts", "2", "--ray-address", ray_cluster.address, "--system", "neo")
    is_over, wrong, answered = threading.Event(), [], []

    def load(number: int) -> None:
        while not is_over.is_set():
            if (text := server.complete(PROMPTS[number])) != expected[number]:
                wrong.append((number, text))
            answered.append(number)

    threads = [threading.Thread(target=load, args=[number]) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(answered) >= len(PROMPTS))
        assert server.metric("apex:attention_hosts_connected") == 2
        ray_cluster.remove_node(nodes[0], allow_graceful=False)
        wait_until(lambda: server.metric("apex:host_deaths") == 1)
        before = len(answered)
        wait_until(lambda: server.metric("apex:attention_hosts_connected") == 2)
        wait_until(lambda: len(answered) >= before + len(PROMPTS))
        assert server.metric("apex:recomputed_after_host_deaths") > 0
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        server.stop()
    assert not wrong and set(answered) == set(range(len(PROMPTS)))


def wait_until(condition, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)
