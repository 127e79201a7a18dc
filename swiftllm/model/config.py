"""The shapes and constants of a model, read from a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swiftllm.model.architectures import (
    SUPPORTED,
    Unsupported,
    layer_windows,
    linear_layers_before,
    recognise,
    text_part,
)
from swiftllm.model.checkpoint import EMBEDDING, HEAD, are_equal, vocabulary_matrices
from swiftllm.model.folder import FILE as GENERATION
from swiftllm.model.folder import generation_config, is_there, read_object, tell
from swiftllm.model.quantisation import SUPPORTED as SUPPORTED_SCHEMES
from swiftllm.model.quantisation import QuantisationScheme
from swiftllm.model.rope import RopeScaling, UnsupportedRope

HEAD_MULTIPLE = 8  # of the CPU's attention kernels


@dataclass(frozen=True)
class ExpertSizes:
    """Of a model whose FFNs are of experts; ``per_token`` of them are computed for a row."""

    num_experts: int
    per_token: int
    normalises: bool
    """Whether the likelihoods of a row's experts are divided by their sum."""
    swiglu_limit: float | None = None
    """None: SiLU without biases. Otherwise experts are those of gpt-oss: router and experts have biases, SwiGLU is
    clamped, and a checkpoint has stacks ``[num_experts, in, out]`` in which outputs of gate and up alternate."""
    shared_size: int | None = None
    """Of the FFN of one more expert, which is computed for every row and times a gate; None: there is none."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ExpertSizes:
        """Raises: ValueError: a number makes no sense."""
        told = fields["num_local_experts"]
        sizes = int(fields["num_experts"] if told is None else told), int(fields["num_experts_per_tok"])
        if not 1 <= sizes[1] <= sizes[0]:
            raise ValueError(f"{sizes[1]} of {sizes[0]} experts")
        limit = fields.get("swiglu_limit")
        if limit is not None and not float(limit) > 0:
            raise ValueError(f"swiglu_limit={limit}")
        normalises = bool(fields.get("norm_topk_prob", True))
        shared = fields.get("shared_expert_intermediate_size")
        return cls(*sizes, normalises, None if limit is None else float(limit), None if shared is None else int(shared))


@dataclass(frozen=True)
class LinearSizes:
    """Of a model in which layers of linear attention (gated delta rule) come before each layer of full attention.

    Such a layer keeps no K and V but a state of one size, which each token rewrites: for each value head a matrix
    ``[key_dim, value_dim]``, and the last inputs of a convolution. A key head has as many value heads as any other.
    """

    layers_before: int
    """Each layer of full attention."""
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Inputs that the convolution reads for a row, the row's own included."""
    by_key_head: bool = False
    """Whether a checkpoint has Q, K, V and gate of a key head side by side, not those of all heads."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], by_key_head: bool) -> LinearSizes:
        """Raises: ValueError: a number makes no sense. Unsupported: see :func:`linear_layers_before`."""
        heads = int(fields["linear_num_key_heads"]), int(fields["linear_num_value_heads"])
        dims = int(fields["linear_key_head_dim"]), int(fields["linear_value_head_dim"])
        width = int(fields["linear_conv_kernel_dim"])
        if min(*heads, *dims) < 1 or heads[1] % heads[0] or width < 2:
            raise ValueError(
                f"linear attention of {heads[1]} value heads on {heads[0]} key heads x {dims}, and {width}"
            )
        return cls(linear_layers_before(fields), *heads, *dims, width, by_key_head)

    @property
    def keys_size(self) -> int:
        """Elements of the keys of a row."""
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """Elements of the values of a row."""
        return self.num_value_heads * self.value_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Elements of the queries, keys and values of a row."""
        return self.keys_size, self.keys_size, self.values_size

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values, which the convolution reads."""
        return sum(self.qkv_sizes)

    def shard(self, ranks: int) -> LinearSizes:
        """The sizes of one of ``ranks`` equal parts, which have whole key heads with their value heads."""
        return replace(self, num_key_heads=self.num_key_heads // ranks, num_value_heads=self.num_value_heads // ranks)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a request's state in one layer: float32 matrices, and inputs of ``itemsize`` bytes an element."""
        matrices = 4 * self.num_value_heads * self.key_dim * self.value_dim
        return matrices + self.conv_channels * (self.conv_width - 1) * itemsize


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family. Sizes are elements; ``max_position_embeddings`` is tokens."""

    num_layers: int
    """Of attention with a KV cache; see ``linear`` for others."""
    hidden_size: int
    intermediate_size: int
    """Of the FFN; of one expert in models with experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    norms_heads: bool
    """Whether Q and K are normed, head by head, before the rotary embedding."""
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output, which config.json and generation_config.json name."""
    quantisation: QuantisationScheme | None = None
    """How the layers' matrices are quantised; None: they are not."""
    rotary_dim: int | None = None
    """Elements of a head that turn; None: all."""
    interleaved_rotary: bool = False
    """Whether in the checkpoint neighbours turn together; otherwise elements of two halves do."""
    layers_without_rotary: frozenset[int] = frozenset()
    norms_outputs: bool = False
    """Whether the outputs of attention and FFN are normed before they are added."""
    embedding_multiplier: float = 1.0
    score_multiplier: float = 1.0
    """On attention scores, beside ``head_dim ** -0.5``."""
    residual_scale: float = 1.0
    """A power of two by which what is added to residuals is multiplied when the weights are read: ``o`` and ``down``,
    and the norms behind them where there are any."""
    logits_multiplier: float = 1.0
    is_wrapped: bool = False
    """Whether the checkpoint has a part for images, which is not read, beside the text model."""
    experts: ExpertSizes | None = None
    """None: the FFN is dense."""
    windows: tuple[int | None, ...] | None = None
    """How many tokens each layer attends to, a row's own included; None: all, for one layer or for every one. As many
    layers have one window as have any other."""
    has_sinks: bool = False
    """Whether each head of a layer has a sink: one more score, of a token whose V is 0."""
    named_positions: int | None = None
    """``max_position_embeddings`` of a checkpoint that scales the queries behind those that are given here, or that has
    other rotary frequencies for longer requests (LongRoPE)."""
    default_eos_token_ids: tuple[int, ...] = ()
    """What transformers takes where no file names a token that ends an output."""
    linear: LinearSizes | None = None
    """Of the layers of linear attention, if there are any. Such a model's norms have weights 1 + w, except those of
    linear attention's heads, and a gate for each head of full attention, which stands before Q."""

    def end_tokens(self, of_tokenizer: int | None) -> tuple[int, ...]:
        """Tokens that end an output: all that the folder names, the tokenizer's included."""
        named = (*self.eos_token_ids, *(() if of_tokenizer is None else (of_tokenizer,))) or self.default_eos_token_ids
        return tuple(dict.fromkeys(token for token in named if 0 <= token < self.vocab_size))

    def longest_request(self, asked: int | None) -> int:
        """Prompt and output tokens of a request at most: those ``asked`` for, by default the model's own."""
        if asked is None or asked <= self.most_positions:
            return asked or self.max_position_embeddings
        if self.most_positions < (self.named_positions or 0):
            raise ValueError(
                f"max_model_len={asked} exceeds {self.max_position_embeddings} tokens, and the model, made for "
                f"{self.named_positions}, scales the queries behind them, which is not supported"
            )
        raise ValueError(f"max_model_len={asked} exceeds the {self.most_positions} tokens the model was made for")

    @property
    def most_positions(self) -> int:
        """Tokens of the longest request that may be asked for."""
        is_longrope = self.rope_scaling.kind == "longrope"
        return (self.named_positions if is_longrope else None) or self.max_position_embeddings

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read ``config.json``; of ``generation_config.json`` the tokens that end an output, and of the weights whether
        the vocabulary has one matrix or two.

        Raises:
            FileNotFoundError: the folder has no config.json.
            ValueError: the model is of a kind that is not supported, or a value is missing; the message says which.
        """
        folder = Path(folder)
        path = folder / "config.json"
        if not is_there(path):
            raise FileNotFoundError(f"{path} is missing: give a Hugging Face model folder ({SUPPORTED})")
        raw = read_object(path)
        if raw.get("transformers_weights"):
            tell(f"{path}: transformers_weights is not followed: weights are in a file with the usual name")
        try:
            text = text_part(raw)
            row, fields = recognise(raw if text is None else text)
        except Unsupported as what:
            raise ValueError(f"{path}: {what} is not supported; {SUPPORTED}") from None
        quantisation = QuantisationScheme.from_config(fields, folder, is_wrapped=text is not None)
        try:
            num_heads = int(fields["num_attention_heads"])
            hidden_size = int(fields["hidden_size"])
            num_kv_heads, head_dim = fields["num_key_value_heads"], fields["head_dim"]

            def has_bias(told: bool | str) -> bool:
                return told if isinstance(told, bool) else bool(fields[told])

            if head_dim is None and hidden_size % num_heads:
                raise ValueError(f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}")
            resolved_head_dim = hidden_size // num_heads if head_dim is None else int(head_dim)
            rope = _rope_parameters(fields)
            linear = None if row.linear is None else LinearSizes.from_fields(fields, row.linear == "by key head")
            if linear is not None:
                fields["layer_types"] = None  # layers of full attention are left
                for name in ("mrope_section", "mrope_interleaved"):  # of images; tokens of text turn as ever
                    rope.pop(name, None)
            rotary_dim = resolved_head_dim
            if "partial_rotary_factor" in row.own:
                rotary_dim = int(rotary_dim * float(rope.pop("partial_rotary_factor")))
            num_positions, named_positions = int(fields["max_position_embeddings"]), None
            scales_queries = row.scales_queries and float(rope.pop("llama_4_scaling_beta"))
            rope_scaling = RopeScaling.from_config(rope, row.rope_kinds)
            num_positions = rope_scaling.positions(num_positions)
            windows = layer_windows(row, {**fields, "max_position_embeddings": num_positions})
            if scales_queries and rope_scaling.original_max_position < num_positions:
                num_positions, named_positions = rope_scaling.original_max_position, num_positions
            if rope_scaling.kind == "longrope":
                if {len(rope_scaling.short_factors), len(rope_scaling.long_factors)} != {rotary_dim // 2}:
                    raise ValueError(f"short_factor and long_factor need {rotary_dim // 2} numbers each")
                if rope_scaling.original_max_position < num_positions:
                    num_positions, named_positions = rope_scaling.original_max_position, num_positions
            config = cls(
                num_layers=int(fields["num_hidden_layers"]) // (1 if linear is None else linear.layers_before + 1),
                hidden_size=hidden_size,
                intermediate_size=int(fields[row.expert_size or "intermediate_size"]),
                num_heads=num_heads,
                num_kv_heads=num_heads if num_kv_heads is None else int(num_kv_heads),
                head_dim=resolved_head_dim,
                vocab_size=int(fields["vocab_size"]),
                max_position_embeddings=num_positions,
                rms_norm_eps=float(fields["rms_norm_eps"]),
                rope_theta=float(rope["rope_theta"]),
                rope_scaling=rope_scaling,
                tie_word_embeddings=_ties(folder, bool(fields["tie_word_embeddings"]), text is not None),
                qkv_bias=has_bias(row.qkv_bias),
                o_bias=has_bias(row.o_bias),
                mlp_bias=has_bias(row.mlp_bias),
                norms_heads=row.norms_heads,
                initializer_range=float(fields["initializer_range"]),
                eos_token_ids=_eos_token_ids(
                    (folder / GENERATION, generation_config(folder)), (path, text or {}), (path, raw)
                ),
                quantisation=quantisation,
                rotary_dim=None if rotary_dim == resolved_head_dim else rotary_dim,
                interleaved_rotary=row.interleaved_rotary,
                layers_without_rotary=_layers_without_rotary(fields) if "no_rope_layers" in row.own else frozenset(),
                norms_outputs=row.norms_outputs,
                experts=ExpertSizes.from_fields(fields) if row.expert_size else None,
                is_wrapped=text is not None,
                windows=windows,
                has_sinks=row.has_sinks,
                named_positions=named_positions,
                default_eos_token_ids=_eos_token_ids((path, {} if "eos_token_id" in (text or raw) else row.defaults)),
                linear=linear,
            )
            if row.residual_scale != 1.0:
                config = config.with_residual_scale(row.residual_scale)
            if "residual_multiplier" in row.own:
                config = _with_multipliers(config, fields)
        except Unsupported as what:
            raise ValueError(f"{path}: {what} is not supported; {SUPPORTED}") from None
        except UnsupportedRope as error:
            raise ValueError(f"{path}: {error}") from None
        except KeyError as error:
            raise ValueError(f"{path} lacks {error}; {SUPPORTED}") from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{path} holds a value that makes no sense: {error}") from None
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size")
        for name in sizes:
            if getattr(config, name) < 1:
                raise ValueError(f"{path}: {name}={getattr(config, name)} must be at least 1")
        if config.num_heads % config.num_kv_heads:
            raise ValueError(
                f"{path}: num_attention_heads={config.num_heads} is no multiple of "
                f"num_key_value_heads={config.num_kv_heads}"
            )
        if quantisation is not None:
            if quantisation.experts_only != config.has_swiglu_limit:
                raise ValueError(
                    f"{path}: {row.model_type} in {quantisation.describe()} is not supported; {SUPPORTED_SCHEMES}"
                )
            o_inputs = () if quantisation.experts_only else (config.num_heads * config.head_dim,)
            others = () if config.linear is None else (config.linear.values_size,)
            if config.experts is not None and config.experts.shared_size is not None:
                others += (config.experts.shared_size,)
            for in_features in (config.hidden_size, *o_inputs, config.intermediate_size, *others):
                try:
                    quantisation.group_size_of(in_features)
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from None
        if config.head_dim % HEAD_MULTIPLE or config.head_dim < HEAD_MULTIPLE:
            raise ValueError(f"{path}: head_dim={config.head_dim} is no multiple of {HEAD_MULTIPLE}, as kernels need")
        if (config.rotary_dim or 0) % 2:
            raise ValueError(f"{path}: rotary_dim={config.rotary_dim} is odd; rotary positions turn pairs")
        return config

    @property
    def num_gates(self) -> int:
        """Heads of gates of attention's output, which stand before Q."""
        return 0 if self.linear is None else self.num_heads

    @property
    def norm_offset(self) -> float:
        """What is added to the weights of all norms but that of linear attention's heads."""
        return 0.0 if self.linear is None else 1.0

    @property
    def num_projected_heads(self) -> int:
        """Heads of gates, Q, K and V."""
        return self.num_gates + self.num_heads + 2 * self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Rows of the fused QKV matrix, gates included."""
        return self.num_projected_heads * self.head_dim

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a request's state in all layers of linear attention; ``itemsize`` is of activations."""
        if self.linear is None:
            return 0
        return self.num_layers * self.linear.layers_before * self.linear.state_bytes(itemsize)

    @property
    def head_norm_eps(self) -> float:
        """``rms_norm_eps`` for Q and K, which are not scaled as residuals are."""
        return self.rms_norm_eps / self.residual_scale**2

    def with_residual_scale(self, scale: float) -> ModelConfig:
        """The model with another :attr:`residual_scale`. Norms give the same to the bit, if ``rms_norm_eps`` is
        multiplied by the square of what residuals are multiplied by, as long as no element leaves the range of its
        dtype."""
        factor = scale / self.residual_scale
        multiplier, eps = self.embedding_multiplier * factor, self.rms_norm_eps * factor**2
        return replace(self, embedding_multiplier=multiplier, residual_scale=scale, rms_norm_eps=eps)

    @property
    def has_swiglu_limit(self) -> bool:
        """Whether experts are those of gpt-oss; see :attr:`ExpertSizes.swiglu_limit`."""
        return self.experts is not None and self.experts.swiglu_limit is not None

    @property
    def num_parameters(self) -> int:
        """Weights without biases; tied embeddings count once."""
        attention = (self.qkv_size + self.num_heads * self.head_dim) * self.hidden_size
        num_norms = 4 if self.norms_outputs else 2
        ffn = 3 * self.intermediate_size
        if self.experts is not None:
            ffn = self.experts.num_experts * (ffn + 1)  # and a row of the router
            if self.experts.shared_size is not None:
                ffn += 3 * self.experts.shared_size + 1
        layer = attention + (ffn + num_norms) * self.hidden_size
        if (linear := self.linear) is not None:
            projections = linear.conv_channels + 2 * linear.values_size + 2 * linear.num_value_heads
            own = projections * self.hidden_size + linear.conv_width * linear.conv_channels
            layer += linear.layers_before * (own + (ffn + num_norms) * self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @property
    def ffn_width(self) -> int:
        """Elements of a row where the FFN is widest."""
        if self.experts is None:
            return 2 * self.intermediate_size
        return self.experts.per_token * max(2 * self.intermediate_size, self.hidden_size)

    def shard(self, ranks: int) -> ModelConfig:
        """The sizes of one of ``ranks`` equal parts: heads, KV heads and FFN divided, those of linear attention and of
        the shared expert too, and the vocabulary, rounded up.

        Raises:
            ValueError: one of them does not divide, or groups of quantised inputs do not (the message names the numbers
                that work).
        """
        ffn, linear = self.intermediate_size, self.linear
        shared = None if self.experts is None else self.experts.shared_size
        heads = {"heads": self.num_heads, "KV heads": self.num_kv_heads}
        of_attention = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = [(*of_attention, ffn), (*of_attention, shared or ffn)]
        if linear is not None:
            heads |= {"key heads": linear.num_key_heads, "value heads": linear.num_value_heads}
            sizes.append((linear.values_size, linear.keys_size, ffn))
            if self.quantisation is not None and self.quantisation.quantises_decay:
                sizes.append((linear.values_size, linear.num_value_heads, ffn))
        common = math.gcd(*heads.values(), ffn, shared or ffn)
        works = [n for n in range(1, common + 1) if common % n == 0]
        what = ", ".join(f"{count} {name}" for name, count in heads.items())
        what += f" and FFN of {ffn}" if shared is None else f" and FFNs of {ffn} and {shared}"
        if self.quantisation is not None:
            can_be_divided = self.quantisation.can_be_divided
            works = [n for n in works if n == 1 or all(can_be_divided(*(s // n for s in own)) for own in sizes)]
            what += f" in whole groups ({self.quantisation.describe()})"
        if ranks not in works:
            raise ValueError(
                f"tensor_parallel={ranks} does not divide the model's {what}: take one of {', '.join(map(str, works))}"
            )
        experts = self.experts
        if experts is not None and shared is not None:
            experts = replace(experts, shared_size=shared // ranks)
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
            vocab_size=-(-self.vocab_size // ranks),
            quantisation=None if self.quantisation is None else replace(self.quantisation, parts=ranks),
            experts=experts,
            linear=None if linear is None else linear.shard(ranks),
        )

    def tokens_reached(self, rows: int, context: int) -> list[int]:
        """How many tokens ``rows`` at the end of a context attend to, in layers of each window there is."""
        return [context if window is None else min(context, rows + window) for window in set(self.windows or [None])]

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token in all layers, at ``itemsize`` bytes per element."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_dim * itemsize


def _rope_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the rotary embedding; beside those of its scaling, what is told of the whole model and, where a
    model has it, ``original_max_position_embeddings``, which transformers prefers there."""
    beside = {
        "rope_theta": fields["rope_theta"],
        "partial_rotary_factor": fields.get("partial_rotary_factor", 1.0),
        "max_position_embeddings": fields["max_position_embeddings"],
        "original_max_position_embeddings": fields["max_position_embeddings"],
    }
    parameters = beside | dict(fields["rope_scaling"] or fields["rope_parameters"] or {})
    if "original_max_position_embeddings" in fields:
        parameters["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    return parameters


def _layers_without_rotary(fields: Mapping[str, Any]) -> frozenset[int]:
    """Those that ``no_rope_layers`` has a 0 for, or every ``no_rope_layer_interval``-th one."""
    layers = range(int(fields["num_hidden_layers"]))
    has_rotary, interval = fields["no_rope_layers"], int(fields["no_rope_layer_interval"])
    if has_rotary is None:
        return frozenset(layers[interval - 1 :: interval])
    return frozenset(layer for layer in layers if not has_rotary[layer])


def _with_multipliers(config: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """Granite's multipliers. A norm does not change if the residual is multiplied by a number and ``rms_norm_eps`` by
    its square. So instead of each layer's output, the embedding is multiplied: by a power of two that layers keep, over
    ``residual_multiplier``. The residual then is at most 1.5 times as large or small, and no matrix is rounded."""
    residual = float(fields["residual_multiplier"])
    scale = 2.0 ** round(math.log2(residual))
    return replace(
        config,
        embedding_multiplier=float(fields["embedding_multiplier"]) * scale / residual,
        score_multiplier=float(fields["attention_multiplier"]) * math.sqrt(config.head_dim),
        residual_scale=scale,
        rms_norm_eps=config.rms_norm_eps * (scale / residual) ** 2,
        logits_multiplier=1 / float(fields["logits_scaling"]),
    )


def _ties(folder: Path, told: bool, is_wrapped: bool) -> bool:
    """Whether the embedding is the vocabulary's matrix too, as ``config.json`` has ``told``. A checkpoint with two
    different ones has two, as in transformers. The parts of a wrapper may contradict each other: there the checkpoint
    alone decides."""
    if not told and not is_wrapped:
        return False
    stored = vocabulary_matrices(folder)
    if HEAD in stored and EMBEDDING in stored and not are_equal(stored[HEAD], stored[EMBEDDING]):
        if told:
            tell(f"{folder / 'config.json'}: tie_word_embeddings is not followed: the weights have another {HEAD}")
        return False
    return told or bool(stored)


def _eos_token_ids(*sources: tuple[Path, Mapping[str, Any]]) -> tuple[int, ...]:
    """All that any source names, in their order. null, an empty list or no field means that it names none."""
    named: dict[int, None] = {}
    for path, source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if type(token) is int:
                named[token] = None
            elif token is not None:
                tell(f"{path}: eos_token_id is left aside: {token!r} is no token id")
    return tuple(named)


def stored_dtype(folder: str | Path) -> str | None:
    """The dtype of a checkpoint as its ``config.json`` says, such as ``bfloat16``; None where it says none."""
    raw = read_object(Path(folder) / "config.json")
    text = raw.get("text_config")
    for fields in (text if isinstance(text, dict) else {}, raw):
        if isinstance(name := fields.get("dtype") or fields.get("torch_dtype"), str):
            return name.removeprefix("torch.")
    return None
