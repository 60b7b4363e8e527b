"""The channel over real sockets on loopback."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from diptych.channel import Hub, Link
from diptych.errors import ChannelError
from diptych.keys import load_server_keys, load_worker_keys
from diptych.messages import Abort, Beat, Failed, Hello, Release, Stats, ToWorker, Welcome
from tests.unit.channel.ends import (
    ROOT,
    WAIT_S,
    Dial,
    Raw,
    hear,
    hello,
    hub_at,
    listen,
    met,
)


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
