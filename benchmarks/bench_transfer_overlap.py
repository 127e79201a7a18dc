"""SIMULATED: what it is worth that copies between the KV tiers run beside the layers of an iteration.

A T4 and an A10 as in NEO's evaluation decode as many requests as the GPU tier holds. In some iterations one of them was
just swapped in; in others there is also a chunk of a prompt whose earlier tokens are in the CPU tier.

- "before" is the engine as it was: the host launched all pieces of a swap before the GPU batch, and waited there for
  what
  exceeded the pinned memory that may be under way; the copy of a layer's earlier tokens followed the layer before it.
- "after" is what the simulator charges: the attention of a layer waits for its own part of a swap, and earlier tokens
  are copied while the layer before computes. Launches of copies are hidden behind the layers, and cost nothing.

python benchmarks/bench_transfer_overlap.py [--help]
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from apex.cli.parser import parse_options
from apex.perf.operator_tables import model_of
from apex.simulator.paper_settings import BLOCK_SIZE, PaperSetting, load_setting
from apex.simulator.prediction.predicted_machine import PredictedMachine, predict_machine
from apex.simulator.virtual.backend import SimulatedBackend
from evaluation.results.folder import ResultFolder, flat_record, markdown_table
from evaluation.results.paths import RESULTS_DIR
from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import Request, Tier
from swiftllm.core.sampling_params import SamplingParams
from swiftllm.engine.backend import SwapTimes
from swiftllm.files import save_result
from swiftllm.runtime.cpu_tier import MAX_STAGED_BYTES
from swiftllm.runtime.kv_transfers import CHUNK_BYTES

SETTINGS = ("neo-t4", "neo-a10")
CHUNKS = ((512, 800), (512, 3584), (32, 800))
"""(new tokens, tokens in the CPU tier) of a chunk: of long prompts, and of a prompt that begins as a cached one."""
TITLE = "SIMULATED, on predicted machines: milliseconds that copies between the KV tiers add to an iteration."
HEADER = "machine,pcie_gb_s,copied,copies,layer,ms"
COLUMNS = (
    ("machine", "machine", "{}"),
    ("pcie_gb_s", "PCIe (GB/s)", "{:.1f}"),
    ("copied", "copied", "{}"),
    ("copied_mib", "MiB", "{:.0f}"),
    ("without_ms", "iteration without (ms)", "{:.1f}"),
    ("before_ms", "before: adds (ms)", "{:.1f}"),
    ("before_share", "of the iteration", "{:.0%}"),
    ("after_ms", "after: adds (ms)", "{:.1f}"),
    ("after_share", "of the iteration", "{:.0%}"),
)


@dataclass(frozen=True)
class Options:
    """SIMULATED: compare iterations with copies between the KV tiers before their layers, and beside them."""

    request_tokens: int = 800
    """Tokens of each request that decodes, and of the one that is swapped in."""
    piece_us: float = 48.0
    """Microseconds of Python that launch one piece of a swap; the default was measured on a machine without a GPU."""
    pcie_shares: tuple[float, ...] = (1.0, 0.5)
    """Shares of the predicted rate of PCIe."""
    results_dir: Path = RESULTS_DIR
    """Results go to bench_transfer_overlap/<run>/ in this folder."""


def pieces(num_blocks: int, num_layers: int, block_bytes: int) -> Iterator[int]:
    """Bytes of each piece of a swap: as :meth:`swiftllm.runtime.kv_transfers.KVTransfers.swap_blocks` divides it."""
    layer_bytes = block_bytes // num_layers
    at_once = max(1, CHUNK_BYTES // (num_blocks * layer_bytes))
    most = max(1, CHUNK_BYTES // (at_once * layer_bytes))
    for first in range(0, num_layers, at_once):
        for block in range(0, num_blocks, most):
            yield min(at_once, num_layers - first) * min(most, num_blocks - block) * layer_bytes


def launched_s(sizes: Sequence[int], start_s: float, copy_s: float, piece_s: float) -> float:
    """When the host has launched all pieces of a swap that begins at ``start_s`` and takes ``copy_s`` of the link."""
    host_s = arrived_s = start_s
    under_way: deque[tuple[float, int]] = deque()
    for size in sizes:
        host_s += piece_s
        arrived_s = max(host_s, arrived_s) + copy_s * size / sum(sizes)
        under_way.append((arrived_s, size))
        while sum(size for _, size in under_way) > MAX_STAGED_BYTES:
            host_s = max(host_s, under_way.popleft()[0])
    return host_s


class CopiesBeforeLayers(SimulatedBackend):
    """The engine as it was."""

    def __init__(self, *args: Any, block_bytes: int, piece_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._block_bytes, self._piece_s = block_bytes, piece_s

    def swap(self, swaps: Sequence[Swap]) -> SwapTimes | None:
        times = super().swap(swaps)
        if times is not None:
            sizes = list(pieces(sum(len(swap.source_blocks) for swap in swaps), self.num_layers, self._block_bytes))
            self.clock_s = launched_s(sizes, self.clock_s, times.end_s - times.start_s, self._piece_s)
        return times

    def gpu_attention(self, layer: int, gpu_batch: Any) -> None:
        self._context_from_s = self.clock_s  # not while the layer before computed
        super().gpu_attention(layer, gpu_batch)


def timeline(backend: SimulatedBackend, items: Sequence[GpuBatchItem], swaps: Sequence[Swap]) -> list[float]:
    """Seconds from the iteration's start to the end of each layer's attention, and to that of the iteration."""
    backend.swap(swaps)
    gpu_batch, ends = backend.open_gpu_batch(items), []
    for layer in range(-1, backend.num_layers):
        backend.run_stage(layer, [gpu_batch])
        if layer + 1 < backend.num_layers:
            backend.gpu_attention(layer + 1, gpu_batch)
            ends.append(backend.now())
    return [*ends, backend.now()]


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def chunk(new: int, earlier: int, tier: Tier) -> GpuBatchItem:
    request = Request("prompt", (0,) * (earlier + new), SamplingParams(max_tokens=1))
    return GpuBatchItem(request, earlier, new, tier, True)


def compare(machine: PredictedMachine, setting: PaperSetting, options: Options, share: float) -> Iterator[Any]:
    """A record of each kind of copy, and the timelines of the iteration without, before and after."""
    table = replace(machine.table, swap=machine.table.swap.times(1 / share))
    block_bytes, num_layers = machine.budget(BLOCK_SIZE).bytes_per_block, machine.model.num_layers
    num_decodes = max(1, setting.num_gpu_blocks // blocks_of(options.request_tokens))
    prompt, sampling = (0,) * options.request_tokens, SamplingParams(max_tokens=1)
    decodes = GpuBatchItem.decodes([Request(str(i), prompt, sampling) for i in range(num_decodes)])
    blocks = tuple(range(blocks_of(options.request_tokens)))
    swap = Swap(decodes[0].request, Tier.CPU, blocks, blocks)
    name = f"a swapped request of {options.request_tokens:,} tokens"
    cases = [(name, len(blocks), (decodes, ()), (decodes, (swap,)))]
    for new, earlier in CHUNKS:
        gpu_batches = [([chunk(new, earlier, tier), *decodes], ()) for tier in Tier]
        cases.append((f"{earlier:,} tokens before a chunk of {new}", blocks_of(earlier), *gpu_batches))
    for copied, num_blocks, without, with_copy in cases:
        model = model_of(table, num_layers)
        engine_before = CopiesBeforeLayers(model, block_bytes=block_bytes, piece_s=options.piece_us * 1e-6)
        runs = {
            "without": timeline(SimulatedBackend(model), *without),
            "before": timeline(engine_before, *with_copy),
            "after": timeline(SimulatedBackend(model), *with_copy),
        }
        all_s = {state: ends[-1] for state, ends in runs.items()}
        record = {
            "system": "one iteration",
            "backend": "simulated",
            "gpu": setting.gpu,
            "model": setting.model,
            "machine": setting.title,
            "decodes": num_decodes,
            "pcie_gb_s": share * float(table.identity["pcie_gb_s"]),
            "copied": copied,
            "copied_mib": num_blocks * block_bytes / 2**20,
            "without_ms": 1e3 * all_s["without"],
        }
        for state in ("before", "after"):
            added_s = all_s[state] - all_s["without"]
            record |= {f"{state}_ms": 1e3 * added_s, f"{state}_share": added_s / all_s[state]}
        yield flat_record(record), runs


def main(options: Options) -> int:
    """Compute, print, save: the table, and the timelines layer by layer."""
    configuration = {name: str(value) for name, value in asdict(options).items() if name != "results_dir"}
    folder = ResultFolder("bench_transfer_overlap", configuration, options.results_dir)
    folder.record_invocation()
    records, lines = [], ["# SIMULATED: when a layer's attention ends; last, when the iteration does", HEADER]
    for setting in map(load_setting, SETTINGS):
        machine = predict_machine(setting.gpu, setting.host, setting.model, setting.dtype)
        for share in options.pcie_shares:
            for record, runs in compare(machine, setting, options, share):
                records.append(record)
                named = f'"{record["machine"]}",{record["pcie_gb_s"]:g},"{record["copied"]}"'
                for state, ends in runs.items():
                    lines += [f"{named},{state},{layer},{1e3 * end_s:.3f}" for layer, end_s in enumerate(ends)]
    table = f"{TITLE}\n\n{markdown_table(records, COLUMNS)}"
    folder.save_summary(records, table)
    save_result(folder.path / "timelines.csv", "\n".join(lines) + "\n")
    print(f"{table}\nsummary, timelines and provenance: {folder.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, prog="benchmarks/bench_transfer_overlap.py")))
