"""Sizes of the checks of operations with which a CPU, or Triton's interpreter, takes moments for them."""

from __future__ import annotations

import pytest

from swiftllm.ops.matrices import MXFP4_GROUP
from tests.gpu import operations

SIZES = {
    "HEADS": ((3, 1, 80),),
    "CHUNKS": ((1, 1), (5, 5), (3, 20)),
    "CONTEXTS": (1, 17, 140),
    "EMBEDDED": (7, 1100, 3),
    "INT8_BLOCKS": (4, 2, ((2, 16),)),
    "ROWS": ((3, 576),),
    "LINEARS": ((72, 192, 64, True, False), (40, 128, 64, True, True)),
    "LINEAR_ROWS": (1, 17),
    "EXPERTS": ((3, 2, 40, 16, 0, False), (3, 2, 48, 16, 16, False), (2, 1, 32, 32, MXFP4_GROUP, True)),
    "EXPERT_ROWS": (5,),
    "PAIRS": ((3, 2), (5, 1100)),
    "STATES": (1, 2, 16, 24),
    "STATE_ROWS": (5, 2),
}


def make_small(patch: pytest.MonkeyPatch) -> None:
    for name, sizes in SIZES.items():
        patch.setattr(operations, name, sizes)
