"""What is guessed about workers' caches: equal prefixes of one scope, bounded, oldest ends first."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from diptych.chunks import CHUNK_TOKENS
from router.routing.prefix_index import PrefixIndex

PLENTY = 1 << 20


def tokens(chunks: int, seed: int = 0, more: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1 << 31) for _ in range(chunks * CHUNK_TOKENS + more)]


def test_only_full_chunks_have_names_and_equal_prefixes_equal_ones() -> None:
    index, text = PrefixIndex(), tokens(3, more=63)
    names = index.name_chunks(text, "s")
    assert len(names) == len(set(names)) == 3
    assert index.name_chunks(text[:128], "s") == names[:2] == index.name_chunks(text[:191], "s")[:2]
    changed = [*text[:70], text[70] ^ 1, *text[71:]]
    assert index.name_chunks(changed, "s")[0] == names[0]
    assert not set(index.name_chunks(changed, "s")[1:]) & set(names), (
        "a chunk's name is of all before it, too"
    )
    assert index.name_chunks([], "s") == ()


def test_scopes_have_nothing_in_common() -> None:
    index, text = PrefixIndex(), tokens(4)
    assert not set(index.name_chunks(text, "one")) & set(index.name_chunks(text, "other"))
    index.record_sent("w", index.name_chunks(text, "one"), PLENTY)
    assert index.count_shared("w", index.name_chunks(text, "other")) == 0
    assert index.count_shared("w", index.name_chunks(text, "one")) == 4


@given(st.integers(0, 9), st.integers(0, 200), st.integers(0, 300))
def test_a_text_that_goes_on_keeps_the_names_of_its_beginning(seed: int, first: int, more: int) -> None:
    index, text = PrefixIndex(), tokens(8, seed)[: first + more]
    known = index.name_chunks(text[:first], "s")
    assert index.extend_names(known, text[:first], text[first:], "s") == index.name_chunks(text, "s")


def test_what_was_sent_is_shared_until_the_worker_is_gone() -> None:
    index, text = PrefixIndex(), tokens(4)
    names = index.name_chunks(text, "s")
    index.record_sent("a", names[:3], PLENTY)
    assert (index.count_shared("a", names), index.count_shared("b", names)) == (3, 0)
    assert (
        index.count_shared("a", names[1:]) == 2
    )  # by name; callers always ask for a prompt from its beginning
    index.forget_worker("a")
    index.forget_worker("b")
    assert (index.count_shared("a", names), len(index)) == (0, 0)


def test_the_oldest_ends_go_first_and_beginnings_stay() -> None:
    index = PrefixIndex()
    old, new = index.name_chunks(tokens(6, 1), "s"), index.name_chunks(tokens(6, 2), "s")
    index.record_sent("w", old, 8)
    index.record_sent("w", new, 8)
    assert (index.count_shared("w", old), index.count_shared("w", new), len(index)) == (2, 6, 8)
    index.record_sent("w", old[:1], 8)  # used again: its first chunk is younger than all others now
    index.record_sent("w", index.name_chunks(tokens(7, 3), "s"), 8)
    assert (index.count_shared("w", old), index.count_shared("w", new)) == (1, 0)


@given(st.integers(0, 1 << 32), st.integers(1, 40))
def test_it_is_bounded_and_closed_under_prefixes(seed: int, num_slabs: int) -> None:
    """No more names than slabs, and whoever has a chunk has all that it builds on."""
    draw, index = random.Random(seed), PrefixIndex(max_chunks=32)
    families = [index.name_chunks(tokens(9, 7) + tokens(5, n), "s") for n in range(4)] + [
        index.name_chunks(tokens(12, 9), "s")
    ]
    for _ in range(30):
        worker, chunks = draw.choice("ab"), draw.choice(families)
        index.record_sent(worker, chunks[: draw.randrange(len(chunks) + 1)], num_slabs)
        for held in (names for classes in index._held.values() for names in classes.values()):
            assert len(held) <= min(32, num_slabs)
            for family in families:
                flags = [name in held for name in family]
                assert flags == sorted(flags, reverse=True)


def test_classes_have_nothing_in_common() -> None:
    """Equal text is no hit in a pool of another class; a worker that is gone is forgotten in all of them."""
    index = PrefixIndex()
    names = index.name_chunks(tokens(3), "s")
    index.record_sent("w", names, PLENTY, "tq4.s0")
    assert index.count_shared("w", names) == index.count_shared("w", names, "tq4.s1") == 0
    index.record_sent("w", names[:1], PLENTY)
    assert (index.count_shared("w", names), index.count_shared("w", names, "tq4.s0"), len(index)) == (1, 3, 4)
    index.forget_worker("w")
    assert (index.count_shared("w", names, "tq4.s0"), len(index)) == (0, 0)


def test_with_no_room_nothing_is_expected() -> None:
    index = PrefixIndex(0)
    assert index.name_chunks(tokens(3), "s") == ()
    index.record_sent("w", PrefixIndex().name_chunks(tokens(3), "s"), PLENTY)
    assert len(index) == 0
