"""A Llama-family decoder over paged KV, on the CPU, in float32.

One call runs the concatenated tokens of a step: products over all rows at once, attention sequence by sequence. Query,
key and value matrices are fused into one, gate and up into another. Every row's result is the same to the last bit
whatever shares the step with it (`engine.model.linear`, `engine.model.rows` and `engine.attention.cpu` each say how).
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

Floats = NDArray[np.float32]
NONE: Floats = np.empty(0, np.float32)


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
    """Weights and rotary tables of one model. Stateless between calls: KV lives in the pages it is given."""

    def __init__(self, shape: Shape, weights: Weights, max_model_len: int) -> None:
        self.shape = shape
        self.embedding = weights.take("model.embed_tokens.weight", shape.vocab, shape.hidden)
        self.layers = [_read_layer(shape, weights, index) for index in range(shape.layers)]
        self.norm = weights.take("model.norm.weight", shape.hidden).numpy()
        head = self.embedding if shape.tied else weights.take("lm_head.weight", shape.vocab, shape.hidden)
        self.head = Linear(head)
        cos, sin = tables(shape.rope, shape.head_dim, max_model_len)
        self.cos, self.sin = cos.numpy(), sin.numpy()

    def forward(self, batch: Batch, pages: Pages) -> torch.Tensor:
        """Logits of the wanted rows, [wanted, vocab] float32; KV of all tokens is in the pages afterwards."""
        x = self.embedding.index_select(0, batch.tokens)  # [rows, hidden]
        delta = torch.zeros_like(x)
        normed = torch.empty_like(x)
        for index, layer in enumerate(self.layers):
            add_norm(x.numpy(), delta.numpy(), layer.input_norm, self.shape.eps, normed.numpy())
            mixed = self._attend(index, layer, normed, batch, pages)
            delta = layer.out(mixed)
            add_norm(x.numpy(), delta.numpy(), layer.mlp_norm, self.shape.eps, normed.numpy())
            wide = layer.gate_up(normed)
            narrow = wide.new_empty(wide.shape[0], self.shape.mlp)
            gate(wide.numpy(), narrow.numpy())
            delta = layer.down(narrow)
        x, delta = x.index_select(0, batch.wanted), delta.index_select(0, batch.wanted)
        normed = torch.empty_like(x)
        add_norm(x.numpy(), delta.numpy(), self.norm, self.shape.eps, normed.numpy())
        return self.head(normed) if len(normed) else normed.new_empty(0, self.shape.vocab)

    def _attend(
        self, index: int, layer: Layer, normed: torch.Tensor, batch: Batch, pages: Pages
    ) -> torch.Tensor:
        """Attention output of all rows, [rows, heads * head_dim]; rows of padding are zero."""
        qkv = layer.qkv(normed)  # [rows, (heads + 2 * kv_heads) * head_dim]
        pages.write(index, qkv, batch, (self.cos, self.sin), (layer.q_norm, layer.k_norm), self.shape.eps)
        mixed = qkv.new_zeros(qkv.shape[0], self.shape.heads * self.shape.head_dim)
        pages.decode(index, qkv, batch, layer.window, mixed)
        for span in batch.spans:
            pages.prefill(index, qkv, span, layer.window, mixed)
        return mixed


def _read_layer(shape: Shape, weights: Weights, index: int) -> Layer:
    prefix, hidden = f"model.layers.{index}.", shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def linear(parts: list[tuple[str, int]], inputs: int, bias: bool) -> Linear:
        named = [(f"{prefix}{name}", outputs) for name, outputs in parts]
        weight = weights.stack([(f"{name}.weight", outputs) for name, outputs in named], inputs)
        return Linear(
            weight, weights.stack([(f"{name}.bias", outputs) for name, outputs in named]) if bias else None
        )

    def norm(name: str, width: int) -> Floats:
        return weights.take(f"{prefix}{name}.weight", width).numpy()

    attention = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(attention, hidden, shape.qkv_bias),
        q_norm=norm("self_attn.q_norm", shape.head_dim) if shape.qk_norm else NONE,
        k_norm=norm("self_attn.k_norm", shape.head_dim) if shape.qk_norm else NONE,
        out=linear([("self_attn.o_proj", hidden)], queries, shape.o_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear([("mlp.gate_proj", shape.mlp), ("mlp.up_proj", shape.mlp)], hidden, shape.mlp_bias),
        down=linear([("mlp.down_proj", hidden)], shape.mlp, shape.mlp_bias),
        window=shape.windows[index],
    )
