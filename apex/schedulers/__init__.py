"""The papers' schedulers: queues and predictions to an iteration plan. Importing this registers them."""

from __future__ import annotations

from apex.schedulers.adaptive import AdaptiveScheduler
from apex.schedulers.apex import ApexScheduler
from apex.schedulers.base import OffloadScheduler
from apex.schedulers.fastdecode import FastDecodeScheduler
from apex.schedulers.neo import NeoScheduler
from apex.schedulers.omniserve import (
    LlumnixScheduler,
    OmniServeScheduler,
    OmniServeSteppingScheduler,
    SarathiScheduler,
)
from swiftllm.systems import System, register_system


def register_scheduler(name: str, summary: str, scheduler: type[OffloadScheduler]) -> None:
    """Make a scheduler that decodes on the CPU a named system, real and simulated.

    Raises:
        ValueError: another system has that name.
    """
    register_system(System(name, summary, scheduler, needs_predictions=True))


register_scheduler("neo", "NEO (MLSys'25): load-aware scheduling, asymmetric pipelining", NeoScheduler)
register_scheduler("fastdecode", "FastDecode+ (in NEO): all decode attention on the CPU", FastDecodeScheduler)
register_scheduler("apex", "APEX: an inequality chooses pipelining or asynchronous overlap", ApexScheduler)
register_scheduler(
    "adaptive", "this project's: prompts beside decodes, lockstep or free-running cohorts", AdaptiveScheduler
)
register_scheduler(
    "omniserve", "OmniServe (SIGMOD'26): best-effort requests in the time that targets leave", OmniServeScheduler
)
register_scheduler(
    "omniserve-stepping", "omniserve whose best-effort cohorts also step (this project's)", OmniServeSteppingScheduler
)
register_scheduler("sarathi", "Sarathi-Serve (OSDI'24) with two classes: GPU only, within targets", SarathiScheduler)
register_system(System("llumnix", "Llumnix (OSDI'24), one instance: GPU only, blocks reserved", LlumnixScheduler))
