"""The limits of an engine, and checks before queueing: requests that could never be served are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swiftllm.core.request import Request, RequestRefused, Tier
from swiftllm.kv.blocks import KVCacheManager


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


def check_tiers(kv: KVCacheManager, decode_tiers: Iterable[Tier]) -> None:
    """
    Raises:
        ValueError: no tier that decodes has a block, so every request would be refused.
    """
    if not any(kv.capacity(tier) for tier in decode_tiers):
        names = " or ".join(f"num_{tier.value}_blocks" for tier in decode_tiers)
        raise ValueError(f"this system decodes where there are no KV blocks: raise {names}")


def can_hold(kv: KVCacheManager, tier: Tier, request: Request) -> bool:
    """Whether the tier, when empty, can hold the request up to its last token."""
    return kv.blocks_for(request.max_kv_tokens) <= kv.capacity(tier)


def context_limit(longest: int, is_prompt_too_long: bool) -> str:
    """The limit in the words by which LangChain, LiteLLM and pydantic-ai recognise that a conversation is too long."""
    about = "the prompt is too long: " if is_prompt_too_long else ""
    return f"{about}this model's maximum context length is {longest} tokens"


def check_servable(request: Request, max_model_len: int, kv: KVCacheManager, decode_tiers: Iterable[Tier]) -> None:
    """Check that the request can be served if it is alone. Reads only what never changes.

    Raises:
        RequestRefused: it can never be served; the message names the limit.
    """
    if request.prompt_len == 0:
        raise RequestRefused("the prompt is empty; it needs at least one token", "prompt")
    total = request.prompt_len + request.sampling.max_tokens
    if total > max_model_len:
        is_long = request.prompt_len >= max_model_len
        raise RequestRefused(
            f"{context_limit(max_model_len, is_long)}; {request.prompt_len} prompt + {request.sampling.max_tokens} "
            f"output tokens = {total} exceed max_model_len={max_model_len}",
            "prompt" if is_long else "max_tokens",
        )
    if not any(can_hold(kv, tier, request) for tier in decode_tiers):
        pools = " and ".join(
            f"{kv.capacity(tier) * kv.block_size} in the {tier.value.upper()} tier "
            f"({kv.capacity(tier)} blocks of {kv.block_size})"
            for tier in decode_tiers
        )
        prompt_fits = any(kv.blocks_for(request.prompt_len) <= kv.capacity(tier) for tier in decode_tiers)
        longest = max(map(kv.capacity, decode_tiers)) * kv.block_size + 1
        raise RequestRefused(
            f"{context_limit(longest, not prompt_fits)}; the request needs KV cache for {request.max_kv_tokens} tokens "
            f"and there is room for {pools}: ask for fewer tokens or raise num_gpu_blocks / num_cpu_blocks",
            "max_tokens" if prompt_fits else "prompt",
        )
