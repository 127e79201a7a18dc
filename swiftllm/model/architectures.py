"""The architectures that are supported: what each has that Llama has not, one row an architecture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeGuard

from swiftllm.model.rope import ROPE_KINDS, RopeKind

# Fields that every row reads, with the value that transformers gives Llama where config.json lacks one.
COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "num_key_value_heads": None,  # as many as heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_parameters": None,
        "rope_scaling": None,  # the name of rope_parameters before transformers 5
        "tie_word_embeddings": False,
        "sliding_window": None,
        "layer_types": None,
        "eos_token_id": 2,
    }
)
BIASES = {"attention_bias": False, "mlp_bias": False}
QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False, "eos_token_id": None}
QWEN_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SWIGLU_ALPHA = 1.702
SILU = ("silu", "swish")

# Names of fields that change what a model computes, in the configurations of transformers.
CHANGES_OUTPUT = re.compile(
    "multiplier|scal|softcap|clip|window|rope|rotary|norm|expert|router|bias|sink|activation|_act$|layer_types|mup|"
    "parallel|alibi|swiglu"
)
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
WITHOUT_EFFECT = ("max_window_layers",)  # where no window is used


@dataclass(frozen=True)
class Architecture:
    """A row of the table."""

    model_type: str
    own: Mapping[str, Any] = field(default_factory=dict)
    """Further fields that are read, and other defaults than :data:`COMMON` has: those of transformers."""
    qkv_bias: bool | str = "attention_bias"
    """Whether there is one, or the field that tells, as ``o_bias`` and ``mlp_bias``."""
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    norms_heads: bool = False
    norms_outputs: bool = False
    interleaved_rotary: bool = False
    expert_size: str | None = None
    """The field that tells the FFN's size of an expert, in models with experts."""
    ignored: tuple[str, ...] = ()
    """Fields that transformers does not read either."""
    rope_kinds: tuple[RopeKind, ...] = ROPE_KINDS
    windows: Literal["all", "by layer", "alternating"] | None = None
    """Which layers attend to the last ``sliding_window`` tokens only: all, or those that ``layer_types`` tells, or by
    default none, or every other one from the first on."""
    scales_queries: bool = False
    """Whether queries far behind the context of the first training are scaled; ``rope_parameters`` tell by how much."""
    has_sinks: bool = False
    """Whether each head has a sink: one more score, of a token whose V is 0."""
    residual_scale: float = 1.0
    """See :attr:`~swiftllm.model.config.ModelConfig.residual_scale`."""
    linear: Literal["by part", "by key head"] | None = None
    """Whether most layers have linear attention, which a full one completes: how a checkpoint orders the outputs of
    their projections, Q, K, V and gate of all heads one after the other or those of each key head."""

    @property
    def defaults(self) -> dict[str, Any]:
        """The fields that are read but for the sizes, which have no default."""
        return {**COMMON, **self.own}


TRAINS_ROUTERS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
WITHOUT_BIAS: dict[str, Any] = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}
QWEN_LINEAR = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "eos_token_id": None,
}
SHARED_EXPERT = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", BIASES),
    "MistralForCausalLM": Architecture(
        "mistral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        **WITHOUT_BIAS,
        windows="all",
    ),
    "Ministral3ForCausalLM": Architecture(
        "ministral3",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        scales_queries=True,
        **WITHOUT_BIAS,
        windows="all",
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        {**QWEN, **QWEN_WINDOWS},
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        ignored=("attention_bias",),
        windows="by layer",
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        {**QWEN, **QWEN_WINDOWS, "head_dim": 128, "attention_bias": False},
        mlp_bias=False,
        norms_heads=True,
        windows="by layer",
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
            "eos_token_id": 32000,
        },
        rope_kinds=("default", "longrope"),
        **WITHOUT_BIAS,
        windows="all",
    ),
    "GlmForCausalLM": Architecture("glm", GLM, o_bias=False, mlp_bias=False, interleaved_rotary=True),
    "Glm4ForCausalLM": Architecture(
        "glm4", GLM, o_bias=False, mlp_bias=False, interleaved_rotary=True, norms_outputs=True
    ),
    "SeedOssForCausalLM": Architecture(
        "seed_oss",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        o_bias="attention_out_bias",
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        {
            **BIASES,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "eos_token_id": 128001,
        },
        windows="by layer",
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        {
            **BIASES,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        {
            **QWEN,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_local_experts": None,  # the name of num_experts from transformers 5 on
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
            "decoder_sparse_step": 1,
        },
        mlp_bias=False,
        norms_heads=True,
        expert_size="moe_intermediate_size",
        ignored=TRAINS_ROUTERS,
        windows="all",
    ),
    "Qwen3NextForCausalLM": Architecture(
        "qwen3_next",
        {
            **QWEN_LINEAR,
            **SHARED_EXPERT,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_local_experts": None,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "mlp_only_layers": None,
            "decoder_sparse_step": 1,
        },
        mlp_bias=False,
        norms_heads=True,
        expert_size="moe_intermediate_size",
        ignored=TRAINS_ROUTERS,
        rope_kinds=("default",),
        linear="by key head",
    ),
    "Qwen3_5ForCausalLM": Architecture(
        "qwen3_5_text",
        {**QWEN_LINEAR, "num_key_value_heads": 4},
        mlp_bias=False,
        norms_heads=True,
        rope_kinds=("default",),
        linear="by part",
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        "qwen3_5_moe_text",
        {
            **QWEN_LINEAR,
            **SHARED_EXPERT,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_local_experts": None,
            "num_experts_per_tok": 8,
        },
        mlp_bias=False,
        norms_heads=True,
        expert_size="moe_intermediate_size",
        ignored=TRAINS_ROUTERS,
        rope_kinds=("default",),
        linear="by part",
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        **WITHOUT_BIAS,
        expert_size="intermediate_size",
        ignored=TRAINS_ROUTERS,
        windows="all",
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": SWIGLU_ALPHA,
            "eos_token_id": None,
        },
        mlp_bias=True,
        expert_size="intermediate_size",
        ignored=(*TRAINS_ROUTERS, "experts_per_token"),
        has_sinks=True,
        windows="alternating",
        residual_scale=2.0**-8,  # residuals reach hundreds of thousands, too much for float16
    ),
}
WRAPPERS = {
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", "Ministral3ForCausalLM"),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM",),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM",),
}
"""Models of text and images whose text part is one of these; the first where the part does not say."""
SUPPORTED = f"supported are {', '.join((*ARCHITECTURES, *WRAPPERS))} with SiLU"


class Unsupported(ValueError):
    """What of a config.json there is no code for."""


def text_part(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the text part of a wrapper, complete with what the wrapper says for all; None: it is none.

    Raises:
        Unsupported: the text part is of no kind that the wrapper may have.
    """
    names = raw.get("architectures")
    if not _is_one_name(names) or (kinds := WRAPPERS.get(names[0])) is None:
        return None
    text = dict(raw.get("text_config") or {})
    model_type = text.setdefault("model_type", ARCHITECTURES[kinds[0]].model_type)
    kind = next((kind for kind in kinds if ARCHITECTURES[kind].model_type == model_type), None)
    if kind is None:
        raise Unsupported(f"{names[0]} around a text model with model_type={model_type!r}")
    if "quantization_config" in raw:
        text.setdefault("quantization_config", raw["quantization_config"])
    if "tie_word_embeddings" in raw:  # here the whole comes first
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    return text | {"architectures": [kind]}


def recognise(raw: Mapping[str, Any]) -> tuple[Architecture, dict[str, Any]]:
    """The row of a config.json, and its fields with the defaults of the row.

    Raises:
        Unsupported: there is no such row, or a field changes what the model computes and the row does not read it.
    """
    model_type = raw.get("model_type")
    names = raw.get("architectures") or [name for name, row in ARCHITECTURES.items() if row.model_type == model_type]
    row = ARCHITECTURES.get(names[0]) if _is_one_name(names) else None
    if row is None or model_type not in (None, row.model_type):
        raise Unsupported(f"architectures={raw.get('architectures')} with model_type={model_type!r}")
    fields = row.defaults | dict(raw)
    if fields["hidden_act"] not in SILU:
        raise Unsupported(f"hidden_act={fields['hidden_act']!r}")
    if fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1:
        raise Unsupported("a model of which some layers only have experts")
    if not fields.get("attn_output_gate", True):
        raise Unsupported("attn_output_gate=False")
    if fields.get("swiglu_alpha", SWIGLU_ALPHA) != SWIGLU_ALPHA:
        raise Unsupported(f"swiglu_alpha={fields['swiglu_alpha']}")
    read = {*row.defaults, *row.ignored, *SIZES, *WITHOUT_EFFECT}
    for name, value in raw.items():
        if name not in read and CHANGES_OUTPUT.search(name) and not _is_neutral(value):
            raise Unsupported(f"{name}={value!r} in {names[0]}")
    return row, fields


def linear_layers_before(fields: Mapping[str, Any]) -> int:
    """How many layers of linear attention come before each of full attention.

    Raises:
        Unsupported: not everywhere as many, or none, or the last layer has linear attention.
    """
    num_layers, types = int(fields["num_hidden_layers"]), fields["layer_types"]
    if types is None:
        interval = int(fields["full_attention_interval"])
        types = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    before = types.index(FULL) if FULL in types else 0
    period = [LINEAR] * before + [FULL]
    if not before or types != period * (num_layers // len(period)) or len(types) != num_layers:
        told = sorted(set(types))
        raise Unsupported(
            f"{num_layers} layers with layer_types={told} (one of {FULL} must end each so many of {LINEAR})"
        )
    return before


def layer_windows(row: Architecture, fields: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """The attention window of each layer, in tokens; None: every layer attends to all tokens.

    Raises:
        Unsupported: there is no code for these windows.
    """
    num_layers, types = int(fields["num_hidden_layers"]), fields["layer_types"]
    is_used = "use_sliding_window" not in row.own or fields["use_sliding_window"]  # Qwen gives one that is not used
    window = fields["sliding_window"] if is_used else None
    if window is not None and (row.windows is None or window < 1):
        raise Unsupported(f"sliding_window={window}")
    known = {FULL, SLIDING} if window is not None and row.windows != "all" else {FULL}
    if types is not None and (set(types) - known or len(types) != num_layers):
        raise Unsupported(f"{len(types)} layer_types={sorted(set(types))} with sliding_window={window}")
    if window is None or window >= int(fields["max_position_embeddings"]):
        return None
    if row.windows == "all":
        return (int(window),) * num_layers
    if types is None and row.windows == "alternating":
        types = [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
    if types is None and "max_window_layers" not in row.own:
        raise Unsupported(f"sliding_window={window} without layer_types")
    if types is None:
        types = [SLIDING if layer >= fields["max_window_layers"] else FULL for layer in range(num_layers)]
    windows = tuple(int(window) if kind == SLIDING else None for kind in types)
    if len(set(Counter(windows).values())) > 1:
        count = num_layers - windows.count(None)
        raise Unsupported(f"a window in {count} of {num_layers} layers (none, half or all of them may have one)")
    return windows if set(windows) != {None} else None


def _is_one_name(names: Any) -> TypeGuard[list[str]]:
    return isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)


def _is_neutral(value: Any) -> bool:
    """Whether a multiplier is 1, or a part of the model is not there."""
    return value is None or value is False or value in ([], {}) or (type(value) in (int, float) and value in (0, 1))
