"""Readiness under load: a canary that waits behind clients has not failed, one that meets a stuck worker has."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from diptych.channel.hub import ChannelHub
from diptych.failure_statuses import RequestFailure
from diptych.messages import (
    Admit,
    Heartbeat,
    Hello,
    Linked,
    Offer,
    Output,
    Prefill,
    Pulled,
    Step,
    ToGateway,
    ToWorker,
    WorkerStats,
)
from diptych.request import Request, SamplingParams
from router.effects import ChosenPair, TelemetryEffect
from router.requests.relay import Relay
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.schemas.response_schema import KvDetails
from services.gateway.ops import readiness
from services.gateway.ops.readiness import CanaryProber, choose_canary_pairs

WAY = ("prefill-0", "decode-0")


class Channel:
    """A hub without sockets. The prefill worker answers clients at once, canaries only if `kind`; decode is mute."""

    def __init__(self, kind: bool) -> None:
        self.kind = kind
        self.inbox: asyncio.Queue[tuple[str, ToGateway]] = asyncio.Queue()
        for name in WAY:
            hello = Hello(name, name[:-2], "life", "same", {}, "here", 1, 64, 4096, 256, {})
            self.inbox.put_nowait((name, hello))
        self.inbox.put_nowait(("decode-0", Linked("prefill-0", "life", "shm", 9.0, 12.0)))

    async def receive_message(self) -> tuple[str, ToGateway]:
        return await self.inbox.get()

    def send(self, worker: str, message: ToWorker) -> bool:
        if isinstance(message, Prefill) and (self.kind or not message.request.startswith("canary")):
            finish = "length" if message.sampling.max_tokens == 1 else None
            output = Output(message.request, message.epoch, [5], finish=finish)
            self.inbox.put_nowait((worker, Step([output])))
            if finish is None:
                self.inbox.put_nowait((worker, Offer(message.request, message.epoch, b"ticket", 1, 4096)))
        return True

    def accept_session(self, worker: str, link: str) -> bool:
        return True

    def take_ended(self) -> list[str]:
        return []

    def end_session(self, worker: str) -> None:
        raise AssertionError(f"{worker} was lost")

    def beat(self) -> None:
        for name in WAY:
            self.inbox.put_nowait((name, Heartbeat(name, "life", WorkerStats())))


class Client:
    """A reader that keeps asking for one token."""

    def __init__(self, backend: RelayBackend) -> None:
        self.backend, self.asked = backend, 0

    def ask(self) -> None:
        self.asked += 1
        request = Request(
            f"client-{self.asked}", [1], SamplingParams(max_tokens=1, seed=0), self.backend.clock() + 9
        )
        self.backend.submit_requests([(request, self)])

    def deliver_output(self, output: Output, now_s: float) -> None:
        assert output.finish == "length"

    def record_effect(self, effect: TelemetryEffect, now_s: float) -> None: ...

    def record_kv_class(self, kv_class: str, reason: str, details: KvDetails | None) -> None: ...

    def finish_sequence(self, reason: str, now_s: float) -> None: ...

    def fail_sequence(self, failure: RequestFailure) -> None:
        raise AssertionError(failure)


async def readiness_of(kind: bool, clients: bool) -> bool:
    """What `/ready` says after a canary, while clients get (only) first tokens, or nothing happens."""
    channel, metrics = Channel(kind), GatewayMetrics()
    backend = RelayBackend(Relay(), cast(ChannelHub, channel), metrics)
    prober, client = CanaryProber(backend, metrics, [1], (1, 1)), Client(backend)
    running = asyncio.create_task(backend.run_tasks())
    while backend.worker_pairs() != [WAY]:
        await asyncio.sleep(0)
    asked = asyncio.create_task(prober.fresh_readiness())
    while not asked.done():
        channel.beat()
        if clients:
            client.ask()
        await asyncio.sleep(0.02)
    running.cancel()
    return (await asked).ready


@pytest.mark.parametrize(
    ("kind", "clients", "good"),
    [
        pytest.param(False, True, True, id="it waits for prefill behind clients"),
        pytest.param(False, False, False, id="prefill is stuck"),
        pytest.param(True, True, False, id="decode is stuck although prefill is busy"),
    ],
)
def test_a_canary_fails_only_where_nothing_moves(
    kind: bool, clients: bool, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "CANARY_TIMEOUT_S", 1.0)
    monkeypatch.setattr(
        readiness, "BUSY_S", 60.0
    )  # whoever sent anything at all counts as busy, however slow this machine is
    assert asyncio.run(readiness_of(kind, clients)) == good


async def reasons() -> list[list[str]]:
    """What is missing while one of two prefill workers is linked, and after both are."""
    channel, metrics = Channel(kind=True), GatewayMetrics()
    channel.inbox.put_nowait(
        ("prefill-1", Hello("prefill-1", "prefill", "l", "same", {}, "", 1, 64, 4096, 256, {}))
    )
    backend = RelayBackend(Relay(), cast(ChannelHub, channel), metrics)
    prober = CanaryProber(backend, metrics, [1], (2, 1))
    running, reported = asyncio.create_task(backend.run_tasks()), []
    for linked in (1, 2):
        while len(backend.worker_pairs()) < linked or not channel.inbox.empty():
            await asyncio.sleep(0)
        reported.append(
            [reason for reason in prober.current_readiness().reasons if "not tried yet" not in reason]
        )
        channel.inbox.put_nowait(("decode-0", Linked("prefill-1", "l", "shm", 9.0, 12.0)))
    running.cancel()
    return reported


def test_a_pair_that_is_not_linked_yet_is_a_reason_also_when_another_is() -> None:
    assert asyncio.run(reasons()) == [["prefill-1 -> decode-0: not linked yet"], []]


# ---- how many canaries, and what strangers learn


@pytest.mark.parametrize("pools", [(1, 1), (2, 3), (32, 32), (1, 40)])
def test_every_worker_is_proven_by_as_many_canaries_as_there_are_workers(pools: tuple[int, int]) -> None:
    prefill, decode = (
        [f"{role}-{index}" for index in range(count)] for role, count in zip("pd", pools, strict=True)
    )
    ways: list[readiness.WorkerPair] = [(source, target) for source in prefill for target in decode]
    seen: set[readiness.WorkerPair] = set()
    for round_number in range(40):
        chosen = choose_canary_pairs(ways, {*prefill, *decode}, round_number)
        assert {worker for way in chosen for worker in way} == {*prefill, *decode}
        assert len(chosen) <= max(pools), "not one for each pair"
        seen.update(chosen)
    assert len(seen) > len(ways) / 3, "partners change"
    assert (
        choose_canary_pairs(ways, {"p-0"}, 3)[0][0] == "p-0"
        and len(choose_canary_pairs(ways, {"p-0"}, 3)) == 1
    )
    local: list[readiness.WorkerPair] = [(None, target) for target in decode]
    assert sorted(choose_canary_pairs(local, set(decode), 1), key=str) == sorted(local, key=str)


def test_what_is_missing_is_found_with_one_look_at_the_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at all pairs for each pair took the event loop 0.2 s of every second at 32 x 32 workers."""
    backend = RelayBackend(Relay(), cast(ChannelHub, Channel(kind=True)), GatewayMetrics())
    for role in ("prefill", "decode"):
        for index in range(12):
            name = f"{role}-{index}"
            hello = Hello(name, role, "life", "same", {}, "here", index, 64, 4096, 256, {}, link=name)
            backend.relay.fleet.on_message(name, hello, 0.0)
    backend.relay.fleet.on_message("decode-0", Linked("prefill-0", "life", "shm", 9.0, 12.0), 0.0)
    looks, pairs = 0, backend.worker_pairs

    def counted() -> list[readiness.WorkerPair]:
        nonlocal looks
        looks += 1
        return pairs()

    monkeypatch.setattr(backend, "worker_pairs", counted)
    state = CanaryProber(backend, GatewayMetrics(), [1], (12, 12)).current_readiness()
    assert looks == 1 and len([reason for reason in state.reasons if "not linked yet" in reason]) == 143


OLD, NEW = "nuq4-1%.g128@aaaaaaaaaaaaaaaa", "nuq4-1%.g128@bbbbbbbbbbbbbbbb"


@pytest.mark.parametrize(("mine", "yours"), [(OLD, NEW), ("raw", "tq4.s0"), (OLD, OLD)])
def test_a_class_that_no_pair_has_is_a_reason_that_names_both(mine: str, yours: str) -> None:
    backend = RelayBackend(Relay(), cast(ChannelHub, Channel(kind=True)), GatewayMetrics())
    for name, kv_class in zip(WAY, (mine, yours), strict=True):
        classes = {kv_class: (64, 4096)}
        hello = Hello(
            name, name[:-2], "life", "same", {}, "here", 1, 64, 4096, 256, {}, link=name, kv_classes=classes
        )
        backend.relay.fleet.on_message(name, hello, 0.0)
    prober = CanaryProber(backend, GatewayMetrics(), [1], (1, 1))
    reported = [reason for reason in prober.current_readiness().reasons if "KV class" in reason]
    assert [f"prefill-0 has {mine}, decode-0 has {yours}" in reason for reason in reported] == [True] * (
        mine != yours
    )
    shown = " ".join(prober.current_readiness(known=False).reasons)
    assert ("KV class" in shown) == (mine != yours) and "prefill-0" not in shown and mine not in shown


class TwoClasses(Channel):
    """Workers with two KV classes. Canaries of the class `broken` get stuck at the decode worker."""

    def __init__(self, broken: str) -> None:
        super().__init__(kind=True)
        self.broken, self.classes, self.canaries = broken, dict[str, str](), list[str]()
        self.inbox = asyncio.Queue()
        pools = {"raw": (64, 4096), OLD: (64, 1024)}
        for name in WAY:
            hello = Hello(
                name, name[:-2], "life", "same", {}, "here", 1, 128, 4096, 256, {}, kv_classes=pools
            )
            self.inbox.put_nowait((name, hello))
        self.inbox.put_nowait(("decode-0", Linked("prefill-0", "life", "shm", 9.0, 12.0)))

    def send(self, worker: str, message: ToWorker) -> bool:
        if isinstance(message, Prefill):
            self.classes[message.request] = message.kv_class
            self.canaries.append(message.kv_class)
        if isinstance(message, Admit) and self.classes[message.request] != self.broken:
            pulled = Pulled(message.request, message.epoch, "shm", 4096, {})
            tokens = Output(message.request, message.epoch, [5, 5], finish="length")
            self.inbox.put_nowait((worker, pulled))
            self.inbox.put_nowait((worker, Step([tokens])))
        return super().send(worker, message)


async def probe_classes(broken: str) -> tuple[bool, list[str], dict[str, bool], list[str]]:
    """Readiness, its reasons, which classes the link is ready for, and the classes of all canaries of a round."""
    channel, metrics = TwoClasses(broken), GatewayMetrics()
    backend = RelayBackend(Relay(), cast(ChannelHub, channel), metrics)
    prober = CanaryProber(backend, metrics, [1], (1, 1))
    running = asyncio.create_task(backend.run_tasks())
    while backend.worker_pairs() != [WAY]:
        await asyncio.sleep(0)
    before = prober.current_readiness()
    assert not before.ready and len(before.reasons) == 4, "two workers, two classes"
    await prober.probe_workers(0.0)
    found = prober.current_readiness()
    states = {route.kv_class: state for route, state in prober.class_states().items()}
    running.cancel()
    return found.ready, found.reasons, states, channel.canaries


@pytest.mark.parametrize("broken", ["", "raw", OLD])
def test_each_class_of_a_pair_is_proven_by_itself(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One canary for each. A service is ready when the class is that requests get by default."""
    monkeypatch.setattr(readiness, "CANARY_TIMEOUT_S", 1.0)
    monkeypatch.setattr(readiness, "BUSY_S", 0.0)
    ready, reported, states, canaries = asyncio.run(probe_classes(broken))
    assert sorted(canaries) == [OLD, "raw"]
    assert states == {"raw": broken != "raw", OLD: broken != OLD} and ready == (broken != "raw")
    assert reported == (
        [f"prefill-0 -> decode-0 ({broken}): a canary took longer than 1 s"] if broken else []
    )


def test_a_canary_of_a_class_that_its_workers_have_not_is_refused() -> None:
    """They may have been replaced since it was planned."""
    backend = RelayBackend(Relay(), cast(ChannelHub, TwoClasses("")), GatewayMetrics())
    pin = ChosenPair(*WAY)
    for name, hello in [backend.hub.inbox.get_nowait() for _ in WAY]:  # type: ignore[attr-defined]
        backend.relay.fleet.on_message(name, hello, 0.0)
    assert not backend.relay.pairs.can_pin(pin, "raw"), "not linked"
    backend.relay.fleet.on_message("decode-0", Linked("prefill-0", "life", "shm", 9.0, 12.0), 0.0)
    assert all(backend.relay.pairs.can_pin(pin, one) for one in (None, "raw", OLD))
    assert not backend.relay.pairs.can_pin(pin, NEW)
    local = ChosenPair(None, "decode-0")
    assert backend.relay.pairs.can_pin(local, OLD) and not backend.relay.pairs.can_pin(local, NEW)


def test_strangers_learn_no_names() -> None:
    backend = RelayBackend(Relay(), cast(ChannelHub, Channel(kind=True)), GatewayMetrics())
    for name, role, secret in (("prefill-HOST", "prefill", "a"), ("decode-HOST", "decode", "b")):
        identity = {"weights": secret}
        hello = Hello(name, role, "life", secret, identity, "HOST", 1, 64, 4096, 256, {})
        backend.relay.fleet.on_message(name, hello, 0.0)
    prober = CanaryProber(backend, GatewayMetrics(), [1], (2, 1))
    readiness = prober.current_readiness(known=False)
    assert (
        not readiness.ready
        and "HOST" in str(prober.current_readiness().reasons)
        and "weights" in str(prober.current_readiness().reasons)
    )
    assert readiness.reasons == ["1 of 2 prefill workers are up", "a worker does not fit"]


def test_strangers_do_not_wait_for_a_canary() -> None:
    """Their connections could not be closed for others meanwhile. Who may see the status waits."""

    async def story() -> None:
        channel = Channel(kind=False)  # no canary comes through
        backend = RelayBackend(Relay(), cast(ChannelHub, channel), GatewayMetrics())
        prober = CanaryProber(backend, GatewayMetrics(), [1], (1, 1))
        running = asyncio.create_task(backend.run_tasks())
        while backend.worker_pairs() != [WAY]:
            await asyncio.sleep(0)
        strangers = [asyncio.create_task(prober.fresh_readiness(known=False)) for _ in range(100)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert all(one.done() and not one.result().ready for one in strangers) and not backend.relay.live
        operator = asyncio.create_task(prober.fresh_readiness())
        while not backend.relay.live:
            await asyncio.sleep(0)
        assert not operator.done()
        operator.cancel()
        running.cancel()

    asyncio.run(story())
