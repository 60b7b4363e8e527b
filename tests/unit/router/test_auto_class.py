"""The router chooses the KV class of requests that leave it to the router: over time, pair by pair, in a budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from diptych.messages import Hello, Offer, Output, Prefill, Pulled, Step
from router.effects import AttemptBegan, FailRequest, RelayEffect, RequestArrived, SendMessage
from router.requests.request_state import sum_beside
from router.routing import auto_class
from router.routing.auto_class import AutoClasses, eligible_classes
from router.routing.class_choice import ASKED, DEFAULT, LINK, POOL, PREFIX, QUALITY, RETURN_S, BesideNeed
from router.routing.policy import seconds_per_unit
from router.workers.kv_classes import AnswerVersion, names_class
from router.workers.worker_state import WorkerState
from tests.unit.router.fake_deployment import PAIR, FakeDeployment, make_hello, make_request

LIGHT = "nuq4-1%.g128@aaaaaaaaaaaaaaaa"
OTHER = "nuq4-1%.g128@bbbbbbbbbbbbbbbb"
BYTES = {"raw": 1 << 20, LIGHT: 1 << 17, OTHER: 1 << 17, "int8.g32": 1 << 18, "tq4.s0": 1 << 17}
LOSSES = {LIGHT: 0.65, OTHER: 0.65, "int8.g32": -0.01, "tq4.s0": 1.8}


def hello_with(
    world: FakeDeployment | None, name: str, slabs: dict[str, int], auto: bool = True, link: str = "again"
) -> Hello:
    """The introduction of a worker that has these classes."""
    life = make_hello(name) if world is None else world.workers[name].hello
    return structs.replace(
        life,
        kv_classes={one: (count, BYTES[one]) for one, count in slabs.items()},
        kv_losses={one: loss for one, loss in LOSSES.items() if one in slabs},
        raw_chunk_bytes=BYTES["raw"],
        kv_auto=auto,
        link=link,
    )


def deployment(
    slabs: dict[str, int] | None = None,
    auto: bool = True,
    gb_per_s: float = 10.0,
    names: tuple[str, ...] = PAIR,
    source_slabs: dict[str, int] | None = None,
) -> FakeDeployment:
    """Linked pairs whose workers have several classes each; `source_slabs` are those of prefill workers."""
    world = FakeDeployment(gb_per_s=gb_per_s)
    for name in names:
        world.join(name)
        sizes = slabs or {"raw": 64, LIGHT: 256}
        sizes = (source_slabs or sizes) if name.startswith("prefill") else sizes
        world.say(name, hello_with(world, name, sizes, auto))
    for target in names:
        for source in names:
            if target.startswith("decode") and source.startswith("prefill"):
                world.link(target, source, gb_per_s)
    return world


def ask(
    world: FakeDeployment,
    name: str,
    kv: str | None = None,
    prompt: int = 300,
    sequences: int = 1,
    text: int = 0,
) -> list[AttemptBegan]:
    """A request arrives; prompts of one `text` begin alike."""
    requests = [
        make_request(name if number == 0 else f"{name}.{number}", prompt) for number in range(sequences)
    ]
    for request in requests:
        request.kv_class = kv
        request.prompt = [token + text for token in request.prompt]
    effects = world.do(RequestArrived(requests[0], others=tuple(requests[1:])))
    return [one for one in effects if isinstance(one, AttemptBegan)]


def given(
    world: FakeDeployment, name: str, kv: str | None = None, prompt: int = 300, text: int = 0
) -> tuple[str, str]:
    """The class of a request that begins at once, and why it has it."""
    (began,) = ask(world, name, kv, prompt, text=text)
    return began.kv_class, began.kv_reason


def finish(world: FakeDeployment, name: str) -> list[RelayEffect]:
    """The answer ends with its first token."""
    return world.say("prefill-0", Step([Output(name, 0, [1], finish="stop")]))


# ---- what comes into question


@pytest.mark.parametrize(
    ("budget_pct", "expected"),
    [
        (0.0, ["raw", "int8.g32"]),
        (0.7, ["raw", "int8.g32", LIGHT]),
        (2.0, ["raw", "int8.g32", LIGHT, "tq4.s0"]),
    ],
)
def test_classes_within_the_budget_come_in_the_order_of_their_losses(
    budget_pct: float, expected: list[str]
) -> None:
    slabs = dict.fromkeys(("tq4.s0", LIGHT, "int8.g32", "raw"), 8)
    source, target = (hello_with(None, name, slabs) for name in PAIR)
    assert eligible_classes(source, target, budget_pct) == expected
    assert eligible_classes(None, target, budget_pct) == expected


def test_a_class_without_a_recorded_loss_does_not_come_into_question() -> None:
    source, target = (hello_with(None, name, {"raw": 8, LIGHT: 8}) for name in PAIR)
    unsaid = structs.replace(source, kv_losses={})
    assert eligible_classes(unsaid, target, 100.0) == eligible_classes(target, unsaid, 100.0) == ["raw"]


def test_of_equal_bytes_the_one_that_loses_less_is_the_lighter() -> None:
    world = deployment(dict.fromkeys(("raw", "tq4.s0", LIGHT), 64))
    pairs = world.relay.pairs
    pairs.auto.budget_pct = 2.0
    found = pairs.auto.find_classes(PAIR, pairs.view)
    assert found is not None and found == ("raw", LIGHT)


# ---- what binds


def test_while_nothing_binds_requests_get_the_class_that_loses_nothing() -> None:
    world = deployment()
    assert given(world, "a") == ("raw", QUALITY)
    assert given(world, "b", "auto") == ("raw", QUALITY)


def test_without_auto_the_first_class_is_the_default_and_auto_may_be_asked_for() -> None:
    world = deployment({LIGHT: 256, "raw": 64}, auto=False)
    assert given(world, "a") == (LIGHT, DEFAULT)
    assert given(world, "b", "auto") == ("raw", QUALITY)
    assert given(world, "c", "nuq4-1%") == (LIGHT, ASKED)


def test_a_full_pool_makes_requests_light_and_nobody_waits() -> None:
    """16 slabs of 64 tokens: the first one takes most of them."""
    world = deployment({"raw": 16, LIGHT: 256})
    assert given(world, "a", prompt=600) == ("raw", QUALITY)
    assert given(world, "b", prompt=400) == (LIGHT, POOL)
    assert given(world, "c", prompt=10) == (LIGHT, POOL), "it would fit, but the choice changes slowly"
    finish(world, "a")
    world.now_s += RETURN_S - 1
    assert given(world, "d", prompt=10) == (LIGHT, POOL)
    world.now_s += 1
    assert given(world, "e", prompt=10) == ("raw", QUALITY)


def test_where_the_lighter_pool_is_full_the_better_one_is_used() -> None:
    world = deployment({"raw": 16, LIGHT: 16})
    assert given(world, "a", prompt=600) == ("raw", QUALITY)
    assert given(world, "b", prompt=700) == (LIGHT, POOL)
    finish(world, "a")
    assert given(world, "c", prompt=500) == ("raw", QUALITY), "12 of 16 slabs of the lighter class are taken"


def test_a_slow_link_makes_requests_light() -> None:
    """300 tokens are prefilled in 0.3 s; their KV has 5 MiB as raw, and an eighth of it coded."""
    world = deployment(gb_per_s=0.005)
    assert given(world, "a") == (LIGHT, LINK)
    assert world.relay.pairs.auto.modes[PAIR].reason == LINK


def test_a_link_that_became_slow_is_noticed_by_its_moves_and_a_fast_one_too() -> None:
    world = deployment()
    auto = world.relay.pairs.auto
    assert given(world, "a") == ("raw", QUALITY)
    auto.record_move(*PAIR, 100, 1.0)
    assert given(world, "b", prompt=10) == ("raw", QUALITY), "a few bytes tell nothing"
    auto.record_move(*PAIR, 5 << 20, 2.0)
    assert given(world, "c") == (LIGHT, LINK)
    for _ in range(20):
        auto.record_move(*PAIR, 5 << 20, 0.001)
    world.now_s += RETURN_S
    assert given(world, "d") == ("raw", QUALITY)


def test_moves_are_measured_by_the_relay_and_forgotten_with_the_worker() -> None:
    world = deployment()
    ask(world, "a")
    world.say("prefill-0", Step([Output("a", 0, [1])]))
    world.say("prefill-0", Offer("a", 0, b"ticket", 300, 5 << 20))
    world.say("decode-0", Pulled("a", 0, "shm", 5 << 20, {"transfer": 2.0}))
    assert given(world, "b") == (LIGHT, LINK)
    world.lost("decode-0")
    assert world.relay.pairs.auto == AutoClasses()


def test_kv_is_pulled_while_it_is_computed_over_a_link_that_became_slow() -> None:
    """By requests of a class that was chosen for that. For others the speed counts that the link had at first."""
    world = deployment(gb_per_s=1e6)
    ask(world, "a", text=1)
    assert not world.relay.live["a"].staged
    world.relay.pairs.auto.record_move(*PAIR, 5 << 20, 2.0)
    ask(world, "b", text=2)
    ask(world, "c", kv="raw", text=3)
    assert world.relay.live["b"].staged and not world.relay.live["c"].staged


def test_small_moves_show_that_a_link_is_fast_again() -> None:
    """They cannot show that it is slow, since latency takes most of their time."""
    auto = AutoClasses()
    auto.record_move(*PAIR, 1 << 20, 10.0)
    slow = replace(auto, _moves=dict(auto._moves))
    auto.record_move(*PAIR, 1 << 10, 1.0)
    assert auto == slow
    for _ in range(30):
        auto.record_move(*PAIR, 50_000, 0.001)
    (moves,) = auto._moves.values()
    assert moves.num_bytes / moves.seconds > 2e6


def test_the_queue_in_front_of_a_link_counts() -> None:
    """Alone, the move of each prompt hides behind its prefill. Those whose prefill is over still have to be moved."""
    world = deployment(gb_per_s=0.05)
    for text, name in enumerate("abc"):
        assert given(world, name, text=text) == ("raw", QUALITY)
        world.say("prefill-0", Step([Output(name, 0, [1])]))
    assert given(world, "d", text=3) == (LIGHT, LINK)


def test_an_slo_says_how_late_kv_may_be() -> None:
    """An answer of 8 tokens in 1 s each leaves time for a slow move."""
    world = deployment(gb_per_s=0.005)
    pairs = world.relay.pairs
    pairs.view = replace(pairs.view, tpot_s=1.0)
    assert given(world, "a") == ("raw", QUALITY)


def test_a_cached_prompt_takes_the_class_that_it_is_cached_in() -> None:
    world = deployment()
    assert given(world, "a", prompt=640) == ("raw", QUALITY)
    world.say("prefill-0", Step([Output("a", 0, [1])]))
    world.say("prefill-0", Offer("a", 0, b"ticket", 640, 10 << 20))
    for _ in range(20):
        world.relay.pairs.auto.record_move(*PAIR, 1 << 20, 1.0)
    assert given(world, "cold", prompt=640, text=7) == (LIGHT, LINK)
    assert given(world, "warm", prompt=640) == ("raw", PREFIX)


# ---- a decision holds


def test_an_answer_stays_with_its_class_when_the_choice_has_changed() -> None:
    small, large = {LIGHT: 256, "raw": 16}, {LIGHT: 256, "raw": 64}
    world = deployment(small, names=(*PAIR, "decode-1"), source_slabs=large)
    assert given(world, "a", prompt=600) == ("raw", QUALITY)
    assert given(world, "b", prompt=600) == ("raw", QUALITY), "the other decode worker has room"
    assert given(world, "c", prompt=600)[0] == LIGHT
    for message in (Step([Output("a", 0, [1])]), Offer("a", 0, b"ticket", 600, 10 << 20)):
        world.say("prefill-0", message)
    target = world.relay.live["a"].target
    assert target is not None
    world.say(target, Pulled("a", 0, "shm", 10 << 20, {"transfer": 0.001}))
    world.lost(target)
    state = world.relay.live["a"]
    assert (state.version, world.waiting) == (AnswerVersion("f", "raw"), {"a"}), (
        "it waits for room of its class"
    )
    finish(world, "b")
    assert state.pair is not None and state.attempt_version == AnswerVersion("f", "raw")


def test_sequences_of_one_request_share_the_class_of_the_first() -> None:
    """Together they have room in the better class. The next request has not."""
    world = deployment({"raw": 16, LIGHT: 256})
    begun = ask(world, "a", prompt=400, sequences=2)
    assert [(one.kv_class, one.kv_reason) for one in begun] == [("raw", QUALITY)] * 2
    assert given(world, "b", prompt=500) == (LIGHT, POOL)


def test_the_room_of_all_sequences_of_a_request_counts() -> None:
    """Each of them alone would have room in the better class, which all of them would fill."""
    for sequences, expected in ((2, ("raw", QUALITY)), (24, (LIGHT, POOL))):
        begun = ask(deployment({"raw": 16, LIGHT: 256}), "a", prompt=300, sequences=sequences)
        assert {(one.kv_class, one.kv_reason) for one in begun} == {expected}


def test_a_request_with_many_sequences_is_light_and_the_pair_stays_as_it_is() -> None:
    world = deployment({"raw": 16, LIGHT: 256})
    assert {(one.kv_class, one.kv_reason) for one in ask(world, "a", sequences=24)} == {(LIGHT, POOL)}
    assert world.relay.pairs.auto.modes[PAIR].reason is None
    assert given(world, "b") == ("raw", QUALITY), "its pool is empty"


def test_what_the_other_sequences_need_is_what_they_book() -> None:
    world = deployment({"raw": 64, LIGHT: 256})
    ask(world, "a", prompt=300, sequences=3)
    first, second, _ = (world.relay.live[name] for name in ("a", "a.1", "a.2"))
    assert sum_beside([first]) == BesideNeed()
    assert sum_beside([first, second]) == BesideNeed(320, second.room_tokens, 1)
    assert first.wish.beside == BesideNeed(2 * 320, 2 * second.room_tokens, 2)
    assert first.need.beside == BesideNeed(), "the class is decided"
    ask(world, "b", text=1)
    assert sum_beside([first, world.relay.live["b"]]).alike == 0


@pytest.mark.parametrize(("prefill_slabs", "decode_slabs"), [(64, 64), (64, 1024), (1024, 64)])
def test_sequences_with_a_long_prompt_are_light_and_none_waits(prefill_slabs: int, decode_slabs: int) -> None:
    """As raw, four prompts of 15 slabs fill the smaller pool, at the prefill worker until their KV is moved."""
    decode, prefill = ({"raw": slabs, LIGHT: 512} for slabs in (decode_slabs, prefill_slabs))
    world = deployment(decode, source_slabs=prefill)
    begun = ask(world, "a", prompt=900, sequences=32)
    assert {(one.kv_class, one.kv_reason) for one in begun} == {(LIGHT, POOL)}
    assert len(begun) == 32 and not world.waiting


def test_sequences_spread_over_all_workers_of_the_class() -> None:
    """Each decode worker gets two of the eleven at most: 10 of 16 slabs."""
    names = tuple(f"{role}-{number}" for role in ("prefill", "decode") for number in range(8))
    world = deployment({"raw": 16, LIGHT: 64}, names=names)
    begun = ask(world, "a", prompt=300, sequences=11)
    assert {(one.kv_class, one.kv_reason) for one in begun} == {("raw", QUALITY)}
    assert len(begun) == 11 and not world.waiting


def test_sequences_share_the_chunks_that_a_worker_holds() -> None:
    """Each of 40 needs a slab of its own beside the 14 that are there already."""
    world = deployment({"raw": 64, LIGHT: 512}, source_slabs={"raw": 1024, LIGHT: 1024})
    assert given(world, "a", prompt=900) == ("raw", QUALITY)
    world.say("prefill-0", Step([Output("a", 0, [1])]))
    world.say("prefill-0", Offer("a", 0, b"ticket", 900, 15 << 20))
    world.say("decode-0", Pulled("a", 0, "shm", 15 << 20, {"transfer": 0.001}))
    begun = ask(world, "b", prompt=900, sequences=40)
    assert {(one.kv_class, one.kv_reason) for one in begun} == {("raw", QUALITY)}
    assert {(one.kv_class, one.kv_reason) for one in ask(world, "c", prompt=900, sequences=40, text=1)} == {
        (LIGHT, POOL)
    }, "nobody has its chunks"


def test_an_attempt_without_a_token_may_get_another_class() -> None:
    world = deployment({"raw": 16, LIGHT: 256}, names=(*PAIR, "prefill-1"))
    (began,) = ask(world, "a", prompt=600)
    assert began.kv_class == "raw" and began.pair.prefill is not None
    for source in ("prefill-0", "prefill-1"):
        for _ in range(20):
            world.relay.pairs.auto.record_move(source, "decode-0", 1 << 20, 1.0)
    world.lost(began.pair.prefill)
    state = world.relay.live["a"]
    assert state.attempt_version == AnswerVersion("f", LIGHT) and state.wish.reason == LINK


# ---- names, and classes that are not there


def test_a_name_means_the_calibration_that_the_chosen_workers_share() -> None:
    """During an upgrade: one pair has the old calibration, the other one the new."""
    world = FakeDeployment()
    for number, one in enumerate((OTHER, LIGHT)):
        for role in ("prefill", "decode"):
            world.join(name := f"{role}-{number}")
            world.say(name, hello_with(world, name, {"raw": 64, one: 64}, auto=False))
    for target in (0, 1):
        for source in (0, 1):
            world.link(f"decode-{target}", f"prefill-{source}")
    begun = [began for name in "abcdef" for began in ask(world, name, "nuq4-1%")]
    assert {one.kv_class for one in begun} == {OTHER, LIGHT}
    for attempt in begun:
        number = (OTHER, LIGHT).index(attempt.kv_class)
        assert (attempt.pair.prefill, attempt.pair.decode) == (f"prefill-{number}", f"decode-{number}")
    assert {attempt.kv_reason for attempt in begun} == {ASKED}


def test_the_orders_of_workers_have_the_whole_id() -> None:
    world = deployment()
    request = make_request("a")
    request.kv_class = "nuq4-1%"
    effects = world.do(RequestArrived(request))
    orders = [one.message for one in effects if isinstance(one, SendMessage)]
    assert [one.kv_class for one in orders if isinstance(one, Prefill)] == [LIGHT]


def test_auto_without_a_class_in_question_fails_at_once() -> None:
    world = deployment({"tq4.s0": 64}, auto=False)
    assert world.relay.capabilities.auto_classes == []
    ask(world, "a", "auto")
    end = world.terminal["a"]
    assert isinstance(end, FailRequest) and end.failure.code == "no_workers"


def test_auto_fails_at_once_where_only_one_worker_of_each_pair_knows_a_loss() -> None:
    world = deployment({LIGHT: 64})
    unsaid = structs.replace(hello_with(world, "prefill-0", {LIGHT: 64}, link="new"), kv_losses={})
    world.say("prefill-0", unsaid)
    world.link("decode-0", "prefill-0")
    assert world.relay.find_pairs() == [PAIR]
    assert world.relay.capabilities.served_classes[:4] == ([LIGHT], [], [], "auto")
    ask(world, "a", "auto")
    end = world.terminal["a"]
    assert isinstance(end, FailRequest) and end.failure.code == "no_workers"
    assert given(world, "b") == (LIGHT, DEFAULT)


def test_the_speeds_of_workers_are_worked_out_once_for_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def counted(counts: list[tuple[WorkerState, int]], default_s: float) -> dict[str, float]:
        calls.append(len(counts))
        return seconds_per_unit(counts, default_s)

    names = tuple(f"{role}-{number}" for role in ("prefill", "decode") for number in range(3))
    world = deployment(names=names)
    monkeypatch.setattr(auto_class, "seconds_per_unit", counted)
    assert given(world, "a") == ("raw", QUALITY)
    assert len(world.relay.find_pairs()) == 9 and len(calls) == 3


def test_requests_that_ask_for_nothing_are_served_by_what_there_is() -> None:
    world = deployment({"tq4.s0": 64, OTHER: 64}, auto=True)
    world.relay.pairs.auto.budget_pct = 0.1
    assert given(world, "a") == ("tq4.s0", DEFAULT)


@pytest.mark.parametrize(
    ("asked", "kv_class", "fits"),
    [
        (LIGHT, LIGHT, True),
        ("nuq4-1%", LIGHT, True),
        ("nuq4-1%.g128", LIGHT, True),
        ("nuq4-1%@aaaaaaaaaaaaaaaa", LIGHT, True),
        ("auto", LIGHT, True),
        (OTHER, LIGHT, False),
        ("nuq4", LIGHT, False),
        ("nuq4-1%.g64", LIGHT, False),
        ("nuq4-1%@aaaaaaaaaaaaaaaa.g128", LIGHT, False),
        ("nuq4-1%.g128.g128", LIGHT, False),
        ("nuq4-1%.", LIGHT, False),
        ("int4", "int4.g32", True),
        ("int4", f"int4.g32@{'a' * 16}", True),
        ("int4.g32", "int4.g32", True),
        ("int4.g32", f"int4.g32@{'a' * 16}", False),
        ("tq4.s0", f"tq4.s0@{'a' * 16}", False),
        (f"int4@{'a' * 16}", f"int4.g32@{'a' * 16}", True),
        (f"int4.g32@{'b' * 16}", f"int4.g32@{'a' * 16}", False),
        (f"int4.g32@{'a' * 16}", "int4.g32", False),
        ("raw", "raw", True),
        ("raw", LIGHT, False),
        ("", "raw", False),
    ],
)
def test_what_names_a_class(asked: str, kv_class: str, fits: bool) -> None:
    assert names_class(asked, kv_class) is fits
