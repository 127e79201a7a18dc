"""`apex profile`: measures the profile table from which schedulers predict, and prints its key figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from apex.cli.options import ConfigFile, EngineFlags, ModelName, ProfileFile, check_output_file
from apex.cli.output import input_errors, number, ratio, stdout_console, table
from apex.perf.model import PerfModel, ProfileTable, attention_rate
from swiftllm.files import keep, save_result

if TYPE_CHECKING:
    from rich.table import Table

LINEAR_TOKENS = (1, 16, 128)


@dataclass(frozen=True)
class Profile(ConfigFile):
    """Measure this machine and model into a profile table, and print its key figures.

    For example:

      apex profile MODEL
      apex profile MODEL --num-gpu-blocks 500 --output table.json

    Engines measure a table on their first start. Run this to see it, to measure again, or to keep it in a file. A table
    is valid for one set of engine flags: give the same ones here as to the command that uses it.
    """

    model: ModelName
    """A Hugging Face folder, or a name on its hub such as meta-llama/Llama-3.1-8B."""
    output: ProfileFile = None
    """Write the table to this file; by default to the cache, where engines find it."""
    engine: EngineFlags = field(default_factory=EngineFlags)

    def run(self) -> int:
        check_output_file("--output", self.output)
        with input_errors():
            from apex.build import open_backend
            from apex.perf.machine_profile import measure_profile, profile_path
            from apex.placement.measured import place_weights

            config = self.engine.config(self.model)
            backend = open_backend(config, place_weights(config).placement, measure_again=True)
        try:
            profile = measure_profile(config, backend)
            path = self.output or profile_path(profile.identity)
            is_written = (keep if self.output is None else save_result)(path, profile.as_json())
            console = stdout_console()
            bytes_per_token = backend.cpu_kv_bytes_per_block / backend.block_size / backend.layer_groups.pool_layers
            console.print(key_figures(profile, backend.num_layers, bytes_per_token))
            console.print(f"\nLane: {backend.cores.gpu_batch_input()}", soft_wrap=True, highlight=False)
            if is_written:
                console.print(f"written to {path}", soft_wrap=True)
        finally:
            backend.close()
        return 0 if is_written or self.output is None else 1


def key_figures(profile: ProfileTable, num_layers: int, bytes_per_token: float) -> Table:
    """The figures that decide whether offloading pays, one a line. ``bytes_per_token``: K and V of one layer."""
    model = PerfModel(profile, num_layers)
    gpu, cpu = attention_rate(profile.gpu_attention), attention_rate(profile.cpu_attention)
    rows = [
        (
            f"linear layers, {tokens} token{'s' if tokens > 1 else ''}",
            f"{model.linear_s(tokens) * 1e3:.2f}",
            "ms a layer",
        )
        for tokens in LINEAR_TOKENS
    ]
    rows += [
        ("  nearly constant up to", str(model.flat_linear_tokens), "tokens"),
        ("GPU attention rate N_G", rate_text(gpu), "context tokens/s, one layer"),
        ("CPU attention rate N_C", rate_text(cpu), "context tokens/s, one layer"),
        ("  which reads", number(cpu and cpu * bytes_per_token / 1e9, ".2f"), "GB/s of K and V"),
        ("N_G / N_C", number(ratio(gpu, cpu), ".2f"), "pipelining needs it small (inequality 6)"),
    ]
    return table(("figure", "value", "unit"), rows, left=("figure", "unit"))


def rate_text(rate: float | None) -> str:
    return number(rate and rate / 1e6, ".2f") + (" M" if rate else "")
