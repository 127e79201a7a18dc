"""JSON in what models write, which may be cut, or lenient as Python's."""

from __future__ import annotations

import json
import math
import sys
from typing import Any


def as_float(written: str) -> float:
    """A number of JSON; what no float can hold is the largest one, as Python would write infinity, which is no JSON."""
    value = float(written)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_float=as_float, parse_constant=refuse_constant)


def is_text(text: str) -> bool:
    """Whether it can be sent: JSON may hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def ends_in_string(text: str) -> bool:
    """Whether a beginning of JSON ends within a string."""
    is_inside = is_escaped = False
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = is_inside
        elif char == '"':
            is_inside = not is_inside
    return is_inside


def object_of(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, if it is one."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class GrowingObject:
    """A JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._is_in_string = self._is_escaped = False

    def take(self, text: str) -> int:
        """Number of characters of ``text``, which goes on with it, that belong to the object."""
        for place, char in enumerate(text):
            if self._is_in_string:
                self._is_in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "]}":
                self._depth -= 1
                if not self._depth:
                    self.is_over = True
                    return place + 1
        return len(text)
