"""Throughput of three systems over the bandwidth of a T4's host: python -m evaluation.examples.host_bandwidth"""

import sys
from dataclasses import dataclass

from evaluation.grid import simulate, simulated_point
from evaluation.options import StudyOptions
from evaluation.plots.figure import Axis, Figure
from evaluation.study import Ratio, Study, command

X = "host_read_gb_s"


@dataclass(frozen=True)
class Options(StudyOptions):
    """Throughput of NEO and adaptive over that of a GPU alone, on hosts of other memory, SIMULATED."""


STUDY = Study(
    "host-bandwidth",  # and configs/experiments/host-bandwidth.yaml
    point=lambda place: simulated_point([f"{place[X]} GB/s"], simulate(place, [X])),
    ratios={"ratio": Ratio(lambda row: row["system"] == "swiftllm", at=["setting"])},
    figure=Figure(
        "The host's bandwidth",
        "lines",
        x=X,
        x_label="GB/s that the host's cores read",
        y=[Axis("ratio", "throughput over swiftllm, SIMULATED")],
        panel=("gpu",),
        is_drawn=lambda row: row[X] is not None,
        log_x=True,
    ),
)
main = command(Options, {"host-bandwidth": STUDY})

if __name__ == "__main__":
    sys.exit(main())
