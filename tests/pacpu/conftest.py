"""For the tests of pacpu: a test may choose instruction sets, the next one finds the best again."""

import pytest

from pacpu import _pacpu
from tests.pacpu.cases import BEST_ISA


@pytest.fixture(autouse=True)
def restore_isa():
    yield
    _pacpu.select_isa(BEST_ISA)
