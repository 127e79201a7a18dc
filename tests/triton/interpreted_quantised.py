"""The kernels for 4-bit weights in Triton's interpreter, against float64 products with the dequantised matrix."""

from __future__ import annotations

import pytest
import torch

from swiftllm.model.quantised_weights import sort_into_runs
from swiftllm.ops.interface import Ops
from swiftllm.ops.matrices import QuantisedMatrix
from swiftllm.ops.triton.ops import MOST_QUANTISED_ROWS, TritonOps
from swiftllm.ops.triton.tiles import MIN_SPLIT_BLOCKS, blocks_per_split
from tests.reference.tolerances import assert_close
from tests.triton.interpreter import repair_bfloat16
from tests.triton.memory_check import watch_memory

repair_bfloat16()
watch_memory()

HOST = torch.device("cpu")
ROWS = (1, 7, 17, 33, 70)


@pytest.fixture(autouse=True)
def fresh_inputs_and_poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """New random inputs each time, their seed printed with a failure; NaN wherever memory is not initialised."""
    print("seed", torch.seed())
    empty = torch.empty

    def poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def random_matrix(
    out: int, inputs: int, group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype, ordered: bool = False
) -> QuantisedMatrix:
    """Its products with normal rows have a standard deviation of about 1. Codes of padded inputs are random."""
    groups = inputs // group_size
    codes = torch.randint(16, (inputs, out), dtype=torch.uint8)
    scales = (0.1 + torch.rand(groups, out)) / (4 * inputs**0.5)
    zeros = torch.randint(16, (groups, out), dtype=torch.uint8)
    order = torch.randperm(inputs).int() if ordered else None
    matrix = QuantisedMatrix.from_codes(codes, scales.to(scale_dtype), zeros, group_size, dtype, order)
    expected = matrix.dequantise()
    beyond = -inputs % 128
    if beyond:
        words = matrix.codes[-16:].clone()
        matrix.codes[-16:] |= -1 << (4 * ((128 - beyond) // 16))  # shifts whose inputs are all padded
        assert torch.equal(matrix.dequantise(), expected) and not torch.equal(words, matrix.codes[-16:])
    return matrix


def part_of_ordered_matrix(out: int, inputs: int, num_groups: int, dtype: torch.dtype) -> QuantisedMatrix:
    """As a rank has it: inputs of any group, and of some group none."""
    groups = torch.randint(num_groups - 1, (inputs,))
    zeros = torch.randint(16, (num_groups, out), dtype=torch.uint8)
    scales = (0.1 + torch.rand(num_groups, out)) / (4 * inputs**0.5)
    codes, order, runs = sort_into_runs(torch.randint(16, (inputs, out), dtype=torch.uint8), zeros, groups)
    return QuantisedMatrix.from_codes(codes, scales.half(), zeros, 128, dtype, order, runs)


def product(x: torch.Tensor, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    expected = x.double() @ matrix.dequantise().double().t()
    return expected if bias is None else expected + bias.double()


def strided(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows that lie apart, NaN between them."""
    wide = torch.full((rows, size + 24), torch.nan, dtype=dtype)
    wide[:, 8 : 8 + size] = torch.randn(rows, size)
    return wide[:, 8 : 8 + size]


CASES = [  # outputs, inputs, group size, dtype, dtype of scales, ordered, bias
    (136, 320, 64, torch.float16, torch.float16, False, False),
    (72, 640, 128, torch.bfloat16, torch.bfloat16, False, True),
    (64, 208, 16, torch.bfloat16, torch.float16, True, False),
    (40, 304, 304, torch.float16, torch.float16, False, True),
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_with_codes(case, rows) -> None:
    *shape, has_bias = case
    matrix, dtype = random_matrix(*shape), shape[3]
    bias = torch.randn(matrix.out_features).to(dtype) if has_bias else None
    x = strided(rows, matrix.in_features, dtype)
    linear = TritonOps(HOST, 80, num_multiprocessors=2).make_quantised_linear(matrix, bias)
    expected = product(x, matrix, bias)
    if rows != 7:
        assert_close(linear(x), expected, dtype)
        return
    out = strided(rows, matrix.out_features, dtype)
    assert linear(x, out=out) is out
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("rows", [3, MOST_QUANTISED_ROWS + 1])
def test_products_with_a_part_whose_groups_are_not_full(rows) -> None:
    matrix = part_of_ordered_matrix(72, 200, 7, torch.float16)
    assert matrix.in_features > 200
    x, bias = strided(rows, 200, torch.float16), torch.randn(72).half()
    linear = TritonOps(HOST, 80, num_multiprocessors=2).make_quantised_linear(matrix, bias)
    assert_close(linear(x), product(x, matrix, bias), torch.float16)


@pytest.mark.parametrize(
    "capability, dtype, rows",
    [(80, torch.float16, MOST_QUANTISED_ROWS + 1), (75, torch.float16, 5), (80, torch.float32, 5)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Triton has no tensor cores")
def test_products_with_the_matrix_written_out(capability, dtype, rows) -> None:
    for ordered in (False, True):
        matrix = random_matrix(136, 160, 32, dtype, torch.float16, ordered)
        x, bias = strided(rows, 160, dtype), torch.randn(136).to(dtype)
        linear = TritonOps(HOST, capability, 2).make_quantised_linear(matrix, bias)
        reference = Ops().make_quantised_linear(matrix, bias)
        assert_close(linear(x), product(x, matrix, bias), dtype)
        assert_close(reference(x), product(x, matrix, bias), dtype)


@pytest.mark.parametrize("capability, dtype", [(75, torch.float16), (80, torch.float32)], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.filterwarnings("ignore:Triton has no tensor cores")
def test_very_few_rows_need_no_written_matrix_without_tensor_cores(capability, dtype, rows, monkeypatch) -> None:
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, lambda *_, name=name, **__: pytest.fail(f"torch.{name} of a written matrix"))
    for ordered in (False, True):
        matrix = random_matrix(136, 304 if ordered else 208, 16, dtype, torch.float16, ordered)
        x, bias = strided(rows, matrix.in_features, dtype), torch.randn(136).to(dtype)
        linear = TritonOps(HOST, capability, 2).make_quantised_linear(matrix, bias)
        assert_close(linear(x), product(x, matrix, bias), dtype)
    part = part_of_ordered_matrix(72, 200, 7, dtype)
    x = strided(rows, 200, dtype)
    assert_close(TritonOps(HOST, capability, 2).make_quantised_linear(part, None)(x), product(x, part, None), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_written_matrix_is_the_reference_to_the_bit(dtype, monkeypatch) -> None:
    matrix = random_matrix(136, 208, 16, dtype, torch.float16)
    written: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "mm", lambda x, dense, out: written.append(dense))
    with pytest.warns(UserWarning, match="2.3 times as long"):
        TritonOps(HOST, 75, 2).make_quantised_linear(matrix, None)(torch.zeros(5, 208, dtype=dtype))
    assert torch.equal(written[0].t(), matrix.dequantise())


def test_no_rows_are_no_work() -> None:
    matrix = random_matrix(24, 128, 32, torch.float16, torch.float16)
    linear = TritonOps(HOST, 80, 2).make_quantised_linear(matrix, None)
    assert linear(torch.empty(0, 128, dtype=torch.float16)).shape == (0, 24)


@pytest.mark.parametrize("blocks, tiles", [(1, 1), (32, 1), (86, 32), (112, 2000)])
def test_splits_are_long_enough_to_pay(blocks, tiles) -> None:
    per_split = blocks_per_split(blocks, tiles, programs=64)
    assert per_split >= MIN_SPLIT_BLOCKS
    assert tiles < 64 or per_split >= blocks
