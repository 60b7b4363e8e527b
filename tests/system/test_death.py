"""kill -9 of any part under load: streams go on, token for token, on what is left or on what comes back. So they do
when a worker changes pool.

Parts are kept dead for as long as a test looks: their supervisors are stopped meanwhile (SIGSTOP), and go on after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import psutil
import pytest

from services.cli import admin
from tests.system.served import Served, serve, wait_for

SOURCE = "def read(self, size=-1):\n    return self.buffer.read(size)\n\n"
PROMPTS = [f"# module {name}\n" + SOURCE * 12 for name in ("io", "pickle", "socket")]
OPEN = 12  # streams under way when something dies
TOKENS = 300
ADMIN = "an admin's key"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    # As long as it takes: a slow machine needs longer to start a worker than people are to wait.
    with serve(
        "--prefill", "2", "--decode", "2", "--recovery-s", "300", "--drain-s", "0.5", "--admin-key", ADMIN
    ) as deployment:  # fmt: skip
        yield deployment


@pytest.fixture(scope="module")
def told(served: Served) -> dict[str, str]:
    """The whole answer to each prompt when nothing happens."""
    client = served.client(timeout=600)
    return {
        prompt: client.completions.create(
            model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        .choices[0]
        .text
        for prompt in PROMPTS
    }


@pytest.fixture(autouse=True)
def whole(served: Served) -> Iterator[None]:
    """Every test begins with all workers, and has to leave nothing behind."""
    wait_for(lambda: served.ready() and len(served.status()["workers"]) == 4)
    yield
    wait_for(lambda: served.held() == {})


class Load:
    """Streams of greedy answers, and what came of them."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.texts: list[tuple[str, str]] = []  # prompt and answer of those that were told to the end
        self.failed: list[str] = []
        self.begun = 0  # that have had a token

    async def run(self, fault: asyncio.Task[None]) -> None:
        """`OPEN` streams from before the fault; new ones take the places of those that end, until it is over."""
        async with openai.AsyncOpenAI(
            base_url=f"{self.served.url}/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            await asyncio.gather(fault, *(self._serial(client, number, fault) for number in range(OPEN)))

    async def _serial(self, client: openai.AsyncOpenAI, number: int, fault: asyncio.Task[None]) -> None:
        while True:
            await self._one(client, PROMPTS[number % len(PROMPTS)])
            if fault.done():
                return

    async def _one(self, client: openai.AsyncOpenAI, prompt: str) -> None:
        text, finished = "", False
        try:
            stream = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for part in stream:
                if part.choices:
                    self.begun += not text
                    text += part.choices[0].text
                    finished = finished or part.choices[0].finish_reason is not None
        except openai.APIError as error:
            self.failed.append(f"{type(error).__name__}: {error}")
            return
        if finished:
            self.texts.append((prompt, text))
        else:
            self.failed.append("silence: a stream ended without a finish")


def under_load(served: Served, fault: object) -> Load:
    """Run `fault()` in a thread of its own when all streams are under way, then wait for all of them."""
    load = Load(served)

    async def strike() -> None:
        while load.begun < OPEN:
            await asyncio.sleep(0.02)
        assert callable(fault)
        await asyncio.to_thread(fault)

    async def both() -> None:
        await load.run(asyncio.create_task(strike()))

    asyncio.run(both())
    return load


@contextmanager
def nobody_restarts(*workers: psutil.Process) -> Iterator[None]:
    """The supervisors of these workers are stopped meanwhile."""
    parents = [parent for one in workers if (parent := one.parent()) is not None]
    for parent in parents:
        parent.suspend()
    try:
        yield
    finally:
        for parent in parents:
            parent.resume()


def exact(load: Load, told: dict[str, str]) -> None:
    """Nobody saw an error, and every answer is the undisturbed one."""
    assert load.failed == []
    assert len(load.texts) >= OPEN and set(load.texts) <= set(told.items())


def test_a_dead_ray_head_is_not_noticed_by_requests(served: Served, told: dict[str, str]) -> None:
    """It comes first: all that follows happens without a head."""

    def strike() -> None:
        (head,) = served.terminal.find("gcs_server")
        head.kill()
        served.terminal.expect("the control plane is lost (gcs_server has ended)")

    exact(under_load(served, strike), told)
    assert served.ready() and served.terminal.process.poll() is None


def test_with_spares_killed_workers_cost_no_request(served: Served, told: dict[str, str]) -> None:
    names = ("prefill-0", "decode-0")
    victims = [served.worker(name) for name in names]

    def strike() -> None:
        with nobody_restarts(*victims):
            for victim in victims:
                victim.kill()
            wait_for(lambda: not {one["worker"] for one in served.status()["workers"]} & set(names))
            assert served.ready()  # there is another way

    exact(under_load(served, strike), told)
    wait_for(lambda: len(served.status()["workers"]) == 4)
    assert {served.worker(name).pid for name in names}.isdisjoint(victim.pid for victim in victims)


def test_without_a_spare_streams_wait_for_a_decode_worker_to_come_back(
    served: Served, told: dict[str, str]
) -> None:
    victims = [served.worker(f"decode-{index}") for index in range(2)]

    def strike() -> None:
        with nobody_restarts(*victims):
            for victim in victims:
                victim.kill()
            wait_for(lambda: not served.ready())
            assert served.status()["sequences"] >= OPEN  # nobody was sent away

    exact(under_load(served, strike), told)


def test_a_worker_that_changes_pool_under_load_costs_no_request(served: Served, told: dict[str, str]) -> None:
    """It is told to wait for half a second only: what it has not written by then goes on elsewhere."""
    before = served.worker("decode-1").pid

    def turn(role: str) -> None:
        assert admin.turn(served.url, ADMIN, "decode-1", role, force=False) == 0
        wait_for(
            lambda: ("decode-1", role) in {(one["worker"], one["role"]) for one in served.status()["workers"]}
        )

    def strike() -> None:
        turn("prefill")
        wait_for(
            lambda: (
                ("decode-1", "decode-0")
                in {(one["source"], one["target"]) for one in served.status()["links"]}
            )
        )
        turn("decode")

    exact(under_load(served, strike), told)
    assert served.worker("decode-1").pid == before


def test_a_killed_gateway_leaves_no_orphans(served: Served) -> None:
    pids = {one["worker"]: one["pid"] for one in served.status()["workers"]}

    def strike() -> None:
        (gateway,) = served.terminal.find("-m services.gateway")
        gateway.kill()

    load = under_load(served, strike)
    assert len(load.failed) >= 1  # their streams ended with it
    wait_for(lambda: served.ready() and len(served.status()["workers"]) == 4)
    wait_for(lambda: served.held() == {})  # of what the gateway before it had begun
    assert {one["worker"]: one["pid"] for one in served.status()["workers"]} == pids
