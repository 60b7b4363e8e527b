"""Both roles over the embedded model, with kept rows in segments: decode workers share them, and answers stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from msgspec.structs import replace

from diptych.eviction_spec import KeepSpec
from diptych.messages import Abort, Admit, Failed, Offer, Release
from engine.protocols import EvictionOrder, EvictionReport
from engine.scheduling.new_token_ratio import MeasuredRate
from engine.sequence import Sequence
from kvcache.eviction.kept_segments import KeptSegment, count_segment_slabs
from kvtransfer import ticket as tickets
from tests.engine.cpu.eviction.evicted_runs import source_tokens
from tests.engine.cpu.eviction.segmented_runs import WEIGHTS, make_cutting
from tests.engine.workers.model_bench import TOKENS, ModelBench
from tests.engine.workers.worker_bench import KEY, sampling

TEXT = source_tokens(1400)
PREFIX = TEXT[:640]
# They begin alike, and go on differently.
PROMPTS = [PREFIX + TEXT[start : start + 90] for start in (640, 800, 1000)]
KEEP = KeepSpec(0.5, 64, WEIGHTS.rule)
Segments = tuple[KeptSegment, ...]


def make_bench(codec: str, swap: int = 0) -> ModelBench:
    return ModelBench(partial(make_cutting, codec, 70), swap)


@pytest.fixture
def bench() -> Iterator[ModelBench]:
    bench = make_bench("raw")
    yield bench
    bench.check_rest()


def admit(bench: ModelBench, number: int, keep: KeepSpec = KEEP) -> str:
    """A request whose KV is on its way, and stays there."""
    name = f"r{number}"
    offer, output = bench.offer(name, PROMPTS[number], [], keep, True)
    order = Admit(name, 0, PROMPTS[number], output, sampling(TOKENS), offer.ticket, 60.0, keep=keep)
    bench.decode.line.inbox.append(order)
    bench.decode.shell.run_once()
    return name


def adopt(bench: ModelBench, count: int) -> dict[str, Sequence]:
    """Let everything that is on its way land, until so many sequences are decoded side by side."""
    for _ in range(20):
        while bench.courier.under_way:
            bench.courier.land()
        bench.decode.shell.run_once()
        found = {seq.id: seq for seq in bench.decode.engine.sequences()}
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} of {count} are there")


def finish(bench: ModelBench, *names: str) -> dict[str, list[int]]:
    """Let what is on its way land, and all answers be written."""
    for _ in range(3):
        while bench.courier.under_way:
            bench.courier.land()
        bench.decode.tell(Release("nobody", 0))
    for name in names:
        bench.prefill.tell(Release(name, 0))
    return {name: bench.prefill.tokens(name) + bench.decode.tokens(name) for name in names}


@pytest.mark.parametrize("codec", ["raw", "nuq4-1%"])
@pytest.mark.parametrize("boundary", [0, 64])
def test_requests_that_begin_alike_share_segments(codec: str, boundary: int) -> None:
    """Who comes later pulls less, and writes what he would write with a bag of his own."""
    bench, keep = make_bench(codec), KeepSpec(0.5, boundary, WEIGHTS.rule)
    alone = [bench.hand_over(f"bag-{n}", prompt, [], keep) for n, prompt in enumerate(PROMPTS)]
    bench.decode.holdings.evict_cached()
    shared = [bench.hand_over(f"cut-{n}", prompt, [], keep, True) for n, prompt in enumerate(PROMPTS)]
    assert [tokens for tokens, _ in shared] == [tokens for tokens, _ in alone]
    assert all(num_bytes <= 0.5 * shared[0][1] for _, num_bytes in shared[1:])
    # The first one moves little more than without segments.
    assert shared[0][1] <= 1.5 * alone[0][1]
    counts = bench.decode.stats.segment_slabs
    again, num_bytes = bench.hand_over("again", PROMPTS[0], [], keep, True)
    assert again == alone[0][0] and num_bytes <= shared[1][1]
    found = bench.decode.stats.segment_slabs
    assert found["pulled"] == counts["pulled"] > 0 and found["found"] > counts["found"] >= counts["pulled"]
    bench.check_rest()


def test_answers_go_on_where_they_moved(bench: ModelBench) -> None:
    """After so many tokens of the answer; rows of segments stay, whatever is decided behind them."""
    whole, _ = bench.hand_over("whole", PROMPTS[0], [], KEEP)
    for count in (1, 70, 128):
        rest, _ = bench.hand_over(f"moved-{count}", PROMPTS[0], whole[:count], KEEP, True)
        assert whole[:count] + rest == whole


def test_rows_in_one_step_share_what_is_in_the_pool_once(bench: ModelBench) -> None:
    alone = [bench.hand_over(f"bag-{n}", prompt, [], KEEP)[0] for n, prompt in enumerate(PROMPTS)]
    bench.decode.holdings.evict_cached()
    names = [admit(bench, number) for number in range(3)]
    seqs = list(adopt(bench, 3).values())
    slabs = [seq.slabs[1 : seq.lead_slabs] for seq in seqs]
    common = set(slabs[0]).intersection(*slabs)
    assert len(common) >= 4 and all(one.segments[0] == seqs[0].segments[0] for one in seqs)
    private = sum(len(set(seq.slabs) - common) - 1 for seq in seqs)
    assert bench.decode.holdings.used == 1 + len(common) + private
    assert finish(bench, *names) == dict(zip(names, alone, strict=True))


@pytest.mark.parametrize("swap", [0, 40])
def test_a_preempted_answer_goes_on_alike(swap: int) -> None:
    """Parked, with segments that it shares again; or computed again, with a bag."""
    bench = make_bench("raw", swap)
    alone = bench.hand_over("alone", PROMPTS[0], [], KEEP)[0]
    bench.decode.holdings.evict_cached()
    bench.decode.engine.copy_rate = MeasuredRate(1e12)
    names = [admit(bench, 0), admit(bench, 1)]
    engine, seq = bench.decode.engine, adopt(bench, 2)["r0"]
    for _ in range(30):
        bench.decode.shell.run_once()
    assert seq.segments and len(seq.output) > 3
    engine._preempt_sequence(seq.key, lambda: 1.0)
    assert seq.parked == bool(swap) == bool(seq.segment_keys)
    assert finish(bench, *names)["r0"] == alone
    bench.check_rest()


@pytest.mark.parametrize("evicted", [False, True])
def test_answers_that_come_back_share_their_segments_again(evicted: bool) -> None:
    """Parked together; meanwhile others may have taken the slabs that were cached."""
    bench, keep = make_bench("raw", 80), KeepSpec(0.5, 0, WEIGHTS.rule)
    alone = [bench.hand_over(f"bag-{n}", prompt, [], keep)[0] for n, prompt in enumerate(PROMPTS[:2])]
    bench.decode.holdings.evict_cached()
    bench.decode.engine.copy_rate = MeasuredRate(1e12)
    names = [admit(bench, 0, keep), admit(bench, 1, keep)]
    engine, seqs = bench.decode.engine, list(adopt(bench, 2).values())
    for _ in range(30):
        bench.decode.shell.run_once()
    held = bench.decode.holdings.used
    for seq in seqs:
        engine._preempt_sequence(seq.key, lambda: 1.0)
        assert seq.parked
    if evicted:
        bench.decode.holdings.evict_cached()
    while any(seq.parked for seq in seqs):
        bench.decode.shell.run_once()
    shared = {slab for slab in seqs[0].slabs[: seqs[0].lead_slabs] if slab in seqs[1].slabs}
    assert len(shared) >= 4 and bench.decode.holdings.used == held
    nodes = bench.decode.holdings.shared_nodes(seqs[0].key)
    assert len(nodes) == seqs[0].lead_slabs and not any(node.lasting for node in nodes)
    assert finish(bench, *names) == dict(zip(names, alone, strict=True))
    bench.check_rest()


def test_an_answer_that_was_parked_in_vain_forgets_its_segments() -> None:
    """A whole chunk that it left in the pool is gone, so all is computed again. What it has then is no segment."""
    bench = make_bench("raw", 80)
    alone = [bench.hand_over(f"bag-{n}", prompt, [], KEEP)[0] for n, prompt in enumerate(PROMPTS[:2])]
    bench.decode.holdings.evict_cached()
    bench.decode.engine.copy_rate = MeasuredRate(1e12)
    names = [admit(bench, 0), admit(bench, 1)]
    engine, seqs = bench.decode.engine, list(adopt(bench, 2).values())
    for _ in range(30):
        bench.decode.shell.run_once()
    for seq in seqs:
        engine._preempt_sequence(seq.key, lambda: 1.0)
    assert [seq.parked_from for seq in seqs] == [1, 0]
    bench.decode.holdings.evict_cached()
    while any(seq.parked for seq in seqs):
        bench.decode.shell.run_once()
    assert [bool(seq.kept_slabs) for seq in seqs] == [False, True]
    assert not seqs[0].segment_keys and seqs[1].segment_keys
    assert finish(bench, *names) == dict(zip(names, alone, strict=True))
    bench.check_rest()


def test_an_abort_leaves_segments_to_others(bench: ModelBench) -> None:
    alone = bench.hand_over("alone", PROMPTS[1], [], KEEP)[0]
    bench.decode.holdings.evict_cached()
    first, second = admit(bench, 0), admit(bench, 1)
    adopt(bench, 2)
    bench.decode.tell(Abort(first, 0))
    assert finish(bench, first, second)[second] == alone


def test_segments_with_a_wrong_map_are_not_attached_again(bench: ModelBench) -> None:
    alone = bench.hand_over("alone", PROMPTS[0], [], KEEP)[0]
    bench.decode.holdings.evict_cached()
    order = bench.prefill.runner.apply_eviction

    def spoil(key: str, bag_slabs: list[int]) -> None:
        order(key, bag_slabs)
        bench.prefill.pool.slab_bytes(bag_slabs[0])[:4] = b"nope"

    bench.prefill.runner.apply_eviction = spoil  # type: ignore[method-assign]
    name = admit(bench, 0)
    finish(bench, name)
    [failed] = [one for one in bench.decode.line.said if isinstance(one, Failed)]
    assert (failed.request, failed.code) == (name, "kv_corrupt")
    bench.prefill.runner.apply_eviction = order  # type: ignore[method-assign]
    assert bench.hand_over("right", PROMPTS[0], [], KEEP, True)[0] == alone


@pytest.mark.parametrize(
    "lie",
    [
        lambda found: (replace(found[0], digest=b"another choice.."), *found[1:]),
        lambda found: (*found[:-1], replace(found[-1], end=found[-1].end + 1)),
        lambda found: found[:-1],
    ],
    ids=["other rows", "more chunks", "a segment that is not named"],
)
def test_segments_that_are_not_those_of_the_ticket_are_refused(
    bench: ModelBench, lie: Callable[[Segments], Segments]
) -> None:
    """A source names other segments than it has, in a ticket that is signed. The pull fails, not a step."""
    alone = bench.hand_over("alone", PROMPTS[0], [], KEEP)[0]
    bench.decode.holdings.evict_cached()
    plan, named = bench.prefill.runner.plan_eviction, list[Segments]()

    def tell_wrong(order: EvictionOrder) -> EvictionReport:
        report = plan(order)
        named.append(lie(report.segments))
        missing = count_segment_slabs(report.segments) - count_segment_slabs(named[-1])
        return dataclasses.replace(report, segments=named[-1], bag_slabs=report.bag_slabs + missing)

    bench.prefill.runner.plan_eviction = tell_wrong  # type: ignore[method-assign]
    name = admit(bench, 0)
    offers = [one for one in bench.prefill.line.said if isinstance(one, Offer) and one.request == name]
    assert [tickets.decode_ticket(one.ticket, KEY).context.segments for one in offers] == named
    assert finish(bench, name)[name] == alone[:1]
    [failed] = [one for one in bench.decode.line.said if isinstance(one, Failed)]
    assert (failed.request, failed.code) == (name, "kv_corrupt")
    assert bench.decode.stats.integrity_failures == 1 and not bench.decode.stats.segment_slabs
    # Nobody finds them.
    assert bench.decode.holdings.cached == 0
    bench.prefill.runner.plan_eviction = plan  # type: ignore[method-assign]
    assert bench.hand_over("right", PROMPTS[0], [], KEEP, True)[0] == alone


def test_a_ticket_whose_segments_cannot_be_is_refused(bench: ModelBench) -> None:
    offer, output = bench.offer("a", PROMPTS[0], [], KEEP, True)
    ticket = tickets.decode_ticket(offer.ticket, KEY)
    context = ticket.context
    assert context.segments and context.is_keep_sound
    first = context.segments[0]
    for segments in (
        (replace(first, end=1 + first.slabs), *context.segments[1:]),
        (*context.segments, replace(first, end=100)),
        context.segments[::-1] if len(context.segments) > 1 else (first, first),
    ):
        assert not replace(context, segments=segments).is_keep_sound
    longer = replace(context, num_tokens=64 * 20)
    last = replace(context.segments[-1], end=16)
    longer = replace(longer, segments=(*context.segments[:-1], last))
    assert longer.is_keep_sound
    raw = tickets.encode_ticket(replace(ticket, context=longer), KEY)
    bench.decode.tell(Admit("a", 0, PROMPTS[0], output, sampling(TOKENS), raw, 60.0, keep=KEEP))
    [failed] = [one for one in bench.decode.line.said if isinstance(one, Failed)]
    assert failed.code == "stale_ticket"
    bench.prefill.tell(Release("a", 0))


def test_scopes_and_thresholds_share_nothing(bench: ModelBench) -> None:
    first = bench.hand_over("a", PROMPTS[0], [], KEEP, True)[1]
    other = bench.hand_over("b", PROMPTS[0], [], KeepSpec(0.49, 64, WEIGHTS.rule), True)[1]
    # The whole chunk below the boundary is common.
    assert other >= first - bench.decode.pool.layout.chunk_bytes
