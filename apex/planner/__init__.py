"""Schedulers of the papers: plain Python from queues and predictions to an iteration plan."""

from collections.abc import Mapping

from apex.planner.apex import ApexScheduler
from apex.planner.fastdecode import FastDecodeScheduler
from apex.planner.neo import NeoScheduler
from apex.planner.offload import OffloadScheduler

SCHEDULERS: Mapping[str, type[OffloadScheduler]] = {
    "neo": NeoScheduler,
    "fastdecode": FastDecodeScheduler,
    "apex": ApexScheduler,
}
"""The hybrid schedulers by the name of their system."""
