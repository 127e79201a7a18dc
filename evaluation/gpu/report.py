"""Turns a folder of scripts/gpu_check.sh into summary.json, a figure, one page of text, and one archive of it all.

python -m evaluation.gpu.report FOLDER [--archive FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    NEEDS = ()
    from evaluation import here

from functools import cache

from apex.environment import REQUIREMENTS, has_package, pinned_modules
from evaluation.results.folder import markdown_lines
from evaluation.results.provenance import git_state, machine_identity, software, source_hash
from evaluation.results.rows import grouped
from swiftllm.files import write_atomically

FIGURE = "end_to_end.png"
KERNELS = "kernels.json"
PARTS = "parts.txt"
CHECKS = "checks"  # a folder
OK, NOT_REACHED, LACKS = "ok", "not reached", "needs "
SHOWN_KERNELS = 5  # of a profile, on the page; summary.json has more
ABOUT = ("warnings", "failed", "needs_gpu", "versions")
"""Of the benchmark's file, what is no part's figures, or stands in the head of the page."""
TITLES = {"memory": "memory, GB/s"}
"""Of parts whose name alone does not say what their figures are."""
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
        return self.miss <= 1.0

    @property
    def miss(self) -> float:
        """By what factor the value is worse than the goal; 1 or less where it is met."""
        worse, better = (self.goal, self.value) if self.relation == ">=" else (self.value, self.goal)
        return worse / better if better else float("inf")


def read_parts(folder: Path) -> list[list[str]]:
    """Name, result and seconds of each part that has ended in the folder."""
    path = folder / PARTS
    return [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []


def read_checks(folder: Path) -> dict[str, dict[str, Any]]:
    """Result and seconds of each check of tests/gpu by name."""
    files = sorted((folder / CHECKS).glob("*.json"))
    return {name: check for file in files for name, check in json.loads(file.read_text()).items()}


def verdict(
    parts: list[list[str]], checks: dict[str, dict[str, Any]], kernels: dict[str, Any], runs: list[dict[str, Any]]
) -> list[str]:
    """What went well, what did not, what was not reached and what this machine lacks; and what is slow."""
    results = {name: result for name, result, _ in parts}
    of_checks = {f"{name} (a check)": check["result"] for name, check in checks.items()}
    skipped = {
        f"{run['system']}-{name_of(run)}": f"{LACKS}memory: {run['skipped']}" for run in runs if "skipped" in run
    }
    lacking = dict.fromkeys(kernels.get("needs_gpu", ()), f"{LACKS}a GPU")
    broken = dict.fromkeys((f"{name} (of the benchmark)" for name in kernels.get("failed", ())), "failed")
    ended = {**results, **of_checks, **lacking, **broken, **skipped}

    def named(wanted: Callable[[str], bool]) -> str:
        return "; ".join(f"{name}: {result}" for name, result in ended.items() if wanted(result)) or "nothing"

    well = [name for name, result in results.items() if result == OK]
    passed = sum(result == OK for result in of_checks.values())
    unreached = ", ".join(name for name, result in results.items() if result == NOT_REACHED)
    lines = [
        f"Passed: {', '.join(well) or 'nothing'}; {passed} of {len(of_checks)} checks.",
        f"Failed: {named(lambda result: result not in (OK, NOT_REACHED) and not result.startswith(LACKS))}.",
        f"Not reached: {unreached or 'nothing'}.",
        f"Lacking here: {named(lambda result: result.startswith(LACKS))}.",
    ]
    missed = sorted((goal for goal in goals(kernels) if not goal.met), key=lambda goal: -goal.miss)
    lines += [f"Slow: {goal.what}: {goal.value:.3g}, goal {goal.relation} {goal.goal:g}." for goal in missed[:3]]
    for table in kernels.get("gpu_batch_profiles") or ():
        if table["span_us"] and table["kernels"]:
            longest = table["kernels"][0]
            lines.append(
                f"{table['gpu_batch']}: idle {table['idle_us'] / table['span_us']:.0%}, most in {longest['name']} "
                f"({longest['us'] / table['span_us']:.0%})."
            )
    return lines


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
    for row in kernels.get("linear_attention", ()):
        if (row["of"], row["rows"]) == ("decodes", 64):
            yield Goal("states of 64 decodes, read and written, over the copy bandwidth", row["over_copy"], ">=", 0.70)
    if host := kernels.get("cpu_attention"):
        what = f"CPU attention with {host['threads']} threads, over the streaming read"
        yield Goal(what, host["fraction_of_read"], ">=", 0.60)


def page(
    folder: Path,
    parts: list[list[str]],
    checks: dict[str, dict[str, Any]],
    kernels: dict[str, Any] | None,
    runs: list[dict[str, Any]],
) -> str:
    machine = provenance()["machine"]
    device = kernels["device"] if kernels else ", ".join(machine["gpus"]) or "no GPU"
    about = f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['memory_gib']} GiB."
    lines = [f"# {device}, {folder.name}", "", about]
    if runs[0]["case"]["device"] == "cpu" if runs else not machine["gpus"]:
        lines.append("**A rehearsal on a CPU with a tiny model: no figure here says anything about a GPU.**")
    lines += ["", *(f"- {line}" for line in verdict(parts, checks, kernels or {}, runs))]
    if versions := kernels and kernels.get("versions"):
        known = (f"{words(name)} {value}" for name, value in versions.items() if value)
        lines += ["", f"{', '.join(known)}."]
    if missing := missing_packages():
        lines += ["", f"Not installed here, so nothing that needs them was checked: {', '.join(missing)}."]
    lines += ["", *markdown_lines(("part", "result", "seconds"), parts)]
    if checks:
        rows = [(name, check["result"], f"{check['seconds']:.1f}") for name, check in checks.items()]
        lines += ["", *markdown_lines(("check", "result", "seconds"), rows)]
    if kernels:
        lines += kernel_lines(kernels)
    if runs:
        ratio, error = "over swiftllm", "SIMULATED tokens/s"
        titles = ("case", "system", "tokens/s", ratio, "GPU batch busy", "CPU busy", error, "its error", "")
        lines += ["", *markdown_lines(titles, [run_cells(run, runs) for run in runs])]
        lines += ["", "SIMULATED: predicted from the profile table that apex measured first (`measured/profiles`)."]
        lines += [f"![{run['timeline']}]({run['timeline']})" for run in runs if run.get("timeline")]
    return "\n".join(lines) + "\n"


def kernel_lines(kernels: dict[str, Any]) -> list[str]:
    """What the benchmark measured: goals, then the figures of each part; a part may have failed."""
    lines = ["", f"{kernels['model']}, {kernels['num_layers']} layers, {kernels['dtype']}:", ""]
    rows = [
        (goal.what, f"{goal.value:.3g}", f"{goal.relation} {goal.goal:g}", "met" if goal.met else "**missed**")
        for goal in goals(kernels)
    ]
    lines += markdown_lines(("measured", "value", "goal", ""), rows)
    lines += [f"Warning: {warning}." for warning in kernels["warnings"]]
    for part, figures in kernels.items():
        if figures and isinstance(figures, (dict, list)) and part not in ABOUT:
            lines += part_lines(part, figures)
    return lines


def part_lines(part: str, figures: dict[str, Any] | list[dict[str, Any]]) -> list[str]:
    """The figures of a part as a table, and the first rows of each table that a row has in itself."""
    rows = figures if isinstance(figures, list) else [figures]
    inner = {name for row in rows for name, value in row.items() if isinstance(value, list)}
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in inner]
    lines = [
        "",
        f"{TITLES.get(part, words(part))}:",
        "",
        *markdown_lines(list(map(words, names)), [_cells(row, names) for row in rows]),
    ]
    for row in rows:
        for name in sorted(inner & row.keys()):
            lines += part_lines(f"{words(part)}, {next(iter(row.values()))}", row[name][:SHOWN_KERNELS])
    return lines


def _cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    values = (row.get(name) for name in names)
    return [
        "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", " ")
        for value in values
    ]


def words(name: str) -> str:
    return name.replace("_", " ")


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
        f"{measured['gpu_batch_busy_fraction']:.0%}",
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


def write_page(folder: Path, archive: Path | None = None) -> None:
    """``summary.json`` and ``README.md`` of what is in the folder by now, and the archive of the folder."""
    kernels = json.loads((folder / KERNELS).read_text()) if (folder / KERNELS).exists() else None
    runs = read_runs(folder)
    parts, checks, missing = read_parts(folder), read_checks(folder), missing_packages()
    about = {"missing_packages": missing, "provenance": provenance()}
    lines = verdict(parts, checks, kernels or {}, runs)
    summary = {"verdict": lines, "parts": parts, "checks": checks, "kernels": kernels, "runs": runs, **about}
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    text = page(folder, parts, checks, kernels, runs)
    if (folder / FIGURE).exists():
        text += f"\n![tokens per second]({FIGURE})\n"
    write_atomically(folder / "README.md", text)
    if archive is not None:
        write_archive(folder, archive)


def write_archive(folder: Path, archive: Path) -> None:
    """Pack the folder, under its name, into one file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(folder, folder.name)
    write_atomically(archive, packed.getvalue())


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
    parser.add_argument("--archive", type=Path, help="a file that packs the folder")
    options = parser.parse_args(arguments)
    folder = options.folder
    if measured := [run for run in read_runs(folder) if "measured" in run]:
        try:
            draw_runs(measured, folder)
        except ImportError as error:
            print(f"no figure: {error}", file=sys.stderr)
    write_page(folder, options.archive)
    print((folder / "README.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
