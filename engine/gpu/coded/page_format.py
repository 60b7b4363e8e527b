"""What the kernels for coded pages have to know of a codec: where a page's sections lie, and its tables.

Tables are float32, one row per page:

    nuq*    scales [group], zero points [group] of key channels, levels of keys, of values, midpoints of keys, of values
    tq*     signs [head_dim], levels of keys, of values, midpoints of keys, of values
    others  nothing

Each of the last four has as many places as the widest code has levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.errors import ConfigError
from engine.gpu.launch import next_power_of_two
from engine.gpu.triton_kernel import INTERPRETED, tl
from engine.model.kv_codec import check_device_codec
from kvcache.codecs.datatype import Datatype
from kvcache.codecs.grouped import GroupedCodec
from kvcache.codecs.hadamard import block_size, random_signs
from kvcache.codecs.nuq import NuqCodec
from kvcache.codecs.page import Codec
from kvcache.codecs.plain import PlainCodec
from kvcache.codecs.storage import index_bits
from kvcache.codecs.turbo import TurboCodec

Floats = NDArray[np.float32]

# Families, as the kernels compare them.
FP16, BF16, GROUPED, CALIBRATED, ROTATED = (tl.constexpr(number) for number in range(5))

# Kernels read and write eight codes at once.
CODES_PER_WORD = 8
# Codes of this many bits are unpacked in registers, into numbers of 16 bits.
PACKED_BITS = 4
# The number from which on numbers of a type differ by 1, or by less: codes are added to its bits.
CODE_BASES = {torch.bfloat16: 128, torch.float16: 1024}
# Least rows and columns of a matrix product in Triton.
MIN_BLOCK = 16


class SideFormat(NamedTuple):
    """Keys or values in a page, a constant of the kernels: bits of a code, where levels and midpoints are in a table,
    and the first bytes of the sections; 0 for what the codec does not have.
    """

    bits: int
    levels: int
    middles: int
    codes: int
    places: int
    residuals: int
    scales: int
    # Zero points, or minima.
    zeros: int
    # Whether decode unpacks codes in registers (`engine.gpu.coded.unpack`), and what it then adds to codes of `int*`.
    packed: int
    base: int


class PageNumbers(NamedTuple):
    """The numbers of a page, a constant of the kernels."""

    family: int
    # Values of a head.
    width: int
    # KV heads of a page.
    heads: int
    page_bytes: int
    # Values that share a scale (`int*`).
    group: int
    # Outlier slots of a row, and the next power of two.
    slots: int
    slot_block: int
    # Whether the place of an outlier takes 16 bits.
    wide: int
    # Values of a block that is rotated at random.
    mix: int
    # Powers of two, at least 16, that hold a head and half a head.
    block: int
    half_block: int
    # Whether a head is read as two halves: keys of `nuq*`, and `int*` with two groups in a head.
    halves: int
    # Whether decode scales scores and weights by a row's scale, and not its numbers: all codecs but 16 bits and `int*`
    # with more than two groups in a head.
    folded: int


@dataclass(frozen=True, slots=True)
class PageFormat:
    """A codec's pages, as the kernels take them."""

    numbers: PageNumbers
    keys: SideFormat
    values: SideFormat
    # [layers, pages of a layer, n] float32.
    tables: torch.Tensor
    # Whether keys are stored with their rotary positions.
    rotated: bool


def describe_pages(codecs: Sequence[Sequence[Codec]], device: torch.device, dtype: torch.dtype) -> PageFormat:
    """The format of a pool's pages; `codecs` by layer and page, all of one codec. dtype: that of products.

    Raises:
        ConfigError: the kernels cannot handle the codec for this shape.
    """
    first = codecs[0][0]
    _check_shape(first)
    is_calibrated, width = isinstance(first, NuqCodec), first.shape.head_dim
    slots = 2 * first.per_side if isinstance(first, NuqCodec) else 0
    groups = width // first.group if isinstance(first, GroupedCodec) else 1
    numbers = PageNumbers(
        family=_family(first),
        width=width,
        heads=first.shape.heads,
        page_bytes=first.page_bytes,
        group=first.group if isinstance(first, GroupedCodec) else 0,
        slots=slots,
        slot_block=next_power_of_two(slots),
        wide=int(is_calibrated and index_bits(first.shape.width) == 16),
        mix=block_size(width),
        block=max(MIN_BLOCK, next_power_of_two(width)),
        half_block=max(MIN_BLOCK, next_power_of_two(width // 2)),
        halves=int(is_calibrated or groups == 2),
        folded=int(groups <= 2 and not isinstance(first, PlainCodec)),
    )
    tables = np.stack([np.stack([_table(codec) for codec in row]) for row in codecs])
    return PageFormat(
        numbers,
        _side(first, 0, dtype),
        _side(first, 1, dtype),
        torch.from_numpy(tables).to(device),
        first.codes_rotated_keys,
    )


def _side(codec: Codec, side: int, dtype: torch.dtype) -> SideFormat:
    """Keys (side 0) or values (side 1) of a codec's pages."""
    bits = codec.codec_id.code_bits[side]
    packed = not INTERPRETED and bits == PACKED_BITS and dtype in CODE_BASES
    offsets, prefix = codec.sections.offsets, ("key ", "value ")[side]
    sections = {name.removeprefix(prefix): at for name, at in offsets.items()}
    room, before = _table_room(codec), 0
    if isinstance(codec, NuqCodec):
        before = 2 * codec.shape.width
    elif isinstance(codec, TurboCodec):
        before = codec.shape.head_dim
    return SideFormat(
        bits=bits,
        levels=before + side * room,
        middles=before + (2 + side) * room,
        codes=sections[("keys", "values")[side] if isinstance(codec, PlainCodec) else "codes"],
        places=sections.get("places", 0),
        residuals=sections.get("residuals", 0),
        scales=sections.get("scales", 0),
        zeros=sections.get("zeros", sections.get("minima", 0)),
        packed=int(packed),
        base=CODE_BASES[dtype] if packed and isinstance(codec, GroupedCodec) else 0,
    )


def _check_shape(codec: Codec) -> None:
    """Raises ConfigError if the kernels cannot handle the codec for this shape."""
    width = codec.shape.head_dim
    step = 2 * CODES_PER_WORD if isinstance(codec, NuqCodec) else CODES_PER_WORD
    group = codec.group if isinstance(codec, GroupedCodec) else width
    check_device_codec(str(codec.codec_id))
    if codec.codec_id.name == "raw":
        raise ConfigError(
            f"the KV codec {codec.codec_id} is not available on a GPU",
            "pages there hold numbers of the model's type, or of a codec with fewer bits",
            "leave out the codec, or use --device cpu",
        )
    if width % step or group % CODES_PER_WORD:
        raise ConfigError(
            f"the KV codec {codec.codec_id} is not available on a GPU for heads of {width} values",
            f"its kernels need heads of a multiple of {step}, and groups of a multiple of {CODES_PER_WORD}",
            "leave out --kv-cache-codec, or use --device cpu",
        )


def _family(codec: Codec) -> int:
    if isinstance(codec, PlainCodec):
        family = BF16 if codec.codec_id.name == "bf16" else FP16
    elif isinstance(codec, GroupedCodec):
        family = GROUPED
    else:
        family = CALIBRATED if isinstance(codec, NuqCodec) else ROTATED
    return int(family.value)


def _table_room(codec: Codec) -> int:
    """Places of each list of levels or midpoints in a table."""
    return 1 << max(codec.codec_id.code_bits) if isinstance(codec, NuqCodec | TurboCodec) else 0


def _table(codec: Codec) -> Floats:
    """The table of one page."""
    room = _table_room(codec)
    if isinstance(codec, NuqCodec):
        found = codec.constants
        parts = [found.key_scales.astype(np.float32), found.key_zeros.astype(np.float32)]
        datatypes = [found.keys, found.values]
    elif isinstance(codec, TurboCodec):
        parts = [random_signs(codec.seed, codec.shape.head_dim)]
        datatypes = [Datatype(codec.levels[side], codec.levels[side]) for side in ("key", "value")]
    else:
        return np.zeros(1, np.float32)
    parts += [_padded(datatype.levels, room) for datatype in datatypes]
    half = np.float32(0.5)
    parts += [
        _padded((datatype.centroids[:-1] + datatype.centroids[1:]) * half, room) for datatype in datatypes
    ]
    return np.concatenate(parts)


def _padded(numbers: Floats, room: int) -> Floats:
    padded: Floats = np.pad(numbers, (0, room - len(numbers)))
    return padded
