"""What a service accepts: its limits, and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swiftllm.core.request import ServiceClass
from swiftllm.core.sampling_params import SamplingParams
from swiftllm.scheduling.admission import Admission, as_token_array


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of the service.

    Raises:
        ValueError: a field lies outside its range; the message names the field and the value.
    """

    max_queued_requests: int = 1024
    """Maximum number of latency-sensitive requests waiting or running; further ones are refused."""
    max_queued_best_effort: int = 10_000
    """Maximum number of best-effort requests waiting or running, counted apart from the others."""
    request_timeout_s: float | None = None
    """Seconds after which an unfinished request fails, unless it sets its own timeout; by default never."""
    stall_timeout_s: float = 60.0
    """Seconds without progress after which the watchdog logs the engine's state and acts."""
    drain_timeout_s: float = 30.0
    """Seconds that running requests get to finish when the service stops."""
    restart_engine: int = 0
    """Times that an engine that has died or failed is started again; then, or by default, the server ends with it."""

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_best_effort"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        if self.restart_engine < 0:
            raise ValueError(f"restart_engine={self.restart_engine!r} must be at least 0")
        for name in ("request_timeout_s", "stall_timeout_s", "drain_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0.0:
                raise ValueError(f"{name}={seconds!r} must be above 0")

    def most_open(self, service_class: ServiceClass) -> int:
        """Maximum number of requests of a class waiting or running."""
        is_best_effort = service_class is ServiceClass.BEST_EFFORT
        return self.max_queued_best_effort if is_best_effort else self.max_queued_requests


@dataclass(frozen=True)
class NewRequest:
    """A request to submit to the service."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    timeout_s: float | None = None
    """Seconds until its deadline; None takes the service's ``request_timeout_s``."""
    service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE
    cache_salt: str | None = None
    """Only requests with the same one share cached prefixes."""


def checked(requests: Sequence[NewRequest], admission: Admission) -> list[NewRequest]:
    """These requests with their prompts in arrays. What several share is looked at once, and is shared later on.

    Raises:
        RequestRefused: one of them can never be served.
    """
    prompts: dict[int, Sequence[int]] = {}
    samplings: set[tuple[int, ...]] = set()
    found = []
    for new in requests:
        name, how = id(new.prompt_token_ids), new.sampling
        if name not in prompts:
            prompts[name] = as_token_array(new.prompt_token_ids)
        admission.check_prompt(prompts[name], how.max_tokens, new.service_class)
        found.append(replace(new, prompt_token_ids=prompts[name]))
        tokens = tuple(map(id, (how.logit_bias, how.stop_token_ids, how.bad_words, how.allowed_token_ids)))
        if tokens not in samplings:
            samplings.add(tokens)
            admission.check_sampling(how)
    return found
