"""The checks of this folder under pytest, where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.__main__ import checks
from tests.gpu.operations import NotHere

CHECKS = checks(seconds=20.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_gpu(name: str) -> None:
    try:
        CHECKS[name](torch.device("cuda"))
    except NotHere as lacking:
        pytest.skip(f"needs {lacking}")
