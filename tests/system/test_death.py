"""kill -9 of any part under load: streams go on, token for token, on what is left or on what comes back. So they do
when a worker changes pool.

Parts are kept dead for as long as a test looks: their supervisors are stopped meanwhile (SIGSTOP), and go on after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import psutil
import pytest

from diptych.messages import SILENCE_S
from services.cli.client import admin
from tests.support.deployment import Launched, serve, wait_for
from tests.system.otlp_collector import Collector, attributes, collecting, seconds, ttft_ms

SOURCE = "def read(self, size=-1):\n    return self.buffer.read(size)\n\n"
PROMPTS = [f"# module {name}\n" + SOURCE * 12 for name in ("io", "pickle", "socket")]
OPEN = 12  # streams under way when something dies
TOKENS = 300
ADMIN = "the admin's secret key"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(collector: Collector) -> Iterator[Launched]:
    # As long as it takes: a slow machine needs longer to start a worker than people are to wait.
    with serve(
        "--prefill", "2", "--decode", "2", "--recovery-s", "300", "--drain-s", "0.5", "--admin-key", ADMIN,
        "--otlp-traces-endpoint", collector.url,
    ) as deployment:  # fmt: skip
        yield deployment


@pytest.fixture(scope="module")
def undisturbed(served: Launched) -> dict[str, str]:
    """The whole answer to each prompt when nothing happens."""
    with served.client(timeout=600) as client:
        return {
            prompt: client.completions.create(
                model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
            )
            .choices[0]
            .text
            for prompt in PROMPTS
        }


@pytest.fixture(autouse=True)
def whole(served: Launched) -> Iterator[None]:
    """Every test begins with all workers, and has to leave nothing behind."""
    wait_for(lambda: served.ready() and len(served.status()["workers"]) == 4)
    yield
    wait_for(lambda: served.held() == {})


class Load:
    """Streams of greedy answers, and what came of them."""

    def __init__(self, served: Launched) -> None:
        self.served = served
        self.texts: list[tuple[str, str]] = []  # prompt and answer of those that were received to the end
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


def under_load(served: Launched, fault: object) -> Load:
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


def exact(load: Load, undisturbed: dict[str, str]) -> None:
    """Nobody saw an error, and every answer is the undisturbed one."""
    assert load.failed == []
    assert len(load.texts) >= OPEN and set(load.texts) <= set(undisturbed.items())


def test_a_dead_ray_head_is_not_noticed_by_requests(served: Launched, undisturbed: dict[str, str]) -> None:
    """It comes first: all that follows happens without a head."""

    def strike() -> None:
        (head,) = served.terminal.find("gcs_server")
        head.kill()
        served.terminal.expect("the control plane is lost (gcs_server has ended)")

    exact(under_load(served, strike), undisturbed)
    assert served.ready() and served.terminal.process.poll() is None


def test_workers_of_one_host_listen_on_no_port(served: Launched) -> None:
    """KV moves over shared memory. NIXL's port would give whoever reaches it the worker's memory."""
    wait_for(lambda: len(served.status()["links"]) == 4)
    for one in served.status()["workers"]:
        process = served.worker(one["worker"])
        assert [at for at in process.net_connections() if at.status == psutil.CONN_LISTEN] == []


def known_traces(served: Launched, collector: Collector) -> set[str]:
    """The traces of all requests so far. They come a moment late, in the order in which requests ended."""
    with served.client(timeout=600) as client:
        last = client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=1)
    wait_for(lambda: last.headers["x-request-id"] in collector.traces())
    return set(collector.traces())


def test_with_spares_killed_workers_cost_no_request(
    served: Launched, undisturbed: dict[str, str], collector: Collector
) -> None:
    """Each request is one trace, also if it lost a worker, or both."""
    names, known = ("prefill-0", "decode-0"), known_traces(served, collector)
    victims = [served.worker(name) for name in names]

    def strike() -> None:
        with nobody_restarts(*victims):
            for victim in victims:
                victim.kill()
            wait_for(lambda: not {one["worker"] for one in served.status()["workers"]} & set(names))
            assert served.ready()  # there is another way

    load = under_load(served, strike)
    exact(load, undisturbed)
    wait_for(lambda: len(served.status()["workers"]) == 4)
    assert {served.worker(name).pid for name in names}.isdisjoint(victim.pid for victim in victims)
    wait_for(lambda: len(collector.traces().keys() - known) == len(load.texts))
    lost = 0
    for spans in (spans for name, spans in collector.traces().items() if name not in known):
        (root,) = (span for span in spans if not span.parent_span_id)
        errors = [attributes(span).get("error.type") for span in spans if span.name == "attempt"]
        assert errors[-1] is None and set(errors[:-1]) <= {"worker_lost"} and root.status.code == 0
        assert 0 < ttft_ms(spans) <= 1e3 * seconds(root)
        lost += len(errors) > 1
    assert lost > 0


def test_without_a_spare_streams_wait_for_a_decode_worker_to_come_back(
    served: Launched, undisturbed: dict[str, str]
) -> None:
    victims = [served.worker(f"decode-{index}") for index in range(2)]

    def strike() -> None:
        with nobody_restarts(*victims):
            for victim in victims:
                victim.kill()
            wait_for(lambda: not served.ready())
            # Nobody is sent away. A client may be between two streams just now.
            wait_for(lambda: served.status()["sequences"] >= OPEN)

    exact(under_load(served, strike), undisturbed)


def test_a_worker_that_changes_pool_under_load_costs_no_request(
    served: Launched, undisturbed: dict[str, str]
) -> None:
    """It is configured to wait for half a second only: what it has not written by then goes on elsewhere."""
    before = served.worker("decode-1").pid

    def switch_role(role: str) -> None:
        assert admin.switch_role(served.url, ADMIN, "decode-1", role, force=False) == 0
        wait_for(
            lambda: ("decode-1", role) in {(one["worker"], one["role"]) for one in served.status()["workers"]}
        )

    def strike() -> None:
        switch_role("prefill")
        wait_for(
            lambda: (
                ("decode-1", "decode-0")
                in {(one["source"], one["target"]) for one in served.status()["links"]}
            )
        )
        switch_role("decode")

    exact(under_load(served, strike), undisturbed)
    assert served.worker("decode-1").pid == before


def stop_gateway(served: Launched, seconds: float) -> None:
    """SIGSTOP, and SIGCONT later."""
    gateway = served.terminal.gateway()
    gateway.suspend()
    time.sleep(seconds)
    gateway.resume()


def lost_workers(served: Launched) -> float:
    return served.metric("diptych:workers_lost_total")


def test_a_gateway_that_is_stopped_for_eight_seconds_loses_nothing(
    served: Launched, undisturbed: dict[str, str]
) -> None:
    """Not even a retry: workers keep what they have, and what they say meanwhile arrives afterwards."""
    before = lost_workers(served)
    exact(under_load(served, lambda: stop_gateway(served, 8.0)), undisturbed)
    assert lost_workers(served) == before


def test_beyond_the_silence_limit_every_request_has_one_clear_end(
    served: Launched, undisturbed: dict[str, str]
) -> None:
    """Workers give a gateway up that is silent for so long; when it is back, its streams go on."""
    load = under_load(served, lambda: stop_gateway(served, 1.5 * SILENCE_S))
    assert set(load.texts) <= set(undisturbed.items())
    assert not [failure for failure in load.failed if failure.startswith("silence")]
    assert len(load.texts) + len(load.failed) >= OPEN
    wait_for(lambda: served.ready() and len(served.status()["workers"]) == 4)


def test_a_killed_gateway_leaves_no_orphans(served: Launched) -> None:
    pids = {one["worker"]: one["pid"] for one in served.status()["workers"]}

    def strike() -> None:
        served.terminal.gateway().kill()

    load = under_load(served, strike)
    assert len(load.failed) >= 1  # their streams ended with it
    wait_for(lambda: served.ready() and len(served.status()["workers"]) == 4)
    wait_for(lambda: served.held() == {})  # of what the gateway before it had begun
    assert {one["worker"]: one["pid"] for one in served.status()["workers"]} == pids
