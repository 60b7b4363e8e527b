"""What sequences hold, told in short stories; every order of calls is in `test_holdings_machine.py`."""

from __future__ import annotations

import pytest

from diptych.errors import OutOfBlocks
from kvcache.holdings import TREE, Holdings
from kvcache.prefix_tree import PrefixTree, chunk_keys, root
from kvcache.slabs import Slabs

KEYS = chunk_keys(list(range(256)), root("model", ""))  # four chunks


def sharing(num_slabs: int = 8) -> Holdings:
    return Holdings(Slabs(num_slabs), PrefixTree())


def finished(num_slabs: int = 8) -> tuple[Holdings, list[int]]:
    """Holdings after a sequence of four chunks and a tail has come and gone; the chunks' slabs."""
    holdings = sharing(num_slabs)
    slabs = holdings.take("a#0", 5)
    holdings.share("a#0", KEYS, slabs)
    holdings.end("a#0")
    return holdings, slabs[:4]


def test_full_chunks_outlive_their_sequence_and_its_tail_does_not() -> None:
    holdings, slabs = finished()
    assert (holdings.used, holdings.cached, holdings.free) == (0, 4, 8)
    assert holdings.pool.owners() == {TREE: 4}
    assert holdings.attach("b#0", KEYS[:3]) == slabs[:3]
    assert (holdings.used, holdings.cached, holdings.free) == (3, 1, 5)
    assert (holdings.queries, holdings.hits) == (192, 192)


def test_cached_chunks_make_way_but_leased_ones_do_not() -> None:
    holdings, slabs = finished()
    holdings.attach("b#0", KEYS[:2])
    assert holdings.free == 6
    with pytest.raises(OutOfBlocks, match="6 slabs to give of 8, and 7"):
        holdings.take("c#0", 7)
    assert holdings.look(KEYS) == 4, "what could not be given is not evicted for it"
    assert not set(holdings.take("c#0", 6)) & set(slabs[:2])
    assert holdings.look(KEYS) == 2
    holdings.check()


def test_what_is_not_to_be_kept_goes_unless_others_need_it() -> None:
    holdings, _ = finished()
    holdings.attach("b#0", KEYS[:2])
    holdings.attach("c#0", KEYS)
    holdings.end("c#0", keep=False)
    assert holdings.look(KEYS) == 2 and holdings.cached == 0, "the other one holds these"
    holdings.end("b#0", keep=False)
    assert holdings.look(KEYS) == holdings.pool.used == 0
    holdings.check()


def test_two_that_computed_the_same_keep_it_once() -> None:
    holdings = sharing()
    first, second = holdings.take("a#0", 2), holdings.take("b#0", 3)
    holdings.share("a#0", KEYS[:2], first)
    assert holdings.used == 5
    tail = second[2]
    holdings.share("b#0", KEYS[:2], second)
    assert second == [*first, tail]
    assert (holdings.used, holdings.holds("b#0"), holdings.owners()) == (3, 3, {"a#0": 2, "b#0": 3})
    holdings.end("a#0")
    assert holdings.cached == 0, "the other one still holds them"


def test_sharing_again_changes_nothing() -> None:
    holdings = sharing()
    slabs = holdings.take("a#0", 3)
    for count in (1, 1, 3, 2, 3):
        told = slabs[:]
        holdings.share("a#0", KEYS[:count], told)
        assert told == slabs
    holdings.check()
    assert holdings.pool.owners() == {TREE: 3}


def test_only_private_slabs_can_be_shared_or_given() -> None:
    holdings = sharing()
    mine, theirs = holdings.take("a#0", 2), holdings.take("b#0", 1)
    with pytest.raises(ValueError, match="not a private one"):
        holdings.share("a#0", KEYS[:2], [mine[0], theirs[0]])
    holdings.check()
    with pytest.raises(ValueError, match="not owned"):
        holdings.give("a#0", mine[:1])  # it is the tree's by now
    holdings.give("a#0", mine[1:])
    assert holdings.holds("a#0") == 1
    with pytest.raises(ValueError, match="holds slabs already"):
        holdings.attach("a#0", KEYS)


def test_scopes_do_not_see_each_others_chunks() -> None:
    holdings, _ = finished()
    assert holdings.look(chunk_keys(list(range(256)), root("model", "mine"))) == 0
    assert holdings.look(chunk_keys(list(range(256)), root("other", ""))) == 0


def test_without_a_tree_nothing_is_shared_or_kept() -> None:
    holdings = Holdings(Slabs(8))
    slabs = holdings.take("a#0", 4)
    holdings.share("a#0", KEYS, slabs)
    assert (holdings.look(KEYS), holdings.look_free(KEYS), holdings.attach("b#0", KEYS)) == (0, 0, [])
    assert (holdings.used, holdings.cached, holdings.queries, holdings.clear()) == (4, 0, 0, 0)
    holdings.check()
    holdings.end("a#0")
    assert holdings.pool.used == 0


def test_clear_forgets_what_nobody_holds() -> None:
    holdings, _ = finished()
    holdings.attach("b#0", KEYS[:1])
    assert holdings.clear() == 3
    assert (holdings.look(KEYS), holdings.used, holdings.pool.used) == (1, 1, 1)


@pytest.mark.parametrize("damage", ["refs", "gone", "astray", "extra", "private"])
def test_check_finds_what_pool_and_tree_do_not_agree_on(damage: str) -> None:
    holdings = sharing()
    assert holdings.tree is not None
    slabs = holdings.take("a#0", 3)
    holdings.share("a#0", KEYS[:1], slabs)
    holdings.check()
    node = holdings.tree.match(KEYS)[0]
    if damage == "refs":
        node.refs += 1
    elif damage == "gone":
        del holdings.tree._nodes[node.key]
    elif damage == "astray":
        node.slab = slabs[1]
    elif damage == "extra":
        holdings.pool.take(1, TREE)
    else:
        holdings.pool.give(slabs[1:2], "a#0")
    with pytest.raises(AssertionError):
        holdings.check()


def test_thirty_two_streams_with_one_beginning_take_a_quarter_of_the_slabs() -> None:
    """kv_papers §6.B 3: 2,048 tokens in common, 512 of their own: at least 75 % saved."""
    holdings = sharing(2048)
    common = list(range(2048))
    for i in range(32):
        keys = chunk_keys([*common, *[5000 + i] * 512], root("model", ""))
        slabs = holdings.attach(f"{i}#0", keys)
        slabs += holdings.take(f"{i}#0", len(keys) - len(slabs))
        holdings.share(f"{i}#0", keys, slabs)
    assert holdings.used == 32 + 32 * 8
    assert holdings.used <= 0.25 * sum(holdings.owners().values())
