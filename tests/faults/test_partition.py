"""Workers in network namespaces of their own: silent partitions of ten seconds, links of 64 kbit/s, KV over NIXL.

Nothing here is told of a cut. Where the machine has no namespaces these tests are skipped, and say why.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from diptych.config import GatewaySpec, WorkerSpec
from kvtransfer.transports import nixl
from services.cli.ports import claim
from services.cluster.supervisor import Supervisor
from tests.engine.transport_source import Remote
from tests.faults import netns
from tests.faults.client import Answer, Ask, Client
from tests.faults.corrupt import NUM_SLABS, SLABS, Target, offer
from tests.faults.fleet import Fleet, Shape
from tests.faults.load import Book, stream
from tests.faults.netns import House, Net

pytestmark = pytest.mark.timeout(600)

CUT_S = 10.0
SLOW_S = 5.0
SLOW_BITS = 64_000
PATIENCE_S = 120.0
STALL_S = 4.0
PLAIN = ("greedy", "seeded", "penalised", "biased", "stopped", "scored")


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    if why := netns.missing():
        pytest.skip(why)
    with netns.running() as net:
        yield net


class Housed(Remote):
    """A source of KV that lives elsewhere; NIXL is the only way to it."""

    def __init__(self, house: House) -> None:
        words = [sys.executable, "-m", "tests.engine.transport_source", "nixl", str(NUM_SLABS), "1", "1"]
        environ = os.environ | {"UCX_NET_DEVICES": "eth0"}
        self.process = subprocess.Popen(
            house.command(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        hello = self._answer()
        self.endpoints = {name: bytes.fromhex(raw) for name, raw in hello["endpoints"].items()}
        self.incarnation, self.pid = hello["incarnation"], hello["pid"]


@pytest.fixture
def away(net: Net, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[House, Target]]:
    """A house with a source of KV in it, and a target out here."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", net.bridge)
    monkeypatch.setenv("UCX_TCP_BRIDGE_ENABLE", "y")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    house = net.house()
    with closing(Housed(house)) as source, closing(Target("nixl", source)) as target:
        for puller in target.links._pullers.values():
            assert isinstance(puller, nixl.Puller)
            puller._stall_s = STALL_S
        yield house, target


def test_a_slow_transfer_that_moves_is_left_alone(away: tuple[House, Target]) -> None:
    """At 64 kbit/s it takes several times as long as one that stands still is given."""
    house, target = away
    offered = offer(target.source, 1)
    slow = house.slow(SLOW_BITS, queue="20s")  # nothing is dropped: it moves all the time
    began_s = time.monotonic()
    assert target.late(offered) == "exact"
    assert time.monotonic() - began_s > STALL_S and len(SLABS) == 3
    slow.verify()
    slow.heal()


def test_a_transfer_that_is_cut_off_is_given_up_and_can_be_had_later(away: tuple[House, Target]) -> None:
    """What was given up writes to nothing any more, also when the partition ends and old packets arrive."""
    house, target = away
    assert target.late(offer(target.source, 1)) == "exact"
    offered = offer(target.source, 2)
    cut = house.cut()
    with pytest.raises(AssertionError, match="stalled"):
        target.late(offered)
    assert target.pool.used == 0
    cut.verify()
    before = [target.spread.read(slab) for slab in range(NUM_SLABS)]
    cut.heal()
    target.links.link("prefill-0", target.source.incarnation, target.source.endpoints)
    assert [target.spread.read(slab) for slab in range(NUM_SLABS)] == before
    assert target.late(offered) == "exact"


class Village(Fleet):
    """A deployment whose workers each live in a house; the gateway is out here."""

    def __init__(self, folder: Path, shape: Shape, net: Net) -> None:
        self.net = net
        self.houses: dict[str, House] = {}
        super().__init__(folder, shape)

    def _gateway(self) -> GatewaySpec:
        self.channel = f"tcp://{self.net.address}:{claim(self.net.address, 0)}"
        return super()._gateway()

    def _worker(self, name: str, address: str) -> WorkerSpec:
        house = self.houses[name] = self.net.house()
        return msgspec.structs.replace(super()._worker(name, address), host=house.address)

    def _supervise(self, name: str, module: str, spec: WorkerSpec | GatewaySpec) -> Supervisor:
        part = super()._supervise(name, module, spec)
        if name in self.houses:
            part._command = self.houses[name].command(part._command)
            part._environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
        return part


@pytest.fixture(scope="module")
def village(net: Net) -> Iterator[Village]:
    folder = Path(tempfile.mkdtemp(prefix="dpt"))
    village = Village(folder, Shape(prefill=2, decode=2, transports=("nixl",)), net)
    try:
        village.start()
        yield village
    finally:
        village.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def through(village: Village, book: Book, lasts_s: float, streams: int = 6) -> list[Answer]:
    """The answers to streams that are asked for during `lasts_s`."""
    ends_s = time.monotonic() + lasts_s
    client = Client(village.port)

    def ask() -> Ask:
        return book.ask(prompt=(64, 300), kind=book.dice.choice(PLAIN))

    return [answer async for answer in stream(client, ask, streams, lambda: time.monotonic() > ends_s)]


def check(book: Book, answers: list[Answer]) -> None:
    assert answers
    for answer in answers:
        assert answer.whole and not book.wrong(answer), (answer.code, answer.error, book.wrong(answer))


def test_two_workers_are_cut_off_for_ten_seconds_and_no_client_notices(village: Village) -> None:
    """One of each pool, and a spare of each is left."""
    book = Book(1)
    check(book, asyncio.run(through(village, book, 0.5)))
    cuts = [village.houses[name].cut() for name in ("prefill-0", "decode-0")]
    check(book, asyncio.run(through(village, book, CUT_S)))
    for cut in cuts:
        cut.heal()
        cut.verify()
    village.until(lambda: village.ready() and len(village.status()["links"]) == 4, PATIENCE_S)
    check(book, asyncio.run(through(village, book, 0.5)))
    village.until(lambda: not village.held(), PATIENCE_S)


def test_a_worker_behind_a_slow_link_costs_no_client_its_answer(village: Village) -> None:
    book = Book(5)
    slow = village.houses["decode-1"].slow(SLOW_BITS)
    check(book, asyncio.run(through(village, book, SLOW_S, streams=1)))
    slow.heal()
    slow.verify()
    village.until(lambda: village.ready() and len(village.status()["links"]) == 4, PATIENCE_S)
    village.until(lambda: not village.held(), PATIENCE_S)
