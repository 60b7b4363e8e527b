"""Readiness under load: a canary that waits behind clients has not failed, one that meets a stuck worker has."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from diptych.channel import Hub
from diptych.messages import (
    Beat,
    Hello,
    Linked,
    Offer,
    Output,
    Prefill,
    Stats,
    Step,
    ToGateway,
    ToWorker,
)
from diptych.metrics import Metrics
from diptych.request import Request, Sampling
from router.relay import Relay
from services.gateway import ready
from services.gateway.backend import RelayBackend
from services.gateway.ready import Prober

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

    async def recv(self) -> tuple[str, ToGateway]:
        return await self.inbox.get()

    def send(self, worker: str, message: ToWorker) -> bool:
        if isinstance(message, Prefill) and (self.kind or not message.request.startswith("canary")):
            finish = "length" if message.sampling.max_tokens == 1 else None
            output = Output(message.request, message.epoch, [5], finish=finish)
            self.inbox.put_nowait((worker, Step([output])))
            if finish is None:
                self.inbox.put_nowait((worker, Offer(message.request, message.epoch, b"ticket", 1, 4096)))
        return True

    def gone(self) -> list[str]:
        return []

    def forget(self, worker: str) -> None:
        raise AssertionError(f"{worker} was lost")

    def beat(self) -> None:
        for name in WAY:
            self.inbox.put_nowait((name, Beat(name, "life", Stats())))


class Client:
    """A reader that keeps asking for one token."""

    def __init__(self, backend: RelayBackend) -> None:
        self.backend, self.asked = backend, 0

    def ask(self) -> None:
        self.asked += 1
        request = Request(
            f"client-{self.asked}", [1], Sampling(max_tokens=1, seed=0), self.backend.clock() + 9
        )
        self.backend.arrive(request, self)

    def deliver(self, output: Output, now_s: float) -> None:
        assert output.finish == "length"

    def measure(self, seconds: dict[str, float]) -> None: ...

    def finish(self, reason: str, now_s: float) -> None: ...

    def fail(self, error: Exception) -> None:
        raise error


async def verdict(kind: bool, clients: bool) -> bool:
    """What `/ready` says after a canary, while clients get (only) first tokens, or nothing happens."""
    channel, metrics = Channel(kind), Metrics()
    backend = RelayBackend(Relay(), cast(Hub, channel), metrics)
    prober, client = Prober(backend, metrics, [1], (1, 1)), Client(backend)
    running = asyncio.create_task(backend.run())
    while backend.ways() != [WAY]:
        await asyncio.sleep(0)
    asked = asyncio.create_task(prober.fresh())
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
    monkeypatch.setattr(ready, "CANARY_S", 1.0)
    monkeypatch.setattr(
        ready, "BUSY_S", 60.0
    )  # whoever was heard at all counts as busy, however slow this machine is
    assert asyncio.run(verdict(kind, clients)) == good


async def reasons() -> list[list[str]]:
    """What is missing while one of two prefill workers is linked, and after both are."""
    channel, metrics = Channel(kind=True), Metrics()
    channel.inbox.put_nowait(
        ("prefill-1", Hello("prefill-1", "prefill", "l", "same", {}, "", 1, 64, 4096, 256, {}))
    )
    backend = RelayBackend(Relay(), cast(Hub, channel), metrics)
    prober = Prober(backend, metrics, [1], (2, 1))
    running, told = asyncio.create_task(backend.run()), []
    for linked in (1, 2):
        while len(backend.ways()) < linked or not channel.inbox.empty():
            await asyncio.sleep(0)
        told.append([reason for reason in prober.state().reasons if "not tried yet" not in reason])
        channel.inbox.put_nowait(("decode-0", Linked("prefill-1", "l", "shm", 9.0, 12.0)))
    running.cancel()
    return told


def test_a_pair_that_is_not_linked_yet_is_a_reason_also_when_another_is() -> None:
    assert asyncio.run(reasons()) == [["prefill-1 -> decode-0: not linked yet"], []]
