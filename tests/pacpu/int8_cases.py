"""Caches in eight bits for the tests. :mod:`swiftllm.ops.interface` has layout and arithmetic as plain indexing."""

from dataclasses import dataclass, replace

import torch

from pacpu import int8
from swiftllm.ops.interface import pack, unpack
from tests.pacpu.cases import Case, make_case
from tests.reference import paged_attention as reference


@dataclass(frozen=True)
class Int8Case:
    """A case over codes. Slots that the call should not read have NaN for their scale, unused blocks any bytes."""

    case: Case
    cache: torch.Tensor

    def check(self, tolerance: float | None = None, **options) -> None:
        """Run; the new tokens' codes must be stored bit by bit, nothing else touched, the output be right."""
        case = self.case
        stored = torch.full_like(case.kv_cache, torch.nan)
        reference.store_new_tokens(case.k, case.v, stored, case.block_tables, case.seq_lens)
        is_new = stored.isfinite().all(-1, keepdim=True).expand_as(stored)
        head_dim = case.q.shape[-1]
        expected_cache = torch.where(marks(is_new), pack(stored), self.cache)
        expected = case.expected(unpack(expected_cache, head_dim).double())
        case.out.fill_(torch.nan)
        self.run(**options)
        assert torch.equal(self.cache, expected_cache)
        if len(case.out):
            error = relative_error(case.out, expected)
            assert error < (tolerance or TIGHT[case.out.dtype]), error

    def run(self, **options) -> None:
        replace(self.case, kv_cache=self.cache).run(**options)


TIGHT = {torch.float32: 1e-4, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Of what is computed with the same codes: rounding of the output, of weights and of queries to 15 bits."""


def make_int8_case(dtype: torch.dtype, **shape) -> Int8Case:
    return as_int8(make_case(dtype, **shape))


def as_int8(case: Case) -> Int8Case:
    cache = pack(case.kv_cache)
    used = {int(block) for block in case.block_tables.flatten() if block < len(cache)}
    unused = [block for block in range(len(cache)) if block not in used]
    cache[unused] = torch.randint(256, cache[unused].shape, dtype=torch.uint8)
    return Int8Case(case, cache)


def marks(is_new: torch.Tensor) -> torch.Tensor:
    """Which bytes of a packed cache belong to elements or rows `is_new [..., 2, block_size, head_dim]`."""
    ones = torch.where(is_new, 1.0, 0.0)
    tiles = pack(ones).view(*ones.shape[:-3], -1, int8.tile_bytes(ones.shape[-1]))
    found = torch.zeros_like(tiles, dtype=torch.bool)
    ends = 16 * ones.shape[-1]
    found[..., :ends] = tiles[..., :ends] != 128
    found[..., ends : 2 * ends] = tiles[..., ends : 2 * ends] != 0
    scales = tiles[..., 2 * ends :].contiguous().view(torch.float32) > 2.0**-22
    found[..., 2 * ends :] = scales.repeat_interleave(4, -1)
    return found.view(*ones.shape[:-3], -1)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
