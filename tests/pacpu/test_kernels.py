"""What sets the kernels apart: what each refuses, where it changes course, and how they are chosen and measured."""

import numpy as np
import pytest
import torch

import pacpu
from tests.pacpu.cases import ISAS, make_case, use

LLAMAFILE_DTYPES = [torch.float16, torch.float32]
LLAMAFILE_ISAS = ISAS[1:]


def test_default_is_the_first_kernel_of_the_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert pacpu.default_kernel(dtype) == pacpu.kernels(dtype)[0]
        assert set(pacpu.kernels(dtype)) <= set(pacpu.kernels())
    with pytest.raises(ValueError, match="int8"):
        pacpu.kernels("int8")


@pytest.mark.parametrize("isa", LLAMAFILE_ISAS)
def test_llamafile_refuses_bfloat16_with_the_reason(isa):
    use(isa, "llamafile")
    assert "llamafile" in pacpu.kernels("float16") and "llamafile" not in pacpu.kernels("bfloat16")
    case = make_case(torch.bfloat16)
    with pytest.raises(ValueError, match=r"'llamafile' does not compute in bfloat16: .*matrix product"):
        case.run(kernel="llamafile")
    assert case.out.isnan().all()


@pytest.mark.parametrize("isa", LLAMAFILE_ISAS)
@pytest.mark.parametrize("dtype", LLAMAFILE_DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 16, 100])
def test_llamafile_contexts_of_several_chunks(isa, dtype, block_size):
    """Lengths about one, two and more chunks of tokens; a chunk may begin and end within a block."""
    use(isa, "llamafile", dtype)
    seq_lens = (1, 255, 256, 257, 511, 513, 700, 1300)
    case = make_case(dtype, num_heads=4, num_kv_heads=1, head_dim=40, block_size=block_size, seq_lens=seq_lens)
    case.check(kernel="llamafile")
    case.check(kernel="llamafile", num_threads=3)


@pytest.mark.parametrize("isa", LLAMAFILE_ISAS)
def test_llamafile_many_query_heads_and_wide_heads(isa):
    """More query heads than one pass takes, and more dimensions than are transposed at once."""
    use(isa, "llamafile")
    make_case(torch.float16, num_heads=35, num_kv_heads=1, head_dim=264, seq_lens=(300, 17)).check(kernel="llamafile")


def test_read_bandwidth_counts_bytes():
    array = np.ones(1 << 20)
    for num_threads in (1, 2, 300):
        assert 1e8 < pacpu.read_bandwidth(array, num_threads=num_threads) < 1e13
    assert pacpu.read_bandwidth(torch.ones(3, 5, dtype=torch.bfloat16)) > 0


@pytest.mark.parametrize(
    ("array", "num_threads", "message"),
    [
        (np.ones((4, 4)).T, 1, "contiguous"),
        (np.ones((4, 4))[::2], 1, "rows exactly 4"),
        (np.float32(1.0), 1, "DLPack|dimension"),
        ([1.0], 1, "DLPack"),
        (np.ones(4), 0, "num_threads must be at least 1, not 0"),
        (np.ones(4), "two", "num_threads cannot be 'two'"),
    ],
)
def test_read_bandwidth_refuses(array, num_threads, message):
    with pytest.raises(ValueError, match=message):
        pacpu.read_bandwidth(array, num_threads=num_threads)
