"""Calls as the system makes them: at the same time, very often, after a fork, with the instruction set it names."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pacpu
from pacpu import _pacpu
from tests.pacpu.cases import BEST_ISA, ISAS, bits, check_at_the_same_time, make_case, use


def test_calls_from_two_python_threads():
    """Different problems at once, each with a team of its own size, many times."""
    small_heads = make_case(torch.float32, num_heads=8, num_kv_heads=2, seq_lens=(250, 3))
    check_at_the_same_time(make_case(torch.float16), small_heads, rounds=30)


def test_python_runs_on_during_a_call():
    """The GIL is released: this thread gets to run between the start and the end of another one's call."""
    case = make_case(torch.float16, seq_lens=(16,))
    batch = 2000  # one block, looked at again and again
    case = replace(
        case,
        q=case.q.repeat(batch, 1, 1),
        k=case.k.repeat(batch, 1, 1),
        v=case.v.repeat(batch, 1, 1),
        block_tables=case.block_tables[:, :1].repeat(batch, 128),
        seq_lens=torch.full((batch,), 2048, dtype=torch.int32),
        out=case.out.repeat(batch, 1, 1),
    )
    # On a busy machine this thread may not be given the processor during one call; during some of many it is.
    assert any(ticks_in_the_middle(case.run) >= 2 for _ in range(50))


def ticks_in_the_middle(call: Callable[[], object]) -> int:
    """How often this thread, which ticks each millisecond, got to run in the middle of another one's call."""
    span: list[float] = []

    def work() -> None:
        span.append(time.perf_counter())
        call()
        span.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    ticks = []
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    thread.join()
    start, end = span
    return sum(start + 0.2 * (end - start) < tick < end - 0.2 * (end - start) for tick in ticks)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_calls_do_not_leak(num_threads):
    case = make_case(torch.float32, seq_lens=(3, 20))
    arrays = [getattr(case, name).numpy() for name in ("q", "k", "v", "kv_cache", "block_tables", "seq_lens", "out")]
    arrays[0].setflags(write=False)

    def call_often(count: int) -> None:
        for _ in range(count):
            case.run(num_threads=num_threads)
            pacpu.paged_attention(*arrays, case.scale, num_threads=num_threads)
            with pytest.raises(ValueError):
                case.run(num_threads=0)

    call_often(500)
    before = resident_bytes()
    call_often(7000)
    assert resident_bytes() - before < 2**20


def test_many_calls_do_not_leak():
    """A leak of some ten bytes a call would show; NEO's kernel loses a kilobyte."""
    case = make_case(torch.float16, num_heads=1, num_kv_heads=1, head_dim=8, seq_lens=(1,))
    arguments = [array.numpy() for array in list(vars(case).values())[:7]]

    def call_often(count: int) -> None:
        for _ in range(count):
            _pacpu.paged_attention(*arguments, 1.0, None, None, 1, None)

    call_often(20_000)
    before = resident_bytes()
    call_often(100_000)
    assert resident_bytes() - before < 2**20


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_child_computes():
    """A child has none of its parent's helper threads and must not wait for them."""
    case = make_case(torch.float32)
    case.check(num_threads=4)
    expected, cache = case.out.clone(), case.kv_cache.clone()
    child = os.fork()
    if child == 0:
        case.out.fill_(torch.nan)
        case.run(num_threads=4)
        os._exit(0 if torch.allclose(case.out, expected) and torch.equal(bits(case.kv_cache), bits(cache)) else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)


def import_with_isa(isa: str) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", "import pacpu; print(pacpu.isa())"],
        env=os.environ | {"PACPU_ISA": isa},
        cwd=root,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("isa", ISAS)
def test_environment_chooses_the_instruction_set(isa):
    use(isa, "native")
    assert import_with_isa(isa).stdout.strip() == isa


def test_unavailable_instruction_sets_have_reasons_and_are_refused():
    assert BEST_ISA not in pacpu.unavailable_isas()
    assert "portable" not in pacpu.unavailable_isas()
    for isa, reason in pacpu.unavailable_isas().items():
        assert reason
        with pytest.raises(ValueError, match=f"'{isa}' cannot be used: {reason}; the best is '{BEST_ISA}'"):
            _pacpu.select_isa(isa)


def test_unknown_instruction_set_is_refused_on_import():
    result = import_with_isa("mmx")
    assert result.returncode != 0
    message = "ImportError: PACPU_ISA: unknown instruction set 'mmx'; use portable, avx2, avx512, avx512bf16 or amx"
    assert message in result.stderr
