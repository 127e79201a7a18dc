"""The ablation: the same requests with strategies forced, disabled or run synchronously, measured or simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from apex.cli.output import ratio, strategy_mix
from apex.replay.metrics import predicted_over_actual
from apex.strategy import StrategyConfig
from evaluation.grid import IDEAS
from evaluation.options import Folder, Names, ResultsDir, check_counts, flags
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.results.paths import RESULTS_DIR
from evaluation.run import PointResult
from swiftllm.config import DeviceName, DtypeName, LoadFormat

BASELINE = "swiftllm"
SYSTEMS, OF_APEX, OF_NEO, OURS = "systems", "apex with one change", "neo with one change", "this project's own"
RATE, TO_BASELINE, TO_UNCHANGED = "output_tokens_per_s", "ratio_to_swiftllm", "ratio_to_unchanged"
"""Fields: throughput, over that of the ``BASELINE``, and over that of the row without the change."""


@dataclass(frozen=True)
class AblationRow:
    """A row of the table: a system and its changed settings.

    Attributes:
        words: what it is, for readers who do not know its name.
        group: rows of a group stand together.
        synchronous: the GPU batch waits for CPU attention, without overlap.
        axes: further changes, as axes of a simulated point (``axes.py``). Such a row is only simulated.
    """

    name: str
    system: str
    words: str
    group: str
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    synchronous: bool = False
    axes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unchanged(self) -> str | None:
        """The name of the row without the change; None of a whole system."""
        return None if self.name == self.system else self.system


SWITCHES = (
    (OF_APEX, "no-postponed-prompts", "apex", "disable_postponed_cpu_prompts", "without postponed CPU prompts"),
    (OF_APEX, "no-decode-limit", "apex", "disable_cpu_decode_limit", "without the limit of CPU decodes"),
    (OF_APEX, "no-request-limit", "apex", "disable_cpu_request_limit", "without the limit of CPU requests"),
    (OF_NEO, "neo-no-postponed-prompts", "neo", "disable_postponed_cpu_prompts", "without step 5: postponed prompts"),
    (OF_NEO, "neo-no-decode-limit", "neo", "disable_cpu_decode_limit", "without step 4: the limit of CPU decodes"),
    (OURS, "compare-overlap", "apex", "compare_overlap", "apex that also compares overlap"),
)
"""Group, name, system, field of :class:`StrategyConfig` that is switched, words."""


def switched(group: str) -> list[AblationRow]:
    """The group's rows of ``SWITCHES``."""
    return [
        AblationRow(name, system, words, group, StrategyConfig(**{switch: True}))
        for of, name, system, switch, words in SWITCHES
        if of == group
    ]


IDEA_WORDS = {
    "prompt-chunks": "adaptive without prompt chunks sized for the decodes",
    "free-running": "adaptive without CPU batches that run free",
    "lockstep": "adaptive without pipelining",
}
WHOLE_SWAPS = "KV cache copied whole, not layer by layer"

ROWS = {
    row.name: row
    for row in (
        AblationRow(BASELINE, "swiftllm", "GPU only", SYSTEMS),
        AblationRow(
            "simple-offloading", "fastdecode", "all KV cache on the CPU, no overlap", SYSTEMS, synchronous=True
        ),
        AblationRow("fastdecode", "fastdecode", "all KV cache on the CPU, pipelined", SYSTEMS),
        AblationRow("neo", "neo", "a part on the CPU, pipelined", SYSTEMS),
        AblationRow("apex", "apex", "a part on the CPU, pipelined or overlapped", SYSTEMS),
        AblationRow(
            "no-overlap", "apex", "without overlap", OF_APEX, StrategyConfig(disable_asynchronous_overlap=True)
        ),
        AblationRow(
            "no-pipelining", "apex", "without pipelining", OF_APEX, StrategyConfig(disable_asymmetric_pipelining=True)
        ),
        AblationRow(
            "force-overlap", "apex", "overlap at any time", OF_APEX, StrategyConfig(strategy="asynchronous-overlap")
        ),
        AblationRow(
            "force-pipelining", "apex", "pipelining at any time", OF_APEX,
            StrategyConfig(strategy="asymmetric-pipelining"),
        ),
        AblationRow(
            "no-threshold", "apex", "overlap with any number of CPU requests", OF_APEX,
            StrategyConfig(min_cpu_request_ratio=0),
        ),
        AblationRow(
            "cpu-batches-1", "apex", "one CPU batch at a time, not two", OF_APEX, StrategyConfig(max_cpu_batches=1)
        ),
        AblationRow(
            "cpu-batches-4", "apex", "up to four CPU batches, not two", OF_APEX, StrategyConfig(max_cpu_batches=4)
        ),
        AblationRow(
            "no-priority", "apex", "no priority of partial progress", OF_APEX,
            StrategyConfig(disable_partial_progress_priority=True),
        ),
        AblationRow(
            "no-correction", "apex", "predictions never corrected", OF_APEX,
            StrategyConfig(disable_online_correction=True),
        ),
        *switched(OF_APEX),
        AblationRow("ispc-kernel", "apex", "NEO's CPU kernel (ispc)", OF_APEX, axes={"kernel": "ispc"}),
        AblationRow("whole-swaps", "apex", WHOLE_SWAPS, OF_APEX, axes={"whole_swaps": True}),
        AblationRow("synchronous", "apex", "the GPU waits for CPU attention", OF_APEX, synchronous=True),
        *switched(OF_NEO),
        AblationRow(
            "neo-llamafile-kernel", "neo", "APEX's CPU kernel (llamafile)", OF_NEO, axes={"kernel": "llamafile"}
        ),
        AblationRow("neo-whole-swaps", "neo", WHOLE_SWAPS, OF_NEO, axes={"whole_swaps": True}),
        AblationRow("adaptive", "adaptive", "this project's scheduler", OURS),
        *(
            AblationRow(f"adaptive-no-{idea}", "adaptive", IDEA_WORDS[idea], OURS, strategy)
            for idea, strategy in IDEAS.items()
        ),
        AblationRow(
            "adaptive-synchronous", "adaptive", "adaptive whose GPU waits for CPU attention", OURS, synchronous=True
        ),
        *switched(OURS),
    )
}  # fmt: skip


def chosen_rows(names: Sequence[str] | None, simulated: bool, own_kernels: bool = True) -> list[AblationRow]:
    """The rows of these names; without names all that can be run.

    Args:
        own_kernels: whether each system computes with its own CPU kernel. Else a row with another says nothing.

    Raises:
        ValueError: there is no such row, or it cannot be run; the message lists those that can.
    """
    there = {
        name: row
        for name, row in ROWS.items()
        if (simulated or not row.axes) and (own_kernels or "kernel" not in row.axes)
    }
    if unknown := [name for name in names or () if name not in ROWS]:
        raise ValueError(f"no rows {', '.join(unknown)}; there are {', '.join(there)}")
    if refused := [name for name in names or () if name not in there]:
        why = "all systems have one kernel or one speed here" if simulated else "only --backend simulated has them"
        raise ValueError(f"no rows {', '.join(refused)}: {why}; there are {', '.join(there)}")
    return [there[name] for name in names or there]


def meanings(names: Sequence[str]) -> str:
    """The rows of these names in words."""
    return "; ".join(f"{name}: {ROWS[name].words}" for name in names)


def machine_of(record: FlatRecord) -> str:
    """The machine of a row where there are several: its setting, in its reading."""
    said = (record.get("setting_title"), record.get("reading"))
    return ", ".join(filter(None, said)) or record["backend"]


def with_mix(result: PointResult) -> PointResult:
    """The result with what its strategies were, and how well iterations were predicted."""
    stats = result.details["engine_stats"]
    mix = {
        "strategy_mix": strategy_mix(stats["strategy_iterations"]),
        "predicted_over_actual": predicted_over_actual(stats),
    }
    return replace(result, values={**result.values, **mix})


def with_ratios(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """The rows with their throughput over that of the baseline, and of the row without the change, on one machine."""
    rates = {case: {row["row"]: row[RATE] for row in here} for case, here in grouped(rows, "case").items()}
    return [
        {
            **row,
            TO_BASELINE: ratio(row[RATE], rates[row.get("case")].get(BASELINE)),
            TO_UNCHANGED: ratio(row[RATE], rates[row.get("case")].get(ROWS[row["row"]].unchanged)),
        }
        for row in rows
    ]


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
