"""A worker in virtual time: it takes what the gateway said, steps, and tells, as `worker.shell.Shell` does.

An instance of several pipeline stages runs as many batches at once, each with a scheduler and a share of the memory
of its own; a sequence stays in the one with the least to do when it came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from diptych.messages import (
    Abort,
    Admit,
    Failed,
    Fetch,
    Generate,
    Offer,
    Prefill,
    Release,
    Staged,
    Staging,
    Stats,
)
from engine.scheduler import Refused
from kvcache.layout import CHUNK_TOKENS
from planner.sim_agenda import TURN, Agenda
from planner.sim_engine import Engine, Run, Task, Told, word
from planner.sim_fetch import Arrival, Fetcher, Hint
from planner.sim_wires import Wires

Order = Prefill | Generate | Admit


@dataclass(frozen=True, slots=True)
class Given:
    """An order, and how a task is made of it when it has come; its request may have ended by then."""

    order: Order
    task: Callable[[], Task]


class Worker:
    """One instance. `send` tells its gateway something."""

    def __init__(
        self,
        name: str,
        role: str,
        engines: list[Engine],
        agenda: Agenda,
        wires: Wires,
        chunk_bytes: int,
        send: Callable[[str, Any, float], None],
    ) -> None:
        self.name, self.role, self.engines, self.agenda = name, role, engines, agenda
        self.chunk_bytes = chunk_bytes
        self._send = send
        tell = partial(self._say, at_s=None)
        self.fetchers = [
            Fetcher(name, engine, wires, chunk_bytes, tell, self._land)
            for engine in engines
            if role == "decode"
        ]
        self.leases: dict[str, Engine] = {}
        self._inbox: list[Any] = []
        self._landed: list[Arrival] = []
        self._later: list[list[tuple[str, int]]] = [[] for _ in engines]  # aborts of what runs
        self._due = False
        self._versions = [0] * len(engines)

    # ---- what comes

    def receive(self, message: Any) -> None:
        """The gateway has said something."""
        self._inbox.append(message)
        self._stir()

    def _land(self, arrival: Arrival) -> None:
        self._landed.append(arrival)
        self._stir()

    def _stir(self) -> None:
        """Have it looked at: at once by one who is idle, else when the step that runs has ended."""
        if self._due:
            return
        if any(engine.run is None for engine in self.engines):
            self._due = True
            self.agenda.at(self.agenda.now_s, self._turn, order=TURN)
            return
        for place, engine in enumerate(self.engines):
            if (end_s := engine.cut(self.agenda.now_s)) is not None:
                self._await(place, end_s)

    def _await(self, place: int, at_s: float) -> None:
        self._versions[place] += 1
        self.agenda.at(at_s, self._end, place, self._versions[place], order=TURN)

    # ---- turns

    def _turn(self) -> None:
        self._due = False
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            self._take(message)
        self._tend()
        for place, engine in enumerate(self.engines):
            if engine.run is None:
                self._begin(place, engine)

    def _begin(self, place: int, engine: Engine) -> None:
        now_s = self.agenda.now_s
        for key in engine.scheduler.expired(now_s):
            seq = engine.drop(key)
            self._say(Failed(seq.id, seq.epoch, "deadline_exceeded", "the request's time was up"))
        if not engine.ready:
            return
        waited_for = len(self.engines) > 1 or any(fetcher.waiting for fetcher in self.fetchers)
        run = engine.begin(now_s, waited_for, any(fetcher.ahead for fetcher in self.fetchers))
        if run is not None:
            self._announce(engine, run)
            self._foretell(run, 0)
            self._await(place, run.ends[-1])

    def _announce(self, engine: Engine, run: Run) -> None:
        """Whoever is to have what is read now may fetch it meanwhile."""
        for task, there, coming in engine.announce(run):
            hint = Hint(self.name, task.announced - there - coming, there, coming, run.ends[0])
            self._say(Staged(task.id, task.epoch, msgspec.msgpack.encode(hint)))

    def _end(self, place: int, version: int) -> None:
        """A step has ended, or as many as were reckoned."""
        if version != self._versions[place]:
            return
        engine = self.engines[place]
        run = engine.run
        assert run is not None, "nothing runs"
        if not run.over:
            first, _ = engine.reckon()
            self._foretell(run, first)
            self._await(place, run.ends[-1])
            return
        self._tell(engine, engine.finish(self.agenda.now_s))
        later, self._later[place] = self._later[place], []
        for request, epoch in later:
            self._drop(engine, request, epoch)
        self._tend()  # what has ended made room for what waits
        self._turn()

    def _foretell(self, run: Run, first: int) -> None:
        """What the relay hears while the run goes on: first words, and chunks for which no room is booked."""
        if run.most == 1:
            return
        begun: dict[int, list[tuple[Task, int]]] = {}
        end = len(run.ends)
        for task in run.rows:
            known = len(task.output)
            total = task.size + known
            silent = task.silent and not first
            if silent:
                begun.setdefault(0, []).append((task, known + 1))
            if total + end <= task.quiet:
                continue
            for step in range(first + (-total - first) % CHUNK_TOKENS, end, CHUNK_TOKENS):
                if total + step + 1 > task.quiet and not (silent and not step):
                    begun.setdefault(step, []).append((task, known + step + 1))
        for step, rows in begun.items():
            end_s = run.ends[step]
            told = [Told(task, count) if step else word(task, count, end_s) for task, count in rows]
            self._say(partial(_valid, run, step, told), end_s)

    # ---- the gateway's words

    def _take(self, message: Any) -> None:
        match message:
            case Given(order, task):
                self._order(order, task())
            case Staging(request, epoch, hint):
                for fetcher in self.fetchers:
                    fetcher.hint(f"{request}#{epoch}", hint)
            case Fetch():
                for fetcher in self.fetchers:
                    fetcher.fetch(message, self.agenda.now_s)
            case Release(request, epoch):
                self._release(f"{request}#{epoch}")
            case Abort(request, epoch):
                self._abort(request, epoch)

    def _order(self, order: Order, task: Task) -> None:
        place = min(range(len(self.engines)), key=lambda place: (self._load(place), place))
        try:
            if isinstance(order, Admit):
                self.fetchers[place].admit(order, task, self.agenda.now_s)
            else:
                self.engines[place].scheduler.add(task, self.agenda.now_s)
        except Refused as refusal:
            self._say(Failed(task.id, task.epoch, refusal.code, refusal.what))

    def _load(self, place: int) -> int:
        fetcher = self.fetchers[place] if self.fetchers else None
        coming = len(fetcher.waiting) + len(fetcher.moving) if fetcher else 0
        return coming + len(self.engines[place].scheduler)

    def _release(self, key: str) -> None:
        if (engine := self.leases.pop(key, None)) is not None:
            engine.holdings.end(key)

    def _abort(self, request: str, epoch: int) -> None:
        for place, engine in enumerate(self.engines):
            if engine.run is not None:
                self._later[place].append((request, epoch))  # another batch of the pipeline is under way
            else:
                self._drop(engine, request, epoch)
        for fetcher in self.fetchers:
            fetcher.abort(request, epoch, self.agenda.now_s)

    def _drop(self, engine: Engine, request: str, epoch: int) -> None:
        known = [seq for seq in engine.scheduler.sequences() if seq.id == request and seq.epoch <= epoch]
        for seq in known:
            engine.drop(seq.key)
        for number in range(epoch + 1):
            self._release(f"{request}#{number}")

    def _tend(self) -> None:
        """Adopt what has landed, begin to fetch what there is room for."""
        landed, self._landed = self._landed, []
        for fetcher in self.fetchers:
            for arrival in landed:
                if fetcher.moving.get(arrival.task.key) is arrival:
                    fetcher.finish(arrival, self.agenda.now_s)
            fetcher.depart(self.agenda.now_s)

    # ---- what it says

    def _tell(self, engine: Engine, told: list[Told]) -> None:
        if told:
            self._say(told)
        for one in told:
            if one.held:
                task = one.task
                self.leases[task.key] = engine
                num_bytes = len(task.slabs) * self.chunk_bytes
                self._say(Offer(task.id, task.epoch, self.name.encode(), task.computed, num_bytes))

    def _say(self, what: Any, at_s: float | None = None) -> None:
        self._send(self.name, what, self.agenda.now_s if at_s is None else at_s)

    @property
    def stats(self) -> Stats:
        """What a beat says."""
        done = [engine.done(self.agenda.now_s) for engine in self.engines]
        return Stats(
            slabs_total=sum(engine.limits.num_slabs for engine in self.engines),
            slabs_used=sum(engine.holdings.used for engine in self.engines),
            running=sum(len(engine.scheduler.running) for engine in self.engines),
            steps=sum(steps for steps, _, _ in done),
            step_seconds=sum(seconds for _, seconds, _ in done),
            step_tokens=sum(tokens for _, _, tokens in done),
        )


def _valid(run: Run, step: int, told: list[Told]) -> list[Told]:
    """What was foretold of a step, if that came to be within the run; what the last step gives is told when it ends."""
    return told if step < run.most - 1 else []
