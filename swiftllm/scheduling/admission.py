"""The limits of an engine, and checks before queueing: requests that could never be served are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swiftllm.core.request import Request, RequestRefused, ServiceClass, Tier, first_of
from swiftllm.core.sampling_params import SamplingParams, whole_number


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


class Pools(Protocol):
    """The sizes of both tiers. They never change."""

    block_size: int

    def capacity(self, tier: Tier) -> int:
        """Blocks that a tier always has."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""


@dataclass(frozen=True)
class PoolSizes:
    """The sizes of both tiers as a value."""

    block_size: int
    capacities: Mapping[Tier, int]

    def capacity(self, tier: Tier) -> int:
        return self.capacities[tier]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class Admission:
    """All by which an engine refuses requests for ever, as a value: another process can check them."""

    vocab_size: int
    max_model_len: int
    pools: PoolSizes
    decode_tiers: Mapping[ServiceClass, tuple[Tier, ...]]

    def check(self, request: Request) -> None:
        """
        Raises:
            RequestRefused: it can never be served; the message names the limit.
        """
        check_tokens(request.prompt_token_ids, request.sampling, self.vocab_size)
        check_servable(request, self.max_model_len, self.pools, self.decode_tiers[request.service_class])

    def longest_of(self, service_class: ServiceClass) -> int:
        """Prompt and output tokens of the longest request of a class."""
        return longest_request(self.max_model_len, self.pools, self.decode_tiers[service_class])


def longest_request(max_model_len: int, pools: Pools, decode_tiers: Iterable[Tier]) -> int:
    """Prompt and output tokens of the longest request that these tiers can hold."""
    largest_tier = max(map(pools.capacity, decode_tiers)) * pools.block_size
    return min(max_model_len, largest_tier + 1)  # K and V of the last token are never stored


def check_tokens(prompt: Sequence[int], sampling: SamplingParams, vocab_size: int) -> None:
    """
    Raises:
        RequestRefused: a token of the prompt or of the sampling parameters is not in the vocabulary.
    """
    for about, tokens in (
        ("prompt", prompt),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_token_ids),
        ("bad_words", [token for word in sampling.bad_words for token in word]),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
    ):
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            unknown = list(dict.fromkeys(t for t in tokens if not 0 <= t < vocab_size))
            ids = f"token id {unknown[0]} is" if len(unknown) == 1 else f"token ids {first_of(unknown)} are"
            raise RequestRefused(f"{about}: {ids} outside the vocabulary of {vocab_size} tokens", about)


def as_token_ids(values: Sequence[int]) -> tuple[int, ...]:
    """A prompt's token ids as ints. Integers of any type are accepted.

    Raises:
        RequestRefused: one is not an integer.
    """
    tokens = tuple(values)
    if set(map(type, tokens)) <= {int}:  # a tenth of the time of a check of each
        return tokens
    try:
        return tuple(whole_number("token id", token) for token in tokens)
    except ValueError as error:
        raise RequestRefused(str(error), "prompt") from None


def check_tiers(kv: Pools, decode_tiers: Iterable[Tier]) -> None:
    """
    Raises:
        ValueError: no tier that decodes has a block, so every request would be refused.
    """
    if not any(kv.capacity(tier) for tier in decode_tiers):
        names = " or ".join(f"num_{tier.value}_blocks" for tier in decode_tiers)
        raise ValueError(f"this system decodes where there are no KV blocks: raise {names}")


def can_hold(kv: Pools, tier: Tier, request: Request) -> bool:
    """Whether the tier, when empty, can hold the request up to its last token."""
    return kv.blocks_for(request.max_kv_tokens) <= kv.capacity(tier)


def context_limit(longest: int, is_prompt_too_long: bool) -> str:
    """The limit in the words by which LangChain, LiteLLM and pydantic-ai recognise that a conversation is too long."""
    about = "the prompt is too long: " if is_prompt_too_long else ""
    return f"{about}this model's maximum context length is {longest} tokens"


def check_servable(request: Request, max_model_len: int, kv: Pools, decode_tiers: Iterable[Tier]) -> None:
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
