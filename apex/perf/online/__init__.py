"""Online correction: predictions follow the times that iterations take on the machine as it is now."""

from apex.perf.online.correction import OnlineCorrection

__all__ = ["OnlineCorrection"]
