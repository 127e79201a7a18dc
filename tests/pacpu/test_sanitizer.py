"""The extension under the address and undefined-behaviour sanitizers: every kernel once, and all that reads arguments.

Left out: the ISPC kernel, whose compiler has no such checks, and checks of each pointer, of which the address sanitizer
makes most.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BUILD = REPO / "build/sanitized"  # stays: setup.py compiles what has changed since

RUN_EVERY_KERNEL = """
import torch
import pacpu
from pacpu import _pacpu, int8
from dataclasses import replace
from tests.pacpu.cases import DTYPES, make_case, shared_case, windowed_case
from tests.pacpu.int8_cases import as_int8, make_int8_case
from tests.pacpu.packed_codes import random_matrix
from tests.pacpu.test_experts import Layer, routing
from tests.pacpu.test_linear_attention import check_convolve, check_delta_rule

torch.manual_seed(0)
for isa in ("portable", "avx2", "avx512", "avx512bf16", "amx"):
    try:
        _pacpu.select_isa(isa)
    except ValueError:
        continue
    for dtype in DTYPES:
        for kernel in pacpu.kernels(dtype):
            for shape in (dict(), dict(num_heads=5, num_kv_heads=5, head_dim=72, block_size=5, seq_lens=(300, 1))):
                make_case(dtype, **shape).check(kernel=kernel, num_threads=3)
            windowed = windowed_case(dtype, 45, num_heads=4, num_kv_heads=2, head_dim=40)
            replace(windowed, sinks=torch.randn(4)).check(kernel=kernel, num_threads=3)
            for heads, group in zip(pacpu.HEADS, (1, 2)):
                pacpu.set_shared_row_cost(dtype, heads, 1 / 8)
                case = shared_case(dtype, num_heads=2 * group, num_kv_heads=2, head_dim=8)
                case.check(kernel=kernel, num_threads=3)
            print("ran", isa, dtype, kernel)
    from pacpu import rows
    for dtype in DTYPES:
        for shape in (dict(num_heads=12, head_dim=72, block_size=32), dict(num_heads=3, head_dim=8, seq_lens=(40, 16))):
            make_int8_case(dtype, **shape).check(num_threads=3)
        as_int8(windowed_case(dtype, 45, head_dim=40)).check(num_threads=3)
        pool, blocks = torch.zeros(2, 3, 3, 2 * int8.tile_bytes(72), dtype=torch.uint8), torch.tensor([2, 0])
        elements = torch.ones(2, 2, 3, 2, 32, 72, dtype=dtype)
        rows.scatter_blocks(elements, pool, blocks, num_threads=2)
        rows.gather_blocks(pool, blocks, elements, num_threads=2)
        rows.gather_kv(pool[1], blocks, torch.empty(2, 3, 39, 72, dtype=dtype), num_threads=2)
        token = elements[0, 0, :, 0, :3]
        rows.store_kv(token, token, pool[0], torch.ones(3).long(), torch.arange(3) + 29)
        x, y, heads = torch.ones(5, 70, dtype=dtype), torch.ones(5, 35, dtype=dtype), torch.ones(5, 3, 10, dtype=dtype)
        rows.rms_norm(y, y[0], 1e-5, y.clone(), addend=y.clone(), num_threads=2)
        rows.rotary(heads, torch.ones(5, 2, 10))
        rows.silu_and_mul(x, y)
        for taps in (2, 4):
            check_convolve(dtype, taps, num_threads=2)
        for sizes in ((1, 3, 128, 128), (2, 4, 5, 35)):
            check_delta_rule(dtype, *sizes, num_threads=2)
        rows.store_kv(heads, heads, torch.ones(2, 3, 2, 4, 10, dtype=dtype), torch.ones(5).long(), torch.arange(5) % 4)
        cache, blocks = torch.ones(2, 3, 3, 2, 4, 5, dtype=dtype), torch.tensor([2, 0])
        rows.gather_kv(cache[1], blocks, torch.empty(2, 3, 7, 5, dtype=dtype), num_threads=2)
        rows.gather_blocks(cache, blocks, cache[:, :2].clone(), num_threads=2)
        rows.scatter_blocks(cache[:, :2].clone(), cache, blocks, num_threads=2)
    if isa in ("avx512", "avx512bf16"):
        weight = torch.ones(50, 35).bfloat16()
        matrix = torch.empty(rows.packed_shape(50, 35), dtype=torch.bfloat16)
        rows.pack_matrix(weight, matrix)
        for num_rows in (1, 17, 130):
            x, out = weight[:1].repeat(num_rows, 1), torch.empty(num_rows, 50, dtype=torch.bfloat16)
            rows.linear(x, matrix, torch.ones(50).bfloat16(), out, num_threads=2)
            assert (out == 36).all()
    for dtype in DTYPES:
        matrix = random_matrix(50, 1040, 16, dtype, is_ordered=True)
        matrix.packed.write_out(torch.empty(50, 1040, dtype=dtype), num_threads=2)
        for num_rows in (1, 17, 130):
            x, out = torch.ones(num_rows, 1040, dtype=dtype), torch.empty(num_rows, 50, dtype=dtype)
            matrix.packed.linear(x, torch.ones(50, dtype=dtype), out, num_threads=2)
            assert out.isfinite().all()
        for scale_dtype in (torch.float16, torch.uint8):
            layer = Layer(3, 96, 32, 32, dtype, scale_dtype, is_clamped=scale_dtype is torch.uint8)
            for num_rows in (1, 23):
                ids, likelihoods = routing(3, num_rows, 2, padding=num_rows // 5)
                x = torch.randn(num_rows, 96).to(dtype)
                out = torch.empty_like(x)
                layer.packed(x, ids, likelihoods, out, num_threads=2)
                assert out.isfinite().all()
    print("ran", isa, "rows")
pacpu.zero(torch.ones(1_600_001)[3:], num_threads=3)
print(pacpu.read_bandwidth(torch.ones(1001), num_threads=3) > 0, _pacpu.__file__)
"""

# The extension is imported before pytest puts the source tree in front of the path.
RUN_TESTS_OF_ARGUMENTS = """
import sys
import pytest
from pacpu import _pacpu

print(_pacpu.__file__)
files = ["test_arguments.py", "test_rows.py::test_refusals", "test_kv_copies.py", "test_int8.py::test_refusals"]
files += ["test_linear_attention.py::test_refusals"]
files += ["test_lent_arrays.py", "test_limits.py::test_thread_counts", "test_limits.py::test_sizes"]
files = [f"tests/pacpu/{file}" for file in files]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *files]))
"""


MAKE_RANDOM_CALLS = """
from tests.pacpu.random_calls import run

print(*run(1, 2000), sep="\\n")
"""


@dataclass(frozen=True)
class Sanitized:
    extension: Path
    env: dict[str, str]

    def run(self, program: str) -> list[str]:
        """The lines that a Python program prints; a finding of the sanitizers ends it."""
        ran = subprocess.run(
            [sys.executable, "-c", program], env=self.env, cwd=REPO, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout.splitlines()


def library(name: str) -> str | None:
    """Path of a library of the compiler, which must come before all others in a sanitized process."""
    answer = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    path = answer.stdout.strip()
    return path if os.path.isabs(path) else None


@pytest.fixture(scope="module")
def sanitized() -> Sanitized:
    if "CXX" in os.environ or shutil.which("g++") is None:
        pytest.skip("looks for the sanitizer's libraries where g++ has them")
    preload = [library(name) for name in ("libasan.so", "libstdc++.so.6")]
    if None in preload:
        pytest.skip("g++ has no libasan.so")
    build = ["setup.py", "--quiet", "build_ext", "--build-lib", BUILD / "lib", "--build-temp", BUILD / "temp"]
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:  # of two test processes the second finds it built
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = subprocess.run(
            [sys.executable, *build],
            env=os.environ | {"PACPU_SANITIZE": "1", "ISPC": "none"},
            cwd=REPO,
            capture_output=True,
            text=True,
        )
        assert built.returncode == 0, built.stderr
        for module in (REPO / "pacpu").glob("*.py"):
            shutil.copy(module, BUILD / "lib/pacpu")
    extension = BUILD / f"lib/pacpu/_pacpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert b"__asan_init" in extension.read_bytes() and b"__ubsan" in extension.read_bytes()
    env = os.environ | {
        "PYTHONPATH": f"{BUILD / 'lib'}:{REPO}",
        "PYTHONSAFEPATH": "1",  # or the folder it runs in would come before
        "LD_PRELOAD": ":".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
    }
    env.pop("PACPU_ISA", None)
    return Sanitized(extension, env)


@pytest.mark.thorough
def test_no_kernel_reads_or_writes_where_it_should_not(sanitized):
    lines = sanitized.run(RUN_EVERY_KERNEL)
    assert lines[-1] == f"True {sanitized.extension}"
    assert "ran portable torch.float16 native" in lines


@pytest.mark.thorough
def test_reading_of_arguments_is_sound(sanitized):
    lines = sanitized.run(RUN_TESTS_OF_ARGUMENTS)
    assert lines[0] == str(sanitized.extension)
    assert any(line.endswith("[100%]") for line in lines)


@pytest.mark.thorough
def test_random_calls_end_in_a_result_or_a_sentence(sanitized):
    outcomes = sanitized.run(MAKE_RANDOM_CALLS)
    assert outcomes and all(what.endswith(("done", "Error")) for what in outcomes), outcomes
