"""Overdraft of decode room: what is predicted of answers' ends, who may begin early, and what bounds it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.messages import Heartbeat, Prefill, WorkerStats
from diptych.request import RequestStage, Tenancy
from router.effects import ClientGone, OverdraftSettled, RelayEffect, RequestArrived
from router.routing import credits
from router.routing.overdraft import (
    MAX_HELD_SHARE,
    MAX_MISSING_SHARE,
    MIN_PACE_TOKENS,
    MIN_PATIENCE,
    AnswerEnds,
    OverdraftPatience,
    RunningAnswer,
    frees_in_time,
    predicted_steps,
)
from router.routing.policy import RoutingNeed, seconds_per_unit
from router.workers.worker_state import WorkerState
from tests.unit.router.fake_deployment import (
    FakeDeployment,
    is_at_rest,
    linked_deployment,
    make_request,
    messages_to,
)
from tests.unit.router.fleet_views import fleet_of, view

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=60)
ANSWERS = st.lists(
    st.builds(RunningAnswer, st.integers(0, 2000), st.integers(0, 40), st.integers(1, 40)), max_size=8
)
# Of 1,000 tokens: 17 slabs with its answer.
PROMPT, ANSWER, SLABS = 1000, 32, 2 * 17
PREFILL_S, STEP_S = 1e-3, 20e-3


def ends_of(lengths: list[tuple[int, int]]) -> AnswerEnds:
    ends = AnswerEnds()
    for tokens, most in lengths:
        ends.record_answer(min(tokens, most), most)
    return ends


@given(LENGTHS, st.integers(0, 40), st.integers(1, 80), st.integers(0, 80))
def test_a_probability_grows_with_the_steps_and_is_one_at_the_limit(
    lengths: list[tuple[int, int]], done: int, most: int, steps: int
) -> None:
    ends = ends_of(lengths)
    chances = [ends.end_probability(done, most, count) for count in range(steps + 1)]
    assert all(0.0 <= chance <= 1.0 for chance in chances)
    assert all(first <= second for first, second in pairwise(chances))
    assert chances[-1] == 1.0 or done + steps < most


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 40), st.integers(0, 40))
def test_without_a_limit_the_probability_is_the_share_of_those_that_were_as_long(
    lengths: list[int], done: int, steps: int
) -> None:
    ends = ends_of([(tokens, 1000) for tokens in lengths])
    longer = [tokens for tokens in lengths if tokens > done]
    ended = [tokens for tokens in longer if tokens <= done + steps]
    wanted = len(ended) / len(longer) if longer else 0.0
    assert ends.end_probability(done, 1000, steps) == pytest.approx(wanted)


def test_answers_that_were_cut_off_say_only_that_they_were_not_over() -> None:
    """Of ten, five were cut at 8 tokens, and of the five others one ended at 4 and four at 16."""
    ends = ends_of([(8, 8)] * 5 + [(4, 100)] + [(16, 100)] * 4)
    assert ends.share_longer(4) == ends.share_longer(15) == pytest.approx(0.9)
    assert ends.share_longer(16) == 0.0 and ends.end_probability(8, 100, 8) == 1.0
    assert ends.end_probability(20, 100, 8) == 0.0, "longer than any: nobody knows"


@given(st.integers(0, 4000), ANSWERS, LENGTHS, st.integers(0, 40), st.integers(0, 40))
def test_less_that_is_missing_more_steps_and_more_answers_never_hurt(
    missing: int, answers: list[RunningAnswer], lengths: list[tuple[int, int]], steps: int, more: int
) -> None:
    ends = ends_of(lengths)
    if not frees_in_time(missing, answers, ends, steps):
        return
    assert frees_in_time(max(0, missing - more), answers, ends, steps)
    assert frees_in_time(missing, [*answers, RunningAnswer(64, 5, 5)], ends, steps)
    assert missing <= sum(answer.room_tokens for answer in answers)


@given(st.integers(1, 4000), ANSWERS, st.integers(0, 40))
def test_without_recent_answers_only_those_at_their_limit_count(
    missing: int, answers: list[RunningAnswer], steps: int
) -> None:
    sure = [one.room_tokens for one in answers if one.done_tokens + steps >= one.max_tokens]
    assert frees_in_time(missing, answers, AnswerEnds(), steps) == (sum(sure) >= missing)


def test_what_is_only_likely_needs_a_margin() -> None:
    """Each of eight answers ends with probability 1/2: four are expected, and fewer than two are hardly ever."""
    ends, answers = ends_of([(10, 99), (30, 99)] * 8), [RunningAnswer(100, 5, 99)] * 8
    assert frees_in_time(100, answers, ends, 10) and not frees_in_time(200, answers, ends, 10)


@given(st.floats(0, 10), st.floats(1e-3, 1.0), st.integers(0, 100), st.floats(0, 10))
def test_a_pace_that_was_slower_than_the_workers_steps_counts(
    seconds: float, step_s: float, tokens: int, decoding_s: float
) -> None:
    answer = RunningAnswer(64, 0, 9, tokens, decoding_s)
    steps = predicted_steps(seconds, step_s, [answer])
    assert steps <= seconds / step_s
    assert tokens < MIN_PACE_TOKENS or steps * decoding_s <= seconds * tokens * (1 + 1e-9)
    assert predicted_steps(seconds, 0.0, []) == 0, "it was not measured"


def test_patience_falls_with_each_that_waits_and_recovers() -> None:
    patience = OverdraftPatience()
    before = patience.share
    patience.record_outcome(in_time=False)
    assert patience.share < before
    for _ in range(100):
        patience.record_outcome(in_time=True)
    assert before < patience.share <= 1.0
    for _ in range(100):
        patience.record_outcome(in_time=False)
    assert patience.share == MIN_PATIENCE and (patience.num_in_time, patience.num_late) == (100, 101)


# ---- the relay


def measured(world: FakeDeployment) -> None:
    """All workers have been measured: a prompt takes a second, a step 20 ms."""
    for name, worker in world.workers.items():
        stats = WorkerStats(steps=100, step_seconds=100 * STEP_S, step_tokens=int(100 * STEP_S / PREFILL_S))
        world.say(name, Heartbeat(name, worker.hello.incarnation, stats))


def full_deployment(slabs: int = SLABS, overdraft: bool = True) -> FakeDeployment:
    """2P1D with room for two requests, `a` and `b`, which decode; all workers have been measured."""
    world = linked_deployment("prefill-0", "prefill-1", "decode-0", slabs=slabs, overdraft=overdraft)
    measured(world)
    for name in ("a", "b"):
        arrive(world, name)
        compute(world, name)
        pull(world, name)
    assert {state.request.stage for state in world.relay.live.values()} == {RequestStage.DECODING}
    return world


def arrive(
    world: FakeDeployment, name: str, priority: int = 0, answer: int = ANSWER, text: str = ""
) -> list[RelayEffect]:
    """A request whose prompt is that of others with the same `text`, else its own."""
    request = make_request(name, PROMPT, answer)
    request.prompt = [ord((text or name)[0]), *request.prompt[1:]]
    request.tenancy = world.origins[name] = Tenancy(f"tenant of {name}", "scope", priority)
    return world.do(RequestArrived(request))


def compute(world: FakeDeployment, name: str) -> list[RelayEffect]:
    """The prefill worker of a request has computed its prompt."""
    pair = world.relay.live[name].pair
    assert pair is not None and pair.prefill is not None
    world.first(pair.prefill, (name, 0))
    return world.flush(pair.prefill)


def pull(world: FakeDeployment, name: str) -> None:
    world.pull("decode-0", (name, 0))
    world.flush("decode-0")


def decode(world: FakeDeployment, name: str, count: int, finish: str | None = None) -> list[RelayEffect]:
    world.now_s += count * STEP_S
    world.decode("decode-0", (name, 0), finish, count)
    return world.flush("decode-0")


def begun(effects: list[RelayEffect]) -> list[str]:
    orders = [*messages_to(effects, "prefill-0"), *messages_to(effects, "prefill-1")]
    return [order.request for order in orders if isinstance(order, Prefill)]


def test_a_prompt_begins_when_an_answer_is_about_to_end() -> None:
    """The prompt takes a second, of which 0.8 s count: 40 steps. A later token may be what lets it begin."""
    world = full_deployment()
    assert begun(arrive(world, "long", answer=ANSWER)) == ["long"], (
        "31 tokens are left, and there is time for 40"
    )
    state = world.relay.live["long"]
    assert state.overdrawn and world.relay.pairs.num_overdrawn == 1
    decode(world, "a", 31, "length")
    settled = [one for one in compute(world, "long") if isinstance(one, OverdraftSettled)]
    assert settled == [OverdraftSettled("long", in_time=True)] and not state.overdrawn


def test_it_waits_as_long_as_no_answer_is() -> None:
    """Answers of 200 tokens: with time for 40 steps, a prompt begins when 40 tokens are left."""
    world = linked_deployment("prefill-0", "prefill-1", "decode-0", slabs=SLABS + 6, overdraft=True)
    measured(world)
    for _ in range(100):
        # Answers are expected to be short, so that two have room, and may still be long.
        world.relay.pairs.answers.record_length(ANSWER)
    for name in ("a", "b"):
        arrive(world, name, answer=200)
        compute(world, name)
        pull(world, name)
    assert begun(arrive(world, "c")) == []
    assert begun(decode(world, "a", 158)) == []
    assert begun(decode(world, "a", 1)) == ["c"], "41 tokens are left then, and 40 after the next one"


def test_off_means_that_nobody_begins_early() -> None:
    world = full_deployment(overdraft=False)
    assert begun(arrive(world, "c")) == []
    assert begun(decode(world, "a", 30)) == []
    assert begun(decode(world, "a", 1, "length")) == ["c"] and not world.relay.live["c"].overdrawn


def test_workers_that_were_not_measured_predict_nothing() -> None:
    world = linked_deployment("prefill-0", "decode-0", slabs=17, overdraft=True)
    arrive(world, "a")
    compute(world, "a")
    pull(world, "a")
    assert begun(arrive(world, "b")) == []


def test_a_wrong_prediction_leaves_the_kv_at_its_prefill_worker() -> None:
    """It waits there, everybody else is served, and the next ones are predicted with more care."""
    world = full_deployment()
    arrive(world, "c")
    settled = [one for one in compute(world, "c") if isinstance(one, OverdraftSettled)]
    assert settled == [OverdraftSettled("c", in_time=False)]
    state, patience = world.relay.live["c"], world.relay.pairs.patience
    assert (state.overdrawn, state.request.stage) == (True, RequestStage.TRANSFERRING)
    assert (patience.num_in_time, patience.num_late) == (0, 1) and patience.share < 0.8
    for name in ("a", "b"):
        decode(world, name, 31, "length")
    pull(world, "c")
    assert world.relay.pairs.num_overdrawn == 0
    decode(world, "c", 31, "length")
    assert is_at_rest(world)


def test_the_overdraft_is_bounded_at_both_workers() -> None:
    """Half of the decode room may be missing, and a prefill worker keeps half of its pool for others."""
    world = full_deployment()
    arrived = [begun(arrive(world, name)) for name in ("c", "d", "e")]
    assert arrived == [["c"], [], []], "17 of 34 slabs are half of the room"
    for name, worker in world.relay.fleet.workers.items():
        load, capacity = world.relay.ledger.load_of(name), worker.hello.num_slabs * 64
        assert load.overdrawn_tokens <= MAX_HELD_SHARE * capacity
        assert load.room_tokens <= (1 + MAX_MISSING_SHARE) * capacity


def test_nobody_overtakes_by_an_overdraft() -> None:
    """A request that may not begin yet blocks those behind it, although a short one would be predicted to fit."""
    world = linked_deployment("prefill-0", "prefill-1", "decode-0", slabs=SLABS, overdraft=True)
    measured(world)
    world.relay.pairs.patience.share = 0.5
    for name in ("a", "b"):
        arrive(world, name)
        compute(world, name)
        pull(world, name)
    assert begun(arrive(world, "first")) == []
    assert begun(arrive(world, "second", answer=2)) == []
    assert begun(decode(world, "a", 6)) == ["first"], "25 tokens are left"


def test_a_better_priority_does_not_wait_for_worse_ones() -> None:
    """Workers preempt worse ones for it, so their room counts as free, and it overdraws nothing."""
    world = full_deployment()
    assert begun(arrive(world, "urgent", priority=-1)) == ["urgent"]
    assert not world.relay.live["urgent"].overdrawn


@pytest.mark.parametrize("lost", ["prefill", "decode-0"])
def test_a_lost_worker_leaves_nothing_overdrawn(lost: str) -> None:
    world = full_deployment()
    arrive(world, "c")
    pair = world.relay.live["c"].pair
    assert pair is not None and pair.prefill is not None
    name = pair.prefill if lost == "prefill" else lost
    world.join(name)
    world.flush(name)
    for worker in world.workers:
        world.flush(worker)
    # With a new prefill worker it may begin early again; without the answers there is room.
    assert world.relay.live["c"].request.epoch == 1
    held = sum(world.relay.ledger.load_of(worker).overdrawn_tokens for worker in world.workers)
    assert world.relay.pairs.num_overdrawn == (lost == "prefill") and held == 1024 * (lost == "prefill")
    for name in list(world.relay.live):
        world.do(ClientGone(name))
    assert is_at_rest(world) and not world.relay.pairs.num_overdrawn


def test_chunks_that_others_have_are_not_freed_by_an_end() -> None:
    """Each of two requests with one prompt would free two slabs, and six are missing."""
    world = linked_deployment("prefill-0", "decode-0", slabs=30, overdraft=True)
    measured(world)
    for name in ("a", "same as a"):
        arrive(world, name, text="a")
        compute(world, name)
        pull(world, name)
    assert world.relay.live["same as a"].shared_tokens == PROMPT // 64 * 64
    assert begun(arrive(world, "c")) == []
    assert begun(decode(world, "a", 31, "length")) == ["c"] and not world.relay.live["c"].overdrawn


def crowded_deployment() -> FakeDeployment:
    """2P1D with room for four requests, which decode; so two may be missing."""
    world = full_deployment(2 * SLABS)
    for name in ("e", "f"):
        arrive(world, name)
        compute(world, name)
        pull(world, name)
    return world


def outcomes(effects: list[RelayEffect]) -> list[bool]:
    return [one.in_time for one in effects if isinstance(one, OverdraftSettled)]


def test_room_of_those_behind_it_was_never_counted() -> None:
    """A later one of a worse priority takes none of its room, so it frees none either."""
    world = crowded_deployment()
    assert begun(arrive(world, "first")) == ["first"]
    world.now_s += STEP_S
    assert begun(arrive(world, "worse", priority=1)) == ["worse"]
    assert world.relay.pairs.num_overdrawn == 2
    assert outcomes(compute(world, "first")) == [False], "no answer has ended"


def test_of_two_that_began_together_the_first_needs_no_room_for_the_other() -> None:
    world = crowded_deployment()
    requests = [make_request(name, PROMPT, ANSWER) for name in ("one", "two")]
    for request in requests:
        request.prompt = [ord(request.id[0]), *request.prompt[1:]]
        request.tenancy = world.origins[request.id] = Tenancy("tenant", "scope", 0)
    assert begun(world.do(RequestArrived(requests[0], others=(requests[1],)))) == ["one", "two"]
    decode(world, "a", 31, "length")
    assert outcomes(compute(world, "one")) == [True]
    assert outcomes(compute(world, "two")) == [False], "there is room for one of them"


def test_speeds_are_added_in_the_order_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of floats depends on the order, and that of a set on the process: one trace has one outcome."""
    seen: list[list[str]] = []

    def look(worker_counts: list[tuple[WorkerState, int]], default_s: float) -> dict[str, float]:
        seen.append([worker_state.name for worker_state, _ in worker_counts])
        return seconds_per_unit(worker_counts, default_s)

    monkeypatch.setattr(credits, "seconds_per_unit", look)
    names = [[f"{role}-{number}" for number in range(8)] for role in ("prefill", "decode")]
    links = {(source, target): 1.0 for source in names[0] for target in names[1]}
    state = view(fleet_of(*names[0], *names[1], links=links))
    for member in state.fleet.workers.values():
        member.stats = WorkerStats(steps=10, step_seconds=1.0, step_tokens=100)
    credits.pairs_with_overdraft([*links], RoutingNeed(100, 200), state, lambda _: [], AnswerEnds(), 1.0)
    assert seen == names
