"""A relay with many workers and streams, without any process: what each of its decisions costs.

All links are there. At every beat prompts are computed for as long as decode workers have room, and each stream gets a
token. As many requests wait as are wanted: for each that ends another one arrives.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import (
    Admit,
    Heartbeat,
    Hello,
    Linked,
    Offer,
    Output,
    Peer,
    Prefill,
    Pulled,
    Step,
    ToGateway,
    WorkerStats,
)
from diptych.request import Request, SamplingParams
from router.effects import ClockTick, FinishRequest, RelayEvent, RequestArrived, SendMessage, WorkerSaid
from router.requests.admission import Admission, AdmissionLimits
from router.requests.relay import Relay
from router.routing.prefix_index import PrefixIndex

ANSWER_TOKENS, BEAT_S = 32, 0.02
# A tick of the clock, and a heartbeat of every worker, after so many beats.
TICK_BEATS = 5
CHUNK_BYTES = 1 << 21
# Prompts begin with one of so many texts; what follows is a quarter of them.
KNOWN_SHARE = 0.75


@dataclass(frozen=True)
class FleetShape:
    """How large a deployment is: workers of each role, streams that decode at once, requests that wait, tokens of a
    prompt, and chunks that are known.
    """

    workers: int
    streams: int
    waiting: int
    prompt_tokens: int
    known_chunks: int


@dataclass
class LargeFleet:
    """The relay of a deployment of this shape, and the workers' side of it."""

    shape: FleetShape
    seed: int = 0
    now_s: float = 0.0
    # Processor seconds of every event since `measure` began, and the requests that have ended since then.
    events_s: list[float] = field(default_factory=list)
    ended: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        self._random, self._numbers = random.Random(self.seed), itertools.count()
        self._chunks = shape.prompt_tokens // CHUNK_TOKENS
        self._prompt = list(range(shape.prompt_tokens))
        self._texts = [
            tuple(self._random.randbytes(8) for _ in range(self._chunks))
            for _ in range(max(1, shape.known_chunks // max(1, self._chunks)))
        ]
        limits = AdmissionLimits(max_requests=1 << 20, max_queued_tokens=1 << 40)
        self.relay = Relay(admission=Admission(limits), index=PrefixIndex())
        self._orders: dict[str, deque[Prefill]] = {}
        self._decoding: dict[str, dict[str, tuple[int, int]]] = {}
        self._said, self._beats = deque[tuple[str, ToGateway]](), 0
        self._join_workers()

    def _join_workers(self) -> None:
        shape = self.shape
        # Room for its share of the streams at a decode worker, and for some prompts at a prefill worker.
        slabs = (self._chunks + 1) * max(1, shape.streams // shape.workers)
        for role in ("prefill", "decode"):
            for number in range(shape.workers):
                name = f"{role}-{number}"
                if role == "prefill":
                    self._orders[name] = deque()
                else:
                    self._decoding[name] = {}
                self._do(WorkerSaid(name, _hello(name, role, slabs)))
        self._settle()
        self._beat_hearts()

    def fill(self) -> None:
        """Let so many requests arrive as are to decode and to wait, and let them begin."""
        for _ in range(self.shape.streams + self.shape.waiting):
            self._arrive()
        while sum(map(len, self._decoding.values())) < self.shape.streams * 0.9:
            self._advance()

    def measure(self, requests: int) -> None:
        """Go on until so many requests have ended."""
        self.events_s, self.ended = [], 0
        gc.collect()
        gc.disable()
        try:
            while self.ended < requests:
                self._advance()
        finally:
            gc.enable()

    @property
    def request_s(self) -> float:
        """Processor seconds of the relay per request, as measured last."""
        return sum(self.events_s) / self.ended

    @property
    def longest_s(self) -> float:
        """The most processor seconds of one event, as measured last, but for one event in a thousand."""
        return sorted(self.events_s)[-1 - len(self.events_s) // 1000]

    def _advance(self) -> None:
        """One beat: prompts are computed until no other one may begin, and every stream gets a token."""
        self.now_s += BEAT_S
        while any(self._orders.values()):
            for name, orders in self._orders.items():
                while orders:
                    self._said += self._computed(name, orders.popleft())
            self._settle()
        for name, streams in self._decoding.items():
            if streams:
                outputs = list(self._next_tokens(streams))
                self._said.append((name, Step(outputs)))
        self._settle()
        self._beats += 1
        if not self._beats % TICK_BEATS:
            self._do(ClockTick())
            self._beat_hearts()

    def _computed(self, worker: str, order: Prefill) -> Iterator[tuple[str, ToGateway]]:
        """What a prefill worker says of a prompt that it has computed."""
        yield worker, Step([Output(order.request, order.epoch, [1])])
        num_bytes = self._chunks * CHUNK_BYTES
        yield worker, Offer(order.request, order.epoch, b"t", len(order.prompt), num_bytes)

    def _next_tokens(self, streams: dict[str, tuple[int, int]]) -> Iterator[Output]:
        for request, (epoch, done) in list(streams.items()):
            # Some stop sooner, or all would end in the same beat.
            stops = "stop" if self._random.random() < 1 / ANSWER_TOKENS else None
            finish = "length" if done + 1 >= ANSWER_TOKENS else stops
            if finish:
                del streams[request]
            else:
                streams[request] = epoch, done + 1
            yield Output(request, epoch, [1], finish=finish)

    def _beat_hearts(self) -> None:
        for name in (*self._orders, *self._decoding):
            beat = WorkerStats(steps=100, step_seconds=2.0, step_tokens=2000)
            self._do(WorkerSaid(name, Heartbeat(name, f"{name}/1", beat)))

    def _settle(self) -> None:
        while self._said:
            worker, message = self._said.popleft()
            self._do(WorkerSaid(worker, message))

    def _arrive(self) -> None:
        text = self._random.choice(self._texts)
        known = int(len(text) * KNOWN_SHARE)
        chunks = (*text[:known], *(self._random.randbytes(8) for _ in range(len(text) - known)))
        request = Request(
            f"r{next(self._numbers)}",
            self._prompt,
            SamplingParams(max_tokens=ANSWER_TOKENS, seed=1, temperature=0.0),
            1e9,
            chunks=chunks,
        )
        self._do(RequestArrived(request))

    def _do(self, event: RelayEvent) -> None:
        begun_s = time.thread_time()
        effects = self.relay.handle_event(event, self.now_s)
        self.events_s.append(time.thread_time() - begun_s)
        for effect in effects:
            if isinstance(effect, SendMessage):
                self._obey(effect.worker, effect.message)
            elif isinstance(effect, FinishRequest):
                self.ended += 1
                self._arrive()

    def _obey(self, worker: str, message: object) -> None:
        if isinstance(message, Peer):
            self._said.append((worker, Linked(message.worker, message.incarnation, "shm", 5.0, 30.0)))
        elif isinstance(message, Prefill):
            self._orders[worker].append(message)
        elif isinstance(message, Admit):
            self._decoding[worker][message.request] = message.epoch, 1
            self._said.append((worker, Pulled(message.request, message.epoch, "shm", 1, {})))


def _hello(name: str, role: str, slabs: int) -> Hello:
    where = "host", 1, slabs, CHUNK_BYTES, 1 << 20
    return Hello(name, role, f"{name}/1", "f", {}, *where, {"shm": b"x"}, "1")
