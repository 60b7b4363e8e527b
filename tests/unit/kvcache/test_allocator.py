"""What sequences hold, tested in short stories; every order of calls is in `test_allocator_machine.py`."""

from __future__ import annotations

import pytest

from diptych.errors import OutOfSlabs
from kvcache.allocator import TREE_OWNER, KvAllocator
from kvcache.prefix_tree import PrefixTree, chunk_keys, root_key
from kvcache.slab_ledger import SlabLedger

KEYS = chunk_keys(list(range(256)), root_key("model", ""))  # four chunks


def sharing(num_slabs: int = 8) -> KvAllocator:
    return KvAllocator(SlabLedger(num_slabs), PrefixTree())


def finished(num_slabs: int = 8) -> tuple[KvAllocator, list[int]]:
    """Holdings after a sequence of four chunks and a tail has come and gone; the chunks' slabs."""
    holdings = sharing(num_slabs)
    slabs = holdings.allocate("a#0", 5)
    holdings.publish("a#0", KEYS, slabs)
    holdings.release("a#0")
    return holdings, slabs[:4]


def test_full_chunks_outlive_their_sequence_and_its_tail_does_not() -> None:
    holdings, slabs = finished()
    assert (holdings.used, holdings.cached, holdings.free) == (0, 4, 8)
    assert holdings.ledger.count_by_owner() == {TREE_OWNER: 4}
    assert holdings.attach_prefix("b#0", KEYS[:3]) == slabs[:3]
    assert (holdings.used, holdings.cached, holdings.free) == (3, 1, 5)
    assert (holdings.prefix_queries, holdings.prefix_hits) == (192, 192)


def test_cached_chunks_make_way_but_leased_ones_do_not() -> None:
    holdings, slabs = finished()
    holdings.attach_prefix("b#0", KEYS[:2])
    assert holdings.free == 6
    with pytest.raises(OutOfSlabs, match="6 slabs to give of 8, and 7"):
        holdings.allocate("c#0", 7)
    assert holdings.count_cached(KEYS) == 4, "what could not be given is not evicted for it"
    assert not set(holdings.allocate("c#0", 6)) & set(slabs[:2])
    assert holdings.count_cached(KEYS) == 2
    holdings.check_books()


def test_what_is_not_to_be_kept_goes_unless_others_need_it() -> None:
    holdings, _ = finished()
    holdings.attach_prefix("b#0", KEYS[:2])
    holdings.attach_prefix("c#0", KEYS)
    holdings.release("c#0", keep=False)
    assert holdings.count_cached(KEYS) == 2 and holdings.cached == 0, "the other one holds these"
    holdings.release("b#0", keep=False)
    assert holdings.count_cached(KEYS) == holdings.ledger.used == 0
    holdings.check_books()


def test_two_that_computed_the_same_keep_it_once() -> None:
    holdings = sharing()
    first, second = holdings.allocate("a#0", 2), holdings.allocate("b#0", 3)
    holdings.publish("a#0", KEYS[:2], first)
    assert holdings.used == 5
    tail = second[2]
    holdings.publish("b#0", KEYS[:2], second)
    assert second == [*first, tail]
    assert (holdings.used, holdings.num_held("b#0"), holdings.owners()) == (3, 3, {"a#0": 2, "b#0": 3})
    holdings.release("a#0")
    assert holdings.cached == 0, "the other one still holds them"


def test_sharing_again_changes_nothing() -> None:
    holdings = sharing()
    slabs = holdings.allocate("a#0", 3)
    for count in (1, 1, 3, 2, 3):
        before = slabs[:]
        holdings.publish("a#0", KEYS[:count], before)
        assert before == slabs
    holdings.check_books()
    assert holdings.ledger.count_by_owner() == {TREE_OWNER: 3}


def test_only_private_slabs_can_be_shared_or_given() -> None:
    holdings = sharing()
    mine, theirs = holdings.allocate("a#0", 2), holdings.allocate("b#0", 1)
    with pytest.raises(ValueError, match="not a private one"):
        holdings.publish("a#0", KEYS[:2], [mine[0], theirs[0]])
    holdings.check_books()
    with pytest.raises(ValueError, match="not owned"):
        holdings.free_slabs("a#0", mine[:1])  # it is the tree's by now
    holdings.free_slabs("a#0", mine[1:])
    assert holdings.num_held("a#0") == 1
    with pytest.raises(ValueError, match="holds slabs already"):
        holdings.attach_prefix("a#0", KEYS)


def test_scopes_do_not_see_each_others_chunks() -> None:
    holdings, _ = finished()
    assert holdings.count_cached(chunk_keys(list(range(256)), root_key("model", "mine"))) == 0
    assert holdings.count_cached(chunk_keys(list(range(256)), root_key("other", ""))) == 0


def test_without_a_tree_nothing_is_shared_or_kept() -> None:
    holdings = KvAllocator(SlabLedger(8))
    slabs = holdings.allocate("a#0", 4)
    holdings.publish("a#0", KEYS, slabs)
    assert (
        holdings.count_cached(KEYS),
        holdings.count_unheld(KEYS),
        holdings.attach_prefix("b#0", KEYS),
    ) == (0, 0, [])
    assert (holdings.used, holdings.cached, holdings.prefix_queries, holdings.evict_cached()) == (4, 0, 0, 0)
    holdings.check_books()
    holdings.release("a#0")
    assert holdings.ledger.used == 0


def test_clear_forgets_what_nobody_holds() -> None:
    holdings, _ = finished()
    holdings.attach_prefix("b#0", KEYS[:1])
    assert holdings.evict_cached() == 3
    assert (holdings.count_cached(KEYS), holdings.used, holdings.ledger.used) == (1, 1, 1)


@pytest.mark.parametrize("damage", ["refs", "gone", "astray", "extra", "private"])
def test_check_finds_what_pool_and_tree_do_not_agree_on(damage: str) -> None:
    holdings = sharing()
    assert holdings.tree is not None
    slabs = holdings.allocate("a#0", 3)
    holdings.publish("a#0", KEYS[:1], slabs)
    holdings.check_books()
    node = holdings.tree.match_prefix(KEYS)[0]
    if damage == "refs":
        node.refs += 1
    elif damage == "gone":
        del holdings.tree._nodes[node.key]
    elif damage == "astray":
        node.slab = slabs[1]
    elif damage == "extra":
        holdings.ledger.take_slabs(1, TREE_OWNER)
    else:
        holdings.ledger.give_back(slabs[1:2], "a#0")
    with pytest.raises(AssertionError):
        holdings.check_books()


def test_thirty_two_streams_with_one_beginning_take_a_quarter_of_the_slabs() -> None:
    """kv_papers §6.B 3: 2,048 tokens in common, 512 of their own: at least 75 % saved."""
    holdings = sharing(2048)
    common = list(range(2048))
    for i in range(32):
        keys = chunk_keys([*common, *[5000 + i] * 512], root_key("model", ""))
        slabs = holdings.attach_prefix(f"{i}#0", keys)
        slabs += holdings.allocate(f"{i}#0", len(keys) - len(slabs))
        holdings.publish(f"{i}#0", keys, slabs)
    assert holdings.used == 32 + 32 * 8
    assert holdings.used <= 0.25 * sum(holdings.owners().values())


def test_the_last_slabs_of_a_sequence_can_go_before_it_ends() -> None:
    """Published chunks stay cached, and held where another sequence holds them; private slabs are idle again."""
    holdings = sharing()
    slabs = holdings.allocate("a#0", 5)
    holdings.publish("a#0", KEYS, slabs)
    holdings.attach_prefix("b#0", KEYS[:3])
    holdings.release_tail("a#0", slabs[1:])
    holdings.check_books()
    assert holdings.owners() == {"a#0": 1, "b#0": 3} and holdings.cached == 1
    assert holdings.allocate("a#0", 1) and holdings.num_held("a#0") == 2
    holdings.release("a#0")
    holdings.release_tail("b#0", slabs[:3])
    holdings.check_books()
    assert (holdings.used, holdings.cached) == (0, 4)


@pytest.mark.parametrize("places", [[0], [2, 1], [1, 2], [2, 3], [3, 4, 4], [4, 2]])
def test_only_the_last_slabs_can_go_first(places: list[int]) -> None:
    """The first three of five slabs are shared chunks."""
    holdings = sharing()
    slabs = holdings.allocate("a#0", 5)
    holdings.publish("a#0", KEYS[:3], slabs)
    with pytest.raises(ValueError, match="not the last ones|come after|twice"):
        holdings.release_tail("a#0", [slabs[place] for place in places])
    with pytest.raises(ValueError, match="not the last ones"):
        holdings.release_tail("b#0", slabs[4:])
    holdings.check_books()
    assert holdings.num_held("a#0") == 5
