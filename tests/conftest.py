"""For all tests: one torch thread, one core, and a last line that names what was skipped for want of a browser.

One thread for the lane and torch, since two are many times slower than one on a busy small machine. The process that
hands out the tests imports no torch.
"""

import gc
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

import apex.environment  # noqa: F401  before matplotlib
from tests import sampled_cases
from tests.evaluation.headless_browser import NOT_FOUND

# A shell ignores interrupts in what it starts in the background, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """Engines that are told nothing about threads take this for a machine of one core."""
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swiftllm.runtime.cores.usable_cores", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_first_start() -> Iterator[None]:
    """What an engine measures at its first start takes seconds, and many tests have a cache directory of their own.

    CPU attention stays as it is, of which nothing is kept, and operations are timed in fewer rounds."""
    from swiftllm.runtime import attention_choices as choices

    kinds = [f"{dtype} {heads}" for dtype in choices.DTYPES for heads in choices.KV_HEADS]
    rates = {kind: dict.fromkeys(choices.pacpu.PREFETCHES, 1.0) for kind in kinds}
    costs = {kind: choices.pacpu.shared_row_cost(*kind.split()) for kind in kinds}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "MIN_BYTES", 1)
        patch.setattr(choices, "last_level_cache_bytes", lambda: 0)
        patch.setattr(choices, "measure", lambda *_: choices.Measured(rates, costs))
        patch.setattr(choices, "keep", lambda *_: None)
        patch.setattr("apex.perf.profiler.ROUNDS", 3)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Measurements in a paper's setting find no published trace, here as on any machine."""

    def unreachable(*_: object) -> None:
        raise OSError("tests fetch nothing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluation.planning.traces.fetch_apart", unreachable)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    sampled_cases.add_option(parser)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sampled_cases.take_sample(config, items)
    items.sort(key=lambda item: item.path.name != "test_triton.py")  # the longest first: none is left to one process


def pytest_collection_finish() -> None:
    """What has been imported stays: a collection, as before each capture of graphs, need not look at it."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    files = Counter(report.nodeid.split("::")[0] for report in skipped if NOT_FOUND in str(report.longrepr))
    if files:
        names = ", ".join(f"{file} ({count})" for file, count in sorted(files.items()))
        terminalreporter.write_line(f"skipped without a browser: {names}; {NOT_FOUND}", yellow=True)
