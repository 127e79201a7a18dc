"""The policy `adaptive`: which of the ways to use the CPU yields most tokens, and when to compute prompts."""

from apex.schedulers.adaptive.policy import Adaptive

__all__ = ["Adaptive"]
