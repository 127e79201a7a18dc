"""Measures what a remote CPU attention attention task costs beyond the attention itself, over a socket of this machine.

A host process with Llama-3.1-8B's shapes (one layer is enough) answers attention tasks of 16 and 64 rows. The overhead
is the time from the submission of an attention task to its result, less the seconds that the host computed. The context
is one token, so that sender, receiver and host do not compete for the cores with the attention.

With `--delay-ms 20` a second table shows what a slow host does to the GPU batch: iterations with overlapped CPU
batches, with and without that delay on each remote attention task. The GPU batch should not wait.

python benchmarks/bench_remote.py [--help]
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import torch

from apex.cli.options import parse_options
from swiftllm.device import HostDevice
from swiftllm.remote.host import AttentionHost
from swiftllm.remote.protocol import SECRET_VARIABLE, KVShape
from swiftllm.remote.tier import RemoteCpuTier
from swiftllm.runtime.cpu_tier import AttentionTask, CpuTask, TaskRunner

LLAMA_8B = KVShape(1, num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16", cpu_kv_dtype="auto")
SECRET = b"benchmark"
WARM_UP = 50
MOST_BLOCKS = 4096


@dataclass(frozen=True)
class Options:
    """What to measure."""

    rows: tuple[int, ...] = (16, 64)
    """Rows of an attention task."""
    context: int = 1
    """Tokens of context of each row."""
    futures: int = 1000
    """Attention tasks of each size."""
    delay_ms: float = 0.0
    """Also compare iterations with and without so many milliseconds added to each remote attention task; 0: do not."""
    iterations: int = 150
    """Iterations of that comparison, each way."""


class DelayedHost(AttentionHost):
    """Sleeps before each attention."""

    delay_s = 0.0

    def make_runner(self, pool: torch.Tensor, kernel: str) -> TaskRunner:
        runner = super().make_runner(pool, kernel)
        inner = runner.run_task

        def run_task(task: CpuTask) -> None:
            if isinstance(task, AttentionTask):
                time.sleep(self.delay_s)
            inner(task)

        runner.run_task = run_task
        return runner


def serve(to_parent: Connection, delay_s: float) -> None:
    host = DelayedHost(("127.0.0.1", 0), SECRET, memory_bytes=1 << 28, num_threads=1)
    host.delay_s = delay_s
    to_parent.send(host.address)
    host.serve_forever()


@contextlib.contextmanager
def host_process(delay_s: float = 0.0) -> Iterator[tuple[str, int]]:
    """The address of a host in another process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=[there, delay_s], daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def overheads_s(tier: RemoteCpuTier, rows: int, context: int, futures: int) -> list[float]:
    """Seconds of each attention task beyond its computing, sorted."""
    blocks = -(-context // LLAMA_8B.block_size)
    tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks) % tier.num_blocks
    opened = tier.open(tables, torch.full((rows,), context, dtype=torch.int32))
    heads, dtype = LLAMA_8B.num_heads, LLAMA_8B.torch_dtype
    qkv = torch.randn(rows, heads + 2 * LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim).to(dtype)
    out, found = torch.empty(rows, heads, LLAMA_8B.head_dim, dtype=dtype), []
    for _ in range(WARM_UP + futures):
        start_s = time.perf_counter()
        computed_s = tier.attend(AttentionTask(0, opened, qkv, out), HostDevice.compute).wait()
        found.append(time.perf_counter() - start_s - computed_s)
    return sorted(found[WARM_UP:])


def iteration_s(delay_s: float, iterations: int) -> tuple[float, float]:
    """Median and 90th percentile of iterations in which overlapped CPU batches live on a host with that delay."""
    from apex.build import build_system
    from apex.strategy import StrategyConfig
    from swiftllm.config import EngineConfig
    from swiftllm.core.request import SamplingParams
    from tests.reference.fake_engine import flat_table
    from tests.reference.tiny_model import make_tiny_llama

    with tempfile.TemporaryDirectory() as folder, host_process(delay_s) as address:
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
        model = make_tiny_llama(folder, **sizes, num_key_value_heads=2)
        os.environ[SECRET_VARIABLE] = SECRET.decode()
        config = EngineConfig(
            str(model), device="cpu", dtype="float32", num_gpu_blocks=100, num_cpu_blocks=20, max_model_len=300,
            gpu_batch_threads=1, attention_hosts=f"{address[0]}:{address[1]}",
        )  # fmt: skip
        engine = build_system(
            "apex", config, StrategyConfig(strategy="asynchronous-overlap"), profile=flat_table(cpu_token_s=2e-6)
        )
        draw = random.Random(3)
        for number in range(24):
            prompt = [draw.randrange(3, 128) for _ in range(30)]
            engine.add(engine.make_request(str(number), prompt, SamplingParams(260, ignore_eos=True)))
        found = []
        while len(found) < iterations and engine.has_unfinished():
            engine.step()
            plan, result = engine.last_iteration
            if plan.cpu_batches and plan.decodes and not plan.prefills and not plan.swaps:
                found.append(result.duration_s)
        remote = engine.backend.attention_hosts.hosts[0].channel.bytes_received
        assert remote > 0, "no request lived on the host"
        for request_id in list(engine.state.requests):
            engine.abort(request_id)
        while engine.has_unfinished():
            engine.step()
        engine.close()
    return statistics.median(found), statistics.quantiles(found, n=10)[-1]


def main() -> int:
    options = parse_options(Options, prog="benchmarks/bench_remote.py")
    torch.set_num_threads(1)
    with host_process() as address:
        tier = RemoteCpuTier(lambda: address, SECRET, LLAMA_8B, MOST_BLOCKS)
        print("| rows | KiB out | KiB back | p50 ms | p90 ms | p99 ms |\n|---|---|---|---|---|---|")
        for rows in options.rows:
            found = overheads_s(tier, rows, options.context, options.futures)
            p50, p90, p99 = (1e3 * found[int(len(found) * share)] for share in (0.5, 0.9, 0.99))
            head = LLAMA_8B.head_dim * LLAMA_8B.torch_dtype.itemsize * rows / 1024
            out_kib, back_kib = head * (LLAMA_8B.num_heads + 2 * LLAMA_8B.num_kv_heads), head * LLAMA_8B.num_heads
            print(f"| {rows} | {out_kib:.0f} | {back_kib:.0f} | {p50:.2f} | {p90:.2f} | {p99:.2f} |")
        tier.close()
    if options.delay_ms:
        print("\n| added to each remote attention task | median iteration ms | p90 ms |\n|---|---|---|")
        for delay_s in (0.0, options.delay_ms / 1e3, 0.0, options.delay_ms / 1e3):
            median_s, p90_s = iteration_s(delay_s, options.iterations)
            print(f"| {1e3 * delay_s:g} ms | {1e3 * median_s:.2f} | {1e3 * p90_s:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
