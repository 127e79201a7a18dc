"""Qwen3-30B-A3B in 4 bits on an A10, by the rate of CPU attention: python -m evaluation.examples.experts FOLDER

SIMULATED: four systems and the bound, 400 requests of 200 prompt and 1,000 output tokens, all at once. The folder gets
the figure and the rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from apex.cli.simulate import Simulate
from evaluation.plots.lines import LinePanel, Series, line_figure
from evaluation.plots.style import FigureText, save_figure, system_colour

SYSTEMS = ["vllm", "neo", "apex", "adaptive"]
SETTING = {
    "gpu": "a10", "host": "dual-xeon-6342", "model": "qwen3-30b-a3b", "weights": "int4", "num_requests": 400,
    "input_len": 200, "output_len": 1000,
}  # fmt: skip
RATES_GB_S = (15, 30, 60, 90, 180)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for rate in RATES_GB_S:
        output = folder / f"{rate}.json"
        Simulate(system=SYSTEMS, cpu_bandwidth_gb_s=float(rate), output=output, **SETTING).run()
        rows += json.loads(output.read_text(encoding="utf-8"))
    throughput, bound = "output_tokens_per_s", "bound_tokens_per_s"
    lines = [
        Series(
            name, system_colour(name), [(r["cpu_attention_gb_s"], r[throughput]) for r in rows if r["system"] == name]
        )
        for name in SYSTEMS
    ]
    bounds = [(r["cpu_attention_gb_s"], r[bound]) for r in rows if r["system"] == SYSTEMS[0]]
    lines.append(Series("bound", "#888888", bounds, dashed=True))
    panel = LinePanel("A10", "GB/s of K and V that the CPU attends", "tokens/s, SIMULATED", lines, log_x=True)
    text = FigureText(
        "Qwen3-30B-A3B, 4 bits, on an A10",
        "SIMULATED; 400 requests of 200 in, 1,000 out, all at once",
        "Bound: decodes alone, GPU and CPU fully overlapped. Experts by the formula of apex/perf/experts.py; codes are "
        "assumed to be read and multiplied at 0.8 of the rates of 16 bits.",
    )
    save_figure(line_figure([panel], text), folder, "experts")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
