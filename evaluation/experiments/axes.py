"""The axes of simulated points: fields of a place that change its setting or its task.

A new axis is one function, named as its field, which gives the setting or the task at a value. Axes of settings are
applied first, and all in the order of this file. A place without a value for a field, or with None, leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from apex.perf.online.correction import scaled_table
from apex.simulator.hardware.files import LayerShape, load_host
from apex.simulator.paper_settings import PaperSetting
from apex.simulator.prediction.host_times import cpu_attention_gb_s
from apex.simulator.prediction.host_times import host_read_gb_s as read_gb_s
from apex.simulator.virtual.runtime import VLLM
from apex.strategy import StrategyConfig
from apex.workloads.requests import Lengths
from evaluation.experiments.paper_settings import with_hand_over
from evaluation.experiments.simulated_point import SimulatedTask
from swiftllm.core.request import Tier
from swiftllm.systems import find_system

SETTING: dict[str, Callable[[PaperSetting, str, Any], PaperSetting]] = {}
"""By field: the setting at a value, as the named system sees it."""
TASK: dict[str, Callable[[SimulatedTask, Any], SimulatedTask]] = {}
"""By field: the task at a value."""
CONCERNS: dict[str, Callable[[PaperSetting, str], bool]] = {}
"""By field: whether a system depends on it. Fields that are not here concern all."""
OWN_KERNELS = "own"
"""A ``kernel`` where each system computes with that of its paper."""
REFERENCE = "neo"
"""The system whose CPU attention has the speed ``reference_cpu_gb_s``."""
SUBJECT = "adaptive"
IDEAS = {
    "prompt-chunks": StrategyConfig(disable_prompt_chunks=True),
    "free-running": StrategyConfig(disable_asynchronous_overlap=True),
    "lockstep": StrategyConfig(disable_asymmetric_pipelining=True),
}
"""The ideas of the ``SUBJECT``, each with the settings that switch it off."""

Apply = TypeVar("Apply", bound=Callable[..., Any])


def axis(axes: dict[str, Any], concerns: Callable[[PaperSetting, str], bool] | None = None) -> Callable[[Apply], Apply]:
    """Adds a function to the axes, under its name; ``concerns`` says whether a system depends on the field."""

    def add(apply: Apply) -> Apply:
        axes[apply.__name__] = apply
        if concerns is not None:
            CONCERNS[apply.__name__] = concerns
        return apply

    return add


@dataclass(frozen=True)
class OwnTokens:
    """Prompts of which no two begin alike, so that a prefix cache finds a request's own blocks at most."""

    lengths: Lengths

    def __call__(self, row: int) -> tuple[int, ...]:
        return (row,) * self.lengths.rows[row].input_tokens


def has_cpu_attention(setting: PaperSetting, system: str) -> bool:
    return setting.kernel_of(system) is not None


def predicts(setting: PaperSetting, system: str) -> bool:
    return find_system(system).needs_predictions


def is_subject(setting: PaperSetting, system: str) -> bool:
    return system == SUBJECT


# -- settings ---------------------------------------------------------------------------------------------------------


@axis(SETTING)
def host(setting: PaperSetting, system: str, name: str) -> PaperSetting:
    """Another host. CPU KV cache scales with the number of cores (NEO section 5.5)."""
    there, here = load_host(name), load_host(setting.host)
    title = f"{setting.title.split(' (')[0]} ({there.name.split(' (')[0]})"
    moved = replace(setting, name=f"{setting.name.split('-')[0]}-{name}", host=name, title=title)
    cpu_kv_gb = setting["cpu_kv_gb"] * there["cores"] / here["cores"]
    return moved.with_figures("NEO section 5.5: in proportion to the cores", cpu_kv_gb=cpu_kv_gb)


@axis(SETTING)
def num_gpu_blocks(setting: PaperSetting, system: str, number: float) -> PaperSetting:
    """Another pool of KV blocks on the GPU."""
    return setting.with_figures("varied", num_gpu_blocks=int(number))


@axis(SETTING)
def cpu_kv_gb(setting: PaperSetting, system: str, gb: float) -> PaperSetting:
    """Another pool of KV cache on the host, in GB."""
    return setting.with_figures("varied", cpu_kv_gb=gb)


@axis(SETTING)
def cpu_hosts(setting: PaperSetting, system: str, number: int) -> PaperSetting:
    """CPU hosts, the GPUs' own among them."""
    return replace(setting, cpu_hosts=number)


@axis(SETTING, has_cpu_attention)
def kernel(setting: PaperSetting, system: str, name: str) -> PaperSetting:
    """One CPU attention kernel for all systems that have one."""
    if name == OWN_KERNELS:
        return setting
    return replace(setting, cpu_kernels=dict.fromkeys(setting.cpu_kernels, name))


@axis(SETTING, has_cpu_attention)
def cpu_kv_dtype(setting: PaperSetting, system: str, name: str) -> PaperSetting:
    """The format of the CPU tier: auto or int8, which the native kernel reads."""
    return replace(setting, cpu_kv_dtype=name)


@axis(SETTING, has_cpu_attention)
def cpu_bandwidth_gb_s(setting: PaperSetting, system: str, gb_s: float) -> PaperSetting:
    """The rate at which CPU attention reads KV cache, whatever the kernel."""
    return replace(setting, cpu_bandwidth_gb_s=gb_s)


@axis(SETTING, has_cpu_attention)
def reference_cpu_gb_s(setting: PaperSetting, system: str, gb_s: float) -> PaperSetting:
    """The rate of the ``REFERENCE``'s kernel; those of other systems are faster or slower by the same factor."""
    rate, own = setting.cpu_attention_gb_s(system), setting.cpu_attention_gb_s(REFERENCE)
    return setting if rate is None or gb_s == own else replace(setting, cpu_bandwidth_gb_s=rate * gb_s / own)


@axis(SETTING, has_cpu_attention)
def host_read_gb_s(setting: PaperSetting, system: str, gb_s: float) -> PaperSetting:
    """Other memory of the host, from which its cores read at this rate. CPU attention reaches less, by its kernel."""
    own = load_host(setting.host)
    peak = own.figures["peak_bandwidth_gb_s"]
    other = replace(peak, value=peak.value * gb_s / read_gb_s(own), status="assumed", origin="varied")
    moved = replace(own, figures={**own.figures, "peak_bandwidth_gb_s": other})
    shape = LayerShape.from_config(setting.model_config)
    return replace(setting, cpu_bandwidth_gb_s=cpu_attention_gb_s(moved, setting.kernel_of(system), shape))


@axis(SETTING, lambda setting, system: system in setting.launch_us)
def neo_launches(setting: PaperSetting, system: str, charged: bool) -> PaperSetting:
    """Whether the launches of NEO's own code count, for systems built from it."""
    return replace(setting, charges_launches=charged)


@axis(SETTING, has_cpu_attention)
def cpu_of_gpu_attention(setting: PaperSetting, system: str, share: float) -> PaperSetting:
    """The rate of APEX's CPU attention as a share of the GPU's; other kernels keep their ratio to APEX's."""
    ratio = setting.cpu_attention_gb_s(system) / setting.cpu_attention_gb_s("apex")
    return replace(setting, cpu_bandwidth_gb_s=share * setting.gpu_attention_gb_s() * ratio)


@axis(SETTING, has_cpu_attention)
def kernel_ratio(setting: PaperSetting, system: str, ratio: float) -> PaperSetting:
    """How many times as fast as NEO's the kernel of APEX is; APEX's keeps its rate."""
    apex_gb_s = setting.cpu_attention_gb_s("apex")
    is_neos = setting.kernel_of(system) == setting.kernel_of(REFERENCE)
    return replace(setting, cpu_bandwidth_gb_s=apex_gb_s / ratio if is_neos else apex_gb_s)


# -- tasks ------------------------------------------------------------------------------------------------------------


@axis(TASK)
def hand_over_us(task: SimulatedTask, microseconds: float) -> SimulatedTask:
    """Microseconds that the GPU batch spends on submitting each attention task.

    Raises:
        ValueError: there are fewer than 0.
    """
    if microseconds < 0:
        raise ValueError(f"hand_over_us={microseconds} must not be negative")
    if not microseconds:
        return task
    table = with_hand_over(task.hardware.table, microseconds)
    return replace(task, hardware=replace(task.hardware, table=table))


@axis(TASK, is_subject)
def without(task: SimulatedTask, idea: str) -> SimulatedTask:
    """One of ``IDEAS`` switched off."""
    return replace(task, strategy=IDEAS[idea])


@axis(TASK, predicts)
def actual_over_believed(task: SimulatedTask, ratio: float) -> SimulatedTask:
    """A scheduler that believes another time of CPU attention; the machine stays as it is."""
    if ratio == 1.0:
        return task
    return replace(task, believed=scaled_table(task.hardware.table, gpu_batch=1.0, cpu_attention=1.0 / ratio))


@axis(TASK, predicts)
def online_correction(task: SimulatedTask, corrects: bool) -> SimulatedTask:
    return with_strategy(task, disable_online_correction=not corrects)


@axis(TASK, has_cpu_attention)
def synchronous(task: SimulatedTask, waits: bool) -> SimulatedTask:
    """The GPU is idle while the CPU attends."""
    return replace(task, synchronous=waits)


@axis(TASK, has_cpu_attention)
def whole_swaps(task: SimulatedTask, whole: bool) -> SimulatedTask:
    """KV cache is copied between the tiers as a whole, while nothing computes; else layer by layer."""
    return replace(task, whole_swaps=whole)


@axis(TASK)
def slower(task: SimulatedTask, ratio: float) -> SimulatedTask:
    """All times on the machine over those in the scheduler's profile table."""
    if ratio == 1.0:
        return task
    table = task.hardware.table
    hardware = replace(task.hardware, table=scaled_table(table, gpu_batch=ratio, cpu_attention=ratio))
    return replace(task, hardware=hardware, believed=table)


@axis(TASK)
def ttft_slo_s(task: SimulatedTask, seconds: float) -> SimulatedTask:
    """Target for the first token."""
    return with_strategy(task, ttft_slo_s=seconds)


@axis(TASK)
def tpot_slo_s(task: SimulatedTask, seconds: float) -> SimulatedTask:
    """Target for each output token."""
    return with_strategy(task, tpot_slo_s=seconds)


@axis(TASK)
def admission_control(task: SimulatedTask, refuses: bool) -> SimulatedTask:
    return with_strategy(task, disable_admission_control=not refuses)


@axis(TASK)
def one_class(task: SimulatedTask, only: bool) -> SimulatedTask:
    """The system knows one class of requests."""
    return replace(task, one_class=only)


@axis(TASK, lambda setting, system: system == VLLM)
def vllm_defaults(task: SimulatedTask, today: bool) -> SimulatedTask:
    """`vllm` is vLLM 0.19 with its defaults, in place of what the papers compared with."""
    caches = {"cached_tiers": (Tier.GPU,), "prompts": OwnTokens(task.lengths)} if today else {}
    return replace(task, vllm_defaults=today, values={**task.values, "vllm_defaults": today}, **caches)


@axis(TASK)
def duration_s(task: SimulatedTask, seconds: float) -> SimulatedTask:
    """Virtual seconds after which the run is cut."""
    return replace(task, duration_s=seconds)


def with_strategy(task: SimulatedTask, **fields: Any) -> SimulatedTask:
    return replace(task, strategy=replace(task.strategy, **fields))
