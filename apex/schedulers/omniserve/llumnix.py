"""Llumnix (OSDI'24) on one instance, as OmniServe's evaluation uses it: priorities decided by memory, not by time."""

from __future__ import annotations

from dataclasses import replace

from swiftllm.scheduling.vllm import Vllm

RESERVED_SHARE = 0.1
"""Of the GPU's blocks, the share kept free of best-effort requests. Assumed: neither paper states it."""


class Llumnix(Vllm):
    """vLLM's scheduler with two service classes and a reserve of GPU blocks for latency-sensitive requests.

    Llumnix places and migrates requests among instances by their memory, and keeps headroom for those of high priority.
    With one instance only the headroom remains. No iteration is bounded by a target.
    """

    rules = replace(Vllm.rules, withheld=RESERVED_SHARE)
