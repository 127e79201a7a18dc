"""What biases, penalties, bans and min_p do to one row of logits, token by token, in float32 as everywhere."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from swiftllm.core.request import Request


def by_the_rules(row: torch.Tensor, request: Request) -> torch.Tensor:
    """``row [vocab_size]`` as the request wants it."""
    values, how, counts = row.float().numpy().copy(), request.sampling, Counter(request.output_token_ids)
    for token, bias in dict(how.logit_bias).items():
        values[token] += np.float32(bias)
    penalties = (how.repetition_penalty, how.frequency_penalty, how.presence_penalty)
    repetition, frequency, presence = map(np.float32, penalties)
    for token in {*request.prompt_token_ids, *request.output_token_ids}:
        values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
    for token, count in counts.items():
        values[token] = values[token] - frequency * np.float32(count) - presence
    output, banned = request.output_token_ids, set()
    for word in how.bad_words:
        if tuple(output[len(output) - len(word) + 1 :] if len(word) > 1 else ()) == word[:-1]:
            banned.add(word[-1])
    if len(output) < how.min_tokens:
        banned |= set(how.stop_token_ids) | set(request.eos_token_ids)
    if how.grammar is not None:  # from the start, whatever the request remembers
        bits = np.frombuffer(how.grammar.start().allowed(output), dtype=np.uint8)
        may = np.flatnonzero(np.unpackbits(bits, count=len(values), bitorder="little")).tolist()
        banned = {*range(len(values))} - {*may} | (banned if {*may} - banned else set())
    for token in range(len(values)):
        if token in banned or (how.allowed_token_ids is not None and token not in how.allowed_token_ids):
            values[token] = -math.inf
    if how.min_p and not how.is_greedy:
        scaled = values.astype(np.float64) / how.temperature
        probabilities = np.exp(scaled - scaled.max())
        values[probabilities < how.min_p] = -math.inf
    return torch.from_numpy(values)


def plain(request: Request) -> Request:
    """The same request with the same tokens, asking for nothing that changes logits."""
    none = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": (),
        "min_p": 0.0,
        "min_tokens": 0,
        "bad_words": (),
        "allowed_token_ids": None,
        "grammar": None,
    }
    twin = Request(request.request_id, request.prompt_token_ids, replace(request.sampling, **none))
    twin.output_token_ids = request.output_token_ids
    return twin
