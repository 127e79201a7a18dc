"""Reads GPUs, hosts and links from their files in ``configs/hardware``: figures with origin, measured layer times.

Every figure has an origin and a status: measured, published or assumed. ``assumptions.yaml`` holds the figures that a
file may leave out, so that a new card needs its data sheet alone. ``apex.simulator.prediction`` turns a GPU, a host
and a model into a profile table; a link joins several such GPUs.
"""

from __future__ import annotations

import csv
import functools
import gzip
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, isfinite
from pathlib import Path
from typing import Any

import yaml

from apex.perf.model import Curve, Surface
from apex.perf.operator_tables import TimeGrid, UnequalContexts
from apex.source_tree import CONFIGS, configs_folder
from swiftllm.machine import GIB
from swiftllm.model.config import LinearSizes, ModelConfig
from swiftllm.model.folder import model_folder

# -- measured operator times of a card ---------------------------------------------------------------------------------
# Reads the measured operator times of a card: a folder of CSV files, in microseconds, each possibly with ``.gz``.
#
# - ``dense.csv``: layer, tokens, time_us. One layer's linear and elementwise operators; embedding and last norm.
# - ``attention.csv``: prefill_chunk, kv_prefill, n_decode, kv_decode, time_us. A layer's attention of one prompt chunk
#   after so many cached tokens, of decodes of so many context tokens each, or of both in one call.
# - ``per_sequence.csv``: layer, sequences, time_us. Head and sampler over the rows that get a token.
# - ``moe.csv``, of mixtures of experts: tokens, activated_experts, time_us. A layer's experts.
# - ``skew.csv``, optional: regime (pure or mixed), n, alpha. What unequal contexts cost, see
#   :class:`apex.perf.operator_tables.UnequalContexts`.

GEMMS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LAYER_NORM = "layernorm"
NORMS_PER_LAYER = 2
ELEMENTWISE = ("rotary_emb", "act_fn", "qk_norm")
TOKEN_ENDS = ("embedding", "final_layernorm")
ROW_ENDS = ("lm_head", "sampler")
US = 1e-6

Row = dict[str, str]


@dataclass(frozen=True)
class Operators:
    """Seconds of the operators of one model on one card.

    Of a layer: ``gemm`` and ``elementwise`` over tokens, ``experts`` over (tokens, activated experts); ``decode`` over
    (requests, context of each), ``prefill`` over (new tokens, tokens cached before), ``mixed`` over both pairs.
    Of an iteration: ``token_ends`` over tokens, ``row_ends`` over sampled rows.
    """

    gemm: Curve
    elementwise: Curve
    decode: Surface
    prefill: Surface
    mixed: TimeGrid | None
    token_ends: Curve
    row_ends: Curve
    unequal: UnequalContexts | None
    experts: TimeGrid | None


def read_operators(folder: Path) -> Operators:
    """Read a folder of operator times.

    Raises:
        ValueError: a file is missing or malformed; the message names the file and what it lacks.
    """
    dense = _by_layer(folder, "dense.csv", "tokens")
    ends = _by_layer(folder, "per_sequence.csv", "sequences")
    experts = _experts(folder)
    gemms = [name for name in GEMMS if name in dense] if experts is not None else list(GEMMS)
    elementwise = [name for name in ELEMENTWISE if name in dense]
    known = {*GEMMS, LAYER_NORM, *ELEMENTWISE, *TOKEN_ENDS}
    if unknown := set(dense) - known:
        raise ValueError(
            f"{folder / 'dense.csv'}: unknown layers {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}"
        )
    decode, prefill, mixed = _attention(folder)
    norms = [LAYER_NORM] * NORMS_PER_LAYER
    return Operators(
        _sum(folder / "dense.csv", dense, gemms),
        _sum(folder / "dense.csv", dense, [*norms, *elementwise]),
        decode,
        prefill,
        mixed,
        _sum(folder / "dense.csv", dense, TOKEN_ENDS),
        _sum(folder / "per_sequence.csv", ends, ROW_ENDS),
        _unequal(folder),
        experts,
    )


def table_file(folder: Path, name: str) -> Path | None:
    """A table of a folder, plain or compressed; None: there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_table(folder: Path, name: str, columns: Sequence[str]) -> list[Row]:
    """The rows of a CSV file."""
    path = table_file(folder, name)
    if path is None:
        raise ValueError(f"{folder / name} is missing: it needs the columns {', '.join(columns)}")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no row below its header")
    if missing := [column for column in columns if column not in rows[0]]:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}; it has {', '.join(map(str, rows[0]))}")
    return rows


def number(path: Path, line: int, row: Mapping[str, str], column: str, least: float = 0.0) -> float:
    """A finite number of a row."""
    try:
        value = float(row[column])
    except (KeyError, TypeError, ValueError):
        value = float("nan")
    if not isfinite(value) or value < least:
        found = row.get(column)
        raise ValueError(f"{path}, line {line}: {column}={found!r} must be a number from {least:g} on")
    return value


def _numbers(folder: Path, name: str, columns: Sequence[str], least: float = 0.0) -> list[list[float]]:
    rows = read_table(folder, name, columns)
    return [[number(folder / name, i, row, column, least) for column in columns] for i, row in enumerate(rows, 2)]


def _by_layer(folder: Path, name: str, size: str) -> dict[str, dict[float, float]]:
    """Seconds over sizes of each operator."""
    seconds: dict[str, dict[float, float]] = {}
    for line, row in enumerate(read_table(folder, name, ("layer", size, "time_us")), 2):
        path = folder / name
        seconds.setdefault(row["layer"], {})[number(path, line, row, size)] = number(path, line, row, "time_us") * US
    return seconds


def _sum(path: Path, by_layer: Mapping[str, Mapping[float, float]], names: Sequence[str]) -> Curve:
    if missing := [name for name in names if name not in by_layer]:
        raise ValueError(f"{path} lacks the layers {', '.join(missing)}")
    sizes = sorted(set.intersection(*(set(by_layer[name]) for name in names)))
    if len(sizes) < 2:
        raise ValueError(f"{path}: {', '.join(names)} have fewer than two sizes in common")
    return Curve(tuple(sizes), tuple(sum(by_layer[name][size] for name in names) for size in sizes))


def _attention(folder: Path) -> tuple[Surface, Surface, TimeGrid | None]:
    decode: dict[tuple[float, float], float] = {}
    prefill: dict[tuple[float, float], float] = {}
    mixed: dict[tuple[float, ...], float] = {}
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    for chunk, cached, decodes, context, us in _numbers(folder, "attention.csv", columns):
        if chunk and decodes:
            mixed[chunk, cached, decodes, context] = us * US
        elif chunk:
            prefill[chunk, cached] = us * US
        elif decodes:
            decode[decodes, context] = us * US
    path = folder / "attention.csv"
    alone = _surface(path, "decodes", decode), _surface(path, "prompt chunks", prefill)
    return *alone, TimeGrid.of(mixed) if mixed else None


def _surface(path: Path, what: str, seconds: Mapping[tuple[float, float], float]) -> Surface:
    curves: dict[float, dict[float, float]] = {}
    for (first, second), value in seconds.items():
        curves.setdefault(first, {})[second] = value
    if len(curves) < 2 or any(len(curve) < 2 for curve in curves.values()):
        raise ValueError(f"{path} needs at least two batch sizes of {what} alone, each with two contexts")
    firsts = sorted(curves)
    return Surface(
        tuple(firsts),
        tuple(Curve(tuple(sorted(curves[n])), tuple(curves[n][c] for c in sorted(curves[n]))) for n in firsts),
    )


def _experts(folder: Path) -> TimeGrid | None:
    if table_file(folder, "moe.csv") is None:
        return None
    rows = _numbers(folder, "moe.csv", ("tokens", "activated_experts", "time_us"))
    by_tokens: dict[float, int] = {}
    for tokens, _, _ in rows:
        by_tokens[tokens] = by_tokens.get(tokens, 0) + 1
    return TimeGrid(tuple((tokens, active, us * US) for tokens, active, us in rows if by_tokens[tokens] > 1))


def _unequal(folder: Path) -> UnequalContexts | None:
    """Medians over the measured rows, by the number of decodes."""
    if table_file(folder, "skew.csv") is None:
        return None
    shares: dict[str, dict[int, list[float]]] = {"pure": {}, "mixed": {}}
    for line, row in enumerate(read_table(folder, "skew.csv", ("regime", "n", "alpha")), 2):
        if row["regime"] not in shares:
            raise ValueError(f"{folder / 'skew.csv'}, line {line}: regime {row['regime']!r} is neither pure nor mixed")
        if row["alpha"]:  # without a value where mean and longest take the same time
            decodes = int(number(folder / "skew.csv", line, row, "n", 1))
            shares[row["regime"]].setdefault(decodes, []).append(
                number(folder / "skew.csv", line, row, "alpha", float("-inf"))
            )
    if not all(shares.values()):
        raise ValueError(f"{folder / 'skew.csv'} needs rows of both regimes, pure and mixed")
    medians = ({n: statistics.median(values) for n, values in by_n.items()} for by_n in shares.values())
    return UnequalContexts(*medians)


# -- hardware ----------------------------------------------------------------------------------------------------------

HARDWARE_DIR = CONFIGS / "hardware"
MODELS_DIR = CONFIGS / "models"
ASSUMPTIONS_FILE = HARDWARE_DIR / "assumptions.yaml"

STATUSES = ("measured", "published", "assumed")
GPU_FIGURES = ("memory_gb", "memory_bandwidth_gb_s", "tensor_tflops", "pcie_gb_s", "compute_capability")
HOST_FIGURES = ("memory_gb", "cores", "core_share", "peak_bandwidth_gb_s", "pcie_gb_s")
POWER_FIGURES = ("board_watts", "process_nm")
"""From which the share of a card's FLOPS is predicted that large GEMMs reach; optional, and with them ``has_hbm``."""
POWER_ERRORS = "each of nine cards left out in turn: median error of its GEMMs 5.2%, of the worst card 10.7%"
"""As ``python -m evaluation.validation.cards`` prints them."""
GEMM_TILE_TOKENS = 128
"""Above so many tokens GEMMs compute whole tiles. Measured tables show it, and the prediction from power needs it."""
LINK_FIGURES = ("all_reduce_gb_s", "all_reduce_latency_us")
SMALL_LINK_FIGURES = (
    "small_all_reduce_below_bytes", "small_all_reduce_gpus", "small_all_reduce_gb_s", "small_all_reduce_latency_us",
)  # fmt: skip
"""Of a kernel that reduces small buffers of few cards in place of the library; a link has all of them or none."""
GIVEN = "given by who asks"
OPTIONAL_FIGURES = {"gpu": {*POWER_FIGURES, "has_hbm"}, "host": set(), "link": set(SMALL_LINK_FIGURES)}


@dataclass(frozen=True)
class Figure:
    """A number with its unit, its origin, and its status: one of ``STATUSES``."""

    value: float
    unit: str
    origin: str
    status: str

    def __post_init__(self) -> None:
        # nan is no number from 0 on, either.
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not self.value >= 0:
            raise ValueError(f"value={self.value!r} must be a number from 0 on")
        if self.status not in STATUSES or not self.origin or not self.unit:
            raise ValueError(f"a figure needs a unit, an origin and a status of {STATUSES}, got {self}")


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one transformer layer, in elements.

    In models with linear attention it is a layer of full attention together with those of linear attention before it,
    as the executor counts layers. All have an FFN of one size.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    """0: the FFN is dense. Else ``intermediate_size`` is that of an expert, of which a row has ``per_token``."""
    per_token: int = 0
    shared_size: int = 0
    """Of the FFN of one more expert, which all rows go to; 0: there is none."""
    linear: LinearSizes | None = None

    @classmethod
    def from_config(cls, config: ModelConfig) -> LayerShape:
        experts = (0, 0, 0)
        if config.experts is not None:
            experts = config.experts.num_experts, config.experts.per_token, config.experts.shared_size or 0
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return cls(config.hidden_size, config.intermediate_size, *heads, *experts, config.linear)

    @classmethod
    def of_rank(cls, config: ModelConfig, tensor_parallel: int) -> LayerShape:
        """The part of each of ``tensor_parallel`` GPUs.

        Raises:
            ValueError: a size does not divide.
        """
        if config.linear is not None:
            return cls.from_config(config.shard(tensor_parallel))
        return cls.from_config(config).shard(tensor_parallel)

    def shard(self, tensor_parallel: int) -> LayerShape:
        """The same of a shape without linear attention: heads and FFN columns are divided, the hidden size is whole."""
        if tensor_parallel < 1:
            raise ValueError(f"tensor_parallel={tensor_parallel} must be at least 1")
        divided = {
            name: getattr(self, name) / tensor_parallel for name in ("num_heads", "num_kv_heads", "intermediate_size")
        }
        if odd := [f"{name}={getattr(self, name)}" for name, part in divided.items() if not part.is_integer()]:
            raise ValueError(f"tensor_parallel={tensor_parallel} does not divide {', '.join(odd)}: take a divisor")
        return replace(self, **{name: int(part) for name, part in divided.items()})

    @property
    def linear_layers(self) -> int:
        """Layers of linear attention."""
        return 0 if self.linear is None else self.linear.layers_before

    @property
    def num_ffns(self) -> int:
        """One in each of its layers."""
        return 1 + self.linear_layers

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def gemm_weights(self) -> int:
        """Elements of the weight matrices: QKV, output, gate and up, down, and those of linear attention. Without those
        of experts, but with those of the one that all rows go to."""
        return self.weights_before_attention + self.num_heads * self.head_dim * self.hidden_size + self._common_ffn

    @property
    def weights_before_attention(self) -> int:
        """The part of :attr:`gemm_weights` that comes before the attention with a KV cache: QKV with the gates of
        attention's output, and the layers of linear attention."""
        if self.linear is None:
            return self.qkv_size * self.hidden_size
        linear, gates = self.linear, self.num_heads * self.head_dim
        projections = linear.conv_channels + 2 * linear.values_size + 2 * linear.num_value_heads
        return (self.qkv_size + gates + self.linear_layers * projections) * self.hidden_size + (
            self.linear_layers * self._common_ffn
        )

    @property
    def _common_ffn(self) -> int:
        """Elements of the FFN of a layer that all rows go through."""
        return 3 * self.hidden_size * self.shared_size if self.num_experts else self.ffn_weights

    @property
    def ffn_weights(self) -> int:
        """Elements of gate and up and down, of an expert where there are experts."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def elementwise_elements(self) -> int:
        """Elements per token read and written by two norms, rotation of Q and K, SiLU times gate, two additions.

        Beside linear attention also by the gate of attention's output; and in each layer of it by the convolution, the
        norms of queries and keys, and the norm of the output with its gate.
        """
        rotated = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        ffn = self.intermediate_size * (self.per_token or 1) + self.shared_size
        layer = 4 * self.hidden_size + 3 * ffn + 6 * self.hidden_size
        if self.linear is None:
            return layer + rotated
        gated = 3 * self.num_heads * self.head_dim
        of_linear = 2 * self.linear.conv_channels + 4 * self.linear.keys_size + 3 * self.linear.values_size
        return layer + rotated + gated + self.linear_layers * (layer + of_linear)

    @property
    def kv_elements(self) -> int:
        """Elements of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class MeasuredLayer:
    """Measured seconds of one layer over tokens: its four GEMMs, and the sum of its elementwise operations."""

    model: str
    shape: LayerShape
    gemm: Curve
    elementwise: Curve
    origin: str


@dataclass(frozen=True)
class MeasuredOperators:
    """A folder of operator times (:mod:`apex.simulator.hardware_files`), of a layer of a shape."""

    folder: Path
    shape: LayerShape
    vocab_size: int

    @functools.cached_property
    def times(self) -> Operators:
        """Read when it is first needed: an attention table has thousands of rows."""
        return read_operators(self.folder)


@dataclass(frozen=True)
class Hardware:
    """What a GPU, a host and a link have: a name and figures. ``hardware["pcie_gb_s"]`` is a figure's value."""

    name: str
    figures: Mapping[str, Figure]

    def __getitem__(self, figure: str) -> float:
        return self.figures[figure].value


@dataclass(frozen=True)
class Gpu(Hardware):
    """``operators``: the measured operator times of whole models, by name in ``configs/models``."""

    layers: tuple[MeasuredLayer, ...] = ()
    operators: Mapping[str, MeasuredOperators] = field(default_factory=dict)
    from_power: bool = False
    """Whether its shares of the data sheet are predicted from its power, and no table has them."""
    link: str | None = None
    """What joins several of them where nothing else is said: a name in ``configs/hardware``. None: not known."""


@dataclass(frozen=True)
class Host(Hardware):
    isa: str = "avx2"

    def with_given(self, memory_gib: float | None = None, read_gb_s: float | None = None) -> Host:
        """The host with what its owner knows of it in place of its own figures.

        ``read_gb_s`` is what all cores together read, in GB/s, so no share is taken off it.

        Raises:
            ValueError: a number is not positive.
        """
        name, figures = self.name, dict(self.figures)
        for what, given in (("host_memory_gib", memory_gib), ("host_read_gb_s", read_gb_s)):
            if given is not None and not 0.0 < given < inf:
                raise ValueError(f"{what}={given} must be positive and finite")
        if memory_gib is not None:
            figures["memory_gb"] = replace(figures["memory_gb"], value=memory_gib * GIB / 1e9, origin=GIVEN)
            name += f" with {memory_gib:g} GiB"
        if read_gb_s is not None:
            figures["peak_bandwidth_gb_s"] = replace(figures["peak_bandwidth_gb_s"], value=read_gb_s, origin=GIVEN)
            for share in ("core_share", "stream_fraction"):
                figures[share] = replace(figures[share], value=1.0, origin=GIVEN)
            name += f", read at {read_gb_s:g} GB/s"
        return replace(self, name=name, figures=figures)


@dataclass(frozen=True)
class GpuLink(Hardware):
    """What joins the GPUs of a host."""

    def small_below_bytes(self, gpus: int) -> float:
        """The bytes from which on the library reduces, and no kernel of its own for small buffers; 0 without one."""
        if "small_all_reduce_gpus" not in self.figures or gpus > self["small_all_reduce_gpus"]:
            return 0.0
        return self["small_all_reduce_below_bytes"]


def closest_layer(gpu: Gpu, shape: LayerShape) -> MeasuredLayer:
    """The measured layer of a GPU that is closest in size; it must have one."""

    def distance(layer: MeasuredLayer) -> tuple[bool, int]:
        return layer.shape != shape, abs(layer.shape.gemm_weights - shape.gemm_weights)

    return min(gpu.layers, key=distance)


@functools.cache
def load_gpu(name_or_path: str | Path) -> Gpu:
    """Read a GPU: a name in ``configs/hardware``, or a path to a file of the same form.

    Raises:
        ValueError: there is no such GPU (the message lists the known ones), or its file is incomplete or malformed.
    """
    path, raw, figures = _read(name_or_path, "gpu", GPU_FIGURES)
    layers = [read_measured_layer(path.parent / layer) for layer in raw.get("measured_layers", ())]
    operators = dict(measured_operators(path.parent / folder) for folder in raw.get("measured_operators", ()))
    layers += [layer_of(model, measured) for model, measured in operators.items()]
    from_power = not layers and set(POWER_FIGURES) <= set(figures) and figures["gemm_fraction"].status == "assumed"
    if from_power:
        figures |= power_fractions(figures)
    return Gpu(raw["name"], figures, tuple(layers), operators, from_power, raw.get("link"))


def power_fractions(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """The shares of bandwidth and FLOPS of a card that nobody measured, from its board power."""
    value = {name: figure.value for name, figure in figures.items()}
    factor = value["gemm_power_factor"] * (value["gemm_power_hbm_factor"] if value.get("has_hbm") else 1.0)
    share = gemm_share(factor, value["board_watts"], value["tensor_tflops"], value["process_nm"])
    origin = "predicted from board power, by a formula fitted to nine cards"
    return {
        "gemm_fraction": replace(figures["gemm_fraction"], value=share, origin=origin),
        "weight_read_fraction": replace(figures["gemm_power_read_fraction"]),
    }


def gemm_share(factor: float, watts: float, tflops: float, process_nm: float) -> float:
    """The share of a card's FLOPS that large GEMMs reach. Power limits the clock: the energy of an operation grows
    with the size of the process, and cards with power to spare come close to their data sheet."""
    return 1.0 - exp(-factor * watts / (tflops * process_nm))


def measured_operators(folder: Path) -> tuple[str, MeasuredOperators]:
    """The operator times in a folder, and the name of their model, which its meta.json says."""
    model = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["model"].rsplit("/", 1)[-1].lower()
    config = load_model_config(model)
    return model, MeasuredOperators(folder, LayerShape.from_config(config), config.vocab_size)


def layer_of(model: str, measured: MeasuredOperators) -> MeasuredLayer:
    """The linear work of a layer among measured operators."""
    times = measured.times
    return MeasuredLayer(model, measured.shape, times.gemm, times.elementwise, str(measured.folder.name))


@functools.cache
def load_host(name_or_path: str | Path) -> Host:
    """Read a host, as :func:`load_gpu` does a GPU."""
    _, raw, figures = _read(name_or_path, "host", HOST_FIGURES)
    return Host(raw["name"], figures, raw["isa"])


@functools.cache
def load_link(name_or_path: str | Path) -> GpuLink:
    """Read a link between GPUs, as :func:`load_gpu` does a GPU."""
    path, raw, figures = _read(name_or_path, "link", LINK_FIGURES)
    small = set(SMALL_LINK_FIGURES) & set(figures)
    if small and (missing := set(SMALL_LINK_FIGURES) - small):
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}, which belong to {', '.join(sorted(small))}")
    return GpuLink(raw["name"], figures)


def load_model_config(name_or_path: str | Path) -> ModelConfig:
    """Read a model's shape, by a name in ``configs/models`` (without weights), a Hugging Face folder or a hub name."""
    if (known := known_model(name_or_path)) is not None:
        return ModelConfig.from_folder(MODELS_DIR / known)
    folder = model_folder(name_or_path, weights=False)
    if folder.is_dir():
        return ModelConfig.from_folder(folder)
    known_names = ", ".join(known_models())
    raise ValueError(
        f"no model {str(name_or_path)!r}: known are {known_names}; or give a Hugging Face folder or a hub name"
    )


def known_model(name_or_path: str | Path) -> str | None:
    """The name in ``configs/models`` of a model, which is given by it or by its name on the hub, in whatever case."""
    name = str(name_or_path).lower()
    if name in known_models():
        return name
    return next((known for known, on_hub in model_origins().items() if on_hub.lower() == name), None)


def known_models() -> list[str]:
    """Sorted names of the folders in ``configs/models``."""
    return sorted(path.name for path in configs_folder("models").iterdir() if path.is_dir())


def model_origins() -> dict[str, str]:
    """The names on the hub of the models in ``configs/models`` that have one."""
    return _load_yaml(configs_folder("models") / "origins.yaml")


def known_hardware(kind: str) -> list[str]:
    """Sorted names of the files in ``configs/hardware`` of a kind: "gpu", "host" or "link"."""
    files = configs_folder("hardware").glob("*.yaml")
    return sorted(path.stem for path in files if _load_yaml(path).get("kind") == kind)


def read_figures(path: Path) -> dict[str, Figure]:
    """Read the figures of a hardware file, without assumptions."""
    figures, raw = {}, _load_yaml(path).get("figures")
    if not isinstance(raw, dict):
        raise ValueError(f"{path} lacks `figures:`, with a line for each figure below it")
    for name, fields in raw.items():
        try:
            figures[name] = Figure(**fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: figure {name}: {error}") from None
    return figures


def read_measured_layer(path: Path) -> MeasuredLayer:
    """Read a file of measured layer times, in milliseconds over tokens."""
    raw = _load_yaml(path)

    def curve(name: str) -> Curve:
        tokens, milliseconds = zip(*raw[name], strict=True)
        return Curve(tokens, tuple(ms * 1e-3 for ms in milliseconds))

    try:
        shape = LayerShape(**raw["shape"])
        return MeasuredLayer(raw["model"], shape, curve("gemm"), curve("elementwise"), raw["origin"])
    except KeyError as error:
        raise ValueError(f"{path} lacks {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _read(
    name_or_path: str | Path, kind: str, required: tuple[str, ...]
) -> tuple[Path, dict[str, Any], dict[str, Figure]]:
    """The file of a name, its content, and its figures with those that it leaves out."""
    path = Path(name_or_path)
    if path.suffix != ".yaml" or not path.is_file():
        names = known_hardware(kind)
        if str(name_or_path) not in names:
            raise ValueError(f"no {kind} {str(name_or_path)!r}: known are {', '.join(names)}; or give a .yaml file")
        path = HARDWARE_DIR / f"{name_or_path}.yaml"
    raw = _load_yaml(path)
    if raw.get("kind") != kind:
        raise ValueError(f"{path} describes a {raw.get('kind')}, not a {kind}")
    if misplaced := set(raw) - {"name", "kind", "figures", "isa", "link", "measured_layers", "measured_operators"}:
        raise ValueError(f"{path}: nothing uses {', '.join(sorted(misplaced))}; figures stand below `figures:`")
    own, assumed = read_figures(path), read_figures(ASSUMPTIONS_FILE)
    needed = ("name", "isa") if kind == "host" else ("name",)
    if missing := (set(required) - set(own)) | {name for name in needed if not isinstance(raw.get(name), str)}:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    if unknown := set(own) - set(required) - set(assumed) - OPTIONAL_FIGURES[kind]:
        raise ValueError(f"{path}: nothing uses {', '.join(sorted(unknown))}; optional are {', '.join(assumed)}")
    return path, raw, assumed | own


def _load_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a file holds."""
    try:
        raw = _parsed(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds no lines such as `kind: gpu`")
    return raw


@functools.lru_cache(64)
def _parsed(text: str) -> Any:
    """What YAML holds, to be read only. A figure asks for the same few files hundreds of times."""
    return yaml.safe_load(text)
