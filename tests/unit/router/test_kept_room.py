"""The room of requests that evict: what they keep counts, by what was measured, and never less than they hold."""

from __future__ import annotations

import pytest

from diptych.eviction_report import KeptReport
from diptych.eviction_spec import ADA, FASTGEN, KeepSpec
from diptych.messages import Failed, Generate, Offer, Output, Prefill, Step
from router.effects import RelayEffect, RequestArrived
from router.routing.eviction_estimate import (
    MAX_SHARES,
    MAX_SHOWN_SHARES,
    KeptShares,
    held_tokens,
    kept_room_tokens,
    kept_tokens,
)
from tests.unit.router.fake_deployment import (
    PAIR,
    FakeDeployment,
    linked_deployment,
    make_request,
    messages_to,
)

KEEP = KeepSpec(0.95, 128)
HEADS = 4
# An answer may have 256 tokens, and so many are expected.
ANSWER = 256


def report(share: float, tokens: int = 640, boundary: int = 128, freed: int = 0) -> KeptReport:
    """All heads of a sequence of `tokens` keep `share` of the rows behind the boundary."""
    rows = HEADS * (tokens - boundary)
    return KeptReport(round(share * rows), rows, {"special": HEADS}, freed)


def ask(world: FakeDeployment, name: str, prompt: int = 640, keep: KeepSpec = KEEP) -> list[RelayEffect]:
    request = make_request(name, prompt, ANSWER)
    request.keep = keep
    return world.do(RequestArrived(request))


def prefill(world: FakeDeployment, name: str, kept: KeptReport, epoch: int = 0) -> list[RelayEffect]:
    """The prefill worker has the first token of the request, and what its heads keep."""
    world.workers["prefill-0"].held[name, epoch] += 1
    return world.say("prefill-0", Step([Output(name, epoch, [0], kept=kept)]))


def room(world: FakeDeployment, worker: str) -> float:
    """The room that is booked at a worker, in slabs."""
    return world.relay.ledger.load_of(worker).room_tokens / 64


@pytest.mark.parametrize(
    ("tokens", "boundary", "share", "slabs"),
    [
        (640, 0, 1.0, 10 + 2),
        (641, 0, 1.0, 11 + 2),
        (640, 128, 1.0, 10 + 2),
        (640, 128, 0.5, 2 + 4 + 2),
        (640, 128, 0.51, 2 + 5 + 2),
        (640, 128, 0.0, 2 + 2),
        (100, 128, 0.5, 2 + 2),
    ],
)
def test_room_is_what_is_kept_with_a_ring_and_a_map(
    tokens: int, boundary: int, share: float, slabs: int
) -> None:
    assert kept_room_tokens(tokens, boundary, share) == slabs * 64
    assert kept_room_tokens(tokens, boundary, share, 64 * 64) == 64 * 64, "never below what is held"
    assert kept_tokens(tokens, boundary, share) <= tokens


def test_what_a_report_says_is_held() -> None:
    assert held_tokens(report(0.5, freed=3), 128) == 7 * 64
    assert held_tokens(report(0.5, tokens=641), 128) == 11 * 64
    assert held_tokens(KeptReport(0, 0, {}), 0) == 0


def test_a_share_is_1_until_it_is_measured_for_its_class_threshold_and_rule() -> None:
    shares = KeptShares()
    for _ in range(20):
        shares.record_share("raw", KeepSpec(0.95), report(0.25))
    assert 0.25 < shares.expected_share("raw", KeepSpec(0.95)) < 0.27
    assert (
        shares.expected_share("raw", KeepSpec(0.9)) == shares.expected_share("tq4.s0", KeepSpec(0.95)) == 1.0
    )
    assert shares.expected_share("raw", KeepSpec(0.95, rule=FASTGEN)) == 1.0
    shares.record_share("raw", KeepSpec(0.9), KeptReport(0, 0, {}))
    assert [key for key, _ in shares.latest] == [("raw", 0.95, ADA)], "a report of no rows says nothing"


def test_thresholds_of_clients_do_not_fill_memory_or_the_status() -> None:
    """Any number may be asked for. Those that are close share a mean, and the oldest ones are forgotten."""
    shares = KeptShares()
    for number in range(1, 2001):
        for kv_class in ("raw", "tq4.s0", "tq3.s0"):
            shares.record_share(kv_class, KeepSpec(number / 2000), report(0.25))
    assert len(shares.latest) == MAX_SHOWN_SHARES
    assert len({key for key, _ in shares.latest}) == MAX_SHOWN_SHARES
    assert ("raw", 1.0, ADA) in dict(shares.latest) and ("raw", 0.5, ADA) not in dict(shares.latest)
    kept = sum(
        shares.expected_share(kv_class, KeepSpec(number / 2000)) < 1
        for kv_class in ("raw", "tq4.s0", "tq3.s0")
        for number in range(20, 2001, 20)
    )
    assert 0 < kept <= MAX_SHARES
    shares.record_share("raw", KeepSpec(0.95), report(0.25))
    assert (
        shares.expected_share("raw", KeepSpec(0.9501)) == shares.expected_share("raw", KeepSpec(0.9499)) < 1
    )
    assert ("raw", 0.95, ADA) in dict(shares.latest), "measured last"


def test_a_request_counts_with_all_tokens_then_with_what_its_heads_kept() -> None:
    world = linked_deployment(*PAIR)
    index = world.relay.index
    for name, shared in (("a", 0), ("b", 2)):
        ask(world, name)
        state, before = world.relay.live[name], room(world, "prefill-0")
        others = room(world, "decode-0") - state.room_tokens / 64 + shared
        prefill(world, name, report(0.25))
        world.say("prefill-0", Offer(name, 0, b"ticket", 640, 500, 5))
        # The prompt's 10 chunks, with room for a ring and a map, have become 2 whole ones and a bag of 3.
        assert room(world, "prefill-0") == before - 7
        # At the decode worker there are a quarter of 8 + 4 chunks behind the boundary, the ring, and the map.
        assert state.room_tokens == (2 + 3 + 2) * 64
        assert room(world, "decode-0") == others + 7 - shared
        assert index.count_shared("prefill-0", state.chunks) == 10
        assert index.count_shared("decode-0", state.chunks) == 2
    world.say("decode-0", Failed("a", 0, "transfer_failed", "lost"))
    # All of it is computed again, and the delivered token; what it keeps is known already.
    assert room(world, "prefill-0") == (11 + 2) + 5
    assert room(world, "decode-0") == (7 - 2) + (7 - 2)
    world.relay.live["b"].request.output.extend(range(100))
    world.pull("decode-0", ("b", 0))
    world.decode("decode-0", ("b", 0), finish="stop")
    world.flush("decode-0")
    assert index.count_shared("decode-0", index.name_chunks(list(range(640)), "scope")) == 2


def test_the_room_of_the_next_request_follows_those_before() -> None:
    world = linked_deployment(*PAIR, slabs=1 << 12)
    rooms = []
    for number in range(12):
        name = f"r{number}"
        ask(world, name)
        rooms.append(world.relay.live[name].room_tokens // 64)
        moving = world.relay.live[name].shares["decode-0"].moving_tokens
        assert moving <= rooms[-1] * 64
        prefill(world, name, report(0.25))
        world.say("prefill-0", Offer(name, 0, b"ticket", 640, 500, 5))
        assert world.relay.live[name].room_tokens == 7 * 64, "its own is known now"
    assert rooms[0] == 14 + 2 and rooms == sorted(rooms, reverse=True) and rooms[-1] in (7, 8)
    ask(world, "other", keep=KeepSpec(0.9, 128))
    assert world.relay.live["other"].room_tokens == (14 + 2) * 64, "nothing is known of this threshold"
    ask(world, "whole", keep=KeepSpec())
    assert world.relay.live["whole"].room_tokens == 14 * 64


def test_it_is_never_less_than_the_offer_or_the_latest_decision_holds() -> None:
    world = linked_deployment(*PAIR)
    ask(world, "r")
    prefill(world, "r", report(0.0))
    assert world.relay.live["r"].room_tokens == 10 * 64, "the report says that no slab became free"
    world.say("prefill-0", Offer("r", 0, b"ticket", 640, 500, 7))
    assert world.relay.live["r"].room_tokens == (7 + 1) * 64
    world.pull("decode-0", ("r", 0))
    world.flush("decode-0")
    world.say("decode-0", Step([Output("r", 0, list(range(64)), kept=report(0.0, 704, freed=6))]))
    assert world.relay.live["r"].room_tokens == 5 * 64 == world.relay.ledger.load_of("decode-0").room_tokens


def test_a_worker_that_prefills_and_decodes_has_the_whole_prompt_before_it_has_a_part() -> None:
    world = linked_deployment("decode-0", split=False, slabs=20)
    world.relay.pairs.kept_shares.record_share("raw", KeepSpec(0.95), report(0.0))
    for _ in range(30):
        world.relay.pairs.kept_shares.record_share("raw", KeepSpec(0.95), report(0.0))
    ask(world, "a")
    assert world.relay.live["a"].room_tokens <= 5 * 64 and room(world, "decode-0") == 10 + 2
    assert not messages_to(ask(world, "b"), "decode-0"), "20 slabs do not hold two prompts of 12"
    world.workers["decode-0"].held["a", 0] += 1
    effects = world.say("decode-0", Step([Output("a", 0, [0], kept=report(0.0, freed=7))]))
    assert [type(order) for order in messages_to(effects, "decode-0")] == [Generate], "there is room now"


def test_a_waiting_request_begins_as_soon_as_another_says_how_little_it_keeps() -> None:
    world = linked_deployment(*PAIR, slabs=25)
    assert [type(order) for order in messages_to(ask(world, "a"), "prefill-0")] == [Prefill]
    assert not messages_to(ask(world, "b"), "prefill-0"), "14 and 2 slabs twice are too many"
    effects = prefill(world, "a", report(0.1))
    assert [type(order) for order in messages_to(effects, "prefill-0")] == [Prefill]
    assert world.relay.live["b"].request.stage.value == "queued"
