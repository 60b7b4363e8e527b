"""The ticket, with which a prefill worker offers KV to a decode worker, and the hints that precede it.

On the wire: msgpack of the `Ticket` or `StagingHint`, then 32 bytes of HMAC-SHA256 over it under the deployment's key.
Neither contains an address: a decode worker learns where a worker is from the gateway (`Peer`), never from a request.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from diptych.chunks import HINT_VERSION, TICKET_VERSION
from diptych.errors import StaleTicket, TransferError
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from kvcache.layout import DTYPE_BYTES, KvLayout
from kvtransfer.digests import (
    DIGEST_BYTES,
    HASH_FUNCTIONS,
    BoundedCount,
    BoundedText,
    ChunkDigester,
    DigestContext,
)

# Most chunks of a ticket: 4 Mi tokens in chunks of 64.
MAX_CHUNKS = 1 << 16
MAX_TICKET_BYTES = 4 << 20
MAC_BYTES = 32


class OfferedChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One chunk of a ticket: its slab at the source, and its 16-byte digest."""

    slab: BoundedCount
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An offer of the KV of `context.request`, held by life `incarnation` of `worker`; `chunks` are in token order.

    If `context.keep` drops tokens, the whole chunks come first, then slabs of segments, then those of the bag.
    """

    context: DigestContext
    worker: BoundedText
    incarnation: BoundedText
    chunks: Annotated[tuple[OfferedChunk, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    version: Annotated[int, Meta(ge=TICKET_VERSION, le=TICKET_VERSION)] = TICKET_VERSION

    @property
    def num_bytes(self) -> int:
        """Bytes that are transferred if every chunk is pulled."""
        return self.context.chunk_bytes * len(self.chunks)


class StagingHint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Announces that chunks `start`, `start` + 1, ... of an attempt are being computed into `slabs` of `worker`.

    `mark` is their mark in the worker's layer progress (`kvtransfer.layer_progress`), or `COMPLETE_MARK` for chunks
    that are complete already. A later hint for the same chunk replaces an earlier one. A hint guarantees nothing; the
    ticket does.
    """

    request: BoundedText
    epoch: BoundedCount
    worker: BoundedText
    incarnation: BoundedText
    start: Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]
    slabs: Annotated[tuple[BoundedCount, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    mark: Annotated[int, Meta(ge=0, lt=1 << 48)]
    version: Annotated[int, Meta(ge=HINT_VERSION, le=HINT_VERSION)] = HINT_VERSION


def issue_ticket(
    key: bytes,
    context: DigestContext,
    worker: str,
    incarnation: str,
    slabs: Sequence[int],
    payload: Callable[[int, str], bytes],
) -> Ticket:
    """Digest the slabs of a finished prefill and make its ticket.

    `payload(slab, algorithm)` hashes the chunk in a slab (`kvtransfer.resharding.ShardedPool.hash_slab`). The slabs,
    one per chunk of `context` in token order, must not change any more.

    Raises:
        ValueError: the number of slabs is not `context.num_chunks`, or `context` contradict what is kept.
    """
    if len(slabs) != context.num_chunks:
        raise ValueError(
            f"{context.num_tokens} tokens are {context.num_chunks} chunks, not {len(slabs)} slabs"
        )
    if not context.is_keep_sound:
        what = f"a bag of {context.num_bag_slabs} slabs and {context.keep}"
        raise ValueError(f"{what} contradict each other for {context.num_tokens} tokens")
    seal = ChunkDigester(key, context)
    chunks = tuple(
        OfferedChunk(slab, seal.digest_chunk(i, payload(slab, context.algorithm)))
        for i, slab in enumerate(slabs)
    )
    return Ticket(context, worker, incarnation, chunks)


def encode_ticket(ticket: Ticket, key: bytes) -> bytes:
    """The ticket in wire format: msgpack and MAC."""
    return _append_mac(msgspec.msgpack.encode(ticket), key, "ticket")


def decode_ticket(raw: bytes, key: bytes) -> Ticket:
    """Decode and verify a ticket that was received.

    Raises:
        TransferError: the ticket is too large, not signed with `key`, or malformed; the text says which.
    """
    ticket = _decode_signed(raw, key, "ticket", Ticket)
    _check_fields(ticket)
    return ticket


def encode_hint(hint: StagingHint, key: bytes) -> bytes:
    """The hint in wire format: msgpack and MAC. The MAC of a ticket is never valid for a hint."""
    return _append_mac(msgspec.msgpack.encode(hint), key, "hint")


def decode_hint(raw: bytes, key: bytes) -> StagingHint:
    """Decode and verify a hint that was received.

    Raises:
        TransferError: the hint is too large, not signed with `key`, or malformed; the text says which.
    """
    hint = _decode_signed(raw, key, "hint", StagingHint)
    if hint.start + len(hint.slabs) > MAX_CHUNKS or len(set(hint.slabs)) != len(hint.slabs):
        raise TransferError("a hint was refused", "its fields contradict each other")
    return hint


def check_ticket(
    ticket: Ticket,
    *,
    request: str,
    epoch: int,
    num_tokens: int,
    layout: KvLayout,
    fingerprint: str,
    keep: KeepSpec = KEEP_ALL,
) -> None:
    """Check that a ticket fits this worker's order for the request, and the model and the KV layout that it has.

    `keep` and `num_tokens` are those of the order: what it may drop, and the tokens at the last point at which it was
    decided what is dropped (`diptych.eviction_spec.decision_tokens`); without eviction all tokens that have KV.

    Raises:
        StaleTicket: a field differs; the text names the first one, with both values.
    """
    context = ticket.context
    pairs: list[tuple[str, object, object]] = [
        ("request", context.request, request),
        ("epoch", context.epoch, epoch),
        ("eviction threshold", context.keep.threshold, keep.threshold),
        ("eviction boundary", context.keep.boundary, keep.boundary),
        ("eviction rule", context.keep.rule, keep.rule),
        ("num_tokens", context.num_tokens, num_tokens),
        ("dtype", context.dtype, layout.dtype),
        ("chunk shape", tuple(context.shape), layout.chunk_shape),
        ("layers", tuple(context.layers), (0, layout.layers)),
        ("KV codec", context.kv_class, layout.kv_class),
        ("chunk size", context.chunk_bytes, layout.chunk_bytes),
        ("model fingerprint", context.fingerprint, fingerprint),
    ]
    for name, offered, wanted in pairs:
        if offered != wanted:
            raise StaleTicket(f"the ticket is for another {name}", f"offered: {offered}\nhere:    {wanted}")


def _check_fields(ticket: Ticket) -> None:
    """Raises TransferError if the fields of a ticket contradict each other."""
    context = ticket.context
    sound = (
        context.algorithm in HASH_FUNCTIONS
        and context.dtype in DTYPE_BYTES
        and min(context.shape) > 0
        and (context.codec or context.chunk_bytes == math.prod(context.shape) * DTYPE_BYTES[context.dtype])
        and context.layers[0] < context.layers[1]
        and context.layers[1] - context.layers[0] == context.shape[0]
        and context.is_keep_sound
        and len(ticket.chunks) == context.num_chunks
        and len({chunk.slab for chunk in ticket.chunks}) == len(ticket.chunks)
    )
    if not sound:
        raise TransferError("a ticket was refused", "its fields contradict each other")


T = TypeVar("T", Ticket, StagingHint)


def _decode_signed(raw: bytes, key: bytes, what: str, kind: type[T]) -> T:
    """Check the size and MAC of a message, and decode it. Raises TransferError."""
    if not MAC_BYTES < len(raw) <= MAX_TICKET_BYTES:
        raise TransferError(
            f"a {what} was refused", f"it has {len(raw)} bytes, of at most {MAX_TICKET_BYTES}"
        )
    body, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
    if not hmac.compare_digest(_compute_mac(body, key, what), mac):
        raise TransferError(f"a {what} was refused", "its signature was not made with this deployment's key")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # This happens for example with a peer of another version.
        raise TransferError(f"a {what} was refused", f"malformed: {error}") from error


def _append_mac(body: bytes, key: bytes, what: str) -> bytes:
    """A message in wire format: its body, then its MAC."""
    return body + _compute_mac(body, key, what)


def _compute_mac(body: bytes, key: bytes, what: str) -> bytes:
    """The MAC of a body. `what` ("ticket" or "hint") is part of it, so one kind cannot pass as the other."""
    return hmac.new(key, f"diptych {what} 1".encode() + b"\0" + body, hashlib.sha256).digest()
