"""The checks of operations on a card, in Triton's interpreter: in both forms they pass, and they find a wrong one."""

from __future__ import annotations

import pytest
import torch

from swiftllm.ops.triton.ops import TritonOps
from tests.gpu import operations
from tests.reference.small_checks import make_small
from tests.triton.interpreter import repair_bfloat16
from tests.triton.memory_check import watch_memory

repair_bfloat16()
watch_memory()

HOST = torch.device("cpu")
DTYPES = (torch.float16,)  # float32 has one form
CHECKS = (
    operations.check_rows,
    operations.check_blocks,
    operations.check_int8_blocks,
    operations.check_contexts,
    operations.check_decode_attention,
    operations.check_quantised_linear,
    operations.check_sort_pairs,
    operations.check_experts,
    operations.check_states,
)


@pytest.fixture(autouse=True)
def few_and_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    print("seed", torch.seed())
    make_small(monkeypatch)
    monkeypatch.setattr(operations, "dtypes", lambda _: DTYPES)
    both = {f"sm_{capability}": TritonOps(HOST, capability, num_multiprocessors=2) for capability in (80, 75)}
    monkeypatch.setattr(operations, "forms", lambda *_: both)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:Triton has no tensor cores")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_both_forms_pass(check) -> None:
    check(HOST)


def test_a_wrong_form_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    attend = TritonOps.decode_attention

    def without_sinks_on_sm_75(ops, *given) -> None:
        attend(ops, *given[:-1], None if ops._capability == 75 else given[-1])

    monkeypatch.setattr(TritonOps, "decode_attention", without_sinks_on_sm_75)
    with pytest.raises(AssertionError):
        operations.check_decode_attention(HOST)
    assert "as sm_75 computes" in capsys.readouterr().out
