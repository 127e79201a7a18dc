"""Online correction: predictions follow the times that iterations take on the machine as it is now."""

from apex.perf.online.correction import OPERATIONS, OnlineCorrection

__all__ = ["OPERATIONS", "OnlineCorrection"]
