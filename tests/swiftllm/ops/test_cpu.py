"""The CPU's operations against those in plain torch, whichever way this CPU multiplies fastest."""

import pytest
import torch

import pacpu
from pacpu import rows
from swiftllm.model.quantised_weights import sort_into_runs
from swiftllm.ops import cpu, interface
from swiftllm.ops.cpu import CpuOps, torch_threads
from swiftllm.ops.interface import CrossingParts, Linear, Ops
from swiftllm.ops.matrices import QuantisedMatrix
from tests.reference.paged_attention import attend_chunk
from tests.reference.tolerances import TOLERANCES, assert_close

every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
HAS_WIDE_VECTORS = pacpu.isa() not in ("portable", "avx2")


@every_dtype
@pytest.mark.parametrize(
    "widens", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_WIDE_VECTORS, reason="AVX-512"))]
)
@pytest.mark.parametrize("gpu_batch_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 33])
def test_layers_like_torch(monkeypatch, dtype, widens, gpu_batch_threads, num_rows):
    torch.manual_seed(0)
    monkeypatch.setattr(rows, "linear_is_fastest", lambda: widens)
    ours, reference = CpuOps(num_threads=gpu_batch_threads), Ops()
    x, residual = (torch.randn(num_rows, 70).to(dtype) for _ in range(2))
    weight, bias, norm = torch.randn(60, 70).to(dtype) / 8, torch.randn(60).to(dtype), torch.randn(70).to(dtype)
    for b in (None, bias):
        assert_close(ours.make_linear(weight, b)(x), reference.make_linear(weight, b)(x))
    assert_close(ours.rms_norm(x, norm, 1e-5), reference.rms_norm(x, norm, 1e-5))
    mine, torchs = residual.clone(), residual.clone()
    assert_close(ours.add_rms_norm_(mine, x, norm, 1e-5), reference.add_rms_norm_(torchs, x, norm, 1e-5))
    assert_close(mine, torchs)
    heads, weights = torch.randn(num_rows, 5, 14).to(dtype), torch.randn(5, 14).to(dtype)
    mine, torchs = heads.clone(), heads.clone()
    ours.norm_heads_(mine, weights, 1e-5)
    reference.norm_heads_(torchs, weights, 1e-5)
    assert_close(mine, torchs)
    assert_close(ours.silu_and_mul(x), reference.silu_and_mul(x))
    q, k, v = torch.randn(num_rows, 4, 8).to(dtype), *torch.randn(2, 2, num_rows + 3, 8).to(dtype)
    for qkv in ((q, k, v, 0.3), (q, k[:, :num_rows], v[:, :num_rows], 0.3)):
        assert_close(attend_chunk(ours, *qkv), attend_chunk(reference, *qkv))


@pytest.mark.parametrize("ops", [Ops(), CpuOps(num_threads=2)], ids=["torch", "pacpu"])
def test_residuals_in_float32_have_norms_in_float16(ops: Ops) -> None:
    torch.manual_seed(0)
    x, residual, norm = torch.randn(9, 70).half() * 1e4, torch.randn(9, 70) * 2e5, torch.randn(70).half()
    expected_sum = residual.double() + x.double()
    expected = [Ops().rms_norm(rows, norm.double(), 1e-5) for rows in (residual.double(), expected_sum)]
    normed = ops.rms_norm(residual, norm, 1e-5), ops.add_rms_norm_(residual, x, norm, 1e-5)
    for made, wanted in zip(normed, expected, strict=True):
        assert made.dtype is torch.float16
        torch.testing.assert_close(made.double(), wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(residual.double(), expected_sum, rtol=1e-6, atol=0.0)
    alone = ops.rms_norm(residual[4:5], norm, 1e-5)
    assert torch.equal(alone, ops.rms_norm(residual, norm, 1e-5)[4:5])  # whatever rows come with it


def quantised(out_features: int, in_features: int, dtype: torch.dtype, is_ordered: bool = False) -> QuantisedMatrix:
    codes = torch.randint(16, (in_features, out_features), dtype=torch.uint8)
    scales = (torch.rand(in_features // 16, out_features) / 8 / in_features**0.5).half()
    zeros = torch.randint(16, scales.shape, dtype=torch.uint8)
    order = torch.randperm(in_features, dtype=torch.int32) if is_ordered else None
    return QuantisedMatrix.from_codes(codes, scales, zeros, 16, dtype, order)


@every_dtype
@pytest.mark.parametrize("writes_out", [False, True])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_4_bit_linears_like_torch_on_dequantised_weights(monkeypatch, dtype, writes_out, is_ordered):
    print("seed", torch.seed())
    monkeypatch.setattr(cpu, "pacpu_multiplies", lambda dtype: not writes_out)
    monkeypatch.setattr(cpu, "onednn_packs", lambda dtype: writes_out)
    monkeypatch.setattr(cpu, "WRITE_OUT_ROWS", 7)
    written = []
    write_out = rows.PackedCodes.write_out
    monkeypatch.setattr(
        rows.PackedCodes, "write_out", lambda self, out, **how: written.append(len(out)) or write_out(self, out, **how)
    )
    matrix, bias = quantised(60, 176, dtype, is_ordered), torch.randn(60).to(dtype)
    for b in (None, bias):
        linear = CpuOps(num_threads=2).make_quantised_linear(matrix, b)
        expected = Ops().make_linear(matrix.dequantise().double(), None if b is None else b.double())
        for num_rows in (0, 1, 2, 7, 16, 33, 128):
            x = torch.randn(num_rows, 200).to(dtype)[:, 24:]  # rows lie apart
            assert_close(linear(x), expected(x.double()))
    assert len(written) == (6 if writes_out and dtype is not torch.float32 else 0)


@every_dtype
@pytest.mark.parametrize("most_rows", [0, 128])
def test_4_bit_linears_of_a_part_whose_groups_are_not_full(monkeypatch, dtype, most_rows):
    """As a rank has it of a matrix with act-order; above ``most_rows`` it may be written out."""
    print("seed", torch.seed())
    monkeypatch.setattr(cpu, "onednn_packs", lambda dtype: True)
    monkeypatch.setattr(cpu, "pacpu_multiplies", lambda dtype: False)
    monkeypatch.setattr(cpu, "WRITE_OUT_ROWS", most_rows)
    zeros, scales = torch.randint(16, (5, 60), dtype=torch.uint8), (torch.rand(5, 60) / 100).half()
    codes = torch.randint(16, (176, 60), dtype=torch.uint8)
    codes, order, runs = sort_into_runs(codes, zeros, torch.randint(4, (176,)))
    matrix = QuantisedMatrix.from_codes(codes, scales, zeros, 64, dtype, order, runs)
    linear = CpuOps(num_threads=2).make_quantised_linear(matrix, bias := torch.randn(60).to(dtype))
    for num_rows in (0, 1, 33):
        x = torch.randn(num_rows, 200).to(dtype)[:, 24:]
        assert_close(linear(x), x.double() @ matrix.dequantise().double().t() + bias.double())


def test_a_4_bit_linear_holds_codes_scales_and_zeros_alone():
    for is_ordered in (False, True):
        matrix = quantised(64, 256, torch.bfloat16, is_ordered)
        linear = CpuOps().make_quantised_linear(matrix, None)
        tensors = [*linear.arrays, *([] if linear.order is None else [linear.order])]
        assert sum(tensor.nbytes for tensor in tensors) == matrix.nbytes


@pytest.mark.parametrize(
    "multiplies", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_WIDE_VECTORS, reason="AVX-512"))]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_quantised", [False, True])
def test_a_crossing_in_one_call_where_pacpu_multiplies(monkeypatch, multiplies, dtype, is_quantised):
    print("seed", torch.seed())
    monkeypatch.setattr(rows, "linear_is_fastest", lambda: multiplies)
    ops = CpuOps(num_threads=2)
    norm = torch.randn(32).to(dtype)

    def linear(out_features: int, in_features: int) -> Linear:
        if is_quantised and out_features != 64:  # that of the vocabulary is not
            return ops.make_quantised_linear(quantised(out_features, in_features, dtype, in_features == 48), None)
        return ops.make_linear((torch.randn(out_features, in_features) / 6).to(dtype), None)

    heads = {"head_norms": torch.randn(6, 8).to(dtype), "rotated_heads": 6, "head_dim": 8}
    parts = CrossingParts(linear(32, 32), norm, linear(96, 32), linear(32, 48), norm, linear(64, 32), **heads, eps=1e-5)
    crossing = ops.make_crossing(parts)
    assert (crossing is not None) == (multiplies and dtype is torch.bfloat16)
    if crossing is None:
        return
    attention_out, residual = torch.randn(2, 17, 32).to(dtype)
    mine, expected = residual.clone(), residual.clone()
    angles = torch.randn(17, 2, 8)
    out = crossing(attention_out, mine, angles)
    normed = ops.add_rms_norm_(expected, parts.o(attention_out), norm, 1e-5)
    normed = ops.add_rms_norm_(expected, parts.down(ops.silu_and_mul(parts.gate_up(normed))), norm, 1e-5)
    qkv = parts.projection(normed)
    ops.norm_heads_(qkv.view(17, 8, 8)[:, :6], parts.head_norms, 1e-5)
    ops.rotary_(qkv.view(17, 8, 8)[:, :6], angles)
    assert torch.equal(out, qkv) and torch.equal(mine, expected)


@pytest.mark.parametrize("rows", [200, 193, 192, 33])
def test_a_large_mask_is_taken_in_pieces(monkeypatch, rows):
    torch.manual_seed(0)
    ops, context, sizes = Ops(), 210, []
    q, (k, v) = torch.randn(rows, 4, 8), torch.randn(2, 2, context, 8)
    whole = attend_chunk(ops, q, k, v, 0.3)
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, *rest, **how: sizes.append(q.shape[2]) or attention(q, *rest, **how),
    )
    monkeypatch.setattr(interface, "MASK_ELEMENTS_AT_ONCE", 64 * context)
    torch.testing.assert_close(attend_chunk(ops, q, k, v, 0.3), whole, rtol=1e-5, atol=1e-6)
    assert max(sizes) <= 64 and sum(sizes) == rows


def test_torch_leaves_the_cores_to_pacpu_where_that_multiplies(monkeypatch):
    monkeypatch.setattr(rows, "linear_is_fastest", lambda: True)
    assert [torch_threads(dtype, 2) for dtype in (torch.bfloat16, torch.float16, torch.float32)] == [1, 2, 2]
    monkeypatch.setattr(rows, "linear_is_fastest", lambda: False)
    assert torch_threads(torch.bfloat16, 2) == 2
