"""What a run of the tests leaves to chance: their order alone, by a seed that the run's last lines say.

Whatever a test or a fixture draws depends on its name, so that it draws the same in every run and beside any others.
``--order-seed N`` repeats an order. A file's tests stay together, since they share what is dear to make.
"""

from __future__ import annotations

import hashlib
import random
import sys

import pytest

LONGEST_FILE = "test_triton.py"
TOLD = "order_seed"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--order-seed", type=int, metavar="N", help="the order of an earlier run, as its last lines say")


def draw_order(config: pytest.Config) -> None:
    """Choose an order, unless one is given, or the process that pytest-xdist started this one for has chosen."""
    given = getattr(config, "workerinput", {}).get(TOLD, config.option.order_seed)
    config.option.order_seed = random.SystemRandom().randrange(10**6) if given is None else given


def tell_order(config: pytest.Config, told: dict[str, object]) -> None:
    """``told`` is what a process that pytest-xdist starts is given."""
    told[TOLD] = config.option.order_seed


def shuffle(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order of two tests depends on their names and the seed, not on which others run."""
    seed = config.option.order_seed

    def place(item: pytest.Item) -> tuple[bool, str, str]:
        file = item.location[0]
        first = item.path.name != LONGEST_FILE  # so that it is not left to one process at the end
        return first, place_of(f"{seed} {file}"), place_of(f"{seed} {item.nodeid}")

    items.sort(key=place)


def order_said(config: pytest.Config) -> str:
    return f"order of the tests: --order-seed {config.option.order_seed}"


def place_of(name: str) -> str:
    """An order of names that has nothing to do with what they say and is always the same."""
    return hashlib.sha256(name.encode()).hexdigest()


def seed_generators(name: str) -> None:
    """Seed all generators that tests and the product draw from in this process."""
    from swiftllm.server import answer, tool_calls

    for generator in (random, answer.ID_BITS, tool_calls.ID_BITS):
        generator.seed(name)
    number = random.Random(name).getrandbits(32)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)
