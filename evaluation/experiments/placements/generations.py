"""Whole generations of Park and Egger's Fig. 15 and 16, predicted, and the split searches of Fig. 14."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.experiments.placements.operations import LayerOfModel, Machine
from evaluation.experiments.placements.split import Operation, Split, best_split, in_pieces, single_splits, split_at
from evaluation.results.folder import FlatRecord

SYSTEMS = ("flexgen-like", "gpu-only", "cpu-gpu", "cpu-gpu native")
"""FlexGen's order of transfers; all weights and KV cache streamed; the best split; the same with our CPU attention."""


def measured_operations(settings: Mapping[str, Any], name: str) -> list[Operation]:
    """The operations that the paper's tables give, in seconds."""
    raw = settings["measured"][name]["operations"]
    return [Operation(op, *(ms * 1e-3 for ms in times)) for op, *times in raw]


def search_rows(settings: Mapping[str, Any]) -> list[FlatRecord]:
    """Fig. 14: layer latency over single split points, with Scores whole and in pieces, and the best of two points."""
    rows: list[FlatRecord] = []
    for name in settings["measured"]:
        operations = measured_operations(settings, name)
        for pieces in (1, settings["split_pieces"]):
            divided = operations if pieces == 1 else in_pieces(operations, "Scores", pieces)
            singles = single_splits(divided)
            best_single = min(singles, key=lambda split: split.latency_s)
            candidates = (("gpu-only", singles[0]), ("one split", best_single), ("two splits", best_split(divided)))
            rows += [_search_row(name, pieces, system, split, divided) for system, split in candidates]
    return rows


def _search_row(name: str, pieces: int, system: str, split: Split, operations: Sequence[Operation]) -> FlatRecord:
    names = [op.name for op in operations]
    return {
        **_common("park-egger-opt-30b", f"{name}-split-{pieces}", system, 0),
        "figure": "split-search",
        "on_gpu": f"{names[split.i]} to {names[split.j - 1]}",
        "cpu_s": split.cpu_s,
        "host_to_device_s": split.host_to_device_s,
        "decompress_s": split.decompress_s,
        "layer_latency_s": split.latency_s,
    }


def generation_rows(settings: Mapping[str, Any]) -> list[FlatRecord]:
    """Fig. 15 and 16: latency of a generation for each model, workload, output length and system."""
    rows: list[FlatRecord] = []
    for model, raw in settings["models"].items():
        layer = LayerOfModel(**raw)
        for load in settings["workloads"]:
            workload = f"{load['batches']}x{load['size']}" + ("-compressed" if load["compressed"] else "")
            for output_len in settings["output_lens"]:
                for system in SYSTEMS:
                    row = _generation(settings, layer, system, output_len=output_len, **load)
                    rows.append({**_common(f"park-egger-{model}", workload, system, output_len), **row})
    return rows


def _common(setting: str, workload: str, system: str, output_len: int) -> FlatRecord:
    return {
        "setting": setting,
        "figure": "split-point",
        "workload": workload,
        "system": system,
        "backend": "simulated",
        "output_len": output_len,
        "cpu_bandwidth_gb_s": None,
    }


def _generation(
    settings: Mapping[str, Any],
    layer: LayerOfModel,
    system: str,
    *,
    batches: int,
    size: int,
    compressed: bool,
    output_len: int,
) -> FlatRecord:
    machine, input_len = Machine(settings, native_attention=system.endswith("native")), settings["input_len"]
    context = input_len + output_len / 2
    operations = machine.operations(layer, size, context, compressed)
    gpu_only = split_at(operations, 0, len(operations), batches)
    kv_bytes = machine.kv_bytes(layer, size, context)
    prompt_kv_bytes = machine.kv_bytes(layer, size, input_len)
    prefill_s = batches * machine.prefill_s(layer, size, input_len, compressed)
    on_gpu = "all"
    if system == "flexgen-like":
        sent = machine["compressed_kv"] if compressed else 1.0
        layer_s = gpu_only.latency_s + batches * machine.pin_s(sent * kv_bytes)
        prefill_s += batches * machine.transfer_s(sent * prompt_kv_bytes)  # synchronous (section 5.3)
    elif system == "gpu-only":
        layer_s = gpu_only.latency_s
    else:
        divided = in_pieces(operations, "Scores", settings["split_pieces"])
        best = best_split(divided, batches)
        layer_s, names = best.latency_s, [op.name for op in divided]
        on_gpu = f"{names[best.i]} to {names[best.j - 1]}"
    latency_s = layer.layers * (prefill_s + (output_len - 1) * layer_s)
    return {
        "layer_latency_s": layer_s,
        "prefill_s": layer.layers * prefill_s,
        "request_latency_s": latency_s,
        "output_tokens_per_s": batches * size * output_len / latency_s,
        "on_gpu": on_gpu,
    }
