"""Ends of a channel that are closed with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from diptych.channel.hub import ChannelHub
from diptych.channel.keys import WorkerKeys, load_worker_keys, make_keys
from diptych.channel.link import ChannelLink
from diptych.messages import WorkerStats
from tests.unit.channel.endpoints import WAIT_S, Dial, RawSocket, make_hello, open_hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder


@pytest.fixture
async def hub(folder: Path) -> AsyncIterator[ChannelHub]:
    hub = open_hub(folder)
    yield hub
    hub.close()


@pytest.fixture
def dial(folder: Path) -> Iterator[Dial]:
    links: list[ChannelLink] = []

    def dial(
        hub: ChannelHub, worker: str = "decode-0", keys: WorkerKeys | None = None, **choices: float
    ) -> ChannelLink:
        keys = keys or load_worker_keys(folder)
        choices = {"silence_s": WAIT_S} | choices  # a slow machine is no lost gateway
        link = ChannelLink(
            hub.address,
            keys,
            make_hello(worker),
            lambda: WorkerStats(steps=3),
            beat_s=0.05,
            **choices,  # type: ignore[arg-type]
        )
        link.open()
        links.append(link)
        return link

    yield dial
    for link in links:
        link.close()


@pytest.fixture
def raw(hub: ChannelHub, folder: Path) -> Iterator[RawSocket]:
    raw = RawSocket(hub, folder)
    yield raw
    raw.close()
