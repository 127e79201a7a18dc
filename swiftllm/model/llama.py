"""The linear work of a Llama-family model, cut at the attentions.

Activations are rows, one per token; this file knows no requests and no KV caches. Rows go through the ``first_stage``,
then a ``stage`` from each layer's attention to the next one's, then the ``last_stage``. The caller computes the
attentions in between. Each row has a residual, to which both halves of a layer add in place. Layers of linear attention
are part of the stage that comes before a layer of full attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swiftllm.model.config import LinearSizes, ModelConfig
from swiftllm.model.rope import rotary_table
from swiftllm.model.stages import FfnWeights, LinearAttentionWeights, LoadedWeights, StageWeights
from swiftllm.ops.interface import Ops, StateRows
from swiftllm.ops.matrices import Experts

FFN_ELEMENTS_AT_ONCE = 1 << 27  # of gate and up: some thousand rows, enough for efficient GEMMs, in 256 MiB of 16 bits


@dataclass(frozen=True)
class LinearStates:
    """The states of requests in all layers of linear attention, slot by slot."""

    recurrent: torch.Tensor
    """float32 ``[layers, slots, num_value_heads, key_dim, value_dim]``"""
    conv: torch.Tensor
    """``[layers, slots, conv_channels, conv_width - 1]``: the last inputs of convolutions, in the model's dtype."""

    @classmethod
    def empty(
        cls, config: ModelConfig, linear: LinearSizes, slots: int, dtype: torch.dtype, device: torch.device
    ) -> LinearStates:
        outer = config.num_layers * linear.layers_before, slots
        matrices = *outer, linear.num_value_heads, linear.key_dim, linear.value_dim
        inputs = *outer, linear.conv_channels, linear.conv_width - 1
        recurrent = torch.empty(matrices, dtype=torch.float32, device=device)
        return cls(recurrent, torch.empty(inputs, dtype=dtype, device=device))

    def draw(self) -> None:
        """Fill all with random numbers: for measurements. Of equal or infinite ones all rows would go to the same
        experts."""
        for pool in (self.recurrent, self.conv):
            pool.normal_(std=0.1, generator=torch.Generator(pool.device).manual_seed(0))


class LlamaModel:
    """All tensors live on one device in one dtype, except the rotary table, which is float32, and residuals.

    Attributes:
        residual_dtype: of residuals.

    The caller enters a stage's ``weights`` before it computes one; see
    :class:`~swiftllm.model.stages.LoadedWeights`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LoadedWeights,
        ops: Ops,
        max_model_len: int | None = None,
        residual_dtype: torch.dtype | None = None,
        num_slots: int = 0,
    ) -> None:
        """``max_model_len``: positions in ``rotary_table``, by default the model's own maximum. ``residual_dtype``: by
        default that of the weights; it may be float32 beside weights of 16 bits. ``num_slots``: states of linear
        attention, in models that have it."""
        self.config = config
        self.ops = ops
        self.weights = weights
        self.num_logits = weights.num_logits
        self._last = config.num_layers - 1
        some_weight = weights.stage(-1).norm
        self.residual_dtype = residual_dtype or some_weight.dtype
        table = rotary_table(
            max_model_len or config.max_position_embeddings,
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
            config.rotary_dim,
            config.score_multiplier,
        )
        self.rotary_table = table.to(some_weight.device)
        self.states = None
        if config.linear is not None:
            self.states = LinearStates.empty(config, config.linear, num_slots, some_weight.dtype, some_weight.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids [rows]`` to residuals ``[rows, hidden_size]``."""
        embed, multiplier = self.weights.stage(-1).embed, self.config.embedding_multiplier
        assert embed is not None
        residual = embed(token_ids).to(self.residual_dtype)
        return residual if multiplier == 1.0 else residual.mul_(multiplier)

    def first_stage(
        self,
        residual: torch.Tensor,
        rotary_rows: torch.Tensor,
        out: torch.Tensor | None = None,
        num_rows: torch.Tensor | None = None,
        state_rows: StateRows | None = None,
    ) -> torch.Tensor:
        """Norm, QKV and rotary of the first layer, from ``embed``; ``rotary_rows`` is ``rotary_table`` at the positions
        of the rows. ``num_rows``: see :meth:`stage`. ``state_rows``: whose states they continue, in models with linear
        attention.

        Returns q, k and v of each row side by side, ``[rows, num_heads + 2 num_kv_heads, head_dim]``, in ``out`` if
        that is given (see :meth:`~swiftllm.ops.interface.Ops.make_linear`); ``split_qkv`` separates them. Before q
        there are gates in some models; see :meth:`gated`.
        """
        weights = self.weights.stage(-1)
        normed = self._normed(residual, self._first_norm(weights))
        normed = self._linear_layers(-1, weights, normed, residual, state_rows, num_rows)
        return self._qkv(weights, normed, rotary_rows, out)

    def stage(
        self,
        layer: int,
        attention_out: torch.Tensor,
        residual: torch.Tensor,
        rotary_rows: torch.Tensor,
        out: torch.Tensor | None = None,
        num_rows: torch.Tensor | None = None,
        state_rows: StateRows | None = None,
    ) -> torch.Tensor:
        """The rest of ``layer`` and the beginning of the next one: what :meth:`first_stage` returns.

        ``attention_out [rows, num_heads, head_dim]``; ``residual [rows, hidden_size]`` is the next layer's afterwards.
        ``num_rows``, int32 ``[1]`` on the device: rows from that one on are padding, which goes to no expert.
        """
        weights = self.weights.stage(layer)
        if weights.in_one_call is not None:
            qkv = weights.in_one_call(attention_out.flatten(1), residual, rotary_rows).unflatten(
                1, (-1, self.config.head_dim)
            )
            return qkv if out is None else out.copy_(qkv)
        assert weights.ffn is not None
        norm = self._first_norm(weights)
        normed = self._norm_of_sum(self._ffn(weights.ffn, attention_out, residual, num_rows), residual, norm)
        normed = self._linear_layers(layer, weights, normed, residual, state_rows, num_rows)
        return self._qkv(weights, normed, rotary_rows, out)

    def last_stage(
        self, attention_out: torch.Tensor, residual: torch.Tensor, num_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rest of the last layer, final norm and vocabulary: logits ``[rows, num_logits]`` in the model's dtype.

        ``attention_out [rows, num_heads, head_dim]``; ``residual [rows, hidden_size]`` is overwritten.
        ``num_rows``: see :meth:`stage`.
        """
        weights = self.weights.stage(self._last)
        if weights.in_one_call is not None:
            return weights.in_one_call(attention_out.flatten(1), residual, None)
        assert weights.ffn is not None
        ffn = self._ffn(weights.ffn, attention_out, residual, num_rows)
        return weights.projection(self._norm_of_sum(ffn, residual, weights.norm))

    def sinks(self, layer: int) -> torch.Tensor | None:
        """float32 ``[num_heads]``: see :meth:`~swiftllm.ops.interface.Ops.decode_attention`."""
        return self.weights.stage(layer - 1).sinks

    def split_qkv(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of q ``[rows, num_heads, head_dim]``, k and v ``[rows, num_kv_heads, head_dim]``; rows not adjacent."""
        config = self.config
        q, k, v = self.without_gates(qkv).split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        return q, k, v

    def without_gates(self, qkv: torch.Tensor) -> torch.Tensor:
        """q, k and v of what :meth:`first_stage` returns."""
        return qkv[:, self.config.num_gates :]

    def gated(self, attention_out: torch.Tensor, qkv: torch.Tensor | None) -> torch.Tensor:
        """Attention's output as the next stage takes it: times the gates that stand before ``qkv``, if there are any.
        A rider's go with its row."""
        if not self.config.num_gates:
            return attention_out
        assert qkv is not None
        return attention_out * torch.sigmoid(qkv[:, : self.config.num_gates])

    def _qkv(
        self,
        weights: StageWeights,
        normed: torch.Tensor,
        rotary_rows: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        config = self.config
        qkv = weights.projection(normed) if out is None else weights.projection(normed, out=out.flatten(1))
        heads = qkv.view(len(qkv), config.num_projected_heads, config.head_dim)
        q_and_k = heads[:, config.num_gates : -config.num_kv_heads]  # neighbours: one call for both
        if weights.head_norms is not None:
            self.ops.norm_heads_(q_and_k, weights.head_norms, config.head_norm_eps, config.norm_offset)
        if weights.rotates:
            self.ops.rotary_(q_and_k, rotary_rows)
        return heads

    def _first_norm(self, weights: StageWeights) -> torch.Tensor:
        return weights.linear_layers[0].norm if weights.linear_layers else weights.norm

    def _linear_layers(
        self,
        layer: int,
        weights: StageWeights,
        normed: torch.Tensor,
        residual: torch.Tensor,
        state_rows: StateRows | None,
        num_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layers of linear attention after ``layer``, from their first norm to the norm behind them."""
        if not weights.linear_layers:
            return normed
        assert state_rows is not None
        first = (layer + 1) * len(weights.linear_layers)
        norms = [linear.norm for linear in weights.linear_layers[1:]] + [weights.norm]
        for number, (linear, next_norm) in enumerate(zip(weights.linear_layers, norms, strict=True)):
            attended = self._linear_attention(first + number, linear, normed, state_rows)
            normed = self._norm_of_sum(attended, residual, linear.ffn_norm)
            del attended
            normed = self._norm_of_sum(self._in_pieces(linear.mlp, normed, num_rows), residual, next_norm)
        return normed

    def _linear_attention(
        self, number: int, weights: LinearAttentionWeights, rows: torch.Tensor, state_rows: StateRows
    ) -> torch.Tensor:
        """The attention of the layer with this ``number`` among those of linear attention."""
        sizes, states, ops = self.config.linear, self.states, self.ops
        assert sizes is not None and states is not None
        qkv, gate = weights.in_proj(rows).split((sizes.conv_channels, sizes.values_size), 1)
        b, a = weights.in_proj_ba(rows).float().chunk(2, 1)
        qkv = ops.convolve(qkv, weights.conv, states.conv[number], state_rows)
        q, k, v = qkv.split((sizes.keys_size, sizes.keys_size, sizes.values_size), 1)
        keys, values = (-1, sizes.key_dim), (-1, sizes.value_dim)
        heads = q.unflatten(1, keys), k.unflatten(1, keys), v.unflatten(1, values)
        of_rows = weights.decay * F.softplus(a + weights.dt_bias), torch.sigmoid(b)
        out = ops.delta_rule(*heads, *of_rows, states.recurrent[number], state_rows)
        gated = ops.norm_and_gate(out, weights.head_norm, gate.unflatten(1, values), self.config.head_norm_eps)
        return weights.out_proj(gated.flatten(1))

    def _ffn(
        self,
        weights: FfnWeights,
        attention_out: torch.Tensor,
        residual: torch.Tensor,
        num_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Adds the layer's attention to the residual; returns the FFN's output, which is still to be added."""
        # Nested calls: no variable keeps an activation longer than it is needed.
        attended = attention_out.reshape(len(residual), -1)
        rows = self._norm_of_sum(self._normed(weights.o(attended), weights.o_norm), residual, weights.norm)
        return self._normed(self._in_pieces(weights.mlp, rows, num_rows), weights.down_norm)

    def _in_pieces(self, mlp: Experts, rows: torch.Tensor, num_rows: torch.Tensor | None) -> torch.Tensor:
        """Overwrites ``rows``."""
        # Gate and up are by far the widest activations, so that many rows cross in pieces.
        num_pieces = -(-len(rows) * self.config.ffn_width // FFN_ELEMENTS_AT_ONCE)
        if num_pieces <= 1 or num_rows is not None:
            return mlp(rows, num_rows)
        for piece in rows.chunk(num_pieces):
            piece.copy_(mlp(piece))
        return rows

    def _normed(self, rows: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is None:
            return rows
        return self.ops.rms_norm(rows, norm, self.config.rms_norm_eps, self.config.norm_offset)

    def _norm_of_sum(self, addend: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return self.ops.add_rms_norm_(residual, addend, norm, self.config.rms_norm_eps, self.config.norm_offset)
