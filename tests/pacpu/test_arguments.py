"""What a call of paged attention takes and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import pacpu
from tests.pacpu.cases import bits, every_dtype, make_case, reference, use
from tests.reference.tolerances import assert_close


@every_dtype
def test_contiguous_arguments_and_batch_of_none(dtype):
    case = make_case(dtype)
    replace(case, q=case.q.contiguous(), k=case.k.contiguous(), v=case.v.contiguous()).check()
    make_case(dtype, seq_lens=()).check()
    make_case(dtype, seq_lens=(21,)).check()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numpy_arrays_may_be_read_only(dtype):
    case = make_case(torch.from_numpy(np.empty(0, dtype)).dtype)
    expected_cache = case.kv_cache.clone()
    reference.store_new_tokens(case.k, case.v, expected_cache, case.block_tables, case.seq_lens)
    expected = reference.paged_attention(case.q, expected_cache, case.block_tables, case.seq_lens, case.scale)
    inputs = [getattr(case, name).numpy() for name in ("q", "k", "v")]
    tables = [case.block_tables.numpy(), case.seq_lens.numpy()]
    for array in inputs + tables:
        array.setflags(write=False)
    cache, out = case.kv_cache.numpy(), np.full(case.q.shape, np.nan, dtype)
    pacpu.paged_attention(*inputs, cache, *tables, out, case.scale)
    assert_close(torch.from_numpy(out), expected)

    out.setflags(write=False)
    with pytest.raises(ValueError, match="out must be writable"):
        pacpu.paged_attention(*inputs, cache, *tables, out, case.scale)


def changed(tensor: torch.Tensor, index: tuple[int, ...], value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


BAD_ARGUMENTS = {
    "dtype of q": (lambda c: {"q": c.q.double()}, r"q must have dtype .* not float64"),
    "dtype of k": (lambda c: {"k": c.k.bfloat16()}, r"k must have the dtype of q, float16, not bfloat16"),
    "dtype of v": (lambda c: {"v": c.v.float()}, r"v must have the dtype .* not float32"),
    "dtype of kv_cache": (lambda c: {"kv_cache": c.kv_cache.float()}, r"kv_cache .* not float32"),
    "dtype of out": (lambda c: {"out": c.out.float()}, r"out .* not float32"),
    "dtype of block_tables": (lambda c: {"block_tables": c.block_tables.long()}, r"block_tables .* not int64"),
    "dtype of seq_lens": (lambda c: {"seq_lens": c.seq_lens.long()}, r"seq_lens .* not int64"),
    "rank of q": (lambda c: {"q": c.q[0]}, r"q must have shape .* not \[9, 64\]"),
    "rank of kv_cache": (lambda c: {"kv_cache": c.kv_cache[0]}, r"kv_cache must have shape .* not \[3, 2, 16, 64\]"),
    "rank of block_tables": (lambda c: {"block_tables": c.seq_lens}, r"block_tables must have shape .* not \[5\]"),
    "shape of k": (lambda c: {"k": c.k[:, :2]}, r"k must have shape .* = \[5, 3, 64\], not \[5, 2, 64\]"),
    "shape of v": (lambda c: {"v": c.v[:4]}, r"v must have shape .* not \[4, 3, 64\]"),
    "shape of out": (lambda c: {"out": c.out[:4]}, r"out must have shape .* not \[4, 9, 64\]"),
    "shape of seq_lens": (lambda c: {"seq_lens": c.seq_lens[:4]}, r"seq_lens must have shape .* not \[4\]"),
    "shape of kv_cache": (
        lambda c: {"kv_cache": c.kv_cache[:, :, :1].contiguous()},
        r"kv_cache must have shape .* not \[22, 3, 1, 16, 64\]",
    ),
    "rows of block_tables": (
        lambda c: {"block_tables": c.block_tables[:3]},
        r"block_tables must have shape .* not \[3, 11\]",
    ),
    "heads": (lambda c: {"q": c.q[:, :8], "out": c.out[:, :8]}, r"q must have a multiple of .* 3 KV heads, not 8"),
    "head_dim": (lambda c: {"q": c.q[:, :, :60]}, r"q must have a head_dim .* not 60"),
    "strides of q": (
        lambda c: {"q": c.q.transpose(0, 1).contiguous().transpose(0, 1)},
        r"q must be contiguous within a row, but has strides \[64, 320, 1\]",
    ),
    "strides of kv_cache": (
        lambda c: {"kv_cache": c.kv_cache[::2]},
        r"kv_cache must have rows exactly 6144 .* not 12288",
    ),
    "overlapping out": (lambda c: {"out": c.out[:1].expand(5, -1, -1)}, r"out must have rows at least 576 .* not 0"),
    "seq_len of 0": (lambda c: {"seq_lens": changed(c.seq_lens, (2,), 0)}, r"seq_lens\[2\] must be .* not 0"),
    "seq_len too long": (lambda c: {"seq_lens": changed(c.seq_lens, (1,), 177)}, r"seq_lens\[1\] .* 176 .* not 177"),
    "negative block": (
        lambda c: {"block_tables": changed(c.block_tables, (3, 8), -1)},
        r"block_tables\[3, 8\] must be a block id below 22, not -1",
    ),
    "block out of range": (
        lambda c: {"block_tables": changed(c.block_tables, (0, 0), 22)},
        r"block_tables\[0, 0\] must be a block id below 22, not 22",
    ),
    "no array": (lambda c: {"v": [1.0, 2.0]}, r"v must be an array that supports DLPack, not <class 'list'>"),
    "no host memory": (lambda c: {"k": c.k.to("meta")}, r"k "),
    "num_threads of 0": (lambda c: {"num_threads": 0}, r"num_threads must be at least 1, not 0"),
    "num_threads no number": (lambda c: {"num_threads": "many"}, r"num_threads cannot be 'many'"),
    "scale no number": (lambda c: {"scale": None}, r"scale cannot be None"),
    "window of 0": (lambda c: {"window": 0}, r"window must be at least 1, not 0"),
    "window no number": (lambda c: {"window": "wide"}, r"window cannot be 'wide'"),
    "dtype of sinks": (lambda c: {"sinks": torch.zeros(9).half()}, r"sinks must have dtype float32, not float16"),
    "shape of sinks": (lambda c: {"sinks": torch.zeros(3)}, r"sinks must have shape \[num_heads\] = \[9\], not \[3\]"),
    "strides of sinks": (lambda c: {"sinks": torch.zeros(18)[::2]}, r"sinks must have rows exactly 1 .* not 2"),
    "block in the window": (
        lambda c: {"window": 64, "block_tables": changed(c.block_tables, (3, 4), -1)},
        r"block_tables\[3, 4\] must be a block id below 22, not -1",
    ),
    "unknown kernel": (lambda c: {"kernel": "magic"}, r"kernel 'magic' is unknown; available: native"),
}


@pytest.mark.parametrize("problem", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_before_anything_is_written(problem):
    case = make_case(torch.float16)
    change, message = BAD_ARGUMENTS[problem]
    arguments = vars(case) | change(case)
    before = bits(case.kv_cache).clone()
    with pytest.raises(ValueError, match=message):
        pacpu.paged_attention(**arguments)
    assert torch.equal(bits(case.kv_cache), before)
    assert case.out.isnan().all()


def test_kernels_are_listed_with_reasons():
    assert pacpu.kernels()[0] == "native"
    assert not set(pacpu.kernels()) & set(pacpu.unavailable())
    assert all(pacpu.unavailable().values())
    for dtype in (torch.float16, "bfloat16", np.dtype(np.float32)):
        assert pacpu.default_kernel(dtype) in pacpu.kernels()
    with pytest.raises(ValueError, match="int8"):
        pacpu.default_kernel("int8")


def test_unavailable_kernel_is_refused_with_the_reason():
    use("portable", "native")
    with pytest.raises(ValueError, match=r"kernel 'ispc' is unavailable: .+"):
        make_case(torch.float16).run(kernel="ispc")
