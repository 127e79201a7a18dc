"""The times that decide whether targets hold: one function per formula of OmniServe (SIGMOD'26), section 3.3.

In the paper each module of a layer has its own fitted model: f_PA and f_DA for the attention of prompts and decodes,
f_D for the dense modules, gamma for communication; d is the number of layers. Here a profile table has them all. f_D of
a machine with several GPUs includes gamma.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from apex.perf.gpu_batch_load import GpuBatchLoad
from apex.perf.model import PerfModel
from apex.schedulers.cpu_decodes import longest_run
from swiftllm.core.request import Tier


class PromptLeft(NamedTuple):
    """A prompt that is not computed yet. ``tier``: where its K and V go; None as long as it waits."""

    tokens: int
    cached: int
    tier: Tier | None = None


def joined_rows_s(
    model: PerfModel, gpu_batch_tokens: int, gpu_batch_rows: int, joined_rows: Mapping[int, int]
) -> float:
    """What rows that join the GPU batch's stages add to an iteration (omega, sections 3.3.4 to 3.3.6), in seconds.

    Args:
        gpu_batch_tokens, gpu_batch_rows: rows of the GPU batch, and those of them that get a token.
        joined CPU batches: rows by stage, from -1 to the number of layers - 1.
    """
    last, seconds = model.num_layers - 1, 0.0
    for stage, rows in joined_rows.items():
        if stage < 0:
            seconds += model.first_stage_s(gpu_batch_tokens + rows) - model.first_stage_s(gpu_batch_tokens)
            seconds += model.host_work_s(rows) - model.host_work_s(0)  # opening the CPU batch
        elif stage < last:
            seconds += model.linear_s(gpu_batch_tokens + rows) - model.linear_s(gpu_batch_tokens)
        else:
            seconds += model.last_stage_s(gpu_batch_rows + rows) - model.last_stage_s(gpu_batch_rows)
        if stage < last:  # its attention task for the next layer
            seconds += model.hand_over_s(rows)
    return seconds


def iteration_s(
    model: PerfModel, load: GpuBatchLoad, joined_rows: Mapping[int, int] | None = None, swapped: int = 0
) -> float:
    """An iteration of a GPU batch with joined CPU batches and swaps: d (f_PA + f_DA + f_D) and its ends (section
    3.3.1), in seconds.

    Args:
        joined CPU batches: rows that join, by stage.
        swapped: blocks moved between the tiers; each layer's attention waits for its part of them.
    """
    linear_s = model.linear_s(load.tokens)
    seconds = model.num_layers * (linear_s + load.gpu_attention_s(model))
    # Only rows that get a token run the last stage, which is the rest of a layer. Prompts that go on do not.
    seconds += model.first_stage_s(load.tokens) - linear_s + model.last_stage_s(load.sampled)
    seconds = max(seconds, model.num_layers * model.stream_s)
    if load.requests:
        seconds += model.host_work_s(load.requests)
    if joined_rows:
        seconds += joined_rows_s(model, load.tokens, load.sampled, joined_rows)
    if not swapped:
        return seconds
    # Parts arrive at even intervals: if the GPU batch is late, then at the first layer's attention or at the last
    # one's.
    swap_s, before_s = model.swap_s(swapped), model.host_work_s(0)
    ahead_s = model.host_work_s(load.requests) - before_s + model.first_stage_s(load.tokens)
    behind_s = load.gpu_attention_s(model) + model.last_stage_s(load.sampled)
    return max(seconds, seconds - ahead_s + swap_s / model.num_layers, before_s + swap_s + behind_s)


def with_prompts(load: GpuBatchLoad, prompts: Sequence[PromptLeft], tokens: int) -> GpuBatchLoad:
    """The load with the next ``tokens`` of ``prompts``, in order of service."""
    chunks, cpu_tier_chunks, goes_on = [], [], False
    for left, cached, tier in prompts:
        if tokens <= 0:
            break
        chunk = min(left, tokens)
        chunks.append((chunk, cached))
        if tier is Tier.CPU:
            cpu_tier_chunks.append((chunk, cached))
        tokens -= chunk
        goes_on = chunk < left
    added = sum([chunk for chunk, _ in chunks])
    return replace(
        load,
        tokens=load.tokens + added,
        requests=load.requests + len(chunks),
        chunks=(*load.chunks, *chunks),
        cpu_tier_chunks=(*load.cpu_tier_chunks, *cpu_tier_chunks),
        open_chunks=load.open_chunks + goes_on,
    )


def with_decodes(load: GpuBatchLoad, decodes: int, context_tokens: int) -> GpuBatchLoad:
    """The load with more decodes, whose contexts sum to ``context_tokens``."""
    return replace(
        load,
        tokens=load.tokens + decodes,
        requests=load.requests + decodes,
        decodes=load.decodes + decodes,
        decode_context=load.decode_context + context_tokens,
    )


def most_prompt_tokens(
    model: PerfModel,
    load: GpuBatchLoad,
    prompts: Sequence[PromptLeft],
    limit_s: float,
    most: int,
    joined_rows: Mapping[int, int] | None = None,
    swapped: int = 0,
) -> int:
    """Chunked prefill under a target (section 3.3.4): max q with f_PA + f_DA + f_D(n + q) <= S_d / d.

    Args:
        load: the GPU batch so far.
        prompts: in order of service.
        limit_s: the longest iteration.
        most: the most tokens.
    """
    most = min(most, sum([prompt.tokens for prompt in prompts]))
    return longest_run(
        lambda tokens: iteration_s(model, with_prompts(load, prompts, tokens), joined_rows, swapped), limit_s, most
    )


def chunk_of_no_cost(model: PerfModel, load: GpuBatchLoad, most: int) -> int:
    """Prompt tokens beside ``load`` that cost little more than one: reading the weights dominates. At least one."""
    return min(most, max(1, model.flat_linear_tokens - load.tokens))


def urgent_chunk_tokens(
    model: PerfModel,
    load: GpuBatchLoad,
    prompts: Sequence[PromptLeft],
    limit_s: float,
    most: int,
    swapped: int = 0,
) -> int:
    """Prompt tokens of latency-sensitive requests in an iteration, within the target or at no cost.

    Beside decodes that fill the target no prompt would end otherwise. (Not in the paper.)
    """
    within = most_prompt_tokens(model, load, prompts, limit_s, most, swapped=swapped)
    return max(within, chunk_of_no_cost(model, load, most))
