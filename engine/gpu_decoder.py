"""A Llama-family decoder over paged KV on a device, in the type of its pool; the same steps as `engine.model.decoder`.

The residual stream and all norms are float32, products sum in float32 (cuBLAS). Unlike on the CPU a row's last bits may
depend on what shares the step with it, since cuBLAS chooses its order of summation by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as nnf

from engine.attention.triton import Pages
from engine.gpu_batch import Step
from engine.gpu_rows import add_norm, gate
from engine.model.rope import tables
from engine.model.shape import Shape


class Source(Protocol):
    """Where weights come from: a checkpoint (`engine.model.weights.Weights`), or random numbers in a benchmark."""

    def take(self, name: str, *shape: int) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nnf.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; matrices in the decoder's type, norms in float32, empty where the model has none."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int


class Decoder:
    """Weights and rotary tables of one model on one device. Stateless between calls: KV lives in the pages given."""

    def __init__(
        self, shape: Shape, source: Source, max_model_len: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.device = torch.empty(0, device=device).device  # with its number
        embedding = source.take("model.embed_tokens.weight", shape.vocab, shape.hidden)
        self.embedding = embedding.to(device, dtype)
        self.layers = [self._layer(source, index) for index in range(shape.layers)]
        self.norm = self._norm(source, "model.norm", shape.hidden)
        head = (
            self.embedding
            if shape.tied
            else source.take("lm_head.weight", shape.vocab, shape.hidden).to(device, dtype)
        )
        self.head = Linear(head, None)
        cos, sin = tables(shape.rope, shape.head_dim, max_model_len)
        self.rotary = (cos.to(device), sin.to(device))

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of the matrices: all of them once, of the embedding only a few rows."""
        layers = sum(
            product.weight.nbytes
            for layer in self.layers
            for product in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        return layers + self.head.weight.nbytes

    def forward(self, step: Step, pages: Pages) -> torch.Tensor:
        """Logits of the wanted rows, [wanted, vocab] float32; KV of all tokens is in the pages afterwards.

        Nothing here waits for the device or depends on the content of `step`, so that a graph can be captured of it.
        """
        eps = self.shape.eps
        start = self.embedding.index_select(0, step.tokens)
        x, delta = start.float(), torch.zeros_like(start)  # [rows, hidden]
        for index, layer in enumerate(self.layers):
            normed = add_norm(x, delta, layer.input_norm, eps)
            delta = layer.out(self._attend(index, layer, normed, step, pages))
            normed = add_norm(x, delta, layer.mlp_norm, eps)
            delta = layer.down(gate(layer.gate_up(normed)))
        x, delta = x.index_select(0, step.wanted), delta.index_select(0, step.wanted)
        if not len(x):
            return x.new_empty(0, self.shape.vocab)
        return self.head(add_norm(x, delta, self.norm, eps)).float()

    def _attend(
        self, index: int, layer: Layer, normed: torch.Tensor, step: Step, pages: Pages
    ) -> torch.Tensor:
        """Attention output of all rows, [rows, heads * head_dim]; rows of padding are zero."""
        qkv = layer.qkv(normed)  # [rows, (heads + 2 * kv_heads) * head_dim]
        pages.write(index, qkv, step, self.rotary, (layer.q_norm, layer.k_norm), self.shape.eps)
        mixed = qkv.new_zeros(qkv.shape[0], self.shape.heads * self.shape.head_dim)
        pages.decode(index, qkv, step, layer.window, mixed)
        pages.prefill(index, qkv, step, layer.window, mixed)
        return mixed

    def _layer(self, source: Source, index: int) -> Layer:
        shape, prefix = self.shape, f"model.layers.{index}."
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        mlp = {"gate_proj": shape.mlp, "up_proj": shape.mlp}
        own = f"{prefix}self_attn."
        none = torch.empty(0, dtype=torch.float32, device=self.device)
        return Layer(
            input_norm=self._norm(source, f"{prefix}input_layernorm", shape.hidden),
            qkv=self._linear(source, own, attention, shape.hidden, shape.qkv_bias),
            q_norm=self._norm(source, f"{own}q_norm", shape.head_dim) if shape.qk_norm else none,
            k_norm=self._norm(source, f"{own}k_norm", shape.head_dim) if shape.qk_norm else none,
            out=self._linear(source, own, {"o_proj": shape.hidden}, queries, shape.o_bias),
            mlp_norm=self._norm(source, f"{prefix}post_attention_layernorm", shape.hidden),
            gate_up=self._linear(source, f"{prefix}mlp.", mlp, shape.hidden, shape.mlp_bias),
            down=self._linear(
                source, f"{prefix}mlp.", {"down_proj": shape.hidden}, shape.mlp, shape.mlp_bias
            ),
            window=shape.windows[index],
        )

    def _linear(
        self, source: Source, prefix: str, outputs: dict[str, int], inputs: int, bias: bool
    ) -> Linear:
        """The products named in `outputs` as one, below each other."""

        def stack(kind: str, *rest: int) -> torch.Tensor:
            parts = [source.take(f"{prefix}{name}.{kind}", rows, *rest) for name, rows in outputs.items()]
            return torch.cat([part.to(self.device, self.dtype) for part in parts])

        return Linear(stack("weight", inputs), stack("bias") if bias else None)

    def _norm(self, source: Source, name: str, width: int) -> torch.Tensor:
        return source.take(f"{name}.weight", width).to(self.device, torch.float32)
