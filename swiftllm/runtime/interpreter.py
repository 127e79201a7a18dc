"""How the threads of a process that computes share Python's interpreter."""

from __future__ import annotations

import sys

# The launching thread hands over a layer's work and sleeps, over and over. It may wake up while the CPU worker, or the
# event loop of a server, has the interpreter's lock. With Python's default of 5 ms it, and the device, would wait that
# long for it: a layer takes less.
SWITCH_INTERVAL_S = 0.001


def share_interpreter() -> None:
    """For the whole process: a thread that wakes up gets the interpreter within a millisecond."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
