"""Weights of a Llama-family model: fused matrices, filled from safetensors or with random numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from swiftllm.model.config import ModelConfig
from swiftllm.model.packed_tensor import HostPlace, PackedTensor
from swiftllm.model.quantised.collector import FusedPlace, QuantisedCollector, StoredTensor
from swiftllm.model.quantised.empty import empty_matrix
from swiftllm.model.quantised.readers import IN, OUT, Axis
from swiftllm.ops.quantised_matrix import Matrix, QuantisedMatrix

INDEX_FILES = "*.safetensors.index.json"
SINGLE_FILES = ("model.safetensors", "gptq_model*.safetensors")  # the latter as AutoGPTQ writes them
STD_OF_CODES = (255 / 12) ** 0.5  # of 0 to 15, equally likely
NONE_ON_HOST: Mapping[int, HostPlace] = MappingProxyType({})
DUMMY_PERIOD = (1 << 20) + 7  # elements; odd, so that no two rows of a matrix start alike


class WeightsError(ValueError):
    """A checkpoint does not hold the tensors that config.json requires; the message names the tensors."""


class FusedMatrix(NamedTuple):
    """A matrix of a layer: the field of :class:`LayerWeights`, and the modules whose outputs it stacks."""

    name: str
    block: str
    modules: tuple[str, ...]
    out_features: tuple[int, ...]
    in_features: int

    def boundary(self, layer: int) -> int:
        """The boundary that uses the matrix of a layer."""
        return layer - 1 if self.name == "qkv" else layer


def fused_matrices(config: ModelConfig) -> tuple[FusedMatrix, ...]:
    """The matrices of each layer."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, ffn = config.hidden_size, config.intermediate_size
    return (
        FusedMatrix("qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), (q_size, kv_size, kv_size), hidden),
        FusedMatrix("o", "self_attn", ("o_proj",), (hidden,), q_size),
        FusedMatrix("gate_up", "mlp", ("gate_proj", "up_proj"), (ffn, ffn), hidden),
        FusedMatrix("down", "mlp", ("down_proj",), (hidden,), ffn),
    )


class ModelPart(Protocol):
    """What one rank holds of each tensor of a checkpoint."""

    sizes: ModelConfig
    """Of the matrices of the part."""

    def slices(self, name: str, shape: Sequence[int], axes: Sequence[Axis] = (OUT, IN)) -> tuple[slice, ...]:
        """The part of tensor ``name``, whose whole shape is ``shape``; where it has fewer rows than the matrix of the
        part, the other rows are zero. ``axes``: those of a linear module's tensor.

        Raises:
            ValueError: the tensor cannot be divided so.
        """


@dataclass(frozen=True)
class WholeModel:
    """The one part of a model that is not divided."""

    sizes: ModelConfig

    def slices(self, name: str, shape: Sequence[int], axes: Sequence[Axis] = (OUT, IN)) -> tuple[slice, ...]:
        return (slice(None),)


@dataclass
class LayerWeights:
    """One layer. Matrices are ``[out, in]``; ``qkv`` stacks Q, K, V rows, ``gate_up`` stacks gate and up rows.

    The matrices of a quantised model are None until they are loaded.
    """

    input_norm: torch.Tensor
    qkv: Matrix | PackedTensor | None
    o: Matrix | PackedTensor | None
    post_norm: torch.Tensor
    gate_up: Matrix | PackedTensor | None
    down: Matrix | PackedTensor | None
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass
class LlamaWeights:
    """All weights; ``lm_head`` is ``embedding`` itself where the model ties them."""

    embedding: torch.Tensor
    lm_head: torch.Tensor
    final_norm: torch.Tensor
    layers: list[LayerWeights]

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        on_host: Mapping[int, HostPlace] = NONE_ON_HOST,
    ) -> LlamaWeights:
        """Allocate without filling; not the layers' matrices of a quantised model.

        ``on_host``: boundaries whose matrices are in host memory, and where there; see :class:`FusedMatrix`.
        """

        def new(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        def matrix(boundary: int, *shape: int) -> torch.Tensor | PackedTensor | None:
            if config.quantisation is not None:
                return None
            return on_host[boundary].new(shape, dtype) if boundary in on_host else new(*shape)

        hidden, ffn = config.hidden_size, config.intermediate_size
        embedding = new(config.vocab_size, hidden)
        lm_head = embedding if config.tie_word_embeddings else new(config.vocab_size, hidden)
        layers = [
            LayerWeights(
                input_norm=new(hidden),
                qkv=matrix(index - 1, config.qkv_size, hidden),
                o=matrix(index, hidden, config.num_heads * config.head_dim),
                post_norm=new(hidden),
                gate_up=matrix(index, 2 * ffn, hidden),
                down=matrix(index, hidden, ffn),
                qkv_bias=new(config.qkv_size) if config.qkv_bias else None,
                o_bias=new(hidden) if config.o_bias else None,
                gate_up_bias=new(2 * ffn) if config.mlp_bias else None,
                down_bias=new(hidden) if config.mlp_bias else None,
                q_norm=new(config.head_dim) if config.norms_heads else None,
                k_norm=new(config.head_dim) if config.norms_heads else None,
            )
            for index in range(config.num_layers)
        ]
        return cls(embedding, lm_head, new(hidden), layers)

    def by_checkpoint_name(self, config: ModelConfig) -> dict[str, torch.Tensor | PackedTensor]:
        """The place of each tensor of a Hugging Face checkpoint, as a view of the fused matrices."""
        places = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not config.tie_word_embeddings:
            places["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            places[prefix + "input_layernorm.weight"] = layer.input_norm
            places[prefix + "post_attention_layernorm.weight"] = layer.post_norm
            if config.norms_heads:
                places[prefix + "self_attn.q_norm.weight"] = layer.q_norm
                places[prefix + "self_attn.k_norm.weight"] = layer.k_norm
            for name, block, modules, rows, _ in fused_matrices(config):
                for kind, tensor in (("weight", getattr(layer, name)), ("bias", getattr(layer, f"{name}_bias"))):
                    if isinstance(tensor, torch.Tensor | PackedTensor):
                        parts = zip(modules, tensor.split(rows), strict=True)
                        places.update({f"{prefix}{block}.{module}.{kind}": part for module, part in parts})
        return places

    def empty_quantised(
        self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype
    ) -> list[QuantisedMatrix]:
        """Allocate the matrices of a quantised model without filling them."""
        matrices = []
        for place in self.fused_places(config, device):
            matrices.append(empty_matrix(config.quantisation, place, dtype))
            place.put(matrices[-1])
        return matrices

    def fused_places(
        self,
        config: ModelConfig,
        device: torch.device | str,
        on_host: Mapping[int, HostPlace] = NONE_ON_HOST,
    ) -> list[FusedPlace]:
        """The places of the layers' matrices, for those that come quantised; ``on_host``: see :meth:`empty`."""
        return [
            FusedPlace(
                {
                    f"model.layers.{index}.{matrix.block}.{module}": rows
                    for module, rows in zip(matrix.modules, matrix.out_features, strict=True)
                },
                matrix.in_features,
                matrix.in_features * (config.quantisation.parts if matrix.name in ("o", "down") else 1),
                partial(_new, on_host.get(matrix.boundary(index)), device),
                partial(_keep, layer, matrix.name, on_host.get(matrix.boundary(index))),
                "cpu" if matrix.boundary(index) in on_host else device,
            )
            for index, layer in enumerate(self.layers)
            for matrix in fused_matrices(config)
        ]


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    part: ModelPart | None = None,
    on_host: Mapping[int, HostPlace] = NONE_ON_HOST,
) -> LlamaWeights:
    """Read a folder's safetensors, converting to ``dtype``; one tensor at a time beside the result.

    Quantised matrices stay packed, with the dtype of their scales.

    Of each tensor only ``part`` is read, by default all. ``on_host``: see :meth:`LlamaWeights.empty`.

    Raises:
        FileNotFoundError: no safetensors in the folder, or a shard of the index is missing.
        WeightsError: a tensor is missing, unknown, or of the wrong shape, or a file is damaged.
    """
    part = part or WholeModel(config)
    weights = LlamaWeights.empty(part.sizes, device, dtype, on_host)
    places, shapes = weights.by_checkpoint_name(part.sizes), _whole_shapes(config)
    quantised = None
    if config.quantisation is not None:
        wanted = weights.fused_places(part.sizes, device, on_host)
        quantised = QuantisedCollector(config.quantisation, wanted, dtype, part.slices)
        for name, tensor in _read_tensors(Path(folder)) if config.quantisation.ordered else ():
            quantised.look_ahead(name, tensor)
    # Old checkpoints hold recomputed buffers, or a copy of tied embeddings: neither is needed.
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    seen: set[str] = set()
    unknown: list[str] = []
    for name, tensor in _read_tensors(Path(folder)):
        if name in ignored or name.endswith("rotary_emb.inv_freq"):
            continue
        shape = tensor.get_shape()
        if name not in places:
            if quantised is None or not _take(quantised, name, tensor, folder):
                unknown.append(name)
        elif shape != shapes[name]:
            raise WeightsError(f"{folder}: {name} has shape {shape}, config.json asks for {shapes[name]}")
        else:
            rows = tensor[part.slices(name, shape)]
            _write(places[name], 0, rows)
            _zero(places[name], len(rows))
            seen.add(name)
    missing = sorted((places.keys() - seen) | set(quantised.missing() if quantised else ()))
    for problem, names in (("lacks", missing), ("has unknown", sorted(unknown))):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise WeightsError(f"{folder}: the checkpoint {problem} tensors {', '.join(names[:5])}{more}")
    return weights


def dummy_weights(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    part: ModelPart | None = None,
    on_host: Mapping[int, HostPlace] = NONE_ON_HOST,
) -> LlamaWeights:
    """Normal random weights with the model's initial standard deviation, norms 1 and biases 0; equal for equal seeds.

    All tensors repeat one sequence of random numbers, each from another offset. So filling takes no longer than writing
    the memory: seconds for billions of parameters. The numbers of a ``part`` are those that the whole model has there;
    not so in quantised matrices, whose words hold inputs of several parts.
    """
    part = part or WholeModel(config)
    generator = torch.Generator().manual_seed(seed)
    own_noise = torch.randn(DUMMY_PERIOD, generator=generator).mul_(config.initializer_range).to(dtype)
    noise = {True: own_noise, False: own_noise.to(device)}  # by whether it is in host memory
    weights, shapes = LlamaWeights.empty(part.sizes, device, dtype, on_host), _whole_shapes(config)
    for name, tensor in weights.by_checkpoint_name(part.sizes).items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            offset = int(torch.randint(DUMMY_PERIOD, (), generator=generator))
            _fill(tensor, noise[tensor.device.type == "cpu"], offset, shapes[name], part.slices(name, shapes[name]))
    if config.quantisation is not None:
        own_words = torch.randint(-(2**31), 2**31, (DUMMY_PERIOD,), dtype=torch.int32, generator=generator)
        words = {True: own_words, False: own_words.to(device)}
        for place in weights.fused_places(part.sizes, device, on_host):
            matrix = empty_matrix(part.sizes.quantisation, place, dtype)
            on_cpu = matrix.codes.device.type == "cpu"
            _repeat(words[on_cpu].roll(int(torch.randint(DUMMY_PERIOD, (), generator=generator))), matrix.codes)
            matrix.scales.fill_(config.initializer_range / STD_OF_CODES)
            matrix.zeros.fill_(8)
            place.put(matrix)
    return weights


def _new(
    where: HostPlace | None, device: torch.device | str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor | PackedTensor:
    return torch.empty(shape, device=device, dtype=dtype) if where is None else where.new(shape, dtype)


def _keep(layer: LayerWeights, name: str, where: HostPlace | None, matrix: Matrix) -> None:
    setattr(layer, name, matrix if where is None else where.keep(matrix))


def _repeat(numbers: torch.Tensor, target: torch.Tensor) -> None:
    for part in target.view(-1).split(len(numbers)):
        part.copy_(numbers[: part.numel()])


def _take(quantised: QuantisedCollector, name: str, tensor: StoredTensor, folder: str | Path) -> bool:
    try:
        return quantised.take(name, tensor)
    except ValueError as error:
        raise WeightsError(f"{folder}: {error}") from None


def _fill(
    target: torch.Tensor | PackedTensor,
    noise: torch.Tensor,
    offset: int,
    shape: Sequence[int],
    slices: Sequence[slice],
) -> None:
    """Fill a matrix with the ``slices`` of one of ``shape``, which repeats ``noise`` from ``offset`` on row by row."""
    period, (height, width) = len(noise), shape
    rows, columns = (range(height)[slices[0]], slices[1] if len(slices) > 1 else slice(None))
    step = max(1, period // width)
    for first in range(0, len(rows), step):
        count = min(step, len(rows) - first)
        numbers = noise.roll(offset - (rows.start + first) * width)[: count * width]
        _write(target, first, numbers.view(count, width)[:, columns])
    _zero(target, len(rows))


def _write(place: torch.Tensor | PackedTensor, first: int, rows: torch.Tensor) -> None:
    if isinstance(place, PackedTensor):
        place.write(first, rows)
    else:
        place[first : first + len(rows)].copy_(rows)


def _zero(place: torch.Tensor | PackedTensor, first: int) -> None:
    """From row ``first`` on; packed memory is zero from the start."""
    if isinstance(place, torch.Tensor):
        place[first:].zero_()


def _whole_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """The shape of each tensor of a checkpoint."""
    whole = LlamaWeights.empty(config, "meta", torch.float32).by_checkpoint_name(config)
    return {name: list(tensor.shape) for name, tensor in whole.items()}


def _read_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Names of tensors, and what reads slices of each."""
    from safetensors import SafetensorError, safe_open  # not needed for dummy weights

    indices = sorted(folder.glob(INDEX_FILES))
    single = [path.name for pattern in SINGLE_FILES for path in sorted(folder.glob(pattern))]
    if indices:
        files = sorted(set(json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"].values()))
    elif single:
        files = single[:1]
    else:
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE_FILES[0]} nor {INDEX_FILES}; "
            "convert the model to safetensors, or use load_format='dummy' to run without weights"
        )
    for file in files:
        path = folder / file
        if not path.is_file():
            raise FileNotFoundError(f"{path} is named in {indices[0].name} and is not there: finish the download")
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in sorted(tensors.keys()):  # the tensors of a module one after the other
                    yield name, tensors.get_slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{path} is no readable safetensors file: {error}") from None
