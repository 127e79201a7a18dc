"""Nothing that a card computes is left out of the check of a card."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.gpu
from evaluation.gpu.stages import all_stages
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops
from tests.gpu import operations
from tests.gpu.__main__ import checks
from tests.reference.small_checks import make_small

HOST = torch.device("cpu")
OF_A_CPU = {"make_crossing"}  # a card runs a stage part by part
WITHIN = {"activation_of", "clamped_swiglu"}  # what make_experts uses, on a GPU a kernel of its own


def test_every_check_is_in_a_stage_and_runs_once(tmp_path: Path) -> None:
    known = checks(seconds=1.0).keys()
    stages = [stage for stage in all_stages(tmp_path, rehearse=False) if stage.name != "sanitizer"]
    listed = [word for stage in stages for part in stage.parts for word in part.command if word in known]
    assert sorted(listed) == sorted(known)


def test_every_function_that_checks_a_card_has_a_name() -> None:
    modules = [import_module(f"tests.gpu.{module.name}") for module in pkgutil.iter_modules(tests.gpu.__path__)]
    named = {getattr(check, "func", check) for check in checks(seconds=1.0).values()}
    there = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name.startswith("check_") and next(iter(inspect.signature(function).parameters), "") == "device"
    }
    # What takes a device and more is a part of other checks.
    there = {one for one in there if len(inspect.signature(one, follow_wrapped=False).parameters) == 1} | named
    assert {one.__name__ for one in there - named} == set()


def test_every_operation_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    called: set[str] = set()

    class Recorded(CpuOps):
        def __getattribute__(self, name: str) -> Any:
            called.add(name)
            return super().__getattribute__(name)

    recorded = Recorded()
    monkeypatch.setattr(operations, "dtypes", lambda _: [torch.float32])
    monkeypatch.setattr(operations, "forms", lambda *_: {"recorded": recorded})
    for check in checks(seconds=1.0).values():
        if getattr(check, "__module__", None) == operations.__name__ and hasattr(check, "__wrapped__"):
            check(HOST)
    public = {name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")}
    assert public - OF_A_CPU - WITHIN <= called, "operations that no check of a card calls"


@pytest.mark.parametrize("capability, names", [((9, 0), ["this device", "sm_75"]), ((7, 5), ["this device"])])
def test_a_newer_card_also_computes_as_sm_75(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], names: list[str]
) -> None:
    about = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132, name="a card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    there = operations.forms(torch.device("cuda"), torch.float16)
    assert list(there) == names
    x = torch.empty(1, dtype=torch.float16)
    assert [ops._has_tensor_cores(x) for ops in there.values()] == [capability == (9, 0), False][: len(names)]
    if capability == (9, 0):
        assert list(operations.forms(torch.device("cuda"), torch.bfloat16)) == ["this device"]


def test_a_failure_tells_the_form_and_the_dtype(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_small(monkeypatch)

    class Wrong(CpuOps):
        def gather_contexts(self, *given: Any) -> torch.Tensor:
            return super().gather_contexts(*given) + 1

    monkeypatch.setattr(operations, "forms", lambda *_: {"this device": CpuOps(), "sm_75": Wrong()})
    with pytest.raises(AssertionError):
        operations.check_contexts(HOST)
    assert "in float32, as sm_75 computes" in capsys.readouterr().out
