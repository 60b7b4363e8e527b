"""The forward pass of a Llama-family model over paged KV on a GPU, in the pool's type; as `engine.cpu.decoder`.

The residual stream and all norms are float32, and products sum in float32 (cuBLAS). Unlike on the CPU, the last bits of
a row may depend on the other rows of the step, since cuBLAS chooses its order of summation by the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as nnf

from engine.batching.batch import PoolSpan, pooled_row_numbers, sum_spans
from engine.gpu.batch import DeviceStep
from engine.gpu.kernels import DeviceKernels, PagedGpuAttention
from engine.model.architecture import ModelConfig
from engine.model.rope import rope_tables


class WeightSource(Protocol):
    """Supplies weights: a checkpoint (`engine.model.weights.WeightReader`), or random numbers in a benchmark."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, on any device and of any floating type, with the tensor `name`, which must have its shape."""


@dataclass(frozen=True, slots=True)
class CublasLinear:
    """The product x @ weight.T + bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nnf.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """The weights of one layer; matrices in the decoder's type, norms in float32 (empty if the model has none)."""

    input_norm: torch.Tensor
    qkv: CublasLinear
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    out: CublasLinear
    mlp_norm: torch.Tensor
    gate_up: CublasLinear
    down: CublasLinear
    window: int


class GpuDecoder:
    """Weights and rotary tables of one model on one device. KV is stored in the pages that are passed in,
    by `kernels` of the device's kind.

    Each tensor is read into its place on the device, in the decoder's type: there is never a second one beside it, on
    the host or on the device. A tied output matrix is the embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        kernels: DeviceKernels,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.kernels = kernels
        # The device with its index, for example cuda:0 instead of cuda.
        self.device = torch.empty(0, device=device).device
        self.embedding = self._table(source, "model.embed_tokens")
        self.layers = [self._layer(source, index) for index in range(config.layers)]
        self.norm = self._norm(source, "model.norm", config.hidden)
        head = self.embedding if config.tied else self._table(source, "lm_head")
        self.head = CublasLinear(head, None)
        cos, sin = rope_tables(config.rope, config.head_dim, max_model_len)
        self.rotary = (cos.to(device), sin.to(device))

    @property
    def weight_bytes(self) -> int:
        """Bytes of matrices that a decode step reads: all of every matrix, except the embedding, which is read by
        row.
        """
        layers = sum(
            product.weight.nbytes
            for layer in self.layers
            for product in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        return layers + self.head.weight.nbytes

    def forward(
        self, step: DeviceStep, attention: PagedGpuAttention, pools: Sequence[PoolSpan] = ()
    ) -> torch.Tensor:
        """Compute a step: logits of the wanted rows, and behind them the sums of hidden states of `pools` with zeros to
        their right, [results, vocab] float32. Afterwards the KV of all tokens is stored.

        Without `pools` nothing here waits for the device or depends on the values in `step`, so that a CUDA graph can
        be captured.
        """
        eps, kernels = self.config.eps, self.kernels
        x = self.embedding.index_select(0, step.tokens)  # [rows, hidden]
        delta, x = torch.zeros_like(x), x.float()
        for index, layer in enumerate(self.layers):
            normed = kernels.add_rms_norm(x, delta, layer.input_norm, eps)
            delta = layer.out(self._attend(index, layer, normed, step, attention))
            normed = kernels.add_rms_norm(x, delta, layer.mlp_norm, eps)
            delta = layer.down(kernels.silu_and_mul(layer.gate_up(normed)))
        pooled = [self._pool_rows(x, delta, pools)] if pools else []
        x, delta = x.index_select(0, step.wanted), delta.index_select(0, step.wanted)
        if not len(x):
            return pooled[0] if pooled else x.new_empty(0, self.config.vocab)
        logits = self.head(kernels.add_rms_norm(x, delta, self.norm, eps)).float()
        return torch.cat([logits, *pooled]) if pooled else logits

    def _pool_rows(self, x: torch.Tensor, delta: torch.Tensor, pools: Sequence[PoolSpan]) -> torch.Tensor:
        """The sums of hidden states, as wide as logits."""
        numbers = pooled_row_numbers(pools).to(self.device)
        normed = self.kernels.add_rms_norm(
            x.index_select(0, numbers), delta.index_select(0, numbers), self.norm, self.config.eps
        )
        return nnf.pad(sum_spans(normed.float(), pools), (0, self.config.vocab - self.config.hidden))

    def _attend(
        self,
        index: int,
        layer: GpuLayer,
        normed: torch.Tensor,
        step: DeviceStep,
        attention: PagedGpuAttention,
    ) -> torch.Tensor:
        """Attention output of all rows, [rows, heads * head_dim]; padding rows are zero."""
        qkv = layer.qkv(normed)  # [rows, (heads + 2 * kv_heads) * head_dim]
        attention.write(index, qkv, step, self.rotary, (layer.q_norm, layer.k_norm), self.config.eps)
        mixed = qkv.new_empty(qkv.shape[0], self.config.heads * self.config.head_dim)
        attention.decode(index, qkv, step, layer.window, mixed)
        attention.prefill(index, qkv, step, layer.window, mixed)
        return mixed

    def _layer(self, source: WeightSource, index: int) -> GpuLayer:
        """Load the weights of layer `index`."""
        config, prefix = self.config, f"model.layers.{index}."
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        mlp = {"gate_proj": config.mlp, "up_proj": config.mlp}
        own = f"{prefix}self_attn."
        none = torch.empty(0, dtype=torch.float32, device=self.device)
        return GpuLayer(
            input_norm=self._norm(source, f"{prefix}input_layernorm", config.hidden),
            qkv=self._linear(source, own, attention, config.hidden, config.qkv_bias),
            q_norm=self._norm(source, f"{own}q_norm", config.head_dim) if config.qk_norm else none,
            k_norm=self._norm(source, f"{own}k_norm", config.head_dim) if config.qk_norm else none,
            out=self._linear(source, own, {"o_proj": config.hidden}, queries, config.o_bias),
            mlp_norm=self._norm(source, f"{prefix}post_attention_layernorm", config.hidden),
            gate_up=self._linear(source, f"{prefix}mlp.", mlp, config.hidden, config.mlp_bias),
            down=self._linear(
                source, f"{prefix}mlp.", {"down_proj": config.hidden}, config.mlp, config.mlp_bias
            ),
            window=config.windows[index],
        )

    def _linear(
        self, source: WeightSource, prefix: str, outputs: dict[str, int], inputs: int, bias: bool
    ) -> CublasLinear:
        """One product that stacks the products named in `outputs` (name -> number of outputs)."""

        def stack(kind: str, *rest: int) -> torch.Tensor:
            out = torch.empty(sum(outputs.values()), *rest, dtype=self.dtype, device=self.device)
            for name, part in zip(outputs, torch.split(out, list(outputs.values())), strict=True):
                source.read_into(f"{prefix}{name}.{kind}", part)
            return out

        return CublasLinear(stack("weight", inputs), stack("bias") if bias else None)

    def _table(self, source: WeightSource, name: str) -> torch.Tensor:
        """A row for each token: the embedding, or the output matrix."""
        out = torch.empty(self.config.vocab, self.config.hidden, dtype=self.dtype, device=self.device)
        source.read_into(f"{name}.weight", out)
        return out

    def _norm(self, source: WeightSource, name: str, width: int) -> torch.Tensor:
        out = torch.empty(width, dtype=torch.float32, device=self.device)
        source.read_into(f"{name}.weight", out)
        return out
