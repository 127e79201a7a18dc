"""Products with packed 4-bit matrices, in every element type and instruction set, against float64."""

import pytest
import torch
import torch.nn.functional as F

from pacpu import _pacpu, rows
from tests.pacpu.cases import BEST_ISA, DTYPES, ISAS
from tests.pacpu.packed_codes import NUMBERS, random_matrix
from tests.pacpu.test_rows import Rows, use

every_isa = pytest.mark.parametrize("isa", ISAS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = {  # inputs, outputs, inputs in a group
    "one run": (16, 3, 16),
    "groups of a run, more than a stretch": (1200, 17, 16),
    "groups of three runs": (1104, 9, 48),
    "blocks in part": (576, 50, 32),
    "groups of half a block": (576, 97, 64),
    "whole blocks": (256, 16, 128),
    "one group": (1168, 24, 1168),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


@pytest.fixture(autouse=True)
def new_draws_and_best_isa():
    print("seed", torch.seed())
    yield
    _pacpu.select_isa(BEST_ISA)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


@every_isa
@every_dtype
@every_shape
def test_elements_are_rounded_once(isa, dtype, shape):
    use(isa)
    in_features, out_features, group_size = shape
    for scale_dtype in (*DTYPES, torch.uint8):
        matrix = random_matrix(out_features, in_features, group_size, dtype, scale_dtype, is_ordered=True)
        memory = torch.full((out_features + 2, in_features), torch.nan, dtype=dtype)
        out = memory[1:-1]
        matrix.packed.write_out(out, num_threads=2)
        assert torch.equal(bits(out), bits(matrix.in_order))
        assert memory[[0, -1]].isnan().all(), "something was written beside the matrix"


@every_isa
@every_dtype
@every_shape
@pytest.mark.parametrize("is_ordered", [False, True], ids=["as they are", "ordered"])
def test_products(isa, dtype, shape, is_ordered):
    use(isa)
    in_features, out_features, group_size = shape
    matrix = random_matrix(out_features, in_features, group_size, dtype, is_ordered=is_ordered)
    bias = torch.randn(out_features).to(dtype)
    for num_rows, num_threads in ((0, 1), (1, 3), (2, 1), (7, 2), (16, 1), (33, 3), (128, 1)):
        x = Rows.random(num_rows, in_features, dtype=dtype)
        for own in (None, bias):
            out = Rows(num_rows, out_features, dtype=dtype)
            matrix.packed.linear(x, own, out.view, num_threads=num_threads)
            out.check(F.linear(x.double(), matrix.weight.double(), None if own is None else own.double()))


@every_isa
@every_dtype
def test_products_multiply_rounded_elements(isa, dtype):
    """The difference of two elements shows bits that rounding a product would hide."""
    use(isa)
    for matrix in (random_matrix(40, 320, 32, dtype), random_matrix(40, 320, 32, dtype, torch.uint8)):
        x = torch.zeros(12, 320, dtype=dtype)
        for row in x:
            row[torch.randperm(320)[:2]] = torch.tensor([1.0, -1.0], dtype=dtype)
        expected = F.linear(x.double(), matrix.weight.double()).to(dtype)
        for some, right in zip((x, *x.split(1)), (expected, *expected.split(1)), strict=True):
            out = torch.full_like(right, torch.nan)
            matrix.packed.linear(some, None, out)
            assert torch.equal(out, right)


@every_isa
@every_dtype
def test_a_row_does_not_depend_on_its_neighbours(isa, dtype):
    """With more rows than are multiplied at a time, and than are brought into the order of codes at a time."""
    use(isa)
    matrix = random_matrix(20, 1040, 16, dtype, is_ordered=True)
    x, together, alone = torch.randn(530, 1040).to(dtype), *torch.full((2, 530, 20), torch.nan, dtype=dtype)
    matrix.packed.linear(x, None, together, num_threads=3)
    for row in range(len(x)):
        matrix.packed.linear(x[row : row + 1], None, alone[row : row + 1])
    assert torch.equal(together, alone)


@every_isa
@every_dtype
def test_infinite_scales_spoil_their_outputs_alone(isa, dtype):
    use(isa)
    matrix = random_matrix(8, 32, 32, dtype)
    scales = torch.ones(1, 1, 8)
    scales[0, 0, 3] = torch.inf
    arrays = torch.full((1, 1, 8, 16), 0x33333333, dtype=torch.int32), scales, torch.ones(1, 1, 8, dtype=torch.uint8)
    matrix = rows.PackedCodes(*arrays, None, out_features=8, in_features=32)
    for num_rows in (1, 5):
        out = torch.empty(num_rows, 8, dtype=dtype)
        matrix.linear(torch.ones(num_rows, 32, dtype=dtype), None, out)
        assert not out[:, 3].isfinite().any()
        assert (out[:, [0, 1, 2, 4, 5, 6, 7]] == 64).all()


@every_isa
def test_every_code_and_scale_of_mxfp4(isa):
    """Also the lowest scale, whose power of two is no normal number, and NaN."""
    use(isa)
    words = torch.arange(16).repeat(16, 1).int()  # of a shift: input i has code i
    codes = (words * 0x01111111 | (words << 28))[:8].expand(32, 1, 8, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(32, 1, 8)
    matrix = rows.PackedCodes(codes, scales, None, None, out_features=256, in_features=128)
    for dtype in DTYPES:
        out = torch.empty(256, 128, dtype=dtype)
        matrix.write_out(out)
        expected = NUMBERS.repeat(8) * 2.0 ** (torch.arange(255)[:, None] - 127)
        assert torch.equal(bits(out[:255]), bits(expected.to(dtype)))
        assert out[255].isnan().all()


CODES = torch.zeros(1, 1, 8, 16, dtype=torch.int32)
SCALES, ZEROS = torch.ones(1, 2, 8), torch.zeros(1, 2, 8, dtype=torch.uint8)
ORDER = torch.arange(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"codes": CODES.long()}, "codes must have dtype int32, not int64"),
        ({"codes": CODES[..., :8]}, "codes must have shape"),
        ({"codes": CODES.expand(2, 1, 8, 16)[:1, :, ::2]}, "codes must have shape"),
        ({"codes": torch.zeros(1, 1, 16, 8, dtype=torch.int32).transpose(2, 3)}, "codes must be contiguous"),
        ({"scales": SCALES.double()}, "scales must have dtype"),
        ({"scales": SCALES[0]}, "scales must have shape"),
        ({"scales": torch.ones(1, 3, 8), "zeros": ZEROS.new_zeros(1, 3, 8)}, "3 groups do not cut 64 inputs"),
        ({"scales": torch.ones(1, 8, 8), "zeros": ZEROS.new_zeros(1, 8, 8)}, "8 groups do not cut 64 inputs"),
        ({"scales": torch.ones(1, 0, 8), "zeros": ZEROS.new_zeros(1, 0, 8)}, "0 groups do not cut 64 inputs"),
        ({"zeros": ZEROS.char()}, "zeros must have dtype uint8, not int8"),
        ({"zeros": None}, "scales without zeros must have dtype uint8, not float32"),
        ({"zeros": ZEROS[:, :1]}, "zeros must have shape"),
        ({"order": ORDER[:5]}, "order must have shape"),
        ({"order": ORDER.long()}, "order must have dtype int32"),
        ({"order": ORDER + 1}, r"order\[63\] must be below 64, not 64"),
        ({"out_features": 9}, "codes must have shape"),
        ({"in_features": 0}, "in_features must be at least 1, not 0"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(wrong, message):
    fitting = {"codes": CODES, "scales": SCALES, "zeros": ZEROS, "order": None, "out_features": 8, "in_features": 64}
    with pytest.raises(ValueError, match=message):
        rows.PackedCodes(**fitting | wrong)


def test_rows_that_do_not_fit_are_refused():
    matrix = rows.PackedCodes(CODES, SCALES, ZEROS, ORDER, out_features=7, in_features=64)
    fitting = {"x": torch.ones(2, 64), "bias": None, "out": torch.ones(2, 7)}
    for wrong, message in (
        ({"x": torch.ones(2, 64).int()}, "x must have dtype"),
        ({"x": torch.ones(2, 63)}, "x must have shape"),
        ({"out": torch.ones(3, 7)}, "out must have shape"),
        ({"out": torch.ones(2, 7).half()}, "out must have the dtype of x"),
        ({"bias": torch.ones(8)}, "bias must have shape"),
        ({"bias": torch.ones(7).half()}, "bias must have the dtype of x"),
        ({"num_threads": 0}, "num_threads must be"),
    ):
        with pytest.raises(ValueError, match=message):
            matrix.linear(**fitting | wrong)
    for out, message in (
        (torch.ones(7, 63), "out must have shape"),
        (torch.ones(7, 64).int(), "out must have dtype"),
        (torch.ones(64, 7).t(), "out must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            matrix.write_out(out)


def test_it_keeps_its_arrays_alive():
    packed, in_order, *_ = random_matrix(64, 512, 32, torch.float32, is_ordered=True)
    litter = [torch.full((size,), torch.nan) for size in range(64, 8192, 64)]
    out = torch.empty(64, 512)
    packed.write_out(out)
    assert torch.equal(out, in_order) and litter
