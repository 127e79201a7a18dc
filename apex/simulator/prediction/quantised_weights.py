"""Predicted times of layers with 4-bit weights, from those with 16-bit weights. On GPUs nothing was measured.

Up to ``MOST_QUANTISED_ROWS`` rows a kernel multiplies codes. It reads them at a share of the rate at which 16-bit
weights are read, the figure ``int4_read_fraction``, and multiplies at a share of the rate at which a library multiplies
many rows, the figure ``int4_multiply_fraction``. With more rows the matrix is written out in 16 bits first. For a T4
that stands for the optional library (docs/weights.md).

On a CPU the times are divided by figures measured on one core, ``cpu_int4_gain_<rows>``.
"""

from __future__ import annotations

from math import ceil, hypot

from apex.perf.model import Curve
from apex.simulator.hardware.files import Gpu, Host, LayerShape, closest_layer
from swiftllm.model.config.quantisation import MXFP4, QuantisationScheme

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
