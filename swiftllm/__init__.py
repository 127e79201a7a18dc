"""SwiftLLM: a small LLM serving engine with a paged KV cache in two tiers."""

from typing import Any

from swiftllm.config import EngineConfig
from swiftllm.core.request import RequestOutput, RequestRefused, SamplingParams, ServiceClass

__version__ = "0.1.0"

__all__ = ["LLM", "EngineConfig", "RequestOutput", "RequestRefused", "SamplingParams", "ServiceClass"]


def __getattr__(name: str) -> Any:
    # Schedulers and simulations need the vocabulary but no torch, which takes seconds to import.
    if name == "LLM":
        from swiftllm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
