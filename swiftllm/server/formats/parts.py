from __future__ import annotations

from typing import Literal, NamedTuple


class Part(NamedTuple):
    kind: Literal["content", "reasoning", "tool_call"]
    text: str
    index: int = 0
    call_id: str = ""
    name: str = ""
