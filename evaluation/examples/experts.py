"""Models with experts, by the rate of CPU attention: python -m evaluation.examples.experts MODEL FOLDER

MODEL: qwen3-30b-a3b (4 bits, on an A10) or gpt-oss-20b (MXFP4, on a T4). SIMULATED: four systems and the bound, 400
requests of 200 prompt and 1,000 output tokens, all at once. The folder gets the figure and the rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from apex.cli.simulate import Simulate
from evaluation.plots.charts import LinePanel, Series, line_figure
from evaluation.plots.style import FigureText, save_figure, system_colour

SYSTEMS = ["vllm", "neo", "apex", "adaptive"]
REQUESTS = {"num_requests": 400, "input_len": 200, "output_len": 1000}


class Example(NamedTuple):
    """``setting``: of :class:`Simulate`. ``rates_gb_s``: of CPU attention."""

    title: str
    card: str
    figure: str
    setting: dict[str, Any]
    rates_gb_s: tuple[int, ...]


EXAMPLES = {
    "qwen3-30b-a3b": Example(
        "Qwen3-30B-A3B, 4 bits",
        "A10",
        "experts",
        {"gpu": "a10", "host": "dual-xeon-6342", "weights": "int4"},
        (15, 30, 60, 90, 180),
    ),
    "gpt-oss-20b": Example(
        "gpt-oss-20b, MXFP4", "T4", "gpt-oss", {"gpu": "t4", "host": "g4dn-4xlarge"}, (12, 24, 36, 48, 96)
    ),
}


def main(model: str, folder: Path) -> None:
    example = EXAMPLES[model]
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for rate in example.rates_gb_s:
        output = folder / f"{rate}.json"
        how = {**example.setting, **REQUESTS, "cpu_bandwidth_gb_s": float(rate)}
        Simulate(system=SYSTEMS, model=model, output=output, **how).run()
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
    panel = LinePanel(example.card, "GB/s of K and V that the CPU attends", "tokens/s, SIMULATED", lines, log_x=True)
    text = FigureText(
        f"{example.title}, on a {example.card}",
        "SIMULATED; 400 requests of 200 in, 1,000 out, all at once",
        "Bound: decodes alone, GPU and CPU fully overlapped. Experts by the formula of apex/perf/experts.py; codes are "
        "assumed to be read and multiplied at 0.8 of the rates of 16 bits.",
    )
    save_figure(line_figure([panel], text), folder, example.figure)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
