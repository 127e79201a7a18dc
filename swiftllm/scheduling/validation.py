"""The limits of an engine, and checks before queueing: requests that could never be served are refused."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swiftllm.core.request import Request, RequestRefused, SamplingParams, ServiceClass, Tier, first_of, whole_number
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.kv.kv_cache_manager import KVCacheManager


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True)
class RequestLimits:
    """All by which an engine refuses requests for ever, as a value: another process can check them."""

    vocab_size: int
    max_model_len: int
    groups: LayerGroups
    num_blocks: Mapping[Tier, int]
    decode_tiers: Mapping[ServiceClass, tuple[Tier, ...]]

    def longest_of(self, service_class: ServiceClass) -> int:
        """Prompt and output tokens of the longest request of a class."""
        largest_tier = max(self.num_blocks[tier] for tier in self.decode_tiers[service_class])
        most_stored = self.groups.tokens_in(largest_tier)  # K and V of the last token are never stored
        return min(self.max_model_len, most_stored + 1)

    @property
    def longest_request(self) -> int:
        """The same of any class."""
        return max(map(self.longest_of, ServiceClass))

    def check(self, request: Request) -> None:
        """Check that the request can be served if it is alone.

        Raises:
            RequestRefused: it can never be served; the message names the limit.
        """
        self.check_prompt(request.prompt_token_ids, request.sampling.max_tokens, request.service_class)
        self.check_sampling(request.sampling)

    def check_prompt(self, prompt: Sequence[int], max_tokens: int, service_class: ServiceClass) -> None:
        """The part of :meth:`check` that is about a prompt and its length with the output's."""
        self._check_tokens("prompt", prompt)
        self._check_length(len(prompt), max_tokens, service_class)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """The other part, which is the same for all prompts."""
        self._check_tokens("logit_bias", [token for token, _ in sampling.biases])
        self._check_tokens("stop_token_ids", sampling.stop_token_ids)
        self._check_tokens("bad_words", [token for word in sampling.bad_words for token in word])
        self._check_tokens("allowed_token_ids", sampling.allowed_token_ids or ())

    def _check_tokens(self, about: str, tokens: Sequence[int]) -> None:
        if tokens and not self._are_known(tokens):
            unknown = list(dict.fromkeys(t for t in tokens if not 0 <= t < self.vocab_size))
            ids = f"token id {unknown[0]} is" if len(unknown) == 1 else f"token ids {first_of(unknown)} are"
            raise RequestRefused(f"{about}: {ids} outside the vocabulary of {self.vocab_size} tokens", about)

    def _are_known(self, tokens: Sequence[int]) -> bool:
        if isinstance(tokens, array):  # numpy takes a fiftieth of the time
            ids = np.frombuffer(tokens, np.int32)
            return ids.min() >= 0 and ids.max() < self.vocab_size
        return min(tokens) >= 0 and max(tokens) < self.vocab_size

    def _check_length(self, prompt_len: int, max_tokens: int, service_class: ServiceClass) -> None:
        if prompt_len == 0:
            raise RequestRefused("the prompt is empty; it needs at least one token", "prompt")
        total = prompt_len + max_tokens
        if total > self.max_model_len:
            is_long = prompt_len >= self.max_model_len
            raise RequestRefused(
                f"{context_limit(self.max_model_len, is_long)}; {prompt_len} prompt + {max_tokens} output "
                f"tokens = {total} exceed max_model_len={self.max_model_len}",
                "prompt" if is_long else "max_tokens",
            )
        tiers = self.decode_tiers[service_class]
        room = {tier: self.groups.tokens_in(self.num_blocks[tier]) for tier in tiers}
        kv_tokens = total - 1  # K and V of the last token are never stored
        if kv_tokens > max(room.values()):
            size = self.groups.block_size
            pools = " and ".join(
                f"{room[tier]} in the {tier.value.upper()} tier ({self.num_blocks[tier]} blocks of {size})"
                for tier in tiers
            )
            prompt_fits = prompt_len <= max(room.values())
            limit = context_limit(self.longest_of(service_class), not prompt_fits)
            raise RequestRefused(
                f"{limit}; the request needs KV cache for {kv_tokens} tokens and there is room for {pools}"
                ": ask for fewer tokens or raise num_gpu_blocks / num_cpu_blocks",
                "max_tokens" if prompt_fits else "prompt",
            )


def as_token_array(values: Sequence[int]) -> Sequence[int]:
    """A prompt's token ids as an array of 32 bits; a tuple of ints if one does not fit, which is in no vocabulary."""
    try:
        return array("i", values)
    except (TypeError, OverflowError):
        return as_token_ids(values)


def as_token_ids(values: Sequence[int]) -> tuple[int, ...]:
    """A prompt's token ids as ints. Integers of any type are accepted."""
    tokens = tuple(values)
    if set(map(type, tokens)) <= {int}:  # a tenth of the time of a check of each
        return tokens
    try:
        return tuple(whole_number("token id", token) for token in tokens)
    except ValueError as error:
        raise RequestRefused(str(error), "prompt") from None


def check_tiers(kv: KVCacheManager, decode_tiers: Iterable[Tier]) -> None:
    """Check that some tier that decodes has a block. Else every request would be refused."""
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
