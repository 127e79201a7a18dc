"""An experiment file as points: panels whose lists are axes, places with one value for each field, simulated tasks.

    system: [swiftllm, adaptive]
    quick: {num_requests: 40}
    panels:
      - {setting: apex-a10, input_len: 1000, output_len: [50, 200], num_requests: 300}
      - {setting: apex-t4, workload: osc, num_requests: 300, quick: {num_requests: 20}}

Other entries of the section are fields of every panel that does not have them itself. A list is an axis. A mapping in a
list sets several fields together. A variant (here ``quick``) is laid over the panels when it is asked for.

A place has ``setting`` (a name of papers.yaml), ``system``, requests (``REQUESTS``), and any of the axes. Its requests
are those of a trace (``workload``) or have lengths around ``input_len`` and ``output_len``. They are all there at once,
or are Poisson arrivals of ``request_rate``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from apex.cli.output import stdout_console
from apex.perf.model import Curve, ProfileTable
from apex.perf.online_correction import scaled_table
from apex.simulator.backend import VLLM
from apex.simulator.hardware_files import LayerShape, load_gpu, load_host, load_link, load_model_config
from apex.simulator.paper_settings import BLOCK_SIZE, PaperSetting, load_setting
from apex.simulator.predicted_profile import cpu_attention_gb_s, hardware_profile
from apex.simulator.predicted_profile import host_read_gb_s as read_gb_s
from apex.strategy import StrategyConfig
from apex.workloads.catalogue import Trace, UniformTrace, load_trace, synthetic_name
from apex.workloads.requests import Lengths, WorkloadSpec, make_lengths
from evaluation.drivers import WITH_BOUND, SimulatedHardware, SimulatedTask
from evaluation.run import Point
from swiftllm.core.request import Tier
from swiftllm.systems import find_system

# -- grids ------------------------------------------------------------------------------------------------------------

Place = dict[str, Any]
"""A point of a grid: one value for each field, None where it has none or does not depend on it."""
Panel = Mapping[str, Any]
"""Fields in the order of the axes, the last of which varies fastest."""
VARIANTS = ("quick", "sensitivity", "rehearsal")


@dataclass(frozen=True)
class Grid:
    panels: tuple[Panel, ...]

    @classmethod
    def read(
        cls, section: Mapping[str, Any], known: Collection[str], variant: str | None = None, notes: Collection[str] = ()
    ) -> Grid:
        """The grid of a section of an experiment file.

        Args:
            known: fields that a panel may have.
            variant: one of ``VARIANTS`` to lay over the panels.
            notes: entries of the section that are not about its points.

        Raises:
            ValueError: the section has other entries than these; the message names them.
        """
        shared = {name: value for name, value in section.items() if name not in ("panels", *notes)}
        own = section.get("panels", ({},))
        given = dict.fromkeys(field for panel in (shared, *own) for field in _fields(panel))
        if unknown := [name for name in given if name not in known]:
            which = ", ".join((*VARIANTS, *sorted(known)))
            raise ValueError(f"an experiment file has no {', '.join(unknown)} in its panels; they may have {which}")
        panels = []
        for panel in own:
            fields = {**panel, **{name: value for name, value in shared.items() if name not in panel}}
            laid_over = {**shared.get(variant, {}), **panel.get(variant, {})}
            plain = {name: value for name, value in fields.items() if name not in VARIANTS}
            panels.append(_with(plain, laid_over))
        return cls(tuple(panels))

    def with_(self, **fields: Any) -> Grid:
        """The grid with other values in all panels. Fields that a panel does not have come last."""
        return Grid(tuple(_with(panel, fields) for panel in self.panels))

    def only(self, what: str, values: Collection[Any] | None, of: Callable[[Panel], Any] | None = None) -> Grid:
        """The points whose field ``what`` has one of the values; the whole grid for None.

        ``of`` gives the value of a whole panel, for what is not a field of it.

        Raises:
            ValueError: no point has one of the values; the message lists those there are.
        """
        if values is None:
            return self
        entries = [_entries(what, panel.get(what) if of is None else of(panel)) for panel in self.panels]
        known = dict.fromkeys(entry.get(what) for those in entries for entry in those)
        if unknown := [str(value) for value in values if value not in known]:
            there = ", ".join(str(value) for value in known)
            raise ValueError(f"no {what} {', '.join(unknown)} in the experiment file; there are {there}")
        panels = []
        for panel, those in zip(self.panels, entries, strict=True):
            kept = [entry for entry in those if entry.get(what) in values]
            if kept:
                panels.append({**panel, what: kept} if _is_axis(panel.get(what)) else panel)
        return Grid(tuple(panels))

    def places(self, concerns: Callable[[str, Place], bool] = lambda field, place: True) -> list[Place]:
        """The points, in the order of panels and axes.

        ``concerns`` says whether a point depends on a field of an axis. One that does not is there once, with None.
        """
        return [place for panel in self.panels for place in _places(panel, concerns)]


def values_of(panel: Panel, field: str) -> list[Any]:
    """The values that a panel has for a field; none where it has no such field."""
    entries = [entry for name, value in panel.items() for entry in _entries(name, value)]
    return list(dict.fromkeys(entry[field] for entry in entries if field in entry))


def _with(panel: Panel, fields: Mapping[str, Any]) -> Panel:
    """The panel with these fields, which no entry of another axis sets any more."""
    left = {}
    for name, value in panel.items():
        if _is_axis(value) and name not in fields:
            value = [{key: one for key, one in entry.items() if key not in fields} for entry in _entries(name, value)]
        left[name] = value
    return {**left, **fields}


def _places(panel: Panel, concerns: Callable[[str, Place], bool]) -> Iterator[Place]:
    fixed = {name: value for name, value in panel.items() if not _is_axis(value)}
    axes = [_entries(name, value) for name, value in panel.items() if _is_axis(value)]
    varied = {field: None for axis in axes for entry in axis for field in entry}
    seen = []
    for entries in itertools.product(*axes):
        place = fixed | varied
        for entry in entries:
            place |= entry
        place |= {field: None for field in varied if not concerns(field, place)}
        if place not in seen:
            seen.append(place)
            yield place


def _fields(panel: Panel) -> Iterator[str]:
    """The fields that a panel sets, those of its variants too. An axis of mappings has any name."""
    for name, value in panel.items():
        if name in VARIANTS:
            yield from _fields(value)
        else:
            yield from (field for entry in _entries(name, value) for field in entry)


def _entries(name: str, value: Any) -> list[Panel]:
    """The values of a field, each as the fields that it sets."""
    values = value if _is_axis(value) else [value]
    return [entry if isinstance(entry, Mapping) else {name: entry} for entry in values]


def _is_axis(value: Any) -> bool:
    return isinstance(value, (list, tuple, range))


# -- tasks on the papers' machines ------------------------------------------------------------------------------------

DEFAULT_KERNEL = "native"
"""Kernel of the profile table for systems that compute no CPU attention."""


def simulated_task(
    setting: PaperSetting, system: str, lengths: Lengths, values: Mapping[str, Any] | None = None
) -> SimulatedTask:
    """The task of a simulated point of a setting; ``values`` are further fields of its row.

    The workload is clipped to the longest request that the setting allows (:func:`clip_lengths`).
    """
    clipped, num_clipped = clip_lengths(lengths, setting.limits.max_model_len)
    row = {
        "setting": setting.name,
        "setting_title": setting.title,
        "gpu_option": setting.gpus,
        "host": load_host(setting.host).name,
        "num_gpu_blocks_status": setting.figures["num_gpu_blocks"].status,
        "max_gpu_blocks": setting.max_gpu_blocks,
        "cpu_kv_gb": setting["cpu_kv_gb"],
        "cpu_bandwidth_gb_s": setting.cpu_attention_gb_s(system),
        "gpu_attention_gb_s": setting.gpu_attention_gb_s(),
        "max_model_len": setting.limits.max_model_len,
        "num_clipped": num_clipped,
        **({} if setting.cpu_kv_dtype == "auto" else {"cpu_kv_dtype": setting.cpu_kv_dtype}),
        **_reading_values(setting, system),
        **({} if (launch_us := setting.attention_launch_us(system)) is None else {"attention_launch_us": launch_us}),
        **_parallel_values(setting),
        **(values or {}),
    }
    return SimulatedTask(
        system=system,
        hardware=simulated_hardware(setting, system),
        num_gpu_blocks=setting.num_gpu_blocks,
        num_cpu_blocks=setting.num_cpu_blocks,
        lengths=clipped,
        limits=setting.limits,
        block_size=BLOCK_SIZE,
        values=row,
    )


def _reading_values(setting: PaperSetting, system: str) -> dict[str, Any]:
    """Fields of a row of a setting that is one of several readings of a paper's machine; other rows do not have them.

    ``paper_setting`` is the name under which claims.yaml has the machine.
    """
    if setting.reading is None:
        return {}
    kernel = setting.kernel_of(system)
    own = {"paper_setting": setting.like or setting.name, "reading": setting.reading}
    return {**own, "cpu_kernel": kernel} if kernel else own


def _parallel_values(setting: PaperSetting) -> dict[str, Any]:
    """Fields of a row of several GPUs or several CPU hosts; other rows do not have them."""
    gpus = {"tensor_parallel": setting.tensor_parallel, "link": setting.link}
    hosts = {"cpu_hosts": setting.cpu_hosts, "network_gbps": setting.network_gbps}
    return {**(gpus if setting.tensor_parallel > 1 else {}), **(hosts if setting.cpu_hosts > 1 else {})}


def simulated_hardware(setting: PaperSetting, system: str) -> SimulatedHardware:
    """The predicted machine on which a system runs."""
    kernel = setting.kernel_of(system)
    table = _table(
        setting.gpu,
        setting.host,
        setting.model,
        setting.link,
        dtype=setting.dtype,
        cpu_kernel=kernel or DEFAULT_KERNEL,
        cpu_kv_dtype=setting.cpu_kv_dtype,
        cpu_bandwidth_gb_s=setting.stated_cpu_gb_s(kernel) if kernel else setting.cpu_bandwidth_gb_s,
        max_tokens=setting.limits.max_num_batched_tokens,
        tensor_parallel=setting.tensor_parallel,
    )
    if launch_us := setting.attention_launch_us(system):
        table = with_hand_over(table, launch_us)
    card, gpus = load_gpu(setting.gpu).name, setting.tensor_parallel
    cards, layers = card if gpus == 1 else f"{gpus}x {card}", setting.model_config.num_layers
    return SimulatedHardware(cards, setting.model, setting.dtype, table, layers, remote_hosts=setting.remote_hosts)


def with_hand_over(table: ProfileTable, microseconds: float) -> ProfileTable:
    """The table of a machine whose GPU batch spends this on submitting each attention task."""
    return replace(table, hand_over=Curve((1, 2), (microseconds * 1e-6,) * 2))


@functools.cache  # every point of a grid needs the same few
def _table(gpu: str, host: str, model: str, link: str | None, **options: Any) -> ProfileTable:
    joined = None if link is None else load_link(link)
    machine = load_gpu(gpu), load_host(host), load_model_config(model)
    return hardware_profile(*machine, link=joined, block_size=BLOCK_SIZE, **options)


def clip_lengths(lengths: Lengths, max_model_len: int) -> tuple[Lengths, int]:
    """Cut outputs, and prompts where they alone are too long, so that no request exceeds ``max_model_len`` tokens.

    No engine would serve such a request: the papers' engines block their queue, ours refuses it before queueing. So a
    harness that measures throughput must not send it.

    Returns:
        The clipped workload, and the number of clipped requests.
    """
    rows, num_clipped = [], 0
    for row in lengths.rows:
        given = min(row.input_tokens, max_model_len - 1)
        cut = replace(row, input_tokens=given, output_tokens=min(row.output_tokens, max_model_len - given))
        num_clipped += cut != row
        rows.append(cut)
    return replace(lengths, rows=tuple(rows)), num_clipped


# -- axes: fields of a place that change its setting or its task ------------------------------------------------------
#
# A new axis is one function, named as its field, which gives the setting or the task at a value. Axes of settings are
# applied first, and all in the order of this file. A place without a value for a field, or with None, leaves it out.


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
def gpu(setting: PaperSetting, system: str, name: str) -> PaperSetting:
    """Another GPU, with the setting's pool of KV blocks."""
    return replace(
        setting, name=f"{setting.name}-{name}", gpu=name, title=f"{load_gpu(name).name}, else {setting.title}"
    )


@axis(SETTING)
def max_num_batched_tokens(setting: PaperSetting, system: str, number: int) -> PaperSetting:
    """Another budget of tokens of an iteration."""
    return setting.with_figures("varied", max_num_batched_tokens=number)


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


@axis(TASK, has_cpu_attention)
def with_bound(task: SimulatedTask, wanted: bool) -> SimulatedTask:
    """Whether rows also have what no schedule can exceed, see :mod:`apex.simulator.bound`: half a minute a row."""
    return replace(task, values={**task.values, WITH_BOUND: wanted}) if wanted else task


def with_strategy(task: SimulatedTask, **fields: Any) -> SimulatedTask:
    return replace(task, strategy=replace(task.strategy, **fields))


# -- places -----------------------------------------------------------------------------------------------------------

REQUESTS = ("workload", "input_len", "output_len", "num_requests", "request_rate", "seed", "scale", "trace_dir")
FIELDS = frozenset({"setting", "system", *REQUESTS, *SETTING, *TASK})
"""Fields of a place that decide its task."""


def concerns(field: str, place: Place) -> bool:
    """Whether the place's system depends on a field of an axis; a place without a system, whether one may."""
    if field not in CONCERNS or "system" not in place:
        return True
    return CONCERNS[field](load_setting(place["setting"]), place["system"])


def setting_of(place: Place) -> PaperSetting:
    """The place's setting, as its system sees it. Axes that concern a system need one."""
    setting = load_setting(place["setting"])
    for field, apply in SETTING.items():
        if place.get(field) is not None:
            setting = apply(setting, place.get("system"), place[field])
    return setting


def workload_of(panel: Panel) -> str:
    """The name of the workload, also where it is synthetic."""
    return panel.get("workload") or synthetic_name(panel["input_len"])


def trace_of(place: Place) -> Trace:
    if place.get("workload") is not None:
        return load_trace(place["workload"], place.get("trace_dir"))
    return UniformTrace(place["input_len"], place["output_len"])


def lengths_of(place: Place) -> Lengths:
    """The place's requests. Systems of a place share them."""
    rate = place.get("request_rate")
    spec = WorkloadSpec(
        workload_of(place),
        place["num_requests"],
        place.get("scale", 1.0),
        place.get("output_len"),
        "at-once" if rate is None else "poisson",
        request_rate=rate,
        seed=place.get("seed", 0),
    )
    return _lengths(spec, place.get("workload"), place.get("input_len"), place.get("trace_dir"))


@functools.lru_cache(64)
def _lengths(spec: WorkloadSpec, workload: str | None, input_len: int | None, trace_dir: Path | None) -> Lengths:
    fields = {"workload": workload, "input_len": input_len, "output_len": spec.output_len, "trace_dir": trace_dir}
    return make_lengths(spec, trace_of(fields))


def simulate(place: Place, fields: Iterable[str] = (), lengths: Lengths | None = None, **values: Any) -> SimulatedTask:
    """The task of a place.

    Args:
        fields: those of the place that are also fields of the point's row.
        lengths: requests other than those that the place says.
        values: further fields of the row.
    """
    values = {field: place.get(field) for field in fields} | values
    task = simulated_task(setting_of(place), place["system"], lengths or lengths_of(place), values)
    for field, apply in TASK.items():
        if place.get(field) is not None:
            task = apply(task, place[field])
    return task


def simulated_point(names: Sequence[str], task: SimulatedTask, cost: float | None = None) -> Point:
    """The point of a task. ``names`` and the system's make up its key and its label."""
    names = (*names, task.system)
    key = "-".join(names)
    total = float(task.lengths.total_output_tokens)
    return Point(key, key, ", ".join(names), task, concurrent=True, cost=total if cost is None else cost)


def possible_points(
    places: Iterable[Place], make: Callable[[Place], Point], words: Callable[[Place], str]
) -> list[Point]:
    """The points of places; prints for those of which ``make`` raises ValueError, named in words, why."""
    points, refused = [], {}
    for place in places:
        try:
            points.append(make(place))
        except ValueError as error:
            refused[f"not possible: {words(place)}: {error}"] = None
    for reason in refused:
        stdout_console().print(reason, soft_wrap=True)
    return points
