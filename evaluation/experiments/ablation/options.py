"""The command line of `scripts/ablation.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from evaluation.options import Folder, Names, ResultsDir, check_counts, flags
from evaluation.results.paths import RESULTS_DIR
from swiftllm.config import DeviceName, DtypeName, LoadFormat

MEASURED_ONLY = ("model", "load_format", "gpu_requests", "repeats", "device", "dtype", "cpu_threads")
SIMULATED_ONLY = (
    "setting", "host", "kernel", "cpu_bandwidth", "num_gpu_blocks", "cpu_kv_gb", "workload", "request_rate", "jobs",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Force and disable strategies on one workload, and print and draw the throughput of each variant.

    By default this machine is measured: the GPU tier holds a few requests of a small model, and all others wait or go
    to the CPU tier. With --backend simulated machines of the papers are SIMULATED (predicted times), which takes no
    model and no GPU. Running the same command again continues an interrupted run. Table, figure, CSV and LaTeX go to
    results/ablation/<run>/.
    """

    backend: Literal["torch", "simulated"] = "torch"
    """torch: measure on this machine. simulated: predict a machine of the papers in virtual time."""
    setting: Names = None
    """Machines, models and pools to simulate: settings of configs/experiments/papers.yaml; by default APEX's A10 in
    both readings, apex-a10-as-measured and apex-a10."""
    host: str | None = None
    """Host to simulate: a name in configs/hardware; by default the setting's. Its CPU pool grows with its cores."""
    kernel: Literal["own", "native", "llamafile", "ispc"] = "own"
    """CPU attention kernel to simulate; own: each system computes with that of its paper."""
    cpu_bandwidth: float | None = None
    """GB/s at which CPU attention reads KV cache; by default that of the kernel. Simulated only."""
    num_gpu_blocks: int | None = None
    """KV blocks of 16 tokens on the GPU; by default the setting's. Simulated only."""
    cpu_kv_gb: float | None = None
    """GB of KV cache on the host; by default the setting's. Simulated only."""
    workload: str | None = None
    """Trace to simulate, such as azure-conv, livebench, dolphin-r1 or osc; by default requests of about one size."""
    request_rate: float | None = None
    """Requests per second, Poisson arrivals; by default all are there at once. Simulated only."""
    model: Folder = None
    """Hugging Face folder of a Llama-family model; by default SmolLM2-135M-Instruct from the cache. Measured only."""
    load_format: LoadFormat = "auto"
    """dummy: random weights in the shapes of config.json, as for configs/models/attention-heavy. Measured only."""
    rows: Names = None
    """Rows of the table to run; by default all. Rows with another kernel or with whole swaps are only simulated."""
    num_requests: int | None = None
    """Number of requests, all sent at the start; by default 64, simulated 300."""
    input_len: int | None = None
    """Prompt tokens of each request; by default 32. Simulated prompts differ by up to 10% from it;
    by default 1000, at most half of what the setting takes."""
    output_len: int | None = None
    """Output tokens of each request; by default 48. Simulated outputs differ by up to 10% from it;
    by default 500, at most a quarter of what the setting takes."""
    gpu_requests: int = 4
    """Number of requests that fit the GPU tier at once. Measured only: a setting has its own pools."""
    repeats: int = 1
    """How many times to measure every row; the table shows medians. Measured only."""
    device: DeviceName = "auto"
    """Device of the linear layers. Measured only."""
    dtype: DtypeName = "auto"
    """Data type of weights, activations and KV cache. Measured only."""
    cpu_threads: int = 1
    """Threads of the CPU attention worker. Measured only."""
    seed: int = 0
    """Seed of the prompts, and of simulated lengths."""
    jobs: int | None = None
    """Rows to simulate in parallel; by default one per usable core. The results do not depend on it."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to ablation/<run>/ in this folder."""

    @property
    def is_simulated(self) -> bool:
        return self.backend == "simulated"

    def check(self) -> None:
        """
        Raises:
            ValueError: a count is below 1, or the backend does not take an option.
        """
        counts = ("num_requests", "input_len", "output_len", "gpu_requests", "repeats", "jobs", "num_gpu_blocks")
        check_counts(self, counts)
        for name in ("cpu_bandwidth", "cpu_kv_gb", "request_rate"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}={value} must be more than 0")
        if self.workload is not None and self.input_len is not None:
            raise ValueError("--input-len: a --workload has prompts of its own; leave one of them out")
        others = MEASURED_ONLY if self.is_simulated else SIMULATED_ONLY
        defaults = {field.name: field.default for field in fields(self)}
        if unused := [name for name in others if getattr(self, name) != defaults[name]]:
            backend = "torch" if self.is_simulated else "simulated"
            raise ValueError(f"{flags(unused)}: only --backend {backend} takes that")
