"""So many sequences that evict have KV at once, as memory was planned for: parked ones and those on the way count."""

from __future__ import annotations

from random import Random

from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.request import Tenancy
from engine.scheduling.kv_admission import KvAdmission, MakeRoom, RemoteKv, StartFetch
from engine.sequence import Sequence
from tests.unit.engine.fakes import EngineBench, FixedRate, alone, sampling, sequence

SOME = KeepSpec(0.5)


def test_others_wait_and_those_that_keep_everything_pass() -> None:
    bench = EngineBench(max_num_batched_tokens=512, max_evicting=2)
    seqs = [sequence(f"s{at}", 100, sampling(80), keep=SOME) for at in range(5)]
    plain = sequence("plain", 100, sampling(80))
    for seq in [*seqs, plain]:
        bench.engine.add(seq, 0.0)
    bench.engine.step(bench.clock)
    assert set(bench.scheduler.running) == {"s0#1", "s1#1", "plain#1"}
    while len(bench.scheduler):
        assert bench.engine.has_work
        bench.engine.step(bench.clock)
        assert len(bench.runner.given) <= 2
    assert all(seq.output == alone(seq) for seq in [*seqs, plain])


def test_a_parked_sequence_counts_and_comes_back_before_others_that_evict() -> None:
    """Also one that is behind them in the queue: else nothing would go on."""
    bench = EngineBench(swap=8, max_num_batched_tokens=512, max_evicting=1)
    bench.engine.copy_rate = FixedRate(1e12)
    parked = sequence("parked", 100, sampling(80), keep=SOME)
    bench.engine.add(parked, 0.0)
    bench.engine.step(bench.clock)
    bench.engine._preempt_sequence(parked.key, bench.clock)
    assert parked.parked
    first = sequence("first", 100, sampling(80), keep=SOME, tenancy=Tenancy("a", "", -1))
    bench.engine.add(first, 0.0)
    assert bench.engine.has_work
    bench.engine.step(bench.clock)
    assert set(bench.scheduler.running) == {"parked#1"} and len(bench.runner.given) == 1
    while len(bench.scheduler):
        bench.engine.step(bench.clock)
        assert len(bench.runner.given) <= 1
    assert first.output == alone(first) and parked.output == alone(parked)


def test_arrivals_wait_without_preempting_anything() -> None:
    """A worse priority's memory would not help: what is lacking is not slabs."""
    bench = EngineBench(max_num_batched_tokens=512, max_evicting=1)
    worse = sequence("worse", 100, sampling(80), keep=SOME, tenancy=Tenancy("a", "", 5))
    bench.engine.add(worse, 0.0)
    bench.engine.step(bench.clock)
    admission = KvAdmission[RemoteKv](bench.scheduler, bench.holdings, lambda arrival: arrival)
    for name, keep, kept_slabs in (("evicts", SOME, 3), ("keeps", KEEP_ALL, 0)):
        arrived = sequence(name, 100, sampling(80), keep=keep, output=[1], kept_slabs=kept_slabs)
        admission.enqueue(RemoteKv(arrived, 100, 0.0, ticket=object()))
    effects = list(admission.departures(0.0))
    assert [effect.arrival.seq.id for effect in effects if isinstance(effect, StartFetch)] == ["keeps"]
    assert (
        not any(isinstance(effect, MakeRoom) for effect in effects) and "worse#1" in bench.scheduler.running
    )
    bench.engine.abort("worse", 1)
    started = [effect for effect in admission.departures(0.0) if isinstance(effect, StartFetch)]
    assert [effect.arrival.seq.id for effect in started] == ["evicts"]


def test_a_crowd_keeps_within_the_limit() -> None:
    """Parked and computed again, in any order: never are the queries of more sequences remembered."""
    preempted = 0
    for seed in range(12):
        rng = Random(seed)
        bench = EngineBench(
            9, swap=6, max_num_seqs=4, max_num_batched_tokens=60, max_evicting=2, max_waiting=99
        )
        bench.engine.copy_rate = FixedRate(1e12 if seed % 2 else 1e-12)
        seqs = list[Sequence]()
        for at in range(12):
            origin = Tenancy(rng.choice("ab"), "", rng.choice([0, 0, 1, -1]))
            keep = rng.choice([SOME, SOME, KeepSpec(0.5, 64), KEEP_ALL])
            seqs.append(
                sequence(f"s{at}", rng.choice([70, 130, 190]), sampling(100), keep=keep, tenancy=origin)
            )
        for at in range(4000):
            if at % 20 == 0 and at // 20 < len(seqs):
                bench.engine.add(seqs[at // 20], 0.0)
            if not len(bench.scheduler) and at // 20 >= len(seqs):
                break
            bench.engine.step(bench.clock)
            assert len(bench.runner.given) <= 2
        assert [seq.output for seq in seqs] == [alone(seq) for seq in seqs]
        preempted += sum(bench.engine.stats.preemptions.values())
    assert preempted
