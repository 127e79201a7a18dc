"""Readers against unpackers that share nothing with them, to the bit; and against the packer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
import quantise
import torch

from swiftllm.model.quantisation import AWQ, COMPRESSED_TENSORS, GPTQ, MXFP4, QuantisationScheme
from swiftllm.model.quantised_weights import FusedTarget, StoredMatrix, input_order, open_matrix, sort_into_runs
from swiftllm.model.weight_memory import PackedTensor, in_chunks, map_tensors
from swiftllm.ops.matrices import QuantisedMatrix
from tests.swiftllm.model.weights.quantised import unpackers

SHAPES = [(24, 64, 32), (8, 160, 16), (40, 144, None), (16, 256, 128)]  # outputs, inputs, group size
DTYPES = [(torch.float16, torch.float32), (torch.bfloat16, torch.float16), (torch.float16, torch.float16)]


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def scales(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(rows, columns) * 0.1 + 0.001).to(dtype)


def shuffled_groups(in_features: int, group_size: int) -> torch.Tensor:
    return (torch.arange(in_features) // group_size)[torch.randperm(in_features)].int()


def read(scheme: QuantisationScheme, tensors, shape, dtype: torch.dtype = torch.float32) -> QuantisedMatrix:
    stored = open_matrix(scheme, tensors, shape[0], shape[1], dtype)
    made: list[QuantisedMatrix] = []
    FusedTarget({"module": shape[0]}, shape[1], shape[1], poisoned, made.append, "cpu").add("module", stored)
    return made[0]


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), -1 if dtype is torch.int32 else 77, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale_dtype, dtype", DTYPES, ids=str)
def test_awq(shape, scale_dtype, dtype) -> None:
    out, inputs, group_size = shape
    groups = inputs // (group_size or inputs)
    tensors = {
        "qweight": words(inputs, out // 8),
        "qzeros": words(groups, out // 8),
        "scales": scales(groups, out, scale_dtype),
    }
    matrix = read(QuantisationScheme(AWQ, group_size), tensors, shape, dtype)
    assert torch.equal(matrix.dequantise(), unpackers.awq(tensors, group_size or inputs).to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq(shape, version, ordered) -> None:
    out, inputs, group_size = shape
    size = group_size or inputs
    groups = inputs // size
    tensors = {
        "qweight": words(inputs // 8, out),
        "qzeros": words(groups, out // 8),
        "scales": scales(groups, out, torch.float16),
        "g_idx": shuffled_groups(inputs, size) if ordered else torch.arange(inputs, dtype=torch.int32) // size,
    }
    matrix = read(QuantisationScheme(GPTQ, group_size, ordered=ordered, zero_offset=2 - version), tensors, shape)
    assert torch.equal(matrix.dequantise(), unpackers.gptq(tensors, plus_one=version == 1))
    assert (matrix.order is not None) == (ordered and groups > 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_compressed_tensors(shape, symmetric, ordered) -> None:
    out, inputs, group_size = shape
    size = group_size or inputs
    tensors = {
        "weight_packed": words(out, inputs // 8),
        "weight_scale": scales(out, inputs // size, torch.bfloat16),
        "weight_shape": torch.tensor([out, inputs]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(out // 8, inputs // size)
    if ordered:
        tensors["weight_g_idx"] = shuffled_groups(inputs, size)
    scheme = QuantisationScheme(COMPRESSED_TENSORS, group_size, ordered=ordered, symmetric=symmetric)
    assert torch.equal(read(scheme, tensors, shape).dequantise(), unpackers.compressed_tensors(tensors, size))


@pytest.mark.parametrize("symmetric", [False, True])
def test_compressed_tensors_equals_its_own_library(symmetric) -> None:
    pack_quantized = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    module = {"weight": torch.randn(24, 96), "weight_scale": scales(24, 3, torch.float32) + 0.1}
    if not symmetric:
        module["weight_zero_point"] = torch.randint(-8, 8, (24, 3), dtype=torch.int8)
    compressor = pack_quantized.PackedQuantizationCompressor
    packed = compressor.compress(module, scheme)
    ours = read(QuantisationScheme(COMPRESSED_TENSORS, 32, symmetric=symmetric), packed, (24, 96))
    assert torch.equal(ours.dequantise(), compressor.decompress(packed, scheme)["weight"])


@pytest.mark.parametrize("offset", [0, 1])
def test_symmetric_zero_points_tell_a_mislabelled_version(offset) -> None:
    """The zero point is 8 whatever config.json says, if all stored ones are 7 or all are 8."""
    stored = int.from_bytes(bytes([(8 - offset) * 0x11] * 4), "little")
    tensors = {
        "qweight": words(8, 16),
        "qzeros": torch.tensor([[stored, stored]], dtype=torch.int64).to(torch.int32),
        "scales": scales(1, 16, torch.float16),
        "g_idx": torch.zeros(64, dtype=torch.int32),
    }
    for label in (0, 1):
        matrix = read(QuantisationScheme(GPTQ, 64, symmetric=True, zero_offset=label), tensors, (16, 64))
        assert (matrix.zeros == 8).all()
    asymmetric = read(QuantisationScheme(GPTQ, 64, zero_offset=1 - offset), tensors, (16, 64))
    assert (asymmetric.zeros == 9 - 2 * offset).all()


@pytest.mark.parametrize(
    "layout, act_order",
    [("awq", False), *product(("gptq", "gptq-v2", "compressed-tensors"), (False, True))],
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_what_the_packer_writes_is_read(layout, symmetric, act_order, tmp_path) -> None:
    weight = torch.randn(24, 96)
    weight[3] = 0
    packed = quantise.quantise(weight, 32, symmetric, act_order)
    config = {"quantization_config": quantise.quantisation_config(layout, 32, symmetric, act_order)}
    scheme = QuantisationScheme.from_config(config, tmp_path)
    matrix = read(scheme, quantise.pack(packed, layout, symmetric, act_order), (24, 96))
    assert torch.equal(matrix.dequantise(), packed.dequantise())
    largest_step = packed.scales.float().max() * 1.01
    assert (matrix.dequantise() - weight).abs().max() <= largest_step
    assert not matrix.dequantise()[3].any()


def stored_part(outputs: int, order: torch.Tensor | None, group_size: int = 32) -> tuple[StoredMatrix, torch.Tensor]:
    """A part with 64 inputs, and what it is."""
    codes = torch.randint(16, (64, outputs), dtype=torch.uint8)
    zeros = torch.randint(16, (64 // group_size, outputs), dtype=torch.uint8)
    step = scales(64 // group_size, outputs, torch.float16)
    whole = QuantisedMatrix.from_codes(codes, step, zeros, group_size, torch.float32, order)
    args = step, zeros, group_size, torch.float32, order, None, lambda wanted: codes[:, wanted]
    return StoredMatrix(outputs, 64, *args), whole.dequantise()


def put_together(parts: Sequence[torch.Tensor | StoredMatrix], sizes: Sequence[int], is_packed: bool):
    """What a place puts that gets the parts in any order."""
    made = []
    pinned = in_chunks(lambda n: torch.full((n,), 255, dtype=torch.uint8), 100)
    modules = {str(i): size for i, size in enumerate(sizes)}
    target = FusedTarget(modules, 64, 64, pinned if is_packed else poisoned, made.append, "cpu")
    for index, part in enumerate(parts):
        plain = isinstance(part, torch.Tensor)
        order = None if plain or part.order is None else tuple(part.order.tolist())
        target.kinds[str(index)].add(("plain",) if plain else (order, part.group_size))
    for index in random.sample(range(len(parts)), len(parts)):
        assert not made
        target.add(str(index), parts[index])
    (matrix,) = made
    return map_tensors(matrix, in_one_piece)


def in_one_piece(tensor: torch.Tensor | PackedTensor) -> torch.Tensor:
    if isinstance(tensor, torch.Tensor):
        return tensor
    return torch.cat(list(tensor.chunks))[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("is_packed", [False, True])
def test_parts_are_fused_if_they_have_one_order_of_inputs(is_packed) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    random.seed(seed)
    torch.manual_seed(seed)
    one, other = (torch.randperm(64).int() for _ in range(2))
    sizes = [random.choice((8, 24, 136)) for _ in range(3)]
    plain = [(torch.randn(size, 64),) * 2 for size in sizes]
    for orders in ([None] * 3, [one, one.clone(), one]):
        parts = [stored_part(size, order) for size, order in zip(sizes, orders, strict=True)]
        fused = put_together([part for part, _ in parts], sizes, is_packed)
        assert torch.equal(fused.dequantise(), torch.cat([expected for _, expected in parts]))
    assert torch.equal(put_together([x for x, _ in plain], sizes, is_packed), torch.cat([x for x, _ in plain]))
    apart = (
        [stored_part(sizes[0], one), stored_part(sizes[1], one), stored_part(sizes[2], other)],
        [stored_part(sizes[0], one), stored_part(sizes[1], None), stored_part(sizes[2], None)],
        [stored_part(sizes[0], None), stored_part(sizes[1], None, 64), stored_part(sizes[2], None)],
        [stored_part(sizes[0], None), plain[1], stored_part(sizes[2], None)],
        [*plain[:2], stored_part(sizes[2], None)],
    )
    for parts in apart:
        found = put_together([part for part, _ in parts], sizes, is_packed)
        for matrix, (_, expected) in zip(found, parts, strict=True):
            own = matrix if isinstance(matrix, torch.Tensor) else matrix.dequantise()
            assert torch.equal(own, expected)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scales": torch.ones(3, 16)}, r"scales has shape \[3, 16\].*asks for \[2, 16\]"),
        ({"g_idx": torch.zeros(64, dtype=torch.int32)}, "g_idx does not put 32 inputs into each group"),
    ],
)
def test_damaged_tensors_are_named(change, message) -> None:
    tensors = {"qweight": words(8, 16), "qzeros": words(2, 2), "scales": torch.ones(2, 16)}
    with pytest.raises(ValueError, match=message):
        read(QuantisationScheme(GPTQ, 32, ordered=True), tensors | change, (16, 64))


def test_inputs_of_any_groups_are_sorted_into_runs_of_one_group() -> None:
    """A part of a matrix in activation order: its groups are not full. Each input counts once, with its own group."""
    torch.manual_seed(0)
    groups, inputs = torch.tensor([2, 0, 2, 3, 0, 2] * 8 + [3] * 5), 53
    codes, zeros = (torch.arange(16)[torch.randint(16, (n, 7))].to(torch.uint8) for n in (inputs, 5))
    step = scales(5, 7, torch.float16)
    found, order, runs = sort_into_runs(codes, zeros, groups)
    assert runs.tolist() == [0, 2, 2, 3]  # 16, 24 and 13 inputs in runs of 16
    matrix = QuantisedMatrix.from_codes(found, step, zeros, 16, torch.float32, order, runs)
    products = torch.eye(inputs)[:, order.long()] @ matrix_by_columns(matrix)
    expected = (codes.float() - zeros[groups].float()) * step[groups].float()
    assert torch.equal(products, expected)
    with pytest.raises(ValueError, match="a group beyond the 5 that there are"):
        sort_into_runs(codes, zeros, groups + 3)


def matrix_by_columns(matrix: QuantisedMatrix) -> torch.Tensor:
    """float32 ``[in, out]`` by the formula, in the order of the codes."""
    groups = matrix.runs.long().repeat_interleave(16)
    return (matrix.unpack().float() - matrix.zeros[groups].float()) * matrix.scales[groups].float()


def test_inputs_in_act_order_fill_whole_groups_that_begin_where_a_part_begins() -> None:
    """The groups of a part of an input-divided matrix are numbered as in the whole one."""
    shuffled = torch.tensor([0, 1] * 32)
    for first in (0, 2, 8):
        assert input_order(first + torch.arange(64) // 32, 32) is None
        order = input_order(first + shuffled, 32)
        assert order.tolist() == [*range(0, 64, 2), *range(1, 64, 2)]
    for damaged in (1 + shuffled, 3 + torch.arange(64) // 32, torch.ones(64, dtype=torch.int64)):
        with pytest.raises(ValueError, match="does not put 32 inputs into each group"):
            input_order(damaged, 32)


def test_a_group_below_the_first_is_refused() -> None:
    codes, zeros = torch.zeros(32, 4, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a group beyond the 2 that there are"):
        sort_into_runs(codes, zeros, torch.tensor([0] * 31 + [-1]))


def test_every_exponent_of_mxfp4_but_nan_is_read() -> None:
    """OCP's MX formats: a scale of E8M0 is 2^(s - 127), and 255 is NaN."""
    blocks = torch.zeros(2, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0x21  # 0.5 and 1
    exponents = torch.tensor([[254, 0], [127, 1]], dtype=torch.uint8)
    matrix = read(QuantisationScheme(MXFP4, 32), {"blocks": blocks, "scales": exponents}, (2, 64))
    assert matrix.dequantise()[0, :3].tolist() == [2.0**126, 2.0**127, 0]
    exponents[1, 1] = 255
    with pytest.raises(ValueError, match="scales hold NaN"):
        read(QuantisationScheme(MXFP4, 32), {"blocks": blocks, "scales": exponents}, (2, 64))


def test_an_mxfp4_matrix_is_scaled_by_its_exponents_as_far_as_they_reach() -> None:
    tensors = {"blocks": torch.zeros(1, 4, 16, dtype=torch.uint8), "scales": torch.tensor([[0, 1, 127, 254]]).byte()}
    stored = open_matrix(QuantisationScheme(MXFP4, 32), tensors, 1, 128, torch.float32)
    for factor, exponents in ((0.5, [0, 0, 126, 253]), (2.0, [1, 2, 128, 254]), (1.0, [0, 1, 127, 254])):
        assert stored.scaled(factor).scales.flatten().tolist() == exponents


def test_any_outputs_of_heads_in_another_order_are_those_of_the_whole() -> None:
    """A slice may begin within a head, and a head within a word of codes."""
    torch.manual_seed(0)
    for head_dim, outputs in ((24, 48), (20, 40), (8, 40)):
        order = torch.randperm(head_dim)
        stored, whole = stored_part(outputs, None)
        moved = torch.cat([first + order for first in range(0, outputs, head_dim)])
        ordered, codes = stored.with_heads_ordered(order), stored.codes_of(slice(0, outputs))
        for first in range(0, outputs, 8):
            for last in range(first + 8, outputs + 1, 8):
                assert torch.equal(ordered.codes_of(slice(first, last)), codes[:, moved[first:last]])
        expected = put_together([ordered], [outputs], is_packed=False).dequantise()
        assert torch.equal(expected, whole[moved])
