"""Which cases a run of the whole suite takes: of a test with many cases a fixed sample, and not the slowest tests.

``make test ARGS=--all-cases`` takes every one, as does a run of named files.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict

import pytest

MOST_CASES = 3
"""Of one test, where a case is fast."""
MOST_SLOW_CASES = 2
"""Of one test in a file whose cases take a second or more."""
SLOW_FILES = (
    "tests/apex/cli/test_simulate.py",
    "tests/apex/perf/online/test_correction.py",
    "tests/apex/placement/test_auto.py",
    "tests/apex/placement/test_measured.py",
    "tests/apex/schedulers/adaptive/test_policy.py",
    "tests/apex/schedulers/omniserve/",
    "tests/apex/schedulers/test_prefix_cache.py",
    "tests/apex/schedulers/test_schedulers.py",
    "tests/apex/test_end_to_end.py",
    "tests/apex/test_environment.py",
    "tests/apex/test_prefix_cache.py",
    "tests/apex/test_quantised.py",
    "tests/apex/test_tensor_parallel",
    "tests/evaluation/planning/",
    "tests/evaluation/plots/test_shapes.py",
    "tests/evaluation/test_reproduce",
    "tests/golden/test_records.py",
    "tests/pacpu/test_experts.py",
    "tests/swiftllm/model/weights/quantised/test_memory.py",
    "tests/swiftllm/remote/",
    "tests/swiftllm/runtime/",
)
THOROUGH = "thorough"
"""Marks tests that take ten seconds or more and repeat at length what others check."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="every case of every test, not a sample of them")


def take_sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only the sample in ``items``, if the whole suite runs."""
    if config.getoption("--all-cases") or list(config.args) != list(config.getini("testpaths")):
        return
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.location[0], getattr(item, "originalname", item.name)].append(item)
    kept: set[pytest.Item] = set()
    for (file, _), those in cases.items():
        most = MOST_SLOW_CASES if file.startswith(SLOW_FILES) else MOST_CASES
        kept.update(sorted(those, key=place)[:most])
    left_out = [item for item in items if item not in kept or item.get_closest_marker(THOROUGH)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item in kept and not item.get_closest_marker(THOROUGH)]


def place(item: pytest.Item) -> str:
    """An order of cases that has nothing to do with their parameters and is always the same."""
    return hashlib.sha256(item.nodeid.encode()).hexdigest()
