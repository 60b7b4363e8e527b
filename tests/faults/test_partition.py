"""Workers in network namespaces of their own: silent partitions of ten seconds, links of 64 kbit/s, KV over NIXL.

Nothing here is informed of a cut. Where the machine has no namespaces these tests are skipped, and say why.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from diptych.specs import GatewaySpec, WorkerSpec
from kvtransfer.transports import nixl
from services.host.ports import claim_port
from services.host.supervision.supervisor import Supervisor
from tests.engine.transport.transport_source import LAYOUT, RemoteSource
from tests.faults.client import ClientAnswer, ClientRequest, StreamingClient
from tests.faults.corruption import NUM_SLABS, SLABS, PullTarget, offer_kv
from tests.faults.fault_deployment import DeploymentShape, FaultDeployment
from tests.faults.workload import RequestBook, keep_streaming
from tests.support import network_namespaces
from tests.support.kv_cables import CableFault, KvCable
from tests.support.network_namespaces import NamespaceBridge, NamespaceHost

pytestmark = pytest.mark.timeout(600)

CUT_S = 10.0
SLOW_S = 5.0
SLOW_BITS = 64_000
SHORT_TOKENS = 100
PATIENCE_S = 120.0
STALL_S = 4.0
HELD_PACKETS, HELD_BYTES = 40, 1400
PLAIN = ("greedy", "seeded", "penalised", "biased", "stopped", "scored")


@pytest.fixture(scope="module")
def net() -> Iterator[NamespaceBridge]:
    if why := network_namespaces.why_unavailable():
        pytest.skip(why)
    with network_namespaces.running_bridge() as net:
        yield net


LEFT_BEHIND = """
import os
from tests.support.network_namespaces import NamespaceBridge
net = NamespaceBridge()
net.house()
print(net.name, flush=True)
os._exit(0)
"""


def test_what_a_killed_process_has_left_behind_is_removed(net: NamespaceBridge) -> None:
    left = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, check=True)
    name = left.stdout.strip()

    def listed() -> str:
        run = network_namespaces.run_command
        return run("ip", "netns", "list") + run("ip", "link")

    assert f"{name}-0" in listed() and f"{name}-hub" in listed() and f"{name}o" in listed()
    network_namespaces.remove_leftovers()
    assert name not in listed() and net.name in listed()


# Runs in a network namespace of its own, whose firewall forwards nothing, as where a container engine runs.
FILTERED = """
import subprocess, sys
from tests.support.network_namespaces import run_command, running_bridge, talks
run_command("ip", "link", "set", "lo", "up")
if sys.argv[1:]:
    run_command(sys.argv[1], "-P", "FORWARD", "DROP")
with running_bridge() as net:
    one, other = net.house(), net.house()
    bridges = run_command("ip", "-j", "link", "show", "type", "bridge")
    assert bridges.strip() in ("", "[]"), f"the firewall of this namespace filters {bridges}"
    assert talks(one, other.address) and talks(other, net.address)
"""


@pytest.mark.usefixtures("net")
@pytest.mark.parametrize("tool", ["", "iptables"])
def test_a_firewall_that_forwards_nothing_is_not_in_the_way(tool: str) -> None:
    if tool and shutil.which(tool) is None:
        pytest.skip("the command iptables is not installed")
    words = [sys.executable, "-c", FILTERED, *filter(None, [tool])]
    # With a /sys that shows this namespace's devices.
    apart = ["unshare", "--net", "--mount", "sh", "-c", 'mount -t sysfs none /sys && exec "$@"', "apart"]
    done = subprocess.run([*apart, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


class NamespacedSource(RemoteSource):
    """A source of KV that lives elsewhere; NIXL is the only way to it."""

    def __init__(self, house: NamespaceHost) -> None:
        self.layout = LAYOUT
        words = [
            sys.executable,
            "-m",
            "tests.engine.transport.transport_source",
            "nixl",
            str(NUM_SLABS),
            "1",
            "1",
            LAYOUT.codec,
        ]
        environ = os.environ | {"UCX_NET_DEVICES": "eth0"}
        self.process = subprocess.Popen(
            house.command(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        hello = self._answer()
        self.endpoints = {name: bytes.fromhex(raw) for name, raw in hello["endpoints"].items()}
        self.incarnation, self.pid = hello["incarnation"], hello["pid"]


@pytest.fixture
def away(net: NamespaceBridge, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NamespaceHost, PullTarget]]:
    """A house with a source of KV in it, and a target out here."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", net.outer)
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    house = net.house()
    with closing(NamespacedSource(house)) as source, closing(PullTarget("nixl", source)) as target:
        for puller in target.links._pullers.values():
            assert isinstance(puller, nixl.NixlPuller)
            puller._stall_s = STALL_S
        yield house, target


def test_a_slow_transfer_that_moves_is_left_alone(away: tuple[NamespaceHost, PullTarget]) -> None:
    """At 64 kbit/s it takes several times as long as one that stands still is given."""
    house, target = away
    offered = offer_kv(target.source, 1)
    slow = house.slow(SLOW_BITS, queue="20s")  # nothing is dropped: it moves all the time
    began_s = time.monotonic()
    assert target.pull_late(offered) == "exact"
    assert time.monotonic() - began_s > STALL_S and len(SLABS) == 3
    slow.verify()
    slow.heal()


def test_a_transfer_that_is_cut_off_is_given_up_and_can_be_had_later(
    away: tuple[NamespaceHost, PullTarget],
) -> None:
    """What was given up writes to nothing any more, also when the partition ends and old packets arrive."""
    house, target = away
    assert target.pull_late(offer_kv(target.source, 1)) == "exact"
    offered = offer_kv(target.source, 2)
    cut = house.cut()
    with pytest.raises(AssertionError, match="stalled"):
        target.pull_late(offered)
    assert target.pool.used == 0
    cut.verify()
    before = [target.spread.read(slab) for slab in range(NUM_SLABS)]
    cut.heal()
    target.links.link_worker("prefill-0", target.source.incarnation, target.source.endpoints)
    assert [target.spread.read(slab) for slab in range(NUM_SLABS)] == before
    assert target.pull_late(offered) == "exact"


@pytest.mark.parametrize("kind", ["slow", "stop"])
def test_a_cable_that_heals_passes_on_what_it_held(net: NamespaceBridge, kind: str) -> None:
    """What it lost instead TCP would send again only after seconds: a stall that nobody had asked for."""
    cable = KvCable(net.house(), net.house(), 0)
    fault = CableFault(cable, kind)
    there, size = cable.addresses[1], HELD_PACKETS * HELD_BYTES
    send = f"for _ in {{1..{HELD_PACKETS}}}; do printf %{HELD_BYTES}s > /dev/udp/{there}/9; done"
    network_namespaces.run_command(*cable.ends[0].command(["bash", "-c", send]))
    assert cable.tc_statistics()[0]["backlog"] > size / 2
    fault.heal()
    fault.verify()
    count = ["cat", f"/sys/class/net/{cable.device}/statistics/rx_bytes"]
    assert int(network_namespaces.run_command(*cable.ends[1].command(count))) > size


class PartitionDeployment(FaultDeployment):
    """A deployment whose workers each live in a house; the gateway is out here."""

    def __init__(self, folder: Path, shape: DeploymentShape, net: NamespaceBridge) -> None:
        self.net = net
        self.houses: dict[str, NamespaceHost] = {}
        super().__init__(folder, shape)

    def _gateway(self) -> GatewaySpec:
        self.channel = f"tcp://{self.net.address}:{claim_port(self.net.address, 0)}"
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
def village(net: NamespaceBridge) -> Iterator[PartitionDeployment]:
    folder = Path(tempfile.mkdtemp(prefix="dpt"))
    village = PartitionDeployment(folder, DeploymentShape(prefill=2, decode=2, transports=("nixl",)), net)
    try:
        village.start()
        yield village
    finally:
        village.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def through(
    village: PartitionDeployment,
    book: RequestBook,
    lasts_s: float,
    streams: int = 6,
    enough: Callable[[], bool] = lambda: True,
    longest: int = 1 << 20,
) -> list[ClientAnswer]:
    """The answers to streams that are asked for during `lasts_s`, and on until `enough`, at most `PATIENCE_S`.

    No prompt has more than `longest` tokens.
    """
    began_s = time.monotonic()
    client = StreamingClient(village.port)

    def ask() -> ClientRequest:
        while True:
            asked = book.ask(prompt=(64, min(longest, 300)), kind=book.dice.choice(PLAIN))
            if len(asked.prompt) <= longest:
                return asked

    def over() -> bool:
        past_s = time.monotonic() - began_s
        return past_s > PATIENCE_S or (past_s > lasts_s and enough())

    return [answer async for answer in keep_streaming(client, ask, streams, over)]


def check(book: RequestBook, answers: list[ClientAnswer]) -> None:
    assert answers
    for answer in answers:
        assert answer.whole and not book.wrong(answer), (answer.code, answer.error, book.wrong(answer))


def test_two_workers_are_cut_off_for_ten_seconds_and_no_client_notices(village: PartitionDeployment) -> None:
    """One of each pool, and a spare of each is left."""
    book = RequestBook(1)
    check(book, asyncio.run(through(village, book, 0.5)))
    cuts = [village.houses[name].cut() for name in ("prefill-0", "decode-0")]
    check(book, asyncio.run(through(village, book, CUT_S)))
    for cut in cuts:
        cut.heal()
        cut.verify()
    village.until(lambda: village.ready() and len(village.status()["links"]) == 4, PATIENCE_S)
    check(book, asyncio.run(through(village, book, 0.5)))
    village.until(lambda: not village.held(), PATIENCE_S)


def test_a_worker_behind_a_slow_link_costs_no_client_its_answer(village: PartitionDeployment) -> None:
    """Prompts are short: what the link drops is sent again, so a chunk of KV takes it many seconds."""
    book = RequestBook(5)
    slow = village.houses["decode-1"].slow(SLOW_BITS)
    check(book, asyncio.run(through(village, book, SLOW_S, 1, slow.held_anything, SHORT_TOKENS)))
    slow.heal()
    slow.verify()
    village.until(lambda: village.ready() and len(village.status()["links"]) == 4, PATIENCE_S)
    village.until(lambda: not village.held(), PATIENCE_S)
