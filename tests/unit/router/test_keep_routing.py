"""Requests that evict KV go to workers that can, keep what they asked for in every attempt, and fail where none can."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from diptych.eviction_spec import ADA, FASTGEN, PROFILE_ROWS, ZAP, KeepSpec
from diptych.messages import Admit, Generate, Prefill
from diptych.request import SEGMENTS, TRAITS
from router.effects import ClockTick, FailRequest, RequestArrived
from router.requests.request_state import RequestState
from router.routing.load_ledger import LoadLedger
from router.routing.policy import RoutingView
from router.routing.prefix_index import PrefixIndex
from router.workers.kv_classes import can_evict, keep_classes_of_pair
from tests.unit.router.fake_deployment import (
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
