"""Digests of KV chunks: what was promised, for whom, and for which place.

Two steps. A *payload hash* reads every byte of a slab once (xxh3-128 at memory speed, or blake3 where the bytes cross
a link that others can write to). A *digest* then binds that hash, under the deployment's key, to the terms of the
hand-off and to the chunk's place in it, so a chunk that is flipped, truncated, swapped with its neighbour, or replayed
from another request, epoch, model or layout never verifies.

The whole slab is hashed, also the rows behind the last token: the bytes that are compared are then exactly the bytes
that were copied, and nobody has to clear anything. The prefill worker does not write a slab once it has offered it.
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

from diptych.hashing import Field, digest

DIGEST_BYTES = 16
KEY_BYTES = 32

Buffer = bytes | memoryview

Text = Annotated[str, Meta(min_length=1, max_length=512)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Hasher(Protocol):
    """A payload hash that is fed piece by piece; `digest` is its 16 bytes."""

    def update(self, data: Buffer, /) -> object: ...
    def digest(self) -> bytes: ...


class _Blake3:
    def __init__(self) -> None:
        self._hash = blake3.blake3()

    def update(self, data: Buffer, /) -> None:
        self._hash.update(data)

    def digest(self) -> bytes:
        return self._hash.digest(length=DIGEST_BYTES)


def _blake3(data: Buffer) -> bytes:
    return blake3.blake3(data).digest(length=DIGEST_BYTES)


# Both release the GIL on large buffers, so a puller thread hashes while the engine's thread decodes.
HASHERS: dict[str, Callable[[], Hasher]] = {"xxh3": xxhash.xxh3_128, "blake3": _Blake3}
HASHES: dict[str, Callable[[Buffer], bytes]] = {"xxh3": xxhash.xxh3_128_digest, "blake3": _blake3}


class Terms(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything a chunk's digest is bound to, besides its bytes and its index.

    `layers` is the half-open range of layers in each chunk; `shape` is a whole chunk's,
    `[layers, kv_heads, 2, chunk_tokens, head_dim]`; `algorithm` a key of `HASHES`.
    """

    request: Text
    epoch: Count
    num_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    layers: tuple[Count, Count]
    dtype: Text
    shape: Annotated[tuple[Count, ...], Meta(min_length=5, max_length=5)]
    fingerprint: Text
    algorithm: Text = "xxh3"

    @property
    def chunk_tokens(self) -> int:
        return self.shape[3]

    @property
    def num_chunks(self) -> int:
        return -(-self.num_tokens // self.chunk_tokens)

    def valid_tokens(self, index: int) -> int:
        """Rows of chunk `index` that hold KV; only the last chunk may have fewer than `chunk_tokens`."""
        return min(self.chunk_tokens, self.num_tokens - index * self.chunk_tokens)


class Seal:
    """Binds payload hashes to one hand-off's terms, and checks them.

    `key` is the deployment's secret; both sides hold it and nobody else does.
    """

    def __init__(self, key: bytes, terms: Terms) -> None:
        fields: list[Field] = ["diptych chunk", terms.request, terms.epoch, terms.num_tokens, *terms.layers]
        fields += [terms.dtype, *terms.shape, terms.fingerprint, terms.algorithm]
        self.terms = terms
        self._sealed = hashlib.blake2b(digest(fields), key=_fit(key), digest_size=DIGEST_BYTES)

    def bind(self, index: int, payload: bytes) -> bytes:
        """16-byte digest of the chunk at `index` whose payload hash is `payload`."""
        sealed = self._sealed.copy()
        sealed.update(
            index.to_bytes(8, "big") + self.terms.valid_tokens(index).to_bytes(8, "big", signed=True)
        )
        sealed.update(payload)
        return sealed.digest()

    def matches(self, index: int, payload: bytes, promised: bytes) -> bool:
        """Whether the chunk at `index` is the one that `promised` was made for; takes the same time either way."""
        return hmac.compare_digest(self.bind(index, payload), promised)


def _fit(key: bytes) -> bytes:
    if len(key) < 16:
        raise ValueError("the deployment key must have at least 16 bytes")
    return hashlib.sha256(b"diptych kv digest\0" + key).digest()
