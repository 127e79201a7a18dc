"""How the processes of the other ranks begin and end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Collection

from swiftllm.parallel.pipe import Pipe

STANDARD_ERROR = 2  # also for what ranks print: a command's output is the driver's alone
ENTRY = "swiftllm.parallel.rank:rank_main"


class SpawnedRanks:
    """Starts each rank as a fresh Python of this machine, which ends when its end of the pipe closes."""

    def __init__(self, entry: str = ENTRY) -> None:
        """``entry``: the function that the process runs, ``module:name``, called with the pipe."""
        self._entry = entry

    def start(self, rank: int, threads: int, cores: Collection[int] = ()) -> tuple[subprocess.Popen[bytes], Pipe]:
        """Start rank ``rank``, which computes with ``threads`` threads, and connect to it.

        ``cores``: those that it is bound to; without any, to none.
        """
        module, _, name = self._entry.partition(":")
        own, its = socket.socketpair()
        bind = f"os.sched_setaffinity(0, {set(cores)}); " if cores else ""  # before torch starts threads
        program = (  # ends without Python's clean-up, which takes a second
            f"import os, socket; {bind}from swiftllm.parallel.pipe import Pipe; from {module} import {name}; "
            f"{name}(Pipe(socket.socket(fileno={its.fileno()}))); os._exit(0)"
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": str(threads),  # read when torch is imported
        }
        with its:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[its.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=STANDARD_ERROR,
            )
        return process, Pipe(own)
