"""Codes of 1 to 8 bits as a stream of bits: code i of a row lies in bits i·b to i·b + b − 1, lowest bit first.

Read as little-endian words, eight codes of 3 bits are one word of 24, eight of 4 bits one of 32: a kernel shifts a
copy of the word by its lane's distance and masks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

MAX_CODE_BITS = 8


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a row of `count` codes; the last byte is filled up with zeros."""
    return -(-count * bits // 8)


def pack_codes(codes: Bytes, bits: int) -> Bytes:
    """Packs the last axis: [..., n] codes below 2^bits become [..., ⌈n · bits / 8⌉] bytes.

    Raises:
        ValueError: `bits` is not 1 to 8, or a code does not fit.
    """
    _check_bits(bits)
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"the code {int(codes.max())} does not fit into {bits} bits")
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)
    return np.packbits(stream.reshape(*codes.shape[:-1], codes.shape[-1] * bits), axis=-1, bitorder="little")


def unpack_codes(packed: Bytes, bits: int, count: int) -> Bytes:
    """The codes of `pack_codes`: [..., ⌈count · bits / 8⌉] bytes become [..., count].

    Raises:
        ValueError: `bits` is not 1 to 8, or the number of bytes is another.
    """
    _check_bits(bits)
    if packed.shape[-1] != packed_bytes(count, bits):
        raise ValueError(f"{count} codes of {bits} bits are not {packed.shape[-1]} bytes")
    stream = np.unpackbits(packed, axis=-1, bitorder="little", count=count * bits)
    digits = stream.reshape(*packed.shape[:-1], count, bits) << np.arange(bits, dtype=np.uint8)
    codes: Bytes = np.bitwise_or.reduce(digits, axis=-1)
    return codes


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_CODE_BITS:
        raise ValueError(f"codes have 1 to {MAX_CODE_BITS} bits, not {bits}")
