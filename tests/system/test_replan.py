"""A deployment that follows its traffic: a worker is started through Ray, then one changes its role; nothing fails.

And one whose worker is killed while it is to change: that is noted, and the fleet does what it can with the others.

What a step costs is made up, and slow (a profile of the test), so that decisions do not depend on this machine. Traffic
like HumanEval's (short prompts, longer answers) needs two decode workers there, traffic like LongBench's (long prompts,
short answers) two prefill workers, and three devices are all there are.

The first decision is made on a few seconds of traffic, and is not looked at again while the traffic stays the same. If
the machine stands still then, the rate that is seen is too low. So both tests begin with short requests, for which the
first fleet is right at every rate: after a change of traffic the decision is renewed every few seconds.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.errors import ConfigError
from planner.costs.model import find_model
from planner.costs.profile import CostProfile
from planner.costs.profile_file import save_profile
from planner.costs.step import StepCost
from planner.hardware import find_device
from planner.replan.journal import FailedAction, TrafficReview, read_journal
from planner.replan.replanner import replay_decisions
from planner.types import Parallelism
from tests.support.deployment import Served, serve, wait_for
from tests.system.batches.batch_lines import COMPLETION, finished, input_file, results, start

pytestmark = pytest.mark.timeout(600)

RATE = 4.0  # requests per second
SHORT, HUMANEVAL, LONGBENCH = (4, 4), (16, 16), (256, 4)  # tokens of prompt and answer
COST = StepCost(prefill=(0.0, 0.0012, 0.0), decode=((0.02, 0.0, 0.02),))
# Here answers cost next to nothing: those that are held are long, and how many of them end is the machine's affair.
READING = StepCost(prefill=(0.0, 0.001, 0.0), decode=((0.002, 0.0, 0.0002),))
MOST_TOKENS = 1700  # of a long answer
HELD = 10  # long answers at a time: so many that no decode worker is ever without one
ACTIONS = "diptych:replan_actions_total"


@dataclass
class Load:
    """Requests at a steady rate, whatever becomes of them; `shape` may change meanwhile.

    `held` streams beside them are read all the time, until `released`: each has a token after that.
    """

    url: str
    shape: tuple[int, int] = SHORT
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
            number, due_s = 0, time.monotonic()
            while not self._over.is_set():
                all.create_task(self._ask(client, number))
                number += 1
                # It catches up with what is late, but not with a long stop of the machine.
                due_s = max(due_s + 1 / RATE, time.monotonic() - 1.0)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))

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
                        if '"error"' in line and "error" in json.loads(line.removeprefix("data: ")):
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


def steered(tmp_path: Path, cost: StepCost, *more: str) -> tuple[list[str], Path]:
    """Options of a replanner with a profile of that cost, and where its journal is."""
    profile, journal = tmp_path / "profile.json", tmp_path / "decisions.jsonl"
    save_profile(
        CostProfile(
            find_model("embedded"), find_device("cpu"), {Parallelism(): cost}, source="made up for a test"
        ),
        profile,
    )
    options = ["--replan", "--replan-profile", str(profile), "--replan-journal", str(journal), *more]
    options += ["--replan-window-s", "8", "--replan-interval-s", "0.5"]
    return [*options, "--slo-ttft-ms", "5000", "--slo-tpot-ms", "500"], journal


def decisions(journal: Path) -> list[str]:
    """Why each decision in the journal was made, and its reason."""
    try:
        reviews = [line for line in read_journal(journal) if isinstance(line, TrafficReview)]
    except ConfigError:  # a line is being written
        return []
    return [f"{one.decision.trigger}: {one.decision.reason}" for one in reviews if one.decision is not None]


def again(journal: Path) -> int:
    """How many decisions are in the journal; each comes out the same again."""
    replayed = list(replay_decisions(read_journal(journal)))
    assert all(one.same for one in replayed), "what was decided is what is decided again"
    return len(replayed)


@contextmanager
def batch_beside(served: Served) -> Iterator[None]:
    """A batch of more lines than can be done in the block; at its end it is cancelled, and each line has one result."""
    lines = {f"n{number}": Load._body(number % 97, 32, 8) for number in range(5000)}
    with served.client() as client:
        batch = start(client, input_file(lines.items(), COMPLETION), COMPLETION)
        yield
        client.batches.cancel(batch.id)
        done = finished(client, batch.id)
        good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
        assert done.status == "cancelled" and good.keys() | bad.keys() == lines.keys()
        assert good and not good.keys() & bad.keys()
        assert {one["error"]["code"] for one in bad.values()} == {"batch_cancelled"}
        answers = {name: one["response"]["body"]["choices"][0]["text"] for name, one in good.items()}
        for name in list(answers)[::100]:
            answer = httpx.post(f"{served.url}/v1/completions", json=lines[name], timeout=60).json()
            assert answer["choices"][0]["text"] == answers[name]
        wait_for(lambda: not any(one["stats"]["slabs_lent"] for one in served.status()["workers"]))


@pytest.mark.parametrize("bulk", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fleet_grows_and_switches_with_its_traffic_and_no_request_fails(tmp_path: Path, bulk: bool) -> None:
    """Bulk work beside is no traffic, and goes on at other workers when its own switches."""
    options, journal = steered(tmp_path, COST, "--replan-budget", "3")
    options += ["--data-dir", str(tmp_path / "data")] if bulk else []
    with serve("--prefill", "1", "--decode", "1", *options) as served:
        load = Load(served.url)
        with load.flowing(), batch_beside(served) if bulk else nullcontext():
            wait_for(lambda: decisions(journal))
            load.shape = HUMANEVAL
            wait_for(
                lambda: roles(served) == ["decode", "decode", "prefill"], explain=partial(decisions, journal)
            )
            wait_for(lambda: served.metric(ACTIONS, action="start", outcome="done") == 1)
            load.shape = LONGBENCH
            wait_for(
                lambda: roles(served) == ["decode", "prefill", "prefill"], explain=partial(decisions, journal)
            )
            wait_for(lambda: served.metric(ACTIONS, action="flip", outcome="done") >= 1)
        assert load.wrong == [] and len(load.answers) > 40
        assert served.metric("diptych:replan_alarms_total", what="prompt") >= 1
        assert served.metric("diptych:replan_target_workers", role="prefill") == 2
        wait_for(lambda: served.held() == {})
        served.terminal.expect("replan: start of decode-1 is done")
    assert again(journal) >= 2


def test_a_flip_whose_worker_is_killed_fails_and_the_fleet_goes_on(tmp_path: Path) -> None:
    """It is killed while it drains, with long answers on it: these go on elsewhere, and another worker switches."""
    options, journal = steered(tmp_path, READING)
    with serve("--prefill", "1", "--decode", "2", *options) as served:
        load = Load(served.url, held=HELD)
        with load.flowing():
            wait_for(lambda: decisions(journal))
            load.shape = LONGBENCH
            victims: list[str] = []

            def is_switching() -> bool:
                workers = served.status()["workers"]
                victims.extend(one["worker"] for one in workers if one["state"] == "draining")
                switched = {one["worker"] for one in workers if one["role"] == "prefill"} - {"prefill-0"}
                assert victims or not switched, f"{switched} switched before it was seen to drain"
                return bool(victims)

            wait_for(is_switching, pause_s=0.01, explain=partial(decisions, journal))
            victim = victims[0]
            served.worker(victim).kill()
            wait_for(lambda: served.metric(ACTIONS, action="flip", outcome="failed") == 1)
            load.released.set()
            served.terminal.expect(f"replan: flip of {victim} failed: it came back in its old role")
            wait_for(
                lambda: roles(served) == ["decode", "prefill", "prefill"], explain=partial(decisions, journal)
            )
            wait_for(lambda: served.metric(ACTIONS, action="flip", outcome="done") == 1)
            wait_for(
                lambda: len(served.status()["links"]) == 2
            )  # both prefill workers with the one that decodes
        assert load.wrong == [] and len(load.answers) > 40
        (decoder,) = [one for one in served.status()["workers"] if one["role"] == "decode"]
        assert decoder["worker"] == victim, "another one switched: this one is left alone for a window"
        wait_for(lambda: served.held() == {})
    (failed,) = [line for line in read_journal(journal) if isinstance(line, FailedAction)]
    assert failed.worker == victim and "old role" in failed.why
    assert again(journal) >= 2
