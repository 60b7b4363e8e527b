"""The forward pass of a Llama-family model over paged KV, on the CPU, in float32.

One call computes the concatenated tokens of a step: matrix products over all rows at once, attention sequence by
sequence. Query, key and value matrices are fused into one, gate and up into another. Every row's result is the same to
the last bit whatever else is in the step (`engine.cpu.linear`, `engine.cpu.rowwise` and `engine.cpu.attention` each
explain how).

A decoder may be one rank's shard (`engine.cpu.ranks.tensor_parallel`): a range of the layers, and of each layer the
heads and the MLP columns of its tensor-parallel lane, split as in Megatron-LM (Shoeybi et al. 2019, section 3):
queries, keys, values, gate and up are split by outputs, the products after them by inputs, and the lanes' partial sums
are added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.batching.batch import ForwardBatch, PoolSpan, pooled_row_numbers, sum_spans
from engine.cpu.attention import PagedAttention
from engine.cpu.ranks.tensor_parallel import WHOLE_MODEL, Communicator, RankPlacement, SingleRank
from engine.cpu.rowwise import add_rms_norm, silu_and_mul
from engine.cpu.weights.decoder_weights import CpuLayer, DecoderWeights
from engine.model.architecture import ModelConfig
from engine.model.rope import rope_tables
from engine.protocols import OnLayersDone
from kvcache.layout import Shard


class CpuDecoder:
    """Weights and rotary tables of one model, or of one rank's shard, whose first layer then has index 0.

    It keeps no state between calls: KV is stored in the pages that are passed in.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        max_model_len: int,
        *,
        placement: RankPlacement = WHOLE_MODEL,
        shard: Shard | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        """`shard` are the layers and KV heads of the rank `placement`; `communicator` reaches the other ranks."""
        shard = shard or Shard((0, config.layers), (0, config.kv_heads))
        self.config, self.placement, self.communicator = config, placement, communicator or SingleRank()
        self.heads = (shard.heads[1] - shard.heads[0]) * config.group
        self.mlp = len(range(config.mlp)[placement.share(config.mlp)])
        self.layers = weights.layers
        if weights.embedding is not None:
            self.embedding = weights.embedding
        if weights.norm is not None and weights.head is not None:
            self.norm, self.head = weights.norm, weights.head
        cos, sin = rope_tables(config.rope, config.head_dim, max_model_len)
        self.cos, self.sin = cos.numpy(), sin.numpy()

    def forward(
        self, batch: ForwardBatch, attention: PagedAttention, done: OnLayersDone | None = None
    ) -> torch.Tensor | None:
        """Compute a step. Returns the logits of the wanted rows, and behind them sums of hidden states with zeros to
        their right, [results, vocab] float32, on rank 0; None elsewhere.

        Afterwards the KV of all tokens is in the pages. `done` is called with the number of layers whose KV is stored.
        """
        x = self._first_activations(batch)  # [rows, hidden]
        delta = torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            delta = self.compute_layer(index, layer, x, delta, batch, attention, done)
        return self.finish_stage(x, delta, batch)

    def compute_layer(
        self,
        index: int,
        layer: CpuLayer,
        x: torch.Tensor,
        delta: torch.Tensor,
        batch: ForwardBatch,
        attention: PagedAttention,
        done: OnLayersDone | None = None,
    ) -> torch.Tensor:
        """One layer for the rows of a step. Adds `delta` to `x` [rows, hidden]; returns the change still to be added.

        `index` is the layer's place in `attention`. `done` is as for `forward`.
        """
        normed = torch.empty_like(x)
        add_rms_norm(x.numpy(), delta.numpy(), layer.input_norm, self.config.eps, normed.numpy())
        delta = self.communicator.sum(
            layer.out(self._mix_values(index, layer, normed, batch, attention, done))
        )
        add_rms_norm(x.numpy(), delta.numpy(), layer.mlp_norm, self.config.eps, normed.numpy())
        wide = layer.gate_up(normed)
        narrow = wide.new_empty(wide.shape[0], self.mlp)
        silu_and_mul(wide.numpy(), narrow.numpy())
        return self.communicator.sum(layer.down(narrow))

    def _mix_values(
        self,
        index: int,
        layer: CpuLayer,
        normed: torch.Tensor,
        batch: ForwardBatch,
        attention: PagedAttention,
        done: OnLayersDone | None,
    ) -> torch.Tensor:
        """Stores the keys and values of a layer's rows, and returns the attention output of all rows."""
        qkv = layer.qkv(normed)  # [rows, (heads + 2 * kv_heads) * head_dim]
        mixed = qkv.new_zeros(qkv.shape[0], self.heads * self.config.head_dim)
        self.attend(index, layer, qkv, batch, attention, mixed, done)
        return mixed

    def attend(
        self, index: int, layer: CpuLayer, qkv: torch.Tensor, batch: ForwardBatch, attention: PagedAttention,
        mixed: torch.Tensor, done: OnLayersDone | None,
    ) -> None:  # fmt: skip
        """Store the keys and values of a layer's rows, and compute the attention of all rows into `mixed`.

        `mixed` is [rows, heads * head_dim], and zero before; padding rows stay so. `done` is as for `forward`.
        """
        rotary, norms = (self.cos, self.sin), (layer.q_norm, layer.k_norm)
        attention.write(index, qkv, batch, rotary, norms, self.config.eps)
        if done is not None:
            done(index + 1)
        attention.decode(index, qkv, batch, layer.window, mixed)
        for span in batch.spans:
            attention.prefill(index, qkv, span, layer.window, mixed)

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The input of the model's first layer, [tokens, hidden]."""
        return self.embedding.index_select(0, tokens)

    def compute_logits(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """The logits [rows, vocab] of rows behind the last layer, whose last change is `delta`."""
        normed = torch.empty_like(x)
        add_rms_norm(x.numpy(), delta.numpy(), self.norm, self.config.eps, normed.numpy())
        return self.head(normed) if len(normed) else normed.new_empty(0, self.head.outputs)

    def _first_activations(self, batch: ForwardBatch) -> torch.Tensor:
        """The input of this rank's first layer: token embeddings, or the activations of the stage before."""
        if self.placement.first:
            return self.embed_tokens(batch.tokens)
        return self.communicator.receive(len(batch.tokens))

    def finish_stage(self, x: torch.Tensor, delta: torch.Tensor, batch: ForwardBatch) -> torch.Tensor | None:
        """Send the activations to the next stage, or compute the logits from them."""
        if not self.placement.last:
            self.communicator.send(x.add_(delta))
            return self.communicator.collect(None, batch.num_results) if self.placement.rank == 0 else None
        results = self.compute_logits(x.index_select(0, batch.wanted), delta.index_select(0, batch.wanted))
        if batch.pools:
            results = torch.cat([results, self._pool_rows(x, delta, batch.pools)])
        return self.communicator.collect(results, len(results))

    def _pool_rows(self, x: torch.Tensor, delta: torch.Tensor, pools: Sequence[PoolSpan]) -> torch.Tensor:
        """This rank's columns of the sums of hidden states: it returns the columns that it has of logits."""
        numbers = pooled_row_numbers(pools)
        x, delta = x.index_select(0, numbers), delta.index_select(0, numbers)
        normed = torch.empty_like(x)
        add_rms_norm(x.numpy(), delta.numpy(), self.norm, self.config.eps, normed.numpy())
        share = self.placement.share(self.config.vocab)
        own = sum_spans(normed, pools)[:, share.start : share.stop]
        return functional.pad(own, (0, share.stop - share.start - own.shape[1]))
