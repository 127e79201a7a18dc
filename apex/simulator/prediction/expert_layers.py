"""Predicted times of layers whose FFN is of experts: those of their other matrices, and the experts'."""

from __future__ import annotations

from apex.perf.experts import ExpertTimes, touched_experts
from apex.perf.model import Curve
from apex.simulator.hardware.files import Gpu, LayerShape
from apex.simulator.prediction.quantised_weights import bits_per_element
from swiftllm.model.config.quantisation import QuantisationScheme

FEW_TOKENS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Between which the number of experts that are touched is no straight line."""
ROWS_OF_A_STEP = 64


def weights_of_a_step(shape: LayerShape) -> float:
    """Elements of the matrices that a layer reads for :data:`ROWS_OF_A_STEP` rows."""
    touched = touched_experts(ROWS_OF_A_STEP, shape.num_experts, shape.per_token) if shape.num_experts else 0.0
    return shape.gemm_weights + touched * shape.ffn_weights if touched else shape.gemm_weights


def with_experts(linear: Curve, gpu: Gpu, shape: LayerShape, itemsize: int, scheme: QuantisationScheme | None) -> Curve:
    """T_l of a layer whose FFN is of experts; ``linear`` is that of its other matrices and elementwise operations."""
    experts, bits = expert_times(gpu, scheme), 8 * itemsize
    if scheme is not None:
        bits = bits_per_element(scheme, shape.hidden_size)
    expert_bytes = shape.ffn_weights * bits / 8

    def seconds(tokens: float) -> float:
        touched = touched_experts(tokens, shape.num_experts, shape.per_token)
        return linear(tokens) + experts.seconds(touched, expert_bytes, tokens * shape.per_token, shape.ffn_weights)

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
