"""Predicts the profile table of another machine: from measured layer times where there are any, else data sheets.

One function per formula. Times are seconds, sizes bytes or elements. Every constant is a figure of a hardware file,
with its origin. ``python -m evaluation.calibrate`` reports how far the formulas are from measured tables.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import ceil, hypot, inf

import torch

from apex.perf.model import FREE, Curve, ExpertTimes, ProfileTable, Surface, flat_from_tokens, touched_experts
from apex.perf.operator_tables import OperatorTable
from apex.simulator.hardware_files import (
    GEMM_TILE_TOKENS,
    POWER_ERRORS,
    Gpu,
    GpuLink,
    Host,
    LayerShape,
    MeasuredOperators,
    Operators,
    closest_layer,
)
from apex.simulator.links import RemoteHosts
from swiftllm.config import CpuKVDtype
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.kv.tensors import cpu_format
from swiftllm.model.config import LinearSizes, ModelConfig
from swiftllm.model.quantisation import MXFP4, QuantisationScheme

# -- times of a host ---------------------------------------------------------------------------------------------------
# Times of what a host adds: attention over the CPU tier, and copies over PCIe. One function per formula.

WIDE_GROUPS = (8, 6)
"""Query heads on a KV head for which kernels have figures of their own: more arithmetic for a byte of K and V than
groups of 4 have."""


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
    """
    heads, group = "gqa" if shape.num_kv_heads < shape.num_heads else "mha", shape.num_heads // shape.num_kv_heads
    wide = next((each for each in WIDE_GROUPS if group >= each), None)
    if wide is not None and (shape.num_experts or shape.linear is not None):
        heads = f"gqa{wide}"  # other models keep the figure with which their results were recorded
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
            raise ValueError(
                f"int8 attention was not measured with {group} query heads on a KV head: leave cpu_kv_dtype out, or "
                f"add {gain} to the host's figures"
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


# -- 4-bit weights -----------------------------------------------------------------------------------------------------
# Predicted times of layers with 4-bit weights, from those with 16-bit weights. On GPUs nothing was measured.
#
# Up to ``MOST_QUANTISED_ROWS`` rows a kernel multiplies codes. It reads them at a share of the rate at which 16-bit
# weights are read, the figure ``int4_read_fraction``, and multiplies at a share of the rate at which a library
# multiplies many rows, the figure ``int4_multiply_fraction``. With more rows the matrix is written out in 16 bits
# first. For a T4 that stands for the optional library (docs/features/quantisation.md).
#
# On a CPU the times are divided by figures measured on one core, ``cpu_int4_gain_<rows>``.

MOST_QUANTISED_ROWS = 512  # as in swiftllm.ops.triton.ops, which needs Triton
ROWS_OF_A_READ = 128
"""Rows for which codes are read once. The L2 cache may serve more."""
CPU_GAIN_ROWS = (1, 2, 4, 8, 16, 128)  # of the figures cpu_int4_gain_<rows>; the last holds beyond
CODE_BITS = 4  # of an element
GROUP_BITS, MXFP4_GROUP_BITS = 24, 8  # of the scale and the zero point of a group; of an exponent


def with_quantised_weights(
    linear: Curve, gpu: Gpu, shape: LayerShape, itemsize: int, scheme: QuantisationScheme
) -> Curve:
    """T_l over tokens with 4-bit weights; ``linear`` is T_l with weights of ``itemsize`` bytes."""
    bytes_per_s = gpu["memory_bandwidth_gb_s"] * 1e9 * gpu["weight_read_fraction"]
    full_read_s = shape.gemm_weights * itemsize / bytes_per_s
    code_read_s = packed_bytes(shape, scheme) / (bytes_per_s * gpu["int4_read_fraction"])

    def others_s(tokens: float) -> float:
        """What norms, rotation and activation take of T_l: measured, else what reading leaves of T_l at one token."""
        if not gpu.layers:
            return max(0.0, linear(linear.sizes[0]) - full_read_s)
        layer = closest_layer(gpu, shape)
        return shape.elementwise_elements / layer.shape.elementwise_elements * layer.elementwise(tokens)

    most = linear.sizes[-1]
    row_s = (linear(most) - others_s(most)) / most / gpu["int4_multiply_fraction"]

    def seconds(tokens: float) -> float:
        if tokens > MOST_QUANTISED_ROWS:
            return code_read_s + full_read_s + linear(tokens)  # read packed, written, and read as before
        return others_s(tokens) + hypot(ceil(tokens / ROWS_OF_A_READ) * code_read_s, tokens * row_s)

    steps = [size + more for size in range(ROWS_OF_A_READ, MOST_QUANTISED_ROWS + 1, ROWS_OF_A_READ) for more in (0, 1)]
    sizes = sorted({*linear.sizes, *(size for size in steps if linear.sizes[0] < size < linear.sizes[-1])})
    return Curve(tuple(sizes), tuple(seconds(size) for size in sizes))


def with_quantised_weights_on_cpu(linear: Curve, host: Host) -> Curve:
    """Seconds over rows in which a host's cores multiply with 4-bit weights; ``linear`` is that with 16-bit weights.

    A host's figure ``cpu_int4_gain_<rows>`` is the time of 16-bit weights over that of 4-bit ones, without a unit.
    Between these numbers of rows times are interpolated.
    """
    gains = {rows: host[f"cpu_int4_gain_{rows}"] for rows in CPU_GAIN_ROWS}
    gains |= {rows: gains[CPU_GAIN_ROWS[-1]] for rows in linear.sizes if rows > CPU_GAIN_ROWS[-1]}
    return Curve(tuple(gains), tuple(linear(rows) / gain for rows, gain in gains.items()))


def packed_bytes(shape: LayerShape, scheme: QuantisationScheme) -> float:
    """Bytes of a layer's four matrices with codes, scales and zero points."""
    return shape.gemm_weights * bits_per_element(scheme, shape.hidden_size) / 8


def bits_per_element(scheme: QuantisationScheme, in_features: int) -> float:
    """With an element's part of its group's scale and zero point; without groups all inputs are one."""
    group_bits = MXFP4_GROUP_BITS if scheme.method == MXFP4 else GROUP_BITS
    return CODE_BITS + group_bits / (scheme.group_size or in_features)


def quantised_origin(gpu: Gpu, scheme: QuantisationScheme) -> str:
    """For people, and for the identity of tables."""
    shares = f"{gpu['int4_read_fraction']:g} and {gpu['int4_multiply_fraction']:g} of the rates of 16-bit weights"
    return f"{scheme.describe()}, read and multiplied at {shares} (an assumption)"


# -- layers with experts -----------------------------------------------------------------------------------------------
# Predicted times of layers whose FFN is of experts: those of their other matrices, and the experts'.

FEW_TOKENS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Between which the number of experts that are touched is no straight line."""
ROWS_OF_A_STEP = 64


def weights_of_a_step(shape: LayerShape) -> float:
    """Elements of the matrices that a layer reads for :data:`ROWS_OF_A_STEP` rows."""
    return shape.gemm_weights + shape.num_ffns * _expert_weights_of_a_step(shape)


def share_before_attention(shape: LayerShape) -> float:
    """The part of a layer's weights that comes before its attention with a KV cache."""
    experts = shape.linear_layers * _expert_weights_of_a_step(shape)
    return (shape.weights_before_attention + experts) / weights_of_a_step(shape)


def _expert_weights_of_a_step(shape: LayerShape) -> float:
    """Of one FFN; none where it is dense."""
    if not shape.num_experts:
        return 0
    return touched_experts(ROWS_OF_A_STEP, shape.num_experts, shape.per_token) * shape.ffn_weights


def with_experts(linear: Curve, gpu: Gpu, shape: LayerShape, itemsize: int, scheme: QuantisationScheme | None) -> Curve:
    """T_l of a layer whose FFN is of experts; ``linear`` is that of its other matrices and elementwise operations."""
    experts, bits = expert_times(gpu, scheme), 8 * itemsize
    if scheme is not None:
        bits = bits_per_element(scheme, shape.hidden_size)
    expert_bytes = shape.ffn_weights * bits / 8

    def seconds(tokens: float) -> float:
        touched = touched_experts(tokens, shape.num_experts, shape.per_token)
        each_s = experts.seconds(touched, expert_bytes, tokens * shape.per_token, shape.ffn_weights)
        return linear(tokens) + shape.num_ffns * each_s

    most = linear.sizes[-1]
    sizes = sorted({*linear.sizes, *(size for size in FEW_TOKENS if size < most)})
    return Curve(tuple(sizes), tuple(seconds(size) for size in sizes))


def expert_times(gpu: Gpu, scheme: QuantisationScheme | None) -> ExpertTimes:
    """Of a card. Experts are read at the rate of other matrices, and multiplied at a share of theirs, as measured."""
    read_bytes_per_s = gpu["memory_bandwidth_gb_s"] * 1e9 * gpu["weight_read_fraction"]
    flops_per_s = gpu["tensor_tflops"] * 1e12 * gpu["gemm_fraction"] * gpu["experts_multiply_fraction"]
    if scheme is not None:
        read_bytes_per_s *= gpu["int4_read_fraction"]
        flops_per_s *= gpu["int4_multiply_fraction"]
    return ExpertTimes(gpu["experts_fixed_us"] * 1e-6, read_bytes_per_s, flops_per_s)


# -- the profile -------------------------------------------------------------------------------------------------------

BITS_PER_BYTE = 8
ITEMSIZES = {"float16": 2, "bfloat16": 2}
LAYER_ALL_REDUCES = 2
"""The output and the down projection of a layer each end in one (OmniServe section 3.3.1)."""
# Powers of two and their middles: between neighbours a straight line is at most 4% off a square.
TOKENS = (1, *sorted({2**i for i in range(4, 15)} | {3 * 2**i for i in range(4, 13)}))
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
# Decode attention and swaps are linear in either size, but for a window, so the corners of the grid suffice.
REQUESTS = (1, 4096)
LONGEST_CONTEXT = 1 << 17
BLOCKS = (1, 1 << 16)


def hardware_profile(
    gpu: Gpu,
    host: Host,
    model_config: ModelConfig,
    *,
    dtype: str = "float16",
    cpu_kernel: str = "native",
    cpu_kv_dtype: CpuKVDtype = "auto",
    cpu_bandwidth_gb_s: float | None = None,
    block_size: int = 16,
    max_tokens: int = 2048,
    tensor_parallel: int = 1,
    link: GpuLink | None = None,
) -> ProfileTable:
    """The predicted profile table of a GPU in a host, or of several that share each layer, in the profiler's form.

    Args:
        dtype: of weights, activations and KV caches: float16, or bfloat16 where the GPU has it.
        cpu_kernel: native, ispc or llamafile.
        cpu_kv_dtype: the format of the CPU tier, auto for ``dtype``.
        cpu_bandwidth_gb_s: bandwidth of CPU attention; by default that of :func:`cpu_attention_gb_s`.
        block_size: tokens of a KV block.
        max_tokens: the largest batch that the linear and prefill curves must cover.
        tensor_parallel: GPUs among which each layer is divided, each with PCIe GPU batches of its own.
        link: what joins them; needed where there are several.

    Raises:
        ValueError: the dtype or the kernel is not calibrated, the bandwidth is not positive, the model's heads do not
            divide among the GPUs, or their link is missing.
    """
    if dtype not in ITEMSIZES or (dtype == "bfloat16" and gpu["compute_capability"] < 8.0):
        raise ValueError(f"dtype {dtype!r} is not calibrated for {gpu.name}; take float16")
    if cpu_bandwidth_gb_s is not None and not 0 < cpu_bandwidth_gb_s < inf:
        raise ValueError(f"cpu_bandwidth_gb_s={cpu_bandwidth_gb_s} must be positive and finite")
    if tensor_parallel > 1 and link is None:
        raise ValueError(f"tensor_parallel={tensor_parallel} needs the link that joins the GPUs: pcie-4, for example")
    shape, itemsize = LayerShape.from_config(model_config), ITEMSIZES[dtype]
    shard = LayerShape.of_rank(model_config, tensor_parallel)
    in_host = cpu_format(cpu_kv_dtype, getattr(torch, dtype))
    cpu_token_bytes = in_host.token_bytes(model_config) / LayerGroups.of(model_config, block_size).pool_layers
    cpu_gb_s = cpu_bandwidth_gb_s or cpu_attention_gb_s(host, cpu_kernel, shape, cpu_kv_dtype)
    pcie_gb_s = effective_pcie_gb_s(gpu, host)
    tokens = _up_to(TOKENS, max_tokens)
    latency_s = gpu["transfer_latency_us"] * 1e-6
    block_bytes = (
        in_host.block_bytes(model_config, block_size) / tensor_parallel
    )  # of each GPU; codes cross PCIe as such
    linear = linear_curve(gpu, shard, itemsize, max_tokens)
    scheme = model_config.quantisation
    if scheme is not None and not scheme.experts_only:
        linear = with_quantised_weights(linear, gpu, shard, itemsize, scheme)
    if shape.num_experts:
        linear = with_experts(linear, gpu, shard, itemsize, scheme)
    joined = link if tensor_parallel > 1 else None
    if joined is not None:
        count = LAYER_ALL_REDUCES * shape.num_ffns
        linear = with_all_reduces(linear, joined, shape.hidden_size, itemsize, tensor_parallel, count)
    identity = {
        "kind": "calibrated, for simulation",
        "device": gpu.name,
        "cpu": host.name,
        "cpu_kernel": cpu_kernel if cpu_bandwidth_gb_s is None else "as given by cpu_attention_gb_s",
        **({} if cpu_kv_dtype == "auto" else {"cpu_kv_dtype": cpu_kv_dtype}),
        "cpu_attention_gb_s": f"{cpu_gb_s:.4g}",
        "pcie_gb_s": f"{pcie_gb_s:.4g}",
        "model": f"{model_config.num_layers} layers of {shape.hidden_size}/{shape.intermediate_size}, "
        f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
        f"{f', {shape.linear_layers} of linear attention before each' if shape.linear else ''}",
        "dtype": dtype,
        **({} if scheme is None else {"weights": quantised_origin(gpu, scheme)}),
        "tensor_parallel": str(tensor_parallel),
        **({} if joined is None else {"link": joined.name}),
        "block_size": str(block_size),
        "linear": _linear_origin(gpu, shard),
        "gpu_attention": gpu.figures["decode_attention_fraction"].status,
    }
    table = ProfileTable(
        identity,
        linear=linear,
        ends=_curve(ROWS, lambda rows: ends_s(gpu, model_config, itemsize, rows, tensor_parallel)),
        swap=_curve(BLOCKS, lambda blocks: transfer_s(blocks * block_bytes, pcie_gb_s, latency_s)),
        prefill_attention=_of_layers(
            model_config,
            tokens,
            0,
            lambda new, cached: (
                prefill_attention_s(gpu, shard, new, cached) + chunk_states_s(gpu, shard, itemsize, new)
            ),
        ),
        gpu_attention=_of_layers(
            model_config,
            REQUESTS,
            1,
            lambda n, context: gpu_attention_s(gpu, shard, itemsize, n, context) + states_s(gpu, shard, itemsize, n),
        ),
        cpu_attention=_of_layers(
            model_config,
            REQUESTS,
            1,
            lambda n, context: cpu_attention_s(
                host, shape, itemsize, cpu_token_bytes, cpu_gb_s, pcie_gb_s, n, context, tensor_parallel
            ),
        ),
        first_share=share_before_attention(shape),
        # Submitting an attention task is assumed to cost the GPU batch nothing: cpu_attention_s includes the hand-over.
        # But the states of its requests are on the GPU.
        hand_over=_curve(REQUESTS, lambda n: states_s(gpu, shard, itemsize, n)) if shape.linear else FREE,
        iteration=_curve(REQUESTS, lambda _: host["iteration_overhead_ms"] * 1e-3),
        flat_from_tokens=flat_from_tokens(shape.num_experts, shape.per_token),
    )
    measured = measured_operators_of(gpu, model_config)
    if measured is None or scheme is not None or tensor_parallel > 1:
        return table
    return with_operators(table, measured.times)


def measured_operators_of(gpu: Gpu, config: ModelConfig) -> MeasuredOperators | None:
    """The card's operator times of a model with these layers and this vocabulary, if there are any."""
    wanted = LayerShape.from_config(config), config.vocab_size
    return next((m for m in gpu.operators.values() if (m.shape, m.vocab_size) == wanted), None)


def with_operators(table: ProfileTable, times: Operators) -> OperatorTable:
    """A table with measured times of the GPU's operators in place of predicted ones; the CPU's and PCIe's stay."""
    fields = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
    return OperatorTable(
        **fields
        | {
            "identity": {**table.identity, "gpu_attention": "measured"},
            "ends": times.row_ends,
            "prefill_attention": times.prefill,
            "gpu_attention": times.decode,
        },
        token_ends=times.token_ends,
        mixed_attention=times.mixed,
        unequal=times.unequal,
    )


# -- linear layers ----------------------------------------------------------------------------------------------------


def linear_curve(gpu: Gpu, shape: LayerShape, itemsize: int, max_tokens: int) -> Curve:
    """T_l over tokens: the measured layer closest in size, scaled to the shape; else from the data sheet."""
    if not gpu.layers:
        sizes = _up_to(TOKENS, max_tokens)
        if gpu.from_power:  # steps need a size on either side
            tiles = range(GEMM_TILE_TOKENS, max_tokens, GEMM_TILE_TOKENS)
            sizes = sorted({*sizes, *tiles, *(tokens + 1 for tokens in tiles)})
        return _curve(sizes, lambda n: sheet_linear_s(gpu, shape, itemsize, n))
    layer = closest_layer(gpu, shape)
    # Reading weights and multiplying both grow with the number of weights, so one factor fits all batch sizes.
    gemm_factor = shape.gemm_weights / layer.shape.gemm_weights
    elementwise_factor = shape.elementwise_elements / layer.shape.elementwise_elements
    sizes = sorted({*layer.gemm.sizes, *layer.elementwise.sizes})
    seconds = [gemm_factor * layer.gemm(size) + elementwise_factor * layer.elementwise(size) for size in sizes]
    # Beyond the table time is proportional to tokens: batches that large compute at a constant rate.
    beyond = max(2 * sizes[-1], max_tokens)
    return Curve((*sizes, beyond), (*seconds, seconds[-1] * beyond / sizes[-1]))


def sheet_linear_s(gpu: Gpu, shape: LayerShape, itemsize: int, tokens: float) -> float:
    """T_l of a layer from bandwidth and FLOPS alone."""
    return gemm_s(gpu, shape.gemm_weights, itemsize, tokens) + elementwise_s(gpu, shape, itemsize, tokens)


def gemm_s(gpu: Gpu, weights: float, itemsize: int, tokens: float) -> float:
    """A GEMM with ``weights`` matrix elements: reading them bounds small batches, multiplying bounds large ones.

    The two times are combined as the root of the sum of squares, because measured cards round the roofline's corner.
    Up to 512 tokens that lowers the median error from 14-32%, with the larger of the two, to 6-26%
    (docs/simulator.md).
    """
    if gpu.from_power and tokens > GEMM_TILE_TOKENS:
        tokens = GEMM_TILE_TOKENS * ceil(tokens / GEMM_TILE_TOKENS)
    read_s = weights * itemsize / (gpu["memory_bandwidth_gb_s"] * 1e9 * gpu["weight_read_fraction"])
    multiply_s = 2 * weights * tokens / (gpu["tensor_tflops"] * 1e12 * gpu["gemm_fraction"])
    return hypot(read_s, multiply_s)


def elementwise_s(gpu: Gpu, shape: LayerShape, itemsize: int, tokens: float) -> float:
    """Norms, rotation, activation and additions of one layer: a fixed time of short kernels, plus memory traffic."""
    traffic_bytes = shape.elementwise_elements * itemsize * tokens
    gb_s = gpu["memory_bandwidth_gb_s"] * gpu["weight_read_fraction"]
    return shape.num_ffns * gpu["elementwise_fixed_us"] * 1e-6 + traffic_bytes / (gb_s * 1e9)


def ends_s(gpu: Gpu, config: ModelConfig, itemsize: int, rows: float, tensor_parallel: int = 1) -> float:
    """Per iteration: embedding and logits of the sampled rows. Each GPU has a part of the vocabulary's logits."""
    embedding_bytes = 2 * rows * config.hidden_size * itemsize  # read and written
    embedding_s = embedding_bytes / (gpu["memory_bandwidth_gb_s"] * 1e9 * gpu["weight_read_fraction"])
    logits_s = gemm_s(gpu, config.vocab_size * config.hidden_size / tensor_parallel, itemsize, rows)
    return embedding_s + logits_s


# -- tensor parallelism -----------------------------------------------------------------------------------------------


def with_all_reduces(
    curve: Curve, link: GpuLink, hidden_size: int, itemsize: int, gpus: int, count: int = LAYER_ALL_REDUCES
) -> Curve:
    """Seconds over tokens, and ``count`` all-reduces of them: for T_l of a shard gamma_T(n) of a layer.

    Both are piecewise linear, so their sum is at every size. Where the link has another kernel for small buffers, the
    curve has the largest of those and the next.
    """
    own = dict(zip(curve.sizes, curve.seconds, strict=True))
    below = ceil(link.small_below_bytes(gpus) / (hidden_size * itemsize))
    own |= {n: curve(n) for n in (below - 1, below) if curve.sizes[0] < n < curve.sizes[-1] and n not in own}
    sizes = tuple(sorted(own))
    return Curve(sizes, tuple(own[n] + count * all_reduce_s(link, n * hidden_size * itemsize, gpus) for n in sizes))


def all_reduce_s(link: GpuLink, num_bytes: float, gpus: int) -> float:
    """The alpha-beta model of OmniServe section 3.3.1: a latency, and the reduced bytes at a constant rate."""
    small = "small_" if num_bytes < link.small_below_bytes(gpus) else ""
    return transfer_s(num_bytes, link[f"{small}all_reduce_gb_s"], link[f"{small}all_reduce_latency_us"] * 1e-6)


def all_gather_s(link: GpuLink, bytes_of_each: float, gpus: int) -> float:
    """An all-gather of so many bytes of each GPU, by the library: in a pair each sends as much as in an all-reduce."""
    return transfer_s((gpus - 1) * bytes_of_each, link["all_reduce_gb_s"], link["all_reduce_latency_us"] * 1e-6)


# -- attention --------------------------------------------------------------------------------------------------------


def gpu_attention_s(gpu: Gpu, shape: LayerShape, itemsize: int, requests: float, context_tokens: float) -> float:
    """T_g of one layer: the kernel's latency, a fixed time per request and KV head, and reading the KV cache.

    The two fixed times lower the achieved bandwidth below about 30k tokens of context in total.
    """
    kv_bytes = requests * context_tokens * shape.kv_elements * itemsize
    read_s = kv_bytes / (gpu["memory_bandwidth_gb_s"] * 1e9 * gpu["decode_attention_fraction"])
    starts_s = requests * shape.num_kv_heads * gpu["decode_attention_request_head_ns"] * 1e-9
    return gpu["decode_attention_fixed_us"] * 1e-6 + starts_s + read_s


def prefill_attention_s(gpu: Gpu, shape: LayerShape, new_tokens: float, cached_tokens: float) -> float:
    """One chunk in one layer. The masked half counts too: measured times follow new x (cached + new)."""
    flops = 4 * shape.num_heads * shape.head_dim * new_tokens * (cached_tokens + new_tokens)
    fraction = gpu["gemm_fraction"] * gpu["prefill_attention_of_gemm"]
    return gpu["prefill_attention_fixed_us"] * 1e-6 + flops / (gpu["tensor_tflops"] * 1e12 * fraction)


# -- states of linear attention ---------------------------------------------------------------------------------------
# What layers of linear attention do beside their matrices. Where a layer with a KV cache comes after them, its times of
# attention include it, and ``hand_over`` does for requests of the CPU tier: states are on the GPU whoever attends.

ROWS_OF_A_STATE = 64  # of a prompt, after which the next state is known
STATE_PASSES = 2  # a state is read and written


def states_s(gpu: Gpu, shape: LayerShape, itemsize: int, requests: float) -> float:
    """A token of each request in the layers of linear attention before a layer: each reads and writes its states. The
    fixed time is that of decode attention."""
    if shape.linear is None:
        return 0.0
    each_s = gpu["decode_attention_fixed_us"] * 1e-6 + requests * _state_traffic_s(gpu, shape.linear, itemsize)
    return shape.linear_layers * each_s


def chunk_states_s(gpu: Gpu, shape: LayerShape, itemsize: int, new_tokens: float) -> float:
    """A chunk of a prompt in the same layers: one state for every :data:`ROWS_OF_A_STATE` tokens, and the products
    between them, at the rate of prefill attention. The fixed time is its, too."""
    if shape.linear is None:
        return 0.0
    flops_per_s = gpu["tensor_tflops"] * 1e12 * gpu["gemm_fraction"] * gpu["prefill_attention_of_gemm"]
    states = ceil(new_tokens / ROWS_OF_A_STATE)
    multiply_s = new_tokens * rule_flops(shape.linear) / flops_per_s
    each_s = states * _state_traffic_s(gpu, shape.linear, itemsize) + multiply_s
    return shape.linear_layers * (gpu["prefill_attention_fixed_us"] * 1e-6 + each_s)


def rule_flops(linear: LinearSizes) -> float:
    """Of a token of a prompt in one layer, in the delta rule's WY form. Of 64 rows these are three products with keys
    and two with values, the inverse of a triangle, and three products with the state."""
    rows, keys, values = ROWS_OF_A_STATE, linear.key_dim, linear.value_dim
    of_head = 2 * rows * (3 * keys + 2 * values) + 2 * rows * rows / 3 + 6 * keys * values
    return linear.num_value_heads * of_head


def _state_traffic_s(gpu: Gpu, linear: LinearSizes, itemsize: int) -> float:
    """Of a request's state in one layer, at the rate at which weights are read."""
    num_bytes = STATE_PASSES * linear.state_bytes(itemsize)
    return num_bytes / (gpu["memory_bandwidth_gb_s"] * 1e9 * gpu["weight_read_fraction"])


def remote_hosts(
    host: Host, model_config: ModelConfig, dtype: str, cpu_hosts: int, network_gbps: float
) -> RemoteHosts | None:
    """The hosts beside the GPUs' own, of ``cpu_hosts`` in all; None if there is no other."""
    if cpu_hosts < 1:
        raise ValueError(f"cpu_hosts={cpu_hosts} must be at least 1: the GPUs' own host is one of them")
    if not 0.0 < network_gbps < inf:
        raise ValueError(f"network_gbps={network_gbps:g} must be above 0 and finite")
    if cpu_hosts == 1:
        return None
    bytes_per_row = crossing_bytes_per_row(LayerShape.from_config(model_config), ITEMSIZES[dtype])
    return RemoteHosts(
        cpu_hosts - 1, network_gbps * 1e9 / BITS_PER_BYTE, host["network_latency_us"] * 1e-6, bytes_per_row
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def _linear_origin(gpu: Gpu, shape: LayerShape) -> str:
    if not gpu.layers:
        return "data sheet and the fractions of it that are assumed to be reached"
    layer = closest_layer(gpu, shape)
    if layer.shape == shape:
        return f"measured ({layer.model})"
    return f"scaled by {shape.gemm_weights / layer.shape.gemm_weights:.4g} from measured ({layer.model})"


def how_known(gpu: Gpu, config: ModelConfig) -> str:
    """In words: what the times of a card's operators rest on, for a model with these layers."""
    if measured_operators_of(gpu, config) is not None:
        return "measured tables of the card's operators with this model"
    attention = f"attention from {gpu.figures['decode_attention_fraction'].status} figures"
    if gpu.layers:
        return f"linear layers {_linear_origin(gpu, LayerShape.from_config(config))}; {attention}"
    if gpu.from_power:
        return f"shares of its data sheet from its board power ({POWER_ERRORS}); {attention}"
    return f"its data sheet, and {gpu.figures['gemm_fraction'].status} shares of it; {attention}"


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """The sizes up to the first that is at least ``most``; if there is none, all of them and ``most``.

    At least two, which a line needs.
    """
    end = max(bisect_left(sizes, most) + 1, 2)
    return tuple(sizes[:end]) if end <= len(sizes) else (*sizes, most)


def _curve(sizes: Sequence[int], seconds: Callable[[float], float]) -> Curve:
    return Curve(tuple(sizes), tuple(seconds(size) for size in sizes))


def _of_layers(
    config: ModelConfig, firsts: Sequence[int], shortest: int, formula: Callable[[float, float], float]
) -> Surface:
    """The mean over a model's layers of ``formula`` over a first size and a context, from ``shortest`` on; a layer with
    a window has no longer one than that."""
    windows = config.windows or (None,)
    contexts = sorted({shortest, *(window for window in windows if window is not None), LONGEST_CONTEXT})

    def seconds(first: float, context: float) -> float:
        each = [formula(first, context if window is None else min(context, window)) for window in windows]
        return sum(each) / len(each)

    curves = (_curve(contexts, lambda context, first=first: seconds(first, context)) for first in firsts)
    return Surface(tuple(firsts), tuple(curves))
