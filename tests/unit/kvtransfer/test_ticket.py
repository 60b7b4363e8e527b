"""Tickets: round trip, refusal of everything that is not exactly ours, and what their digests are bound to."""

from __future__ import annotations

import dataclasses
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import StaleTicket, TransferError
from kvtransfer import ticket as tickets
from kvtransfer.digests import DIGEST_BYTES, HASHERS, HASHES, Seal, Terms
from kvtransfer.ticket import Hint

KEY = b"k" * 32
SHAPE = (2, 2, 2, 64, 4)
SLAB_BYTES = 2 * 2 * 2 * 64 * 4 * 4


BASE: dict[str, object] = {
    "request": "req-1",
    "epoch": 3,
    "num_tokens": 130,
    "layers": (0, 2),
    "dtype": "float32",
    "shape": SHAPE,
    "fingerprint": "ab" * 32,
    "algorithm": "xxh3",
}


def terms(**changes: object) -> Terms:
    return Terms(**{**BASE, **changes})  # type: ignore[arg-type]


def payload(slab: int, algorithm: str) -> bytes:
    return HASHES[algorithm](bytes([0, slab]) * (SLAB_BYTES // 2))


def written() -> tickets.Ticket:
    return tickets.write(KEY, terms(), "prefill-0", "life-1", [5, 0, 7], payload)


def test_a_ticket_survives_the_wire() -> None:
    ticket = written()
    assert tickets.decode(tickets.encode(ticket, KEY), KEY) == ticket
    assert (ticket.chunk_bytes, ticket.num_bytes) == (SLAB_BYTES, 3 * SLAB_BYTES)


@given(st.data())
def test_no_changed_byte_is_accepted(data: st.DataObject) -> None:
    raw = bytearray(tickets.encode(written(), KEY))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferError):
        tickets.decode(bytes(raw), KEY)


@given(st.binary(max_size=300))
def test_signed_rubbish_is_refused(body: bytes) -> None:
    """Even the holder of the key cannot make `decode` fail in any other way."""
    with pytest.raises(TransferError):
        tickets.decode(body + tickets._mac(body, KEY, "ticket"), KEY)


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 100])
def test_truncated_tickets_are_refused(cut: int) -> None:
    with pytest.raises(TransferError):
        tickets.decode(tickets.encode(written(), KEY)[:-cut], KEY)


def test_another_key_and_too_much_are_refused() -> None:
    raw = tickets.encode(written(), KEY)
    with pytest.raises(TransferError, match="refused"):
        tickets.decode(raw, b"x" * 32)
    with pytest.raises(TransferError, match="refused"):
        tickets.decode(raw + bytes(tickets.MAX_BYTES), KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "crc32"},
        {"dtype": "int8"},
        {"layers": (0, 3)},
        {"layers": (2, 2)},
        {"num_tokens": 64},
        {"num_tokens": 193},
        {"shape": (2, 2, 2, 0, 4)},
    ],
)
def test_fields_that_contradict_each_other_are_refused(change: dict[str, object]) -> None:
    ticket = written()
    bad = msgspec.structs.replace(ticket, terms=msgspec.structs.replace(ticket.terms, **change))
    with pytest.raises(TransferError):
        tickets.decode(tickets.encode(bad, KEY), KEY)


def test_two_chunks_in_one_slab_are_refused() -> None:
    ticket = written()
    bad = msgspec.structs.replace(ticket, chunks=(ticket.chunks[0],) * 3)
    with pytest.raises(TransferError):
        tickets.decode(tickets.encode(bad, KEY), KEY)


@dataclasses.dataclass
class Here:
    request: str = "req-1"
    epoch: int = 3
    num_tokens: int = 130
    dtype: str = "float32"
    shape: tuple[int, ...] = SHAPE
    fingerprint: str = "ab" * 32


def test_an_expected_ticket_is_let_through() -> None:
    tickets.expect(written(), **dataclasses.asdict(Here()))


@pytest.mark.parametrize(
    "other",
    [
        Here(request="req-2"),
        Here(epoch=4),
        Here(num_tokens=131),
        Here(dtype="float16"),
        Here(shape=(2, 2, 2, 64, 8)),
        Here(fingerprint="cd" * 32),
    ],
)
def test_a_ticket_for_something_else_is_stale(other: Here) -> None:
    with pytest.raises(StaleTicket) as caught:
        tickets.expect(written(), **dataclasses.asdict(other))
    assert "offered" in caught.value.why and "here" in caught.value.why


def test_writing_needs_a_slab_per_chunk() -> None:
    with pytest.raises(ValueError, match="3 chunks"):
        tickets.write(KEY, terms(), "prefill-0", "life-1", [1, 2], payload)


@pytest.mark.parametrize("algorithm", sorted(HASHES))
def test_digests_are_bound_to_every_term(algorithm: str) -> None:
    """The same bytes under any other term, or at another index, do not verify."""
    base = terms(algorithm=algorithm)
    payload = HASHES[algorithm](b"payload" * 1000)
    seal = Seal(KEY, base)
    promised = seal.bind(1, payload)
    assert len(promised) == len(payload) == DIGEST_BYTES
    assert seal.matches(1, payload, promised)
    others: dict[str, object] = {
        "request": "req-2",
        "epoch": 4,
        "num_tokens": 129,
        "layers": (1, 3),
        "dtype": "float16",
        "shape": (2, 2, 2, 64, 8),
        "fingerprint": "cd" * 32,
        "algorithm": next(name for name in HASHES if name != algorithm),
    }
    assert set(others) == set(base.__struct_fields__)
    for name, value in others.items():
        other = Seal(KEY, terms(**{"algorithm": algorithm, name: value}))
        assert not other.matches(1, payload, promised), name
    assert not seal.matches(0, payload, promised) and not seal.matches(2, payload, promised)
    assert not Seal(b"another key, long enough", base).matches(1, payload, promised)
    assert not seal.matches(1, os.urandom(DIGEST_BYTES), promised)


@pytest.mark.parametrize("algorithm", sorted(HASHES))
@given(data=st.binary(max_size=500), cut=st.integers(0, 500))
def test_hashing_in_pieces_is_hashing(algorithm: str, data: bytes, cut: int) -> None:
    hasher = HASHERS[algorithm]()
    hasher.update(data[:cut])
    hasher.update(data[cut:])
    assert hasher.digest() == HASHES[algorithm](data)


def test_a_request_name_cannot_slide_into_the_next_field() -> None:
    one, two = (Seal(KEY, terms(request=name)) for name in ("a", "a1"))
    assert one.bind(0, b"x" * 16) != two.bind(0, b"x" * 16)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Seal(b"short", terms())


def hinted(**changes: object) -> Hint:
    fields: dict[str, object] = {
        "request": "r",
        "epoch": 2,
        "worker": "prefill-0",
        "incarnation": "life",
        "start": 3,
        "slabs": (7, 9),
        "mark": 41,
    }
    return Hint(**(fields | changes))  # type: ignore[arg-type]


def test_hints_travel() -> None:
    assert tickets.decode_hint(tickets.encode_hint(hinted(), KEY), KEY) == hinted()


@given(st.data())
def test_no_changed_byte_of_a_hint_is_accepted(data: st.DataObject) -> None:
    raw = bytearray(tickets.encode_hint(hinted(), KEY))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferError, match="hint"):
        tickets.decode_hint(bytes(raw), KEY)


@given(st.binary(max_size=300))
def test_a_signed_hint_of_rubbish_is_refused(body: bytes) -> None:
    with pytest.raises(TransferError):
        tickets.decode_hint(body + tickets._mac(body, KEY, "hint"), KEY)


@pytest.mark.parametrize(
    "changes",
    [
        {"slabs": ()},
        {"slabs": (7, 7)},
        {"slabs": (-1,)},
        {"start": -1},
        {"start": tickets.MAX_CHUNKS},
        {"mark": -1},
        {"mark": 1 << 48},
        {"version": 2},
        {"request": ""},
    ],
)
def test_hints_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(TransferError):
        tickets.decode_hint(tickets.encode_hint(hinted(**changes), KEY), KEY)


def test_a_ticket_is_no_hint_and_a_hint_no_ticket() -> None:
    """Not even with the bytes of one: their signatures differ."""
    ticket, hint = tickets.encode(written(), KEY), tickets.encode_hint(hinted(), KEY)
    for decode, raw in ((tickets.decode, hint), (tickets.decode_hint, ticket)):
        with pytest.raises(TransferError) as caught:
            decode(raw, KEY)
        assert "signature" in caught.value.why
