"""Host-side copies of the KV cache that cross to a GPU: a prompt's earlier tokens, and swapped blocks.

`python benchmarks/bench_transfers.py`; shapes of Llama-2-7B by default. Each copy is done by pacpu, and with torch's
operations for comparison: for earlier tokens they take the blocks, flatten them, cut the tokens off and copy them into
the buffer that is sent. Buffers were written before.

For earlier tokens it also tells the time that the launching thread spends: the workers gather a layer ahead, while the
thread sleeps for a layer, as it does while a GPU computes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from types import SimpleNamespace

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import torch

from pacpu import rows
from swiftllm.core.request import Tier
from swiftllm.device import HostDevice
from swiftllm.kv.tensors import KVFormat, KVPlan, KVPools
from swiftllm.machine import cpu_model, usable_cores
from swiftllm.ops.interface import Ops
from swiftllm.runtime.cpu_tier import CpuWorker, LocalCpuTier, TaskRunner
from swiftllm.runtime.kv_transfers import KVTransfers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=32, help="KV heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="elements of a head (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=800, help="earlier tokens of the prompt (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the chunk itself (default: %(default)s)")
    parser.add_argument(
        "--layer-ms", type=float, default=8.0, help="milliseconds that a GPU computes a layer (default: %(default)s)"
    )
    parser.add_argument("--swapped", type=int, default=240, help="tokens that are swapped (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=120, help="blocks of the CPU tier (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of pacpu (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, of which the median counts")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as beside a GPU
    block = (args.kv_heads, 2, args.block_size, args.head_dim)
    heads = {"num_kv_heads": args.kv_heads, "head_dim": args.head_dim}
    model = SimpleNamespace(num_layers=args.layers, windows=None, **heads)
    block_bytes = dict.fromkeys(Tier, 2 * math.prod(block) * args.layers)
    plan = KVPlan({Tier.GPU: 1, Tier.CPU: args.blocks}, args.block_size, block_bytes)
    formats = dict.fromkeys(Tier, KVFormat.exact(torch.float16))
    pools = KVPools(model, plan, HostDevice.torch_device, formats)
    pool = pools.tensors[Tier.CPU]
    pool.fill_(1.0)
    layers, ops, threads = pool.unbind(0), Ops(), {"num_threads": args.threads}
    print(f"{cpu_model()}, {args.threads} threads; {args.layers} layers, {args.kv_heads} x {args.head_dim}, float16")

    blocks = torch.randperm(args.blocks)[: -(-(args.tokens + args.chunk) // args.block_size)]  # of the whole context
    pinned = torch.ones(2, args.kv_heads, args.tokens, args.head_dim, dtype=torch.float16)
    moved = pinned.nbytes * args.layers

    def context_by_torch() -> None:
        for layer in layers:
            pinned.copy_(ops.gather_kv(layer, blocks, args.tokens).contiguous())

    def context_by_pacpu() -> None:
        for layer in layers:
            rows.gather_kv(layer, blocks, pinned, **threads)

    torch_s = compare(f"{args.tokens} earlier tokens", moved, context_by_torch, context_by_pacpu, args.rounds)
    runner = TaskRunner(pool, kernel="native", num_threads=args.threads)
    tier = LocalCpuTier(runner, CpuWorker)
    transfers = KVTransfers(HostOfBuffers(pinned), pools, ops, tier)
    asked = transfers, args.layers, blocks, args.tokens, args.layer_ms / 1e3
    seconds = sorted(launching_s(*asked) for _ in range(args.rounds))
    ahead_s = seconds[args.rounds // 2]
    print(f"  of the launching thread: {1e3 * ahead_s:.1f} ms, {torch_s / ahead_s:.1f} times less than by torch")
    tier.close()

    blocks = torch.randperm(args.blocks)[: -(-args.swapped // args.block_size)]
    staging = torch.ones(args.layers, len(blocks), *block, dtype=torch.float16)
    compare(
        f"{args.swapped} tokens swapped in",
        staging.nbytes,
        lambda: ops.gather_blocks(pool, blocks, staging),
        lambda: rows.gather_blocks(pool, blocks, staging, **threads),
        args.rounds,
    )
    compare(
        f"{args.swapped} tokens swapped out",
        staging.nbytes,
        lambda: ops.scatter_blocks(staging, pool, blocks),
        lambda: rows.scatter_blocks(staging, pool, blocks, **threads),
        args.rounds,
    )


class HostOfBuffers(HostDevice):
    """Gives the same few buffers again and again, as torch does with pinned memory that is free again."""

    def __init__(self, like: torch.Tensor) -> None:
        self._buffers = itertools.cycle([torch.ones_like(like) for _ in range(3)])

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return next(self._buffers)


def launching_s(transfers: KVTransfers, num_layers: int, blocks: torch.Tensor, tokens: int, layer_s: float) -> float:
    """Seconds in which this thread asks for the earlier tokens of all layers and waits for them."""
    seconds, start_s = 0.0, time.perf_counter()
    loaded = transfers.load_context(0, blocks, tokens)
    seconds += time.perf_counter() - start_s
    for layer in range(num_layers):
        time.sleep(layer_s)
        start_s = time.perf_counter()
        loaded.on_device()
        if layer + 1 < num_layers:
            loaded = transfers.load_context(layer + 1, blocks, tokens)
        seconds += time.perf_counter() - start_s
    return seconds


def compare(
    what: str, num_bytes: int, by_torch: Callable[[], None], by_pacpu: Callable[[], None], rounds: int
) -> float:
    """Prints both times, and returns torch's."""
    seconds: dict[str, list[float]] = {"torch": [], "pacpu": []}
    for _ in range(rounds):  # in turn, so that both see the same machine
        for name, copy in (("torch", by_torch), ("pacpu", by_pacpu)):
            start_s = time.perf_counter()
            copy()
            seconds[name].append(time.perf_counter() - start_s)
    torch_s, pacpu_s = (sorted(times)[rounds // 2] for times in seconds.values())
    print(
        f"{what}, {num_bytes / 1e6:.0f} MB: torch {1e3 * torch_s:.1f} ms, pacpu {1e3 * pacpu_s:.1f} ms "
        f"({num_bytes / pacpu_s / 1e9:.1f} GB/s), {torch_s / pacpu_s:.1f} times faster"
    )
    return torch_s


if __name__ == "__main__":
    main()
