"""A decode worker reads back what left its pool, where that is sooner than pulling it; on `worker_bench`'s byte model,
which notices KV that is missing, foreign or torn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import Abort, Release
from engine.prefix_restores import PrefixRestores
from engine.scheduling.new_token_ratio import MeasuredRate
from kvcache.tiers.chunk_store import ChunkStore
from kvtransfer.resharding import unsharded_pool
from tests.engine.workers.role_steps import CHUNK_BYTES, LONG, OTHER, PROMPT, TOKENS, admit, offered, rest
from tests.engine.workers.worker_bench import LAYOUT, WorkerBench, alone
from tests.support.waiting import wait_for
from worker.tiers.worker_tiers import WorkerTiers

SLOW, FAST = 1e3, 1e12  # bytes that are pulled per second


@contextmanager
def tiered(folder: Path) -> Iterator[tuple[WorkerBench, WorkerTiers]]:
    """A bench whose decode worker has host memory below a pool for two prompts."""
    bench = WorkerBench(decode_slabs=8)
    half = bench.decode
    store = ChunkStore(folder / "host", 1 << 22, "a", removes=True)
    tiers = WorkerTiers(unsharded_pool(LAYOUT, half.pool.memory), half.holdings, store)
    tiers.open()
    sizes = {LAYOUT.kv_class: CHUNK_BYTES}
    half.engine.restores = PrefixRestores(
        half.holdings, tiers, sizes, MeasuredRate(1e9), half.engine.note_taken
    )
    try:
        yield bench, tiers
    finally:
        tiers.close()


def measure_pulls(bench: WorkerBench, bytes_per_s: float) -> None:
    """Pulls were as fast as that lately."""
    chunks = 1000
    seconds = chunks * CHUNK_BYTES / bytes_per_s
    bench.decode.engine.restores.note_pull(LAYOUT.kv_class, chunks, seconds, bench.now_s)


def ask(bench: WorkerBench, name: str, prompt: list[int]) -> int:
    """A request from its beginning to its end; returns the chunks that were pulled for it."""
    admit(bench, name, offered(bench, name, prompt), prompt)
    finish(bench, name, prompt)
    (pulled,) = bench.decode.pulled(name)
    return pulled.num_bytes // CHUNK_BYTES


def finish(bench: WorkerBench, name: str, prompt: list[int]) -> None:
    def is_served() -> bool:
        bench.decode.shell.run_once()
        while bench.courier.under_way:
            bench.courier.land()
        return len(bench.decode.ended(name)) > 0

    wait_for(is_served, 10)
    assert bench.prefill.tokens(name) + bench.decode.tokens(name) == alone(prompt, TOKENS)
    bench.prefill.tell(Release(name, 0))


def push_out(bench: WorkerBench, tiers: WorkerTiers) -> None:
    """Let others take the place of all that is cached, which is stored."""
    for number in range(6):
        ask(bench, f"other {len(bench.decode.line.said)} {number}", [number, *OTHER])
    wait_for(lambda: not tiers.stats["host"].waiting_chunks, 10)
    wait_for(lambda: tiers.stats["host"].stored_chunks >= 3 + 6 * 2, 10)


def test_what_left_the_pool_is_read_back_where_pulls_are_slow(tmp_path: Path) -> None:
    with tiered(tmp_path) as (bench, tiers):
        assert ask(bench, "cold", LONG) == 4
        push_out(bench, tiers)
        measure_pulls(bench, SLOW)
        assert ask(bench, "again", LONG) == 1, "its last chunk is not full, and was not stored"
        assert tiers.stats["host"].restored_chunks == 3
        assert bench.decode.stats.tier_hits == 3 * CHUNK_TOKENS
        rest(bench)


def test_fast_pulls_bring_everything_and_nothing_is_looked_up(tmp_path: Path) -> None:
    with tiered(tmp_path) as (bench, tiers):
        ask(bench, "cold", LONG)
        push_out(bench, tiers)
        measure_pulls(bench, FAST)
        assert ask(bench, "again", LONG) == 4
        assert bench.decode.stats.tier_queries == tiers.stats["host"].restored_chunks == 0
        rest(bench)


def test_a_stored_chunk_that_is_damaged_is_pulled(tmp_path: Path) -> None:
    with tiered(tmp_path) as (bench, tiers):
        ask(bench, "cold", LONG)
        push_out(bench, tiers)
        for file in (tmp_path / "host" / "chunks").iterdir():
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        measure_pulls(bench, SLOW)
        assert ask(bench, "again", LONG) == 4
        assert tiers.stats["host"].corrupt_chunks >= 1
        rest(bench)


def test_one_that_is_dropped_while_it_is_read_back_leaves_nothing(tmp_path: Path) -> None:
    with tiered(tmp_path) as (bench, tiers):
        ask(bench, "cold", LONG)
        push_out(bench, tiers)
        measure_pulls(bench, SLOW)
        admit(bench, "gone", offered(bench, "gone", LONG), LONG)
        bench.decode.tell(Abort("gone", 0))
        bench.prefill.tell(Release("gone", 0))
        wait_for(lambda: _is_idle(bench), 10)
        assert ask(bench, "next", PROMPT) == 3
        rest(bench)


def _is_idle(bench: WorkerBench) -> bool:
    bench.decode.shell.run_once()
    return not bench.decode.role.is_busy
