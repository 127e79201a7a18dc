"""For all tests: one torch thread, one core, seeds, a random order, and last lines that say what was left out.

One thread for the GPU batch and torch, since two are many times slower than one on a busy small machine. The process
that hands out the tests imports no torch.
"""

import gc
import signal
from collections import Counter
from collections.abc import Generator, Iterator

import hypothesis
import pytest

import apex.environment  # noqa: F401  before matplotlib
from swiftllm import machine
from tests import chance, sampled_cases
from tests.evaluation.headless_browser import NOT_FOUND

# A shell ignores interrupts in what it starts in the background, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, however long they take.
hypothesis.settings.register_profile("same", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """Engines that are told nothing about threads take this for a machine of one core."""
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swiftllm.runtime.execution_context.usable_cores", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_first_start() -> Iterator[None]:
    """What an engine measures at its first start takes seconds, and many tests have a cache directory of their own.

    CPU attention stays as it is, of which nothing is kept, and operations are timed in fewer rounds."""
    import pacpu
    from swiftllm.runtime import cpu_tuning as choices

    if not pacpu.is_built:
        yield
        return
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
        patch.setattr("evaluation.planning.setting.fetch_apart", unreachable)
        yield


@pytest.fixture(scope="module", autouse=True)
def cores_given_back() -> Iterator[None]:
    """A process that is left bound to its cores would not bind to those of the ranks that the next file opens."""
    yield
    assert machine._limits.unbound is None, "a test has opened several ranks and not ended them"


def pytest_addoption(parser: pytest.Parser) -> None:
    sampled_cases.add_option(parser)
    chance.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    chance.draw_order(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    chance.tell_order(node.config, node.workerinput)


@pytest.hookimpl(tryfirst=True)  # pytest then brings tests together that share a fixture's case
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sampled_cases.take_sample(config, items)
    chance.shuffle(config, items)


def pytest_collection_finish() -> None:
    """What has been imported stays: a collection, as before each capture of graphs, need not look at it."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """A fixture that several tests share draws the same whichever of them comes first."""
    chance.seed_generators(f"{request.node.nodeid} {fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    chance.seed_generators(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where the CPU kernels are not built, what needs them is skipped, and the rest of the tests runs."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if report.failed and isinstance(error, ImportError) and error.name == "pacpu":
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, f"Skipped: {error}")
    return report


def pytest_runtest_teardown() -> None:
    """Commands that start servers handle SIGTERM for the rest of their process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    files = Counter(report.nodeid.split("::")[0] for report in skipped if NOT_FOUND in str(report.longrepr))
    if files:
        names = ", ".join(f"{file} ({count})" for file, count in sorted(files.items()))
        terminalreporter.write_line(f"skipped without a browser: {names}; {NOT_FOUND}", yellow=True)
    terminalreporter.write_line(chance.order_said(terminalreporter.config))
