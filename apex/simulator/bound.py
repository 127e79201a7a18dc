"""What no schedule of a predicted machine exceeds by much: decodes alone, GPU and CPU fully overlapped."""

from __future__ import annotations

from apex.perf.model import PerfModel, ProfileTable

STEPS = 200


def decode_bound(
    table: ProfileTable,
    num_layers: int,
    context_tokens: float,
    tier_tokens: tuple[float, float],
    max_requests: int,
) -> tuple[float, int, int]:
    """Output tokens a second at most, and the requests in GPU and CPU tier with which that is reached.

    Every request has ``context_tokens``; prompts and the host's work are left out, and so is all waiting. A tier holds
    so many tokens (``tier_tokens``, of GPU and CPU).
    """
    model = PerfModel(table, num_layers)
    on_gpu, on_cpu = (min(int(tokens / context_tokens), max_requests) for tokens in tier_tokens)
    best = (0.0, 0, 0)
    for gpu in {on_gpu, 0}:
        most = min(on_cpu, max_requests - gpu)
        for cpu in range(0, most + 1, max(1, most // STEPS)):
            rows = gpu + cpu
            if not rows:
                continue
            gpu_batch_s = model.linear_s(rows) + model.gpu_attention_s(gpu, gpu * context_tokens)
            cpu_s = model.cpu_attention_s(cpu, cpu * context_tokens)
            rate = rows / (num_layers * max(gpu_batch_s, cpu_s, model.stream_s) + model.logits_s(rows))
            best = max(best, (rate, gpu, cpu))
    return best
