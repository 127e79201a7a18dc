"""An upper bound of any schedule's throughput on a simulated machine."""

from __future__ import annotations

from collections.abc import Sequence

from apex.perf.model import PerfModel
from evaluation.drivers import SimulatedTask

MOST_TOKENS = 4096  # the largest batch in which the bound looks for the cheapest linear time of a token


def bound_tokens_per_s(task: SimulatedTask) -> float:
    """An upper bound of any schedule's output tokens per second, from the task's machine and lengths.

    Each token crosses the linear layers at the cheapest rate of any batch within the limits. Each decode attends on the
    GPU or on the CPU, and both read at their full rate. An iteration attends to at most the GPU pool on the GPU, and
    reads the weights once. The split between GPU and CPU is the best one. Filling, draining and the attention of
    prompts cost nothing, and the CPU tier holds everything; so no schedule reaches the bound.
    """
    model = PerfModel(task.hardware.table, task.hardware.num_layers)
    rows = task.lengths.rows
    output_tokens = sum(row.output_tokens for row in rows)
    all_tokens = sum(row.input_tokens + row.output_tokens for row in rows)
    attended = sum(row.output_tokens * (row.input_tokens + row.output_tokens / 2) for row in rows)
    limits = task.limits
    sizes = range(1, min(MOST_TOKENS, limits.max_num_batched_tokens + limits.max_num_seqs) + 1)
    compute_s = all_tokens * model.num_layers * min(model.linear_s(size) / size for size in sizes)
    ends_s = output_tokens * min(model.outside_layers_s(size) / size for size in sizes)
    context = 8192  # tokens of a request; rates are those of long contexts
    gpu_s, cpu_s = (
        model.num_layers * (attention_s(64, 128 * context) - attention_s(64, 64 * context)) / (64 * context)
        for attention_s in (model.gpu_attention_s, model.cpu_attention_s)
    )
    iteration_s = model.num_layers * model.linear_s(1) + model.outside_layers_s(1)
    gpu_pool_tokens = task.num_gpu_blocks * task.block_size
    gpu_batch = [(compute_s + ends_s, gpu_s), (0.0, iteration_s / gpu_pool_tokens + gpu_s)]
    return output_tokens / least_makespan_s(gpu_batch, attended, cpu_s)


def least_makespan_s(gpu_batch: Sequence[tuple[float, float]], attended: float, cpu_s: float) -> float:
    """Seconds of GPU and CPU together at the best split of ``attended`` context tokens between them.

    Args:
        GPU batch: lower bounds (a, b) of the GPU's seconds: a + b y with y of the context tokens attended on the GPU.
        cpu_s: seconds per context token on the CPU.
    """
    crossings = [(attended * cpu_s - fixed_s) / (token_s + cpu_s) for fixed_s, token_s in gpu_batch]
    on_gpu = min(max(min(crossings), 0.0), attended)
    return max((attended - on_gpu) * cpu_s, *(fixed_s + token_s * on_gpu for fixed_s, token_s in gpu_batch))
