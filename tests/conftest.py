"""One thread for the lane and torch: on a busy small machine two are many times slower than one."""

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """Engines that are told nothing about threads take this for a machine of one core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swiftllm.runtime.cores.usable_cores", lambda: 1)
        yield
