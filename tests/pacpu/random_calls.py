"""Random calls of all entry points, good and bad: each returns a full result or refuses by a sentence.

``python -m tests.pacpu.random_calls SEED COUNT`` makes so many, in children that may die.
"""

from __future__ import annotations

import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import pacpu
from pacpu import _pacpu, int8, rows
from tests.pacpu.cases import DTYPES, USABLE_ISAS

REFUSALS = (ValueError, TypeError, MemoryError)
EDGES = [
    sign * (1 << power) + step for power in (12, 28, 29, 30, 31, 32, 63, 64) for sign in (1, -1) for step in (-1, 0, 1)
]
INTEGERS = [-1, 0, 1, 2, 3, 7, 16, 100, *EDGES]
FLOATS = [0.0, -1.0, 1e30, 1e300, float("inf"), float("nan")]
MEMORY_BYTES = 16 << 30


class Call(NamedTuple):
    function: Callable[..., Any]
    arguments: dict[str, Any]
    outputs: tuple[str, ...] = ()
    """Full of NaN, or of -1, before the call."""

    def is_done(self) -> bool:
        """Whether every output was written, given that nothing went in that is not finite."""
        outputs = [self.arguments[name] for name in self.outputs]
        return all(not (out == -1 if out.dtype == torch.int64 else out.isnan()).any() for out in outputs)


def drawn(draw: random.Random) -> Call:
    """A call that fits, with an instruction set."""
    torch.manual_seed(draw.randrange(1 << 30))
    _pacpu.select_isa(draw.choice(USABLE_ISAS))
    return draw.choice(KINDS)(draw)


def name_of(call: Call) -> str:
    function = call.function
    if isinstance(function, type):
        return f"{function.__name__}.__init__"
    return getattr(function, "__qualname__", type(function).__name__)


def changed(call: Call, draw: random.Random) -> Call:
    """With some arguments that may not fit."""
    arguments = dict(call.arguments)
    for name in draw.sample(list(arguments), min(len(arguments), draw.choice([0, 1, 1, 1, 2]))):
        arguments[name] = another(arguments[name], draw)
    return call._replace(arguments=arguments)


def another(value: Any, draw: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return draw.choice([None, True, "x", 1.5])
    if isinstance(value, int):
        return draw.choice([*INTEGERS, None, "x", 1.5]) if draw.random() < 0.1 else draw.choice(INTEGERS)
    if isinstance(value, float):
        return draw.choice(FLOATS)
    if isinstance(value, str):
        return draw.choice(["", "native", "llamafile", "ispc", "float32", "GQA", "int8"])
    if isinstance(value, (tuple, list)) and value:
        at = draw.randrange(len(value))
        return type(value)(another(part, draw) if i == at else part for i, part in enumerate(value))
    if isinstance(value, torch.Tensor):
        return another_tensor(value, draw)
    return value


def another_tensor(x: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    dim = draw.randrange(x.ndim)
    size = draw.choice([0, 1, 2, x.shape[dim] + 1, 1 << 20, 1 << 29, (1 << 31) - 1, 1 << 31])
    shape = [size if i == dim else part for i, part in enumerate(x.shape)]
    ways = [
        lambda: None,
        lambda: x.double(),
        lambda: x.half(),
        lambda: x.to(torch.uint8),
        lambda: x[..., :-1],
        lambda: x.flatten(),
        lambda: x[0],
        lambda: x.transpose(0, dim),
        lambda: x.narrow(dim, 0, min(1, x.shape[dim])).expand(shape),
        lambda: torch.zeros([*shape[:dim], 0, *shape[dim + 1 :]] if x.ndim == 1 else [0, *shape[1:]], dtype=x.dtype),
        lambda: x.new_zeros(()),
        lambda: torch.full_like(x, draw.choice(INTEGERS[:24])) if not x.is_floating_point() else x * float("nan"),
    ]
    try:
        return draw.choice(ways)()
    except (RuntimeError, IndexError):
        return None


def dimension(draw: random.Random, *sizes: int) -> int:
    return draw.choice(sizes)


def threads(draw: random.Random) -> int:
    return draw.choice([1, 1, 2, 3, 4096])


def attention(draw: random.Random) -> Call:
    dtype, kv_heads, group = draw.choice(DTYPES), draw.choice([1, 2, 5]), draw.choice([1, 2, 4, 17])
    head_dim, is_int8 = draw.choice([8, 40, 64, 264]), draw.random() < 0.4
    block_size, batch = 16 if is_int8 else draw.choice([1, 5, 16, 32]), draw.choice([0, 1, 3])
    heads, max_blocks = kv_heads * group, draw.choice([1, 4, 9])
    seq_lens = torch.tensor([draw.randint(1, max_blocks * block_size) for _ in range(batch)], dtype=torch.int32)
    num_blocks = batch * max_blocks + 1
    tables = torch.randperm(num_blocks)[: batch * max_blocks].view(batch, max_blocks).int()
    if is_int8:
        cache = torch.randint(100, (num_blocks, kv_heads, int8.head_bytes(block_size, head_dim)), dtype=torch.uint8)
    else:
        cache = torch.randn(num_blocks, kv_heads, 2, block_size, head_dim).to(dtype)
    kernels = ["native"] if is_int8 else [None, *pacpu.kernels(dtype)]
    arguments = {
        "q": torch.randn(batch, heads, head_dim).to(dtype),
        "k": torch.randn(batch, kv_heads, head_dim).to(dtype),
        "v": torch.randn(batch, kv_heads, head_dim).to(dtype),
        "kv_cache": cache,
        "block_tables": tables,
        "seq_lens": seq_lens,
        "out": torch.full((batch, heads, head_dim), torch.nan, dtype=dtype),
        "scale": 0.1,
        "window": draw.choice([None, 1, 7, 1 << 31]),
        "sinks": draw.choice([None, torch.randn(heads)]),
        "num_threads": threads(draw),
        "kernel": draw.choice(kernels),
    }
    return Call(pacpu.paged_attention, arguments, ("out",))


def prompts(draw: random.Random) -> Call:
    kv_heads, group, head_dim = draw.choice([1, 3]), draw.choice([1, 2]), draw.choice([2, 64, 80])

    def prompt() -> tuple[torch.Tensor, ...]:
        rows_, earlier = draw.choice([0, 1, 17]), draw.choice([0, 5, 600])
        q = torch.randn(rows_, kv_heads * group, head_dim).bfloat16()
        k, v = torch.randn(2, kv_heads, rows_ + earlier, head_dim).bfloat16()
        return q, k, v, torch.full_like(q, torch.nan)

    arguments = {"prompts": [prompt() for _ in range(draw.choice([0, 1, 3]))], "scale": 0.1, "window": None}
    return Call(rows.prompt_attention, arguments | {"sinks": None, "num_threads": threads(draw)})


def nan(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def packed(out_features: int, in_features: int) -> torch.Tensor:
    return torch.zeros(rows.packed_shape(out_features, in_features), dtype=torch.bfloat16)


def linear(draw: random.Random) -> Call:
    count, inputs, outputs = draw.choice([0, 1, 9, 130]), draw.choice([1, 7, 2050]), draw.choice([1, 48, 50])
    x, out = torch.randn(count, inputs).bfloat16(), nan(count, outputs, dtype=torch.bfloat16)
    arguments = {"x": x, "packed": packed(outputs, inputs), "bias": None, "out": out, "num_threads": threads(draw)}
    return Call(rows.linear, arguments, ("out",))


def pack_matrix(draw: random.Random) -> Call:
    weight = torch.randn(draw.choice([1, 48, 50]), draw.choice([1, 7])).bfloat16()
    return Call(rows.pack_matrix, {"weight": weight, "packed": packed(*weight.shape) * torch.nan}, ("packed",))


def packed_shape(draw: random.Random) -> Call:
    return Call(rows.packed_shape, {"out_features": 5, "in_features": draw.choice([1, 9])})


def rows_per_read(draw: random.Random) -> Call:
    return Call(pacpu.rows_per_read, {"num_heads": draw.choice([1, 4]), "num_kv_heads": draw.choice([1, 2])})


def norms(draw: random.Random) -> Call:
    dtype, count, size = draw.choice(DTYPES), draw.choice([0, 1, 70]), draw.choice([1, 40, 1000])
    x, weight = torch.randn(count, size).to(dtype), torch.ones(size, dtype=dtype)
    out, addend = nan(count, size, dtype=dtype), draw.choice([None, x.clone()])
    arguments = {"x": x, "weight": weight, "eps": 1e-5, "out": out, "addend": addend, "num_threads": threads(draw)}
    return Call(rows.rms_norm, arguments, ("out",))


def heads(draw: random.Random) -> Call:
    dtype, count, size = draw.choice(DTYPES), draw.choice([0, 1, 70]), draw.choice([2, 64])
    x = torch.randn(count, 3, size).to(dtype)
    if draw.random() < 0.5:
        arguments = {"x": x, "weights": torch.ones(3, size, dtype=dtype), "eps": 1e-5}
        return Call(rows.norm_heads, arguments | {"num_threads": threads(draw)}, ("x",))
    return Call(rows.rotary, {"x": x, "angles": torch.randn(count, 2, size), "num_threads": threads(draw)}, ("x",))


def activation(draw: random.Random) -> Call:
    dtype, count, size = draw.choice(DTYPES), draw.choice([0, 1, 70]), draw.choice([1, 40, 1000])
    x, out = torch.randn(count, 2 * size).to(dtype), nan(count, size, dtype=dtype)
    if draw.random() < 0.5:
        out = torch.full((count,), -1)
        return Call(rows.argmax, {"x": x, "out": out, "num_threads": threads(draw)}, ("out",))
    return Call(rows.silu_and_mul, {"x": x, "out": out, "num_threads": threads(draw)}, ("out",))


def copies(draw: random.Random) -> Call:
    dtype, count, kv_heads, head_dim = (
        draw.choice(DTYPES),
        draw.choice([0, 1, 40]),
        draw.choice([1, 3]),
        draw.choice([8, 72]),
    )
    block_size, is_int8 = draw.choice([16, 32]), draw.random() < 0.5
    layers, blocks = 2, torch.randperm(50)[: max(1, count)]
    if is_int8:
        pool = torch.zeros(layers, 50, kv_heads, int8.head_bytes(block_size, head_dim), dtype=torch.uint8)
    else:
        pool = torch.zeros(layers, 50, kv_heads, 2, block_size, head_dim, dtype=dtype)
    staging = nan(layers, len(blocks), kv_heads, 2, block_size, head_dim, dtype=dtype)
    common = {"blocks": blocks, "num_threads": threads(draw)}
    way = draw.randrange(4)
    if way == 0:
        return Call(rows.gather_blocks, common | {"pool": pool, "staging": staging}, ("staging",))
    if way == 1:
        return Call(rows.scatter_blocks, common | {"pool": pool, "staging": staging})
    if way == 2:
        out = nan(2, kv_heads, len(blocks) * block_size - 3, head_dim, dtype=dtype)
        return Call(rows.gather_kv, common | {"kv_cache": pool[0], "out": out}, ("out",))
    k, v = torch.randn(2, len(blocks), kv_heads, head_dim).to(dtype)
    return Call(rows.store_kv, common | {"k": k, "v": v, "kv_cache": pool[0], "offsets": blocks % block_size})


def codes(draw: random.Random, outputs: int, inputs: int) -> dict[str, Any]:
    panels, blocks, groups = -(-outputs // 8), -(-inputs // 128), inputs // 16
    words = torch.randint(1 << 31, (panels, blocks, 8, 16)).int()
    arrays = {"codes": words, "scales": torch.rand(panels, groups, 8).half()}
    arrays |= {"zeros": torch.zeros(panels, groups, 8, dtype=torch.uint8), "order": None}
    return arrays | {"out_features": outputs, "in_features": inputs}


def coded(draw: random.Random) -> Call:
    inputs, outputs, count = draw.choice([16, 272]), draw.choice([1, 50]), draw.choice([0, 1, 33])
    dtype, arrays = draw.choice(DTYPES), codes(draw, outputs, inputs)
    way = draw.randrange(3)
    if way == 0:
        return Call(rows.PackedCodes, arrays)
    matrix = rows.PackedCodes(**arrays)
    if way == 1:
        return Call(
            matrix.write_out, {"out": nan(outputs, inputs, dtype=dtype), "num_threads": threads(draw)}, ("out",)
        )
    x, out = torch.randn(count, inputs).to(dtype), nan(count, outputs, dtype=dtype)
    bias = draw.choice([None, torch.ones(outputs, dtype=dtype)])
    return Call(matrix.linear, {"x": x, "bias": bias, "out": out, "num_threads": threads(draw)}, ("out",))


def experts(draw: random.Random) -> Call:
    num_experts, hidden, ffn, dtype = 3, 48, 32, draw.choice(DTYPES)
    matrices = [
        rows.PackedCodes(**codes(draw, num_experts * out, inputs)) for out, inputs in ((2 * ffn, hidden), (hidden, ffn))
    ]
    bias = draw.choice([None, torch.ones(num_experts * hidden, dtype=dtype)])
    arguments = {"gate_up": (matrices[0], None), "down": (matrices[1], bias), "clamp": draw.choice([None, (1.0, 1.7)])}
    arguments |= {"num_experts": num_experts, "hidden_size": hidden, "ffn_size": ffn}
    if draw.random() < 0.5:
        return Call(rows.PackedExperts, arguments)
    count, slots = draw.choice([0, 1, 20]), draw.choice([1, 2])
    arrays = {"x": torch.randn(count, hidden).to(dtype), "ids": torch.randint(num_experts + 1, (count, slots))}
    arrays |= {
        "likelihoods": torch.rand(count, slots),
        "out": nan(count, hidden, dtype=dtype),
        "num_threads": threads(draw),
    }
    return Call(rows.PackedExperts(**arguments), arrays, ("out",))


def crossing(draw: random.Random) -> Call:
    hidden, attention_size, intermediate, outputs, head_dim = 35, 40, 50, 130, 10
    rotated, count = draw.choice([0, 3]), draw.choice([0, 1, 33])
    norm, bf16 = torch.ones(hidden).bfloat16(), torch.bfloat16
    arguments = {"o": (packed(hidden, attention_size), None), "gate_up": (packed(2 * intermediate, hidden), None)}
    arguments |= {"down": (packed(hidden, intermediate), norm), "projection": (packed(outputs, hidden), None)}
    arguments |= {"post_norm": norm, "norm": norm, "head_norms": None, "attention_size": attention_size}
    arguments |= {"intermediate_size": intermediate, "out_features": outputs, "rotated_heads": rotated}
    arguments |= {"head_dim": head_dim, "eps": 1e-5}
    if draw.random() < 0.5:
        return Call(rows.Crossing, arguments)
    arrays = {
        "attention_out": torch.randn(count, attention_size).to(bf16),
        "residual": torch.randn(count, hidden).to(bf16),
    }
    arrays |= {"angles": torch.randn(count, 2, head_dim), "out": nan(count, outputs, dtype=bf16)}
    return Call(rows.Crossing(**arguments), arrays | {"num_threads": threads(draw)}, ("out",))


def linear_attention(draw: random.Random) -> Call:
    """Two chunks, one of padding, and decodes, of which one is padding."""
    dtype, decodes, key_heads, groups = (
        draw.choice(DTYPES),
        draw.choice([1, 5]),
        draw.choice([1, 3]),
        draw.choice([1, 2]),
    )
    chunks, slots = [(7, 3, True), (-1, 9, False)], torch.tensor([-1, 5, 0, 6, 2][:decodes])
    count, common = 12 + decodes, {"chunks": chunks, "decode_slots": slots, "num_threads": threads(draw)}
    if draw.random() < 0.5:
        channels, width = draw.choice([1, 40, 300]), draw.choice([2, 3, 4, 8])
        inputs = torch.randn(8, channels, width - 1).to(dtype)
        arguments = {"x": torch.randn(count, channels).to(dtype), "weight": torch.ones(channels, width).to(dtype)}
        out = nan(count, channels, dtype=dtype)
        return Call(rows.convolve, arguments | {"inputs": inputs, "out": out} | common, ("out",))
    heads, key_dim, value_dim = key_heads * groups, draw.choice([1, 8, 40]), draw.choice([1, 12, 70])
    keys = torch.randn(2, count, key_heads, key_dim).to(dtype)
    arguments = {"q": keys[0], "k": keys[1], "v": torch.randn(count, heads, value_dim).to(dtype)}
    arguments |= {"log_decay": -torch.rand(count, heads), "beta": torch.rand(count, heads)}
    states, out = torch.randn(8, heads, key_dim, value_dim), nan(count, heads, value_dim, dtype=torch.float32)
    return Call(rows.delta_rule, arguments | {"states": states, "out": out} | common, ("out",))


def settings(draw: random.Random) -> Call:
    kind = {"dtype": draw.choice(["float32", "bfloat16", "int8"]), "heads": draw.choice(pacpu.HEADS)}
    if draw.random() < 0.5:
        return Call(pacpu.set_shared_row_cost, kind | {"cost": draw.choice([1.0, 0.125])})
    return Call(pacpu.set_prefetch, kind | {"way": draw.choice(pacpu.PREFETCHES)})


def bandwidth(draw: random.Random) -> Call:
    return Call(
        pacpu.read_bandwidth, {"array": torch.ones(draw.choice([1, 1001, 100_000])), "num_threads": threads(draw)}
    )


def zeros(draw: random.Random) -> Call:
    array = nan(draw.choice([1, 1001, 100_000]), dtype=torch.float32)
    return Call(pacpu.zero, {"array": array, "num_threads": threads(draw)}, ("array",))


KINDS = (attention, attention, prompts, linear, pack_matrix, packed_shape, rows_per_read, norms, heads, activation)
KINDS += (copies, coded, experts, crossing, linear_attention, settings, bandwidth, zeros)


def outcome(call: Call, draw: random.Random) -> str:
    """What became of a call, changed: "done", or the name of the error, or "not written"."""
    tried = changed(call, draw)
    try:
        tried.function(**tried.arguments)
    except REFUSALS as error:
        return type(error).__name__
    if not all(value is call.arguments[name] or is_finite(value) for name, value in tried.arguments.items()):
        return "done"
    return "done" if tried.is_done() else "not written"


def is_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        is_cache = value.dtype == torch.uint8  # any bytes: with NaN among the scales
        return value.numel() > 1 << 24 or (not is_cache and bool((value.nan_to_num(torch.inf).abs() < 1e4).all()))
    return not isinstance(value, float)


def run(seed: int, count: int, *, at_once: int = 500) -> Counter[str]:
    """Make so many calls in children; one that dies in a call is reported and followed by another."""
    outcomes: Counter[str] = Counter()
    first = 0
    while first < count:
        numbers = range(first, min(first + at_once, count))
        said, status = in_a_child(partial(make, seed, numbers))
        first += len(said)
        if status:
            said[-1] += f"died of status {status} at {first - 1}"
        outcomes.update(said)
    return outcomes


def make(seed: int, numbers: range, ears: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "LD_PRELOAD" not in os.environ:  # a sanitizer takes all addresses there are
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for number in numbers:
        draw = random.Random(f"{seed} {number}")
        call = drawn(draw)
        os.write(ears, f"{name_of(call)} ".encode())
        what = outcome(call, draw)
        os.write(ears, f"{what}{f' at {number}' if what == 'not written' else ''}\n".encode())


def in_a_child(work: Callable[[int], None]) -> tuple[list[str], int]:
    """The lines that it wrote to the descriptor it was given, and what it ended with."""
    mouth, ears = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            work(ears)
            status = 0
        finally:
            os._exit(status)
    os.close(ears)
    with os.fdopen(mouth) as lines:
        said = lines.read().splitlines()
    return said, os.waitpid(child, 0)[1]


if __name__ == "__main__":
    for what, times in sorted(run(int(sys.argv[1]), int(sys.argv[2])).items()):
        print(f"{times:7} {what}")
