"""OmniServe: latency-sensitive requests within their targets, best-effort requests with what is left."""

from apex.schedulers.omniserve.llumnix import LlumnixScheduler
from apex.schedulers.omniserve.sarathi import SarathiScheduler
from apex.schedulers.omniserve.scheduler import OmniServeScheduler
from apex.schedulers.omniserve.stepping import OmniServeSteppingScheduler

__all__ = ["LlumnixScheduler", "OmniServeScheduler", "OmniServeSteppingScheduler", "SarathiScheduler"]
