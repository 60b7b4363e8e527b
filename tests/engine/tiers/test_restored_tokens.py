"""Answers with prefixes from the tiers are those with computed prefixes, in every KV class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diptych.eviction_spec import KeepSpec
from kvtransfer.resharding import ShardedPool
from tests.engine.tiers.tiered_engine import TieredEngine, prompt_of, shards_of

CODECS = ("raw", "int4", "tq4", "nuq4-1%")


@pytest.mark.parametrize("codec", CODECS)
def test_restored_prefixes_give_the_tokens_of_cold_ones(codec: str, tmp_path: Path) -> None:
    cold, tiered = TieredEngine(codec, None), TieredEngine(codec, tmp_path, disk=codec == "raw")
    expected = [cold.answer(prompt_of(number)) for number in range(3)]
    assert [tiered.answer(prompt_of(number))[:2] for number in range(3)] == [one[:2] for one in expected]
    tiered.settle()
    for number in range(3):
        tokens, scores, cached = tiered.answer(prompt_of(number))
        assert cached == 256, "all whole chunks of the prompt but that of its last token"
        assert tokens == expected[number][0]
        # Hit and miss compute the rest in other slices.
        assert scores == pytest.approx(expected[number][1], abs=2e-3)
    stats = tiered.engine.stats
    assert (stats.tier_hits, stats.tiers["host"].restored_chunks) == (768, 12)
    assert stats.tiers["host"].corrupt_chunks == stats.tiers["host"].failures == 0
    tiered.settle()
    tiered.close()


def test_prefixes_from_the_disk_give_the_same_tokens(tmp_path: Path) -> None:
    first = TieredEngine("raw", tmp_path, disk=True)
    expected = first.answer(prompt_of(1))
    first.settle()
    first.close()
    assert not (tmp_path / "host").exists()
    second = TieredEngine("raw", tmp_path, disk=True)
    tokens, scores, cached = second.answer(prompt_of(1))
    assert cached == 256 and tokens == expected[0] and scores == pytest.approx(expected[1], abs=2e-3)
    assert second.engine.stats.tiers["disk"].restored_chunks == 4
    second.close()


def test_other_scopes_and_damaged_chunks_are_computed(tmp_path: Path) -> None:
    tiered = TieredEngine("raw", tmp_path)
    expected = tiered.answer(prompt_of(1), scope="one")
    tiered.settle()
    assert tiered.answer(prompt_of(1), scope="two")[2] == 0, "nothing is shared across scopes"
    tiered.settle()
    for path in (tmp_path / "host" / "chunks").iterdir():
        content = bytearray(path.read_bytes())
        content[70_000] ^= 4
        path.write_bytes(content)
    tokens, scores, cached = tiered.answer(prompt_of(1), scope="one")
    assert cached == 0 and (tokens, scores) == expected[:2]
    assert tiered.engine.stats.tiers["host"].corrupt_chunks == 1
    tiered.settle()
    tiered.close()


def test_prompts_that_evict_share_what_was_there_before(tmp_path: Path) -> None:
    cold, tiered = TieredEngine("raw", None), TieredEngine("raw", tmp_path)
    keep = KeepSpec(0.9)
    expected = cold.answer(prompt_of(1), keep=keep)
    tiered.answer(prompt_of(1))
    tiered.settle()
    tokens, scores, cached = tiered.answer(prompt_of(1), keep=keep)
    assert cached == 192, "the last 64 rows are computed, to decide what is kept"
    assert tokens == expected[0] and scores == pytest.approx(expected[1], abs=2e-3)
    tiered.settle()
    tiered.close()


def test_a_chat_goes_on_behind_the_answer_before(tmp_path: Path) -> None:
    tiered = TieredEngine("raw", tmp_path)
    prompt = prompt_of(1, 250)
    tokens, _, _ = tiered.answer(prompt)
    tiered.settle()
    assert tiered.answer([*prompt, *tokens, *prompt_of(2, 40)])[2] == 256, "the answer's chunk was stored too"
    tiered.settle()
    tiered.close()


@pytest.mark.parametrize("codec", ["raw", "tq4"])
def test_any_split_over_ranks_reads_what_another_one_stored(codec: str, tmp_path: Path) -> None:
    tiered = TieredEngine(codec, tmp_path)
    tiered.answer(prompt_of(1))
    keys = tiered.request(prompt_of(1)).update_keys()
    slabs = [node.slab for node in tiered.kv.tree.match_prefix(keys[:4])] if tiered.kv.tree else []
    whole = [b"".join(bytes(view) for view in tiered.sharded.chunk_views(slab)) for slab in slabs]
    assert tiered.tiers is not None and len(slabs) == 4
    store = tiered.tiers._tiers["host"].store
    tiered.settle()
    shards = shards_of(tiered, 2)
    sizes = [tiered.layout.shard_layout(shard).chunk_bytes for shard in shards]
    memories = [np.zeros(4 * size, np.uint8) for size in sizes]
    split = ShardedPool(
        tiered.layout, [(shard, memory.data) for shard, memory in zip(shards, memories, strict=True)]
    )
    for slab, key in enumerate(keys[:4]):
        store.read(key, split.chunk_views(slab))
        assert b"".join(bytes(view) for view in split.chunk_views(slab)) == whole[slab]
    assert all(memory.any() for memory in memories)
    tiered.close()
