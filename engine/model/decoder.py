"""A Llama-family decoder over paged KV, on the CPU, in float32.

One call runs the concatenated tokens of a step: products over all rows at once, attention sequence by sequence. Query,
key and value matrices are fused into one, gate and up into another. Every row's result is the same to the last bit
whatever shares the step with it (`engine.model.linear`, `engine.model.rows` and `engine.attention.cpu` each say how).

A decoder may be one rank's part (`engine.parallel`): some of the layers, and of these the heads and the columns of
the MLP that its lane has, as Megatron-LM splits them (Shoeybi et al. 2019, section 3): what makes queries, keys,
values, gate and up is split by outputs, what follows by inputs, and the partial sums are added up over the lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.batch import Batch
from engine.attention.cpu import Pages
from engine.model.linear import Linear
from engine.model.rope import tables
from engine.model.rows import add_norm, gate
from engine.model.shape import Shape
from engine.model.weights import Weights
from engine.parallel import WHOLE, Alone, Place, Wire
from engine.seams import LayersDone
from kvcache.layout import Shard

Floats = NDArray[np.float32]
NONE: Floats = np.empty(0, np.float32)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. Norms are numpy arrays for the row kernels; empty where the model has none."""

    input_norm: Floats
    qkv: Linear
    q_norm: Floats
    k_norm: Floats
    out: Linear
    mlp_norm: Floats
    gate_up: Linear
    down: Linear
    window: int


class Decoder:
    """Weights and rotary tables of one model, or of one rank's part of it, whose first layer is then layer 0.

    Stateless between calls: KV lives in the pages it is given.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        max_model_len: int,
        *,
        place: Place = WHOLE,
        shard: Shard | None = None,
        wire: Wire | None = None,
    ) -> None:
        """`shard`: the layers and KV heads of the rank `place`; `wire`: its way to the others."""
        shard = shard or Shard((0, shape.layers), (0, shape.kv_heads))
        self.shape, self.place, self.wire = shape, place, wire or Alone()
        self.heads = (shard.heads[1] - shard.heads[0]) * shape.group
        self.mlp = len(range(shape.mlp)[place.share(shape.mlp)])
        vocab, hidden = shape.vocab, shape.hidden
        if place.first:
            self.embedding = weights.take(EMBEDDING, vocab, hidden)
        read = Reader(shape, weights, place, shard)
        self.layers = [read.layer(index) for index in range(*shard.layers)]
        if place.last:
            self.norm = weights.take("model.norm.weight", hidden).numpy()
            part = place.share(vocab)
            if place == WHOLE and shape.tied:
                self.head = Linear(self.embedding)  # which repacks it: nothing is read twice
            else:
                self.head = Linear(weights.take(EMBEDDING if shape.tied else HEAD, vocab, hidden, rows=part))
        cos, sin = tables(shape.rope, shape.head_dim, max_model_len)
        self.cos, self.sin = cos.numpy(), sin.numpy()

    def forward(self, batch: Batch, pages: Pages, done: LayersDone | None = None) -> torch.Tensor | None:
        """Logits of the wanted rows, [wanted, vocab] float32, on rank 0; None elsewhere.

        KV of all tokens is in the pages afterwards; `done` is told how many layers have come so far.
        """
        x = self._enter(batch)  # [rows, hidden]
        delta = torch.zeros_like(x)
        normed = torch.empty_like(x)
        for index, layer in enumerate(self.layers):
            add_norm(x.numpy(), delta.numpy(), layer.input_norm, self.shape.eps, normed.numpy())
            qkv = layer.qkv(normed)  # [rows, (heads + 2 * kv_heads) * head_dim]
            turns, norms = (self.cos, self.sin), (layer.q_norm, layer.k_norm)
            pages.write(index, qkv, batch, turns, norms, self.shape.eps)
            if done is not None:
                done(index + 1)
            mixed = self._attend(index, layer, qkv, batch, pages)
            delta = self.wire.sum(layer.out(mixed))
            add_norm(x.numpy(), delta.numpy(), layer.mlp_norm, self.shape.eps, normed.numpy())
            wide = layer.gate_up(normed)
            narrow = wide.new_empty(wide.shape[0], self.mlp)
            gate(wide.numpy(), narrow.numpy())
            delta = self.wire.sum(layer.down(narrow))
        return self._leave(x, delta, batch)

    def _enter(self, batch: Batch) -> torch.Tensor:
        if self.place.first:
            return self.embedding.index_select(0, batch.tokens)
        return self.wire.receive(len(batch.tokens))

    def _leave(self, x: torch.Tensor, delta: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """To the next stage, or through the output matrix."""
        if not self.place.last:
            self.wire.send(x.add_(delta))
            return self.wire.collect(None, len(batch.wanted)) if self.place.rank == 0 else None
        x, delta = x.index_select(0, batch.wanted), delta.index_select(0, batch.wanted)
        normed = torch.empty_like(x)
        add_norm(x.numpy(), delta.numpy(), self.norm, self.shape.eps, normed.numpy())
        logits = self.head(normed) if len(normed) else normed.new_empty(0, self.head.outputs)
        return self.wire.collect(logits, len(normed))

    def _attend(
        self, index: int, layer: Layer, qkv: torch.Tensor, batch: Batch, pages: Pages
    ) -> torch.Tensor:
        """Attention output of all rows, [rows, heads * head_dim]; rows of padding are zero."""
        mixed = qkv.new_zeros(qkv.shape[0], self.heads * self.shape.head_dim)
        pages.decode(index, qkv, batch, layer.window, mixed)
        for span in batch.spans:
            pages.prefill(index, qkv, span, layer.window, mixed)
        return mixed


class Reader:
    """Reads the weights of one rank's layers."""

    def __init__(self, shape: Shape, weights: Weights, place: Place, shard: Shard) -> None:
        self._shape, self._weights, self._place = shape, weights, place
        start, end = (head * shape.head_dim for head in shard.heads)
        self._keys, self._queries = slice(start, end), slice(start * shape.group, end * shape.group)
        self._mlp = place.share(shape.mlp)

    def layer(self, index: int) -> Layer:
        """The weights of the model's layer `index`, as far as they are this rank's."""
        shape, prefix = self._shape, f"model.layers.{index}."
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attention = [
            (f"{prefix}self_attn.q_proj", queries, self._queries),
            (f"{prefix}self_attn.k_proj", keys, self._keys),
            (f"{prefix}self_attn.v_proj", keys, self._keys),
        ]
        mlp = [(f"{prefix}mlp.{name}_proj", shape.mlp, self._mlp) for name in ("gate", "up")]
        heads = [
            self._norm(f"{prefix}self_attn.{name}_norm", shape.head_dim) for name in "qk" * shape.qk_norm
        ]
        q_norm, k_norm = heads or (NONE, NONE)
        return Layer(
            input_norm=self._norm(f"{prefix}input_layernorm", shape.hidden),
            qkv=self._outputs(attention, shape.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            out=self._inputs(f"{prefix}self_attn.o_proj", queries, self._queries, shape.o_bias),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm", shape.hidden),
            gate_up=self._outputs(mlp, shape.mlp_bias),
            down=self._inputs(f"{prefix}mlp.down_proj", shape.mlp, self._mlp, shape.mlp_bias),
            window=shape.windows[index],
        )

    def _norm(self, name: str, width: int) -> Floats:
        return self._weights.take(f"{name}.weight", width).numpy()

    def _outputs(self, parts: list[tuple[str, int, slice]], bias: bool) -> Linear:
        """A product that is split by its outputs; all of `parts` (name, outputs in all, those of this lane) in one."""
        weight = [(f"{name}.weight", outputs, rows) for name, outputs, rows in parts]
        added = [(f"{name}.bias", outputs, rows) for name, outputs, rows in parts]
        stack = self._weights.stack
        return Linear(stack(weight, self._shape.hidden), stack(added) if bias else None)

    def _inputs(self, name: str, inputs: int, part: slice, bias: bool) -> Linear:
        """A product that is split by its inputs. The lanes' results are added up, so that only one adds the bias."""
        hidden = self._shape.hidden
        weight = self._weights.take(f"{name}.weight", hidden, inputs, columns=part)
        added = bias and self._place.lane == 0
        return Linear(weight, self._weights.take(f"{name}.bias", hidden) if added else None)
