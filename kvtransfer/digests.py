"""Digests of KV chunks: they bind a chunk's bytes to the request and the position for which they were offered.

There are two steps. A *payload hash* reads every byte of a slab once (xxh3-128 at memory speed, or blake3 where the
bytes cross a link that others can write to). A *digest* then binds this hash, under the deployment's key, to the
context of the hand-off and to the chunk's index. So a chunk that is flipped, truncated, swapped with its neighbour, or
replayed from another request does not match its digest.

The whole slab is hashed, including the rows after the last token. The compared bytes are then exactly the copied bytes,
and no rows have to be cleared. The prefill worker does not write to a slab after offering it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Annotated, Protocol

import blake3
import msgspec
import xxhash
from msgspec import Meta

from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.hashing import HashField, hash_fields
from kvcache.codecs.codec_id import MAX_ID_CHARS
from kvcache.eviction.bag_sizes import BagSizes
from kvcache.eviction.kept_segments import KeptSegment, are_in_order, count_segment_slabs, kept_begin

DIGEST_BYTES = 16
KEY_BYTES = 32

ByteBuffer = bytes | memoryview

BoundedText = Annotated[str, Meta(min_length=1, max_length=512)]
BoundedCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# Most bytes of a chunk.
MAX_CHUNK_BYTES = 1 << 40
# Most tensor-parallel lanes, and most stages, of a worker; and most KV heads of all layers of a model.
MAX_RANKS, MAX_HEADS = 1 << 10, 1 << 17
# Most segments of a ticket.
MAX_SEGMENTS = 1 << 15
BoundedCounts = Annotated[tuple[BoundedCount, ...], Meta(max_length=MAX_HEADS)]


class PayloadHasher(Protocol):
    """A payload hash that is fed piece by piece."""

    def update(self, data: ByteBuffer, /) -> object:
        """Add the next bytes."""

    def digest(self) -> bytes:
        """The 16-byte hash of all bytes added so far."""


class _Blake3Hasher:
    def __init__(self) -> None:
        self._hash = blake3.blake3()

    def update(self, data: ByteBuffer, /) -> None:
        self._hash.update(data)

    def digest(self) -> bytes:
        return self._hash.digest(length=DIGEST_BYTES)


def _hash_blake3(data: ByteBuffer) -> bytes:
    return blake3.blake3(data).digest(length=DIGEST_BYTES)


# Both libraries release the GIL on large buffers, so a puller thread hashes while the engine's thread decodes.
STREAM_HASHERS: dict[str, Callable[[], PayloadHasher]] = {"xxh3": xxhash.xxh3_128, "blake3": _Blake3Hasher}
HASH_FUNCTIONS: dict[str, Callable[[ByteBuffer], bytes]] = {
    "xxh3": xxhash.xxh3_128_digest,
    "blake3": _hash_blake3,
}


class BagSplit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a bag is split over the ranks of its source (`kvcache.eviction.rank_bags`): `tp` lanes of `pp` stages.

    The counts are those of `sizes`; without them only ranks with the same split can read the bag.
    """

    tp: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    pp: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    head_frames: BoundedCounts = ()
    page_tokens: BoundedCounts = ()
    page_outliers: BoundedCounts = ()

    @property
    def sizes(self) -> BagSizes:
        """What the bag needs of frames, and of entries behind them."""
        return BagSizes(self.head_frames, self.page_tokens, self.page_outliers)


ONE_RANK = BagSplit()


class DigestContext(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything that a chunk's digest is bound to, besides its bytes and its index.

    `layers` is the half-open range of layers in each chunk; `shape` is the shape of a whole chunk,
    `[layers, kv_heads, 2, chunk_tokens, head_dim]`; `chunk_bytes` is its size in memory and on the wire; `codec` is the
    canonical id of the codec of its pages, empty if they are not coded (`kvcache.layout.KvLayout.codec`); `algorithm`
    is a key of `HASH_FUNCTIONS`.

    If `keep` drops tokens, only the chunks below its boundary are chunks. What is kept of the other tokens is in
    `segments`, then in a bag of `num_bag_slabs` slabs, whose own maps say what lies where
    (`kvcache.eviction.kept_rows`); `num_tokens` are the tokens at the point at which that was decided; `bag` says how
    the bag is split. Where a docstring here says chunk, it means such a slab as well, of a segment or of the bag.
    """

    request: BoundedText
    epoch: BoundedCount
    num_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    layers: tuple[BoundedCount, BoundedCount]
    dtype: BoundedText
    shape: Annotated[tuple[BoundedCount, ...], Meta(min_length=5, max_length=5)]
    fingerprint: BoundedText
    chunk_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]
    codec: Annotated[str, Meta(max_length=MAX_ID_CHARS)] = ""
    algorithm: BoundedText = "xxh3"
    keep: KeepSpec = KEEP_ALL
    num_bag_slabs: BoundedCount = 0
    bag: BagSplit = ONE_RANK
    segments: Annotated[tuple[KeptSegment, ...], Meta(max_length=MAX_SEGMENTS)] = ()

    @property
    def kv_class(self) -> str:
        """The KV class of the chunks (`kvcache.layout.KvLayout.kv_class`)."""
        return self.codec or RAW_CLASS

    @property
    def chunk_tokens(self) -> int:
        """How many tokens a chunk holds."""
        return self.shape[3]

    @property
    def num_chunks(self) -> int:
        """Number of chunks that the tokens fill; the last one may be partly filled."""
        if self.keep.evicts:
            return self.keep.boundary_chunks + count_segment_slabs(self.segments) + self.num_bag_slabs
        return -(-self.num_tokens // self.chunk_tokens)

    @property
    def is_keep_sound(self) -> bool:
        """Whether `keep`, `segments` and `num_bag_slabs` can be true of `num_tokens` tokens.

        A bag has a slab for its map at least. Kept rows and map together never need two slabs for each chunk of tokens.
        One rank has all of a segment.
        """
        if not self.keep.evicts:
            return (self.keep, self.num_bag_slabs, self.bag, self.segments) == (KEEP_ALL, 0, ONE_RANK, ())
        if not are_in_order(self.keep, self.segments, self.num_tokens):
            return False
        if self.segments and (self.bag.tp, self.bag.pp) != (1, 1):
            return False
        behind = self.num_tokens - kept_begin(self.keep, self.segments)
        return (
            self.chunk_tokens == CHUNK_TOKENS
            and behind >= 0
            and 1 <= self.num_bag_slabs <= 1 + 2 * -(-behind // CHUNK_TOKENS)
        )

    def valid_tokens(self, index: int) -> int:
        """Number of rows of chunk `index` that hold KV; only the last chunk may have fewer than `chunk_tokens`.

        It is 0 for a slab of a segment or a bag, whose map says what it holds.
        """
        if self.keep.evicts:
            return self.chunk_tokens if index < self.keep.boundary_chunks else 0
        return min(self.chunk_tokens, self.num_tokens - index * self.chunk_tokens)


class ChunkDigester:
    """Computes and checks the chunk digests of one hand-off.

    `key` is the deployment's secret, which only its workers have.
    """

    def __init__(self, key: bytes, context: DigestContext) -> None:
        fields: list[HashField] = [
            "diptych chunk",
            context.request,
            context.epoch,
            context.num_tokens,
            *context.layers,
        ]
        fields += [context.dtype, *context.shape, context.fingerprint]
        fields += [context.chunk_bytes, context.codec, context.algorithm]
        fields += [
            repr(context.keep.threshold),
            context.keep.boundary,
            context.keep.rule,
            context.num_bag_slabs,
        ]
        fields += [context.bag.tp, context.bag.pp]
        for counts in context.bag.sizes:
            fields += [len(counts), *counts]
        for segment in context.segments:
            fields += [segment.end, segment.slabs, segment.digest]
        self.context = context
        self._sealed = hashlib.blake2b(hash_fields(fields), key=_fit_key(key), digest_size=DIGEST_BYTES)

    def digest_chunk(self, index: int, payload: bytes) -> bytes:
        """The 16-byte digest of the chunk at `index` with payload hash `payload`."""
        sealed = self._sealed.copy()
        sealed.update(
            index.to_bytes(8, "big") + self.context.valid_tokens(index).to_bytes(8, "big", signed=True)
        )
        sealed.update(payload)
        return sealed.digest()

    def matches_chunk(self, index: int, payload: bytes, promised: bytes) -> bool:
        """Whether the chunk at `index` has the digest `promised`. Constant time, whether it matches or not."""
        return hmac.compare_digest(self.digest_chunk(index, payload), promised)


def _fit_key(key: bytes) -> bytes:
    """A 32-byte key for BLAKE2b, derived from the deployment's key."""
    if len(key) < 16:
        raise ValueError("the deployment key must have at least 16 bytes")
    return hashlib.sha256(b"diptych kv digest\0" + key).digest()
