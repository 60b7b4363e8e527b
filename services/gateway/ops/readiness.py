"""Tests readiness with canaries: requests for a few tokens that go through every worker and the KV hand-off.

A worker counts as proven for a KV class for `PROVEN_FOR_S` after KV of this class last moved through it, for a canary
or a client's request. Workers without such traffic get a canary every `CANARY_INTERVAL_S`, one for each class that they
have. If the last result is older than `MAX_ANSWER_AGE_S`, a request for `/ready` sends one, but only from a client that
may see the status. Others get the last result at once, so they cannot hold connections open.

One canary tests two workers, and each time a worker is paired with another one. So the number of canaries grows with
the workers, not with their pairs. A pair that failed is tried again until it works. A canary has not failed if it waits
too long behind clients' requests whose tokens keep coming. While there is no prefill worker, a decode worker may
prefill prompts itself; it is then tested alone, and the reasons mention it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.failure_statuses import RequestFailure
from diptych.messages import Output
from diptych.request import Pooling, Request, SamplingParams, Tenancy
from router.effects import TelemetryEffect
from router.workers.kv_classes import can_exchange_kv, classes_of
from router.workers.worker_state import WorkerState
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.schemas.response_schema import KvDetails, Readiness

CANARY_INTERVAL_S = 5.0
MAX_ANSWER_AGE_S = 2.0
PROVEN_FOR_S = 12.0
# A canary that takes more seconds than this has failed.
CANARY_TIMEOUT_S = 5.0
# If a worker does not answer a canary, it is busy if it sent tokens to clients within this many seconds, and stuck
# otherwise.
BUSY_S = 2.0
# If a timeout comes this many seconds late, the event loop stood still.
OVERSLEPT_S = 1.0
# Number of tokens of a canary: one from prefill, two from decode.
CANARY_TOKENS = 3

# (prefill worker or None, decode worker). None: the decode worker prefills too.
WorkerPair = tuple[str | None, str]


class CanaryRoute(NamedTuple):
    """What one canary tests: a pair of workers, and the KV class that they use."""

    pair: WorkerPair
    kv_class: str

    @property
    def uses(self) -> list[tuple[str, str]]:
        """Each worker of the pair, with the class."""
        return [(worker, self.kv_class) for worker in self.pair if worker is not None]


@dataclass(frozen=True, slots=True)
class NotReadyReason:
    """A problem of the service: `public` has no names; `text` is for clients that may see the status."""

    public: str
    text: str


def choose_canary_pairs(pairs: Sequence[WorkerPair], stale: Set[str], rotation: int) -> list[WorkerPair]:
    """At most one pair for each `stale` worker, such that each stale worker is in a chosen pair.

    Each `rotation` number pairs workers with other partners.
    """
    by_worker: dict[str, list[WorkerPair]] = {}
    for pair in pairs:
        for worker in filter(None, pair):
            if worker in stale:
                by_worker.setdefault(worker, []).append(pair)
    chosen, covered = list[WorkerPair](), set[str | None]()
    # Workers with the fewest partners choose first. The workers of the larger pool then share the remaining partners.
    for number, worker in enumerate(sorted(by_worker, key=lambda name: (len(by_worker[name]), name))):
        if worker in covered:
            continue
        found = by_worker[worker]
        start = (rotation + number) % len(found)
        rotated = found[start:] + found[:start]
        pair = next((pair for pair in rotated if not covered.intersection(pair)), rotated[0])
        chosen.append(pair)
        covered.update(pair)
    return chosen


@dataclass(slots=True)
class _CanarySink:
    """Receives one canary; `outcome` is None if it succeeded, else the problem."""

    outcome: asyncio.Future[str | None]
    wanted: int = CANARY_TOKENS
    tokens: list[int] = field(default_factory=list)

    def deliver_output(self, output: Output, now_s: float) -> None:
        self.tokens += output.tokens

    def record_effect(self, effect: TelemetryEffect, now_s: float) -> None:
        """Nothing to do: canaries are not measured."""

    def record_kv_class(self, kv_class: str, reason: str, details: KvDetails | None) -> None:
        """Canaries have no answer that names the class."""

    def finish_sequence(self, reason: str, now_s: float) -> None:
        whole = len(self.tokens) == self.wanted
        self._set_outcome(None if whole else f"gave {len(self.tokens)} tokens of {self.wanted}")

    def fail_sequence(self, failure: RequestFailure) -> None:
        self._set_outcome(failure.message)

    def _set_outcome(self, outcome: str | None) -> None:
        """Set the outcome, unless the canary has one already."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class CanaryProber:
    """Tests the workers with canaries, and derives the gateway's readiness.

    `prompt` holds a canary's token ids. `expected` is the number of (prefill, decode) workers that should be up.
    Workers that do bulk work only get no canaries (`only_batches`): a step of theirs may take minutes.
    """

    def __init__(
        self,
        backend: RelayBackend,
        metrics: GatewayMetrics,
        prompt: list[int],
        expected: tuple[int, int],
        only_batches: bool = False,
    ) -> None:
        self._only_batches = only_batches
        self.backend, self._metrics, self._prompt, self._expected = backend, metrics, prompt, expected
        # The role in which each worker first connected, as long as it is there or may come back.
        self._homes: dict[str, str] = {}
        self._numbers = itertools.count()
        self._name = secrets.token_hex(4)
        # Why the last canary of each route failed.
        self._troubles: dict[CanaryRoute, str] = {}
        self._rotation = itertools.count()
        # The task of the canaries that are under way.
        self._round: asyncio.Task[None] | None = None
        self._tried_s = float("-inf")

    def expect_workers(self, pools: tuple[int, int]) -> None:
        """Set how many prefill and decode workers should be up from now on."""
        self._expected = pools

    async def run_forever(self) -> None:
        """Test all workers that were not proven lately, again and again, until cancelled."""
        while True:
            await self.probe_workers(CANARY_INTERVAL_S)
            self._metrics.ready.set(self.current_readiness().ready)
            await asyncio.sleep(MAX_ANSWER_AGE_S / 2)

    async def fresh_readiness(self, known: bool = True) -> Readiness:
        """The readiness; for a `known` client at most `MAX_ANSWER_AGE_S` old, which may need to wait for canaries."""
        if known and self.backend.worker_pairs():
            await self.probe_workers(MAX_ANSWER_AGE_S)
        return self.current_readiness(known)

    async def probe_workers(self, max_age_s: float) -> None:
        """Send canaries to all workers that were not proven within `max_age_s`. Concurrent callers share one round."""
        if self._round is None or self._round.done():
            chosen = self._choose_routes(self._find_routes(self.backend.worker_pairs()), max_age_s)
            if not chosen:
                return
            self._round = asyncio.create_task(self._try_routes(chosen))
        await asyncio.shield(self._round)

    def _find_routes(self, pairs: list[WorkerPair]) -> list[CanaryRoute]:
        """The routes of these pairs: each with each of its classes, the default one first. None without canaries."""
        if self._only_batches:
            return []
        return [CanaryRoute(pair, name) for pair in pairs for name in self.backend.classes_of_pair(pair)]

    def _choose_routes(self, routes: list[CanaryRoute], max_age_s: float) -> list[CanaryRoute]:
        """The routes to test now: those that failed, and for every class one for each worker not proven lately."""
        now_s, chosen = self.backend.clock(), list[CanaryRoute]()
        stale_by_class: dict[str, set[str]] = {}
        by_class = _group_by_class(routes)
        for kv_class, mine in by_class.items():
            workers = {worker for pair in mine for worker in pair if worker is not None}
            failed = [pair for pair in mine if (pair, kv_class) in self._troubles][: len(workers)]
            chosen += [CanaryRoute(pair, kv_class) for pair in failed]
            tried = {worker for pair in failed for worker in pair}
            if stale := {one for one in workers - tried if self._age_s((one, kv_class), now_s) > max_age_s}:
                stale_by_class[kv_class] = stale
        # One number for all classes, so that each of them meets all partners.
        rotation = next(self._rotation) if stale_by_class else 0
        for kv_class, stale in stale_by_class.items():
            pairs = choose_canary_pairs(by_class[kv_class], stale, rotation)
            chosen += [CanaryRoute(pair, kv_class) for pair in pairs]
        return chosen

    def class_states(self) -> dict[CanaryRoute, bool]:
        """Whether each pair of workers is ready for each of its KV classes: a class is ready when it is proven."""
        now_s = self.backend.clock()
        return {
            route: self._is_ready(route, now_s) for route in self._find_routes(self.backend.worker_pairs())
        }

    def _is_ready(self, route: CanaryRoute, now_s: float) -> bool:
        return route not in self._troubles and all(self._is_proven(use, now_s) for use in route.uses)

    def current_readiness(self, known: bool = True) -> Readiness:
        """The readiness known now, without sending canaries: some pair is ready for its default class.

        Unless the client is `known`, the reasons hold no names of workers, hosts or models.
        """
        now_s, pairs = self.backend.clock(), self.backend.worker_pairs()
        routes = self._find_routes(pairs)
        # Requests that ask for no class get the first one of their pair.
        defaults = {route.pair: route for route in reversed(routes)}
        good = any(self._is_ready(route, now_s) for route in defaults.values())
        if self._only_batches:
            good = bool(pairs)
        reasons = self._missing_reasons(bool(pairs)) + self._local_prefill_reasons(pairs)
        reasons += self._class_reasons()
        reasons += [
            NotReadyReason("a canary did not come through", f"{name}: {text}")
            for name, text in self._name_troubles(routes)
        ]
        reasons += [
            NotReadyReason("a worker was not tried yet", f"{name}: not tried yet")
            for name in self._name_untried(routes, now_s)
        ]
        if not pairs and not reasons:
            text = "no prefill worker is linked to a decode worker yet"
            reasons.append(NotReadyReason(text, text))
        reasons += [
            NotReadyReason("a worker does not fit", f"{worker} does not fit: {text}")
            for worker, text in sorted(self.backend.unfit_workers.items())
        ]
        shown_reasons = [reason.text for reason in reasons] if known else _public_reasons(reasons)
        return Readiness(ready=good, reasons=shown_reasons)

    def _name_troubles(self, routes: list[CanaryRoute]) -> list[tuple[str, str]]:
        """The routes that failed, with the class where there are several, and why."""
        several = len(_group_by_class(routes)) > 1
        return [
            (_format_pair(one.pair, one.kv_class if several else ""), self._troubles[one])
            for one in routes
            if one in self._troubles
        ]

    def _name_untried(self, routes: list[CanaryRoute], now_s: float) -> list[str]:
        """The workers that no canary has tested, with the class where there are several."""
        several = len(_group_by_class(routes)) > 1
        troubled = {use for route in self._troubles for use in route.uses}
        uses = {use for route in routes for use in route.uses} - troubled
        untried = sorted(use for use in uses if not self._is_proven(use, now_s))
        return [_format_pair((None, worker), name if several else "") for worker, name in untried]

    def _waits_behind_clients(self, pair: WorkerPair, canary: _CanarySink) -> bool:
        """Whether an unfinished canary is only delayed: a worker that it waits for sends tokens to clients."""
        asked = pair[1:] if canary.tokens else pair
        times_s = (
            self.backend.last_message_s.get(worker, float("-inf")) for worker in asked if worker is not None
        )
        return self.backend.clock() - max(times_s) < BUSY_S

    def wanted_workers(self) -> dict[str, int]:
        """Number of workers of each role that should be up: the expected ones, corrected by changes of role."""
        wanted = dict(zip(("prefill", "decode"), self._expected, strict=True))
        fleet = self.backend.relay.fleet
        self._homes = {name: home for name, home in self._homes.items() if fleet.remembers_worker(name)}
        for name, member in fleet.workers.items():
            home = self._homes.setdefault(name, member.role)
            wanted[member.role] += 1
            wanted[home] -= 1
        return wanted

    def _local_prefill_reasons(self, pairs: list[WorkerPair]) -> list[NotReadyReason]:
        """A reason if decode workers have to prefill, because no prefill worker can."""
        relay = self.backend.relay
        local = relay.split and not relay.pairs.only_pools and any(source is None for source, _ in pairs)
        text = "decode workers prefill the prompts: no prefill worker can"
        return [NotReadyReason(text, text)] if local else []

    def _class_reasons(self) -> list[NotReadyReason]:
        """A reason if no prefill worker has a KV class in common with a decode worker of the same model."""
        fleet = self.backend.relay.fleet
        pairs = [
            (source, member)
            for source in fleet.workers_of("prefill")
            for member in fleet.workers_of("decode")
            if source.hello.fingerprint == member.hello.fingerprint
        ]
        if not pairs or any(can_exchange_kv(source.hello, member.hello) for source, member in pairs):
            return []
        public = "no prefill worker has a KV class in common with a decode worker"
        sides = (f"{one.name} has {' and '.join(classes_of(one.hello))}" for one in pairs[0])
        return [NotReadyReason(public, f"{public}: {', '.join(sides)}")]

    def _missing_reasons(self, linked: bool) -> list[NotReadyReason]:
        """Reasons for missing workers, draining workers and missing links.

        Pairs that are not linked yet are listed only if some other pair is `linked`.
        """
        fleet = self.backend.relay.fleet
        reasons = []
        for role, wanted in self.wanted_workers().items():
            there = len(fleet.workers_of(role))
            if there < wanted:
                text = f"{there} of {wanted} {role} workers are up"
                reasons.append(NotReadyReason(text, text))
        reasons += [
            NotReadyReason("a worker is draining", f"{member.name} is draining")
            for member in fleet.workers.values()
            if member.draining
        ]
        sources = fleet.workers_of("prefill")
        for member in fleet.workers_of("decode"):
            names = [(source, text) for source, text in sorted(member.link_errors.items())]
            names += [
                (source, "not linked yet") for source in _unlinked_prefill_workers(sources, member) if linked
            ]
            reasons += [
                NotReadyReason("two workers are not linked", f"{_format_pair((source, member.name))}: {text}")
                for source, text in names
            ]
        return reasons

    def _age_s(self, use: tuple[str, str], now_s: float) -> float:
        """Seconds since KV of the class last moved through the worker: `use` is (worker, KV class)."""
        return now_s - self.backend.proven_s.get(use, float("-inf"))

    def _is_proven(self, use: tuple[str, str], now_s: float) -> bool:
        """Whether KV of the class moved through the worker lately."""
        return self._age_s(use, now_s) < PROVEN_FOR_S

    async def _try_routes(self, routes: list[CanaryRoute]) -> None:
        """Send a canary through each route, and record which of them work."""
        outcomes = await asyncio.gather(*(self._try_route(route) for route in routes))
        known = set(self._find_routes(self.backend.worker_pairs()))
        self._troubles = {
            route: text for route, text in self._troubles.items() if route in known and route not in routes
        }
        for route, outcome in zip(routes, outcomes, strict=True):
            if outcome is not None:
                self._troubles[route] = outcome
            elif route in known:
                self.backend.mark_proven(route.pair, route.kv_class)

    async def _try_route(self, route: CanaryRoute) -> str | None:
        """Send one canary. Returns None if it succeeded or proves nothing, else the problem."""
        pair = route.pair
        wanted = 0 if self.backend.relay.pairs.only_pools else CANARY_TOKENS
        canary = _CanarySink(asyncio.get_running_loop().create_future(), wanted)
        name = f"canary-{self._name}-{next(self._numbers)}"
        now_s = self.backend.clock()
        sampling = (
            SamplingParams(0, 0, temperature=0.0, pooling=Pooling("last"))
            if self.backend.relay.pairs.only_pools
            else SamplingParams(max_tokens=CANARY_TOKENS, seed=0, temperature=0.0)
        )
        deadline_s = now_s + 2 * CANARY_TIMEOUT_S
        request = Request(
            name,
            list(self._prompt),
            sampling,
            deadline_s,
            tenancy=Tenancy(canary=True),
            kv_class=route.kv_class,
        )
        self.backend.submit_canary(request, canary, pair)
        try:
            async with asyncio.timeout(CANARY_TIMEOUT_S):
                return await canary.outcome
        except TimeoutError:
            # A timeout that comes much too late means that this event loop was blocked; the workers may be fine.
            overslept = self.backend.clock() - now_s > CANARY_TIMEOUT_S + OVERSLEPT_S
            return (
                None
                if overslept or self._waits_behind_clients(pair, canary)
                else f"a canary took longer than {CANARY_TIMEOUT_S:g} s"
            )
        finally:
            self.backend.cancel_request(name)


def _unlinked_prefill_workers(sources: Sequence[WorkerState], decode: WorkerState) -> list[str]:
    """Prefill workers that fit this decode worker, but have neither a link to it nor an error about a link."""
    known = decode.links.keys() | decode.link_errors.keys()
    return [
        source.name
        for source in sources
        if source.name not in known
        and can_exchange_kv(source.hello, decode.hello)
        and not (source.draining or decode.draining)
    ]


def _public_reasons(reasons: Sequence[NotReadyReason]) -> list[str]:
    """The reasons without names, each once."""
    return list(dict.fromkeys(reason.public for reason in reasons))


def _group_by_class(routes: Iterable[CanaryRoute]) -> dict[str, list[WorkerPair]]:
    """The pairs of each KV class."""
    pairs: dict[str, list[WorkerPair]] = {}
    for pair, kv_class in routes:
        pairs.setdefault(kv_class, []).append(pair)
    return pairs


def _format_pair(pair: WorkerPair, kv_class: str = "") -> str:
    """The workers, and the KV class if one is given: "prefill-0 -> decode-0 (tq4.s0)"."""
    workers = pair[1] if pair[0] is None else f"{pair[0]} -> {pair[1]}"
    return f"{workers} ({kv_class})" if kv_class else workers
