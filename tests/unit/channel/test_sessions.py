"""The channel over real sockets on loopback."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from diptych.channel.hub import ChannelHub
from diptych.channel.keys import load_server_keys, load_worker_keys
from diptych.channel.link import ChannelLink
from diptych.errors import ChannelError
from diptych.messages import Abort, Failed, Heartbeat, Hello, Release, ToWorker, Welcome, WorkerStats
from tests.unit.channel.endpoints import (
    ROOT,
    WAIT_S,
    Dial,
    RawSocket,
    make_hello,
    meet_each_other,
    open_hub,
    receive_at,
    receive_from,
)

# The machine's IPv6 addresses, in hexadecimal digits; none without IPv6.
ADDRESSES = Path("/proc/net/if_inet6")
IPV6 = ADDRESSES.read_text(encoding="ascii") if ADDRESSES.exists() else ""


async def test_a_worker_is_met_welcomed_and_beats(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub)
    message = await receive_from(hub)
    assert msgspec.structs.replace(message, link="") == make_hello()
    welcome = await receive_at(link, Welcome)
    assert welcome == Welcome("g1", 0.05, 10.0, WAIT_S) and not link.gateway_lost
    beat = await receive_from(hub)
    assert beat == Heartbeat("decode-0", "decode-0/1", WorkerStats(steps=3))


async def test_a_channel_has_an_ipv6_address(folder: Path, dial: Dial) -> None:
    if not socket.has_ipv6 or not any(line.startswith("0" * 31 + "1") for line in IPV6.splitlines()):
        pytest.skip("this machine has no IPv6")
    hub = open_hub(folder, "tcp://[::1]:0")
    try:
        assert hub.address.startswith("tcp://[::1]:")
        await meet_each_other(hub, dial(hub))
    finally:
        hub.close()


async def test_messages_arrive_in_order_in_both_directions(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub)
    await meet_each_other(hub, link)

    def speak() -> None:
        for number in range(300):
            link.send(Failed("r", number, "a", "b"))

    thread = threading.Thread(target=speak)
    thread.start()
    for number in range(300):
        assert hub.send("decode-0", Abort("r", number))
    received = [await receive_from(hub, Failed) for _ in range(300)]
    thread.join()
    assert [message.epoch for message in received if isinstance(message, Failed)] == list(range(300))
    orders: list[ToWorker] = []
    async with asyncio.timeout(WAIT_S):
        while len(orders) < 300:
            orders += await asyncio.to_thread(link.poll_messages, 0.5)
    assert [message.epoch for message in orders if isinstance(message, Abort)] == list(range(300))


async def test_beats_go_on_while_nobody_polls(hub: ChannelHub, dial: Dial) -> None:
    dial(hub)
    await receive_from(hub, Hello)
    for _ in range(3):
        await receive_from(hub, Heartbeat)


async def test_sending_to_nobody_is_reported(hub: ChannelHub, dial: Dial) -> None:
    assert not hub.send("decode-0", Abort("r", 0))
    link = dial(hub)
    await meet_each_other(hub, link)
    assert hub.send("decode-0", Abort("r", 0)) and not hub.send("decode-1", Abort("r", 0))
    link.close()
    async with asyncio.timeout(WAIT_S):
        while hub.send("decode-0", Abort("r", 0)):
            await asyncio.sleep(0.01)


async def test_a_gateway_that_restarts_is_greeted_anew(dial: Dial, folder: Path) -> None:
    first = open_hub(folder)
    link = dial(first)  # so that it is the new gateway's word that counts, not the silence
    one = await meet_each_other(first, link)
    first.close()
    second = open_hub(folder, first.address, "g2")
    try:
        two = await meet_each_other(second, link)
        assert one.link != two.link and not link.gateway_lost and link.num_broken_sessions == 1
    finally:
        second.close()


async def test_silence_of_the_gateway_is_noticed_while_polling(dial: Dial, folder: Path) -> None:
    first = open_hub(folder)
    link = dial(first)
    await meet_each_other(first, link)
    waiting = asyncio.create_task(asyncio.to_thread(link.poll_messages, WAIT_S))
    first.close()
    assert await asyncio.wait_for(waiting, WAIT_S / 2) == [] and link.gateway_lost
    link.send(Failed("r", 0, "to", "nobody"))
    second = open_hub(folder, first.address, "g2")
    try:
        await meet_each_other(second, link)
        link.send(Failed("r", 1, "to", "somebody"))
        assert await receive_from(second, Failed) == Failed("r", 1, "to", "somebody")
        assert bool(link.gateway_lost) is False
    finally:
        second.close()


async def test_a_worker_that_was_given_up_introduces_itself_anew(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub)
    before = await meet_each_other(hub, link)
    hub.end_session("decode-0")
    after = await meet_each_other(hub, link)  # with a Welcome at the worker: it aborts what it held
    assert before.link != after.link
    assert hub.send("decode-0", Release("r", 0)) and await receive_at(link, Release)


async def test_a_restarted_worker_takes_over_its_name(hub: ChannelHub, dial: Dial) -> None:
    first = dial(hub)
    await meet_each_other(hub, first)
    second = dial(hub)
    await meet_each_other(hub, second)
    first.close()
    assert hub.send("decode-0", Abort("r", 1))
    assert await receive_at(second, Abort) == Abort("r", 1)


async def test_polling_can_be_ended_from_another_thread(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub)
    await meet_each_other(hub, link)
    waiting = asyncio.create_task(asyncio.to_thread(link.poll_messages, WAIT_S))
    link.wake_poll()
    assert await asyncio.wait_for(waiting, WAIT_S / 2) == [] and not link.gateway_lost


async def test_the_last_words_of_a_worker_arrive(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub)
    await meet_each_other(hub, link)
    for number in range(50):
        link.send(Failed("r", number, "a", "b"))
    await asyncio.to_thread(link.close)
    received = [await receive_from(hub, Failed) for _ in range(50)]
    assert [message.epoch for message in received if isinstance(message, Failed)] == list(range(50))


async def test_a_fault_in_the_io_thread_is_raised_by_poll(hub: ChannelHub, folder: Path) -> None:
    def broken() -> WorkerStats:
        raise RuntimeError("no books")

    link = ChannelLink(hub.address, load_worker_keys(folder), make_hello(), broken, beat_s=0.02)
    link.open()
    hearing = asyncio.create_task(receive_from(hub, Hello))
    with pytest.raises(ChannelError, match="has failed"):
        for _ in range(100):
            await asyncio.to_thread(link.poll_messages, WAIT_S)
    await hearing
    link.close()


async def test_waiting_for_messages_can_be_cancelled_without_losing_one(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub)
    await meet_each_other(hub, link)
    for number in range(20):
        link.send(Failed("r", number, "a", "b"))
        await asyncio.sleep(0)
        hearing = asyncio.create_task(hub.receive_message())
        await asyncio.sleep(0)
        if hearing.done():
            _, message = hearing.result()
            while isinstance(message, Heartbeat):
                message = await receive_from(hub)
            assert message == Failed("r", number, "a", "b")
        else:
            hearing.cancel()
            assert await receive_from(hub, Failed) == Failed("r", number, "a", "b")


def test_an_address_in_use_is_reported(folder: Path) -> None:
    first = open_hub(folder)
    second = ChannelHub(first.address, load_server_keys(folder), "g2")
    with pytest.raises(ChannelError, match="cannot listen"):
        second.open()
    first.close()
    first.close()


async def test_a_worker_that_missed_an_order_begins_anew(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub)
    await meet_each_other(hub, link)
    hub._accepted["decode-0"].send_window.next_number += 1  # as if a frame had been lost on its way
    hub.send("decode-0", Abort("r", 0))
    await meet_each_other(hub, link)
    assert link.num_broken_sessions == 1


# ---- closed connections are known at once


KILLED = """
import sys, time
from pathlib import Path
from diptych.channel.link import ChannelLink
from diptych.channel.keys import load_worker_keys
from diptych.messages import Hello, WorkerStats
hello = Hello("decode-0", "decode", "decode-0/1", "f", {}, "host", 1, 10, 100, 2048, {})
link = ChannelLink(sys.argv[1], load_worker_keys(Path(sys.argv[2])), hello, WorkerStats, beat_s=0.05)
link.open()
while True:
    link.poll_messages(60.0)
"""


async def test_a_killed_process_is_known_by_its_connection(hub: ChannelHub, dial: Dial, folder: Path) -> None:
    other = dial(hub, "decode-1")
    await meet_each_other(hub, other)
    process = subprocess.Popen([sys.executable, "-c", KILLED, hub.address, str(folder)], cwd=ROOT)
    await receive_from(hub, Hello)
    assert hub.take_ended() == []
    process.kill()
    process.wait()
    async with asyncio.timeout(WAIT_S):
        while not (gone := hub.take_ended()):
            await asyncio.sleep(0.01)
    assert gone == ["decode-0"] and hub.take_ended() == []
    assert not hub.send("decode-0", Abort("r", 0)) and hub.take_ended() == []
    assert hub.send("decode-1", Abort("r", 0)) and await receive_at(other, Abort)


async def test_who_came_back_is_not_gone(hub: ChannelHub, raw: RawSocket, dial: Dial) -> None:
    first = dial(hub)
    await meet_each_other(hub, first)
    first.close()
    second = dial(hub)
    await meet_each_other(hub, second)
    assert hub.take_ended() == []
    second.close()
    hub.end_session("decode-0")  # it is known to be lost already
    assert hub.take_ended() == []


async def test_a_look_costs_a_worker_nothing(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub)
    await meet_each_other(hub, link)
    for _ in range(20):
        assert hub.take_ended() == []
    assert hub.send("decode-0", Abort("r", 0))
    assert await receive_at(link, Abort)
    assert link.num_broken_sessions == 0 and not link.gateway_lost


async def test_a_gateway_that_is_gone_is_known_by_its_connection(dial: Dial, folder: Path) -> None:
    first = open_hub(folder)
    link = dial(first)  # its silence tells nothing
    await meet_each_other(first, link)
    waiting = asyncio.create_task(asyncio.to_thread(link.poll_messages, 5 * WAIT_S))
    first.close()
    assert await asyncio.wait_for(waiting, WAIT_S) == [] and link.gateway_lost
