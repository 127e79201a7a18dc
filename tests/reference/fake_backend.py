"""A backend without tensors that notices every mistake a scheduler or executor can make.

Each cache slot has a note of whose token it holds, or with a prefix cache of which text it is the last token.
Attention checks every slot it would read, swaps carry the notes along, and a slot that nobody owns is empty. Stages
check that the attention before them has happened. Attention tasks become ready after a random number of polls. Tokens
are a hash of the text before them, so they do not depend on scheduling.

With slots of states each state has a note, too, of the last token that was applied to it. Copies carry it along, and
while a token is on its way through the layers a state is of nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swiftllm.core.plan import GpuBatchItem, StateCopy, Swap
from swiftllm.core.request import Request, Tier, TokenLogprob
from swiftllm.kv.kv_cache_manager import KVCacheManager

EOS = 1
VOCABULARY = 50


def next_token(tokens: Sequence[int]) -> int:
    return (hash(tuple(tokens)) ^ 0x5BD1E995) % VOCABULARY


def expected_output(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


@dataclass(eq=False)
class FakeBatch:
    """A GPU batch (``items``) or a CPU batch (``requests``); ``attended`` is the last layer whose attention is done."""

    items: list[GpuBatchItem] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    tables: dict[str, list[int]] = field(default_factory=dict)
    attended: int = -1
    crossed: int = -2
    outstanding: bool = False

    @property
    def num_rows(self) -> int:
        return sum(item.num_tokens for item in self.items) + len(self.requests)


class FakeFuture:
    def __init__(self, backend: FakeBackend, batch: FakeBatch, layer: int) -> None:
        self.backend, self.batch, self.layer = backend, batch, layer
        self.polls_left = backend.random.choice((0, 0, 1, 3, 20))
        self.collected = False

    def ready(self) -> bool:
        self.polls_left -= 1
        return self.polls_left < 0

    def wait(self) -> float:
        assert not self.collected, "an attention task is waited for once"
        if self.polls_left >= 0:
            self.backend.clock_s += 1e-3
        for request in self.batch.requests:
            self.backend.attend(request, Tier.CPU, self.layer, self.batch.tables[request.request_id])
        self.collected = True
        self.batch.attended, self.batch.outstanding = self.layer, False
        return 1e-3


Note = tuple[str, int] | int | None
"""What a slot holds: a request and a position, or a hash of all tokens up to there."""


class FakeBackend:
    worker_restarts = 0

    def __init__(self, num_layers: int = 3, block_size: int = 4, seed: int = 0) -> None:
        self.num_layers = num_layers
        self.block_size = block_size
        self.block_tables: Mapping[str, list[int]] = {}
        self.random = random.Random(seed)
        self.clock_s = 0.0
        self.kv: KVCacheManager | None = None  # with it, writes to blocks that others may read are noticed
        self.slots: dict[tuple[Tier, int, int], list[Note]] = {}  # by tier, block and layer
        self.states: dict[int, Note] = {}  # by slot
        self.snapshots: dict[int, Note] = {}
        self._notes: dict[str, tuple[Request, list[Note]]] = {}
        self.logprobs: dict[str, TokenLogprob] = {}
        self.calls: list[tuple] = []  # what was asked of the hardware, in order
        self.crosses_in_one_go = False
        self.closed = False

    def now(self) -> float:
        self.clock_s += 1e-6
        return self.clock_s

    def close(self) -> None:
        self.closed = True

    def recover(self) -> None:
        self.logprobs = {}

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        taken, self.logprobs = self.logprobs, {}
        return taken

    # -- the cache --------------------------------------------------------------------------------------------------

    def notes(self, request: Request, num_tokens: int) -> list[Note]:
        """What slots with these tokens of a request should hold, and perhaps some more."""
        of, notes = self._notes.get(request.request_id, (None, []))
        if of is not request:
            notes = []
            self._notes[request.request_id] = request, notes
        if len(notes) < num_tokens:
            positions = range(len(notes), num_tokens)
            if self.kv is None or self.kv.hashes is None:
                notes += [(request.request_id, position) for position in positions]
            else:
                for token in request.token_ids(len(notes), num_tokens):
                    notes.append(hash((notes[-1] if notes else hash(request.cache_salt), token)))
        return notes

    def store(self, request: Request, tier: Tier, layer: int, table: list[int], position: int) -> None:
        block, offset = table[position // self.block_size], position % self.block_size
        if self.kv is not None:
            pool = self.kv.pool_of(request)
            assert pool.num_holders(block) == 1, f"{request.request_id} writes to a block that it shares"
            assert not pool.caches or pool._hashes[block - pool.first] is None, "a full block is written again"
        slots = self.slots.setdefault((tier, block, layer), [None] * self.block_size)
        slots[offset] = self.notes(request, position + 1)[position]

    def attend(self, request: Request, tier: Tier, layer: int, table: list[int], upto: int | None = None) -> None:
        """Store the newest token's K and V, then check that all tokens before it are where they should be."""
        newest = request.num_tokens - 1 if upto is None else upto
        self.store(request, tier, layer, table, newest)
        notes = self.notes(request, newest + 1)
        for number, start in enumerate(range(0, newest + 1, self.block_size)):
            expected = notes[start : min(start + self.block_size, newest + 1)]
            found = self.slots.get((tier, table[number], layer), [])
            assert found[: len(expected)] == expected, f"{request.request_id}@{start}: found {found}"

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        assert copies, "asked for nothing"
        for copy in copies:
            if copy.saves:
                self.snapshots[copy.snapshot] = self.states[copy.slot]
            else:
                self.states[copy.slot] = self.snapshots[copy.snapshot]

    def _apply_to_states(self, layer: int, batch: FakeBatch) -> None:
        if self.kv is None or self.kv.state_slots is None or layer not in (-1, self.num_layers - 1):
            return
        spans = [(item.request, item.start, item.context_len) for item in batch.items]
        spans += [(request, request.num_tokens - 1, request.num_tokens) for request in batch.requests]
        for request, start, end in spans:
            slot, notes = self.kv.state_slots.of_request[request.request_id], self.notes(request, end)
            if layer == self.num_layers - 1:
                self.states[slot] = notes[end - 1]
                continue
            found = self.states.get(slot)
            assert not start or found == notes[start - 1], f"{request.request_id}@{start}: a state of {found}"
            self.states[slot] = None

    def holds_weights(self, layer: int) -> bool:
        return True

    def swap(self, swaps: Sequence[Swap]) -> None:
        # All requests that move go in one direction. What comes to the GPU arrives last, so nothing takes it out again.
        assert len({swap.source for swap in swaps if swap.request is not None}) <= 1
        arriving: set[int] = set()
        for swap in swaps:
            assert len(swap.source_blocks) == len(swap.target_blocks) == len(set(swap.target_blocks))
            if swap.source is Tier.CPU:
                arriving.update(swap.target_blocks)
            else:
                assert arriving.isdisjoint(swap.source_blocks)
            for source, target in zip(swap.source_blocks, swap.target_blocks, strict=True):
                for layer in range(self.num_layers):
                    slots = self.slots.get((swap.source, source, layer))
                    if self.kv is None or self.kv.hashes is None:  # else others may find it there
                        self.slots.pop((swap.source, source, layer), None)
                    self.slots.pop((swap.source.other, target, layer), None)
                    if slots is not None:
                        self.slots[swap.source.other, target, layer] = list(slots)

    # -- an iteration -----------------------------------------------------------------------------------------------

    def _table(self, request: Request, num_tokens: int) -> list[int]:
        table = list(self.block_tables[request.request_id])
        assert len(table) * self.block_size >= num_tokens, "the block table is too short"
        return table

    def open_gpu_batch(self, items: Sequence[GpuBatchItem]) -> FakeBatch:
        assert len({item.request.request_id for item in items}) == len(items), "a request twice in one GPU batch"
        for item in items:
            assert item.request.tier is item.tier
            assert item.start == item.request.num_computed_tokens
            assert item.is_prefill or (item.num_tokens == 1 and item.tier is Tier.GPU)
        tables = {item.request.request_id: self._table(item.request, item.context_len) for item in items}
        return FakeBatch(items=list(items), tables=tables)

    def open_cpu_batch(self, requests: Sequence[Request]) -> FakeBatch:
        assert requests
        assert all(request.tier is Tier.CPU and not request.is_prefilling for request in requests)
        tables = {request.request_id: self._table(request, request.num_tokens) for request in requests}
        return FakeBatch(requests=list(requests), tables=tables)

    def drop_rows(self, cpu_batch: FakeBatch, request_ids: frozenset[str]) -> FakeBatch:
        assert not cpu_batch.outstanding
        kept = [request for request in cpu_batch.requests if request.request_id not in request_ids]
        return FakeBatch([], kept, cpu_batch.tables, cpu_batch.attended, cpu_batch.crossed)

    def run_stage(self, layer: int, batches: Sequence[FakeBatch]) -> Mapping[str, int]:
        self.clock_s += 1e-4
        self.calls.append(("run_stage", layer, len(batches)))
        tokens: dict[str, int] = {}
        for batch in batches:
            assert not batch.outstanding, "the CPU batch's attention is still under way"
            assert batch.crossed == layer - 1 and batch.attended == layer, "attention before its stage, in order"
            batch.crossed = layer
            self._apply_to_states(layer, batch)
            if layer == self.num_layers - 1:
                for item in batch.items:
                    if item.samples:
                        tokens[item.request.request_id] = self._sample(item.request)
                for request in batch.requests:
                    tokens[request.request_id] = self._sample(request)
        return tokens

    def _sample(self, request: Request) -> int:
        token = next_token(request.token_ids(0, request.num_tokens))
        if request.sampling.logprobs is not None:  # a made-up one that tells which token it belongs to
            self.logprobs[request.request_id] = TokenLogprob(token, -float(request.output_len))
        return token

    def gpu_attention(self, layer: int, gpu_batch: FakeBatch) -> None:
        assert gpu_batch.crossed == layer - 1
        self.calls.append(("gpu_attention", layer))
        for item in gpu_batch.items:
            table = gpu_batch.tables[item.request.request_id]
            for position in range(item.start, item.context_len):
                self.store(item.request, item.tier, layer, table, position)
            self.attend(item.request, item.tier, layer, table, item.context_len - 1)
        gpu_batch.attended = layer

    def run_full_graph(self, gpu_batch: FakeBatch) -> Mapping[str, int] | None:
        if not self.crosses_in_one_go:
            return None
        for layer in range(-1, self.num_layers - 1):
            self.run_stage(layer, [gpu_batch])
            self.gpu_attention(layer + 1, gpu_batch)
        tokens = self.run_stage(self.num_layers - 1, [gpu_batch])
        self.calls = [call for call in self.calls if call[0] == "run_full_graph"] + [("run_full_graph",)]
        return tokens

    def submit_cpu_attention(self, layer: int, cpu_batch: FakeBatch) -> FakeFuture:
        assert cpu_batch.crossed == layer - 1 and not cpu_batch.outstanding
        cpu_batch.outstanding = True
        return FakeFuture(self, cpu_batch, layer)
