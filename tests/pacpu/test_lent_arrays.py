"""Arrays that their owner makes anew for each call: what was lent is held as long as it is used, by whatever object."""

from __future__ import annotations

import weakref

import pytest
import torch

import pacpu
from pacpu import rows
from tests.pacpu.cases import DTYPES, make_case, use
from tests.pacpu.packed_codes import random_matrix
from tests.pacpu.test_crossing import BF16, Layer
from tests.pacpu.test_rows import packed


class Fresh:
    """Lends a new copy at each call, every byte of which becomes 255 once it is given back: NaN, or -1."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.contiguous()

    def __dlpack__(self, **how: object) -> object:
        memory = self._tensor.flatten().view(torch.uint8).numpy().copy()
        lent = memory[:]
        weakref.finalize(lent, memory.fill, 255)
        return torch.frombuffer(lent, dtype=self._tensor.dtype).view(self._tensor.shape).__dlpack__(**how)


def fresh(argument: object) -> object:
    """The same with other arrays; tuples of them, too."""
    if isinstance(argument, tuple):
        return tuple(map(fresh, argument))
    return Fresh(argument) if isinstance(argument, torch.Tensor) else argument


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_codes(dtype):
    matrix = random_matrix(24, 288, 16, dtype, is_ordered=True)
    x, bias = torch.randn(5, 288).to(dtype), torch.randn(24).to(dtype)
    expected, out = torch.empty(2, 5, 24, dtype=dtype)
    matrix.packed.linear(x, bias, expected)
    other = rows.PackedCodes(*fresh(matrix.arrays), **matrix.sizes)
    other.linear(Fresh(x), Fresh(bias), out, num_threads=2)
    assert torch.equal(out, expected)
    elements = torch.empty(24, 288, dtype=dtype)
    other.write_out(elements)
    assert torch.equal(elements, matrix.in_order)


def test_experts():
    matrices = [random_matrix(3 * out, inputs, 16, torch.float32) for out, inputs in ((64, 48), (48, 32))]
    biases, x = (torch.randn(3 * 64), torch.randn(3 * 48)), torch.randn(7, 48)
    ids, likelihoods = torch.randint(4, (7, 2)), torch.rand(7, 2)
    sizes = {"clamp": (0.6, 1.7), "num_experts": 3, "hidden_size": 48, "ffn_size": 32}
    expected, out = torch.empty(2, 7, 48)
    own = [rows.PackedCodes(*fresh(matrix.arrays), **matrix.sizes) for matrix in matrices]
    experts = rows.PackedExperts(*zip((matrix.packed for matrix in matrices), biases, strict=True), **sizes)
    experts(x, ids, likelihoods, expected)
    experts = rows.PackedExperts(*zip(own, fresh(biases), strict=True), **sizes)
    experts(*fresh((x, ids, likelihoods)), out)
    assert torch.equal(out, expected)


def test_a_crossing():
    use("avx512", "native")
    layer = Layer(has_bias=True, has_head_norms=True)
    rows_in = [torch.randn(5, size).to(BF16) for size in (layer.attention_size, layer.hidden_size)]
    angles, out = torch.randn(5, 2, layer.head_dim), torch.empty(5, layer.out_features, dtype=BF16)
    expected = layer.part_by_part(rows_in[0], rows_in[1].clone(), angles)
    crossing = rows.Crossing(**{name: fresh(argument) for name, argument in layer.arguments().items()})
    crossing(Fresh(rows_in[0]), rows_in[1], Fresh(angles), out)
    assert torch.equal(out, expected)


def test_a_product_with_a_bias():
    use("avx512", "native")
    x, weight, bias = torch.randn(3, 8).to(BF16), torch.randn(50, 8).to(BF16), torch.randn(50).to(BF16)
    expected, out = torch.empty(2, 3, 50, dtype=BF16)
    rows.linear(x, packed(weight), bias, expected)
    rows.linear(*fresh((x, packed(weight), bias)), out)
    assert torch.equal(out, expected)


def test_prompts():
    use("avx512bf16", "native")
    if not rows.has_prompt_attention():
        pytest.skip("dot products are slow here")
    q, (k, v) = torch.randn(9, 4, 64).to(BF16), torch.randn(2, 2, 70, 64).to(BF16)
    sinks, expected, out = torch.randn(4), *torch.empty(2, 9, 4, 64, dtype=BF16)
    rows.prompt_attention([(q, k, v, expected)], 0.1, sinks=sinks)
    rows.prompt_attention([(*fresh((q, k, v)), out)], 0.1, sinks=Fresh(sinks), num_threads=2)
    assert torch.equal(out, expected)


def test_attention():
    case = make_case(torch.float16, num_heads=6)
    sinks, expected = torch.randn(6), torch.empty_like(case.out)
    inputs = case.q, case.k, case.v
    tables = case.block_tables, case.seq_lens
    pacpu.paged_attention(*inputs, case.kv_cache, *tables, expected, case.scale, sinks=sinks)
    pacpu.paged_attention(*fresh(inputs), case.kv_cache, *fresh(tables), case.out, case.scale, sinks=Fresh(sinks))
    assert torch.equal(case.out, expected)
