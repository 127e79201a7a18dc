"""Times of what a host adds: attention over the CPU tier, and copies over PCIe. One function per formula."""

from __future__ import annotations

from apex.simulator.hardware.files import Gpu, Host, LayerShape
from swiftllm.config import CpuKVDtype

WIDE_GROUP = 8  # query heads on a KV head: twice the arithmetic for a byte of K and V that groups of 4 have


def cpu_attention_s(
    host: Host,
    shape: LayerShape,
    itemsize: int,
    kv_token_bytes: float,
    cpu_gb_s: float,
    pcie_gb_s: float,
    requests: float,
    context_tokens: float,
    tensor_parallel: int = 1,
) -> float:
    """T_c of one layer: the hand-over, transfers of Q, K, V and output over PCIe, and reading the KV cache.

    A token has ``kv_token_bytes`` in the layer's cache.

    Each of several GPUs transfers the heads that it has; the host's bandwidth is shared.
    """
    kv_bytes = requests * context_tokens * kv_token_bytes
    crossing_bytes = requests * crossing_bytes_per_row(shape, itemsize) / tensor_parallel
    crossing_s = transfer_s(crossing_bytes, pcie_gb_s, host["hand_over_us"] * 1e-6)
    return crossing_s + kv_bytes / (cpu_gb_s * 1e9)


def crossing_bytes_per_row(shape: LayerShape, itemsize: int) -> int:
    """Bytes of Q, K, V and attention output of one request in one layer."""
    return (shape.qkv_size + shape.num_heads * shape.head_dim) * itemsize


def cpu_attention_gb_s(host: Host, cpu_kernel: str, shape: LayerShape, cpu_kv_dtype: CpuKVDtype = "auto") -> float:
    """Bandwidth of CPU attention with a kernel on all cores of a host, in bytes of its own format.

    A kernel's fraction was measured on one core, relative to ``core_read_gb_s``: the rate of reading alone. The extra
    time per byte is arithmetic, which all cores do in parallel. They share the read bandwidth, so a core of a socket
    in full use reads less than one alone. Arithmetic and reading do not overlap, as in the measurement.

    Of int8 its gain was measured: tokens over those of 16 bits, on one core.

    Raises:
        ValueError: there is no figure for the kernel; the message lists the known kernels.
    """
    heads = "gqa" if shape.num_kv_heads < shape.num_heads else "mha"
    if shape.num_experts and shape.num_heads >= WIDE_GROUP * shape.num_kv_heads:
        heads = f"gqa{WIDE_GROUP}"  # dense models keep the figure with which their results were recorded
    figure = f"{cpu_kernel}_{host.isa}_{heads}"
    if figure not in host.figures:
        ending = f"_{host.isa}_{heads}"
        kernels = sorted(name.removesuffix(ending) for name in host.figures if name.endswith(ending))
        raise ValueError(f"no figure for CPU kernel {cpu_kernel!r} on {host.isa}: known are {', '.join(kernels)}")
    fraction = host[figure]
    if cpu_kv_dtype == "int8":
        if cpu_kernel != "native":
            raise ValueError(f"cpu_kv_dtype=int8 needs the cpu_kernel native, not {cpu_kernel}")
        if (gain := f"{figure}_int8_gain") not in host.figures:
            group = shape.num_heads // shape.num_kv_heads
            raise ValueError(
                f"int8 attention was not measured with {group} query heads on a KV head of a model with experts: leave "
                f"cpu_kv_dtype out, or add {gain} to the host's figures"
            )
        fraction *= host[gain] * (shape.head_dim + 4) / (2 * shape.head_dim)
    alone_gb_s = host["core_read_gb_s"]
    arithmetic_s_per_gb = (1 / fraction - 1) / alone_gb_s
    reading_s_per_gb = 1 / min(alone_gb_s, host_read_gb_s(host) / host["cores"])
    return host["cores"] / (arithmetic_s_per_gb + reading_s_per_gb)


def host_read_gb_s(host: Host) -> float:
    """Read bandwidth of the host's cores: their share of the channels' peak, times the streaming fraction."""
    return host["peak_bandwidth_gb_s"] * host["core_share"] * host["stream_fraction"]


def effective_pcie_gb_s(gpu: Gpu, host: Host) -> float:
    """Bandwidth of pinned copies in one direction; the older end of the link determines the PCIe generation."""
    return min(gpu["pcie_gb_s"], host["pcie_gb_s"]) * gpu["pcie_fraction"]


def transfer_s(num_bytes: float, gb_s: float, latency_s: float) -> float:
    return latency_s + num_bytes / (gb_s * 1e9)
