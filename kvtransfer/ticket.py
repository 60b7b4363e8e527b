"""The ticket: what a prefill worker offers, and all that a decode worker needs to fetch it; and hints of tickets.

On the wire: msgpack of the `Ticket` or `Hint`, then 32 bytes of HMAC-SHA256 over it under the deployment's key. Neither
carries an address: where a worker is comes from the registry (`Peer`), never from a request.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from diptych.errors import StaleTicket, TransferError
from kvcache.layout import ITEM_BYTES
from kvtransfer.digests import DIGEST_BYTES, HASHES, Count, Seal, Terms, Text

MAX_CHUNKS = 1 << 16  # 4 M tokens in chunks of 64
MAX_BYTES = 4 << 20
MAC_BYTES = 32


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One chunk: the slab it lies in at the source, and its 16-byte digest."""

    slab: Count
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An offer of the KV of `terms.request`, held by `worker` in its life `incarnation`; chunks in token order."""

    terms: Terms
    worker: Text
    incarnation: Text
    chunks: Annotated[tuple[Chunk, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    version: Annotated[int, Meta(ge=1, le=1)] = 1

    @property
    def chunk_bytes(self) -> int:
        """Bytes that a pull of one chunk moves."""
        return math.prod(self.terms.shape) * ITEM_BYTES[self.terms.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes that a pull of every chunk moves."""
        return self.chunk_bytes * len(self.chunks)


class Hint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunks `start`, `start` + 1, ... of an attempt are being computed into `slabs` of `worker`, under `mark`.

    `mark` is that of the worker's board (`kvtransfer.board`), or `board.DONE` for chunks that are complete already. A
    later hint for the same chunk replaces an earlier one. It promises nothing: only the ticket does.
    """

    request: Text
    epoch: Count
    worker: Text
    incarnation: Text
    start: Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]
    slabs: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    mark: Annotated[int, Meta(ge=0, lt=1 << 48)]
    version: Annotated[int, Meta(ge=1, le=1)] = 1


def write(
    key: bytes,
    terms: Terms,
    worker: str,
    incarnation: str,
    slabs: Sequence[int],
    payload: Callable[[int, str], bytes],
) -> Ticket:
    """Digest the slabs of a finished prefill and make its ticket.

    `payload(slab, algorithm)` hashes the chunk in a slab (`kvtransfer.parts.Parts.payload`), which must not change from
    now on. `terms.num_chunks` slabs are expected, in token order.

    Raises:
        ValueError: there are fewer or more slabs than `terms` says.
    """
    if len(slabs) != terms.num_chunks:
        raise ValueError(f"{terms.num_tokens} tokens are {terms.num_chunks} chunks, not {len(slabs)} slabs")
    seal = Seal(key, terms)
    chunks = tuple(Chunk(slab, seal.bind(i, payload(slab, terms.algorithm))) for i, slab in enumerate(slabs))
    return Ticket(terms, worker, incarnation, chunks)


def encode(ticket: Ticket, key: bytes) -> bytes:
    """The ticket as it travels: msgpack and MAC."""
    return _sign(msgspec.msgpack.encode(ticket), key, "ticket")


def decode(raw: bytes, key: bytes) -> Ticket:
    """Read a ticket from outside.

    Raises:
        TransferError: it is too large, not signed with `key`, or malformed in any way; says which.
    """
    ticket = _read(raw, key, "ticket", Ticket)
    _check(ticket)
    return ticket


def encode_hint(hint: Hint, key: bytes) -> bytes:
    """The hint as it travels: msgpack and MAC. A ticket's MAC is never a hint's."""
    return _sign(msgspec.msgpack.encode(hint), key, "hint")


def decode_hint(raw: bytes, key: bytes) -> Hint:
    """Read a hint from outside.

    Raises:
        TransferError: it is too large, not signed with `key`, or malformed in any way; says which.
    """
    hint = _read(raw, key, "hint", Hint)
    if hint.start + len(hint.slabs) > MAX_CHUNKS or len(set(hint.slabs)) != len(hint.slabs):
        raise TransferError("a hint was refused", "its fields contradict each other")
    return hint


def expect(
    ticket: Ticket,
    *,
    request: str,
    epoch: int,
    num_tokens: int,
    dtype: str,
    shape: Sequence[int],
    fingerprint: str,
) -> None:
    """Hold a ticket against what this worker was told and what it runs.

    Raises:
        StaleTicket: names the first field that differs, with both values.
    """
    terms = ticket.terms
    pairs: list[tuple[str, object, object]] = [
        ("request", terms.request, request),
        ("epoch", terms.epoch, epoch),
        ("num_tokens", terms.num_tokens, num_tokens),
        ("dtype", terms.dtype, dtype),
        ("chunk shape", tuple(terms.shape), tuple(shape)),
        ("layers", tuple(terms.layers), (0, shape[0])),
        ("model fingerprint", terms.fingerprint, fingerprint),
    ]
    for name, offered, wanted in pairs:
        if offered != wanted:
            raise StaleTicket(f"the ticket is for another {name}", f"offered: {offered}\nhere:    {wanted}")


def _check(ticket: Ticket) -> None:
    terms = ticket.terms
    sound = (
        terms.algorithm in HASHES
        and terms.dtype in ITEM_BYTES
        and min(terms.shape) > 0
        and terms.layers[0] < terms.layers[1]
        and terms.layers[1] - terms.layers[0] == terms.shape[0]
        and len(ticket.chunks) == terms.num_chunks
        and len({chunk.slab for chunk in ticket.chunks}) == len(ticket.chunks)
    )
    if not sound:
        raise TransferError("a ticket was refused", "its fields contradict each other")


T = TypeVar("T", Ticket, Hint)


def _read(raw: bytes, key: bytes, what: str, kind: type[T]) -> T:
    if not MAC_BYTES < len(raw) <= MAX_BYTES:
        raise TransferError(f"a {what} was refused", f"it has {len(raw)} bytes, of at most {MAX_BYTES}")
    body, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
    if not hmac.compare_digest(_mac(body, key, what), mac):
        raise TransferError(f"a {what} was refused", "its signature is not of this deployment's key")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # also from a peer of another version
        raise TransferError(f"a {what} was refused", f"malformed: {error}") from error


def _sign(body: bytes, key: bytes, what: str) -> bytes:
    return body + _mac(body, key, what)


def _mac(body: bytes, key: bytes, what: str) -> bytes:
    return hmac.new(key, f"diptych {what} 1".encode() + b"\0" + body, hashlib.sha256).digest()
