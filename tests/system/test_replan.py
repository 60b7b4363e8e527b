"""A deployment that follows its traffic: a worker is started through Ray, then one changes its role; nothing fails.

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

import httpx
import pytest

from planner.cost import StepCost
from planner.hardware import device
from planner.journal import read
from planner.profile import Profile, save
from planner.replan import replay
from planner.shape import known
from planner.terms import Split
from tests.system.served import Served, serve, wait_for

pytestmark = pytest.mark.timeout(600)

RATE = 4.0  # requests per second
HUMANEVAL, LONGBENCH = (16, 16), (256, 4)  # tokens of prompt and answer
COST = StepCost(prefill=(0.0, 0.0012, 0.0), decode=((0.02, 0.0, 0.02),))
ACTIONS = "diptych:replan_actions_total"


@dataclass
class Load:
    """Requests at a steady rate, whatever becomes of them; `shape` may change meanwhile."""

    url: str
    shape: tuple[int, int] = HUMANEVAL
    answers: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as client,
            asyncio.TaskGroup() as all,
        ):
            number = 0
            while not self._over.is_set():
                all.create_task(self._ask(client, number))
                number += 1
                await asyncio.sleep(1 / RATE)

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        length, answer = self.shape
        prompt = [(41 * place + 103 * number) % 4000 + 16 for place in range(length)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 0}
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
            self._over.set()
            thread.join()


def roles(served: Served) -> list[str]:
    return sorted(one["role"] for one in served.status()["workers"] if one["state"] == "up")


def test_a_fleet_grows_and_turns_with_its_traffic_and_no_request_fails(tmp_path: Path) -> None:
    profile, journal = tmp_path / "profile.json", tmp_path / "decisions.jsonl"
    save(Profile(known("embedded"), device("cpu"), {Split(): COST}, source="made up for a test"), profile)
    options = [
        "--replan",
        "--replan-budget",
        "3",
        "--replan-profile",
        str(profile),
        "--replan-journal",
        str(journal),
    ]
    options += ["--replan-window-s", "8", "--replan-interval-s", "0.5"]
    options += ["--slo-ttft-ms", "5000", "--slo-tpot-ms", "500"]
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
    replayed = list(replay(read(journal)))
    assert len(replayed) >= 2 and all(one.same for one in replayed), (
        "what was decided is what is decided again"
    )
