"""Requests that evict KV go to workers that can, keep what they asked for in every attempt, and fail where none can."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from diptych.eviction_report import KeptReport
from diptych.eviction_spec import ADA, FASTGEN, PROFILE_ROWS, ZAP, KeepSpec
from diptych.messages import Admit, Generate, Prefill
from diptych.request import SEGMENTS, TRAITS
from router.effects import ClockTick, FailRequest, RequestArrived
from router.requests.request_state import RequestState
from router.routing.credits import missing_room
from router.routing.eviction_estimate import kept_tokens, segment_tokens
from router.routing.load_ledger import LoadLedger
from router.routing.policy import RoutingNeed, RoutingView, choose_pair, find_pairs, transfer_s
from router.routing.prefix_index import PrefixIndex, name_kept
from router.workers.kv_classes import can_evict, keep_classes_of_pair
from tests.unit.router.fake_deployment import (
    KEEP_RULES,
    PAIR,
    RECOVERY_S,
    FakeDeployment,
    make_hello,
    make_request,
    messages_to,
)
from tests.unit.router.fleet_views import fleet_of

KEEP = KeepSpec(0.95, 64)
RAW = ("raw",)
FOUR = ("prefill-0", "decode-0", "prefill-1", "decode-1")


def deployment(able: tuple[str, ...], names: tuple[str, ...] = PAIR, local: str = "never") -> FakeDeployment:
    """Linked workers with raw KV, of which `able` can evict."""
    world = FakeDeployment(local_prefill=local)
    for name in names:
        world.join(name, kv_class="raw", keep_classes=RAW if name in able else ())
    for name in names:
        world.flush(name)
    return world


def ask(world: FakeDeployment, name: str, keep: KeepSpec = KEEP, kv_class: str = "raw") -> list[object]:
    """A request arrives; returns the orders that it causes."""
    request = make_request(name)
    request.keep, request.kv_class = keep, kv_class
    effects = world.do(RequestArrived(request))
    return [order for worker in world.workers for order in messages_to(effects, worker)]


def test_requests_that_evict_go_to_workers_that_can() -> None:
    world = deployment(("prefill-1", "decode-1"), FOUR)
    for number in range(4):
        [order] = ask(world, f"r{number}")
        assert isinstance(order, Prefill) and order.keep == KEEP
    assert len(world.workers["prefill-1"].held) == 4 and not world.workers["prefill-0"].held
    [other] = ask(world, "whole", KeepSpec())
    assert isinstance(other, Prefill) and not other.keep.evicts
    assert world.workers["prefill-0"].held, "a request that keeps everything may go anywhere"
    assert world.relay.capabilities.served_classes.keep == ["raw"]


@pytest.mark.parametrize(
    ("rule", "lacking", "cut"),
    [
        ("zap@0123456789abcdef", None, True),
        ("zap@0123456789abcdef", "prefill-0", False),
        ("zap@0123456789abcdef", "decode-0", False),
        (ZAP, None, False),
        (ADA, None, False),
    ],
)
def test_kept_rows_are_cut_where_both_workers_exchange_segments(
    rule: str, lacking: str | None, cut: bool
) -> None:
    """And the running attempt can then be decoded by such workers only."""
    world = FakeDeployment(local_prefill="never")
    for name in PAIR:
        traits = TRAITS if name == lacking else (*TRAITS, SEGMENTS)
        world.join(name, kv_class="raw", keep_classes=RAW, traits=traits)
    for name in PAIR:
        world.flush(name)
    [order] = ask(world, "r", KeepSpec(0.5, 64, rule))
    assert isinstance(order, Prefill) and order.cuts_kept == cut
    [state] = world.relay.live.values()
    assert (SEGMENTS in state.attempt_need.traits) == cut and SEGMENTS not in state.need.traits
    [whole] = ask(world, "whole", KeepSpec())
    assert isinstance(whole, Prefill) and not whole.cuts_kept


RULE = "zap@0123456789abcdef"
PROMPT = list(range(1024))


def kept_need(keep: KeepSpec, share: float = 0.25) -> RoutingNeed:
    """What a prompt of 16 chunks needs, of which a share stays; only segments are shared."""
    chunks = PrefixIndex().name_chunks(PROMPT, "")
    kept = name_kept(chunks, len(PROMPT), keep)
    tokens = kept_tokens(len(PROMPT), keep.boundary, share)
    return RoutingNeed(
        len(PROMPT), tokens + 128, None, chunks, whole_tokens=keep.boundary, handed_tokens=tokens,
        kept_chunks=kept, kept_share=share,
    )  # fmt: skip


def segments_at(*names: str, keep: KeepSpec, traits: tuple[str, ...] = (*TRAITS, SEGMENTS)) -> RoutingView:
    """Two pairs, of which some workers were sent a prompt whose segments they have."""
    fleet = fleet_of(*FOUR)
    for worker in fleet.workers.values():
        worker.hello = structs.replace(worker.hello, keep_classes=list(RAW), traits=traits)
    view, need = RoutingView(fleet, LoadLedger(), True, index=PrefixIndex()), kept_need(keep)
    for name in names:
        view.index.record_sent(name, (*need.chunks[: keep.boundary_chunks], *need.kept_chunks), 100)
    return view


def test_a_decode_worker_that_has_the_segments_is_preferred_and_needs_less_room() -> None:
    """They are worth what they keep, and nothing where prompts are prefilled."""
    keep = KeepSpec(0.5, 64, RULE)
    need, view = kept_need(keep), segments_at("decode-1", keep=keep)
    # Of 15 chunks behind the boundary the last one is not judged, and 8 fill a segment.
    assert [view.shared_room(name, need) for name in FOUR] == [0, 0, 0, 64 + 8 * 16]
    assert view.shared_tokens("decode-1", need) == 64
    best = choose_pair(need, view, find_pairs(need, view))
    assert best is not None and best.decode == "decode-1"
    assert transfer_s("prefill-0", "decode-1", need, view) < transfer_s("prefill-0", "decode-0", need, view)
    assert missing_room("decode-1", need, view, 0) == missing_room("decode-0", need, view, 0)


@pytest.mark.parametrize(
    ("keep", "share"),
    [
        (KeepSpec(0.49, 64, RULE), 0.25),
        (KeepSpec(0.5, 128, RULE), 0.25),
        (KeepSpec(0.5, 64, "zap@fedcba9876543210"), 0.25),
        (KeepSpec(0.5, 64, ZAP), 0.25),
        (KeepSpec(0.5, 64, ADA), 0.25),
        (KeepSpec(0.5, 64, RULE), 1.0),
        (KeepSpec(0.5, 64, RULE), 0.7),
    ],
    ids=["threshold", "boundary", "weights", "no weights", "rule", "nothing known", "no segments"],
)
def test_what_is_kept_otherwise_is_not_shared(keep: KeepSpec, share: float) -> None:
    view, need = segments_at("decode-1", keep=KeepSpec(0.5, 64, RULE)), kept_need(keep, share)
    assert view.shared_room("decode-1", need) == view.shared_tokens("decode-1", need)


def test_workers_that_exchange_no_segments_share_none() -> None:
    keep = KeepSpec(0.5, 64, RULE)
    need, view = kept_need(keep), segments_at("decode-1", keep=keep, traits=TRAITS)
    assert view.shared_room("decode-1", need) == 64
    assert segment_tokens(9, 0.0) == 0 and segment_tokens(2, 0.4) == 0 and segment_tokens(12, 0.4) == 256


@pytest.mark.parametrize("cut", [True, False])
def test_room_that_others_hold_in_segments_is_booked_once(cut: bool) -> None:
    world = FakeDeployment(local_prefill="never")
    for name in PAIR:
        world.join(name, kv_class="raw", keep_classes=RAW, traits=(*TRAITS, SEGMENTS) if cut else TRAITS)
    for name in PAIR:
        world.flush(name)
    keep, relay = KeepSpec(0.5, 0, RULE), world.relay
    for _ in range(40):
        relay.pairs.kept_shares.record_share("raw", keep, KeptReport(25, 100, {"zap": 1}))
    for name in ("a", "b"):
        request = make_request(name, 1024)
        request.keep = keep
        world.do(RequestArrived(request))
        world.first("prefill-0", (name, 0))
        world.flush("prefill-0")
    states = [relay.live[name] for name in ("a", "b")]
    assert [state.target for state in states] == ["decode-0"] * 2
    first, second = (state.shares["decode-0"].room_tokens for state in states)
    shared = segment_tokens(15, states[1].kept_share) if cut else 0
    assert (states[0].shared_tokens, states[1].shared_tokens) == (0, shared) and (shared > 100) == cut
    assert first - second == states[1].shared_tokens
    for name in ("a", "b"):
        world.pull("decode-0", (name, 0))
        world.flush("decode-0")
    answers = relay.pairs._running_answers(states[0].attempt_need, world.now_s, "decode-0")
    # Chunks whose rows were dropped are shared by nobody.
    assert [one.room_tokens for one in answers] == [state.room_tokens - shared for state in states]


@pytest.mark.parametrize(
    ("keep", "scored", "expected"),
    [
        (KeepSpec(), None, None),
        (KeepSpec(), 0, 0),
        (KeepSpec(0.9, rule=ADA), None, 300 - PROFILE_ROWS),
        (KeepSpec(0.9, rule=FASTGEN), None, 0),
        (KeepSpec(0.9, rule=ZAP), None, 300),
    ],
    ids=["whole", "scored", "ada", "fastgen", "zap"],
)
def test_what_has_to_be_computed_anyway_is_no_hit(
    keep: KeepSpec, scored: int | None, expected: int | None
) -> None:
    """The router counts as cached what `Sequence.attachable_keys` would attach, and a pull takes what it takes."""
    request = make_request("r", 300)
    request.keep, request.sampling = keep, structs.replace(request.sampling, prompt_logprobs=scored)
    state = RequestState(request, 0)
    assert state.need.attachable_tokens == expected
    view = RoutingView(fleet_of(*PAIR), LoadLedger(), True, index=PrefixIndex())
    need = replace(state.need, chunks=view.index.name_chunks(list(range(300)), ""), whole_tokens=None)
    for name in PAIR:
        view.index.record_sent(name, need.chunks, 100)
    chunks = 4 if expected is None else expected // 64
    assert [view.shared_tokens(name, need) for name in PAIR] == [64 * chunks, 256]


def test_what_a_request_keeps_stays_the_same_when_it_is_tried_again_and_when_it_moves() -> None:
    world = deployment(FOUR, FOUR)
    ask(world, "r")
    [source] = [name for name in world.workers if ("r", 0) in world.workers[name].held]
    world.workers[source].alive = False
    effects = world.lost(source)
    [again] = [
        order for name in world.workers for order in messages_to(effects, name) if isinstance(order, Prefill)
    ]
    assert (again.epoch, again.keep) == (1, KEEP)
    source = next(name for name in world.workers if ("r", 1) in world.workers[name].held)
    world.first(source, ("r", 1))
    effects = world.flush(source)
    [admit] = [
        order for name in world.workers for order in messages_to(effects, name) if isinstance(order, Admit)
    ]
    assert admit.keep == KEEP
    target = next(name for name in world.workers if name != source and ("r", 1) in world.workers[name].held)
    world.pull(target, ("r", 1))
    world.flush(target)
    world.decode(target, ("r", 1), count=3)
    world.flush(target)
    world.workers[target].alive = False
    effects = world.lost(target)
    [moved] = [
        order for name in world.workers for order in messages_to(effects, name) if isinstance(order, Prefill)
    ]
    assert (moved.epoch, moved.keep, len(moved.output)) == (2, KEEP, 4)


def test_a_worker_that_decodes_alone_gets_it_too() -> None:
    world = deployment(("decode-0",), ("decode-0",), local="fallback")
    [order] = ask(world, "r")
    assert isinstance(order, Generate) and order.keep == KEEP


OTHER_RULES = ADA, FASTGEN, "zap@fedcba9876543210"


def join_by_rules(world: FakeDeployment, rules: dict[str, tuple[str, ...]]) -> None:
    """Linked workers with these rules."""
    for name, mine in rules.items():
        world.join(name, kv_class="raw", keep_rules=mine)
    for name in rules:
        world.flush(name)


@pytest.mark.parametrize(
    ("rule", "fits"),
    [(KEEP_RULES[-1], "1"), (OTHER_RULES[-1], "0"), (ZAP, "01"), (ADA, "01"), ("zap@0000000000000000", "")],
)
def test_requests_go_to_workers_that_have_their_rule(rule: str, fits: str) -> None:
    """Others would refuse them, and that ends them: no matter how long they waited, and what becomes of workers."""
    world = FakeDeployment(local_prefill="never")
    join_by_rules(world, {name: KEEP_RULES if name.endswith("1") else OTHER_RULES for name in FOUR})
    orders = [order for number in range(4) for order in ask(world, f"r{number}", KeepSpec(0.5, 64, rule))]
    assert len(orders) == (4 if fits else 0)
    assert {name[-1] for name in FOUR if world.workers[name].held} == set(fits)
    if not fits:
        end = world.terminal["r0"]
        assert isinstance(end, FailRequest) and end.failure.code == "no_workers"
        assert f"by {rule}, as the request asks: none can" in end.failure.message


def test_a_request_waits_for_workers_with_its_rule_while_others_are_there() -> None:
    world = FakeDeployment(local_prefill="never")
    join_by_rules(world, dict.fromkeys(PAIR, KEEP_RULES) | dict.fromkeys(FOUR[2:], ()))
    world.workers["decode-0"].alive = False
    world.lost("decode-0")
    assert world.relay.capabilities.keep_rules == list(KEEP_RULES)
    assert ask(world, "r", KeepSpec(0.5, 64, KEEP_RULES[-1])) == [] and "r" not in world.terminal
    effects = world.join("decode-0", "killed", "raw")
    effects += [one for name in FOUR for one in world.flush(name)]
    [order] = messages_to(effects, "prefill-0")
    assert isinstance(order, Prefill) and order.keep.rule == KEEP_RULES[-1]


@pytest.mark.parametrize("able", [(), ("prefill-0",), ("decode-0",)])
def test_a_request_that_no_pair_can_evict_for_fails_at_once(able: tuple[str, ...]) -> None:
    world = deployment(able)
    assert ask(world, "r") == []
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and end.failure.code == "no_workers"
    assert "can evict KV of the class raw" in end.failure.message
    assert (able[0] if able else "none") in end.failure.message


def test_a_request_waits_for_the_lost_worker_that_could_and_fails_when_it_comes_back_without() -> None:
    world = deployment(PAIR)
    world.workers["decode-0"].alive = False
    world.lost("decode-0")
    assert ask(world, "r") == [] and "r" not in world.terminal
    world.join("decode-0", "killed", "raw", ())
    for name in PAIR:
        world.flush(name)
    world.now_s += RECOVERY_S / 2
    world.do(ClockTick())
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and "prefill-0 can" in end.failure.message


def test_a_pair_can_evict_in_the_classes_that_both_can() -> None:
    both = {"raw": (8, 64), "tq4.s0": (8, 16)}
    plain = structs.replace(make_hello("decode-0"), kv_classes=both)
    left = structs.replace(plain, keep_classes=["raw", "tq4.s0"])
    right = structs.replace(plain, keep_classes=["raw"])
    assert keep_classes_of_pair(left, right) == ["raw"] and keep_classes_of_pair(None, left) == [*both]
    assert keep_classes_of_pair(left, plain) == []
    assert can_evict(left, "tq4") and not can_evict(right, "tq4") and not can_evict(plain, None)
