"""Copies chunks of KV and hashes them in one pass: each byte is read once.

The hash is XXH3 of 128 bits with seed 0 and the default secret, by the specification of xxHash
(github.com/Cyan4973/xxHash, doc/xxhash_spec.md) for inputs of more than 240 bytes. Eight sums of 64 bits take one
stripe of 64 bytes after the other; after each block of 16 stripes they are scrambled. The last 64 bytes are taken
otherwise, so 1 to 64 bytes are held until more come. Inputs of up to 240 bytes are hashed by the library `xxhash`.

Bytes are stored past the CPU cache where the target is aligned, as in `kvtransfer.stream_copy`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as numba_cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from diptych.kernels.cache import cached
from kvtransfer.stream_copy import store_fence

STRIPE_BYTES, BLOCK_STRIPES = 64, 16
# The longest input that XXH3 hashes otherwise.
MAX_SHORT_BYTES = 240
# How far ahead of a stripe its successors are fetched.
PREFETCH_BYTES = 512
# Of the secret: what scrambles the sums, what meets the last stripe, and what meets the sums at the end.
SCRAMBLE_AT, LAST_AT, LOW_AT, HIGH_AT = 128, 121, 11, 117
SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
PRIMES_32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME_64_1, PRIME_64_2, MERGE_PRIME = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667919E3779F9
PRIMES_64 = PRIME_64_1, PRIME_64_2, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
FIRST_SUMS = np.array([PRIMES_32[2], *PRIMES_64[:4], PRIMES_32[1], PRIMES_64[4], PRIMES_32[0]], np.uint64)

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
# It has types for some of its functions only.
cgutils: Any = numba_cgutils


def _prefetch(builder: Any, address: Any) -> None:
    """The code that fetches the line at an address soon, even where there is none."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    # For reading, into all caches, as data.
    builder.call(fetch, [builder.inttoptr(address, byte), number(0), number(3), number(1)])


def _build_stripes(builder: Any, args: Any, store_align: int) -> None:
    """The code that adds stripes to the sums, and copies them unless `store_align` is 0."""
    word, lanes = ir.IntType(64), ir.VectorType(ir.IntType(64), 8)
    sums_at, source, target, count, secret = args
    sums_ptr = builder.inttoptr(sums_at, lanes.as_pointer())
    first = builder.load(sums_ptr)
    first.align = 8
    before, body = builder.block, builder.append_basic_block("stripe")
    after = builder.append_basic_block("after")
    builder.branch(body)
    builder.position_at_end(body)
    place, sums = builder.phi(word), builder.phi(lanes)
    offset = builder.mul(place, word(STRIPE_BYTES))
    data = builder.load(builder.inttoptr(builder.add(source, offset), lanes.as_pointer()))
    data.align = 1
    _prefetch(builder, builder.add(source, builder.add(offset, word(PREFETCH_BYTES))))
    if store_align:
        store = builder.store(data, builder.inttoptr(builder.add(target, offset), lanes.as_pointer()))
        store.align = store_align
        if store_align == STRIPE_BYTES:
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
    key_at = builder.add(secret, builder.mul(place, word(8)))
    key = builder.load(builder.inttoptr(key_at, lanes.as_pointer()))
    key.align = 1
    mixed = builder.xor(data, key)
    low = builder.and_(mixed, ir.Constant(lanes, [0xFFFFFFFF] * 8))
    high = builder.lshr(mixed, ir.Constant(lanes, [32] * 8))
    order = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
    swapped = builder.shuffle_vector(data, ir.Constant(lanes, ir.Undefined), order)
    added = builder.add(builder.add(sums, swapped), builder.mul(low, high))
    following = builder.add(place, word(1))
    builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    place.add_incoming(word(0), before)
    place.add_incoming(following, body)
    sums.add_incoming(first, before)
    sums.add_incoming(added, body)
    builder.position_at_end(after)
    last = builder.store(added, sums_ptr)
    last.align = 8


SIGNATURE = types.void(types.intp, types.intp, types.intp, types.intp, types.intp)


def _stripes_intrinsic(store_align: int) -> Any:
    """The numba intrinsic (sums, source, target, count, secret) with the code of `_build_stripes`, for one stripe or
    more.
    """

    def stripes(context: Any, sums: Any, source: Any, target: Any, count: Any, secret: Any) -> Any:
        def code(backend: Any, builder: Any, signature: Any, args: Any) -> Any:
            _build_stripes(builder, args, store_align)
            return backend.get_dummy_value()

        return SIGNATURE, code

    return intrinsic(stripes)


# They only hash, copy to any address, and copy to an aligned address past the cache.
_hash_stripes, _copy_stripes, _stream_stripes = map(_stripes_intrinsic, (0, 1, STRIPE_BYTES))


def _scramble_sums_code(context: Any, sums: Any, secret: Any) -> Any:
    """Numba intrinsic: mix the sums with eight words of the secret."""

    def code(backend: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.VectorType(ir.IntType(64), 8)
        sums_ptr, key_ptr = (builder.inttoptr(address, lanes.as_pointer()) for address in args)
        value, key = builder.load(sums_ptr), builder.load(key_ptr)
        value.align, key.align = 8, 1
        shifted = builder.lshr(value, ir.Constant(lanes, [47] * 8))
        mixed = builder.xor(builder.xor(value, shifted), key)
        store = builder.store(builder.mul(mixed, ir.Constant(lanes, [PRIMES_32[0]] * 8)), sums_ptr)
        store.align = 8
        return backend.get_dummy_value()

    return types.void(types.intp, types.intp), code


_scramble_sums: Any = intrinsic(_scramble_sums_code)


def _move_bytes_code(context: Any, target: Any, source: Any, count: Any) -> Any:
    """Numba intrinsic: copy bytes between any two addresses."""

    def code(backend: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        ends = [builder.inttoptr(address, byte) for address in args[:2]]
        cgutils.raw_memcpy(builder, *ends, args[2], 1)
        return backend.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), code


_move_bytes: Any = intrinsic(_move_bytes_code)


def _fold_product_code(context: Any, sums: Any, secret: Any) -> Any:
    """Numba intrinsic: the product of two sums, each xor its word of the secret: its upper half xor its lower one."""

    def code(backend: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, wide = ir.IntType(64), ir.IntType(128)
        factors = []
        for place in range(2):
            mixed = []
            for address in args:
                value = builder.load(
                    builder.inttoptr(builder.add(address, word(8 * place)), word.as_pointer())
                )
                value.align = 1
                mixed.append(value)
            factors.append(builder.zext(builder.xor(*mixed), wide))
        product = builder.mul(*factors)
        upper = builder.trunc(builder.lshr(product, wide(64)), word)
        return builder.xor(builder.trunc(product, word), upper)

    return types.uint64(types.intp, types.intp), code


_fold_product: Any = intrinsic(_fold_product_code)


# The state of a hash is `sums`, uint64 [8]; `held`, uint8 [2 * 64]: the stripe before the held bytes, and these; and
# `counts`, int64 [2]: how many bytes are held, and the stripes of the current block. `secret` is uint8 [192]. The other
# arguments are those of `CopyHasher.copy_slab`.
def _copy_and_hash(
    sums: Any, held: Any, counts: Any, secret: Any, moves: Any, sources: Any, far: int, targets: Any, own: int
) -> None:
    """Copy and hash the moves; compiled by numba as `_run_moves`. Without `targets` nothing is copied."""
    kept, at_sums, at_secret = held.ctypes.data, sums.ctypes.data, secret.ctypes.data
    pending, copies = kept + STRIPE_BYTES, len(targets) > 0
    for move in range(len(moves)):
        row, size = moves[move, 0], moves[move, 4]
        source, target = sources[row, 0] + far * sources[row, 1] + moves[move, 1], 0
        if copies:
            row = moves[move, 2]
            target = targets[row, 0] + own * targets[row, 1] + moves[move, 3]
        first = min(size, STRIPE_BYTES - counts[0])
        # What is hashed is what was stored, even if others write to the source: each byte of it is read once.
        _move_bytes(pending + counts[0], source, first)
        if copies:
            _move_bytes(target, pending + counts[0], first)
        counts[0] += first
        if first == size:
            continue
        source, target, size = source + first, target + first, size - first
        # The held stripe, whose bytes are copied already, comes before those of the move.
        whole = (size - 1) // STRIPE_BYTES
        done = -1
        while done < whole:
            count = 1 if done < 0 else min(whole - done, BLOCK_STRIPES - counts[1])
            key = at_secret + 8 * counts[1]
            if done < 0:
                _hash_stripes(at_sums, pending, 0, count, key)
            elif not copies:
                _hash_stripes(at_sums, source + STRIPE_BYTES * done, 0, count, key)
            elif target % STRIPE_BYTES:
                _copy_stripes(at_sums, source + STRIPE_BYTES * done, target + STRIPE_BYTES * done, count, key)
            else:
                _stream_stripes(
                    at_sums, source + STRIPE_BYTES * done, target + STRIPE_BYTES * done, count, key
                )
            done = 0 if done < 0 else done + count
            counts[1] += count
            if counts[1] == BLOCK_STRIPES:
                counts[1] = 0
                _scramble_sums(at_sums, at_secret + SCRAMBLE_AT)
        stored = target if copies else source
        _move_bytes(kept, stored + STRIPE_BYTES * (whole - 1) if whole else pending, STRIPE_BYTES)
        _move_bytes(pending, source + STRIPE_BYTES * whole, size - STRIPE_BYTES * whole)
        if copies:
            _move_bytes(target + STRIPE_BYTES * whole, pending, size - STRIPE_BYTES * whole)
        counts[0] = size - STRIPE_BYTES * whole
    store_fence()  # type: ignore[call-arg]


_run_moves: Callable[..., None] = cached(_copy_and_hash)


def _merge_all(sums: Any, held: Any, counts: Any, secret: Any, total: int, halves: Any) -> None:
    """The hash of `total` bytes; compiled by numba as `_end_hash`. The state stays.

    `halves`: uint64 [2], for the high and the low half. The others as for `_copy_and_hash`.
    """
    ends, at_secret = sums.copy(), secret.ctypes.data
    # The last 64 bytes of all.
    _hash_stripes(ends.ctypes.data, held.ctypes.data + counts[0], 0, 1, at_secret + LAST_AT)
    length = np.uint64(total)
    high, low = ~(length * np.uint64(PRIME_64_2)), length * np.uint64(PRIME_64_1)
    for pair in range(4):
        at = ends.ctypes.data + 16 * pair
        high += _fold_product(at, at_secret + HIGH_AT + 16 * pair)
        low += _fold_product(at, at_secret + LOW_AT + 16 * pair)
    high = (high ^ (high >> np.uint64(37))) * np.uint64(MERGE_PRIME)
    low = (low ^ (low >> np.uint64(37))) * np.uint64(MERGE_PRIME)
    halves[0], halves[1] = high ^ (high >> np.uint64(32)), low ^ (low >> np.uint64(32))


_end_hash: Callable[..., None] = cached(_merge_all)


class CopyHasher:
    """XXH3 of what it copies, and of what it is given (`kvtransfer.digests.PayloadHasher`)."""

    def __init__(self) -> None:
        self._sums, self._held = FIRST_SUMS.copy(), np.zeros(2 * STRIPE_BYTES, np.uint8)
        self._counts, self._total = np.zeros(2, np.int64), 0
        # All bytes, as long as they are so few that they are hashed otherwise.
        self._short = b""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add the next bytes."""
        if size := len(data):
            self._total += size
            if self._total <= MAX_SHORT_BYTES:
                self._short += data
            else:
                self._add_short()
                self._add(np.frombuffer(data, np.uint8))

    def copy_slab(
        self, moves: Numbers, num_bytes: int, sources: Numbers, far: int, targets: Numbers, own: int
    ) -> None:
        """Copy the next bytes from slab to slab, and add them. Releases the GIL. All addresses must be valid.

        Args:
            moves: int64 [n, 5]: for each a row of `sources` and a byte in its slab, the same of `targets`, and how many
                bytes.
            num_bytes: those of all moves.
            sources: int64 [s, 2]: for each rank the address of slab 0, and the bytes from slab to slab.
            far: the slab to copy from.
            targets: int64 [t, 2], as `sources`.
            own: the slab to copy to.
        """
        self._total += num_bytes
        if self._total > MAX_SHORT_BYTES:
            self._add_short()
            self._run(moves, sources, far, targets, own)
            return
        for source, there, target, here, size in moves.tolist():
            data = ctypes.string_at(_address(sources, source, far) + there, size)
            self._short += data
            ctypes.memmove(_address(targets, target, own) + here, data, size)

    def _add_short(self) -> None:
        """Hash bytes that were kept, since there are more now."""
        if self._short:
            self._add(np.frombuffer(self._short, np.uint8))
            self._short = b""

    def _add(self, data: Bytes) -> None:
        """Hash bytes that are in memory."""
        row = np.array([[0, 0, 0, 0, len(data)]], np.int64)
        self._run(row, np.array([[data.ctypes.data, 0]], np.int64), 0, NOWHERE, 0)

    def _run(self, moves: Numbers, sources: Numbers, far: int, targets: Numbers, own: int) -> None:
        _run_moves(self._sums, self._held, self._counts, SECRET, moves, sources, far, targets, own)

    def digest(self) -> bytes:
        """The 16-byte hash of all bytes so far."""
        if self._total <= MAX_SHORT_BYTES:
            return xxhash.xxh3_128_digest(self._short)
        halves = np.empty(2, np.uint64)
        _end_hash(self._sums, self._held, self._counts, SECRET, self._total, halves)
        return halves.byteswap().tobytes()


NOWHERE = np.zeros((0, 2), np.int64)


def load_kernels() -> None:
    """Load the kernels, or compile those that are not stored, so that no pull waits for that."""
    hasher = CopyHasher()
    # Fewer bytes would be hashed by the library.
    hasher.update(bytes(MAX_SHORT_BYTES + 1))
    hasher.digest()


def _address(places: Numbers, row: int, slab: int) -> int:
    """Where a slab begins."""
    first, stride = places[row].tolist()
    return int(first + slab * stride)
