"""Every Triton kernel compiled for a GPU that is not here, and what the compiler made of it executed on the host.

``ttsem`` executes the compiled modules. It finds accesses outside the tensors of a launch, races between programs and
results that are not defined; values are held against float64 results of the torch reference. It is an outside judge
beside Triton's interpreter, which runs the kernels' Python, and sees what is wrong for one compute capability alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from triton.runtime.jit import JITFunction
from ttsem import harness, minimize, sanitize, validate

import swiftllm.ops.triton.ops as triton_ops
from pacpu import int8
from swiftllm.core.request import Request, SamplingParams
from swiftllm.ops.interface import ContextBlocks, Ops, StateChunk, StateRows
from swiftllm.ops.triton import attention, kv_cache, linear_attention, matrices, rows
from swiftllm.ops.triton.ops import TritonOps
from swiftllm.sampling.sampler import Sampler
from tests.reference.paged_attention import paged_attention, store_new_tokens
from tests.reference.tolerances import assert_close
from tests.triton.interpreted_experts import assert_near, expected, random_experts
from tests.triton.interpreted_quantised import random_matrix

HOST, REFERENCE, EPS = torch.device("cpu"), Ops(), 1e-5
TARGETS = [(75, torch.float16), (86, torch.bfloat16), (90, torch.float16), (86, torch.float32)]
EXACTLY = {"rtol": 0, "atol": 0}


pytestmark = pytest.mark.filterwarnings("ignore:Triton has no tensor cores")


class Execution:
    """``ops`` compute for a capability; ``launches`` of theirs, with what their tensors held before and after."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.ops = TritonOps(HOST, capability, num_multiprocessors=16)
        self.launches: list[harness.LaunchRecord] = []


@pytest.fixture
def execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Execution]:
    """Of the capability that is the fixture's parameter. Memory that is not initialised holds NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    under_test = Execution(request.param)
    with sanitize.session(request.param, cuda_is_cpu=False) as session:
        execute = JITFunction.run

        def recorded(self, *args, grid, warmup, **kwargs) -> None:
            record = harness.record_launch(self, args, kwargs, grid, execute, __file__, len(under_test.launches))
            under_test.launches.append(record.record)

        monkeypatch.setattr(JITFunction, "run", recorded)
        yield under_test
        monkeypatch.undo()
    assert session.launches == len(under_test.launches) > 0 and not session.races_unchecked


def check_rows(ops: TritonOps, dtype: torch.dtype) -> None:
    embedding, tokens = torch.randn(7, 300).to(dtype), torch.tensor([6, 0, 3, 3])
    torch.testing.assert_close(ops.embed(tokens, embedding), embedding[tokens], **EXACTLY)
    x, residual = (torch.randn(3, 200).to(dtype)[:, :144] for _ in range(2))
    weight = torch.rand(144).to(dtype) + 0.5
    assert_close(ops.rms_norm(x, weight, EPS), REFERENCE.rms_norm(x.double(), weight.double(), EPS), dtype)
    total = x.double() + residual.double()
    normed = ops.add_rms_norm_(residual, x, weight, EPS)
    assert_close(residual, total, dtype)
    torch.testing.assert_close(normed, ops.rms_norm(residual, weight, EPS), **EXACTLY)

    qkv, head_weights = torch.randn(3, 11, 24).to(dtype), torch.rand(9, 24).to(dtype) + 0.5
    wanted, rotary_rows = qkv.double(), torch.randn(3, 2, 24)
    ops.norm_heads_(qkv[:, :9], head_weights, EPS)
    REFERENCE.norm_heads_(wanted[:, :9], head_weights.double(), EPS)
    assert_close(qkv, wanted, dtype)
    wanted = qkv.float()
    ops.rotary_(qkv[:, :9], rotary_rows)
    REFERENCE.rotary_(wanted[:, :9], rotary_rows)
    assert_close(qkv, wanted, dtype)
    gate_up = torch.randn(3, 2 * 40).to(dtype)
    assert_close(ops.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up.double()), dtype)


def check_cache(ops: TritonOps, dtype: torch.dtype) -> None:
    pool, k, v = torch.randn(2, 6, 2, 2, 16, 24).to(dtype), *torch.randn(2, 3, 2, 24).to(dtype)
    wanted, blocks, offsets = pool[0].clone(), torch.tensor([5, 0, 5]), torch.tensor([0, 15, 3])
    ops.store_kv(k, v, pool[0], blocks, offsets)
    REFERENCE.store_kv(k, v, wanted, blocks, offsets)
    torch.testing.assert_close(pool[0], wanted, **EXACTLY)
    contexts = ContextBlocks.of([[5, 1], [2]], [20, 16], 16, lambda ids: ids)
    torch.testing.assert_close(
        ops.gather_contexts(pool[1], contexts), REFERENCE.gather_contexts(pool[1], contexts), **EXACTLY
    )
    blocks, places = torch.tensor([4, 1, 5]), torch.tensor([0, 3, 2])
    staging, there = torch.empty_like(pool[:, :3]), torch.zeros_like(pool)
    ops.gather_blocks(pool, blocks, staging)
    torch.testing.assert_close(staging, pool[:, blocks], **EXACTLY)
    ops.scatter_blocks(staging, there, places)
    torch.testing.assert_close(there[:, places], pool[:, blocks], **EXACTLY)
    assert not there[:, [1, 4, 5]].any()

    codes = torch.zeros(2, 3, 2, int8.head_bytes(16, 24), dtype=torch.uint8)
    wanted_codes, wanted = codes.clone(), there.clone()
    ops.quantise_blocks(pool, blocks, codes)
    REFERENCE.quantise_blocks(pool, blocks, wanted_codes)
    assert torch.equal(codes, wanted_codes)
    ops.dequantise_blocks(codes, there, places)
    REFERENCE.dequantise_blocks(codes, wanted, places)
    torch.testing.assert_close(there, wanted, **EXACTLY)


def check_decodes(ops: TritonOps, dtype: torch.dtype) -> None:
    """Of one split and of three, a group of three heads, with an empty row, then a window and sinks."""
    for lens, window, sinks in (((0, 1, 17), None, None), ((300, 16), None, None), ((300, 40), 33, torch.randn(6))):
        heads, kv_heads, head_dim = 6, 2, 64
        counts = [-(-max(count, 1) // 16) for count in lens]
        blocks, tables = torch.randperm(sum(counts)).int(), torch.zeros(len(lens), max(counts), dtype=torch.int32)
        for row, those in enumerate(blocks.split(counts)):
            tables[row, : len(those)] = those
        layer, lens = torch.randn(sum(counts), kv_heads, 2, 16, head_dim).to(dtype), torch.tensor(lens).int()
        q, k, v = torch.randn(len(lens), heads + 2 * kv_heads, head_dim).to(dtype).split((heads, kv_heads, kv_heads), 1)
        wanted, out, full = layer.clone(), torch.full((len(lens), heads, head_dim), torch.nan, dtype=dtype), lens > 0
        store_new_tokens(k[full], v[full], wanted, tables[full], lens[full])
        ops.decode_attention(q, k, v, layer, tables, lens, out, head_dim**-0.5, window, sinks)
        torch.testing.assert_close(layer, wanted, **EXACTLY)
        attended = paged_attention(q[full], wanted, tables[full], lens[full], head_dim**-0.5, window, sinks)
        assert_close(out[full], attended, dtype)


def check_quantised(ops: TritonOps, dtype: torch.dtype) -> None:
    ops.most_quantised_rows = 20
    matrix, bias = random_matrix(72, 640, 64, dtype, torch.float16, ordered=True), torch.randn(72).to(dtype)
    linear = ops.make_quantised_linear(matrix, bias)
    dense = matrix.dequantise().double()
    for count in (3, 20, 21):  # multiplied by codes, and written out in full
        x = torch.randn(count, 640).to(dtype)
        assert_close(linear(x), x.double() @ dense.t() + bias.double(), dtype)


def check_experts(ops: TritonOps, dtype: torch.dtype) -> None:
    for group, is_gpt_oss in ((0, False), (16, False), (32, True)):
        weights = random_experts(4, 2, 96, 32, dtype, group, True, is_gpt_oss)
        x = torch.randn(7, 96).to(dtype)
        out = ops.make_experts(weights)(x, num_rows=torch.tensor([6], dtype=torch.int32))
        assert_near(out[:6], expected(weights, x[:6]), dtype)
        assert not out[6:].any()


def check_draws(ops: TritonOps, dtype: torch.dtype) -> None:
    """The tokens of torch, over several tiles, with ties, tokens left out and several attempts."""
    logits = (3 * torch.randn(8, 300)).to(dtype)
    logits[1].round_()
    logits[2, 5:] = -torch.inf
    logits[3] = 0.0
    hows = [{"top_p": top_p} for top_p in (1.0, 0.9, 0.9, 0.05)] + [{"top_p": 0.5, "repetition_penalty": 1.1}] * 4
    requests = [
        Request(str(row), (1,), SamplingParams(temperature=1.2, seed=row, **how)) for row, how in enumerate(hows)
    ]
    assert Sampler(draw=ops.make_draw()).sample(logits, requests) == Sampler().sample(logits, requests)


def check_linear_attention(ops: TritonOps, dtype: torch.dtype) -> None:
    """Chunks and decodes, from states, from zero and of padding."""
    chunks = StateChunk(3, 17, False), StateChunk(0, 2, True)
    of_rows = StateRows.of(chunks, [5, -1], lambda tensor: tensor)
    x, weight = torch.randn(21, 56).to(dtype)[:, :40], torch.randn(40, 4).to(dtype)
    inputs = torch.randn(6, 40, 3).to(dtype)
    wanted = inputs.to(torch.float32, copy=True)
    convolved = REFERENCE.convolve(x.float(), weight.float(), wanted, of_rows)
    assert_close(ops.convolve(x, weight, inputs, of_rows), convolved, dtype)
    assert_close(inputs, wanted, dtype)
    q, k = torch.randn(21, 2, 16).to(dtype).split(1, 1)
    v, states = torch.randn(21, 2, 12).to(dtype), torch.randn(6, 2, 16, 12)
    log_decay, beta, wanted = -torch.rand(21, 2), torch.rand(21, 2), states.clone()
    attended = REFERENCE.delta_rule(q.float(), k.float(), v.float(), log_decay, beta, wanted, of_rows)
    out = ops.delta_rule(q, k, v, log_decay, beta, states, of_rows)
    assert_close(out, attended, torch.float32)
    assert_close(states, wanted, torch.float32)
    gate, norm = torch.randn(21, 2, 12).to(dtype), torch.rand(12).to(dtype)
    gated = REFERENCE.norm_and_gate(out, norm.float(), gate.float(), EPS)
    assert_close(ops.norm_and_gate(out, norm, gate, EPS), gated, dtype)


CHECKS = (
    check_rows, check_cache, check_decodes, check_quantised, check_experts, check_draws, check_linear_attention,
)  # fmt: skip
OF_A_CAPABILITY = {  # kernels that only some launch
    "decode_partials_dot_kernel": lambda capability, dtype: capability >= 80 and dtype.itemsize == 2,
    "decode_partials_lanes_kernel": lambda capability, dtype: capability < 80 or dtype.itemsize == 4,
}


def all_kernels() -> set[str]:
    modules = attention, kv_cache, linear_attention, matrices, rows
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


@pytest.mark.parametrize("execution, dtype", TARGETS, ids=str, indirect=["execution"])
def test_kernels_stay_in_their_tensors_do_not_race_and_are_right(execution, dtype, monkeypatch):
    monkeypatch.setattr(triton_ops, "MOST_TILE", 128)
    for check in CHECKS:
        check(execution.ops, dtype)
    names = {record.fn_name for record in execution.launches}
    left_out = {name for name, is_launched in OF_A_CAPABILITY.items() if not is_launched(execution.capability, dtype)}
    assert names == all_kernels() - left_out


def mismatches(record: harness.LaunchRecord, capability: int) -> list[str]:
    """The compiler's passes that are given something else to compile than the first one, by what it computes."""
    stages = validate.split_dump(harness.dump_for_launch(record, harness.target_for("cpu", capability)))
    texts = [minimize.strip_locs(text) for _, text in stages]
    changed = [place for place in range(len(stages)) if place == 0 or texts[place] != texts[place - 1]]
    report = validate.validate_stages(record, [stages[place] for place in changed])
    verdicts = [result.verdict for result in report.passes]
    print(record.fn_name, {verdict: verdicts.count(verdict) for verdict in verdicts})
    assert verdicts[-1] == "unsupported" and report.passes[-1].message == "past lowering"  # LLVM's dialect begins
    assert set(verdicts[:-1]) <= {"match", "approx", "mismatch"} and len(verdicts) > 5, verdicts
    return [f"{result.pass_name}: {result.message}" for result in report.passes if result.verdict == "mismatch"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("execution, dtype", TARGETS[:3], ids=str, indirect=["execution"])
def test_no_pass_of_the_compiler_changes_what_a_kernel_computes(execution, dtype, check, monkeypatch):
    """Of each kernel the launch with the fewest programs, after every pass that changes it, up to the last one before
    LLVM."""
    monkeypatch.setattr(triton_ops, "MOST_TILE", 128)
    check(execution.ops, dtype)
    monkeypatch.undo()
    smallest: dict[str, harness.LaunchRecord] = {}
    for record in sorted(execution.launches, key=lambda record: math.prod(record.grid), reverse=True):
        smallest[record.fn_name] = record
    for name, record in smallest.items():
        assert mismatches(record, execution.capability) == [], name
