"""Which strategies a system may use for CPU requests; each can be forced or disabled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swiftllm.core.request import Slo

StrategyName = Literal["auto", "gpu-only", "asymmetric-pipelining", "asynchronous-overlap"]


@dataclass(frozen=True)
class StrategyConfig:
    """The strategies a scheduler may use for CPU requests, and the limits of its choice.

    Raises:
        ValueError: a field lies outside its range, or a strategy is both forced and disabled.
    """

    strategy: StrategyName = "auto"
    """Strategy for CPU requests, forced whatever the model predicts; auto applies the system's own rule."""
    disable_asymmetric_pipelining: bool = False
    """Never split the batch in two (NEO section 3.1)."""
    disable_asynchronous_overlap: bool = False
    """Never let CPU requests go on without being waited for: joining (APEX section 3.3) or free-running."""
    disable_partial_progress_priority: bool = False
    """Do not prioritise CPU batches that are part of the way through their token (APEX section 3.4)."""
    disable_cpu_decode_limit: bool = False
    """Pipeline with every ready CPU decode, in two even batches, hidden or not (NEO section 3.2, step 4; neo, apex)."""
    disable_postponed_cpu_prompts: bool = False
    """Never put off prompts for the CPU tier, hidden CPU or not (NEO section 3.2, step 5; neo, apex)."""
    disable_cpu_request_limit: bool = False
    """Overlap with every CPU request that is ready, even if the CPU needs longer than an iteration (APEX section 6)."""
    compare_overlap: bool = False
    """Compare pipelining with asynchronous overlap, too, not with GPU-only alone; not in the paper (apex)."""
    disable_online_correction: bool = False
    """Predict from the profile as it was measured, however long iterations take now."""
    min_cpu_request_ratio: float = 8.0
    """CPU requests per GPU request from which asynchronous overlap starts, unless forced (APEX section 4.2)."""
    max_cpu_batches: int = 2
    """Most CPU batches under way at once in asynchronous overlap."""
    disable_prompt_chunks: bool = False
    """Fill the token budget with prompts, as the papers do, whatever the decodes need (adaptive)."""
    max_wait_iterations: int = 1000
    # Not in the papers: this protects against starvation. It serves one request at a time. Otherwise it would decide
    # nearly every iteration where the CPU needs longer than this to attend to its whole tier.
    """Iterations after which a CPU request left out is served, whatever the model predicts; one in as many at most."""
    ttft_slo_s: float = 2.0
    """Target of latency-sensitive requests: seconds to the first token (omniserve, sarathi)."""
    tpot_slo_s: float = 0.2
    """Target of latency-sensitive requests: seconds per output token (omniserve, sarathi)."""
    slo_margin: float = 0.1
    """Share of both targets that predictions leave unused, since they have errors (omniserve, sarathi)."""
    disable_admission_control: bool = False
    """Queue latency-sensitive requests even if their first token would be late (OmniServe section 3.3.3)."""

    def __post_init__(self) -> None:
        if not self.min_cpu_request_ratio >= 0:
            raise ValueError(f"min_cpu_request_ratio={self.min_cpu_request_ratio} must not be negative")
        for name in ("max_cpu_batches", "max_wait_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("ttft_slo_s", "tpot_slo_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be more than 0 seconds")
        if not 0 <= self.slo_margin < 1:
            raise ValueError(f"slo_margin={self.slo_margin} must be at least 0 and less than 1")
        forbidden = (
            (self.strategy == "asymmetric-pipelining" and self.disable_asymmetric_pipelining)
            or (self.strategy == "asynchronous-overlap" and self.disable_asynchronous_overlap)
        )  # fmt: skip
        if forbidden:
            raise ValueError(f"strategy={self.strategy!r} is forced and disabled at once; drop one of the two flags")

    @property
    def is_forced(self) -> bool:
        return self.strategy != "auto"

    @property
    def pipelines(self) -> bool:
        return self.strategy in ("auto", "asymmetric-pipelining") and not self.disable_asymmetric_pipelining

    @property
    def overlaps(self) -> bool:
        return self.strategy in ("auto", "asynchronous-overlap") and not self.disable_asynchronous_overlap

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_slo_s, self.tpot_slo_s, self.slo_margin)
