"""The linear work of a Llama-family model, cut at the attentions.

Activations are rows, one per token; nothing here knows of requests or of KV caches. Attention happens between
``pre_attention`` and ``post_attention``, wherever the caller computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swiftllm.model.config import ModelConfig
from swiftllm.model.rope import rotary_table
from swiftllm.model.weights import LayerWeights, LlamaWeights
from swiftllm.ops import Linear, Ops


@dataclass(frozen=True)
class Layer:
    """One layer's norms (vectors) and matrices, each as the operation it is there for."""

    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, weights: LayerWeights, ops: Ops) -> Layer:
        return cls(
            input_norm=weights.input_norm,
            qkv=ops.make_linear(weights.qkv, weights.qkv_bias),
            o=ops.make_linear(weights.o, weights.o_bias),
            post_norm=weights.post_norm,
            gate_up=ops.make_linear(weights.gate_up, weights.gate_up_bias),
            down=ops.make_linear(weights.down, weights.down_bias),
        )


class LlamaModel:
    """All tensors live on one device in one dtype, except the rotary table, which is float32."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, ops: Ops, max_model_len: int | None = None) -> None:
        """Takes ``weights`` over: its layers are gone afterwards, so that packed matrices don't double the memory.

        ``max_model_len``: positions in ``rotary_table``, by default what the model was made for.
        """
        self.config = config
        self.ops = ops
        self._embedding = weights.embedding
        self._final_norm = weights.final_norm
        self._lm_head = ops.make_linear(weights.lm_head, None)
        self._layers: list[Layer] = []
        while weights.layers:
            self._layers.append(Layer.of(weights.layers.pop(0), ops))
        table = rotary_table(
            max_model_len or config.max_position_embeddings,
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
        )
        self.rotary_table = table.to(weights.embedding.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids [rows]`` to hidden ``[rows, hidden_size]``."""
        return F.embedding(token_ids, self._embedding)

    def pre_attention(
        self, layer: int, hidden: torch.Tensor, rotary_rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Norm, QKV and rotary of ``layer``; ``rotary_rows`` is ``rotary_table`` at the positions of the rows.

        Returns q, k and v of each row side by side, ``[rows, num_heads + 2 num_kv_heads, head_dim]``, in ``out`` if
        that is given (see :meth:`~swiftllm.ops.Ops.make_linear`); ``split_qkv`` tells them apart.
        """
        config, weights = self.config, self._layers[layer]
        normed = self.ops.rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
        qkv = weights.qkv(normed) if out is None else weights.qkv(normed, out=out.flatten(1))
        heads = qkv.view(len(qkv), config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        # Q and K are neighbours: one call turns both.
        self.ops.rotary_(heads[:, : config.num_heads + config.num_kv_heads], rotary_rows)
        return heads

    def split_qkv(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of q ``[rows, num_heads, head_dim]``, k and v ``[rows, num_kv_heads, head_dim]``: rows lie apart."""
        config = self.config
        return qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)

    def post_attention(
        self, layer: int, attention_out: torch.Tensor, residual: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Output projection and FFN of ``layer`` with their residuals.

        ``attention_out [rows, num_heads, head_dim]`` and ``residual [rows, hidden_size]`` (the hidden that went into
        ``pre_attention``) to hidden ``[rows, hidden_size]``, in ``out`` if that is given, which may be ``residual``.
        """
        weights = self._layers[layer]
        projected = weights.o(attention_out.reshape(len(residual), -1))
        normed, residual = self.ops.add_rms_norm(projected, residual, weights.post_norm, self.config.rms_norm_eps)
        gate_up = weights.gate_up(normed)
        down = weights.down(self.ops.silu_and_mul(gate_up))
        return torch.add(down, residual, out=down if out is None else out)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and vocabulary projection: ``[rows, vocab_size]``, in the model's dtype."""
        normed = self.ops.rms_norm(hidden, self._final_norm, self.config.rms_norm_eps)
        return self._lm_head(normed)
