"""Measures the CPU time of other processes during a measurement: they share cores, caches and memory bandwidth."""

from __future__ import annotations

import os
import time
from pathlib import Path

DISTURBING_CORES = 0.1
"""Results mention other work above this many busy cores."""


class OtherWork:
    """The work of all other processes since this object was made."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._used_s = used_by_others_s()

    def busy_cores(self) -> float | None:
        """Cores that other work has kept busy on average; None if the system does not report it."""
        used_s, passed_s = used_by_others_s(), time.monotonic() - self._start_s
        if used_s is None or self._used_s is None or not passed_s:
            return None
        return max(0.0, used_s - self._used_s) / passed_s  # the system counts in hundredths of a second


def used_by_others_s() -> float | None:
    """CPU seconds of all other processes since the system's start; None if the system does not report it."""
    try:
        user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    except (OSError, ValueError):
        return None
    own = os.times()
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - own.user - own.system
