"""The scheduler `adaptive`: which of the ways to use the CPU yields most tokens, and when to compute prompts."""

from apex.schedulers.adaptive.scheduler import AdaptiveScheduler

__all__ = ["AdaptiveScheduler"]
