"""A crossing in one call gives the bits of its parts, one by one."""

import dataclasses
import itertools

import pytest
import torch

from pacpu import _pacpu, rows
from tests.pacpu.cases import BEST_ISA, ISAS, use
from tests.pacpu.packed_codes import random_matrix
from tests.pacpu.test_rows import Rows, packed

Matrix = torch.Tensor | rows.PackedCodes
BF16 = torch.bfloat16
EPS = 1e-5


@pytest.fixture(autouse=True)
def best_isa_afterwards():
    yield
    _pacpu.select_isa(BEST_ISA)


@dataclasses.dataclass
class Layer:
    """Random weights of a small layer."""

    head_dim: int = 10
    rotated_heads: int = 3
    hidden_size: int = 35
    intermediate_size: int = 50
    attention_size: int = 40
    out_features: int = 130
    has_bias: bool = False
    has_head_norms: bool = False
    has_codes: tuple[str, ...] = ()
    """Names of matrices of 4 bits."""

    def __post_init__(self) -> None:
        def matrix(name: str, out_features: int, in_features: int) -> tuple[Matrix, torch.Tensor | None]:
            bias = torch.randn(out_features).to(BF16) if self.has_bias else None
            if name in self.has_codes:
                return random_matrix(out_features, in_features, 16, BF16, is_ordered=name != "o").packed, bias
            weight = torch.randn(out_features, in_features) / in_features**0.5
            return packed(weight.to(BF16)), bias

        self.o = matrix("o", self.hidden_size, self.attention_size)
        self.gate_up = matrix("gate_up", 2 * self.intermediate_size, self.hidden_size)
        self.down = matrix("down", self.hidden_size, self.intermediate_size)
        self.projection = matrix("projection", self.out_features, self.hidden_size)
        self.post_norm, self.norm = torch.randn(2, self.hidden_size).to(BF16)
        self.head_norms = torch.randn(self.rotated_heads, self.head_dim).to(BF16) if self.has_head_norms else None

    def arguments(self) -> dict:
        names = ("o", "post_norm", "gate_up", "down", "norm", "projection", "head_norms", "attention_size")
        names += ("intermediate_size", "out_features", "rotated_heads", "head_dim")
        return {name: getattr(self, name) for name in names} | {"eps": EPS}

    def part_by_part(self, attention_out, residual, angles) -> torch.Tensor:
        """Overwrites ``residual``."""

        def multiply(x, matrix, columns):
            out = torch.empty(len(x), columns, dtype=BF16)
            if isinstance(matrix[0], rows.PackedCodes):
                matrix[0].linear(x, matrix[1], out)
            else:
                rows.linear(x, *matrix, out)
            return out

        def add_norm(addend, weight):
            out = torch.empty_like(addend)
            rows.rms_norm(residual, weight, EPS, out, addend=addend)
            return out

        normed = add_norm(multiply(attention_out, self.o, self.hidden_size), self.post_norm)
        active = torch.empty(len(normed), self.intermediate_size, dtype=BF16)
        rows.silu_and_mul(multiply(normed, self.gate_up, 2 * self.intermediate_size), active)
        normed = add_norm(multiply(active, self.down, self.hidden_size), self.norm)
        out = multiply(normed, self.projection, self.out_features)
        if self.rotated_heads:
            heads = out[:, : self.rotated_heads * self.head_dim].unflatten(1, (-1, self.head_dim))
            if self.head_norms is not None:
                rows.norm_heads(heads, self.head_norms, EPS)
            rows.rotary(heads, angles)
        return out


NAMES = ("o", "gate_up", "down", "projection")
WHOLE_RUNS = {"hidden_size": 48, "intermediate_size": 160, "attention_size": 32}
LAYERS = {
    "plain": {},
    "bias-and-head-norms": {"has_bias": True, "has_head_norms": True},
    "vocabulary": {"rotated_heads": 0, "out_features": 203},
    "codes": {"has_codes": NAMES, "has_bias": True, "has_head_norms": True, **WHOLE_RUNS},
    "codes-and-vocabulary": {"has_codes": NAMES[:3], "rotated_heads": 0, "out_features": 203, **WHOLE_RUNS},
}


@pytest.mark.parametrize("isa", ISAS[2:])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 33, 600])  # 600: more than cross at a time
@pytest.mark.parametrize("sizes", LAYERS.values(), ids=list(LAYERS))
def test_the_bits_of_the_parts(isa, num_threads, num_rows, sizes):
    use(isa, "native")
    layer = Layer(**sizes)
    attention_out = Rows.random(num_rows, layer.attention_size, dtype=BF16)
    angles = Rows.random(num_rows, 2, layer.head_dim, dtype=torch.float32) if layer.rotated_heads else None
    before = Rows.random(num_rows, layer.hidden_size, dtype=BF16).clone()
    residual, out = Rows(num_rows, layer.hidden_size, dtype=BF16), Rows(num_rows, layer.out_features, dtype=BF16)
    residual.view.copy_(before)
    rows.Crossing(**layer.arguments())(attention_out, residual.view, angles, out.view, num_threads=num_threads)
    expected = layer.part_by_part(attention_out, before, angles)
    assert torch.equal(out.view, expected) and torch.equal(residual.view, before)
    out.check(expected)
    residual.check(before)


@pytest.mark.parametrize("sizes", [{}, {"has_codes": NAMES, **WHOLE_RUNS}], ids=["plain", "codes"])
def test_it_keeps_its_weights_alive(sizes):
    use("avx512", "native")
    layer = Layer(**sizes)
    rows_in = [torch.randn(5, size).to(BF16) for size in (layer.attention_size, layer.hidden_size)]
    angles, out = torch.randn(5, 2, layer.head_dim), torch.empty(5, layer.out_features, dtype=BF16)
    expected = layer.part_by_part(rows_in[0], rows_in[1].clone(), angles)
    crossing = rows.Crossing(**layer.arguments())
    del layer
    litter = [torch.full((size,), torch.nan) for size in itertools.chain(*itertools.repeat(range(64, 8192, 64), 4))]
    crossing(*rows_in, angles, out)
    assert torch.equal(out, expected) and litter


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"o": (torch.ones(1, 20, 48, 2), None)}, "o must have dtype bfloat16, not float32"),
        ({"down": (torch.ones(1, 3, 48, 2, dtype=BF16), None)}, "down must have shape"),
        ({"gate_up": (torch.ones(3, 18, 48, 2, dtype=BF16), torch.ones(99, dtype=BF16))}, "gate_up must have shape"),
        ({"post_norm": torch.ones(36, dtype=BF16)}, "post_norm must have shape"),
        ({"head_norms": torch.ones(2, 10, dtype=BF16)}, r"head_norms must have shape .* = \[3, 10\]"),
        ({"rotated_heads": 14}, "rotated_heads cannot be 14 of head_dim 10"),
        ({"head_dim": 5}, "rotated_heads cannot be 3 of head_dim 5"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1, not 0"),
        ({"down": (random_matrix(35, 32, 16, BF16).packed, None)}, r"down must have sides \[35, 50\], not \[35, 32\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        rows.Crossing(**Layer().arguments() | wrong)


def test_rows_that_do_not_fit_are_refused():
    layer = Layer()
    crossing = rows.Crossing(**layer.arguments())
    fitting = {
        "attention_out": torch.ones(2, layer.attention_size, dtype=BF16),
        "residual": torch.ones(2, layer.hidden_size, dtype=BF16),
        "angles": torch.ones(2, 2, layer.head_dim),
        "out": torch.ones(2, layer.out_features, dtype=BF16),
    }
    for wrong, message in (
        ({"attention_out": fitting["attention_out"][:1]}, "attention_out must have shape"),
        ({"residual": fitting["residual"][:, :30]}, "residual must have shape"),
        ({"angles": fitting["angles"].to(BF16)}, "angles must have dtype float32"),
        ({"out": fitting["out"].float()}, "out must have dtype bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            crossing(**fitting | wrong)
    _pacpu.select_isa("portable")
    with pytest.raises(ValueError, match="AVX-512"):
        crossing(**fitting)
