"""The linear work of a Llama-family model, cut at the attentions.

Activations are rows, one per token; nothing here knows of requests or of KV caches. Rows ``enter`` the first layer,
``cross`` from each layer's attention to the next one's, and ``leave`` after the last; attention itself happens in
between, wherever the caller computes it. Each row has a residual, to which every half of a layer adds in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swiftllm.model.config import ModelConfig
from swiftllm.model.rope import rotary_table
from swiftllm.model.weights import LayerWeights, LlamaWeights
from swiftllm.ops.interface import Linear, Ops


@dataclass(frozen=True)
class Layer:
    """One layer's norms (vectors) and matrices, each as the operation it is there for."""

    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    head_norms: torch.Tensor | None
    """``[num_heads + num_kv_heads, head_dim]``: a norm for each head of Q and K, in models that have them."""

    @classmethod
    def of(cls, weights: LayerWeights, config: ModelConfig, ops: Ops) -> Layer:
        head_norms = None
        if weights.q_norm is not None and weights.k_norm is not None:
            norms = ((weights.q_norm, config.num_heads), (weights.k_norm, config.num_kv_heads))
            head_norms = torch.cat([norm.expand(heads, -1) for norm, heads in norms])
        return cls(
            input_norm=weights.input_norm,
            qkv=ops.make_linear(weights.qkv, weights.qkv_bias),
            o=ops.make_linear(weights.o, weights.o_bias),
            post_norm=weights.post_norm,
            gate_up=ops.make_linear(weights.gate_up, weights.gate_up_bias),
            down=ops.make_linear(weights.down, weights.down_bias),
            head_norms=head_norms,
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
            self._layers.append(Layer.of(weights.layers.pop(0), config, ops))
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

    def enter(self, residual: torch.Tensor, rotary_rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Norm, QKV and rotary of the first layer, from ``embed``; ``rotary_rows`` is ``rotary_table`` at the positions
        of the rows.

        Returns q, k and v of each row side by side, ``[rows, num_heads + 2 num_kv_heads, head_dim]``, in ``out`` if
        that is given (see :meth:`~swiftllm.ops.interface.Ops.make_linear`); ``split_qkv`` tells them apart.
        """
        normed = self.ops.rms_norm(residual, self._layers[0].input_norm, self.config.rms_norm_eps)
        return self._qkv(0, normed, rotary_rows, out)

    def cross(
        self,
        layer: int,
        attention_out: torch.Tensor,
        residual: torch.Tensor,
        rotary_rows: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rest of ``layer`` and the beginning of the next one: what :meth:`enter` returns.

        ``attention_out [rows, num_heads, head_dim]``; ``residual [rows, hidden_size]`` is the next layer's afterwards.
        """
        next_norm = self._layers[layer + 1].input_norm
        normed = self._norm_of_sum(self._ffn(layer, attention_out, residual), residual, next_norm)
        return self._qkv(layer + 1, normed, rotary_rows, out)

    def leave(self, attention_out: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The rest of the last layer, final norm and vocabulary: logits ``[rows, vocab_size]`` in the model's dtype.

        ``attention_out [rows, num_heads, head_dim]``; ``residual [rows, hidden_size]`` is overwritten.
        """
        ffn = self._ffn(self.config.num_layers - 1, attention_out, residual)
        return self._lm_head(self._norm_of_sum(ffn, residual, self._final_norm))

    def split_qkv(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of q ``[rows, num_heads, head_dim]``, k and v ``[rows, num_kv_heads, head_dim]``: rows lie apart."""
        config = self.config
        return qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)

    def _qkv(
        self, layer: int, normed: torch.Tensor, rotary_rows: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        config, weights = self.config, self._layers[layer]
        qkv = weights.qkv(normed) if out is None else weights.qkv(normed, out=out.flatten(1))
        heads = qkv.view(len(qkv), config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        q_and_k = heads[:, : config.num_heads + config.num_kv_heads]  # neighbours: one call for both
        if weights.head_norms is not None:
            self.ops.norm_heads_(q_and_k, weights.head_norms, config.rms_norm_eps)
        self.ops.rotary_(q_and_k, rotary_rows)
        return heads

    def _ffn(self, layer: int, attention_out: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds the attention of ``layer`` to the residual, and returns what its FFN has to add."""
        weights = self._layers[layer]
        projected = weights.o(attention_out.reshape(len(residual), -1))
        gate_up = weights.gate_up(self._norm_of_sum(projected, residual, weights.post_norm))
        return weights.down(self.ops.silu_and_mul(gate_up))

    def _norm_of_sum(self, addend: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return self.ops.add_rms_norm_(residual, addend, norm, self.config.rms_norm_eps)
