"""A deployment that follows its traffic: a worker is started through Ray, then one changes its role; nothing fails.

And one whose worker is killed while it is to change: that is noted, and the fleet does what it can with the others.

What a step costs is made up, and slow (a profile of the test), so that decisions do not depend on this machine. Traffic
like HumanEval's (short prompts, longer answers) needs two decode workers there, traffic like LongBench's (long prompts,
short answers) two prefill workers, and three devices are all there are.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from planner.cost import StepCost
from planner.hardware import device
from planner.journal import Failed, read
from planner.profile import Profile, save
from planner.replan import replay
from planner.shape import known
from planner.terms import Split
from tests.system.served import Served, serve, wait_for

pytestmark = pytest.mark.timeout(600)

RATE = 4.0  # requests per second
HUMANEVAL, LONGBENCH = (16, 16), (256, 4)  # tokens of prompt and answer
COST = StepCost(prefill=(0.0, 0.0012, 0.0), decode=((0.02, 0.0, 0.02),))
# Here answers cost next to nothing: those that are held are long, and how many of them end is the machine's affair.
READING = StepCost(prefill=(0.0, 0.001, 0.0), decode=((0.002, 0.0, 0.0002),))
MOST_TOKENS = 1700  # of a long answer
ACTIONS = "diptych:replan_actions_total"


@dataclass
class Load:
    """Requests at a steady rate, whatever becomes of them; `shape` may change meanwhile.

    `held` streams beside them are read all the time, until `released`: each has a token after that.
    """

    url: str
    shape: tuple[int, int] = HUMANEVAL
    held: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    answers: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as client,
            asyncio.TaskGroup() as all,
        ):
            for number in range(self.held):
                all.create_task(self._hold(client, 1000 + number))
            number = 0
            while not self._over.is_set():
                all.create_task(self._ask(client, number))
                number += 1
                await asyncio.sleep(1 / RATE)

    async def _hold(self, client: httpx.AsyncClient, number: int) -> None:
        """A long answer, read until the block ends; it is given up and asked for again before its last token."""
        while not self._over.is_set():
            body = self._body(number, 256, MOST_TOKENS) | {"stream": True}
            tokens, status = 0, 0
            try:
                async with client.stream("POST", f"{self.url}/v1/completions", json=body) as got:
                    status = got.status_code
                    async for line in got.aiter_lines():
                        tokens += line.startswith("data: {")
                        if '"error"' in line:
                            self.wrong.append(line[:300])
                        if tokens >= MOST_TOKENS - 100 or (self.released.is_set() and tokens):
                            break
            except httpx.HTTPError as error:
                self.wrong.append(repr(error))
            if not tokens:
                self.wrong.append(f"a stream of no token: {status}")
            if self.released.is_set():
                return

    @staticmethod
    def _body(number: int, length: int, answer: int) -> dict[str, Any]:
        prompt = [(41 * place + 103 * number) % 4000 + 16 for place in range(length)]
        return {
            "model": "tiny", "prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        length, answer = self.shape
        body = self._body(number, length, answer)
        try:
            got = await client.post(f"{self.url}/v1/completions", json=body)
        except httpx.HTTPError as error:
            self.wrong.append(repr(error))
            return
        if got.status_code != 200 or got.json()["usage"]["completion_tokens"] != answer:
            self.wrong.append(got.text[:300])
        else:
            self.answers.append(number)

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """In a thread until the block ends; then every request has been answered."""
        thread = threading.Thread(target=lambda: asyncio.run(self.run()))
        thread.start()
        try:
            yield
        finally:
            self.released.set()
            self._over.set()
            thread.join()


def roles(served: Served) -> list[str]:
    return sorted(one["role"] for one in served.status()["workers"] if one["state"] == "up")


def draining(served: Served) -> list[str]:
    return [one["worker"] for one in served.status()["workers"] if one["state"] == "draining"]


def steered(tmp_path: Path, cost: StepCost, *more: str) -> tuple[list[str], Path]:
    """Options of a replanner with a profile of that cost, and where its journal is."""
    profile, journal = tmp_path / "profile.json", tmp_path / "decisions.jsonl"
    save(Profile(known("embedded"), device("cpu"), {Split(): cost}, source="made up for a test"), profile)
    options = ["--replan", "--replan-profile", str(profile), "--replan-journal", str(journal), *more]
    options += ["--replan-window-s", "8", "--replan-interval-s", "0.5"]
    return [*options, "--slo-ttft-ms", "5000", "--slo-tpot-ms", "500"], journal


def again(journal: Path) -> int:
    """How many decisions are in the journal; each comes out the same again."""
    replayed = list(replay(read(journal)))
    assert all(one.same for one in replayed), "what was decided is what is decided again"
    return len(replayed)


def test_a_fleet_grows_and_turns_with_its_traffic_and_no_request_fails(tmp_path: Path) -> None:
    options, journal = steered(tmp_path, COST, "--replan-budget", "3")
    with serve("--prefill", "1", "--decode", "1", *options) as served:
        load = Load(served.url)
        with load.flowing():
            wait_for(lambda: roles(served) == ["decode", "decode", "prefill"])
            wait_for(lambda: served.metric(ACTIONS, action="start", outcome="done") == 1)
            load.shape = LONGBENCH
            wait_for(lambda: roles(served) == ["decode", "prefill", "prefill"])
            wait_for(lambda: served.metric(ACTIONS, action="flip", outcome="done") >= 1)
        assert load.wrong == [] and len(load.answers) > 40
        assert served.metric("diptych:replan_alarms_total", what="prompt") >= 1
        assert served.metric("diptych:replan_target_workers", role="prefill") == 2
        wait_for(lambda: served.held() == {})
        served.terminal.expect("replan: start of decode-1 is done")
    assert again(journal) >= 2


def test_a_flip_whose_worker_is_killed_fails_and_the_fleet_goes_on(tmp_path: Path) -> None:
    """It is killed while it drains, with long answers on it: these go on elsewhere, and another worker turns."""
    options, journal = steered(tmp_path, READING)
    with serve("--prefill", "1", "--decode", "2", *options) as served:
        load = Load(served.url, LONGBENCH, held=4)
        with load.flowing():
            victims: list[str] = []

            def turning() -> bool:
                victims.extend(draining(served))
                return bool(victims)

            wait_for(turning, pause_s=0.01)
            victim = victims[0]
            served.worker(victim).kill()
            wait_for(lambda: served.metric(ACTIONS, action="flip", outcome="failed") == 1)
            load.released.set()
            served.terminal.expect(f"replan: flip of {victim} failed: it came back in its old role")
            wait_for(lambda: roles(served) == ["decode", "prefill", "prefill"])
            wait_for(lambda: served.metric(ACTIONS, action="flip", outcome="done") == 1)
            wait_for(
                lambda: len(served.status()["links"]) == 2
            )  # both prefill workers with the one that decodes
        assert load.wrong == [] and len(load.answers) > 40
        (decoder,) = [one for one in served.status()["workers"] if one["role"] == "decode"]
        assert decoder["worker"] == victim, "another one turned: this one is left alone for a window"
        wait_for(lambda: served.held() == {})
    (failed,) = [line for line in read(journal) if isinstance(line, Failed)]
    assert failed.worker == victim and "old role" in failed.why
    assert again(journal) >= 2
