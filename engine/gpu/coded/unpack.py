"""Codes of keys and values become numbers in registers.

On a device, codes of 4 bits become numbers of 16 bits without a table in memory: eight codes lie in one word, and their
levels in eight registers, from which byte permutations pick the two bytes of a level. All other widths and types, and
the interpreter, look levels up in the table.
"""

from __future__ import annotations

from engine.gpu.coded.expand import read_codes
from engine.gpu.decode_rows import PAGE
from engine.gpu.triton_kernel import tl, triton_kernel

# What precedes both ways to unpack a word: eight results of 16 bits are the halves of four registers.
_STORE = "".join(f"mov.b32 {{${2 * n}, ${2 * n + 1}}}, o{n}; " for n in range(4))
_RESULTS = ",".join(["=h"] * 8)

# Four codes: the high and the low bytes of levels 0 to 7 and of levels 8 to 15, then the right one of both by bit 3.
_PICK_FOUR = """
prmt.b32 a, $9, $10, s; prmt.b32 b, $11, $12, s; prmt.b32 c, $13, $14, s; prmt.b32 d, $15, $16, s;
prmt.b32 k, 0x0000FF00, 0, m; lop3.b32 h, a, b, k, 0xD8; lop3.b32 l, c, d, k, 0xD8;
"""
PICK_LEVELS = tl.constexpr(
    "{ .reg .b32 s, m, a, b, c, d, k, h, l, o0, o1, o2, o3; "
    "and.b32 s, $8, 0x77777777; shr.u32 m, $8, 3; and.b32 m, m, 0x11111111; "
    + _PICK_FOUR
    + "prmt.b32 o0, l, h, 0x5140; prmt.b32 o1, l, h, 0x7362; shr.u32 s, s, 16; shr.u32 m, m, 16; "
    + _PICK_FOUR
    + "prmt.b32 o2, l, h, 0x5140; prmt.b32 o3, l, h, 0x7362; "
    + _STORE
    + "}"
)
PICK_CONSTRAINTS = tl.constexpr(_RESULTS + ",r" * 9)

# Bits that make a code c of 4 bits the number `SIDE.base + c` of the type, once in each half of the register $9.
ADD_BASE = tl.constexpr(
    "{ .reg .b32 a, b, c, d, w, o0, o1, o2, o3; "
    "lop3.b32 a, $8, 0x000F000F, $9, 0xEA; shr.u32 w, $8, 4; lop3.b32 b, w, 0x000F000F, $9, 0xEA; "
    "shr.u32 w, $8, 8; lop3.b32 c, w, 0x000F000F, $9, 0xEA; shr.u32 w, $8, 12; "
    "lop3.b32 d, w, 0x000F000F, $9, 0xEA; "
    "prmt.b32 o0, a, b, 0x5410; prmt.b32 o1, c, d, 0x5410; prmt.b32 o2, a, b, 0x7632; prmt.b32 o3, c, d, 0x7632; "
    + _STORE
    + "}"
)
BASE_CONSTRAINTS = tl.constexpr(_RESULTS + ",r,r")


@triton_kernel
def pack_levels(table, SIDE: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The high bytes of sixteen levels of TYPE, four in each register, then the low bytes; zeros if codes of the side
    are not unpacked in registers.
    """
    levels = table + SIDE.levels
    h0, h1, h2, h3, l0, l1, l2, l3 = 0, 0, 0, 0, 0, 0, 0, 0
    if SIDE.packed:
        h0, l0 = _pack_four(levels, TYPE)
        h1, l1 = _pack_four(levels + 4, TYPE)
        h2, l2 = _pack_four(levels + 8, TYPE)
        h3, l3 = _pack_four(levels + 12, TYPE)
    return h0, h1, h2, h3, l0, l1, l2, l3


@triton_kernel
def _pack_four(levels, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The high bytes, and the low bytes, of four levels."""
    high, low = 0, 0
    for n in tl.static_range(4):
        bits = tl.load(levels + n).to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high |= (bits >> 8) << (8 * n)
        low |= (bits & 0xFF) << (8 * n)
    return high, low


@triton_kernel
def load_words(longs, at, head, FORMAT: tl.constexpr, SIDE: tl.constexpr, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of a head of a page as words of eight, [64, block / 8], with HALVES two tiles for its halves; zeros if
    codes of the side are not unpacked in registers.

    All 64 rows are read: what rows that do not exist hold is a code too.
    """
    x, y = 0, 0
    if SIDE.packed:
        begin = head * FORMAT.width
        if HALVES:
            x = _load_tile(longs, at, begin, FORMAT.width // 2, FORMAT, SIDE, FORMAT.half_block)
            y = _load_tile(
                longs, at, begin + FORMAT.width // 2, FORMAT.width // 2, FORMAT, SIDE, FORMAT.half_block
            )
        else:
            x = _load_tile(longs, at, begin, FORMAT.width, FORMAT, SIDE, FORMAT.block)
    return x, y


@triton_kernel
def _load_tile(  # type: ignore[no-untyped-def]
    longs, at, first, limit, FORMAT: tl.constexpr, SIDE: tl.constexpr, COUNT: tl.constexpr
):
    """Words of channels `first` to `first + limit - 1` of a page, [64, COUNT / 8]."""
    w = tl.arange(0, COUNT // 8)[None, :]
    row = FORMAT.heads * FORMAT.width // 8
    place = (at + SIDE.codes) // 4 + tl.arange(0, PAGE)[:, None] * row + first // 8 + w
    return tl.load(longs + place, mask=w * 8 < limit, other=0)


@triton_kernel
def _join_eight(x, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Eight tiles [64, COUNT / 8] as [64, COUNT]: the numbers of a word are neighbours, in their order."""
    even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
    odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    return tl.reshape(tl.join(even, odd), (PAGE, COUNT))


@triton_kernel
def read_levels(  # type: ignore[no-untyped-def]
    word, data, shorts, longs, table, packed, at, first, limit, there, row,
    COUNT: tl.constexpr, SIDE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The levels of codes as numbers of TYPE, [64, COUNT].

    word: of `load_words`; packed: as `pack_levels` returns them; the other arguments as those of `read_codes`.
    """
    if SIDE.packed:
        h0, h1, h2, h3, l0, l1, l2, l3 = packed
        x = tl.inline_asm_elementwise(
            PICK_LEVELS, PICK_CONSTRAINTS, [word, h0, h1, h2, h3, l0, l1, l2, l3],
            (tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16), True, 1,
        )  # fmt: skip
        x = _join_eight(x, COUNT).to(TYPE, bitcast=True)
    else:
        codes = read_codes(data, shorts, longs, at, first, limit, there, row, COUNT, SIDE.bits)
        x = tl.load(table + SIDE.levels + codes).to(TYPE)
    return x


@triton_kernel
def read_integers(  # type: ignore[no-untyped-def]
    word, data, shorts, longs, at, first, limit, there, row,
    COUNT: tl.constexpr, SIDE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Codes plus `SIDE.base` as numbers of TYPE, [64, COUNT]; arguments as those of `read_levels`.

    Between the base of a type and twice of it, numbers differ by one step of the last bits: no rounding.
    """
    if SIDE.packed:
        ones: tl.constexpr = 0x64006400 if SIDE.base == 1024 else 0x43004300
        x = tl.inline_asm_elementwise(
            ADD_BASE, BASE_CONSTRAINTS, [word, ones],
            (tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16), True, 1,
        )  # fmt: skip
        x = _join_eight(x, COUNT).to(TYPE, bitcast=True)
    else:
        codes = read_codes(data, shorts, longs, at, first, limit, there, row, COUNT, SIDE.bits)
        x = codes.to(tl.float32).to(TYPE)
    return x
