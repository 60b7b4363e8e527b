"""Addresses of chunks, and what the tree of them keeps, forgets and costs."""

from __future__ import annotations

import hashlib
import random
import struct
import tracemalloc
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.hashing import hash_fields
from kvcache.prefix_tree import PrefixNode, PrefixTree, chunk_keys, root_key

ROOT = root_key("model", "scope")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)
FIELDS = st.tuples(*[st.text(max_size=4)] * 4)


def path(tree: PrefixTree, keys: list[bytes], first_slab: int) -> list[PrefixNode]:
    """Insert and hold `keys`, a path; the first of them may be known."""
    nodes = tree.match_prefix(keys)
    tree.lock_nodes(nodes)
    for key in keys[len(nodes) :]:
        nodes.append(tree.insert_chunk(key, first_slab + len(nodes), nodes[-1] if nodes else None))
    return nodes


def test_an_address_covers_the_64_tokens_and_all_before_them() -> None:
    tokens = list(range(1000, 1129))
    first = hash_fields([ROOT, struct.pack("<64I", *tokens[:64])])
    second = hash_fields([first, struct.pack("<64I", *tokens[64:128])])
    assert chunk_keys(tokens, ROOT) == [first, second]
    assert chunk_keys(tokens[:127], ROOT) == [first]
    assert chunk_keys(tokens[:63], ROOT) == []


@given(tokens=TOKENS, known=st.integers(0, 3))
def test_known_addresses_are_continued_in_place(tokens: list[int], known: int) -> None:
    whole = chunk_keys(tokens, ROOT)
    part = whole[:known]
    assert chunk_keys(tokens, ROOT, part) is part
    assert part == whole


@given(
    tokens=TOKENS.filter(lambda tokens: len(tokens) >= 64), at=st.integers(0, 199), other=st.integers(0, 9)
)
def test_one_other_token_changes_its_address_and_all_after_it(tokens: list[int], at: int, other: int) -> None:
    at %= len(tokens)
    changed = [*tokens[:at], other, *tokens[at + 1 :]]
    same = [a == b for a, b in zip(chunk_keys(tokens, ROOT), chunk_keys(changed, ROOT), strict=True)]
    expected = len(same) if tokens == changed else at // 64
    assert same == [place < expected for place in range(len(same))]


@given(one=FIELDS, two=FIELDS)
def test_scopes_models_codecs_and_variants_never_meet(
    one: tuple[str, str, str, str], two: tuple[str, str, str, str]
) -> None:
    """Not even where the fields read the same one after the other, as "ab", "c" and "a", "bc" do."""
    tokens = [1] * 128
    met = set(chunk_keys(tokens, root_key(*one))) & set(chunk_keys(tokens, root_key(*two)))
    assert bool(met) == (one == two)


def test_without_a_root_nothing_has_an_address() -> None:
    assert chunk_keys([1] * 128, b"") == []


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_none_is_refused(token: int) -> None:
    with pytest.raises(struct.error):
        chunk_keys([token] * 64, ROOT)


def test_leaves_go_before_their_parents_and_the_longest_unused_first() -> None:
    tree = PrefixTree()
    left, right = chunk_keys([1] * 192, ROOT), chunk_keys([1] * 64 + [2] * 128, ROOT)
    first, second = path(tree, left, 10), path(tree, right, 20)
    tree.unlock_nodes(second)
    tree.unlock_nodes(first)
    tree.check_books()
    # `right` was let go before `left`, and the chunk they share is above both.
    assert tree.evict_chunks(2) == [22, 21]
    assert tree.evict_chunks(9) == [12, 11, 10]
    assert len(tree) == tree.num_unheld == 0


def test_what_is_held_is_not_evicted_and_being_held_is_being_used() -> None:
    tree = PrefixTree()
    old, new = path(tree, chunk_keys([1] * 128, ROOT), 0), path(tree, chunk_keys([2] * 128, ROOT), 2)
    tree.unlock_nodes(old)
    tree.unlock_nodes(new)
    tree.lock_nodes(old)
    assert tree.num_unheld == 2
    assert tree.evict_chunks(4) == [3, 2]
    tree.unlock_nodes(old)
    assert tree.evict_chunks(4) == [1, 0]


def test_looking_is_not_using() -> None:
    tree = PrefixTree()
    for slab, token in enumerate((1, 2)):
        tree.unlock_nodes(path(tree, chunk_keys([token] * 64, ROOT), slab))
    assert [node.slab for node in tree.match_prefix(chunk_keys([1] * 64, ROOT))] == [0]
    assert tree.evict_chunks(1) == [0]


def test_misuse_is_refused_and_changes_nothing() -> None:
    tree = PrefixTree()
    keys = chunk_keys([1] * 128, ROOT)
    nodes = path(tree, keys[:1], 0)
    with pytest.raises(ValueError, match="already"):
        tree.insert_chunk(keys[0], 1, None)
    tree.unlock_nodes(nodes)
    with pytest.raises(ValueError, match="nobody holds"):
        tree.insert_chunk(keys[1], 1, nodes[0])
    with pytest.raises(ValueError, match="cannot be released"):
        tree.unlock_nodes(nodes)
    tree.check_books()
    assert (len(tree), tree.num_unheld) == (1, 1)


@pytest.mark.parametrize("damage", ["children", "slab", "unheld", "order", "parent", "refs"])
def test_check_finds_broken_books(damage: str) -> None:
    tree = PrefixTree()
    nodes = path(tree, chunk_keys([1] * 192, ROOT), 0)
    tree.unlock_nodes(nodes)
    if damage == "children":
        nodes[0].children += 1
    elif damage == "slab":
        nodes[0].slab = nodes[1].slab
    elif damage == "unheld":
        tree._unheld.popitem()
    elif damage == "order":
        tree._unheld.move_to_end(nodes[2].key)
    elif damage == "parent":
        del tree._nodes[nodes[0].key]
    else:
        tree.lock_nodes(nodes[1:])
    with pytest.raises(AssertionError):
        tree.check_books()


def test_a_chunk_costs_at_most_half_a_kilobyte_however_often_it_comes_and_goes() -> None:
    """A slab of the smallest model is a thousand times that; there are never more chunks than slabs."""
    count, held = 10_000, []
    tracemalloc.start()
    try:
        tree = PrefixTree()
        for round_number in range(4):
            for slab in range(count):
                key = hashlib.sha256(f"{round_number} {slab}".encode()).digest()
                nodes = [tree.insert_chunk(key, slab, None)]
                tree.unlock_nodes(nodes)
                tree.lock_nodes(nodes)
                tree.unlock_nodes(nodes)
            held.append(tracemalloc.get_traced_memory()[0])
            tree.evict_chunks(count)
    finally:
        tracemalloc.stop()
    assert max(held) <= 512 * count


def distances(trace: list[list[bytes]], capacity: int) -> float:
    """The share of chunks that an LRU store of `capacity` chunks hits, from the whole trace at once.

    A chunk is hit if fewer than `capacity` other ones were used since it was; of a prefix, parents count as used after
    their children.
    """
    last: dict[bytes, int] = {}
    hits = total = now = 0
    for keys in trace:
        stamps = sorted(last.values(), reverse=True)
        oldest = stamps[min(capacity, len(stamps)) - 1] if stamps else 0
        total += len(keys)
        hits += sum(last.get(key, -1) >= oldest for key in keys)
        for key in reversed(keys):
            now += 1
            last[key] = now
    return hits / total


@pytest.mark.parametrize("capacity", [60, 200, 500])
def test_hit_rate_of_a_zipf_trace_is_that_of_an_offline_lru(capacity: int) -> None:
    """kv_papers §6.B 6: 200 prefixes, Zipf(1.1), each request with 2 chunks of its own; within 3 % of the oracle."""
    draw = random.Random(1)
    prefixes = [[rank] * (64 * draw.randint(1, 12)) for rank in range(200)]
    weights = list(accumulate(1 / (rank + 1) ** 1.1 for rank in range(200)))
    chosen = draw.choices(prefixes, cum_weights=weights, k=3000)
    trace = [chunk_keys([*prefix, *[1000 + i] * 128], ROOT) for i, prefix in enumerate(chosen)]
    tree, idle = PrefixTree(), list(range(capacity))
    hits = 0
    for keys in trace:
        nodes = tree.match_prefix(keys)
        tree.lock_nodes(nodes)
        hits += len(nodes)
        missing = keys[len(nodes) :]
        idle += tree.evict_chunks(len(missing) - len(idle))
        for key in missing:
            nodes.append(tree.insert_chunk(key, idle.pop(), nodes[-1] if nodes else None))
        tree.unlock_nodes(nodes)
    tree.check_books()
    rate, oracle = hits / sum(map(len, trace)), distances(trace, capacity)
    assert rate == pytest.approx(oracle, rel=0.03)
    assert 0.15 < rate < 0.9  # neither everything nor nothing fits
