"""A main thread that stands still for a while loses nothing, and its process is not taken for dead."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from diptych.channel import frames, hub_thread
from diptych.channel.hub import ChannelHub
from diptych.channel.keys import load_server_keys, load_worker_keys
from diptych.channel.link import ChannelLink
from diptych.messages import SILENCE_S, Abort, Failed, Heartbeat, Hello, Reject, ToWorker, WorkerStats
from tests.unit.channel.endpoints import (
    ROOT,
    WAIT_S,
    Dial,
    RawSocket,
    make_hello,
    meet_each_other,
    receive_at,
    receive_from,
    wait_for_refusal,
)


def numbers(messages: list[ToWorker]) -> list[int]:
    return [message.epoch for message in messages if isinstance(message, Abort)]


async def test_two_seconds_of_a_blocked_loop_break_nothing(folder: Path) -> None:
    """With the limits of the product."""
    hub = ChannelHub("tcp://127.0.0.1:0", load_server_keys(folder), "g1")
    hub.open()
    link = ChannelLink(hub.address, load_worker_keys(folder), make_hello(), WorkerStats)
    link.open()
    try:
        await meet_each_other(hub, link)
        time.sleep(2.0)
        await asyncio.sleep(0.2)
        assert link.num_broken_sessions == 0 and not link.gateway_lost
        assert hub.send("decode-0", Abort("r", 1)) and await receive_at(link, Abort)
        assert SILENCE_S >= 10.0
    finally:
        link.close()
        hub.close()


async def test_what_is_said_while_the_loop_stands_still_arrives_afterwards(
    hub: ChannelHub, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "WINDOW_FRAMES", 100)
    link = dial(hub)
    await meet_each_other(hub, link)
    for number in range(1000):
        link.send(Failed("r", number, "a", "b"))
    time.sleep(1.0)
    assert hub._thread is not None and len(hub._thread.inbox) < 110, "the rest waits at the worker"
    received = [await receive_from(hub, Failed) for _ in range(1000)]
    assert [message.epoch for message in received if isinstance(message, Failed)] == list(range(1000))
    assert link.num_broken_sessions == 0


async def test_a_workers_last_words_come_before_its_end(hub: ChannelHub, dial: Dial) -> None:
    """It says them and ends while the loop stands still; what is sent to it meanwhile does not cut them off."""
    link = dial(hub)
    await meet_each_other(hub, link)
    for number in range(5):
        link.send(Failed("r", number, "a", "b"))
    link.close()
    time.sleep(0.5)
    assert hub.take_ended() == [] and hub.send("decode-0", Abort("r", 9)) and hub.take_ended() == []
    received = [await receive_from(hub, Failed) for _ in range(5)]
    assert [message.epoch for message in received if isinstance(message, Failed)] == list(range(5))
    async with asyncio.timeout(WAIT_S):
        while (gone := hub.take_ended()) == []:
            await asyncio.sleep(0.01)
    assert gone == ["decode-0"] and not hub.send("decode-0", Abort("r", 10))


async def test_a_worker_stops_computing_while_its_gateway_stalls(
    hub: ChannelHub, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "WINDOW_FRAMES", 10)
    link = dial(hub, max_messages=100)
    await meet_each_other(hub, link)
    sent = 0
    while not link.is_congested:
        link.send(Failed("r", sent, "a", "b"))
        sent += 1
    assert sent >= 50
    waiting = asyncio.create_task(asyncio.to_thread(link.poll_messages, WAIT_S))
    for _ in range(sent):
        await receive_from(hub, Failed)
    assert await asyncio.wait_for(waiting, WAIT_S / 2) == []
    assert (bool(link.is_congested), link.num_broken_sessions) == (False, 0)


async def test_beats_do_not_pile_up_while_the_loop_stands_still(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub)
    await meet_each_other(hub, link)
    time.sleep(1.0)  # twenty beats
    assert hub._thread is not None and len(hub._thread.inbox) <= 2
    assert await receive_from(hub, Heartbeat) and link.num_broken_sessions == 0


async def test_a_worker_that_ignores_its_window_is_given_up(
    hub: ChannelHub, raw: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_thread, "QUEUED_FRAMES", 50)
    raw.greet()
    await receive_from(hub, Hello)
    for number in range(1, 100):
        raw.say(number, Failed("r", number, "a", "b"))
    async with asyncio.timeout(WAIT_S):
        while not hub.refused["overrun"]:
            await asyncio.sleep(0.01)
    assert hub._thread is not None and len(hub._thread.inbox) <= 52
    for _ in range(len(hub._thread.inbox)):
        await hub.receive_message()
    assert hub.take_ended() == ["raw"]


async def test_an_inbox_that_is_not_polled_does_not_break_a_session(
    hub: ChannelHub, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is in a long step: what the gateway says waits there."""
    monkeypatch.setattr(frames, "WINDOW_FRAMES", 20)
    link = dial(hub, max_messages=100)
    await meet_each_other(hub, link)
    for number in range(500):
        assert hub.send("decode-0", Abort("r", number))
    await asyncio.sleep(0.5)
    got: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while len(got) < 500:
            got += numbers(await asyncio.to_thread(link.poll_messages, 0.5))
    assert got == list(range(500)) and link.num_broken_sessions == 0


# ---- a process that is stopped keeps its connection

GATEWAY_SCRIPT = """
import asyncio, sys
from pathlib import Path
from diptych.channel.hub import ChannelHub
from diptych.channel.keys import load_server_keys
from diptych.messages import Abort, Failed, Hello
async def main():
    hub = ChannelHub("tcp://127.0.0.1:0", load_server_keys(Path(sys.argv[1])), "g", silence_s=float(sys.argv[2]))
    hub.open()
    print(hub.address, flush=True)
    while True:
        worker, message = await hub.receive_message()
        if isinstance(message, Hello):
            hub.accept_session(worker, message.link)
            hub.send(worker, Abort("met", 0))
        if isinstance(message, Failed):
            hub.send(worker, Abort(message.request, message.epoch))
asyncio.run(main())
"""


@pytest.mark.parametrize(("silence_s", "breaks"), [(60.0, 0), (0.7, 1)], ids=["within", "beyond"])
def test_a_stopped_gateway_is_gone_only_after_the_silence_limit(
    folder: Path, silence_s: float, breaks: int
) -> None:
    command = [sys.executable, "-c", GATEWAY_SCRIPT, str(folder), str(silence_s)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        link = ChannelLink(
            process.stdout.readline().strip(),
            load_worker_keys(folder),
            make_hello(),
            WorkerStats,
            beat_s=0.05,
        )
        link.open()
        try:
            assert any(
                isinstance(message, Abort) for _ in range(4) for message in link.poll_messages(WAIT_S / 4)
            )
            os.kill(process.pid, signal.SIGSTOP)
            link.poll_messages(WAIT_S if breaks else 2.0)  # returns at once if the gateway is lost
            lost = link.gateway_lost
            os.kill(process.pid, signal.SIGCONT)
            assert (lost, link.num_broken_sessions) == (breaks == 1, breaks)
            for number in range(10) if not lost else ():
                link.send(Failed("r", number, "a", "b"))
            while link.gateway_lost:
                assert link.poll_messages(WAIT_S)
            assert link.num_broken_sessions == breaks
        finally:
            link.close()
            process.kill()


WORKER_SCRIPT = """
import sys
from pathlib import Path
from diptych.channel.keys import load_worker_keys
from diptych.channel.link import ChannelLink
from diptych.messages import Abort, Failed, WorkerStats
from tests.unit.channel.endpoints import make_hello
beats = []
def stats():  # the link's thread calls this for each heartbeat, after it has looked for silence
    beats.append(None)
    return WorkerStats()
link = ChannelLink(sys.argv[2], load_worker_keys(Path(sys.argv[1])), make_hello(), stats, beat_s=0.05)
link.open()
def wait_for_abort(request):
    while not link.num_broken_sessions:
        if any(isinstance(message, Abort) and message.request == request for message in link.poll_messages(0.1)):
            return
wait_for_abort("met")
print("met", flush=True)
sys.stdin.readline()
before = len(beats)
while len(beats) == before and not link.num_broken_sessions:
    link.poll_messages(0.02)
print("beat", flush=True)
sys.stdin.readline()
link.send(Failed("echo", 0, "a", "b"))
wait_for_abort("echo")
print(link.num_broken_sessions, flush=True)
link.close()
"""


def test_a_machine_that_slept_for_longer_than_the_silence_limit_breaks_nothing(folder: Path) -> None:
    """Both ends stand still; the worker goes on first, when the gateway has said nothing for a long time."""
    with ExitStack() as owned:

        def run(script: str, *arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", script, str(folder), *arguments]
            pipe = subprocess.PIPE
            process = owned.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
            )
            owned.callback(process.kill)
            return process

        gateway = run(GATEWAY_SCRIPT, "2.0")
        assert gateway.stdout is not None
        worker = run(WORKER_SCRIPT, gateway.stdout.readline().strip())
        assert worker.stdin is not None and worker.stdout is not None
        assert worker.stdout.readline() == "met\n"

        def ask(question: str) -> str:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(f"{question}\n")
            worker.stdin.flush()
            return worker.stdout.readline()

        for process in (gateway, worker):
            process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        worker.send_signal(signal.SIGCONT)
        assert ask("beat?") == "beat\n"
        gateway.send_signal(signal.SIGCONT)
        assert ask("broken sessions?") == "0\n", "after an answer of the gateway"


# ---- one name, two workers


async def test_a_second_worker_of_a_name_disturbs_nobody_and_can_be_rejected(
    hub: ChannelHub, dial: Dial
) -> None:
    first = dial(hub)
    await meet_each_other(hub, first)
    second = dial(hub)
    async with asyncio.timeout(WAIT_S):
        while True:
            _, message = await hub.receive_message()
            if isinstance(message, Hello):
                break
    assert hub.send("decode-0", Abort("r", 1)) and numbers([await receive_at(first, Abort)]) == [1]
    hub.reject_session(message.link, "there is another")
    assert await receive_at(second, Reject) == Reject("there is another")
    first.send(Failed("r", 2, "a", "b"))
    assert await receive_from(hub, Failed) == Failed("r", 2, "a", "b")
    assert first.num_broken_sessions == 0 and hub.take_ended() == []


async def test_messages_of_a_worker_that_was_not_accepted_are_refused(
    hub: ChannelHub, raw: RawSocket
) -> None:
    raw.greet()
    async with asyncio.timeout(WAIT_S):
        assert isinstance((await hub.receive_message())[1], Hello)
    raw.say(1, Failed("r", 0, "a", "b"))
    await wait_for_refusal(hub, "stale")


def test_limits_fit_each_other() -> None:
    """What the window lets through never fills the socket or an inbox; a long message passes alone."""
    assert frames.WINDOW_FRAMES < frames.QUEUED_FRAMES
    assert frames.MAX_FRAME_BYTES <= frames.WINDOW_BYTES < frames.QUEUED_BYTES


def test_a_pause_is_no_silence_and_no_credit_either(folder: Path) -> None:
    """Frames that are read right after a pause count from now on, not from a moment that is still to come."""
    link = ChannelLink("tcp://127.0.0.1:1", load_worker_keys(folder), make_hello(), WorkerStats)
    link._received_s = link._round_s = 1000.0
    link._discount_pause(4600.0)
    assert link._received_s == 4600.0
    link._received_s, link._round_s = 4595.0, 4600.0
    link._discount_pause(4600.5)  # an ordinary wait
    assert link._received_s == 4595.0
    link._round_s = 1000.0
    link._discount_pause(4600.5)
    assert link._received_s == 4600.5
