"""Sarathi-Serve (OSDI'24) with two service classes, as OmniServe's evaluation adapts it (section 5.1.3)."""

from __future__ import annotations

from apex.perf.model import PerfModel
from apex.schedulers.omniserve.policy import GPU_ONLY, OmniServe
from apex.strategy import StrategyConfig


class Sarathi(OmniServe):
    """OmniServe's order and chunks on the GPU alone. Best-effort requests wait for GPU blocks.

    A preempted request is computed again, as in vLLM, on which Sarathi-Serve is built.
    """

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        super().__init__(model, config)
        self.rules = GPU_ONLY
