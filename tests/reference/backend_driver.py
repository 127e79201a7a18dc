"""Moves GPU batches and CPU batches across a backend by hand, with shuffled block tables and poisoned pools."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.device import HostDevice
from swiftllm.runtime.cpu_tier import BlocksWrite
from swiftllm.runtime.torch_backend import TorchBackend
from tests.reference.int8_tier import poison_of


class BackendDriver:
    """Owns the block tables of a backend whose pools it has poisoned."""

    in_one_go = True

    def __init__(self, backend: TorchBackend, seed: int = 0) -> None:
        self.backend = backend
        for pool in backend.kv_pools.tensors.values():
            pool.fill_(poison_of(pool))
        rng = random.Random(seed)
        self.free = {Tier.GPU: list(range(backend.num_gpu_blocks)), Tier.CPU: list(range(backend.num_cpu_blocks))}
        for blocks in self.free.values():
            rng.shuffle(blocks)
        self.left: dict[Tier, list[int]] = {Tier.GPU: [], Tier.CPU: []}  # blocks that swaps emptied
        self.tables: dict[str, list[int]] = {}
        backend.block_tables = self.tables

    def admit(self, request_id: str, prompt: Sequence[int], tier: Tier, sampling: SamplingParams) -> Request:
        """A new request with blocks for all tokens it can come to."""
        request = Request(request_id, tuple(prompt), sampling)
        request.tier = tier
        count = self.backend.layer_groups.blocks_for(request.max_kv_tokens)
        self.tables[request_id] = [self.free[tier].pop() for _ in range(count)]
        return request

    def run(self, items: Sequence[GpuBatchItem], joined: Sequence[Request] = ()) -> dict[str, int]:
        """One iteration: the GPU batch, and a CPU batch joining every stage; appends the tokens to their requests.

        A GPU batch alone goes through all layers ``in_one_go`` where the backend can.
        """
        try:
            tokens = self._cross(items, joined)
        finally:
            for blocks in self.left.values():
                blocks.clear()
        backend = self.backend
        logprobs = backend.take_logprobs()
        for request in [item.request for item in items] + list(joined):
            if request.request_id in tokens:
                request.append_token(tokens[request.request_id], 0.0)
            if request.request_id in logprobs:
                request.logprobs.append(logprobs[request.request_id])
        return tokens

    def _cross(self, items: Sequence[GpuBatchItem], joined: Sequence[Request]) -> Mapping[str, int]:
        backend = self.backend
        gpu_batch = backend.open_gpu_batch(items)
        tokens = backend.run_full_graph(gpu_batch) if self.in_one_go and not joined else None
        if tokens is None:
            cpu_batch = backend.open_cpu_batch(joined)
            last = backend.num_layers - 1
            for layer in range(-1, last):
                backend.run_stage(layer, [gpu_batch, cpu_batch])
                if joined:
                    future = backend.submit_cpu_attention(layer + 1, cpu_batch)
                backend.gpu_attention(layer + 1, gpu_batch)
                self._poison_left(layer + 1, Tier.GPU)
                self._poison_left(min(layer + 2, last), Tier.CPU)
                if joined:
                    future.wait()
            tokens = dict(backend.run_stage(last, [gpu_batch, cpu_batch]))
        return tokens

    def prefill(self, requests: Sequence[Request], chunk: int | None = None) -> dict[str, int]:
        """Compute all known tokens of the requests, at most ``chunk`` of each per iteration."""
        start, tokens = 0, {}
        lens = {r.request_id: r.num_tokens for r in requests}
        while start < max(lens.values()):
            items = []
            for r in requests:
                count = min(chunk or lens[r.request_id], lens[r.request_id] - start)
                if count > 0:
                    items.append(GpuBatchItem(r, start, count, r.tier, is_prefill=True))
            tokens.update(self.run(items))
            start += chunk or max(lens.values())
        return tokens

    def decode(self, requests: Sequence[Request]) -> dict[str, int]:
        """One decode step: GPU requests in the GPU batch, CPU requests joining along."""
        gpu = [GpuBatchItem(r, r.num_tokens - 1, 1, Tier.GPU, False) for r in requests if r.tier is Tier.GPU]
        return self.run(gpu, [r for r in requests if r.tier is Tier.CPU])

    def move(self, requests: Sequence[Request]) -> None:
        """Swap the requests to the other tier. What they leave behind is poisoned as soon as others might fill it: in
        the GPU tier once the GPU batch has come to the layer, in the CPU tier once the GPU batch has come to the one
        before."""
        assert not any(self.left.values()), "an iteration comes first"
        swaps = []
        for request in requests:
            source, old = request.tier, self.tables[request.request_id]
            new = [self.free[source.other].pop(0) for _ in old]
            swaps.append(Swap(request, source, tuple(old), tuple(new)))
            self.tables[request.request_id] = new
            request.tier = source.other
        self.backend.swap(swaps)
        for swap in swaps:
            self.left[swap.source].extend(swap.source_blocks)
            self.free[swap.source].extend(swap.source_blocks)
        self._poison_left(0, Tier.CPU)

    def _poison_left(self, layer: int, tier: Tier) -> None:
        blocks = self.left[tier]
        if blocks and tier is Tier.GPU:
            self.backend.kv_pools.layers[tier][layer][blocks] = torch.nan
        elif blocks:
            pool, place = self.backend.kv_pools.tensors[tier], self.backend.layer_groups.place_of[layer]
            content = torch.full((1, len(blocks), *pool.shape[2:]), poison_of(pool), dtype=pool.dtype)
            write = BlocksWrite(range(place, place + 1), content, torch.tensor(blocks))
            self.backend.cpu_tier.write(write, HostDevice.compute.mark())


def tokens_of_both_tiers(backend: TorchBackend, prompt: Sequence[int], chunk: int, num_tokens: int) -> list[list[int]]:
    """Greedy tokens of the prompt, in chunks, as a request of each tier."""
    driver = BackendDriver(backend)
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = [driver.admit(tier.value, prompt, tier, sampling) for tier in Tier]
    driver.prefill(requests, chunk)
    while requests[0].output_len < num_tokens:
        driver.decode(requests)
    return [request.output_token_ids for request in requests]
