"""The kernels of experts in Triton's interpreter, against the reference in float64 with the dequantised matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from swiftllm.ops import library
from swiftllm.ops.interface import Ops
from swiftllm.ops.library import LibraryProducts
from swiftllm.ops.matrices import (
    MXFP4_GROUP,
    ClampedSwiGLU,
    ExpertByExpert,
    ExpertLinear,
    ExpertWeights,
    QuantisedMatrix,
    add_slots,
    choose_experts,
)
from swiftllm.ops.triton.matrices import GroupedExperts, most_tiles, tile_rows
from swiftllm.ops.triton.ops import TritonOps, launch
from tests.reference.fake_humming import install_fake_humming
from tests.reference.tolerances import TOLERANCES, assert_close
from tests.triton.interpreted_quantised import fresh_inputs_and_poisoned_outputs, random_matrix, strided
from tests.triton.interpreter import repair_bfloat16
from tests.triton.memory_check import watch_memory

repair_bfloat16()
watch_memory()

__all__ = ["fresh_inputs_and_poisoned_outputs"]  # the fixture
HOST = torch.device("cpu")


def random_experts(
    experts: int, slots: int, hidden: int, ffn: int, dtype: torch.dtype, group: int, normalises: bool,
    is_gpt_oss: bool = False,
) -> ExpertWeights:  # fmt: skip
    """``group``: inputs of a group of 4-bit weights; 0: they are not quantised; 32: they are MXFP4."""
    if group == MXFP4_GROUP:
        gate_up, down = random_mxfp4(experts * 2 * ffn, hidden, dtype), random_mxfp4(experts * hidden, ffn, dtype)
    elif group:
        gate_up = random_matrix(experts * 2 * ffn, hidden, group, dtype, torch.float16)
        down = random_matrix(experts * hidden, ffn, group, dtype, torch.float16)
    else:
        gate_up = (torch.randn(experts * 2 * ffn, hidden) / hidden**0.5).to(dtype)
        down = (torch.randn(experts * hidden, ffn) / ffn**0.5).to(dtype)
    weights = ExpertWeights((torch.randn(experts, hidden) / hidden**0.5).to(dtype), gate_up, down, slots, normalises)
    if not is_gpt_oss:
        return weights
    biases = {"gate_up_bias": torch.randn(experts * 2 * ffn).to(dtype), "down_bias": torch.randn(experts * hidden)}
    biases |= {"down_bias": biases["down_bias"].to(dtype), "router_bias": torch.randn(experts)}
    return replace(weights, **biases, activation=ClampedSwiGLU(limit=0.7))


def random_mxfp4(out: int, inputs: int, dtype: torch.dtype) -> QuantisedMatrix:
    """With codes of padded inputs that are random, and products with normal rows of about 1."""
    matrix = random_matrix(out, inputs, MXFP4_GROUP, dtype, torch.float16)
    highest = 125 - round(math.log2(inputs) / 2)
    scales = torch.randint(highest - 3, highest + 1, matrix.scales.shape, dtype=torch.uint8)
    return replace(matrix, scales=scales, zeros=None)


def expected(weights: ExpertWeights, x: torch.Tensor) -> torch.Tensor:
    """By float64 products of every expert with every row; experts are chosen in float32, as the contract says."""
    logits = x.float() @ weights.router.float().t()
    logits = logits if weights.router_bias is None else logits + weights.router_bias
    ids, likelihoods = choose_experts(logits, weights.per_token, weights.normalises)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(weights.num_experts):
        gate_up, down = map(in_float64, weights.of(expert))
        activated = Ops().activation_of(weights)(gate_up(x.double()))
        product = down(activated)
        out += product * torch.where(ids == expert, likelihoods.double(), 0.0).sum(1, keepdim=True)
    return out


def in_float64(linear: ExpertLinear) -> Callable[[torch.Tensor], torch.Tensor]:
    matrix, bias = linear
    weight = matrix.dequantise() if isinstance(matrix, QuantisedMatrix) else matrix
    return lambda x: torch.nn.functional.linear(x, weight.double(), None if bias is None else bias.double())


CASES = [  # experts, slots, hidden, ffn, dtype, group, normalises, of gpt-oss, capability
    (5, 3, 80, 40, torch.bfloat16, 0, False, True, 80),
    (3, 2, 72, 24, torch.float32, 0, True, False, 80),
    (3, 2, 144, 32, torch.float16, 16, True, False, 80),
    (3, 2, 144, 16, torch.float16, 16, False, True, 75),
    (3, 2, 160, 64, torch.bfloat16, 32, True, True, 80),
    (3, 2, 96, 32, torch.float16, 32, True, True, 75),
]


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Three products are rounded one after the other."""
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), wanted.double(), atol=4 * atol, rtol=4 * rtol)


def test_experts_are_those_of_the_reference_and_padding_goes_nowhere() -> None:
    for case in CASES:
        *sizes, capability = case
        weights, dtype = random_experts(*sizes), sizes[4]
        ops = TritonOps(HOST, capability, num_multiprocessors=2)
        x = strided(1, sizes[2], dtype)
        assert_near(ops.make_experts(weights)(x), expected(weights, x), dtype)

        x, rows = strided(9, sizes[2], dtype), 9
        wanted, padded = expected(weights, x), torch.full((rows + 2, sizes[2]), torch.nan, dtype=dtype)
        padded[:rows] = x
        for those in (ops, Ops()):
            out = those.make_experts(weights)(padded, num_rows=torch.tensor([rows], dtype=torch.int32))
            assert_near(out[:rows], wanted, dtype)
            assert not out[rows:].any(), case


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN in padding
def test_products_of_a_library_take_the_place_of_own_ones(monkeypatch) -> None:
    """The library is imitated. It gets pairs in the order of experts, and none of padding."""
    monkeypatch.setattr(library, "FIRST_ROWS", (1, 5))  # those of a GPU would take minutes here
    monkeypatch.setattr(library, "TIMED_ROWS", (2,))
    for group, dtype, is_gpt_oss in ((16, torch.float16, False), (MXFP4_GROUP, torch.bfloat16, True)):
        fake = install_fake_humming(monkeypatch)
        weights = random_experts(3, 2, 64, 64, dtype, group, True, is_gpt_oss)
        times = iter((1.0, 0.5))
        products = LibraryProducts(lambda work, device, times=times: next(times))
        ops = TritonOps(HOST, 80, 2, products)
        experts = ops.make_experts(weights)
        assert ops.by_library == "humming-kernels 0.1.19" and fake.packed == 2
        x = strided(7, 64, dtype)
        before = fake.products
        assert_near(experts(x), expected(weights, x), dtype)
        assert fake.products == before + 2
        padded = torch.full((9, 64), torch.nan, dtype=dtype)
        padded[:7] = x
        for count in (7, 0):
            out = experts(padded, num_rows=torch.tensor([count], dtype=torch.int32))
            assert_near(out[:count], expected(weights, x)[:count], dtype)
            assert not out[count:].any()


def test_no_expert_is_computed_for_padding_and_each_pair_is_computed_once(monkeypatch) -> None:
    """What a tile reads of pairs is counted where the sorted pairs are made: padding has none."""
    weights = random_experts(8, 2, 32, 16, torch.float16, 0, True)
    seen: dict[str, torch.Tensor] = {}
    ops = TritonOps(HOST, 80, num_multiprocessors=2)

    def watched(kernel, grid, *arguments, **options) -> None:
        launch(kernel, grid, *arguments, **options)
        if kernel.fn.__name__ == "sort_pairs_kernel":
            seen.update(ids=arguments[0].clone(), pairs=arguments[1].clone(), starts=arguments[2].clone())

    x = torch.full((7, 32), torch.nan, dtype=torch.float16)
    x[:4] = torch.randn(4, 32)
    grouped = GroupedExperts(weights, ops.silu_and_mul, ops._has_tensor_cores, watched)
    for count in (4, 0):
        grouped(x, num_rows=torch.tensor([count], dtype=torch.int32))
        routed = int(seen["starts"][-1])
        assert routed == 2 * count and (seen["ids"][2 * count :] == 8).all()
        assert seen["pairs"].tolist() == torch.argsort(seen["ids"], stable=True).tolist()


def test_mxfp4_is_multiplied_as_it_is_written_out() -> None:
    """Rows of the unit matrix give every code, with scales from the lowest to the highest that is finite."""
    blocks = torch.arange(16, dtype=torch.uint8) * 17  # every code twice
    pairs, starts = torch.arange(32, dtype=torch.int32), torch.tensor([0, 32], dtype=torch.int32)
    for dtype, scales in ((torch.float32, 253), (torch.bfloat16, 253), (torch.float16, 141)):
        powers = torch.arange(0, scales, 7, dtype=torch.uint8)[:, None]
        matrix = QuantisedMatrix.from_mxfp4(blocks.expand(len(powers), 1, 16), powers, dtype)
        weights = ExpertWeights(torch.zeros(1, 32), matrix, matrix, 1, True)
        ops = TritonOps(HOST, 80, num_multiprocessors=2)
        grouped = GroupedExperts(weights, ops.silu_and_mul, ops._has_tensor_cores, launch)
        products = grouped._multiply(matrix, None, torch.eye(32, dtype=dtype), 32, pairs, starts, takes_rows=True)
        assert torch.equal(products, matrix.dequantise().t()), dtype


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN
def test_equal_experts_give_the_lower_ids_and_nan_stays_nan() -> None:
    weights = random_experts(8, 3, 32, 16, torch.float32, 0, False)
    weights = replace(weights, router=torch.ones(8, 32))
    x = torch.randn(5, 32)
    out = TritonOps(HOST, 80, 2).make_experts(weights)(x)
    parts = [down(Ops().silu_and_mul(gate_up(x))) for gate_up, down in linears(weights)[:3]]
    assert_close(out, add_slots(torch.stack(parts, 1), torch.full((5, 3), 0.125)))
    x[2] = torch.nan
    assert TritonOps(HOST, 80, 2).make_experts(weights)(x).isnan().any(1).tolist() == [i == 2 for i in range(5)]


def linears(weights: ExpertWeights) -> list:
    return ExpertByExpert(weights, Ops().make_linear, Ops().silu_and_mul)._linears


def test_what_is_not_quantised_alike_is_refused() -> None:
    weights = random_experts(4, 2, 32, 16, torch.float16, 16, True)
    with pytest.raises(ValueError, match="act-order are not supported"):
        replace(weights, down=replace(weights.down, order=torch.arange(16)))
    with pytest.raises(ValueError, match="not all quantised alike"):
        replace(weights, gate_up=(weights.gate_up, torch.zeros(2, 32)))


@pytest.mark.parametrize("num_pairs, experts", [(1, 8), (8, 128), (1024, 128), (16384, 128), (300, 8)])
def test_there_are_tiles_for_every_routing(num_pairs, experts) -> None:
    rows = tile_rows(num_pairs, experts)
    for _ in range(50):
        counts = torch.bincount(torch.randint(torch.randint(1, experts + 1, ()), (num_pairs,)), minlength=experts)
        assert int(((counts + rows - 1) // rows).sum()) <= most_tiles(num_pairs, experts, rows)
    assert TritonOps(HOST, 80, 2).make_experts(random_experts(4, 2, 16, 16, torch.float16, 0, True))(
        torch.empty(0, 16).half()
    ).shape == (0, 16)
