"""Park and Egger's split of a decoder layer: which of its operations the CPU computes while the rest crosses PCIe.

Equations are those of section 4.2. Operations are in the order of a layer. The CPU has those before ``i`` and from
``j`` on, the GPU those between, whose weights and KV cache are sent to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from rich.console import Console

from apex.cli.options import parse_options
from apex.cli.output import stdout_console
from apex.simulator.hardware_files import Figure, LayerShape, load_gpu, load_host
from apex.simulator.predicted_profile import cpu_attention_gb_s, effective_pcie_gb_s, gemm_s, host_read_gb_s
from evaluation.options import File, ResultsDir, experiment_settings
from evaluation.plots.style import FigureText, panel_title, sheet, show_figure, system_colour, tidy_axes
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.folder import FlatRecord, ResultFolder
from evaluation.results.paths import RESULTS_DIR
from evaluation.results.rows import grouped
from evaluation.results.tables import rows_table
from evaluation.run import one_line_errors


@dataclass(frozen=True)
class Operation:
    """An operation of a layer: seconds for one batch on the CPU, over PCIe, to decompress, and on the GPU.

    ``kv_s`` is the part of ``host_to_device_s`` that each batch sends of its own: its KV cache.
    """

    name: str
    cpu_s: float
    host_to_device_s: float
    decompress_s: float = 0.0
    gpu_s: float = 0.0
    kv_s: float = 0.0


@dataclass(frozen=True)
class Split:
    """A split and its times; operations ``[i, j)`` are the GPU's."""

    i: int
    j: int
    cpu_s: float
    host_to_device_s: float
    decompress_s: float

    @property
    def latency_s(self) -> float:
        """L of a layer, equations 5 and 9."""
        return max(self.cpu_s, self.host_to_device_s, self.decompress_s)


def split_at(operations: Sequence[Operation], i: int, j: int, batches: int = 1) -> Split:
    """Equations 6 to 8 for a batch, equation 14 for several: weights are sent once, KV cache for each batch.

    The CPU computes, and the GPU decompresses KV cache, once for each batch.
    """
    own, others = operations[i:j], [*operations[:i], *operations[j:]]
    sent_s = sum(op.host_to_device_s for op in own) + (batches - 1) * sum(op.gpu_s + op.kv_s for op in own)
    decompress_s = sum(op.decompress_s * (batches if op.kv_s else 1) for op in own)
    first_s = next((op.host_to_device_s for op in own if op.decompress_s), 0.0)
    return Split(
        i, j, batches * sum(op.cpu_s for op in others), sent_s, decompress_s + first_s if decompress_s else 0.0
    )


def single_splits(operations: Sequence[Operation], batches: int = 1) -> list[Split]:
    """The CPU computes the first 0, 1, 2, ... operations (Fig. 14); the first entry is GPU-only."""
    return [split_at(operations, i, len(operations), batches) for i in range(len(operations))]


def best_split(operations: Sequence[Operation], batches: int = 1) -> Split:
    """Of all one or two split points (equation 13), the one of the lowest latency, then of the best balance."""

    def key(split: Split) -> tuple[float, float]:
        return split.latency_s, abs(split.cpu_s - split.host_to_device_s)

    return min(_splits(operations, batches), key=key)


def _splits(operations: Sequence[Operation], batches: int) -> Iterator[Split]:
    for i in range(len(operations)):
        for j in range(i + 1, len(operations) + 1):
            yield split_at(operations, i, j, batches)


def in_pieces(operations: Sequence[Operation], name: str, pieces: int) -> list[Operation]:
    """An operation divided into equal pieces (section 3.2), each of which may be on the other side of a split."""
    divided: list[Operation] = []
    for op in operations:
        if op.name != name:
            divided.append(op)
            continue
        times = ("cpu_s", "host_to_device_s", "decompress_s", "gpu_s", "kv_s")
        piece = replace(op, **{time: getattr(op, time) / pieces for time in times})
        divided += [replace(piece, name=f"{name}.{k}") for k in range(pieces)]
    return divided


# -- predicted seconds of a layer's operations ------------------------------------------------------------------------

ITEMSIZE = 2  # bfloat16


@dataclass(frozen=True)
class LayerOfModel:
    """A model's decoder layer, in elements; ``origin`` and ``status`` say where from."""

    layers: int
    hidden: int
    ffn: int
    ffn_matrices: int
    heads: int
    kv_heads: int
    head_dim: int
    origin: str
    status: str

    @property
    def weights(self) -> dict[str, int]:
        """Elements of each matrix."""
        kv = self.kv_heads * self.head_dim * self.hidden
        query = self.heads * self.head_dim * self.hidden
        ffn = {f"FC.{k}": self.hidden * self.ffn for k in range(self.ffn_matrices)}
        return {"Q": query, "K": kv, "V": kv, "Output": query, **ffn}

    @property
    def shape(self) -> LayerShape:
        """The shape that CPU attention depends on."""
        return LayerShape(self.hidden, self.ffn, self.heads, self.kv_heads, self.head_dim)


def cpu_read_bytes_per_s(alone_bytes_per_s: float, pcie_bytes_per_s: float, dram_bytes_per_s: float) -> float:
    """What the CPU reads while a copy runs: a link takes its share of DRAM (section 4.1 measures the same)."""
    return alone_bytes_per_s * (1.0 - pcie_bytes_per_s / dram_bytes_per_s)


class Machine:
    """The paper's machine. ``native_attention``: our CPU attention kernel in place of the authors'."""

    def __init__(self, settings: Mapping[str, Any], native_attention: bool = False) -> None:
        self.gpu, self.host = load_gpu(settings["gpu"]), load_host(settings["host"])
        self.figures = {name: Figure(**fields) for name, fields in settings["figures"].items()}
        self.native_attention = native_attention
        self.pcie_bytes_per_s = effective_pcie_gb_s(self.gpu, self.host) * 1e9
        self.dram_bytes_per_s = host_read_gb_s(self.host) * 1e9

    def __getitem__(self, figure: str) -> float:
        return self.figures[figure].value

    def operations(self, layer: LayerOfModel, size: int, context: float, compressed: bool) -> list[Operation]:
        """Of one batch of ``size`` requests that have ``context`` tokens each; the CPU computes while copies run."""
        weights = {name: self._linear(name, count, size, compressed) for name, count in layer.weights.items()}
        scores, values = (self._attention(name, layer, size, context, compressed) for name in ("Scores", "WV"))
        ffn = [op for name, op in weights.items() if name.startswith("FC")]
        return [*(weights[name] for name in "QKV"), scores, values, weights["Output"], *ffn]

    def kv_bytes(self, layer: LayerOfModel, size: int, context: float) -> float:
        """Keys and values of a batch in a layer."""
        return 2 * size * context * layer.kv_heads * layer.head_dim * ITEMSIZE

    def prefill_s(self, layer: LayerOfModel, size: int, tokens: int, compressed: bool) -> float:
        """A layer of a batch's prefill: the GPU computes, while the next weights arrive and KV cache leaves."""
        rows, count = size * tokens, sum(layer.weights.values())
        attention_flops = 4 * layer.heads * layer.head_dim * tokens**2 * size
        rate = self.gpu["tensor_tflops"] * 1e12 * self.gpu["gemm_fraction"] * self.gpu["prefill_attention_of_gemm"]
        compute_s = gemm_s(self.gpu, count, ITEMSIZE, rows) + attention_flops / rate
        if compressed:
            compute_s += sum(self._decompress_s(n * ITEMSIZE) for n in layer.weights.values())
        share = self["compressed_weights"] if compressed else 1.0
        return max(compute_s, share * count * ITEMSIZE / self.pcie_bytes_per_s)

    def pin_s(self, num_bytes: float) -> float:
        """FlexGen's copy into pinned memory, before a transfer."""
        return num_bytes / (self.dram_bytes_per_s * self["pin_copy_share"])

    def transfer_s(self, num_bytes: float) -> float:
        return num_bytes / self.pcie_bytes_per_s

    def _linear(self, name: str, count: int, rows: int, compressed: bool) -> Operation:
        read = cpu_read_bytes_per_s(self.dram_bytes_per_s, self.pcie_bytes_per_s, self.dram_bytes_per_s)
        multiply = self.host["cores"] * self.host["cpu_linear_gflops_per_core"] * 1e9
        cpu_s = count * ITEMSIZE / (read * self.host["cpu_linear_read_fraction"]) + 2 * count * rows / multiply
        share = self["compressed_weights"] if compressed else 1.0
        return Operation(
            name,
            cpu_s,
            self.transfer_s(share * count * ITEMSIZE),
            self._decompress_s(count * ITEMSIZE) if compressed else 0.0,
            gemm_s(self.gpu, count, ITEMSIZE, rows),
        )

    def _attention(self, name: str, layer: LayerOfModel, size: int, context: float, compressed: bool) -> Operation:
        """Scores reads the keys, WV the values."""
        num_bytes = self.kv_bytes(layer, size, context) / 2
        if self.native_attention:
            alone = cpu_attention_gb_s(self.host, "native", layer.shape) * 1e9
            cpu_s = num_bytes / cpu_read_bytes_per_s(alone, self.pcie_bytes_per_s, self.dram_bytes_per_s)
        else:  # each query head computes with keys of its own (section 3.2 on GQA)
            cpu_s = num_bytes * layer.heads / layer.kv_heads / (self["cpu_attention_gb_s"] * 1e9)
        sent_s = self.transfer_s((self["compressed_kv"] if compressed else 1.0) * num_bytes)
        gpu_s = num_bytes / (self.gpu["memory_bandwidth_gb_s"] * 1e9 * self.gpu["decode_attention_fraction"])
        return Operation(name, cpu_s, sent_s, self._decompress_s(num_bytes) if compressed else 0.0, gpu_s, sent_s)

    def _decompress_s(self, num_bytes: float) -> float:
        return self["decompress_fixed_ms"] * 1e-3 + num_bytes / (self["decompress_gb_s"] * 1e9)


# -- whole generations (Fig. 15, 16) and split searches (Fig. 14) -----------------------------------------------------

SYSTEMS = ("flexgen-like", "gpu-only", "cpu-gpu", "cpu-gpu native")
"""FlexGen's order of transfers; all weights and KV cache streamed; the best split; the same with our CPU attention."""


def measured_operations(settings: Mapping[str, Any], name: str) -> list[Operation]:
    """The operations that the paper's tables give, in seconds."""
    raw = settings["measured"][name]["operations"]
    return [Operation(op, *(ms * 1e-3 for ms in times)) for op, *times in raw]


def search_rows(settings: Mapping[str, Any]) -> list[FlatRecord]:
    """Fig. 14: layer latency over single split points, with Scores whole and in pieces, and the best of two points."""
    rows: list[FlatRecord] = []
    for name in settings["measured"]:
        operations = measured_operations(settings, name)
        for pieces in (1, settings["split_pieces"]):
            divided = operations if pieces == 1 else in_pieces(operations, "Scores", pieces)
            singles = single_splits(divided)
            best_single = min(singles, key=lambda split: split.latency_s)
            candidates = (("gpu-only", singles[0]), ("one split", best_single), ("two splits", best_split(divided)))
            rows += [_search_row(name, pieces, system, split, divided) for system, split in candidates]
    return rows


def _search_row(name: str, pieces: int, system: str, split: Split, operations: Sequence[Operation]) -> FlatRecord:
    names = [op.name for op in operations]
    return {
        **_common("park-egger-opt-30b", f"{name}-split-{pieces}", system, 0),
        "figure": "split-search",
        "on_gpu": f"{names[split.i]} to {names[split.j - 1]}",
        "cpu_s": split.cpu_s,
        "host_to_device_s": split.host_to_device_s,
        "decompress_s": split.decompress_s,
        "layer_latency_s": split.latency_s,
    }


def generation_rows(settings: Mapping[str, Any]) -> list[FlatRecord]:
    """Fig. 15 and 16: latency of a generation for each model, workload, output length and system."""
    rows: list[FlatRecord] = []
    for model, raw in settings["models"].items():
        layer = LayerOfModel(**raw)
        for load in settings["workloads"]:
            workload = f"{load['batches']}x{load['size']}" + ("-compressed" if load["compressed"] else "")
            for output_len in settings["output_lens"]:
                for system in SYSTEMS:
                    row = _generation(settings, layer, system, output_len=output_len, **load)
                    rows.append({**_common(f"park-egger-{model}", workload, system, output_len), **row})
    return rows


def _common(setting: str, workload: str, system: str, output_len: int) -> FlatRecord:
    return {
        "setting": setting,
        "figure": "split-point",
        "workload": workload,
        "system": system,
        "backend": "simulated",
        "output_len": output_len,
        "cpu_bandwidth_gb_s": None,
    }


def _generation(
    settings: Mapping[str, Any],
    layer: LayerOfModel,
    system: str,
    *,
    batches: int,
    size: int,
    compressed: bool,
    output_len: int,
) -> FlatRecord:
    machine, input_len = Machine(settings, native_attention=system.endswith("native")), settings["input_len"]
    context = input_len + output_len / 2
    operations = machine.operations(layer, size, context, compressed)
    gpu_only = split_at(operations, 0, len(operations), batches)
    kv_bytes = machine.kv_bytes(layer, size, context)
    prompt_kv_bytes = machine.kv_bytes(layer, size, input_len)
    prefill_s = batches * machine.prefill_s(layer, size, input_len, compressed)
    on_gpu = "all"
    if system == "flexgen-like":
        sent = machine["compressed_kv"] if compressed else 1.0
        layer_s = gpu_only.latency_s + batches * machine.pin_s(sent * kv_bytes)
        prefill_s += batches * machine.transfer_s(sent * prompt_kv_bytes)  # synchronous (section 5.3)
    elif system == "gpu-only":
        layer_s = gpu_only.latency_s
    else:
        divided = in_pieces(operations, "Scores", settings["split_pieces"])
        best = best_split(divided, batches)
        layer_s, names = best.latency_s, [op.name for op in divided]
        on_gpu = f"{names[best.i]} to {names[best.j - 1]}"
    latency_s = layer.layers * (prefill_s + (output_len - 1) * layer_s)
    return {
        "layer_latency_s": layer_s,
        "prefill_s": layer.layers * prefill_s,
        "request_latency_s": latency_s,
        "output_tokens_per_s": batches * size * output_len / latency_s,
        "on_gpu": on_gpu,
    }


# -- the figure -------------------------------------------------------------------------------------------------------

SEARCH_TEXT = FigureText(
    "Park and Egger's split search",
    "Latency of a layer of OPT-30B if the CPU computes all operations up to and including the one named. SIMULATED: "
    "computed from the times in the paper's Fig. 6a and 8a.",
    "The latency is the longest of CPU, host-to-device transfers and decompression (section 4.2). For a batch of 100, "
    "attention and KV cache of the batch of 50 count twice.",
)
LINES = {"CPU": "neo", "host to device": "apex", "decompression": "fastdecode"}


def draw_search(searches: Mapping[str, Sequence[Operation]], pieces: int) -> Drawing:
    """A row of two panels for each list of operations: with Scores whole, and in ``pieces`` (their Fig. 14)."""
    figure, rows = sheet(SEARCH_TEXT, len(searches), 2, width=9.0, height=1.4, left=0.6, below=0.75, sharey="row")
    for axes, (name, operations) in zip(rows, searches.items(), strict=True):
        draw_splits(axes[0], name, operations)
        draw_splits(axes[1], f"{name}, Scores in {pieces} pieces", in_pieces(operations, "Scores", pieces))
        axes[0].set_ylim(0, 1.3 * axes[0].get_ylim()[1])
        axes[0].set_ylabel("ms a layer")
        axes[1].tick_params(labelleft=True)
    rows[-1][0].legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    return figure


def draw_splits(ax: Axes, title: str, operations: Sequence[Operation]) -> None:
    """A layer's latency over the operation up to which the CPU computes."""
    splits = single_splits(operations)
    # The first label means that the GPU computes all; a label that follows means: up to and including that operation.
    labels = ["GPU-only", *(op.name for op in operations[:-1])]
    gpu_only_s = splits[0].latency_s
    within = [split for split in splits if split.latency_s <= 1.6 * gpu_only_s]
    times = (
        [split.cpu_s for split in within],
        [split.host_to_device_s for split in within],
        [split.decompress_s for split in within],
    )
    for (name, system), seconds in zip(LINES.items(), times, strict=True):
        if any(seconds):
            ax.plot([1e3 * s for s in seconds], color=system_colour(system), label=name, linewidth=1.3)
    ax.bar(range(len(within)), [1e3 * split.latency_s for split in within], color="#D8D8D8", label="latency")
    best = min(range(len(within)), key=lambda index: within[index].latency_s)
    saved = 1 - within[best].latency_s / gpu_only_s
    ax.annotate(f"-{saved:.0%}", (best, 1e3 * within[best].latency_s), ha="center", va="bottom", fontsize=9)
    ax.set_xticks(range(len(within)), labels[: len(within)], rotation=60, fontsize=7)
    panel_title(ax, title)
    tidy_axes(ax)


# -- the command ------------------------------------------------------------------------------------------------------

NAME = "split-point"
REASONS = (
    "Where ours differs:",
    "Fig. 14a, 14b: the times of Fig. 6a allow no 30%. They would if Scores took 40 ms on the CPU in place of 78; "
    "Fig. 10a says that CPU work takes about half without copies. Two split points allow 42% with the same times.",
    "Fig. 14c, 14d: the paper has no times of a batch of 100. Ours are those of 50, attention and KV cache twice.",
    "Fig. 15: copies into pinned memory are all that sets FlexGen apart, at an assumed rate.",
    "Fig. 16: the paper's text does not say how large the batches are. With 16 bits the gain is smaller here. With "
    "compression it is larger: decompression takes a fixed 5 ms an operation, and the GPU's part takes long.",
)


@dataclass(frozen=True)
class Options:
    """Park and Egger's split of a model between CPU and GPU, all weights in host memory. SIMULATED (predicted times, no
    GPU needed).

    Models, workloads and figures come from configs/experiments/split-point.yaml, the claims from configs/claims.yaml.
    Results, figure and provenance go to results/split-point/<run>/.
    """

    config: File = None
    """Experiment file to use instead of configs/experiments/split-point.yaml."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to split-point/<run>/ in this folder."""


@one_line_errors
def main(options: Options | None = None) -> int:
    """Returns the exit status: 0, or 2 for invalid options."""
    options = options or parse_options(Options)
    settings, console = experiment_settings(NAME, options.config), stdout_console()
    searches, generations = search_rows(settings), generation_rows(settings)
    console.print("[bold]SIMULATED[/]: latency of a layer of OPT-30B, from the paper's own times", soft_wrap=True)
    print_searches(searches, console)
    console.print("[bold]SIMULATED[/]: latency of a generation in seconds, and the layer's part on the GPU")
    print_generations(generations, console)
    print_claims(load_claims("split-search"), searches, console, with_assumptions=False)
    print_claims(load_claims(NAME), generations, console, with_assumptions=False)
    for line in REASONS:
        console.print(line, highlight=False, soft_wrap=True)
    folder = ResultFolder(NAME, {"experiment": NAME, "settings": settings}, options.results_dir)
    folder.record_invocation()
    folder.save_summary([*searches, *generations])
    panels = {entry["title"]: measured_operations(settings, name) for name, entry in settings["measured"].items()}
    show_figure(draw_search(panels, settings["split_pieces"]), folder.path, console)
    console.print(f"summary and provenance: {folder.path}", highlight=False, soft_wrap=True)
    return 0


SEARCHES = (
    ("workload", "workload", "s"), ("split", "system", "s"), ("on the GPU", "on_gpu", "s"), ("CPU ms", "cpu_s", ".1f"),
    ("H2D ms", "host_to_device_s", ".1f"), ("decompr. ms", "decompress_s", ".1f"),
    ("latency ms", "layer_latency_s", ".1f"),
)  # fmt: skip
GENERATIONS = (
    ("model", "model", "s"), ("workload", "workload", "s"), ("out", "output_len", "d"),
    *((system, system, ",.0f") for system in SYSTEMS), ("/ GPU only", "ratio", ".2f"), ("on the GPU", "on_gpu", "s"),
)  # fmt: skip


def print_searches(rows: Sequence[FlatRecord], console: Console) -> None:
    in_ms = [row | {field: 1e3 * row[field] for _, field, form in SEARCHES if form == ".1f"} for row in rows]
    console.print(rows_table(in_ms, SEARCHES))


def print_generations(rows: Sequence[FlatRecord], console: Console) -> None:
    """One line for each model, workload and output length."""
    lines = []
    for here in grouped(rows, "setting", "workload", "output_len").values():
        latencies = {row["system"]: row["request_latency_s"] for row in here}
        (split,) = (row for row in here if row["system"] == "cpu-gpu")
        model, ratio = split["setting"].removeprefix("park-egger-"), latencies["cpu-gpu"] / latencies["gpu-only"]
        lines.append({**split, **latencies, "model": model, "ratio": ratio})
    console.print(rows_table(lines, GENERATIONS))
