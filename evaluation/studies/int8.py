"""A CPU tier in int8 beside an exact one, on the papers' machines."""

from __future__ import annotations

from dataclasses import dataclass

from evaluation.grid import Place, simulate, simulated_point
from evaluation.options import StudyOptions
from evaluation.plots.figure import Axis, Figure
from evaluation.run import Point
from evaluation.study import RATE, Ratio, Study, Table, command

CASE = ("setting", "workload_title")


@dataclass(frozen=True)
class Options(StudyOptions):
    """Throughput of neo, apex and adaptive with the CPU tier in int8 beside the exact one. SIMULATED (predicted times,
    no GPU needed).

    Settings and workloads come from configs/experiments/int8.yaml. Results, figure and provenance go to
    results/int8/<run>/. Running the same command again continues an interrupted run.
    """


def point(place: Place) -> Point:
    workload = place.get("workload") or f"{place['input_len']} in, {place['output_len']} out"
    task = simulate(place, ["cpu_kv_dtype"], workload_title=workload)
    return simulated_point([place["setting"], workload, place["cpu_kv_dtype"] or "gpu"], task)


STUDY = Study(
    "int8",
    point=point,
    ratios={
        "over_exact": Ratio(lambda row: row["cpu_kv_dtype"] == "auto", (*CASE, "system")),
        "over_gpu_only": Ratio(lambda row: row["system"] == "swiftllm", CASE),
    },
    tables=[
        Table(
            (
                ("system", "system", "s"), ("CPU tier", "cpu_kv_dtype", "s"), ("tok/s", RATE, ",.0f"),
                ("int8 / exact", "over_exact", ".2f"), ("/ swiftllm", "over_gpu_only", ".2f"),
                ("CPU blocks", "num_cpu_blocks", ",d"), ("CPU attention GB/s", "cpu_bandwidth_gb_s", ".1f"),
                ("CPU busy", "cpu_busy_fraction", ".0%"),
            ),
            "[bold]SIMULATED[/]: output tokens per second, CPU attention by the native kernel in every system",
            by=CASE,
        )
    ],
    figure=Figure(
        "A CPU tier in int8 beside an exact one",
        "bars",
        x="workload_title",
        x_label="workload",
        y=[Axis(RATE, "output tokens/s, SIMULATED")],
        panel=("gpu", "host"),
        series=("system", "cpu_kv_dtype"),
        title_of=lambda row: f"{row['gpu']}, {row['host'].split(' (')[0]}",
        look_of=lambda row: (
            {"text": f"{row['over_exact']:.2f}", "bold": True} if row["cpu_kv_dtype"] == "int8" else {"is_open": True}
        ),
        is_drawn=lambda row: row["cpu_kv_dtype"] is not None,
        notes="Outlined: the CPU tier exact; filled: in int8, in the same gigabytes; numbers: int8 over exact.",
    ),
)  # fmt: skip
main = command(Options, {"int8": STUDY})
