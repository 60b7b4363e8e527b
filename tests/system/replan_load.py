"""A steady load beside a replanner, and what it has decided."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from diptych.errors import ConfigError
from planner.costs.model import find_model
from planner.costs.profile import CostProfile
from planner.costs.profile_file import save_profile
from planner.costs.step import StepCost
from planner.hardware import find_device
from planner.replan.journal import TrafficReview, read_journal
from planner.types import Parallelism

RATE = 4.0  # requests per second
SHORT, HUMANEVAL, LONGBENCH = (4, 4), (16, 16), (256, 4)  # tokens of prompt and answer
COST = StepCost(prefill=(0.0, 0.0012, 0.0), decode=((0.02, 0.0, 0.02),))
MOST_TOKENS = 1700  # of a long answer


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
