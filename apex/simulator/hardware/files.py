"""Reads GPUs, hosts and links from their files in ``configs/hardware``: figures with origin, measured layer times.

Every figure has an origin and a status: measured, published or assumed. ``assumptions.yaml`` holds the figures that a
file may leave out, so that a new card needs its data sheet alone. ``apex.simulator.prediction`` turns a GPU, a host
and a model into a profile table; a link joins several such GPUs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp, inf
from pathlib import Path
from typing import Any

import yaml

from apex.perf.model import Curve
from apex.simulator.hardware.operator_files import Operators, read_operators
from apex.source_tree import CONFIGS, configs_folder
from swiftllm.machine import GIB
from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.folder.hub import model_folder

HARDWARE_DIR = CONFIGS / "hardware"
MODELS_DIR = CONFIGS / "models"
ASSUMPTIONS_FILE = HARDWARE_DIR / "assumptions.yaml"

STATUSES = ("measured", "published", "assumed")
GPU_FIGURES = ("memory_gb", "memory_bandwidth_gb_s", "tensor_tflops", "pcie_gb_s", "compute_capability")
HOST_FIGURES = ("memory_gb", "cores", "core_share", "peak_bandwidth_gb_s", "pcie_gb_s")
POWER_FIGURES = ("board_watts", "process_nm")
"""From which the share of a card's FLOPS is predicted that large GEMMs reach; optional, and with them ``has_hbm``."""
POWER_ERRORS = "each of nine cards left out in turn: median error of its GEMMs 5.2%, of the worst card 10.7%"
"""As ``python -m evaluation.calibration.cards`` prints them."""
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
    """The sizes of one transformer layer, in elements."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    """0: the FFN is dense. Else ``intermediate_size`` is that of an expert, of which a row has ``per_token``."""
    per_token: int = 0

    @classmethod
    def from_config(cls, config: ModelConfig) -> LayerShape:
        experts = () if config.experts is None else (config.experts.num_experts, config.experts.per_token)
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return cls(config.hidden_size, config.intermediate_size, *heads, *experts)

    def shard(self, tensor_parallel: int) -> LayerShape:
        """The part of each of ``tensor_parallel`` GPUs: heads and FFN columns are divided, the hidden state is whole.

        Raises:
            ValueError: they do not divide; the message names what does not.
        """
        if tensor_parallel < 1:
            raise ValueError(f"tensor_parallel={tensor_parallel} must be at least 1")
        divided = {
            name: getattr(self, name) / tensor_parallel for name in ("num_heads", "num_kv_heads", "intermediate_size")
        }
        if odd := [f"{name}={getattr(self, name)}" for name, part in divided.items() if not part.is_integer()]:
            raise ValueError(f"tensor_parallel={tensor_parallel} does not divide {', '.join(odd)}: take a divisor")
        return replace(self, **{name: int(part) for name, part in divided.items()})

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def gemm_weights(self) -> int:
        """Elements of the four weight matrices: QKV, output, gate and up, down. Without those of experts."""
        attention = (self.qkv_size + self.num_heads * self.head_dim) * self.hidden_size
        return attention if self.num_experts else attention + self.ffn_weights

    @property
    def ffn_weights(self) -> int:
        """Elements of gate and up and down, of an expert where there are experts."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def elementwise_elements(self) -> int:
        """Elements per token read and written by two norms, rotation of Q and K, SiLU times gate, two additions."""
        rotated = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        ffn = self.intermediate_size * (self.per_token or 1)
        return 4 * self.hidden_size + rotated + 3 * ffn + 6 * self.hidden_size

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
    """A folder of operator times (:mod:`apex.simulator.hardware.operator_files`), of a layer of a shape."""

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
    """Read the figures of a hardware file, without assumptions.

    Raises:
        ValueError: there are no figures, a figure lacks a field, or its value is no number; the message names file and
            figure.
    """
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
    """Read a file of measured layer times, in milliseconds over tokens.

    Raises:
        ValueError: a part is missing or malformed; the message names the file.
    """
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
    """The mapping that a file holds.

    Raises:
        ValueError: it holds something else; the message names the file, and the line where that is known.
    """
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
