"""`apex doctor`: can the engine run here, and what is there to run it on?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Doctor:
    """Look at this machine: packages, compilers, CPU kernels, GPU, memory and its speed, models, profile tables.

    What is marked NO keeps the engine from running, what is marked -- costs a part of it; each says what to do. Takes
    ten seconds, for memory is read. Exits with 0 if the engine can run here, else with 1.
    """

    def run(self) -> int:
        from apex.cli.output import stdout_console
        from apex.doctor import can_run, examine, print_report

        report = examine()
        print_report(report, stdout_console())
        return 0 if can_run(report) else 1
