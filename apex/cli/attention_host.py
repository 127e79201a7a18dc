"""`apex attention-host`: lends this machine's memory and cores to an engine on another host."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from apex.cli.options import ConfigFile
from apex.cli.output import InputError, input_errors
from apex.cli.serve import why_not


@dataclass(frozen=True)
class AttentionHostCommand(ConfigFile):
    """Hold a part of the CPU tier for an engine on another machine, and compute its CPU attention.

    For example, with the same APEX_HOST_SECRET set on both machines:

      apex attention-host --listen 0.0.0.0:7300                    # on 10.0.0.7
      apex serve MODEL --attention-hosts 10.0.0.7:7300             # on the machine with the GPU

    It needs no GPU and no model. One engine at a time may use it. When the engine ends, its memory is free again for
    the next one. Ctrl-C stops. See docs/distributed.md.
    """

    listen: str = "127.0.0.1:7300"
    """Address and port to listen at; port 0 takes any free one. Other machines need a secret to be set."""
    memory_gib: float | None = None
    """Memory for K and V; by default half of what is available when an engine connects."""
    threads: int | None = None
    """Threads of attention; by default all cores."""

    def run(self) -> int:
        with input_errors():
            for name in ("memory_gib", "threads"):
                if (value := getattr(self, name)) is not None and value <= 0:
                    raise ValueError(f"{name}={value} must be more than 0")
            from swiftllm.machine import GIB, available_host_bytes
            from swiftllm.remote.host import AttentionHost
            from swiftllm.remote.protocol import parse_address, shared_secret

            logging.basicConfig(level=logging.INFO, format="%(message)s")
            memory_bytes = None if self.memory_gib is None else int(self.memory_gib * GIB)
            if (memory_bytes or 0) > (available := available_host_bytes()):
                raise ValueError(f"memory_gib={self.memory_gib} exceeds the {available / GIB:.1f} GiB available here")
            address = parse_address(self.listen)
            try:
                host = AttentionHost(address, shared_secret(), memory_bytes=memory_bytes, num_threads=self.threads)
            except OSError as error:
                raise InputError(f"--listen {self.listen}: {why_not(error)}") from None
        address, port = host.address
        print(f"waiting for an engine at {address}:{port} with {host.num_threads} threads; Ctrl-C stops", flush=True)
        host.serve_forever()
        return 0
