"""Kernels with one fault each: ``ttsem`` must find it, or what it says of the engine's kernels means nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ttsem import harness, sanitize, validate

from swiftllm.ops.triton.rows import rms_norm_kernel
from tests.triton.interpreted_faults import WIDE, collides_kernel, copy_kernel

CAPABILITIES = 75, 86, 90
SHARED = torch.arange(24)  # of two arguments, which overlap


@pytest.fixture(params=CAPABILITIES)
def session(request: pytest.FixtureRequest) -> Iterator[sanitize.Session]:
    with sanitize.session(request.param, cuda_is_cpu=False) as session:
        yield session


def test_a_sound_kernel_passes(session):
    x, out = torch.randn(10), torch.zeros(12)
    copy_kernel[(3,)](x, out, 10, 4, 0)
    assert torch.equal(out[:10], x) and not out[10:].any()


# Tensors that are views of a larger one would have its elements around them.
@pytest.mark.parametrize(
    "kind, kernel, programs, arguments",
    [
        ("oob_read", copy_kernel, 3, (WIDE[:10].clone(), WIDE.clone(), 10, 4, 1)),
        ("oob_read", copy_kernel, 3, (WIDE[:10].clone(), WIDE.clone(), 10, 4, -1)),
        ("oob_read", copy_kernel, 3, (WIDE[:10].clone(), WIDE.clone(), 12, 4, 0)),
        ("oob_write", copy_kernel, 3, (WIDE.clone(), WIDE[:10].clone(), 12, 4, 0)),
        ("race", copy_kernel, 3, (SHARED[4:], SHARED, 12, 4, 0)),
        ("poison", collides_kernel, 1, (WIDE.clone(), 8)),
    ],
    ids=["beyond", "before", "no mask, load", "no mask, store", "race", "lanes collide"],
)
def test_a_fault_is_found(session, kind, kernel, programs, arguments):
    with pytest.raises(sanitize.KernelFault) as fault:
        kernel[(programs,)](*arguments)
    assert fault.value.fault.kind == kind


def test_a_kernel_of_the_engine_is_found_with_a_size_too_large(session):
    x, weight = torch.randn(3, 144), torch.rand(144)
    with pytest.raises(sanitize.KernelFault) as fault:
        rms_norm_kernel[(3,)](x, weight, torch.empty(3, 145), 144, 1e-5, 0.0, 145, 256)
    assert fault.value.fault.kind == "oob_read"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_pass_that_changes_a_kernel_is_found(capability):
    """A sum becomes a difference in the middle of the compilation, and stays one."""
    x, weight, out = torch.randn(2, 100), torch.rand(100), torch.empty(2, 100)
    arguments = (x, weight, out, 100, 1e-5, 100, 128)
    target = harness.target_for("cpu", capability)
    with sanitize.session(capability, cuda_is_cpu=False):
        run = type(rms_norm_kernel).run
        record = harness.record_launch(rms_norm_kernel, arguments, {}, (2,), run, __file__).record
    stages = validate.split_dump(harness.dump_for_launch(record, target))
    stages = stages[:: len(stages) // 6][:4]
    assert validate.validate_stages(record, stages).first_bad_pass is None
    stages[2:] = [(name, text.replace('"arith.addf"', '"arith.subf"')) for name, text in stages[2:]]
    report = validate.validate_stages(record, stages)
    assert [result.verdict == "mismatch" for result in report.passes] == [False, False, True, True]
    assert report.changed_by == stages[1][0]
