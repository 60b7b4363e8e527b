"""The weights of a decoder, or of one rank's shard of it, in the sections in which they are read, stored and streamed.

    first    the embedding                              on ranks of the first stage
    layer    norms and the four products of a layer     one section for each layer
    last     the last norm and the product to logits    on ranks of the last stage

A section names arrays and packed matrices. Whoever owns the memory, a layer is a view of its section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cpu.linear import PackedLinear, PackedMatrix
from engine.cpu.ranks.tensor_parallel import WHOLE_MODEL, RankPlacement
from engine.model.architecture import ModelConfig
from engine.model.weights import WeightReader
from kvcache.layout import Shard

Floats = NDArray[np.float32]
NO_NORM: Floats = np.empty(0, np.float32)
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FIRST_SECTION, LAST_SECTION = "first", "last"


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


@dataclass(frozen=True, slots=True)
class WeightSection:
    """Weights that are stored together, by name."""

    arrays: dict[str, Floats] = field(default_factory=dict)
    matrices: dict[str, PackedMatrix] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays and matrices."""
        panels = sum(one.panels.nbytes + one.bias.nbytes for one in self.matrices.values())
        return panels + sum(one.nbytes for one in self.arrays.values())


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """What `engine.cpu.decoder.CpuDecoder` computes with. Ranks of later or earlier stages lack the ends."""

    layers: Sequence[CpuLayer]
    # [vocab, hidden]
    embedding: torch.Tensor | None
    norm: Floats | None
    head: PackedLinear | None


# Called with how many of so many steps of packing are done.
OnPacked = Callable[[int, int], None]


def ignore_progress(done: int, total: int) -> None:
    """The default for `OnPacked`: nobody wants to know."""


class SectionReader:
    """Reads the sections of one rank from a checkpoint, and packs them. Without a shard: those of the whole model.

    `layer_kind` "int4" packs the matrices of layers in 4 bits, with a loss; None packs them without one. The embedding
    and the product to logits are always exact. `packed` is called whenever another section has been taken; its last
    step is what comes after the sections.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        placement: RankPlacement = WHOLE_MODEL,
        shard: Shard | None = None,
        layer_kind: str | None = None,
        packed: OnPacked = ignore_progress,
    ) -> None:
        self.config, self.placement, self.layer_kind, self._packed = config, placement, layer_kind, packed
        self.shard = shard or Shard((0, config.layers), (0, config.kv_heads))
        self._weights = weights
        start, end = (head * config.head_dim for head in self.shard.heads)
        self._keys, self._queries = slice(start, end), slice(start * config.group, end * config.group)
        self._mlp = placement.share(config.mlp)

    def read_sections(self) -> Iterator[tuple[str, WeightSection]]:
        """The sections in the order in which a step needs them, each with its name. Only one is held at a time.

        Raises:
            ModelError: a tensor is missing, has another shape, or another type than those supported.
        """
        for done, found in enumerate(self._read_sections(), 1):
            yield found
            self.note_packed(done)

    def note_packed(self, done: int) -> None:
        """So many sections are packed, here or by another process."""
        start, end = self.shard.layers
        self._packed(done, end - start + self.placement.first + self.placement.last + 1)

    def _read_sections(self) -> Iterator[tuple[str, WeightSection]]:
        config, placement = self.config, self.placement
        if placement.first:
            yield FIRST_SECTION, WeightSection({"embedding": self._read_embedding()})
        for index in range(*self.shard.layers):
            yield layer_section(index), self._read_layer(index)
        if placement.last:
            name = EMBEDDING if config.tied else HEAD
            part = placement.share(config.vocab)
            head = self._weights.read_tensor(name, config.vocab, config.hidden, rows=part)
            norm = self._weights.read_tensor(NORM, config.hidden).numpy()
            yield LAST_SECTION, WeightSection({"norm": norm}, {"head": PackedMatrix.pack(head)})

    def _read_embedding(self) -> Floats:
        found: Floats = self._weights.read_tensor(EMBEDDING, self.config.vocab, self.config.hidden).numpy()
        return found

    def _read_layer(self, index: int) -> WeightSection:
        """The weights of the model's layer `index`, only this rank's part of them."""
        config, prefix = self.config, f"model.layers.{index}."
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention = [
            (f"{prefix}self_attn.q_proj", queries, self._queries),
            (f"{prefix}self_attn.k_proj", keys, self._keys),
            (f"{prefix}self_attn.v_proj", keys, self._keys),
        ]
        mlp = [(f"{prefix}mlp.{name}_proj", config.mlp, self._mlp) for name in ("gate", "up")]
        norms = {
            "input_norm": self._read_norm(f"{prefix}input_layernorm", config.hidden),
            "mlp_norm": self._read_norm(f"{prefix}post_attention_layernorm", config.hidden),
        }
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            norms[name] = self._read_norm(f"{prefix}self_attn.{name}", config.head_dim)
        matrices = {
            "qkv": self._read_split_outputs(attention, config.qkv_bias),
            "out": self._read_split_inputs(
                f"{prefix}self_attn.o_proj", queries, self._queries, config.o_bias
            ),
            "gate_up": self._read_split_outputs(mlp, config.mlp_bias),
            "down": self._read_split_inputs(f"{prefix}mlp.down_proj", config.mlp, self._mlp, config.mlp_bias),
        }
        return WeightSection(norms, matrices)

    def _read_norm(self, name: str, width: int) -> Floats:
        found: Floats = self._weights.read_tensor(f"{name}.weight", width).numpy()
        return found

    def _read_split_outputs(self, parts: list[tuple[str, int, slice]], bias: bool) -> PackedMatrix:
        """One matrix made of `parts` (name, outputs in total, this lane's outputs), each split by its outputs."""
        weight = [(f"{name}.weight", outputs, rows) for name, outputs, rows in parts]
        added = [(f"{name}.bias", outputs, rows) for name, outputs, rows in parts]
        stack = self._weights.read_stacked
        return self._pack(stack(weight, self.config.hidden), stack(added) if bias else None)

    def _read_split_inputs(self, name: str, inputs: int, part: slice, bias: bool) -> PackedMatrix:
        """A matrix that is split by its inputs.

        The lanes' results are added up, so only the first lane has the bias.
        """
        hidden = self.config.hidden
        weight = self._weights.read_tensor(f"{name}.weight", hidden, inputs, columns=part)
        added = bias and self.placement.lane == 0
        return self._pack(weight, self._weights.read_tensor(f"{name}.bias", hidden) if added else None)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
        return PackedMatrix.pack(weight, bias, self.layer_kind)


def layer_section(index: int) -> str:
    """The name of the section of the model's layer `index`."""
    return f"layer.{index}"


def build_layer(section: WeightSection, window: int) -> CpuLayer:
    """The layer whose weights are in a section; `window` is its sliding window, 0 without one."""
    norms, products = section.arrays, {name: PackedLinear(one) for name, one in section.matrices.items()}
    return CpuLayer(
        input_norm=norms["input_norm"],
        qkv=products["qkv"],
        q_norm=norms.get("q_norm", NO_NORM),
        k_norm=norms.get("k_norm", NO_NORM),
        out=products["out"],
        mlp_norm=norms["mlp_norm"],
        gate_up=products["gate_up"],
        down=products["down"],
        window=window,
    )


def build_weights(sections: dict[str, WeightSection], config: ModelConfig, shard: Shard) -> DecoderWeights:
    """The weights of a rank from all its sections, by name."""
    layers = [build_layer(sections[layer_section(i)], config.windows[i]) for i in range(*shard.layers)]
    return build_ends(sections, layers)


def build_ends(sections: dict[str, WeightSection], layers: Sequence[CpuLayer] = ()) -> DecoderWeights:
    """The weights outside the layers, from those of their sections that there are; `layers` are put beside them."""
    first, last = sections.get(FIRST_SECTION), sections.get(LAST_SECTION)
    return DecoderWeights(
        layers,
        None if first is None else torch.from_numpy(first.arrays["embedding"]),
        None if last is None else last.arrays["norm"],
        None if last is None else PackedLinear(last.matrices["head"]),
    )


def read_weights(reader: SectionReader) -> DecoderWeights:
    """Read the weights of a rank into memory of this process. Raises ModelError as `SectionReader.read_sections`."""
    return build_weights(dict(reader.read_sections()), reader.config, reader.shard)
