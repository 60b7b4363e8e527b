"""What is restored of a prompt's prefix, and when a prompt does not wait for it any more."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import takewhile

import pytest

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import OutOfSlabs
from diptych.request import SamplingParams
from diptych.stats.tier_rates import TierRate, choose_restore, group_runs
from diptych.stats.tiers import TierStats
from engine.prefix_restores import PrefixRestore, PrefixRestores
from engine.scheduling.new_token_ratio import MeasuredRate
from engine.sequence import Sequence
from engine.sequence_table import first_output_seconds
from kvcache.allocator import KvAllocator
from kvcache.prefix_tree import PrefixTree, chunk_keys, root_key
from kvcache.slab_ledger import SlabLedger

ROOT = root_key("model", "")
PROMPT = list(range(8 * CHUNK_TOKENS + 5))
KEYS = chunk_keys(PROMPT, ROOT)
RATES = {"host": TierRate(0.001, 1e6), "disk": TierRate(0.01, 1e5)}


class FakeReader:
    """Tiers that have some chunks, and answer when they are asked to."""

    def __init__(self, tiers: Mapping[bytes, str]) -> None:
        self.tiers, self.found, self.read = tiers, list[PrefixRestore](), list[PrefixRestore]()
        self.answers: list[PrefixRestore] = []

    def look_up(self, restore: PrefixRestore) -> None:
        self.found.append(restore)

    def read_chunks(self, restore: PrefixRestore) -> None:
        self.read.append(restore)

    def answer_found(self) -> None:
        restore = self.found.pop()
        if restore.report_found(self.leading(restore), True):
            self.answers.append(restore)

    def leading(self, restore: PrefixRestore, tier: str = "") -> list[str]:
        """The tiers of the leading missing chunks, as far as they are in `tier`, if one is named."""
        stored = {key: name for key, name in self.tiers.items() if tier in ("", name)}
        return [stored[key] for key in takewhile(stored.__contains__, restore.missing_keys)]

    def fill(self, restore: PrefixRestore, count: int) -> list[int]:
        """Fill the next slabs, as far as that is allowed; returns which."""
        filled: list[int] = []
        while len(filled) < count and restore.fill_next(filled.append):
            pass
        return filled

    def answer_read(self, count: int) -> None:
        restore = self.read.pop()
        self.fill(restore, count)
        self.answers.append(restore)

    def take_answers(self) -> list[PrefixRestore]:
        answers, self.answers = self.answers, []
        return answers

    def rates(self) -> Mapping[str, TierRate]:
        return RATES

    def notify(self, wake: Callable[[], None]) -> None:
        pass

    @property
    def stats(self) -> dict[str, TierStats]:
        return {"host": TierStats(chunks=3)}


class Bench:
    def __init__(self, stored: int = 8, num_slabs: int = 64) -> None:
        self.kv = KvAllocator(SlabLedger(num_slabs), PrefixTree())
        self.reader = FakeReader(dict.fromkeys(KEYS[:stored], "host"))
        self.taken: list[int] = []
        self.restores = PrefixRestores(
            self.kv, self.reader, {"raw": 1000}, MeasuredRate(6400.0), self.taken.extend
        )

    def begin(self, name: str = "a", now_s: float = 0.0) -> Sequence:
        sampling = SamplingParams(max_tokens=4, seed=0)
        seq = Sequence(name, 0, PROMPT, sampling, math.inf, root=ROOT, arrived_s=now_s)
        seq.update_keys()
        self.restores.begin(seq, now_s)
        return seq

    def deadline_s(self) -> float | None:
        return self.restores.deadline_s

    def is_busy(self) -> bool:
        return self.restores.is_busy

    def settled(self) -> bool:
        self.kv.check_books()
        return not self.restores.is_busy and self.kv.used == 0


def is_ready(seq: Sequence) -> bool:
    """Whether it waits for nothing: a call, so that types do not take it for a constant."""
    return seq.ready


@pytest.mark.parametrize(
    ("tiers", "chosen"),
    [
        ([], 0),
        (["host"] * 5, 5),
        # 1000 bytes from the disk take 0.01 s, as long as computing 64 tokens takes: nothing is gained.
        (["host", "host", "disk", "disk"], 2),
        (["disk"] * 8, 0),
        (["host", "disk", *["host"] * 3], 5),
    ],
)
def test_as_much_is_restored_as_saves_most_time(tiers: list[str], chosen: int) -> None:
    assert choose_restore(group_runs(tiers), 1000, RATES, CHUNK_TOKENS / 6400.0).num_chunks == chosen


def test_a_tier_that_is_slower_than_computing_is_not_read() -> None:
    for bytes_per_s, chosen in ((99_000.0, 0), (101_000.0, 9)):
        rates = {"host": TierRate(0.0, bytes_per_s)}
        assert choose_restore([("host", 9)], 1000, rates, CHUNK_TOKENS / 6400.0).num_chunks == chosen


def test_a_stored_prefix_becomes_a_cached_one_and_nothing_is_held() -> None:
    bench = Bench()
    seq = bench.begin()
    assert not is_ready(seq) and not bench.is_busy()
    bench.reader.answer_found()
    bench.restores.tend(0.01)
    assert not is_ready(seq) and bench.is_busy() and bench.kv.used == 8 and len(bench.taken) == 8
    bench.reader.answer_read(8)
    bench.restores.tend(0.02)
    assert is_ready(seq) and bench.settled() and bench.kv.count_cached(KEYS) == 8
    assert (bench.kv.prefix_queries, bench.kv.prefix_hits) == (0, 0), "no request has attached anything yet"
    assert (bench.restores.queried_tokens, bench.restores.restored_tokens) == (512, 512)
    seq.started_s = 0.05
    assert first_output_seconds(seq, 0.08) == pytest.approx({"restore": 0.02, "queue": 0.03, "prefill": 0.03})


def test_only_what_the_pool_lacks_is_asked_for() -> None:
    bench = Bench(stored=6)
    slabs = bench.kv.allocate("x#0", 3)
    bench.kv.publish("x#0", KEYS[:3], slabs)
    seq = bench.begin()
    assert bench.reader.found[0].missing_keys == KEYS[3:]
    bench.reader.answer_found()
    bench.restores.tend(0.0)
    assert bench.reader.read[0].slabs == bench.taken and len(bench.taken) == 3
    bench.kv.release("x#0")
    bench.reader.answer_read(3)
    bench.restores.tend(0.0)
    assert is_ready(seq) and bench.settled() and bench.kv.count_cached(KEYS) == 6


def test_what_could_not_be_verified_never_enters_the_tree() -> None:
    bench = Bench()
    seq = bench.begin()
    bench.reader.answer_found()
    bench.restores.tend(0.0)
    bench.reader.answer_read(2)
    bench.restores.tend(0.0)
    assert (
        is_ready(seq) and bench.settled() and bench.kv.count_cached(KEYS) == 2 and bench.kv.ledger.free == 62
    )


def test_a_prompt_goes_on_without_a_tier_that_stands_still() -> None:
    bench = Bench()
    seq, deadline_s = bench.begin(), bench.deadline_s()
    assert deadline_s is not None and 0 < deadline_s <= 0.08
    bench.restores.tend(deadline_s)
    assert is_ready(seq) and not bench.is_busy() and bench.deadline_s() is None
    bench.reader.answer_found()
    bench.restores.tend(1.0)
    assert bench.settled() and not bench.reader.read, "nobody waits for it any more"
    seq = bench.begin(now_s=2.0)
    bench.reader.answer_found()
    bench.restores.tend(2.0)
    late_s = bench.deadline_s()
    assert late_s is not None and late_s <= 2.08
    restore = bench.reader.read[0]
    assert len(bench.reader.fill(restore, 5)) == 5
    bench.restores.tend(late_s)
    assert is_ready(seq) and bench.settled() and bench.kv.count_cached(KEYS) == 5, "what had come serves"
    assert bench.kv.ledger.free == 59
    assert not bench.reader.fill(restore, 1), "its slabs are those of others now"
    bench.reader.answer_read(0)
    bench.restores.tend(9.0)
    assert bench.settled() and bench.kv.count_cached(KEYS) == 5


@pytest.mark.parametrize("used", [0, 6])
def test_slabs_to_restore_into_are_given_to_whoever_needs_them(used: int) -> None:
    bench = Bench(num_slabs=12)
    bench.kv.allocate("x#0", used)
    seq = bench.begin()
    bench.reader.answer_found()
    bench.restores.tend(0.0)
    restore = bench.reader.read[0]
    assert len(restore.slabs) == 6 and bench.kv.free == 12 - used, "nobody counts them as taken"
    bench.kv.check_books()
    bench.reader.fill(restore, 2)
    grown = bench.kv.allocate("x#0", 12 - used)
    assert is_ready(seq) and set(restore.slabs) <= set(grown), "the disk has not answered yet"
    assert not bench.reader.fill(restore, 1)
    bench.kv.release("x#0")
    bench.reader.answer_read(0)
    bench.restores.tend(1.0)
    assert bench.settled()


def test_a_prompt_runs_in_the_memory_of_its_own_late_restore() -> None:
    bench = Bench(num_slabs=9)
    seq = bench.begin()
    bench.reader.answer_found()
    bench.restores.tend(0.0)
    assert len(bench.reader.read[0].slabs) == 4
    bench.restores.tend(30.0)
    assert is_ready(seq) and bench.kv.free == 9 and bench.settled()
    assert len(bench.kv.allocate(seq.key, 9)) == 9
    bench.kv.release(seq.key)


def test_bulk_work_gives_its_memory_back_before_restores_do() -> None:
    bench, asked = Bench(num_slabs=12), list[str]()

    def reclaim() -> bool:
        asked.append("bulk")
        return False

    bench.kv.lent_slabs.reclaim = reclaim
    bench.restores = PrefixRestores(
        bench.kv, bench.reader, {"raw": 1000}, MeasuredRate(6400.0), bench.taken.extend
    )
    bench.begin()
    bench.reader.answer_found()
    bench.restores.tend(0.0)
    bench.kv.allocate("x#0", 12)
    assert asked == ["bulk"] and not bench.is_busy()
    with pytest.raises(OutOfSlabs):
        bench.kv.allocate("x#0", 1)
    bench.kv.release("x#0")


def test_a_role_that_ends_holds_nothing_though_a_disk_stands_still() -> None:
    bench = Bench()
    seqs = [bench.begin()]
    bench.reader.answer_found()
    bench.restores.tend(0.0)
    assert bench.is_busy()
    bench.restores.stop()
    assert bench.settled() and is_ready(seqs[0])
    seqs.append(bench.begin("b"))
    assert not bench.is_busy(), "a look-up holds nothing"
    bench.restores.stop()
    assert is_ready(seqs[1])


def test_later_prompts_do_not_join_a_look_up_that_hangs() -> None:
    bench = Bench()
    first = bench.begin()
    bench.restores.tend(1.0)
    second = bench.begin("b", now_s=1.0)
    assert is_ready(first) and not is_ready(second) and len(bench.reader.found) == 2
    bench.reader.answer_found()
    bench.restores.tend(1.01)
    assert len(bench.reader.read) == 1
    bench.reader.answer_read(8)
    bench.reader.answer_found()
    bench.restores.tend(1.02)
    assert is_ready(second) and bench.settled() and bench.kv.count_cached(KEYS) == 8


def test_what_the_first_tier_has_is_read_when_the_second_does_not_answer() -> None:
    bench = Bench()
    bench.reader.tiers = {**dict.fromkeys(KEYS[:3], "host"), **dict.fromkeys(KEYS[3:], "disk")}
    seq = bench.begin()
    restore = bench.reader.found[0]
    assert restore.report_found(bench.reader.leading(restore, "host"), False)
    late_s = bench.deadline_s()
    assert late_s is not None
    bench.restores.tend(late_s)
    assert not is_ready(seq) and len(restore.slabs) == 3
    bench.reader.answer_found()
    assert not bench.reader.answers, "the disk is too late"
    bench.reader.answer_read(3)
    bench.restores.tend(late_s)
    assert is_ready(seq) and bench.settled() and bench.kv.count_cached(KEYS) == 3


def test_prompts_with_the_same_prefix_wait_for_one_restore() -> None:
    bench = Bench()
    seqs = [bench.begin(name) for name in "abc"]
    assert len(bench.reader.found) == 1
    bench.reader.answer_found()
    bench.restores.tend(0.0)
    bench.reader.answer_read(8)
    bench.restores.tend(0.0)
    assert all(is_ready(seq) for seq in seqs) and bench.settled()


def test_a_share_of_the_pool_is_filled_at_most_and_no_slab_in_use_is_taken() -> None:
    bench = Bench(num_slabs=12)
    bench.begin()
    bench.reader.answer_found()
    bench.restores.tend(0.0)
    assert len(bench.reader.read[0].slabs) == 6
    bench.reader.answer_read(6)
    bench.restores.tend(0.0)
    assert bench.kv.evict_cached() == 6 and bench.settled()
    bench.kv.allocate("x#0", 12)
    seq = bench.begin()
    bench.reader.answer_found()
    bench.restores.tend(0.0)
    assert is_ready(seq) and not bench.reader.read and not bench.is_busy()
    bench.kv.release("x#0")


def test_chunks_that_others_computed_meanwhile_are_used_and_not_written_again() -> None:
    bench = Bench()
    seq = bench.begin()
    slabs = bench.kv.allocate("x#0", 2)
    bench.kv.publish("x#0", KEYS[:2], slabs)
    bench.reader.answer_found()
    bench.restores.tend(0.0)
    assert bench.reader.read[0].missing_keys == KEYS[2:] and not set(bench.taken) & set(slabs)
    bench.kv.release("x#0")
    bench.reader.answer_read(6)
    bench.restores.tend(0.0)
    assert is_ready(seq) and bench.settled() and bench.kv.count_cached(KEYS) == 8


def test_nothing_is_looked_up_for_a_prefix_that_is_here() -> None:
    bench = Bench()
    slabs = bench.kv.allocate("x#0", 8)
    bench.kv.publish("x#0", KEYS, slabs)
    bench.kv.release("x#0")
    seq = bench.begin()
    assert is_ready(seq) and seq.restore is None and not bench.is_busy()


def begin_pull(bench: Bench, pulled_bytes_per_s: float, now_s: float = 0.0, chunks: int = 8) -> Sequence:
    """A request whose KV would be pulled, after pulls that were measured at 0 s."""
    bench.restores.note_pull("raw", chunks, chunks * 1000 / pulled_bytes_per_s, 0.0)
    return ask_pull(bench, now_s)


def ask_pull(bench: Bench, now_s: float, chunks: int = 8) -> Sequence:
    seq = Sequence("a", 0, PROMPT, SamplingParams(max_tokens=4, seed=0), math.inf, root=ROOT, arrived_s=now_s)
    seq.update_keys()
    bench.restores.begin_pull(seq, seq.keys[:chunks], now_s)
    return seq


def test_what_a_tier_has_sooner_than_a_pull_is_not_pulled() -> None:
    bench = Bench(stored=5)
    seq = begin_pull(bench, 1e5)
    assert not is_ready(seq) and not bench.taken
    bench.reader.answer_found()
    bench.restores.tend(0.001)
    assert len(bench.taken) == 5 and bench.is_busy()
    bench.reader.answer_read(5)
    bench.restores.tend(0.006)
    assert is_ready(seq) and bench.settled()
    assert bench.kv.count_cached(KEYS) == 5, "the others are pulled"


def waits(bench: Bench, now_s: float, chunks: int = 8) -> bool:
    """Whether a request looks for its chunks before they are pulled; its search ends at once."""
    found = not is_ready(ask_pull(bench, now_s, chunks))
    bench.restores.stop()
    return found


def test_all_is_pulled_until_pulls_were_measured() -> None:
    bench = Bench()
    assert is_ready(begin_pull(bench, 1e5, chunks=3)), "latencies hide how fast few chunks are pulled"
    assert not bench.reader.found
    assert not is_ready(begin_pull(bench, 1e5))


def test_one_request_at_a_time_measures_pulls_again() -> None:
    bench = Bench()
    begin_pull(bench, 1e5)
    assert [waits(bench, now_s) for now_s in (1, 2, 3, 9.9)] == [True] * 4
    assert not waits(bench, 10.1), "a link that was slow may be fast again"
    assert [waits(bench, now_s) for now_s in (10.2, 20.0, 20.1, 20.2, 20.3)] == [True] * 4 + [False]
    assert [waits(bench, 60.0 * n) for n in range(1, 11)] == 2 * [True, True, True, True, False]


def test_few_chunks_do_not_measure_pulls_again() -> None:
    bench = Bench()
    bench.restores.note_pull("raw", 8, 0.8, 0.0)
    assert all(waits(bench, 10.5, chunks=3) for _ in range(9))
    assert not waits(bench, 10.6)


def test_where_no_tier_is_as_fast_as_pulls_nothing_is_looked_up() -> None:
    bench = Bench()
    assert is_ready(begin_pull(bench, 2e9)) and not bench.reader.found
    # The tier was fast once, and is looked at so that its rate is measured again.
    seq = begin_pull(Bench(), 2e6)
    assert not is_ready(seq)


def test_a_tier_that_is_measured_as_slower_than_pulls_is_not_read() -> None:
    bench = Bench()
    seq = begin_pull(bench, 2e6)
    bench.reader.answer_found()
    bench.restores.tend(0.001)
    assert is_ready(seq) and not bench.taken


def test_nobody_waits_longer_than_the_pull_would_take() -> None:
    bench = Bench()
    seq = begin_pull(bench, 5e5)
    assert bench.deadline_s() == pytest.approx(8 * 0.002)
    bench.reader.answer_found()
    bench.restores.tend(0.001)
    assert bench.deadline_s() == pytest.approx(0.001 + 8 * 0.002)
    bench.reader.fill(bench.reader.read[0], 3)
    bench.restores.tend(0.018)
    assert is_ready(seq) and bench.settled()
    assert bench.kv.count_cached(KEYS) == 3, "what was read is not pulled"


def test_a_prompt_and_a_pull_wait_for_restores_of_their_own() -> None:
    """A tier may be worth it beside one of them alone."""
    bench = Bench()
    prompt, pulled = bench.begin("p"), begin_pull(bench, 1e5)
    assert prompt.restore is not pulled.restore
    for _ in range(2):
        bench.reader.answer_found()
    bench.restores.tend(0.001)
    for _ in range(2):
        bench.reader.answer_read(8)
    bench.restores.tend(0.01)
    assert is_ready(prompt) and is_ready(pulled) and bench.settled()
    assert bench.kv.count_cached(KEYS) == 8
