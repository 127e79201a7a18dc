"""Attention hosts for tests: in threads of this process, or in processes that may be killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swiftllm.remote.host import AttentionHost
from swiftllm.runtime.cpu_tier import AttentionTask, CpuTask, TaskRunner
from tests.reference.int8_tier import poison_of

SECRET = b"a secret of the tests"


class SlowHost(AttentionHost):
    """Adds ``delay_s`` to each attention, during which no core computes."""

    delay_s = 0.0

    def make_runner(self, pool: torch.Tensor, kernel: str) -> TaskRunner:
        runner = super().make_runner(pool, kernel)
        inner = runner.run_task

        def run_task(task: CpuTask) -> None:
            time.sleep(self.delay_s if isinstance(task, AttentionTask) else 0.0)
            inner(task)

        pool.fill_(poison_of(pool))  # whoever reads a slot that nobody wrote gets no tokens
        runner.run_task = run_task
        return runner


@contextmanager
def host_in_thread(num_bytes: int = 64 << 20, secret: bytes = SECRET, port: int = 0) -> Iterator[SlowHost]:
    host = SlowHost(("127.0.0.1", port), secret, memory_bytes=num_bytes, num_threads=1)
    thread = threading.Thread(target=host.serve_forever, daemon=True)
    thread.start()
    try:
        yield host
    finally:
        host.close()
        thread.join()


def start_host_process(num_bytes: int) -> tuple[subprocess.Popen[str], tuple[str, int]]:
    """An `apex attention-host` of its own, and its address."""
    command = [sys.executable, "-m", "apex", "attention-host", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--memory-gib", str(num_bytes / (1 << 30)), "--threads", "1"],
        env={**os.environ, "APEX_HOST_SECRET": SECRET.decode(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    found = re.search(r"127\.0\.0\.1:(\d+)", line)
    assert found, line
    return process, ("127.0.0.1", int(found[1]))
