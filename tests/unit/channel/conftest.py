"""Ends of a channel that are closed with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from diptych.channel import Hub, Link
from diptych.keys import WorkerKeys, load_worker_keys, make_keys
from diptych.messages import Stats
from tests.unit.channel.ends import (
    WAIT_S,
    Dial,
    Raw,
    hello,
    hub_at,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder


@pytest.fixture
async def hub(folder: Path) -> AsyncIterator[Hub]:
    hub = hub_at(folder)
    yield hub
    hub.close()


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


@pytest.fixture
def raw(hub: Hub, folder: Path) -> Iterator[Raw]:
    raw = Raw(hub, folder)
    yield raw
    raw.close()
