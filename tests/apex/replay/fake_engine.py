"""An engine with the interface of swiftllm.engine.engine.Engine on a virtual clock: one token per request and step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from swiftllm.core.request import Request, RequestOutput, RequestRefused, ServiceClass

LATENCY_SENSITIVE = ServiceClass.LATENCY_SENSITIVE


@dataclass
class FakeStats:
    iterations: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    gpu_batch_busy_s: float = 0.0
    cpu_busy_s: float = 0.0
    preemptions: int = 0
    strategy_iterations: dict[str, int] = field(default_factory=dict)


class FakeEngine:
    """While nothing runs, each reading of the clock advances it by ``idle_tick_s``, for replays that wait."""

    def __init__(
        self, step_s: float = 0.5, max_tokens: int = 10**6, stuck: bool = False, idle_tick_s: float = 0.0
    ) -> None:
        self.step_s = step_s
        self.idle_tick_s = idle_tick_s
        self.max_tokens = max_tokens
        self.stuck = stuck
        self.clock = 100.0
        self.live: list[Request] = []
        self.counters = FakeStats()
        self.closed = False
        self.backend = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        self.arrivals_seen: list[tuple[str, float]] = []

    def make_request(self, request_id, prompt_token_ids, sampling, arrival_s=None, service_class=LATENCY_SENSITIVE):
        if len(prompt_token_ids) + sampling.max_tokens > self.max_tokens:
            raise RequestRefused(f"{len(prompt_token_ids)} + {sampling.max_tokens} tokens exceed {self.max_tokens}")
        return Request(request_id, tuple(prompt_token_ids), sampling, arrival_s=arrival_s, service_class=service_class)

    def add(self, request: Request) -> Request:
        self.arrivals_seen.append((request.request_id, self.clock))
        self.live.append(request)
        return request

    def step(self) -> list[RequestOutput]:
        if self.stuck:
            return []
        self.clock += self.step_s
        self.counters.iterations += 1
        self.counters.gpu_batch_busy_s += self.step_s / 2
        self.counters.cpu_busy_s += self.step_s / 4
        self.counters.strategy_iterations["gpu-only"] = self.counters.iterations
        outputs = []
        for request in self.live:
            request.tier_history = request.tier_history or [(self.clock, "gpu")]
            request.append_token(7, self.clock)
            self.counters.output_tokens += 1
            outputs.append(RequestOutput(request.request_id, request.prompt_token_ids, (7,), None))
        self.live = [request for request in self.live if not request.is_finished]
        return outputs

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def now(self) -> float:
        if not self.live:
            self.clock += self.idle_tick_s
        return self.clock

    def wait(self, seconds: float) -> None:
        self.clock += seconds

    def stats(self) -> FakeStats:
        return self.counters

    def status(self) -> dict:
        return {"waiting": len(self.live)}

    def describe(self) -> dict:
        return {
            "system": "fake",
            "device": "Some CPU",
            "dtype": "float32",
            "num_gpu_blocks": 3,
            "num_cpu_blocks": 9,
            "cpu_kernel": "native",
            "cpu_threads": 1,
        }

    def close(self) -> None:
        self.closed = True
