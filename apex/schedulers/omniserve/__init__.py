"""OmniServe: latency-sensitive requests within their targets, best-effort requests with what is left."""

from apex.schedulers.omniserve.llumnix import Llumnix
from apex.schedulers.omniserve.policy import OmniServe
from apex.schedulers.omniserve.sarathi import Sarathi
from apex.schedulers.omniserve.stepping import OmniServeStepping

__all__ = ["Llumnix", "OmniServe", "OmniServeStepping", "Sarathi"]
