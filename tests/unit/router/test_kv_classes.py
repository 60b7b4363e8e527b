"""Workers are paired on KV classes, and an answer stays with the class that it began in."""

from __future__ import annotations

from msgspec import structs

from diptych.messages import Linked, Peer, Prefill
from router.effects import (
    ChosenPair,
    ClockTick,
    FailRequest,
    RelayEffect,
    RequestArrived,
    SendMessage,
    WorkerUnfit,
)
from router.routing.credits import pairs_with_credit
from router.routing.load_ledger import LoadLedger, WorkerLoad
from router.routing.policy import RoutingNeed, RoutingView, find_pairs, transfer_s
from router.routing.prefix_index import PrefixIndex
from router.workers.fleet import Fleet
from router.workers.kv_classes import (
    AnswerVersion,
    can_exchange_kv,
    class_is_gone,
    classes_of,
    pool_size,
    shared_classes,
)
from tests.unit.router.fake_deployment import (
    PAIR,
    FakeDeployment,
    bring_to_decode,
    bring_to_transfer,
    linked_deployment,
    make_hello,
    make_request,
)

OLD, NEW = "nuq4-1%.g128@aaaaaaaaaaaaaaaa", "nuq4-1%.g128@bbbbbbbbbbbbbbbb"
FOUR = ("prefill-0", "decode-0", "prefill-1", "decode-1")


def deployment_of(classes: dict[str, str], local_prefill: str = "never") -> FakeDeployment:
    """Workers by name, each with its class, linked as the gateway tells them."""
    world = FakeDeployment(local_prefill=local_prefill)
    for name, kv_class in classes.items():
        world.join(name, kv_class=kv_class)
    for name in classes:
        world.flush(name)
    return world


def replace_class(world: FakeDeployment, name: str, kv_class: str) -> None:
    """A worker ends and comes back with another class."""
    world.workers[name].alive = False
    world.lost(name)
    world.join(name, "killed", kv_class)
    for worker in world.workers:
        world.flush(worker)


def routing_view(*hellos: str, index: PrefixIndex | None = None, **loads: WorkerLoad) -> RoutingView:
    """Workers that have two classes each: NEW has a quarter of the slabs, and a quarter of the bytes."""
    fleet, ledger = Fleet(), LoadLedger()
    for name in hellos:
        hello = structs.replace(make_hello(name), kv_classes={OLD: (64, 1 << 20), NEW: (16, 1 << 18)})
        fleet.on_message(name, hello, 0.0)
    fleet.on_message("decode-0", Linked("prefill-0", "prefill-0/1", "shm", 1.0, 0.0), 0.0)
    for name, load in loads.items():
        ledger.book_shares("other", {name.replace("_", "-"): load})
    return RoutingView(fleet, ledger, True, PrefixIndex(0) if index is None else index)


def test_a_hello_without_classes_is_raw() -> None:
    plain, raw, coded = (
        make_hello("prefill-0"),
        make_hello("decode-0", kv_class="raw"),
        make_hello("decode-1", kv_class=OLD),
    )
    assert classes_of(plain) == classes_of(raw) == {"raw": (64, 1 << 20)}
    assert can_exchange_kv(plain, raw) and not can_exchange_kv(plain, coded)
    assert not can_exchange_kv(raw, structs.replace(raw, fingerprint="g"))


def test_a_pool_has_the_size_of_its_class() -> None:
    both = structs.replace(make_hello("decode-0"), kv_classes={OLD: (8, 100), NEW: (32, 25)})
    assert pool_size(both, NEW) == (32, 25) and pool_size(both, None) == (8, 100), "None means the first"
    other = structs.replace(both, kv_classes={NEW: (1, 25), OLD: (1, 100)})
    assert (shared_classes(both, other), shared_classes(other, both)) == ([OLD, NEW], [NEW, OLD])


def test_only_workers_of_one_class_hear_of_each_other() -> None:
    world = FakeDeployment()
    world.join("prefill-0", kv_class=OLD)
    effects = world.join("decode-0", kv_class=NEW)
    assert not [one for one in effects if isinstance(one, SendMessage) and isinstance(one.message, Peer)]
    (unfit,) = [one for one in effects if isinstance(one, WorkerUnfit)]
    assert OLD in unfit.text and NEW in unfit.text, "the operator sees both sides"
    assert world.join("decode-1", kv_class=OLD)[-1] == SendMessage(
        "decode-1", Peer("prefill-0", "prefill-0/1", {"shm": b"x"})
    )


def test_a_link_between_two_classes_does_not_count() -> None:
    world = deployment_of({"prefill-0": OLD, "decode-0": NEW})
    world.link("decode-0", "prefill-0")
    assert world.relay.find_pairs() == []
    world.arrive("r")
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and end.failure.code == "no_workers"
    assert OLD in end.failure.message and NEW in end.failure.message


def test_an_answer_stays_with_the_class_that_it_began_in() -> None:
    world = deployment_of(dict(zip(FOUR, (OLD, OLD, NEW, NEW), strict=True)))
    assert world.relay.find_pairs() == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
    bring_to_decode(world, "begun")
    assert world.relay.live["begun"].version == AnswerVersion("f", OLD)
    world.workers["decode-0"].alive = False
    world.lost("decode-0")
    assert world.waiting == {"begun"}, "the worker may come back as it was"
    world.join("decode-0", "killed", OLD)
    world.flush("decode-0")
    assert world.relay.live["begun"].pair == ChosenPair("prefill-0", "decode-0")


def test_an_answer_without_a_token_may_take_another_class() -> None:
    world = deployment_of(dict(zip(FOUR, (OLD, OLD, NEW, NEW), strict=True)))
    world.arrive("r")
    assert world.relay.live["r"].attempt_version == AnswerVersion("f", OLD)
    assert world.relay.live["r"].version is None
    world.workers["prefill-0"].alive = False
    world.lost("prefill-0")
    assert world.relay.live["r"].pair == ChosenPair("prefill-1", "decode-1")
    assert world.relay.live["r"].attempt_version == AnswerVersion("f", NEW)


def test_where_its_class_was_replaced_an_answer_fails_at_once() -> None:
    world = deployment_of(dict(zip(FOUR, (OLD, OLD, NEW, NEW), strict=True)))
    bring_to_decode(world, "begun")
    replace_class(world, "decode-0", NEW)
    world.do(ClockTick())
    end = world.terminal["begun"]
    assert isinstance(end, FailRequest) and end.failure.code == "no_workers" and end.failure.status == 503
    assert OLD in end.failure.message and NEW in end.failure.message and end.failure.retry_after_s
    assert world.now_s == 0.0, "nothing was waited for"


def test_a_decode_worker_that_prefills_can_finish_what_is_left_of_its_class() -> None:
    world = deployment_of(dict(zip(FOUR, (OLD, OLD, NEW, NEW), strict=True)), "fallback")
    bring_to_transfer(world, "begun")
    replace_class(world, "prefill-0", NEW)
    assert world.relay.live["begun"].pair == ChosenPair(None, "decode-0")


def test_decode_workers_alone_prefill_where_no_class_is_shared() -> None:
    world = deployment_of({"prefill-0": OLD, "decode-0": NEW}, "fallback")
    world.arrive("r")
    assert world.relay.live["r"].pair == ChosenPair(None, "decode-0")


def test_kv_that_is_ready_is_fetched_by_its_own_class() -> None:
    world = deployment_of(
        {"prefill-0": OLD, "decode-0": OLD, "prefill-1": NEW, "decode-1": NEW, "decode-2": OLD}
    )
    key = bring_to_transfer(world, "r")
    target = world.relay.live["r"].target
    assert target in ("decode-0", "decode-2")
    world.workers[target].alive = False
    world.lost(target)
    assert world.relay.live["r"].target in {"decode-0", "decode-2"} - {target} and key[1] == 0


def test_a_class_is_gone_when_its_workers_came_back_with_another() -> None:
    old = [make_hello(name, kv_class=OLD) for name in PAIR]
    new = [make_hello(name, kv_class=NEW) for name in PAIR]
    version, roles = AnswerVersion("f", OLD), ("prefill", "decode")
    assert not class_is_gone(version, old, roles) and class_is_gone(version, new, roles)
    assert class_is_gone(version, [new[0], old[1]], roles) and not class_is_gone(
        version, [new[0], old[1]], ("decode",)
    )
    assert not class_is_gone(version, [], roles), "nothing has replaced it"
    raw = [make_hello(name) for name in PAIR]
    assert not class_is_gone(AnswerVersion("g", "raw"), raw, roles), (
        "one class: another model's workers may come"
    )


def test_room_and_transfer_are_those_of_the_class() -> None:
    view = routing_view(*PAIR, decode_0=WorkerLoad(running=1, room_tokens=15 * 64))
    old, new = (RoutingNeed(256, 128, "f", kv_class=name) for name in (OLD, NEW))
    pair = ("prefill-0", "decode-0")
    assert find_pairs(new, view) == find_pairs(RoutingNeed(256, 128), view) == [pair]
    assert find_pairs(RoutingNeed(256, 128, kv_class="raw"), view) == []
    assert pairs_with_credit([pair], old, view) == [pair], "17 of 64 slabs"
    assert pairs_with_credit([pair], new, view) == [], "17 of 16 slabs"
    assert transfer_s(*pair, old, view) == 4 * (1 << 20) / 1e9
    assert transfer_s(*pair, new, view) == 4 * (1 << 18) / 1e9


def test_a_prefix_is_a_hit_in_its_own_class_only() -> None:
    index = PrefixIndex()
    view = routing_view(*PAIR, index=index)
    chunks = index.name_chunks(range(256), "s")
    index.record_sent("decode-0", chunks, 16, NEW)
    found = [
        view.shared_tokens("decode-0", RoutingNeed(256, 256, None, chunks, kv_class=name))
        for name in (OLD, NEW)
    ]
    assert found == [0, 255]


def test_fleets_that_tell_no_class_are_as_those_that_tell_raw() -> None:
    silent, named = linked_deployment(*FOUR), deployment_of(dict.fromkeys(FOUR, "raw"))
    for number in range(12):
        for world in (silent, named):
            world.arrive(f"r{number}", prompt=10 + 70 * number)
    choices = [[state.pair for state in world.relay.live.values()] for world in (silent, named)]
    assert choices[0] == choices[1] and silent.seen == named.seen


# ---- several classes in one worker


def both_everywhere(raw_slabs: int = 8, coded_slabs: int = 64) -> FakeDeployment:
    """A pair of workers that have both classes; OLD is the default."""
    world = FakeDeployment()
    for name in PAIR:
        world.join(name)
        life = world.workers[name].hello
        kinds = {OLD: (raw_slabs, 1 << 20), NEW: (coded_slabs, 1 << 18)}
        world.say(name, structs.replace(life, kv_classes=kinds, link="again"))
    world.link("decode-0", "prefill-0")
    return world


def ask(world: FakeDeployment, name: str, kv_class: str | None, prompt: int = 10) -> list[RelayEffect]:
    request = make_request(name, prompt, 8)
    request.kv_class = kv_class
    return world.do(RequestArrived(request))


def test_room_is_that_of_each_class_by_itself() -> None:
    ledger = LoadLedger()
    ledger.book_shares("a", {"w": WorkerLoad(10, 1, 640)}, kv_class=OLD)
    ledger.book_shares("b", {"w": WorkerLoad(20, 1, 64)}, 1, kv_class=NEW)
    assert ledger.load_of("w") == WorkerLoad(30, 2, 704)
    assert [ledger.load_up_to("w", None, one).room_tokens for one in (OLD, NEW, "raw")] == [640, 64, 0]
    assert ledger.load_up_to("w", 0, NEW) == WorkerLoad() and ledger.load_up_to("w", None) == WorkerLoad(
        30, 2, 704
    )
    ledger.book_shares("a", {"w": WorkerLoad(10, 1, 640)}, kv_class=NEW)
    assert (
        ledger.load_up_to("w", None, OLD) == WorkerLoad() and ledger.load_up_to("w", None, NEW).running == 2
    )
    for name in "ab":
        ledger.book_shares(name, {})
    assert ledger.load_of("w") == WorkerLoad() and len(ledger) == 0


def test_a_wish_is_honoured_from_the_order_to_the_decode_worker() -> None:
    world = both_everywhere()
    effects: list[RelayEffect] = []
    for name, kv_class in (("unsaid", None), ("old", OLD), ("new", NEW)):
        effects += ask(world, name, kv_class)
    lives = world.relay.live
    assert [lives[name].attempt_version for name in ("unsaid", "old", "new")] == [
        AnswerVersion("f", one) for one in (OLD, OLD, NEW)
    ]
    sent = [one.message for one in effects if isinstance(one, SendMessage)]
    orders = [one for one in sent if isinstance(one, Prefill)]
    assert {one.request: one.kv_class for one in orders} == {"unsaid": OLD, "old": OLD, "new": NEW}


def test_a_full_class_keeps_no_request_of_another_waiting() -> None:
    """The large one at the head waits for room of its class, and the small one behind it does not overtake it."""
    world = both_everywhere(raw_slabs=8)
    ask(world, "first", OLD, prompt=300)
    ask(world, "large", OLD, prompt=400)
    ask(world, "small", OLD)
    ask(world, "unsaid", None)
    ask(world, "other", NEW, prompt=400)
    begun = {name for name, state in world.relay.live.items() if state.pair is not None}
    assert begun == {"first", "other"}, "unsaid is of the default class"


def test_room_is_counted_in_the_class_that_both_workers_have() -> None:
    """The list of classes is changed worker by worker: what both have is not the first class of the prefill worker."""
    world = FakeDeployment()
    for name, kinds in zip(
        PAIR, ({OLD: (64, 1 << 20), NEW: (8, 1 << 18)}, {NEW: (64, 1 << 18)}), strict=True
    ):
        world.join(name)
        world.say(name, structs.replace(world.workers[name].hello, kv_classes=kinds, link="again"))
    world.link("decode-0", "prefill-0")
    for name in ("first", "second"):
        ask(world, name, None, prompt=300)
    lives = world.relay.live
    assert lives["first"].attempt_version == AnswerVersion("f", NEW)
    assert lives["second"].pair is None, "8 slabs are 512 tokens"


def test_a_class_that_no_worker_has_fails_at_once_and_says_so() -> None:
    world = both_everywhere()
    ask(world, "r", "tq4.s0")
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and end.failure.code == "no_workers"
    assert "tq4.s0" in end.failure.message and OLD in end.failure.message and NEW in end.failure.message
