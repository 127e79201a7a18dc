"""Which cases a run of the whole suite takes: of a test with many cases a fixed sample, and not the slowest tests.

``make test ARGS=--all-cases`` takes every one, as does a run of named files without ``--sample``.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.chance import place_of

MOST_CASES = 2
"""Of one test, where a case is fast."""
MOST_SLOW_CASES = 1
"""Of one test in a file whose cases take a second or more."""
SLOW_FILES = (
    "tests/apex/cli/test_simulate.py",
    "tests/apex/cli/test_doctor.py",
    "tests/apex/perf/online/test_correction.py",
    "tests/apex/placement/test_auto.py",
    "tests/apex/placement/test_measured.py",
    "tests/apex/placement/test_search.py",
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
    "tests/evaluation/experiments/test_measured_sweeps.py",
    "tests/evaluation/plots/test_shapes.py",
    "tests/evaluation/test_artifact.py",
    "tests/evaluation/test_reproduce",
    "tests/evaluation/test_soak.py",
    "tests/golden/test_records.py",
    "tests/pacpu/test_experts.py",
    "tests/swiftllm/model/weights/quantised/test_memory.py",
    "tests/swiftllm/remote/",
    "tests/swiftllm/runtime/",
)
THOROUGH = "thorough"
"""Marks tests that take five seconds or more and repeat at length what others check."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="every case of every test, not a sample of them")
    parser.addoption("--sample", action="store_true", help="the sample, of named files too")


def take_sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only the sample in ``items``, if the whole suite runs."""
    is_whole = list(config.args) == list(config.getini("testpaths"))
    if config.getoption("--all-cases") or not (is_whole or config.getoption("--sample")):
        return
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker(THOROUGH):
            cases[item.location[0], getattr(item, "originalname", item.name)].append(item)
    kept: set[pytest.Item] = set()
    for (file, _), those in cases.items():
        most = MOST_SLOW_CASES if file.startswith(SLOW_FILES) else MOST_CASES
        kept.update(sorted(those, key=lambda item: place_of(item.nodeid))[:most])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
