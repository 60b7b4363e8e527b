"""Steps with few rows, where the way between kernels takes long: many kernels are called by one.

The kernels are those of `engine.cpu.decoder`, in the same order, called by their addresses (`engine.cpu.native_calls`),
so every bit is that of the layered path. A step that only decodes, over raw KV, is one call:

    tokens ─▶ x ─┬▶ norm ▶ qkv ▶ write ▶ decode ▶ out ─▶ delta ─▶ norm ▶ gate_up ▶ silu ▶ down ─▶ delta ─┐
                 └────────────────────────────────── of every layer ─────────────────────────────────────┘

In other steps, attention is what it is in the layered path, and all that lies between two attentions is one call. Many
rows, several threads and several ranks take the layered path: kernels take long there, and need not lie in memory all
at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.kernels.addresses import is_compiled, kernel_address
from engine.batching.batch import ForwardBatch
from engine.cpu.attention import CpuAttention, PagedAttention, worthwhile_plan
from engine.cpu.decoder import CpuDecoder
from engine.cpu.jit import jit, jit_inner
from engine.cpu.linear import PackedLinear
from engine.cpu.matmul import multiply_panels
from engine.cpu.native_calls import array_address, call_kernel, floats_at
from engine.cpu.rowwise import add_rms_norm, silu_and_mul
from engine.cpu.weights.decoder_weights import CpuLayer
from engine.protocols import OnLayersDone

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Products of a layer, in the order of the table of matrices.
NUM_PRODUCTS = 4


@jit_inner
def multiply_row(matrix: Any, x: Any, out: Any) -> None:
    """out = the product of x with a row of the table of matrices; both are flat."""
    depth, columns = matrix[5], matrix[6]
    weight, bias = floats_at(matrix[1], 0), floats_at(matrix[4], 0)
    call_kernel(matrix[0], (x, depth, weight, matrix[2], matrix[3], bias, 0, columns, columns, out))


@jit_inner
def _begin_layer(layer: Any, matrix: Any, eps: float, x: Any, delta: Any, normed: Any, qkv: Any) -> None:
    """Queries, keys and values of a layer, from what came out of the one before."""
    call_kernel(layer[0], (x, delta, floats_at(layer[1], x.shape[1]), eps, normed))
    multiply_row(matrix, normed.reshape(-1), qkv.reshape(-1))


@jit_inner
def _finish_layer(
    layer: Any, matrices: Any, silu: int, eps: float, x: Any, delta: Any, normed: Any, mixed: Any, wide: Any,
    narrow: Any,
) -> None:  # fmt: skip
    """What a layer adds to `x`, into `delta`, from its attention. `matrices` are those of the layer."""
    multiply_row(matrices[1], mixed.reshape(-1), delta.reshape(-1))
    call_kernel(layer[2], (x, delta, floats_at(layer[3], x.shape[1]), eps, normed))
    multiply_row(matrices[2], normed.reshape(-1), wide.reshape(-1))
    call_kernel(silu, (wide, narrow))
    multiply_row(matrices[3], narrow.reshape(-1), delta.reshape(-1))


@jit
def run_step(
    layers: Any, matrices: Any, ends: Any, sizes: Any, eps: float, rotary: Any, scratch: Any, batch: Any,
    pool: Any, logits: Any,
) -> None:  # fmt: skip
    """All layers and the product to logits. `FusedStep.step_arguments` makes the arguments."""
    slab, layer_floats, heads, kv_heads, window = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    cos, sin = rotary
    x, delta, normed, qkv, mixed, wide, narrow, tops, totals = scratch
    positions, slots, rows, lengths, table, runs, done = batch
    delta[:] = np.float32(0)
    for n in range(layers.shape[0]):
        layer, mine = layers[n], matrices[NUM_PRODUCTS * n : NUM_PRODUCTS * (n + 1)]
        offset = n * layer_floats
        _begin_layer(layer, mine[0], eps, x, delta, normed, qkv)
        norms = floats_at(layer[5], layer[7]), floats_at(layer[6], layer[7])
        call_kernel(
            layer[4],
            (
                qkv, positions, slots, cos, sin, norms[0], norms[1], eps, pool, slab, offset, heads, kv_heads,
            ),
        )  # fmt: skip
        if runs.shape[0] > 0:
            call_kernel(
                ends[4],
                (qkv, rows, table, runs, pool, slab, offset, heads, kv_heads, mixed, tops, totals),
            )
        call_kernel(
            ends[3],
            (
                qkv, rows, lengths, table, done, tops, totals, pool, slab, offset, heads, kv_heads, window,
                mixed,
            ),
        )  # fmt: skip
        _finish_layer(layer, mine, ends[0], eps, x, delta, normed, mixed, wide, narrow)
    call_kernel(ends[1], (x, delta, floats_at(ends[2], x.shape[1]), eps, normed))
    multiply_row(matrices[matrices.shape[0] - 1], normed.reshape(-1), logits.reshape(-1))


@jit
def run_between(n: int, layers: Any, matrices: Any, ends: Any, eps: float, scratch: Any) -> None:
    """From the attention of layer n - 1, if there is such a layer, to the queries, keys and values of layer n."""
    x, delta, normed, qkv, mixed, wide, narrow, _, _ = scratch
    if n == 0:
        delta[:] = np.float32(0)
    else:
        mine = matrices[NUM_PRODUCTS * (n - 1) : NUM_PRODUCTS * n]
        _finish_layer(layers[n - 1], mine, ends[0], eps, x, delta, normed, mixed, wide, narrow)
    if n < layers.shape[0]:
        _begin_layer(layers[n], matrices[NUM_PRODUCTS * n], eps, x, delta, normed, qkv)
    mixed[:] = np.float32(0)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What a step computes with, for as many rows; it stays from step to step.

    The tensors are also among `arrays`, which `run_step` and `run_between` take.
    """

    x: torch.Tensor
    delta: torch.Tensor
    qkv: torch.Tensor
    mixed: torch.Tensor
    arrays: tuple[Floats, ...]

    @classmethod
    def make(cls, decoder: CpuDecoder, rows: int) -> _Scratch:
        """Room for so many rows."""
        config, layer = decoder.config, decoder.layers[0]
        x, delta, normed, qkv, mixed, wide, narrow, tops, totals = (
            torch.empty(rows, width)
            for width in (
                config.hidden, config.hidden, config.hidden, layer.qkv.outputs, layer.out.inputs,
                layer.gate_up.outputs, layer.down.inputs, decoder.heads, decoder.heads,
            )
        )  # fmt: skip
        arrays = (x, delta, normed, qkv, mixed, wide, narrow, tops, totals)
        return cls(x, delta, qkv, mixed, tuple(one.numpy() for one in arrays))

    def take(self, rows: int) -> _Scratch:
        """The first rows of it."""
        if rows == len(self.x):
            return self
        arrays = tuple(array[:rows] for array in self.arrays)
        return _Scratch(self.x[:rows], self.delta[:rows], self.qkv[:rows], self.mixed[:rows], arrays)


@dataclass(frozen=True, slots=True)
class _Tables:
    """What `run_step` knows of a model: addresses of kernels and weights. All are int64.

    `layers` are [layers, 8]: two norms, each with its kernel, the kernel that writes, the norms of queries and keys,
    and their length. `matrices` are [4 · layers + 1, 7]. `ends` is what all layers share and the last norm. What only
    raw KV has is 0 without it.
    """

    layers: Ints
    matrices: Ints
    ends: Ints


class FusedStep:
    """Computes steps of one decoder with up to `MAX_FUSED_ROWS` rows (`engine.step_work`).

    Only one thread at a time may use it.

    The decoder is one that `can_fuse` allows; `attention` is that of its pool of raw KV, if there is one. The first
    step compiles the kernels, or loads them.
    """

    def __init__(self, decoder: CpuDecoder, attention: CpuAttention | None) -> None:
        windows = {layer.window for layer in decoder.layers}
        self._decoder, self._attention = decoder, attention if len(windows) == 1 else None
        self._window, self._eps = min(windows), float(decoder.config.eps)
        self._scratch = _Scratch.make(decoder, 1)

    @cached_property
    def _tables(self) -> _Tables:
        decoder = self._decoder
        products = [one for layer in decoder.layers for one in _products(layer)] + [decoder.head]
        return _Tables(
            np.array([self._describe_layer(layer) for layer in decoder.layers], np.int64),
            np.array([_describe_product(one) for one in products], np.int64),
            np.array(self._describe_ends(), np.int64),
        )

    def forward(
        self, batch: ForwardBatch, attention: PagedAttention, done: OnLayersDone | None = None
    ) -> torch.Tensor | None:
        """As `CpuDecoder.forward`."""
        if self.fits_one_call(batch, attention):
            logits = torch.empty(len(batch.tokens), self._decoder.head.outputs)
            run_step(*self.step_arguments(batch, logits))
            if done is not None:
                done(len(self._decoder.layers))
            return logits
        return self._forward_layers(batch, attention, done)

    def fits_one_call(self, batch: ForwardBatch, attention: PagedAttention) -> bool:
        """Whether each token of a step is a decode row over raw KV whose logits are wanted."""
        rows = len(batch.rows)
        return attention is self._attention and rows == len(batch.tokens) == len(batch.wanted)

    def step_arguments(self, batch: ForwardBatch, logits: torch.Tensor) -> tuple[Any, ...]:
        """What `run_step` takes to compute a step that `fits_one_call` into `logits`, once."""
        decoder, attention, tables = self._decoder, self._attention, self._tables
        assert attention is not None
        scratch, kv_heads = self._begin(batch), attention.layout.kv_heads
        plan = worthwhile_plan(batch, self._window, attention.alone, decoder.heads // kv_heads)
        sizes = attention.slab_floats, attention.layer_floats, decoder.heads, kv_heads, self._window
        return (
            tables.layers, tables.matrices, tables.ends, sizes, self._eps, (decoder.cos, decoder.sin),
            scratch.arrays,
            (batch.positions, batch.slots, batch.rows, batch.lengths, batch.table, plan.runs, plan.shared),
            attention.flat, logits.numpy(),
        )  # fmt: skip

    def _forward_layers(
        self, batch: ForwardBatch, attention: PagedAttention, done: OnLayersDone | None
    ) -> torch.Tensor | None:
        """A step whose attention is called layer by layer."""
        decoder, scratch, tables = self._decoder, self._begin(batch), self._tables
        between = tables.layers, tables.matrices, tables.ends, self._eps, scratch.arrays
        for index, layer in enumerate(decoder.layers):
            run_between(index, *between)
            decoder.attend(index, layer, scratch.qkv, batch, attention, scratch.mixed, done)
        run_between(len(decoder.layers), *between)
        return decoder.finish_stage(scratch.x, scratch.delta, batch)

    def _begin(self, batch: ForwardBatch) -> _Scratch:
        """Scratch for a step, with the embeddings of its tokens."""
        rows = len(batch.tokens)
        if rows > len(self._scratch.x):
            self._scratch = _Scratch.make(self._decoder, rows)
        scratch = self._scratch.take(rows)
        torch.index_select(self._decoder.embedding, 0, batch.tokens, out=scratch.x)
        return scratch

    def _describe_layer(self, layer: CpuLayer) -> list[int]:
        """A row of the table of layers."""
        x, eps, found = self._scratch.x.numpy(), self._eps, list[int]()
        for norm in (layer.input_norm, layer.mlp_norm):
            found += [kernel_address(add_rms_norm, (x, x, norm, eps, x)), array_address(norm)]
        if (attention := self._attention) is None:
            return [*found, 0, 0, 0, 0]
        one, rotary, norms = np.zeros(1, np.int64), (self._decoder.cos, self._decoder.sin), _norms(layer)
        qkv, places = self._scratch.qkv.numpy(), (1, 1, 1, 1)
        written = (qkv, one, one, *rotary, *norms, eps, attention.flat, *places)
        write = kernel_address(attention.write_kernel, written)
        return [*found, write, *map(array_address, norms), len(layer.q_norm)]

    def _describe_ends(self) -> list[int]:
        """Kernels that all layers share, and the last norm."""
        norm, attention = self._decoder.norm, self._attention
        x, _, _, qkv, mixed, wide, narrow, tops, totals = self._scratch.arrays
        found = [
            kernel_address(silu_and_mul, (wide, narrow)),
            kernel_address(add_rms_norm, (x, x, norm, self._eps, x)),
            array_address(norm),
        ]
        if attention is None:
            return [*found, 0, 0]
        one, lines, pool = np.zeros(1, np.int64), np.zeros((1, 4), np.int64), attention.flat
        decode = (qkv, one, one, lines, one, tops, totals, pool, 1, 1, 1, 1, 1, mixed)
        shared = (qkv, one, lines, lines, pool, 1, 1, 1, 1, mixed, tops, totals)
        return [
            *found,
            kernel_address(attention.decode_kernel, decode),
            kernel_address(attention.shared_kernel, shared),
        ]


def can_fuse(decoder: CpuDecoder) -> bool:
    """Whether a decoder's steps may be fused: it is whole, has one thread, and compiled kernels."""
    products = [one for layer in decoder.layers for one in _products(layer)]
    return (
        decoder.placement.world == 1
        and all(one.has_one_thread for one in (*products, decoder.head))
        and is_compiled(add_rms_norm)
    )


def _norms(layer: CpuLayer) -> tuple[Floats, Floats]:
    return layer.q_norm, layer.k_norm


def _products(layer: CpuLayer) -> list[PackedLinear]:
    return [layer.qkv, layer.out, layer.gate_up, layer.down]


def _describe_product(product: PackedLinear) -> list[int]:
    """A row of the table of matrices."""
    items, tile = product.kernel_sizes
    flat = np.empty(1, np.float32)
    taken = (flat, 1, product.weight, items, tile, product.bias, 0, 1, 1, flat)
    return [
        kernel_address(multiply_panels, taken), array_address(product.weight), items, tile,
        array_address(product.bias), product.inputs, product.outputs,
    ]  # fmt: skip
