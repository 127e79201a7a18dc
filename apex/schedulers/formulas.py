"""The papers' formulas, one function each. Times are seconds per layer, rates are context tokens per second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inequality:
    """Both sides, so that they can be logged; it ``holds`` if the left one is larger."""

    left: float
    right: float

    @property
    def holds(self) -> bool:
        return self.left > self.right


def pipelined_layer_s(
    linear_0_s: float,
    linear_1_s: float,
    gpu_attention_0_s: float,
    cpu_attention_0_s: float,
    cpu_attention_1_s: float,
) -> float:
    """One layer of asymmetric pipelining (NEO section 3.2): the GPU batch works on one batch, the CPU on the other."""
    return max(linear_0_s, cpu_attention_1_s) + max(linear_1_s + gpu_attention_0_s, cpu_attention_0_s)


def pipelining_pays(
    gpu_rate: float,
    cpu_rate: float,
    linear_s: float,
    gpu_attention_s: float,
    cpu_window_s: float | None = None,
    stream_s: float = 0.0,
) -> Inequality:
    """Inequality (5) of APEX section 3.2: attended tokens per second of asymmetric pipelining against GPU-only.

    Args:
        gpu_rate: N_G, attention rate of the GPU.
        cpu_rate: N_C, attention rate of the CPU.
        linear_s: T_glinear of the decode-only batch.
        gpu_attention_s: T_gatt of the decode-only batch.
        cpu_window_s: how long the CPU may compute in a layer before the GPU waits for it; by default ``2 T_glinear +
            T_gatt`` (decode-only). With prefills Algorithm 1 takes :func:`mixed_cpu_window_s` and changes nothing else.
        stream_s: what a layer takes at least, where weights are copied to the GPU in each iteration. Not in the paper.
    """
    pipelined_s = max(2 * linear_s + gpu_attention_s, stream_s)
    window_s = pipelined_s if cpu_window_s is None else cpu_window_s
    gpu_tokens = gpu_rate * gpu_attention_s
    gpu_only_s = max(linear_s + gpu_attention_s, stream_s)
    # With an empty GPU batch both times are 0, and pipelining is the CPU by itself.
    left = (gpu_tokens + cpu_rate * window_s) / pipelined_s if pipelined_s else cpu_rate
    right = gpu_tokens / gpu_only_s if gpu_only_s else 0.0
    return Inequality(left, right)


def overlap_rate(
    gpu_rate: float,
    cpu_rate: float,
    linear_s: float,
    gpu_attention_s: float,
    cpu_context_tokens: float,
    num_layers: int,
    stream_s: float = 0.0,
) -> float:
    """Attended tokens per second of asynchronous overlap (APEX section 3.3), to compare with :func:`pipelining_pays`.

    An iteration takes as long as GPU-only. In it the CPU attends to one layer of each of its requests, or to as much as
    its rate allows. The paper has no such formula.

    Args:
        gpu_rate, cpu_rate, linear_s, gpu_attention_s, stream_s: as in :func:`pipelining_pays`.
        cpu_context_tokens: context of all CPU requests.
        num_layers: layers of an iteration.
    """
    layer_s = max(linear_s + gpu_attention_s, stream_s)
    if not layer_s:
        return cpu_rate
    return gpu_rate * gpu_attention_s / layer_s + min(cpu_rate, cpu_context_tokens / (num_layers * layer_s))


def mixed_cpu_window_s(linear_with_prefill_s: float, linear_s: float, attention_with_prefill_s: float) -> float:
    """The CPU's window when prefills run too (APEX section 3.4): T_glinear_pref + T_glinear + T_gatt_pref."""
    return linear_with_prefill_s + linear_s + attention_with_prefill_s


def offload_bound_tokens_per_s(
    gpu_only_tokens_per_s: float, cpu_bytes_per_s: float, kv_bytes_per_token: float, context_tokens: float
) -> float:
    """Upper bound of any schedule: GPU-only decoding plus the tokens whose KV cache the CPU can read."""
    return gpu_only_tokens_per_s + cpu_bytes_per_s / (kv_bytes_per_token * context_tokens)
