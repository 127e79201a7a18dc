"""How far the host may launch work ahead of the device."""

from __future__ import annotations

from collections import deque

from swiftllm.device.device import Event, Stream

STAGES_AHEAD = 1


class Pacer:
    """Keeps the host's launches at most ``ahead`` stages beyond the one the device works on.

    Launching takes a tenth of the time of the work. A host far ahead would poll for CPU results long before the device
    can use them, and find none ready.
    """

    def __init__(self, stream: Stream, ahead: int = STAGES_AHEAD) -> None:
        self._stream = stream
        self._ahead = ahead
        self._marks: deque[Event] = deque()

    def launched(self) -> None:
        """Note that a stage has been launched."""
        self._marks.append(self._stream.mark())

    def wait(self) -> None:
        """Sleep until the device is close enough."""
        while len(self._marks) > self._ahead:
            self._marks.popleft().synchronize()
