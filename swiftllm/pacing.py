"""Keeps the host close behind what the device has done."""

from __future__ import annotations

from collections import deque

from swiftllm.device import Event, Stream

BOUNDARIES_AHEAD = 1


class Pacer:
    """Lets the host launch work at most ``BOUNDARIES_AHEAD`` boundaries beyond the one the device works on.

    Launching takes a tenth of the time of the work. A host that ran ahead would ask whether a CPU result is there long
    before the device could use it, and always find that it is not.
    """

    def __init__(self, stream: Stream, ahead: int = BOUNDARIES_AHEAD) -> None:
        self._stream = stream
        self._ahead = ahead
        self._marks: deque[Event] = deque()

    def launched(self) -> None:
        """A boundary has been launched."""
        self._marks.append(self._stream.mark())

    def wait(self) -> None:
        """Sleep until the device is close enough."""
        while len(self._marks) > self._ahead:
            self._marks.popleft().synchronize()
