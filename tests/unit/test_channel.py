"""The channel over real sockets on loopback."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from diptych import channel, frames
from diptych.channel import Hub, Link
from diptych.errors import ChannelError
from diptych.frames import HEADER, NOBODY, UnderWay
from diptych.keys import WorkerKeys, load_server_keys, load_worker_keys, make_keys
from diptych.messages import Abort, Beat, Failed, Hello, Release, Stats, ToGateway, ToWorker, Welcome

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0  # until something that must happen; never waited for in full unless the test fails
QUIET_S = 0.4  # for something that must not happen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder


def hub_at(folder: Path, address: str = "tcp://127.0.0.1:0", name: str = "g1") -> Hub:
    hub = Hub(address, load_server_keys(folder), name, beat_s=0.05)
    hub.open()
    return hub


@pytest.fixture
async def hub(folder: Path) -> AsyncIterator[Hub]:
    hub = hub_at(folder)
    yield hub
    hub.close()


def hello(worker: str = "decode-0") -> Hello:
    return Hello(worker, "decode", f"{worker}/1", "f", {}, "host", 1, 10, 100, 2048, {})


Dial = Callable[..., Link]


@pytest.fixture
def dial(folder: Path) -> Iterator[Dial]:
    links: list[Link] = []

    def dial(hub: Hub, worker: str = "decode-0", keys: WorkerKeys | None = None, **choices: float) -> Link:
        keys = keys or load_worker_keys(folder)
        choices = {"lost_s": WAIT_S} | choices  # a slow machine is no lost gateway
        link = Link(hub.address, keys, hello(worker), lambda: Stats(steps=3), beat_s=0.05, **choices)  # type: ignore[arg-type]
        link.open()
        links.append(link)
        return link

    yield dial
    for link in links:
        link.close()


async def hear(hub: Hub, kind: type[ToGateway] | None = None) -> ToGateway:
    """The next message, of this kind if one is named."""
    async with asyncio.timeout(WAIT_S):
        while True:
            _, message = await hub.recv()
            if kind is None or isinstance(message, kind):
                return message


async def listen(link: Link, kind: type[ToWorker]) -> ToWorker:
    """The next message of a kind at a worker."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for message in await asyncio.to_thread(link.poll, 0.5):
                if isinstance(message, kind):
                    return message


async def met(hub: Hub, link: Link) -> Hello:
    """Both know each other."""
    message = await hear(hub, Hello)
    assert isinstance(message, Hello)
    await listen(link, Welcome)
    return message


async def test_a_worker_is_met_welcomed_and_beats(hub: Hub, dial: Dial) -> None:
    link = dial(hub)
    message = await hear(hub)
    assert msgspec.structs.replace(message, link="") == hello()
    welcome = await listen(link, Welcome)
    assert welcome == Welcome("g1", 0.05, 10.0) and not link.gateway_lost
    beat = await hear(hub)
    assert beat == Beat("decode-0", "decode-0/1", Stats(steps=3))


async def test_messages_arrive_in_order_in_both_directions(hub: Hub, dial: Dial) -> None:
    link = dial(hub)
    await met(hub, link)

    def speak() -> None:
        for number in range(300):
            link.send(Failed("r", number, "a", "b"))

    thread = threading.Thread(target=speak)
    thread.start()
    for number in range(300):
        assert hub.send("decode-0", Abort("r", number))
    heard = [await hear(hub, Failed) for _ in range(300)]
    thread.join()
    assert [message.epoch for message in heard if isinstance(message, Failed)] == list(range(300))
    orders: list[ToWorker] = []
    async with asyncio.timeout(WAIT_S):
        while len(orders) < 300:
            orders += await asyncio.to_thread(link.poll, 0.5)
    assert [message.epoch for message in orders if isinstance(message, Abort)] == list(range(300))


async def test_beats_go_on_while_nobody_polls(hub: Hub, dial: Dial) -> None:
    dial(hub)
    await hear(hub, Hello)
    for _ in range(3):
        await hear(hub, Beat)


async def test_sending_to_nobody_is_told(hub: Hub, dial: Dial) -> None:
    assert not hub.send("decode-0", Abort("r", 0))
    link = dial(hub)
    await met(hub, link)
    assert hub.send("decode-0", Abort("r", 0)) and not hub.send("decode-1", Abort("r", 0))
    link.close()
    async with asyncio.timeout(WAIT_S):
        while hub.send("decode-0", Abort("r", 0)):
            await asyncio.sleep(0.01)


async def test_only_the_worker_key_enters(hub: Hub, dial: Dial, folder: Path) -> None:
    right = load_worker_keys(folder)
    public, secret = zmq.curve_keypair()
    dial(hub, "intruder", WorkerKeys(secret, public, right.server_public))
    await refused(hub, "denied")
    dial(hub, "decode-0", right)  # the control: with the right key the same hub hears
    assert await hear(hub, Hello)


async def test_a_worker_talks_only_to_its_gateway(hub: Hub, dial: Dial, folder: Path) -> None:
    right = load_worker_keys(folder)
    public, _ = zmq.curve_keypair()
    dial(hub, "decode-0", WorkerKeys(right.secret, right.public, public))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(QUIET_S):
            await hub.recv()


class Raw:
    """A socket with the right key that says whatever it likes, under a name of its own."""

    def __init__(self, hub: Hub, folder: Path, name: str = "raw") -> None:
        keys = load_worker_keys(folder)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self.socket.set(zmq.ROUTING_ID, name.encode())
        self.socket.set(zmq.CURVE_SERVERKEY, keys.server_public)
        self.socket.set(zmq.CURVE_PUBLICKEY, keys.public)
        self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.connect(hub.address)

    def say(self, number: int, message: ToGateway, session: bytes = b"session1") -> None:
        self.socket.send_multipart([HEADER.pack(session, number, 0), frames.pack(message)])

    def greet(self, name: str = "raw", session: bytes = b"session1") -> None:
        self.say(0, msgspec.structs.replace(hello(name), link=session.hex()), session)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def raw(hub: Hub, folder: Path) -> Iterator[Raw]:
    raw = Raw(hub, folder)
    yield raw
    raw.close()


async def refused(hub: Hub, reason: str) -> None:
    """Wait until something was dropped for this reason; nothing may get through."""
    hearing = asyncio.create_task(hub.recv())
    async with asyncio.timeout(WAIT_S):
        while not hub.refused[reason]:
            assert not hearing.done()
            await asyncio.sleep(0.01)
    hearing.cancel()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"only one"],
        [HEADER.pack(b"session1", 0, 0), b"noise"],
        [b"short", frames.pack(hello("raw"))],
        [HEADER.pack(b"session1", 0, 0), frames.pack(Abort("r", 0))],
        [HEADER.pack(b"session1", 0, 0), frames.pack(hello("raw")), b"third"],
    ],
    ids=["empty", "one", "noise", "header", "not for the gateway", "three"],
)
async def test_malformed_frames_are_counted_and_dropped(
    hub: Hub, raw: Raw, dial: Dial, frames: list[bytes]
) -> None:
    raw.socket.send_multipart(frames)
    await refused(hub, "malformed")
    await met(hub, dial(hub))  # and others are served


async def test_nobody_speaks_as_another(hub: Hub, raw: Raw) -> None:
    raw.greet("decode-0")
    await refused(hub, "stranger")
    raw.greet()
    await hear(hub, Hello)
    raw.say(1, Beat("decode-0", "decode-0/1", Stats()))
    hub.refused.clear()
    await refused(hub, "stranger")


async def test_who_was_not_met_is_not_heard_and_asked_to_say_hello(hub: Hub, raw: Raw) -> None:
    raw.say(0, Failed("r", 0, "a", "b"))
    await refused(hub, "stale")
    raw.say(1, Beat("raw", "raw/1", Stats()))
    hub.refused.clear()
    await refused(hub, "stale")
    header, payload = await asyncio.to_thread(raw.socket.recv_multipart)
    assert HEADER.unpack(header)[0] == NOBODY
    assert isinstance(msgspec.msgpack.decode(payload, type=ToWorker), Welcome)


@pytest.mark.parametrize("number", [0, 2])
async def test_a_frame_that_is_missing_or_doubled_ends_the_session(hub: Hub, raw: Raw, number: int) -> None:
    raw.greet()
    await hear(hub, Hello)
    raw.say(number, Failed("r", 0, "a", "b"))
    await refused(hub, "gap")
    assert not hub.send("raw", Abort("r", 0))
    raw.say(1, Failed("r", 0, "a", "b"))
    await refused(hub, "stale")


async def test_a_session_of_before_is_not_heard_any_more(hub: Hub, raw: Raw) -> None:
    raw.greet(session=b"session1")
    await hear(hub, Hello)
    raw.greet(session=b"session2")
    await hear(hub, Hello)
    raw.say(1, Failed("r", 0, "a", "b"), session=b"session1")
    await refused(hub, "stale")
    raw.say(1, Failed("r", 7, "a", "b"), session=b"session2")
    assert await hear(hub) == Failed("r", 7, "a", "b")


async def test_what_is_too_long_is_refused_by_its_sender(
    hub: Hub, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = dial(hub)
    await met(hub, link)
    monkeypatch.setattr(frames, "MAX_BYTES", 1000)
    with pytest.raises(ChannelError, match="longer than the limit"):
        link.send(Failed("r", 0, "a", "b" * 1000))
    with pytest.raises(ChannelError, match="longer than the limit"):
        hub.send("decode-0", Abort("r" * 1000, 0))


async def test_what_is_too_long_cuts_the_connection(hub: Hub, raw: Raw, dial: Dial) -> None:
    raw.greet()
    await hear(hub, Hello)
    raw.socket.send_multipart([HEADER.pack(b"session1", 1, 0), bytes(frames.MAX_BYTES + 1)])
    raw.say(2, Failed("r", 0, "a", "b"))
    await refused(hub, "gap")
    await met(hub, dial(hub))


async def test_a_gateway_that_restarts_is_greeted_anew(dial: Dial, folder: Path) -> None:
    first = hub_at(folder)
    link = dial(first, lost_s=60.0)  # so that it is the new gateway's word that counts, not the silence
    one = await met(first, link)
    first.close()
    second = hub_at(folder, first.address, "g2")
    try:
        two = await met(second, link)
        assert one.link != two.link and not link.gateway_lost and link.breaks == 1
    finally:
        second.close()


async def test_silence_of_the_gateway_is_noticed_while_polling(dial: Dial, folder: Path) -> None:
    first = hub_at(folder)
    link = dial(first, lost_s=2.0)
    await met(first, link)
    waiting = asyncio.create_task(asyncio.to_thread(link.poll, WAIT_S))
    first.close()
    assert await asyncio.wait_for(waiting, WAIT_S / 2) == [] and link.gateway_lost
    link.send(Failed("r", 0, "to", "nobody"))
    second = hub_at(folder, first.address, "g2")
    try:
        await met(second, link)
        link.send(Failed("r", 1, "to", "somebody"))
        assert await hear(second, Failed) == Failed("r", 1, "to", "somebody")
        assert bool(link.gateway_lost) is False
    finally:
        second.close()


async def test_a_worker_that_was_given_up_introduces_itself_anew(hub: Hub, dial: Dial) -> None:
    link = dial(hub)
    before = await met(hub, link)
    hub.forget("decode-0")
    after = await met(hub, link)  # with a Welcome at the worker: it aborts what it held
    assert before.link != after.link
    assert hub.send("decode-0", Release("r", 0)) and await listen(link, Release)


async def test_a_restarted_worker_takes_over_its_name(hub: Hub, dial: Dial) -> None:
    first = dial(hub)
    await met(hub, first)
    second = dial(hub)
    await met(hub, second)
    first.close()
    assert hub.send("decode-0", Abort("r", 1))
    assert await listen(second, Abort) == Abort("r", 1)


async def test_a_worker_that_does_not_read_is_given_up_not_buffered_for_ever(hub: Hub, raw: Raw) -> None:
    raw.greet()
    await hear(hub, Hello)
    big = Abort("r" * 16_000, 0)
    sent = 0
    while hub.send("raw", big):
        sent += 1
        assert sent <= 4 * frames.QUEUED_FRAMES
    assert not hub.send("raw", Abort("r", 0))


async def test_an_inbox_that_overflows_ends_the_session(hub: Hub, dial: Dial) -> None:
    link = dial(hub, max_messages=10)
    await met(hub, link)
    for number in range(50):
        hub.send("decode-0", Abort("r", number))
    assert isinstance(await hear(hub, Hello), Hello)
    assert link.breaks == 1


async def test_polling_can_be_ended_from_another_thread(hub: Hub, dial: Dial) -> None:
    link = dial(hub)
    await met(hub, link)
    waiting = asyncio.create_task(asyncio.to_thread(link.poll, WAIT_S))
    link.wake()
    assert await asyncio.wait_for(waiting, WAIT_S / 2) == [] and not link.gateway_lost


async def test_the_last_words_of_a_worker_arrive(hub: Hub, dial: Dial) -> None:
    link = dial(hub)
    await met(hub, link)
    for number in range(50):
        link.send(Failed("r", number, "a", "b"))
    await asyncio.to_thread(link.close)
    heard = [await hear(hub, Failed) for _ in range(50)]
    assert [message.epoch for message in heard if isinstance(message, Failed)] == list(range(50))


async def test_a_fault_in_the_io_thread_is_told_by_poll(hub: Hub, folder: Path) -> None:
    def broken() -> Stats:
        raise RuntimeError("no books")

    link = Link(hub.address, load_worker_keys(folder), hello(), broken, beat_s=0.02)
    link.open()
    hearing = asyncio.create_task(hear(hub, Hello))
    with pytest.raises(ChannelError, match="has failed"):
        for _ in range(100):
            await asyncio.to_thread(link.poll, WAIT_S)
    await hearing
    link.close()


async def test_waiting_for_messages_can_be_cancelled_without_losing_one(hub: Hub, dial: Dial) -> None:
    link = dial(hub)
    await met(hub, link)
    for number in range(20):
        link.send(Failed("r", number, "a", "b"))
        await asyncio.sleep(0)
        hearing = asyncio.create_task(hub.recv())
        await asyncio.sleep(0)
        if hearing.done():
            _, message = hearing.result()
            while isinstance(message, Beat):
                message = await hear(hub)
            assert message == Failed("r", number, "a", "b")
        else:
            hearing.cancel()
            assert await hear(hub, Failed) == Failed("r", number, "a", "b")


async def test_a_flood_of_messages_does_not_starve_other_tasks(hub: Hub, dial: Dial) -> None:
    link = dial(hub)
    await met(hub, link)
    for number in range(1000):
        link.send(Failed("r", number, "a", "b"))
    await asyncio.sleep(0.3)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(1000):
        await hear(hub, Failed)
    task.cancel()
    assert turns >= 10


def test_an_address_in_use_is_told(folder: Path) -> None:
    first = hub_at(folder)
    second = Hub(first.address, load_server_keys(folder), "g2")
    with pytest.raises(ChannelError, match="cannot listen"):
        second.open()
    first.close()
    first.close()


async def test_a_worker_that_missed_an_order_begins_anew(hub: Hub, dial: Dial) -> None:
    link = dial(hub)
    await met(hub, link)
    hub._sessions[b"decode-0"].sent.said += 1  # as if a frame had been lost on its way
    hub.send("decode-0", Abort("r", 0))
    await met(hub, link)
    assert link.breaks == 1


# ---- what is under way is bounded in bytes, on both sides


def test_what_is_under_way_is_counted_until_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "QUEUED_BYTES", 100)
    way = UnderWay()
    assert way.fits(1000)  # alone: `MAX_BYTES` is its bound
    for size in (60, 40):
        assert way.fits(size)
        way.sent(size)
    assert not way.fits(1) and (len(way), way.num_bytes, way.said) == (2, 100, 2)
    way.taken(1)
    way.taken(0)  # an older word
    assert way.fits(60) and not way.fits(61) and (len(way), way.num_bytes) == (1, 40)
    way.taken(99)  # more than was sent: whoever says so harms nobody
    assert (len(way), way.num_bytes, way.said) == (0, 0, 2)


async def test_a_worker_that_takes_no_bytes_is_given_up(
    hub: Hub, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "QUEUED_BYTES", 100_000)
    raw.greet()
    await hear(hub, Hello)
    sent = 0
    while hub.send("raw", Abort("r" * 10_000, 0)):
        sent += 1
    assert sent == 9  # and the Welcome
    raw.greet(session=b"session2")
    await hear(hub, Hello)
    for number in range(1, 50):  # one that says what it takes is sent as much as there is
        assert hub.send("raw", Abort("r" * 10_000, 0))
        header = HEADER.pack(b"session2", number, number + 1)
        raw.socket.send_multipart([header, frames.pack(Failed("r", number, "a", "b"))])
        await hear(hub, Failed)


async def test_a_worker_waits_until_the_gateway_has_taken_what_it_said(
    hub: Hub, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "QUEUED_BYTES", 50_000)
    link = dial(hub)
    await met(hub, link)
    for number in range(100):
        link.send(Failed("r", number, "a", "b" * 10_000))
    heard = [await hear(hub, Failed) for _ in range(100)]
    assert [message.epoch for message in heard if isinstance(message, Failed)] == list(range(100))
    assert link.breaks == 0


@pytest.mark.parametrize("side", ["outbox", "inbox"])
async def test_queues_of_a_worker_that_overflow_in_bytes_end_the_session(
    hub: Hub, dial: Dial, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    link = dial(hub)
    await met(hub, link)
    monkeypatch.setattr(channel, "QUEUED_BYTES", 50_000)
    if side == "outbox":
        with link._lock:  # the I/O thread cannot empty it meanwhile
            link._outbox.append(b"x" * 50_000)
            link._out_bytes = 50_000
        link.send(Failed("r", 0, "a", "b"))
    else:
        hub.send("decode-0", Abort("r" * 60_000, 0))
    assert isinstance(await hear(hub, Hello), Hello)
    assert link.breaks == 1


# ---- closed connections are known at once


KILLED = """
import sys, time
from pathlib import Path
from diptych.channel import Link
from diptych.keys import load_worker_keys
from diptych.messages import Hello, Stats
hello = Hello("decode-0", "decode", "decode-0/1", "f", {}, "host", 1, 10, 100, 2048, {})
link = Link(sys.argv[1], load_worker_keys(Path(sys.argv[2])), hello, Stats, beat_s=0.05)
link.open()
while True:
    link.poll(60.0)
"""


async def test_a_killed_process_is_known_by_its_connection(hub: Hub, dial: Dial, folder: Path) -> None:
    other = dial(hub, "decode-1")
    await met(hub, other)
    process = subprocess.Popen([sys.executable, "-c", KILLED, hub.address, str(folder)], cwd=ROOT)
    await hear(hub, Hello)
    assert hub.gone() == []
    process.kill()
    process.wait()
    async with asyncio.timeout(WAIT_S):
        while not (gone := hub.gone()):
            await asyncio.sleep(0.01)
    assert gone == ["decode-0"] and hub.gone() == []
    assert not hub.send("decode-0", Abort("r", 0)) and hub.gone() == []
    assert hub.send("decode-1", Abort("r", 0)) and await listen(other, Abort)


async def test_who_came_back_is_not_gone(hub: Hub, raw: Raw, dial: Dial) -> None:
    first = dial(hub)
    await met(hub, first)
    first.close()
    second = dial(hub)
    await met(hub, second)
    assert hub.gone() == []
    second.close()
    hub.forget("decode-0")  # it is known to be lost already
    assert hub.gone() == []


async def test_a_look_costs_a_worker_nothing(hub: Hub, dial: Dial) -> None:
    link = dial(hub)
    await met(hub, link)
    for _ in range(20):
        assert hub.gone() == []
    assert hub.send("decode-0", Abort("r", 0))
    assert await listen(link, Abort)
    assert link.breaks == 0 and not link.gateway_lost


async def test_a_gateway_that_is_gone_is_known_by_its_connection(dial: Dial, folder: Path) -> None:
    first = hub_at(folder)
    link = dial(first, lost_s=10 * WAIT_S)  # its silence tells nothing
    await met(first, link)
    waiting = asyncio.create_task(asyncio.to_thread(link.poll, 5 * WAIT_S))
    first.close()
    assert await asyncio.wait_for(waiting, WAIT_S) == [] and link.gateway_lost
