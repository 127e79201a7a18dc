"""A Python of its own that runs functions: what it returns, raises and says while it runs."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from evaluation.measure.processes import Child, ChildEnded, session_stats

LIMIT_S = 120.0


class Wordy(Exception):
    """Cannot be made again from its text alone, as pickle does."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}, {second}")


def raise_wordy() -> None:
    raise Wordy("one", "two")


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child("the process")
    yield made
    made.stop()


def test_a_function_runs_there_and_its_errors_come_back(child: Child) -> None:
    assert child.call(os.getpid, limit_s=LIMIT_S) == child.pid != os.getpid()
    with pytest.raises(ValueError, match="invalid literal") as told:
        child.call(int, "x", limit_s=LIMIT_S)
    assert "in its own process:\nTraceback" in told.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Wordy: one, two"):
        child.call(raise_wordy, limit_s=LIMIT_S)
    assert child.call(os.getsid, 0, limit_s=LIMIT_S) == child.pid, "errors end nothing, and it leads its session"


def test_one_that_ends_by_itself_is_told_from_one_that_hangs(child: Child) -> None:
    with pytest.raises(ChildEnded, match=r"the process died .status 7."):
        child.call(os._exit, 7, limit_s=LIMIT_S)
    hanging = Child("the process")
    with pytest.raises(ChildEnded, match=r"hung: it gave no sign of life for 0[.]4 s and was killed"):
        hanging.call(time.sleep, 1000.0, limit_s=0.4)
    assert session_stats(hanging.pid) == {}


def test_a_measured_engine_gives_signs_of_life(tmp_path: Path) -> None:
    # Imported here: a child that loads this module needs none of it.
    from evaluation.drivers import measure
    from swiftllm.config import EngineConfig
    from tests.apex.replay.fake_engine import FakeEngine
    from tests.evaluation.papers_machines import live_point
    from tests.reference.tiny_model import make_tiny_llama

    config = EngineConfig(str(make_tiny_llama(tmp_path / "model")), dtype="float16", block_size=16, num_gpu_blocks=9)
    signs: list[None] = []
    quiet = Console(file=io.StringIO())
    result = measure(FakeEngine(), live_point("swiftllm", config).task, "x", quiet, lambda: signs.append(None))
    assert len(signs) >= max(record.wanted_output_len for record in result.records)
