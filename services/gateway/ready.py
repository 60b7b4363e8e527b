"""Readiness that was tried, not assumed: a few tokens through every pair of workers, hand-off included.

A way (prefill, decode) is good for `GOOD_S` after KV last went along it, by a canary or by a client's request. While
nothing goes, a canary is sent every `EVERY_S`; who asks for `/ready` has one sent if the last is older than `FRESH_S`.
A canary that has to wait too long behind clients' requests, while their tokens keep coming, has not failed. While no
prefill worker is left, a decode worker that may read prompts itself is a way, too; the reasons tell of it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import dataclass, field

from diptych.errors import RequestError
from diptych.messages import Output
from diptych.metrics import Metrics
from diptych.request import Request, Sampling
from router.fleet import Member
from services.gateway.backend import RelayBackend
from services.gateway.replies import Readiness

EVERY_S = 5.0
FRESH_S = 2.0
GOOD_S = 12.0
CANARY_S = 5.0  # a canary that takes longer has failed
BUSY_S = 2.0  # without a token for a client, a worker that does not answer is stuck
CANARY_TOKENS = 3  # one from prefill, two from decode

Way = tuple[str | None, str]


@dataclass(slots=True)
class _Canary:
    """Reader of one canary; `outcome` is None when it came through."""

    outcome: asyncio.Future[str | None]
    tokens: list[int] = field(default_factory=list)

    def deliver(self, output: Output, now_s: float) -> None:
        self.tokens += output.tokens

    def measure(self, seconds: dict[str, float]) -> None:
        """Canaries are not measured."""

    def finish(self, reason: str, now_s: float) -> None:
        whole = len(self.tokens) == CANARY_TOKENS
        self._settle(None if whole else f"gave {len(self.tokens)} tokens of {CANARY_TOKENS}")

    def fail(self, error: RequestError) -> None:
        self._settle(error.what)

    def _settle(self, outcome: str | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class Prober:
    """Keeps trying all ways. `expected` are the numbers of prefill and decode workers that were asked for."""

    def __init__(
        self, backend: RelayBackend, metrics: Metrics, prompt: list[int], expected: tuple[int, int]
    ) -> None:
        self.backend, self._metrics, self._prompt, self._expected = backend, metrics, prompt, expected
        self._homes: dict[str, str] = {}  # worker -> the role it first came with
        self._numbers = itertools.count()
        self._name = secrets.token_hex(4)
        self._troubles: dict[Way, str] = {}
        self._round: asyncio.Task[None] | None = None
        self._tried_s = float("-inf")

    def expect(self, pools: tuple[int, int]) -> None:
        """Other numbers of prefill and decode workers are started now."""
        self._expected = pools

    async def run(self) -> None:
        """Try whatever has not proven itself lately, until cancelled."""
        while True:
            await self.probe(EVERY_S)
            self._metrics.ready.set(self.state().ready)
            await asyncio.sleep(FRESH_S / 2)

    async def fresh(self) -> Readiness:
        """Readiness no older than `FRESH_S`; waits for a canary if it must."""
        if self.backend.ways():
            await self.probe(FRESH_S)
        return self.state()

    async def probe(self, max_age_s: float) -> None:
        """See that every way was proven within `max_age_s`, or has a trouble to tell. Callers share one round."""
        if self._round is None or self._round.done():
            now_s = self.backend.clock()
            stale = [way for way in self.backend.ways() if self._age_s(way, now_s) > max_age_s]
            if not stale:
                return
            self._round = asyncio.create_task(self._try_all(stale))
        await asyncio.shield(self._round)

    def state(self) -> Readiness:
        """What is known now, without trying anything."""
        now_s = self.backend.clock()
        ways = self.backend.ways()
        good = [way for way in ways if way not in self._troubles and self._age_s(way, now_s) < GOOD_S]
        reasons = self._missing() + self._detours(ways)
        reasons += [f"{_told(way)}: {self._troubles[way]}" for way in ways if way in self._troubles]
        reasons += [
            f"{_told(way)}: not tried yet" for way in ways if way not in good and way not in self._troubles
        ]
        if not ways and not reasons:
            reasons.append("no prefill worker is linked to a decode worker yet")
        reasons += [f"{worker} does not fit: {text}" for worker, text in sorted(self.backend.unfit.items())]
        return Readiness(ready=bool(good), reasons=reasons)

    def _busy(self, way: Way, canary: _Canary) -> bool:
        """Whether a canary that did not come through waits behind clients: only for who has not answered it yet."""
        asked = way[1:] if canary.tokens else way
        heard_s = (self.backend.heard_s.get(worker, float("-inf")) for worker in asked if worker is not None)
        return self.backend.clock() - max(heard_s) < BUSY_S

    def _wanted(self) -> dict[str, int]:
        """How many workers of each role there should be: what was asked for, and whoever has changed pools since."""
        wanted = dict(zip(("prefill", "decode"), self._expected, strict=True))
        for name, member in self.backend.relay.fleet.members.items():
            home = self._homes.setdefault(name, member.role)
            wanted[member.role] += 1
            wanted[home] -= 1
        return wanted

    def _detours(self, ways: list[Way]) -> list[str]:
        local = self.backend.relay.split and any(source is None for source, _ in ways)
        return ["prompts are read by decode workers: no prefill worker can"] if local else []

    def _missing(self) -> list[str]:
        fleet = self.backend.relay.fleet
        told = []
        for role, wanted in self._wanted().items():
            there = len(fleet.role(role))
            if there < wanted:
                told.append(f"{there} of {wanted} {role} workers are up")
        told += [f"{member.name} is draining" for member in fleet.members.values() if member.draining]
        for member in fleet.role("decode"):
            told += [f"{source} -> {member.name}: {text}" for source, text in sorted(member.troubles.items())]
            told += [f"{_told((source, member.name))}: not linked yet" for source in self._unlinked(member)]
        return told

    def _unlinked(self, decode: Member) -> list[str]:
        """Prefill workers whose KV it could read, neither linked to it nor known to be in trouble with it.

        None while nobody is linked to anybody, which is told in one line.
        """
        known = decode.ties.keys() | decode.troubles.keys()
        return [
            source.name
            for source in self.backend.relay.fleet.role("prefill")
            if self.backend.ways()
            and source.name not in known
            and source.hello.fingerprint == decode.hello.fingerprint
            and not (source.draining or decode.draining)
        ]

    def _age_s(self, way: Way, now_s: float) -> float:
        return now_s - self.backend.proven_s.get(way, float("-inf"))

    async def _try_all(self, ways: list[Way]) -> None:
        outcomes = await asyncio.gather(*(self._try(way) for way in ways))
        known = set(self.backend.ways())
        self._troubles = {
            way: text for way, text in self._troubles.items() if way in known and way not in ways
        }
        for way, outcome in zip(ways, outcomes, strict=True):
            if outcome is not None:
                self._troubles[way] = outcome
            elif way in known:
                self.backend.proven_s[way] = self.backend.clock()

    async def _try(self, way: Way) -> str | None:
        """One canary; None when it came through, else why not."""
        canary = _Canary(asyncio.get_running_loop().create_future())
        name = f"canary-{self._name}-{next(self._numbers)}"
        now_s = self.backend.clock()
        sampling = Sampling(max_tokens=CANARY_TOKENS, seed=0, temperature=0.0)
        request = Request(name, list(self._prompt), sampling, now_s + 2 * CANARY_S)
        self.backend.probe(request, canary, way)
        try:
            async with asyncio.timeout(CANARY_S):
                return await canary.outcome
        except TimeoutError:
            return None if self._busy(way, canary) else f"a canary took longer than {CANARY_S:g} s"
        finally:
            self.backend.leave(name)


def _told(way: Way) -> str:
    return way[1] if way[0] is None else f"{way[0]} -> {way[1]}"
