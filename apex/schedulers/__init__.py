"""Schedulers of the papers: plain Python from queues and predictions to an iteration plan."""

from collections.abc import Mapping

from apex.schedulers.apex import ApexScheduler
from apex.schedulers.base import OffloadScheduler
from apex.schedulers.fastdecode import FastDecodeScheduler
from apex.schedulers.neo import NeoScheduler

SCHEDULERS: Mapping[str, type[OffloadScheduler]] = {
    "neo": NeoScheduler,
    "fastdecode": FastDecodeScheduler,
    "apex": ApexScheduler,
}
"""The hybrid schedulers by the name of their system."""
