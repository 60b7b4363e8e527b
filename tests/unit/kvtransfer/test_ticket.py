"""Tickets: round trip, refusal of everything that is not exactly ours, and what their digests are bound to."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import StaleTicket, TransferError
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from kvcache.eviction.kept_segments import KeptSegment
from kvcache.layout import KvLayout
from kvtransfer import ticket as tickets
from kvtransfer.digests import (
    DIGEST_BYTES,
    HASH_FUNCTIONS,
    MAX_CHUNK_BYTES,
    STREAM_HASHERS,
    BagSplit,
    ChunkDigester,
    DigestContext,
)
from kvtransfer.ticket import StagingHint

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
    "chunk_bytes": SLAB_BYTES,
    "codec": "",
    "algorithm": "xxh3",
    "keep": KEEP_ALL,
    "num_bag_slabs": 0,
}
# Of 130 tokens the first chunk stays whole, and what is kept of the others is in two slabs.
EVICTED: dict[str, object] = {"keep": KeepSpec(0.95, 64), "num_bag_slabs": 2}
LAYOUT = KvLayout(2, 2, 4, "float32")
# Two codecs of the same size, and one codec with two calibrations.
CODED = [
    replace(LAYOUT, codec=codec) for codec in ("int8.g4", "nuq4-1%.g8@" + "0" * 16, "nuq4-1%.g8@" + "1" * 16)
]


def terms(**changes: object) -> DigestContext:
    return DigestContext(**{**BASE, **changes})  # type: ignore[arg-type]


def payload(slab: int, algorithm: str) -> bytes:
    return HASH_FUNCTIONS[algorithm](bytes([0, slab]) * (SLAB_BYTES // 2))


def written() -> tickets.Ticket:
    return tickets.issue_ticket(KEY, terms(), "prefill-0", "life-1", [5, 0, 7], payload)


def evicted() -> tickets.Ticket:
    return tickets.issue_ticket(KEY, terms(**EVICTED), "prefill-0", "life-1", [5, 0, 7], payload)


def test_a_ticket_survives_the_wire() -> None:
    ticket = written()
    assert tickets.decode_ticket(tickets.encode_ticket(ticket, KEY), KEY) == ticket
    assert ticket.num_bytes == 3 * SLAB_BYTES
    assert (LAYOUT.chunk_shape, LAYOUT.chunk_bytes) == (SHAPE, SLAB_BYTES)


def coded_ticket(layout: KvLayout) -> tickets.Ticket:
    coded = terms(codec=layout.codec, chunk_bytes=layout.chunk_bytes)
    return tickets.issue_ticket(KEY, coded, "prefill-0", "life-1", [5, 0, 7], payload)


@pytest.mark.parametrize("layout", CODED, ids=lambda layout: layout.codec)
def test_a_ticket_of_coded_kv_counts_coded_bytes(layout: KvLayout) -> None:
    ticket = tickets.decode_ticket(tickets.encode_ticket(coded_ticket(layout), KEY), KEY)
    assert ticket.num_bytes == 3 * layout.chunk_bytes < 3 * SLAB_BYTES
    tickets.check_ticket(ticket, **expected_terms(layout=layout))


@pytest.mark.parametrize("offered", [LAYOUT, *CODED], ids=lambda layout: layout.kv_class)
@pytest.mark.parametrize("here", [LAYOUT, *CODED], ids=lambda layout: layout.kv_class)
def test_a_ticket_of_another_codec_or_calibration_is_refused_by_name(
    offered: KvLayout, here: KvLayout
) -> None:
    ticket = coded_ticket(offered)
    if offered == here:
        tickets.check_ticket(ticket, **expected_terms(layout=here))
        return
    with pytest.raises(StaleTicket, match="for another KV codec") as caught:
        tickets.check_ticket(ticket, **expected_terms(layout=here))
    assert caught.value.why == f"offered: {offered.kv_class}\nhere:    {here.kv_class}"


def test_a_ticket_whose_pages_have_another_size_is_stale() -> None:
    """A codec whose pages have changed keeps its name; the sizes tell."""
    bad = tickets.issue_ticket(
        KEY,
        terms(codec=CODED[0].codec, chunk_bytes=CODED[0].chunk_bytes + 64),
        "prefill-0",
        "life-1",
        [5, 0, 7],
        payload,
    )
    with pytest.raises(StaleTicket, match="another chunk size"):
        tickets.check_ticket(bad, **expected_terms(layout=CODED[0]))


@given(st.data())
def test_no_changed_byte_is_accepted(data: st.DataObject) -> None:
    raw = bytearray(tickets.encode_ticket(written(), KEY))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferError):
        tickets.decode_ticket(bytes(raw), KEY)


@given(st.binary(max_size=300))
def test_signed_rubbish_is_refused(body: bytes) -> None:
    """Even the holder of the key cannot make `decode` fail in any other way."""
    with pytest.raises(TransferError):
        tickets.decode_ticket(body + tickets._compute_mac(body, KEY, "ticket"), KEY)


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 100])
def test_truncated_tickets_are_refused(cut: int) -> None:
    with pytest.raises(TransferError):
        tickets.decode_ticket(tickets.encode_ticket(written(), KEY)[:-cut], KEY)


def test_another_key_and_too_much_are_refused() -> None:
    raw = tickets.encode_ticket(written(), KEY)
    with pytest.raises(TransferError, match="refused"):
        tickets.decode_ticket(raw, b"x" * 32)
    with pytest.raises(TransferError, match="refused"):
        tickets.decode_ticket(raw + bytes(tickets.MAX_TICKET_BYTES), KEY)


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
        {"chunk_bytes": SLAB_BYTES + 64},
        {"chunk_bytes": 0, "codec": "tq4.s0"},
        {"chunk_bytes": 2 * MAX_CHUNK_BYTES, "codec": "tq4.s0"},
        {"codec": "x" * 81},
        {"keep": KeepSpec(0.95)},
        {"keep": KeepSpec(1.0, 64)},
        {"num_bag_slabs": 3},
        {"bag": BagSplit(2, 1)},
    ],
)
def test_fields_that_contradict_each_other_are_refused(change: dict[str, object]) -> None:
    ticket = written()
    bad = msgspec.structs.replace(ticket, context=msgspec.structs.replace(ticket.context, **change))
    with pytest.raises(TransferError):
        tickets.decode_ticket(tickets.encode_ticket(bad, KEY), KEY)


def test_the_slabs_of_an_evicted_sequence_follow_from_prefix_and_bag() -> None:
    ticket = tickets.decode_ticket(tickets.encode_ticket(evicted(), KEY), KEY)
    assert ticket == evicted() and ticket.num_bytes == 3 * SLAB_BYTES
    assert [ticket.context.valid_tokens(index) for index in range(3)] == [64, 0, 0]
    longer = msgspec.structs.replace(ticket, context=msgspec.structs.replace(ticket.context, num_tokens=1000))
    assert longer.context.num_chunks == 3
    tickets.check_ticket(ticket, **expected_terms(keep=KeepSpec(0.95, 64)))


@pytest.mark.parametrize(
    "change",
    [
        {"keep": KEEP_ALL},
        {"keep": KeepSpec(1.0, 64)},
        {"keep": KeepSpec(0.95, 0)},
        {"keep": KeepSpec(0.95, 128)},
        {"keep": KeepSpec(0.95, 192)},
        {"keep": KeepSpec(0.95, 1 << 40)},
        {"num_bag_slabs": 0},
        {"num_bag_slabs": 1},
        {"num_bag_slabs": 3},
        {"num_bag_slabs": -1},
        {"num_bag_slabs": 2**31},
        {"num_tokens": 63},
        {"num_tokens": 64},
        {"shape": (2, 2, 2, 32, 8)},
    ],
)
def test_fields_of_an_evicted_sequence_that_contradict_each_other_are_refused(
    change: dict[str, object],
) -> None:
    """Among them: a bag without a slab for its map, one that needs more than its tokens do, another chunk size."""
    ticket = evicted()
    bad = msgspec.structs.replace(ticket, context=msgspec.structs.replace(ticket.context, **change))
    with pytest.raises(TransferError):
        tickets.decode_ticket(tickets.encode_ticket(bad, KEY), KEY)
    if min(bad.context.num_chunks, bad.context.num_tokens) > 0 and bad.context.num_chunks < 1000:
        with pytest.raises(ValueError):
            slabs = list(range(3))
            tickets.issue_ticket(KEY, bad.context, "prefill-0", "life-1", slabs, payload)


@pytest.mark.parametrize(
    "split",
    [
        BagSplit(0, 1),
        BagSplit(1, 0),
        BagSplit(2000, 1),
        BagSplit(1, 1, (-1,)),
        BagSplit(1, 1, (2**31,)),
        BagSplit(1, 1, (1,), (-1,)),
        BagSplit(1, 1, (1,), (1,), (2**31,)),
    ],  # fmt: skip
)
def test_a_bag_with_an_impossible_split_is_refused(split: BagSplit) -> None:
    bad = msgspec.structs.replace(evicted(), context=msgspec.structs.replace(evicted().context, bag=split))
    with pytest.raises(TransferError):
        tickets.decode_ticket(tickets.encode_ticket(bad, KEY), KEY)


@pytest.mark.parametrize(
    ("threshold", "boundary"), [(0.0, 64), (1.5, 64), (float("nan"), 64), (0.95, 63), (0.95, -64)]
)
def test_a_ticket_with_an_impossible_keep_spec_is_malformed(threshold: float, boundary: int) -> None:
    """`KeepSpec` refuses such values, so a hostile ticket is written without it."""
    body = msgspec.to_builtins(evicted())
    body[0][-2] = [threshold, boundary]
    raw = msgspec.msgpack.encode(body)
    with pytest.raises(TransferError, match="refused") as caught:
        tickets.decode_ticket(raw + tickets._compute_mac(raw, KEY, "ticket"), KEY)
    assert "malformed" in caught.value.why


@given(data=st.data())
def test_no_changed_byte_of_an_evicted_ticket_is_accepted(data: st.DataObject) -> None:
    raw = bytearray(tickets.encode_ticket(evicted(), KEY))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferError):
        tickets.decode_ticket(bytes(raw), KEY)


@pytest.mark.parametrize(
    ("offered", "here", "what", "why"),
    [
        (EVICTED, KEEP_ALL, "eviction threshold", "offered: 0.95\nhere:    1.0"),
        ({}, KeepSpec(0.95, 64), "eviction threshold", "offered: 1.0\nhere:    0.95"),
        (EVICTED, KeepSpec(0.9, 64), "eviction threshold", "offered: 0.95\nhere:    0.9"),
        (EVICTED, KeepSpec(0.95, 0), "eviction boundary", "offered: 64\nhere:    0"),
    ],
)
def test_a_ticket_of_another_keep_spec_names_both_sides(
    offered: dict[str, object], here: KeepSpec, what: str, why: str
) -> None:
    ticket = tickets.issue_ticket(KEY, terms(**offered), "prefill-0", "life-1", [5, 0, 7], payload)
    with pytest.raises(StaleTicket, match=f"for another {what}") as caught:
        tickets.check_ticket(ticket, **expected_terms(keep=here))
    assert caught.value.why == why


def test_two_chunks_in_one_slab_are_refused() -> None:
    ticket = written()
    bad = msgspec.structs.replace(ticket, chunks=(ticket.chunks[0],) * 3)
    with pytest.raises(TransferError):
        tickets.decode_ticket(tickets.encode_ticket(bad, KEY), KEY)


def expected_terms(**changes: Any) -> dict[str, Any]:
    expected = {"request": "req-1", "epoch": 3, "num_tokens": 130, "layout": LAYOUT, "fingerprint": "ab" * 32}
    return expected | changes


def test_an_expected_ticket_is_let_through() -> None:
    tickets.check_ticket(written(), **expected_terms())


@pytest.mark.parametrize(
    "other",
    [
        {"request": "req-2"},
        {"epoch": 4},
        {"num_tokens": 131},
        {"layout": replace(LAYOUT, dtype="float16")},
        {"layout": replace(LAYOUT, head_dim=8)},
        {"fingerprint": "cd" * 32},
    ],
)
def test_a_ticket_for_something_else_is_stale(other: dict[str, Any]) -> None:
    with pytest.raises(StaleTicket) as caught:
        tickets.check_ticket(written(), **expected_terms(**other))
    assert "offered" in caught.value.why and "here" in caught.value.why


def test_writing_needs_a_slab_per_chunk() -> None:
    with pytest.raises(ValueError, match="3 chunks"):
        tickets.issue_ticket(KEY, terms(), "prefill-0", "life-1", [1, 2], payload)


@pytest.mark.parametrize("algorithm", sorted(HASH_FUNCTIONS))
def test_digests_are_bound_to_every_term(algorithm: str) -> None:
    """The same bytes under any other term, or at another index, do not verify."""
    base = terms(algorithm=algorithm)
    payload = HASH_FUNCTIONS[algorithm](b"payload" * 1000)
    seal = ChunkDigester(KEY, base)
    promised = seal.digest_chunk(1, payload)
    assert len(promised) == len(payload) == DIGEST_BYTES
    assert seal.matches_chunk(1, payload, promised)
    others: dict[str, object] = {
        "request": "req-2",
        "epoch": 4,
        "num_tokens": 129,
        "layers": (1, 3),
        "dtype": "float16",
        "shape": (2, 2, 2, 64, 8),
        "fingerprint": "cd" * 32,
        "chunk_bytes": SLAB_BYTES + 64,
        "codec": CODED[1].codec,
        "algorithm": next(name for name in HASH_FUNCTIONS if name != algorithm),
        "keep": KeepSpec(0.95),
        "num_bag_slabs": 1,
        "bag": BagSplit(2, 1),
        "segments": (KeptSegment(3, 2, bytes(16)),),
    }
    assert set(others) == set(base.__struct_fields__)
    assert base.codec == ""
    for name, value in others.items():
        other = ChunkDigester(KEY, terms(**{"algorithm": algorithm, name: value}))
        assert not other.matches_chunk(1, payload, promised), name
    # The same numbers in other places are another split.
    ones = [(1, 1, 1), (1, 1), (1,), ()]
    splits = [
        BagSplit(1, 2), BagSplit(1, 1, ones[0]), BagSplit(1, 1, ones[1], ones[2]), BagSplit(1, 1, ones[2], ones[1]),
        BagSplit(1, 1, ones[1], ones[3], ones[2]), BagSplit(1, 1, ones[2], ones[2], ones[2]),
    ]  # fmt: skip
    sealed = [ChunkDigester(KEY, terms(algorithm=algorithm, bag=split)) for split in splits]
    assert len({one.digest_chunk(1, payload) for one in [seal, *sealed]}) == 1 + len(splits)
    assert not seal.matches_chunk(0, payload, promised) and not seal.matches_chunk(2, payload, promised)
    assert not ChunkDigester(b"another key, long enough", base).matches_chunk(1, payload, promised)
    assert not seal.matches_chunk(1, os.urandom(DIGEST_BYTES), promised)


@pytest.mark.parametrize("algorithm", sorted(HASH_FUNCTIONS))
@given(data=st.binary(max_size=500), cut=st.integers(0, 500))
def test_hashing_in_pieces_is_hashing(algorithm: str, data: bytes, cut: int) -> None:
    hasher = STREAM_HASHERS[algorithm]()
    hasher.update(data[:cut])
    hasher.update(data[cut:])
    assert hasher.digest() == HASH_FUNCTIONS[algorithm](data)


def test_digests_of_a_bag_are_bound_to_threshold_boundary_and_size() -> None:
    base = terms(**EVICTED)
    promised = ChunkDigester(KEY, base).digest_chunk(1, b"x" * 16)
    for other in (
        {"keep": KeepSpec(0.9499999999999999, 64)},
        {"keep": KeepSpec(0.95, 128)},
        {"num_bag_slabs": 3},
        {"num_tokens": 194},
    ):
        changed = ChunkDigester(KEY, terms(**(EVICTED | other)))
        assert not changed.matches_chunk(1, b"x" * 16, promised), other
    assert ChunkDigester(KEY, base).matches_chunk(1, b"x" * 16, promised)


def test_a_request_name_cannot_slide_into_the_next_field() -> None:
    one, two = (ChunkDigester(KEY, terms(request=name)) for name in ("a", "a1"))
    assert one.digest_chunk(0, b"x" * 16) != two.digest_chunk(0, b"x" * 16)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        ChunkDigester(b"short", terms())


def hinted(**changes: object) -> StagingHint:
    fields: dict[str, object] = {
        "request": "r",
        "epoch": 2,
        "worker": "prefill-0",
        "incarnation": "life",
        "start": 3,
        "slabs": (7, 9),
        "mark": 41,
    }
    return StagingHint(**(fields | changes))  # type: ignore[arg-type]


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
        tickets.decode_hint(body + tickets._compute_mac(body, KEY, "hint"), KEY)


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
    ticket, hint = tickets.encode_ticket(written(), KEY), tickets.encode_hint(hinted(), KEY)
    for decode, raw in ((tickets.decode_ticket, hint), (tickets.decode_hint, ticket)):
        with pytest.raises(TransferError) as caught:
            decode(raw, KEY)
        assert "signature" in caught.value.why
