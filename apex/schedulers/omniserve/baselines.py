"""The systems that OmniServe's evaluation compares with, as it adapts them: two service classes, GPU only."""

from __future__ import annotations

from dataclasses import replace

from apex.perf.model import PerfModel
from apex.schedulers.omniserve.scheduler import GPU_ONLY, OmniServe
from apex.strategy import StrategyConfig
from swiftllm.scheduling.gpu_only import Vllm

RESERVED_SHARE = 0.1
"""Of the GPU's blocks, the share kept free of best-effort requests. Assumed: neither paper states it."""


class Llumnix(Vllm):
    """Llumnix (OSDI'24) on one instance: vLLM's scheduler, and a reserve of GPU blocks for latency-sensitive requests.

    Llumnix places and migrates requests among instances by their memory, and keeps headroom for those of high priority.
    With one instance only the headroom remains. Priorities are decided by memory; no iteration is bounded by a target.
    """

    rules = replace(Vllm.rules, withheld=RESERVED_SHARE, whole_prompts=False)  # its vLLM was older


class Sarathi(OmniServe):
    """Sarathi-Serve (OSDI'24) as in section 5.1.3: OmniServe's order and chunks on the GPU alone.

    Best-effort requests wait for GPU blocks. A preempted request is computed again, as in vLLM, on which Sarathi-Serve
    is built.
    """

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        super().__init__(model, config)
        self.rules = GPU_ONLY
