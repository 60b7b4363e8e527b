"""One tenant never locks out another, and an HTTP request of several sequences is taken in whole or not."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from diptych.messages import Prefill
from diptych.request import Request, Tenancy
from router.effects import ClientGone, FailRequest, RequestArrived, SendMessage
from router.requests.admission import Admission, AdmissionLimits
from router.requests.tenants import AdmissionDemand, TenantShares
from tests.unit.router.fake_deployment import (
    FakeDeployment,
    is_at_rest,
    linked_deployment,
    make_request,
)

PAIR = ("prefill-0", "decode-0")


def asked(name: str, tenant: str, prompt: int = 10, deadline_s: float = 1e9) -> Request:
    made = make_request(name, prompt, deadline_s=deadline_s)
    made.tenancy = Tenancy(tenant)
    return made


def arrive(world: FakeDeployment, tenant: str, *names: str, prompt: int = 10) -> None:
    """One HTTP request with these sequences."""
    first, *others = [asked(name, tenant, prompt) for name in names]
    world.do(RequestArrived(first, others=tuple(others)))


def codes(world: FakeDeployment, tenant: str) -> Counter[str]:
    """Why requests of a tenant, whose names begin with it, have failed."""
    ends = {name: end for name, end in world.terminal.items() if name.startswith(tenant)}
    return Counter(end.failure.code for end in ends.values() if isinstance(end, FailRequest))


# ---- through the relay


@pytest.mark.parametrize("slabs", [2, 64])
def test_a_tenant_that_fills_the_gateway_does_not_lock_out_another(slabs: int) -> None:
    """Whether its requests wait, and make room, or all of them are being served."""
    world = linked_deployment(*PAIR, slabs=slabs, limits=AdmissionLimits(max_requests=8))
    for index in range(9):
        arrive(world, "a", f"a{index}")
    arrive(world, "b", "b0")
    assert "b0" in world.relay.live and not codes(world, "b")
    assert 7 <= world.relay.admission.in_flight <= 8
    refusals = [end for end in world.terminal.values() if isinstance(end, FailRequest)]
    assert refusals and all(
        end.failure.status == 429 and end.failure.client_may_retry and end.failure.retry_after_s
        for end in refusals
    )


def test_those_that_wait_make_room_and_those_that_were_begun_do_not() -> None:
    world = linked_deployment(*PAIR, slabs=4, limits=AdmissionLimits(max_requests=16))
    for index in range(16):
        arrive(world, "a", f"a{index}")
    begun = {name for name, state in world.relay.live.items() if state.pair is not None}
    for index in range(4):
        arrive(world, "b", f"b{index}")
    assert not codes(world, "b") and begun <= set(world.relay.live)
    lost = [
        name
        for name, end in world.terminal.items()
        if isinstance(end, FailRequest) and end.failure.code == "displaced"
    ]
    assert lost == ["a13", "a12"], "the latest, one for each that finds no room"
    arrive(world, "c", "c0")
    assert not codes(world, "c"), "a third one finds room as well"
    for name in list(world.relay.live):
        world.do(ClientGone(name))
    assert is_at_rest(world)


def test_several_sequences_are_taken_in_whole_or_not() -> None:
    world = linked_deployment(*PAIR, limits=AdmissionLimits(max_requests=10))
    arrive(world, "a", *(f"a{index}" for index in range(5)))
    begun = [effect for name in ("x", "y") for effect in world.arrive(name)]
    assert any(isinstance(effect, SendMessage) and isinstance(effect.message, Prefill) for effect in begun)
    first, *others = [asked(f"n{index}", "") for index in range(8)]
    effects = world.do(RequestArrived(first, others=tuple(others)))
    assert not any(isinstance(effect, SendMessage) for effect in effects)
    assert [effect.request for effect in effects if isinstance(effect, FailRequest)] == [
        f"n{i}" for i in range(8)
    ]
    assert world.relay.admission.in_flight == 7


def test_the_sequences_of_a_request_make_room_together() -> None:
    world = linked_deployment(*PAIR, slabs=2, limits=AdmissionLimits(max_requests=16))
    arrive(world, "a", "a-first")
    for index in range(4):
        arrive(world, "a", *(f"a{index}.{each}" for each in range(3)))
    for name in ("a-last", "b0", "b1", "b2"):
        arrive(world, name[0], name)
    assert not codes(world, "b")
    assert codes(world, "a") == {"displaced": 1}, "what came last makes room"
    arrive(world, "c", "c0")
    lost = {name for name, end in world.terminal.items() if isinstance(end, FailRequest)}
    assert lost == {"a-last", "a3.0", "a3.1", "a3.2"}


def test_a_client_that_leaves_in_the_middle_leaves_no_trace() -> None:
    world = linked_deployment(*PAIR, slabs=2, limits=AdmissionLimits(max_requests=16))
    arrive(world, "a", *(f"a{each}" for each in range(6)))
    world.do(ClientGone("a3"))
    world.do(ClientGone("a0"))
    assert world.relay.admission.in_flight == 4
    assert world.relay.admission.tenants.usage_of("a").amounts == (4, 40)
    for each in range(6):
        world.do(ClientGone(f"a{each}"))
    assert is_at_rest(world) and not world.relay.admission.tenants.usage_of("a").requests


def test_a_banned_sequence_takes_the_others_of_its_request_with_it() -> None:
    world = linked_deployment(*PAIR)
    relay = world.relay
    relay.quarantine.ban_question(relay.quarantine.fingerprint_question(asked("bad", "a", prompt=12)), 0.0)
    world.do(RequestArrived(asked("good", "a"), others=(asked("bad", "a", prompt=12),)))
    assert codes(world, "good") == codes(world, "bad") == {"request_quarantined": 1} and is_at_rest(world)


def test_prompts_that_find_no_room_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    world = linked_deployment(*PAIR, limits=AdmissionLimits(max_requests=1, shared=False))
    relay, looked = world.relay, list[Request]()
    relay.quarantine.ban_question(relay.quarantine.fingerprint_question(asked("bad", "a", prompt=12)), 0.0)
    arrive(world, "a", "a0")
    fingerprint = relay.quarantine.fingerprint_question

    def counted(request: Request) -> bytes:
        looked.append(request)
        return fingerprint(request)

    monkeypatch.setattr(relay.quarantine, "fingerprint_question", counted)
    arrive(world, "b", "b0", "b1")
    assert codes(world, "b") == {"too_many_requests": 2} and not looked


# ---- the books


def test_a_tenant_alone_may_use_all_that_is_not_kept() -> None:
    admission = Admission(AdmissionLimits(max_requests=80))
    for index in range(70):
        assert admission.find_refusal(1, 5, 0.0, "a") is None
        admission.admit_request(f"a{index}", 5, 0.0, "a")
    refusal = admission.find_refusal(1, 5, 0.0, "a")
    assert refusal is not None and "70 of them are of this API key" in refusal.message
    only = Admission(AdmissionLimits(max_requests=80, shared=False))
    for index in range(80):
        assert only.find_refusal(1, 5, 0.0, "a") is None
        only.admit_request(f"a{index}", 5, 0.0, "a")


def test_prompt_tokens_are_shared_too() -> None:
    admission = Admission(AdmissionLimits(max_queued_tokens=800))
    for index in range(7):
        assert admission.find_refusal(1, 100, 0.0, "a") is None
        admission.admit_request(f"a{index}", 100, 0.0, "a")
        admission.mark_begun(f"a{index}")
    assert admission.find_refusal(1, 100, 0.0, "a") is not None
    assert admission.find_refusal(1, 5000, 0.0, "b") is None, (
        "one prompt of each may wait, whatever its length"
    )
    admission.admit_request("b0", 90, 0.0, "b")
    assert admission.find_refusal(1, 10, 0.0, "b") is None
    refusal = admission.find_refusal(1, 100, 0.0, "b")
    assert refusal is not None and refusal.code == "queue_full", "nothing of a can make room any more"


def test_what_others_have_waiting_does_not_count_for_who_has_little() -> None:
    admission = Admission(AdmissionLimits(max_requests=1000, max_wait_s=10.0))
    for index in range(200):
        admission.admit_request(f"a{index}", 10, 0.0, "a")
    for index in range(100):
        admission.mark_begun(f"a{index}")
        admission.mark_prefilled(f"a{index}", 0.5 * (index + 1))
    refusal = admission.find_refusal(1, 10, 50.0, "a")
    assert refusal is not None and refusal.code == "queue_too_long"
    assert admission.find_refusal(1, 10, 50.0, "b") is None
    admission.admit_request("b0", 10, 50.0, "b")
    assert admission.find_refusal(1, 10, 50.0, "b") is None, "one of each is before its second"
    assert admission.predicted_wait_s(50.0) == pytest.approx(50.5)


def test_who_is_within_its_share_is_let_in_whatever_the_others_do() -> None:
    """Tenants come and go at random: the bound holds, and the quiet one is refused only if nobody can make room."""
    chance, bound = random.Random(7), 48
    tenants = TenantShares((bound, 1 << 30), shared=True)
    open_of: dict[str, list[str]] = {name: [] for name in ("a", "b", "c", "quiet")}
    begun, displaced, refused = set[str](), 0, 0
    for number in range(20_000):
        name = chance.choice(list(open_of))
        if open_of[name] and chance.random() < (0.3 if name == "quiet" else 0.1):
            gone = open_of[name].pop(chance.randrange(len(open_of[name])))
            tenants.remove_request(gone)
            begun.discard(gone)
            continue
        count = 1 if name == "quiet" else chance.randint(1, 6)
        demand = AdmissionDemand(name, (count, count))
        within = tenants.usage_of(name).requests + count <= tenants.share_of(0, name)
        victims = (
            tenants.find_victims(demand, tenants.excess_of(demand)) if any(tenants.excess_of(demand)) else []
        )
        if victims is None:
            refused += 1
            idle = [one for mine in open_of.values() for one in mine if one not in begun]
            above = [them for them in open_of if tenants.usage_of(them).requests > tenants.share_of(0, name)]
            assert (
                name != "quiet"
                or not within
                or not any(one[0] in {them[0] for them in above} for one in idle)
            )
            continue
        for group in victims:
            assert group.tenant != name and not begun & set(group.unprefilled_tokens)
            for gone in list(group.unprefilled_tokens):
                displaced += 1
                open_of[group.tenant].remove(gone)
                tenants.remove_request(gone)
        for index in range(count):
            made = f"{name}{number}.{index}"
            tenants.add_request(made, 1, name, f"{name}{number}")
            open_of[name].append(made)
        if chance.random() < 0.1:
            for index in range(count):
                tenants.mark_begun(f"{name}{number}.{index}")
                begun.add(f"{name}{number}.{index}")
        assert len(tenants) == sum(map(len, open_of.values())) <= bound
    assert displaced > 10 and refused > 100
    for name, mine in open_of.items():
        for one in mine:
            tenants.remove_request(one)
        assert tenants.usage_of(name).amounts == (0, 0)
    assert tenants.total.amounts == (0, 0) and tenants.total.num_unprefilled == 0
