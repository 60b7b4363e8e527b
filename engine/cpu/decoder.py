"""The forward pass of a Llama-family model over paged KV, on the CPU, in float32.

One call computes the concatenated tokens of a step: matrix products over all rows at once, attention sequence by
sequence. Query, key and value matrices are fused into one, gate and up into another. Every row's result is the same to
the last bit whatever else is in the step (`engine.cpu.linear`, `engine.cpu.rowwise` and `engine.cpu.attention` each
explain how).

A decoder may be one rank's shard (`engine.cpu.tensor_parallel`): a range of the layers, and of each layer the heads and
the MLP columns of its tensor-parallel lane, split as in Megatron-LM (Shoeybi et al. 2019, section 3): queries, keys,
values, gate and up are split by outputs, the products after them by inputs, and the lanes' partial sums are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.batch import ForwardBatch
from engine.cpu.attention import PagedAttention
from engine.cpu.linear import PackedLinear
from engine.cpu.rowwise import add_rms_norm, silu_and_mul
from engine.cpu.tensor_parallel import WHOLE_MODEL, Communicator, RankPlacement, SingleRank
from engine.model.architecture import ModelConfig
from engine.model.rope import rope_tables
from engine.model.weights import WeightReader
from engine.protocols import OnLayersDone
from kvcache.layout import Shard

Floats = NDArray[np.float32]
NO_NORM: Floats = np.empty(0, np.float32)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class CpuLayer:
    """The weights of one layer. Norms are numpy arrays for the row kernels; empty where the model has none."""

    input_norm: Floats
    qkv: PackedLinear
    q_norm: Floats
    k_norm: Floats
    out: PackedLinear
    mlp_norm: Floats
    gate_up: PackedLinear
    down: PackedLinear
    window: int


class CpuDecoder:
    """Weights and rotary tables of one model, or of one rank's shard, whose first layer then has index 0.

    It keeps no state between calls: KV is stored in the pages that are passed in.
    """

    def __init__(
        self,
        shape: ModelConfig,
        weights: WeightReader,
        max_model_len: int,
        *,
        place: RankPlacement = WHOLE_MODEL,
        shard: Shard | None = None,
        wire: Communicator | None = None,
    ) -> None:
        """`shard` are the layers and KV heads of the rank `place`; `wire` communicates with the other ranks."""
        shard = shard or Shard((0, shape.layers), (0, shape.kv_heads))
        self.shape, self.place, self.wire = shape, place, wire or SingleRank()
        self.heads = (shard.heads[1] - shard.heads[0]) * shape.group
        self.mlp = len(range(shape.mlp)[place.share(shape.mlp)])
        vocab, hidden = shape.vocab, shape.hidden
        if place.first:
            self.embedding = weights.read_tensor(EMBEDDING, vocab, hidden)
        read = LayerReader(shape, weights, place, shard)
        self.layers = [read.read_layer(index) for index in range(*shard.layers)]
        if place.last:
            self.norm = weights.read_tensor("model.norm.weight", hidden).numpy()
            part = place.share(vocab)
            if place == WHOLE_MODEL and shape.tied:
                # Repacks the tied embedding instead of reading it again.
                self.head = PackedLinear(self.embedding)
            else:
                self.head = PackedLinear(
                    weights.read_tensor(EMBEDDING if shape.tied else HEAD, vocab, hidden, rows=part)
                )
        cos, sin = rope_tables(shape.rope, shape.head_dim, max_model_len)
        self.cos, self.sin = cos.numpy(), sin.numpy()

    def forward(
        self, batch: ForwardBatch, pages: PagedAttention, done: OnLayersDone | None = None
    ) -> torch.Tensor | None:
        """Compute a step. Returns the logits of the wanted rows, [wanted, vocab] float32, on rank 0; None elsewhere.

        Afterwards the KV of all tokens is in the pages. `done` is called with the number of layers whose KV is stored.
        """
        x = self._first_activations(batch)  # [rows, hidden]
        delta = torch.zeros_like(x)
        normed = torch.empty_like(x)
        for index, layer in enumerate(self.layers):
            add_rms_norm(x.numpy(), delta.numpy(), layer.input_norm, self.shape.eps, normed.numpy())
            qkv = layer.qkv(normed)  # [rows, (heads + 2 * kv_heads) * head_dim]
            rotary, norms = (self.cos, self.sin), (layer.q_norm, layer.k_norm)
            pages.write(index, qkv, batch, rotary, norms, self.shape.eps)
            if done is not None:
                done(index + 1)
            mixed = self._attend_batch(index, layer, qkv, batch, pages)
            delta = self.wire.sum(layer.out(mixed))
            add_rms_norm(x.numpy(), delta.numpy(), layer.mlp_norm, self.shape.eps, normed.numpy())
            wide = layer.gate_up(normed)
            narrow = wide.new_empty(wide.shape[0], self.mlp)
            silu_and_mul(wide.numpy(), narrow.numpy())
            delta = self.wire.sum(layer.down(narrow))
        return self._finish_stage(x, delta, batch)

    def _first_activations(self, batch: ForwardBatch) -> torch.Tensor:
        """The input of this rank's first layer: token embeddings, or the activations of the stage before."""
        if self.place.first:
            return self.embedding.index_select(0, batch.tokens)
        return self.wire.receive(len(batch.tokens))

    def _finish_stage(self, x: torch.Tensor, delta: torch.Tensor, batch: ForwardBatch) -> torch.Tensor | None:
        """Send the activations to the next stage, or compute the logits from them."""
        if not self.place.last:
            self.wire.send(x.add_(delta))
            return self.wire.collect(None, len(batch.wanted)) if self.place.rank == 0 else None
        x, delta = x.index_select(0, batch.wanted), delta.index_select(0, batch.wanted)
        normed = torch.empty_like(x)
        add_rms_norm(x.numpy(), delta.numpy(), self.norm, self.shape.eps, normed.numpy())
        logits = self.head(normed) if len(normed) else normed.new_empty(0, self.head.outputs)
        return self.wire.collect(logits, len(normed))

    def _attend_batch(
        self, index: int, layer: CpuLayer, qkv: torch.Tensor, batch: ForwardBatch, pages: PagedAttention
    ) -> torch.Tensor:
        """Attention output of all rows, [rows, heads * head_dim]; padding rows are zero."""
        mixed = qkv.new_zeros(qkv.shape[0], self.heads * self.shape.head_dim)
        pages.decode(index, qkv, batch, layer.window, mixed)
        for span in batch.spans:
            pages.prefill(index, qkv, span, layer.window, mixed)
        return mixed


class LayerReader:
    """Reads the weights of one rank's layers from a checkpoint."""

    def __init__(self, shape: ModelConfig, weights: WeightReader, place: RankPlacement, shard: Shard) -> None:
        self._shape, self._weights, self._place = shape, weights, place
        start, end = (head * shape.head_dim for head in shard.heads)
        self._keys, self._queries = slice(start, end), slice(start * shape.group, end * shape.group)
        self._mlp = place.share(shape.mlp)

    def read_layer(self, index: int) -> CpuLayer:
        """The weights of the model's layer `index`, only this rank's part of them."""
        shape, prefix = self._shape, f"model.layers.{index}."
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attention = [
            (f"{prefix}self_attn.q_proj", queries, self._queries),
            (f"{prefix}self_attn.k_proj", keys, self._keys),
            (f"{prefix}self_attn.v_proj", keys, self._keys),
        ]
        mlp = [(f"{prefix}mlp.{name}_proj", shape.mlp, self._mlp) for name in ("gate", "up")]
        heads = [
            self._read_norm(f"{prefix}self_attn.{name}_norm", shape.head_dim) for name in "qk" * shape.qk_norm
        ]
        q_norm, k_norm = heads or (NO_NORM, NO_NORM)
        return CpuLayer(
            input_norm=self._read_norm(f"{prefix}input_layernorm", shape.hidden),
            qkv=self._read_split_outputs(attention, shape.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            out=self._read_split_inputs(f"{prefix}self_attn.o_proj", queries, self._queries, shape.o_bias),
            mlp_norm=self._read_norm(f"{prefix}post_attention_layernorm", shape.hidden),
            gate_up=self._read_split_outputs(mlp, shape.mlp_bias),
            down=self._read_split_inputs(f"{prefix}mlp.down_proj", shape.mlp, self._mlp, shape.mlp_bias),
            window=shape.windows[index],
        )

    def _read_norm(self, name: str, width: int) -> Floats:
        return self._weights.read_tensor(f"{name}.weight", width).numpy()

    def _read_split_outputs(self, parts: list[tuple[str, int, slice]], bias: bool) -> PackedLinear:
        """One matrix product made of `parts` (name, outputs in total, this lane's outputs), each split by its
        outputs.
        """
        weight = [(f"{name}.weight", outputs, rows) for name, outputs, rows in parts]
        added = [(f"{name}.bias", outputs, rows) for name, outputs, rows in parts]
        stack = self._weights.read_stacked
        return PackedLinear(stack(weight, self._shape.hidden), stack(added) if bias else None)

    def _read_split_inputs(self, name: str, inputs: int, part: slice, bias: bool) -> PackedLinear:
        """A product that is split by its inputs.

        The lanes' results are added up, so only the first lane has the bias.
        """
        hidden = self._shape.hidden
        weight = self._weights.read_tensor(f"{name}.weight", hidden, inputs, columns=part)
        added = bias and self._place.lane == 0
        return PackedLinear(weight, self._weights.read_tensor(f"{name}.bias", hidden) if added else None)
