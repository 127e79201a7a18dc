"""Turns a folder of scripts/gpu_check.sh into summary.json, a figure and one page of text.

python evaluation/gpu/report.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    NEEDS = ()
    import here

from functools import cache

from apex.environment import REQUIREMENTS, has_package, pinned_modules
from evaluation.results.folder import markdown_lines
from evaluation.results.frame import grouped
from evaluation.results.provenance import git_state, machine_identity, software, source_hash
from swiftllm.files import write_atomically

FIGURE = "end_to_end.png"
KERNELS = "kernels.json"
PARTS = "parts.txt"
SYSTEMS = ("swiftllm", "neo", "apex", "adaptive")


@dataclass(frozen=True)
class Goal:
    """A figure of this run beside what the GPU path is built to reach."""

    what: str
    value: float
    relation: str
    goal: float

    @property
    def met(self) -> bool:
        return self.value >= self.goal if self.relation == ">=" else self.value <= self.goal


def read_parts(folder: Path) -> list[list[str]]:
    """Name, result and seconds of each part that has ended in the folder."""
    path = folder / PARTS
    return [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []


def missing_packages() -> list[str]:
    """The packages of the product that this Python does not have."""
    return [name for name, module in pinned_modules(REQUIREMENTS).items() if not has_package(module)]


def goals(kernels: dict[str, Any]) -> Iterator[Goal]:
    """Of what was measured: a part of the benchmark may have failed."""
    rows = kernels.get("iterations", ())
    eager = kernels.get("iterations_eager", ()) if any(row["graphs"] for row in rows) else ()
    for row in (*rows, *eager):
        if row["batch"] <= 64:
            how = "in one go" if row["in_one_go"] else "layer by layer"
            batch = f"{row['batch']} decodes {how}{'' if row['graphs'] else ', without graphs'}"
            yield Goal(f"iteration of {batch}, over the weight-reading floor", row["ratio_to_floor"], "<=", 1.25)
            yield Goal(f"host time per layer, {batch}, microseconds", row["host_us_per_layer"], "<=", 30.0)
    for row in kernels.get("decode_attention", ()):
        if (row["batch"], row["context"]) == (64, 1024):
            what = "decode attention, 64 requests of 1,024 tokens, over the copy bandwidth"
            yield Goal(what, row["fraction_of_copy"], ">=", 0.70)
    if host := kernels.get("cpu_attention"):
        what = f"CPU attention with {host['threads']} threads, over the streaming read"
        yield Goal(what, host["fraction_of_read"], ">=", 0.60)


def page(folder: Path, parts: list[list[str]], kernels: dict[str, Any] | None, runs: list[dict[str, Any]]) -> str:
    machine = provenance()["machine"]
    device = kernels["device"] if kernels else ", ".join(machine["gpus"]) or "no GPU"
    about = f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['memory_gib']} GiB."
    lines = [f"# {device}, {folder.name}", "", about]
    if runs[0]["case"]["device"] == "cpu" if runs else not machine["gpus"]:
        lines.append("**A rehearsal on a CPU with a tiny model: no figure here says anything about a GPU.**")
    if versions := kernels and kernels.get("versions"):
        known = (f"{name.replace('_', ' ')} {value}" for name, value in versions.items() if value)
        lines += ["", f"{', '.join(known)}."]
    if missing := missing_packages():
        lines += ["", f"Not installed here, so nothing that needs them was checked: {', '.join(missing)}."]
    lines += ["", *markdown_lines(("part", "result", "seconds"), parts)]
    if kernels:
        lines += kernel_lines(kernels)
    if runs:
        ratio, error = "over swiftllm", "SIMULATED tokens/s"
        titles = ("case", "system", "tokens/s", ratio, "lane busy", "CPU busy", error, "its error", "")
        lines += ["", *markdown_lines(titles, [run_cells(run, runs) for run in runs])]
        lines += ["", "SIMULATED: predicted from the profile table that apex measured first (`measured/profiles`)."]
        lines += [f"![{run['timeline']}]({run['timeline']})" for run in runs if run.get("timeline")]
    return "\n".join(lines) + "\n"


def kernel_lines(kernels: dict[str, Any]) -> list[str]:
    """What the benchmark measured, with goals; a part of it may have failed."""
    lines = ["", f"{kernels['model']}, {kernels['num_layers']} layers, {kernels['dtype']}:", ""]
    rows = [
        (goal.what, f"{goal.value:.3g}", f"{goal.relation} {goal.goal:g}", "met" if goal.met else "**missed**")
        for goal in goals(kernels)
    ]
    lines += markdown_lines(("measured", "value", "goal", ""), rows)
    memory = (f"{name.replace('_', ' ')} {rate:.0f}" for name, rate in kernels.get("memory", {}).items())
    lines += ["", f"Memory, GB/s: {', '.join(memory) or 'not measured'}."]
    if product := kernels.get("gemm"):
        lines.append(f"A product of {product['size']:,} x {product['size']:,}: {product['tflops']:.3g} TFLOP/s.")
    if beside := kernels.get("cpu_attention_beside"):
        lines.append(
            f"CPU attention with {beside['threads']} threads: {beside['alone_gb_s']:.3g} GB/s alone, "
            f"{beside['beside_gb_s']:.3g} GB/s beside a busy device and its bus."
        )
    if captured := kernels.get("captured"):
        lines.append(
            f"{captured['graphs']:,} graphs captured in {captured['seconds']:.1f} s; they take "
            f"{captured['bytes'] / 2**20:,.0f} MiB."
        )
    lines += [f"Warning: {warning}." for warning in kernels["warnings"]]
    if wake_up := kernels.get("wake_up"):
        lines.append(f"A sleeping host hears of an event {wake_up['us']:.0f} us later than a spinning one.")
    if draws := kernels.get("sampling"):
        title = f"sampling, {draws[0]['rows']} rows of {draws[0]['vocab_size']:,}"
        lines += ["", *markdown_lines((title, "ms"), [(row["how"], f"{row['ms']:.2f}") for row in draws])]
    return lines


def name_of(run: dict[str, Any]) -> str:
    return run["case"]["model"] or "rehearsal"


def run_cells(run: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    if "skipped" in run:
        return [name_of(run), run["system"], *[""] * 6, run["skipped"]]
    measured, error = run["measured"], run["simulated_error"]
    # Of runs that were cut short at different times there is nothing to compare.
    base = measured["completed"] and baseline(run, runs)
    return [
        name_of(run),
        run["system"],
        f"{rate_of(run):.0f}",
        f"{rate_of(run) / base:.2f}" if base else "",
        f"{measured['lane_busy_fraction']:.0%}",
        f"{measured['cpu_busy_fraction']:.0%}",
        "" if error is None else f"{run['simulated']['output_tokens_per_s']:.0f}",
        "" if error is None else f"{error:+.1%}",
        "" if measured["completed"] else "cut short by the time limit, and so is the simulation",
    ]


def rate_of(run: dict[str, Any]) -> float:
    return run["measured"]["output_tokens_per_s"]


def baseline(run: dict[str, Any], runs: list[dict[str, Any]]) -> float | None:
    """What swiftllm gave in the same case, if it came to the end."""
    same = [one for one in runs if (one["system"], one["case"]) == ("swiftllm", run["case"]) and "measured" in one]
    return rate_of(same[0]) if same and same[0]["measured"]["completed"] else None


def draw_runs(runs: list[dict[str, Any]], folder: Path) -> None:
    """Measured bars with the simulated rate as a line across each."""
    from matplotlib import pyplot as plt

    from evaluation.plots.style import FAINT, system_colour, tidy_axes

    by_case = grouped(runs, name_of)
    figure, panels = plt.subplots(1, len(by_case), figsize=(3.4 * len(by_case), 3.2), squeeze=False)
    for ax, (case, of_case) in zip(panels[0], by_case.items(), strict=True):
        for place, run in enumerate(of_case):
            ax.bar(place, rate_of(run), color=system_colour(run["system"]), width=0.7)
            if run["simulated"]:
                rate = run["simulated"]["output_tokens_per_s"]
                ax.plot([place - 0.42, place + 0.42], [rate, rate], color="black", linewidth=1.5)
        names = [run["system"] + ("" if run["measured"]["completed"] else "\ncut short") for run in of_case]
        ax.set_xticks(range(len(of_case)), names)
        ax.set_title(f"{case}, {of_case[0]['case']['num_gpu_blocks']} GPU blocks", loc="left", fontsize=9)
        ax.set_ylabel("output tokens/s")
        tidy_axes(ax)
    note = f"{runs[0]['device']}\nbars: measured; black lines: SIMULATED"
    figure.text(0.02, 0.01, note, color=FAINT, fontsize=7)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(folder / FIGURE, dpi=160)


@cache
def provenance() -> dict[str, Any]:
    """Asked for once: an idle GPU takes seconds to report its name."""
    return {"machine": machine_identity(), "software": software(), "git": git_state(), "source": source_hash()}


def write_page(folder: Path) -> None:
    """``summary.json`` and ``README.md`` of what is in the folder by now."""
    kernels = json.loads((folder / KERNELS).read_text()) if (folder / KERNELS).exists() else None
    runs = read_runs(folder)
    parts, missing = read_parts(folder), missing_packages()
    about = {"missing_packages": missing, "provenance": provenance()}
    summary = {"parts": parts, "kernels": kernels, "runs": runs, **about}
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    text = page(folder, parts, kernels, runs)
    if (folder / FIGURE).exists():
        text += f"\n![tokens per second]({FIGURE})\n"
    write_atomically(folder / "README.md", text)


def read_runs(folder: Path) -> list[dict[str, Any]]:
    runs = [json.loads(path.read_text()) for path in sorted((folder / "end_to_end").glob("*.json"))]
    runs.sort(key=lambda run: (run["case"]["model"], SYSTEMS.index(run["system"])))
    for run in runs:
        if run.get("timeline"):
            run["timeline"] = f"end_to_end/{run['timeline']}"
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="results/<gpu>/<date> of scripts/gpu_check.sh")
    folder = parser.parse_args(arguments).folder
    if measured := [run for run in read_runs(folder) if "measured" in run]:
        try:
            draw_runs(measured, folder)
        except ImportError as error:
            print(f"no figure: {error}", file=sys.stderr)
    write_page(folder)
    print((folder / "README.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
