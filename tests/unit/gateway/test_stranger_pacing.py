"""Strangers begin one at a time, however many come together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from services.gateway.http.stranger_pacing import StrangerPacing


class Connection:
    """A connection of a stranger."""

    aborted = False


def begin(pacing: StrangerPacing, name: str, begun: list[str]) -> Connection:
    """A request of a connection of its own; the first letter of its name is its address."""
    connection = Connection()
    pacing.begin_request(connection, name[0], partial(begun.append, name))
    return connection


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


async def test_strangers_begin_one_at_a_time_and_who_has_left_does_not() -> None:
    pacing, begun = StrangerPacing(60.0), list[str]()
    crowd = [begin(pacing, f"a{number}", begun) for number in range(20)]
    await asyncio.sleep(0.01)
    assert begun == ["a0"]
    crowd[-1].aborted = True
    pacing._begin_next()
    assert begun == ["a0", "a18"]
    for connection in crowd:
        pacing.forget_connection(connection, "a")
    assert not pacing._waiting


async def test_addresses_take_turns_and_the_newest_of_one_begins_first() -> None:
    pacing, begun = StrangerPacing(0.001), list[str]()
    crowd = [begin(pacing, name, begun) for name in ("a1", "a2", "a3", "a4", "a5", "b1", "b2")]
    pacing.forget_connection(crowd[3], "a")
    await wait_until(lambda: not pacing._waiting)
    assert begun == ["a1", "a5", "b2", "a3", "b1", "a2"]
