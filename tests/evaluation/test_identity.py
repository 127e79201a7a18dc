"""What decides a point's numbers is in its identity; what does not is left out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from evaluation.grid import simulate, simulated_point
from evaluation.run import identity, plain
from swiftllm.config import EngineConfig

PLACE = {"setting": "apex-a10", "system": "apex", "input_len": 1000, "output_len": 50, "num_requests": 4}


def of(**changes: object) -> str:
    return json.dumps(identity([simulated_point(["a"], simulate({**PLACE, **changes}))]))


def test_every_axis_is_part_of_it_and_it_is_short() -> None:
    changes = (
        {"system": "neo"}, {"seed": 1}, {"output_len": 60}, {"num_gpu_blocks": 500}, {"cpu_bandwidth_gb_s": 20},
        {"hand_over_us": 9}, {"actual_over_believed": 2.0}, {"online_correction": False}, {"slower": 1.2},
        {"one_class": True}, {"duration_s": 9.0}, {"cpu_hosts": 2}, {"request_rate": 2.0},
    )  # fmt: skip
    texts = {of(**change) for change in changes} | {of()}
    assert len(texts) == len(changes) + 1
    assert of() == of() and max(map(len, texts)) < 6000


@dataclass(frozen=True)
class Task:
    number: int
    stall_timeout_s: float
    logs: Path = field(compare=False)


def test_fields_that_are_not_compared_and_models_are_left_out() -> None:
    assert plain(Task(3, 9.0, Path("/tmp/x"))) == {"number": 3}
    engine = EngineConfig("somewhere/model", num_gpu_blocks=9)
    assert plain(engine)["num_gpu_blocks"] == 9
    assert plain(engine) == plain(replace(engine, model="elsewhere/model"))
    with pytest.raises(TypeError, match="object has no plain form"):
        plain({"a": object()})
