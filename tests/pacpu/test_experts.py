"""An FFN of 4-bit experts in one call, in every element type and instruction set, against float64."""

import pytest
import torch
import torch.nn.functional as F

from pacpu import _pacpu, rows
from tests.pacpu.cases import BEST_ISA, DTYPES, ISAS
from tests.pacpu.packed_codes import random_matrix
from tests.pacpu.test_rows import Rows, use
from tests.reference.tolerances import TOLERANCES

LIMIT, ALPHA = 0.6, 1.702


@pytest.fixture(autouse=True)
def new_draws_and_best_isa():
    print("seed", torch.seed())
    yield
    _pacpu.select_isa(BEST_ISA)


class Layer:
    """Random experts whose outputs fill no whole panels, and their results in float64."""

    def __init__(self, experts, hidden, ffn, group_size, dtype, scale_dtype, *, is_clamped):
        self.experts, self.hidden, self.dtype = experts, hidden, dtype
        self.stacks, parts = [], []
        for outputs, inputs in ((2 * ffn, hidden), (hidden, ffn)):
            padded = -(-outputs // rows.CODE_COLUMNS) * rows.CODE_COLUMNS
            matrix = random_matrix(experts * padded, inputs, group_size, dtype, scale_dtype)
            weight = matrix.weight.view(experts, padded, inputs)[:, :outputs].double()
            bias = torch.randn(experts, outputs).to(dtype) if is_clamped else None
            self.stacks.append((weight, torch.zeros(experts, outputs) if bias is None else bias))
            parts.append((matrix.packed, None if bias is None else bias.flatten()))
        self.is_clamped = is_clamped
        sizes = {"num_experts": experts, "hidden_size": hidden, "ffn_size": ffn}
        self.packed = rows.PackedExperts(*parts, (LIMIT, ALPHA) if is_clamped else None, **sizes)

    def expected(self, x, ids, likelihoods):
        out = torch.zeros(x.shape, dtype=torch.float64)
        for expert in range(self.experts):
            (gate_up, gate_up_bias), (down, down_bias) = ((w[expert], b[expert].double()) for w, b in self.stacks)
            gate, up = F.linear(x.double(), gate_up, gate_up_bias).chunk(2, -1)
            if self.is_clamped:
                gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
                active = gate * torch.sigmoid(ALPHA * gate) * up
            else:
                active = F.silu(gate) * up
            factors = torch.where(ids == expert, likelihoods.double(), 0.0).sum(1, keepdim=True)
            out += F.linear(active, down, down_bias) * factors
        return out


def routing(experts, num_rows, slots, padding):
    """Ids and likelihoods; the last rows are ``padding``."""
    ids = torch.rand(num_rows, experts).argsort(1)[:, :slots].contiguous()
    ids[num_rows - padding :] = experts
    return ids, torch.rand(num_rows, slots)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(isa, dtype):
    use(isa)
    atol, rtol = TOLERANCES[dtype]
    for hidden, ffn, group_size, scale_dtype in ((272, 48, 16, torch.float16), (160, 96, 32, torch.uint8)):
        for is_clamped in (False, True):
            layer = Layer(7, hidden, ffn, group_size, dtype, scale_dtype, is_clamped=is_clamped)
            for num_rows, num_threads in ((0, 1), (1, 3), (13, 2)):
                ids, likelihoods = routing(7, num_rows, 3, padding=num_rows // 5)
                x = Rows.random(num_rows, hidden, dtype=dtype)
                if num_rows // 5:
                    x[-(num_rows // 5) :] = torch.nan
                out = Rows(num_rows, hidden, dtype=dtype)
                layer.packed(x, ids, likelihoods, out.view, num_threads=num_threads)
                expected = layer.expected(x.nan_to_num(), ids, likelihoods)
                torch.testing.assert_close(out.view.double(), expected, atol=4 * atol, rtol=4 * rtol)
                assert not out.view[num_rows - num_rows // 5 :].any()
                out.check(out.view.double())  # nothing was written beside the rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_neighbours_nor_on_threads(isa, dtype):
    """With more pairs than are computed at a time, all experts and one alone."""
    use(isa)
    layer = Layer(5, 80, 32, 16, dtype, torch.float16, is_clamped=True)
    x, (ids, likelihoods) = torch.randn(2100, 80).to(dtype), routing(5, 2100, 2, padding=0)
    ids[300:600] = 4
    together, alone = torch.full((2, 2100, 80), torch.nan, dtype=dtype)
    layer.packed(x, ids, likelihoods, together, num_threads=3)
    for row in (*range(0, 2100, 21), 2047, 2048, 2049, 2099):
        own = slice(row, row + 1)
        layer.packed(x[own], ids[own], likelihoods[own], alone[own])
        assert torch.equal(alone[own], together[own])


def test_what_does_not_fit_is_refused():
    matrix = {out: random_matrix(3 * out, inputs, 16, torch.float32).packed for out, inputs in ((64, 48), (48, 32))}
    fitting = {"gate_up": (matrix[64], None), "down": (matrix[48], None), "clamp": None}
    fitting |= {"num_experts": 3, "hidden_size": 48, "ffn_size": 32}
    ordered = random_matrix(144, 32, 16, torch.float32, is_ordered=True).packed
    for wrong, message in (
        ({"num_experts": 2}, "gate_up must have sides"),
        ({"num_experts": 0}, "num_experts must be at least 1, not 0"),
        ({"ffn_size": 24}, "gate_up must have sides"),
        ({"down": (ordered, None)}, "down must have sides .* and no order"),
        ({"down": (matrix[48], torch.ones(143))}, "bias must have shape"),
        ({"gate_up": (matrix[64], torch.ones(192)), "down": (matrix[48], torch.ones(144).half())}, "have one dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            rows.PackedExperts(**fitting | wrong)
    experts = rows.PackedExperts(**fitting | {"down": (matrix[48], torch.ones(144))})
    fitting = {"x": torch.ones(2, 48), "ids": torch.zeros(2, 2).long(), "likelihoods": torch.ones(2, 2)}
    fitting |= {"out": torch.ones(2, 48)}
    for wrong, message in (
        ({"x": torch.ones(2, 47)}, "x must have shape"),
        ({"x": torch.ones(2, 48).half(), "out": torch.ones(2, 48).half()}, "x must have the dtype of the biases"),
        ({"ids": torch.full((2, 2), 4)}, "ids must be at most 3, not 4"),
        ({"ids": torch.full((2, 2), -1)}, "ids must be at most 3, not -1"),
        ({"ids": torch.zeros(2, 2).int()}, "ids must have dtype int64"),
        ({"likelihoods": torch.ones(2, 3)}, "likelihoods must have shape"),
        ({"likelihoods": torch.ones(2, 2).half()}, "likelihoods must have dtype float32"),
        ({"out": torch.ones(3, 48)}, "out must have shape"),
        ({"num_threads": 0}, "num_threads must be"),
    ):
        with pytest.raises(ValueError, match=message):
            experts(**fitting | wrong)
    experts(**fitting)
