"""The formulas for weights that do not fit the GPU, one function each. Plain arithmetic: seconds, bytes, bytes/s.

Words: ``pcie_bytes_per_s`` is one direction of PCIe. ``dram_bytes_per_s`` is what PCIe and CPU read together.
``cpu_bytes_per_s`` is what the CPU reads alone in :func:`batch_s` and :func:`hidden_kv_bytes`, and what it reads while
copies run in :func:`one_request_s`. The functions with a section are those of Park and Egger (TACO'26).
"""

from __future__ import annotations


def one_request_s(weight_bytes: float, pcie_bytes_per_s: float, cpu_bytes_per_s: float, gpu_s: float = 0.0) -> float:
    """An iteration of one request whose weights are streamed or computed by the CPU, both at work all the time.

    T = W / (beta + b). During the GPU's work the CPU waits, so ``gpu_s`` costs the CPU's reading of that time:
    T = (W + b gpu_s) / (beta + b).
    """
    return (weight_bytes + cpu_bytes_per_s * gpu_s) / (pcie_bytes_per_s + cpu_bytes_per_s)


def batch_s(
    streamed_bytes: float,
    kv_bytes: float,
    gpu_s: float,
    pcie_bytes_per_s: float,
    cpu_bytes_per_s: float,
    dram_bytes_per_s: float,
    cpu_linear_s: float = 0.0,
) -> float:
    """An iteration in which weights are streamed while the CPU attends to ``kv_bytes``: max(S/beta, C + K/b + S/D, G).

    The stream takes DRAM bandwidth from CPU attention, for which S/D stands. C is ``cpu_linear_s``, what the same cores
    need for the boundaries that they compute; G is the lane's time, those boundaries included.
    """
    cpu_s = cpu_linear_s + kv_bytes / cpu_bytes_per_s + streamed_bytes / dram_bytes_per_s
    return max(streamed_bytes / pcie_bytes_per_s, cpu_s, gpu_s)


def hidden_kv_bytes(
    streamed_bytes: float, pcie_bytes_per_s: float, cpu_bytes_per_s: float, dram_bytes_per_s: float
) -> float:
    """K* = S b (1/beta - 1/D): KV cache that the CPU reads while ``streamed_bytes`` cross, at no extra time."""
    return streamed_bytes * cpu_bytes_per_s * (1 / pcie_bytes_per_s - 1 / dram_bytes_per_s)


def cpu_read_bytes_per_s(alone_bytes_per_s: float, pcie_bytes_per_s: float, dram_bytes_per_s: float) -> float:
    """What the CPU reads while a copy runs: a link takes its share of DRAM (section 4.1 measures the same)."""
    return alone_bytes_per_s * (1.0 - pcie_bytes_per_s / dram_bytes_per_s)


def beside_copies_s(alone_s: float, copies_s: float, dram_share: float) -> float:
    """The CPU's work of ``alone_s`` while copies run for ``copies_s`` and take a share of DRAM: T = alone + share
    min(copies, T)."""
    return alone_s + dram_share * min(copies_s, alone_s / (1.0 - dram_share))


def split_s(compute_s: float, host_to_device_s: float, decompress_s: float = 0.0) -> float:
    """L = max(CPU, H2D, DC), the objective of section 4.2, equations 5 and 9."""
    return max(compute_s, host_to_device_s, decompress_s)
