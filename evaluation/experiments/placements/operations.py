"""Predicted seconds of a decoder layer's operations on CPU, PCIe and GPU, from the hardware files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apex.simulator.hardware_files import Figure, LayerShape, load_gpu, load_host
from apex.simulator.predicted_profile import cpu_attention_gb_s, effective_pcie_gb_s, gemm_s, host_read_gb_s
from evaluation.experiments.placements.split import Operation

ITEMSIZE = 2  # bfloat16


@dataclass(frozen=True)
class LayerOfModel:
    """A model's decoder layer, in elements; ``origin`` and ``status`` say where from."""

    layers: int
    hidden: int
    ffn: int
    ffn_matrices: int
    heads: int
    kv_heads: int
    head_dim: int
    origin: str
    status: str

    @property
    def weights(self) -> dict[str, int]:
        """Elements of each matrix."""
        kv = self.kv_heads * self.head_dim * self.hidden
        query = self.heads * self.head_dim * self.hidden
        ffn = {f"FC.{k}": self.hidden * self.ffn for k in range(self.ffn_matrices)}
        return {"Q": query, "K": kv, "V": kv, "Output": query, **ffn}

    @property
    def shape(self) -> LayerShape:
        """The shape that CPU attention depends on."""
        return LayerShape(self.hidden, self.ffn, self.heads, self.kv_heads, self.head_dim)


def cpu_read_bytes_per_s(alone_bytes_per_s: float, pcie_bytes_per_s: float, dram_bytes_per_s: float) -> float:
    """What the CPU reads while a copy runs: a link takes its share of DRAM (section 4.1 measures the same)."""
    return alone_bytes_per_s * (1.0 - pcie_bytes_per_s / dram_bytes_per_s)


class Machine:
    """The paper's machine. ``native_attention``: our CPU attention kernel in place of the authors'."""

    def __init__(self, settings: Mapping[str, Any], native_attention: bool = False) -> None:
        self.gpu, self.host = load_gpu(settings["gpu"]), load_host(settings["host"])
        self.figures = {name: Figure(**fields) for name, fields in settings["figures"].items()}
        self.native_attention = native_attention
        self.pcie_bytes_per_s = effective_pcie_gb_s(self.gpu, self.host) * 1e9
        self.dram_bytes_per_s = host_read_gb_s(self.host) * 1e9

    def __getitem__(self, figure: str) -> float:
        return self.figures[figure].value

    def operations(self, layer: LayerOfModel, size: int, context: float, compressed: bool) -> list[Operation]:
        """Of one batch of ``size`` requests that have ``context`` tokens each; the CPU computes while copies run."""
        weights = {name: self._linear(name, count, size, compressed) for name, count in layer.weights.items()}
        scores, values = (self._attention(name, layer, size, context, compressed) for name in ("Scores", "WV"))
        ffn = [op for name, op in weights.items() if name.startswith("FC")]
        return [*(weights[name] for name in "QKV"), scores, values, weights["Output"], *ffn]

    def kv_bytes(self, layer: LayerOfModel, size: int, context: float) -> float:
        """Keys and values of a batch in a layer."""
        return 2 * size * context * layer.kv_heads * layer.head_dim * ITEMSIZE

    def prefill_s(self, layer: LayerOfModel, size: int, tokens: int, compressed: bool) -> float:
        """A layer of a batch's prefill: the GPU computes, while the next weights arrive and KV cache leaves."""
        rows, count = size * tokens, sum(layer.weights.values())
        attention_flops = 4 * layer.heads * layer.head_dim * tokens**2 * size
        rate = self.gpu["tensor_tflops"] * 1e12 * self.gpu["gemm_fraction"] * self.gpu["prefill_attention_of_gemm"]
        compute_s = gemm_s(self.gpu, count, ITEMSIZE, rows) + attention_flops / rate
        if compressed:
            compute_s += sum(self._decompress_s(n * ITEMSIZE) for n in layer.weights.values())
        share = self["compressed_weights"] if compressed else 1.0
        return max(compute_s, share * count * ITEMSIZE / self.pcie_bytes_per_s)

    def pin_s(self, num_bytes: float) -> float:
        """FlexGen's copy into pinned memory, before a transfer."""
        return num_bytes / (self.dram_bytes_per_s * self["pin_copy_share"])

    def transfer_s(self, num_bytes: float) -> float:
        return num_bytes / self.pcie_bytes_per_s

    def _linear(self, name: str, count: int, rows: int, compressed: bool) -> Operation:
        read = cpu_read_bytes_per_s(self.dram_bytes_per_s, self.pcie_bytes_per_s, self.dram_bytes_per_s)
        multiply = self.host["cores"] * self.host["cpu_linear_gflops_per_core"] * 1e9
        cpu_s = count * ITEMSIZE / (read * self.host["cpu_linear_read_fraction"]) + 2 * count * rows / multiply
        share = self["compressed_weights"] if compressed else 1.0
        return Operation(
            name,
            cpu_s,
            self.transfer_s(share * count * ITEMSIZE),
            self._decompress_s(count * ITEMSIZE) if compressed else 0.0,
            gemm_s(self.gpu, count, ITEMSIZE, rows),
        )

    def _attention(self, name: str, layer: LayerOfModel, size: int, context: float, compressed: bool) -> Operation:
        """Scores reads the keys, WV the values."""
        num_bytes = self.kv_bytes(layer, size, context) / 2
        if self.native_attention:
            alone = cpu_attention_gb_s(self.host, "native", layer.shape) * 1e9
            cpu_s = num_bytes / cpu_read_bytes_per_s(alone, self.pcie_bytes_per_s, self.dram_bytes_per_s)
        else:  # each query head computes with keys of its own (section 3.2 on GQA)
            cpu_s = num_bytes * layer.heads / layer.kv_heads / (self["cpu_attention_gb_s"] * 1e9)
        sent_s = self.transfer_s((self["compressed_kv"] if compressed else 1.0) * num_bytes)
        gpu_s = num_bytes / (self.gpu["memory_bandwidth_gb_s"] * 1e9 * self.gpu["decode_attention_fraction"])
        return Operation(name, cpu_s, sent_s, self._decompress_s(num_bytes) if compressed else 0.0, gpu_s, sent_s)

    def _decompress_s(self, num_bytes: float) -> float:
        return self["decompress_fixed_ms"] * 1e-3 + num_bytes / (self["decompress_gb_s"] * 1e9)
