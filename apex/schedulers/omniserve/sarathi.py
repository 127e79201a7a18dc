"""Sarathi-Serve (OSDI'24) with two service classes, as OmniServe's evaluation adapts it (section 5.1.3)."""

from __future__ import annotations

from apex.schedulers.omniserve.scheduler import OmniServeScheduler


class SarathiScheduler(OmniServeScheduler):
    """OmniServe's order and chunks on the GPU alone. Best-effort requests wait for GPU blocks.

    A preempted request is computed again, as in vLLM, on which Sarathi-Serve is built.
    """

    def _may_offload(self) -> bool:
        return False
