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
    "tests/apex/schedulers/adaptive/test_scheduler.py",
    "tests/apex/schedulers/omniserve/",
    "tests/apex/schedulers/test_prefix_cache.py",
    "tests/apex/schedulers/test_schedulers.py",
    "tests/apex/test_end_to_end.py",
    "tests/apex/test_environment.py",
    "tests/apex/test_prefix_cache.py",
    "tests/apex/test_quantised.py",
    "tests/apex/test_tensor_parallel",
    "tests/evaluation/planning/",
    "tests/evaluation/test_measured_sweeps.py",
    "tests/evaluation/plots/test_shapes.py",
    "tests/evaluation/test_artifact.py",
    "tests/evaluation/test_bound_of_records.py",
    "tests/evaluation/test_reproduce",
    "tests/evaluation/test_soak.py",
    "tests/golden/test_records.py",
    "tests/pacpu/test_experts.py",
    "tests/swiftllm/model/weights/quantised/test_memory.py",
    "tests/swiftllm/remote/",
    "tests/swiftllm/runtime/",
)
WHOLE_FILES = (
    "tests/apex/perf/online/test_factor.py",
    "tests/apex/perf/test_core_division.py",
    "tests/apex/schedulers/adaptive/test_rates.py",
    "tests/apex/schedulers/adaptive/test_split.py",
    "tests/apex/schedulers/test_decisions.py",
    "tests/apex/schedulers/test_inequality.py",
    "tests/apex/simulator/test_backend.py",
    "tests/apex/simulator/test_build.py",
    "tests/apex/simulator/test_hardware",
    "tests/apex/simulator/test_paper_settings.py",
    "tests/apex/simulator/test_quantised_weights.py",
    "tests/apex/simulator/test_tensor_parallel.py",
    "tests/evaluation/test_grid.py",
    "tests/evaluation/test_places.py",
    "tests/evaluation/validation/test_run_files.py",
    "tests/evaluation/results/test_claims.py",
    "tests/evaluation/results/test_kinds.py",
    "tests/evaluation/results/test_overview.py",
    "tests/apex/workloads/test_formats.py",
    "tests/apex/workloads/test_requests.py",
    "tests/swiftllm/engine/test_executor.py",
    "tests/swiftllm/engine/test_limits.py",
    "tests/swiftllm/kv/test_blocks.py",
    "tests/swiftllm/kv/test_budget.py",
    "tests/swiftllm/model/config/",
    "tests/swiftllm/model/folder/test_tokenizer.py",
    "tests/swiftllm/model/weights/quantised/test_readers.py",
    "tests/swiftllm/parallel/test_shards.py",
    "tests/swiftllm/runtime/test_cores.py",
    "tests/swiftllm/scheduling/",
    "tests/swiftllm/server/api/translations/",
    "tests/swiftllm/server/formats/test_harmony.py",
    "tests/swiftllm/server/formats/test_readers.py",
    "tests/swiftllm/test_driver.py",
    "tests/swiftllm/test_machine.py",
    "tests/swiftllm/test_share.py",
    "tests/swiftllm/test_topology.py",
)
"""Whose cases take milliseconds: all are taken, since one may alone reach a branch."""
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
        kept.update(sorted(those, key=lambda item: place_of(item.nodeid))[: most_cases(file)])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def most_cases(file: str) -> int | None:
    """Of a test in this file; None: all."""
    if file.startswith(WHOLE_FILES):
        return None
    return MOST_SLOW_CASES if file.startswith(SLOW_FILES) else MOST_CASES
