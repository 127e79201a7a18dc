"""What else keeps the machine busy while something is measured: it shares cores, caches and memory bandwidth."""

from __future__ import annotations

import os
import time
from pathlib import Path

DISTURBING_CORES = 0.1
"""From so many busy cores on a result is told with them."""


class OtherWork:
    """Everything but this process, from here on."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._used_s = used_by_others_s()

    def busy_cores(self) -> float | None:
        """Cores it has kept busy on average; None where the system does not tell."""
        used_s, passed_s = used_by_others_s(), time.monotonic() - self._start_s
        if used_s is None or self._used_s is None or not passed_s:
            return None
        return max(0.0, used_s - self._used_s) / passed_s  # the system counts in hundredths of a second


def used_by_others_s() -> float | None:
    """CPU seconds since the system's start."""
    try:
        user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    except (OSError, ValueError):
        return None
    own = os.times()
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - own.user - own.system
