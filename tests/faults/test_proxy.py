"""The proxy itself, and the channel behind it: whatever happens on the way, a session ends or goes on exactly.

Both ends number what they say. Within a session nothing is missing, twice, altered or out of order; and after every
fault both receive again. The control has an end that does not look at the numbers: it must be found out.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.channel import hub as hub_module
from diptych.channel.hub import ChannelHub
from diptych.channel.hub_thread import HubThread
from diptych.channel.keys import load_server_keys, load_worker_keys, make_keys
from diptych.channel.link import ChannelLink
from diptych.messages import Abort, Failed, Hello, ToGateway, ToWorker, Welcome, WorkerStats
from tests.faults import proxy
from tests.faults.proxy import ProxyLine, ProxyRuleHandle
from tests.faults.proxy_rules import INJURIES, PassedMessages, ProxyRule, injure_piece
from tests.faults.zmtp_frames import GREETING_BYTES, SPLITTERS, WirePiece

PATIENCE_S = 120.0
SAYS_S = 0.002  # between two messages
ENOUGH = 20  # messages each way, to believe that it goes on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("p")
    make_keys(folder)
    return folder


@pytest.fixture(scope="module")
def between(folder: Path) -> Iterator[proxy.ProxyClient]:
    with proxy.running_proxy(folder) as running:
        yield running


class CarelessHubThread(HubThread):
    """A gateway that believes whatever number a message carries: the control."""

    def _accept_frame(self, frames: list[bytes]) -> bool:
        known = self._sessions.get(frames[0])
        if known is not None and len(frames) == 3 and frames[1][:8] == known.name:
            known.received = int.from_bytes(frames[1][8:16], "big")
        return super()._accept_frame(frames)


class NumberedTalk:
    """A gateway and a worker that number their messages to each other; `up` and `down`: those received, by session."""

    def __init__(self, hub: ChannelHub, link: ChannelLink) -> None:
        self.hub, self.link = hub, link
        self.up: list[list[int]] = []
        self.down: list[list[int]] = []
        self.words: set[str] = set()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._say_up, self._hear_down)]
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        self.link.open()
        for thread in self._threads:
            thread.start()
        self._tasks = [asyncio.create_task(self._hear_up()), asyncio.create_task(self._say_down())]
        await self.go_on()

    async def end(self) -> None:
        self._over.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self.link.close()

    def _say_up(self) -> None:
        for number in itertools.count():
            if self._over.wait(SAYS_S):
                return
            self.link.send(Failed("up", number, "code", "w" * (number % 300)))

    def _hear_down(self) -> None:
        while not self._over.is_set():
            for message in self.link.poll_messages(0.1):
                self._note(self.down, message)

    async def _hear_up(self) -> None:
        while True:
            worker, message = await self.hub.receive_message()
            if isinstance(message, Hello):
                self.hub.accept_session(worker, message.link)
            self._note(self.up, message)

    async def _say_down(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(SAYS_S)
            self.hub.send("decode-0", Abort("down", number))

    def _note(self, received: list[list[int]], message: ToGateway | ToWorker) -> None:
        if isinstance(message, Hello | Welcome):
            received.append([])
        elif isinstance(message, Failed | Abort):
            self.words.add(message.request)
            received[-1].append(message.epoch)

    async def go_on(self) -> None:
        """Until both have received enough that was said from now on."""
        goals = [(received, sum(map(len, received)) + ENOUGH) for received in (self.up, self.down)]
        await until(lambda: all(sum(map(len, received)) >= goal for received, goal in goals))

    def check(self) -> None:
        """Nothing missing within a session; nothing twice and nothing out of order, ever."""
        assert self.words == {"up", "down"}
        for received in (self.up, self.down):
            for session in received:
                assert session == list(range(session[0], session[0] + len(session))) if session else True
            numbers = [number for session in received for number in session]
            assert numbers == sorted(set(numbers))


async def until(condition: Callable[[], bool]) -> None:
    """Until something holds that stays so."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def start_talk(
    between: proxy.ProxyClient, folder: Path, name: str, kind: type[HubThread] = HubThread
) -> AsyncIterator[tuple[NumberedTalk, ProxyLine]]:
    hub = ChannelHub("tcp://127.0.0.1:0", load_server_keys(folder), "g", beat_s=0.05, silence_s=3.0)
    with patch.object(hub_module, "HubThread", kind):
        hub.open()
    line = between.line(name, "127.0.0.1", int(hub.address.rsplit(":", 1)[1]))
    hello = Hello("decode-0", "decode", "life", "f", {}, "host", 1, 10, 100, 2048, {})
    link = ChannelLink(line.address, load_worker_keys(folder), hello, WorkerStats, beat_s=0.05)
    talk = NumberedTalk(hub, link)
    try:
        await talk.begin()
        yield talk, line
    finally:
        await talk.end()
        hub.close()


ApplyFault = Callable[[ProxyLine, str, int], ProxyRuleHandle]
SINGLE_FAULTS: dict[str, ApplyFault] = {
    "flip": lambda line, way, seed: line.flip(way, seed=seed),
    "flip three": lambda line, way, seed: line.flip(way, seed=seed, times=3, skip=seed),
    "truncate": lambda line, way, seed: line.truncate(way, seed=seed),
    "drop": lambda line, way, seed: line.drop(way),
    "swap": lambda line, way, seed: line.swap(way),
    "duplicate": lambda line, way, seed: line.duplicate(way),
    "replay": lambda line, way, seed: line.replay(way),
    "replay earlier": lambda line, way, seed: line.replay(way, earlier=True),
}


async def test_no_injured_frame_is_ever_received(between: proxy.ProxyClient, folder: Path) -> None:
    """Every kind, both ways, several times each: the session ends, and another begins."""
    rng = random.Random(4)
    async with start_talk(between, folder, "injuries") as (talk, line):
        between_resets = line.reset()  # so that there is an earlier connection to replay from
        await until(between_resets.done)
        cases = [(name, way) for name in SINGLE_FAULTS for way in ("up", "down")]
        rng.shuffle(cases)
        for name, way in cases:
            await talk.go_on()
            sessions = talk.link.num_broken_sessions
            fault = SINGLE_FAULTS[name](line, way, rng.randrange(100))
            await until(fault.done)
            fault.verify()
            fault.heal()
            await until(lambda before=sessions: talk.link.num_broken_sessions > before)  # type: ignore[misc]
        await talk.go_on()
        talk.check()
        assert talk.link.num_broken_sessions >= len(cases)


async def test_connections_that_are_cut_begin_again(between: proxy.ProxyClient, folder: Path) -> None:
    async with start_talk(between, folder, "cuts") as (talk, line):
        for cut in (line.reset, lambda: line.half_close("up"), lambda: line.half_close("down")) * 3:
            before = line.counters()["accepted"]
            await until(lambda: line.counters()["open"] > 0)
            fault = cut()
            fault.verify()
            await until(lambda before=before: line.counters()["accepted"] > before)  # type: ignore[misc]
            await talk.go_on()
        talk.check()


async def test_delay_and_drip_change_nothing_that_is_received(
    between: proxy.ProxyClient, folder: Path
) -> None:
    async with start_talk(between, folder, "slow") as (talk, line):
        for fault in (line.delay(0.2), line.drip(50_000.0)):
            await talk.go_on()
            fault.verify()
            fault.heal()
        await talk.go_on()
        talk.check()


async def test_a_black_hole_ends_the_session_and_what_waited_in_it_is_received_by_nobody(
    between: proxy.ProxyClient, folder: Path
) -> None:
    async with start_talk(between, folder, "hole") as (talk, line):
        fault = line.blackhole()
        await until(lambda: talk.link.gateway_lost)
        await until(lambda: bool(fault.evidence()["applied"]))
        fault.verify()
        fault.heal()
        await talk.go_on()
        talk.check()
        assert len(talk.up) > 1 and len(talk.down) > 1


async def test_control_an_end_that_does_not_count_is_found_out(
    between: proxy.ProxyClient, folder: Path
) -> None:
    """The same check fails when a gateway takes what comes: so it would have seen a hole."""
    async with start_talk(between, folder, "control", CarelessHubThread) as (talk, line):
        fault = line.drop("up", times=5)
        await until(fault.done)
        fault.verify()
        await talk.go_on()
        with pytest.raises(AssertionError):
            talk.check()


async def test_a_handshake_that_is_spoilt_is_made_again(between: proxy.ProxyClient, folder: Path) -> None:
    async with start_talk(between, folder, "handshake") as (talk, line):
        for way, skip in itertools.product(("up", "down"), (0, 1)):
            fault = line.flip(way, on="command", skip=skip)
            line.reset()
            await until(fault.done)
            fault.verify()
            fault.heal()
            await talk.go_on()
        talk.check()


def test_a_fault_that_did_not_happen_is_reported(between: proxy.ProxyClient) -> None:
    """Every kind has its own evidence; without traffic there is none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = between.line("idle", "127.0.0.1", server.getsockname()[1])
        faults = [line.delay(1.0), line.drip(1.0), line.blackhole(), line.reset(), line.half_close()]
        faults += [getattr(line, kind)("up") for kind in INJURIES]
        for fault in faults:
            with pytest.raises(AssertionError, match="did not happen"):
                fault.verify()
    with pytest.raises(AssertionError, match="melt"):
        line.ask("melt")


FRAME = st.tuples(st.sampled_from([0, 1, 2, 4]), st.binary(max_size=300))


@given(
    st.sampled_from(sorted(SPLITTERS)), st.lists(FRAME, max_size=6), st.lists(st.integers(1, 400), min_size=1)
)
def test_pieces_do_not_depend_on_how_the_bytes_arrive(
    framing: str, bodies: list[tuple[int, bytes]], sizes: list[int]
) -> None:
    frames = [framed(flags, body) for flags, body in bodies]
    stream = bytes(GREETING_BYTES) + b"".join(frames)
    splitter = SPLITTERS[framing]()
    pieces: list[WirePiece] = []
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(stream):
            break
        pieces += splitter.feed(stream[at : at + size])
        at += size
    assert b"".join(piece.raw for piece in pieces) + splitter.rest == stream
    if framing == "zmtp":
        whole = [piece for piece in pieces if piece.kind != "greeting"]
        assert [piece.raw for piece in whole] == frames
        assert [piece.raw[piece.body_at :] for piece in whole] == [body for _, body in bodies]
        assert [piece.kind for piece in whole] == ["command" if f & 4 else "message" for f, _ in bodies]


def framed(flags: int, body: bytes) -> bytes:
    """A frame as ZMTP wants it."""
    if flags & 2 or len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def test_a_length_beyond_reason_is_passed_on_as_bytes() -> None:
    splitter = SPLITTERS["zmtp"]()
    frame = b"\x02" + (1 << 40).to_bytes(8, "big") + b"abc"
    assert [piece.kind for piece in splitter.feed(bytes(GREETING_BYTES) + frame)] == ["greeting", "bytes"]
    assert splitter.feed(b"more") == [WirePiece("bytes", b"more")]


@pytest.mark.parametrize("kind", INJURIES)
def test_every_injury_changes_what_goes_out(kind: str) -> None:
    memory, came_out = PassedMessages(), []
    pieces = [WirePiece("message", bytes([0, 40]) + bytes([number]) * 40, 2) for number in range(6)]
    rule = ProxyRule(kind, "up", skip=2)
    for piece in pieces:
        out = injure_piece(rule, piece, 1, memory) if rule.wants("up", piece) else None
        came_out += [piece.raw] if out is None else out
        memory.add(1, piece.raw)
    assert rule.applied == 1 and rule.changed
    assert came_out != [piece.raw for piece in pieces] and came_out[:2] == [piece.raw for piece in pieces[:2]]
