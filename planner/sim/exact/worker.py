"""A worker in virtual time: it receives messages of the gateway, runs steps and reports, like `worker.loop.WorkerLoop`.

An instance with several pipeline stages runs one batch per stage at the same time. Each batch has its own scheduler and
its own share of the memory. A sequence joins the batch with the least work at its arrival, and stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import msgspec

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import decision_tokens
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
    WorkerStats,
)
from engine.sequence import SequenceRefused
from engine.sequence_table import DEADLINE_FAILURE
from planner.sim.exact.bulk import SimBulkEngine
from planner.sim.exact.engine import SimEngine, SimOutput, SimSequence, StepRun, make_output
from planner.sim.exact.event_queue import ORDER_STEP, EventQueue
from planner.sim.exact.handoff import SimArrival, SimFetcher, SimHint, offer_ticket
from planner.sim.exact.links import SimLinks

OrderMessage = Prefill | Generate | Admit


@dataclass(frozen=True, slots=True)
class SimOrder:
    """An order of the gateway, and the function that makes its sequence on arrival, unless the request has ended."""

    order: OrderMessage
    seq: Callable[[], SimSequence]


class SimWorker:
    """One instance. `send` sends a message to its gateway, `chunk_bytes` are by the name of the KV class's arena.

    `bulk` does bulk work in the time that its only engine leaves.
    """

    def __init__(
        self,
        name: str,
        role: str,
        engines: list[SimEngine],
        events: EventQueue,
        links: SimLinks,
        chunk_bytes: Mapping[str, int],
        send: Callable[[str, Any, float], None],
        bulk: SimBulkEngine | None = None,
    ) -> None:
        self.name, self.role, self.engines, self.events = name, role, engines, events
        self.bulk, self._in_unit = bulk, False
        self.chunk_bytes = chunk_bytes
        self._send = send
        send = partial(self._send_message, at_s=None)
        self.fetchers = [
            SimFetcher(name, engine, links, chunk_bytes, send, self._on_landed)
            for engine in engines
            if role == "decode"
        ]
        self.leases: dict[str, SimEngine] = {}
        self._inbox: list[Any] = []
        self._landed: list[SimArrival] = []
        # Aborts of sequences in the running step of each engine. They are carried out when the step has ended.
        self._later: list[list[tuple[str, int]]] = [[] for _ in engines]
        self._due = False
        # When prefixes that are read back have to be looked at again, as far as that is scheduled.
        self._tend_s = inf
        for engine in engines:
            engine.restores.notify(self._schedule_round)
        self._versions = [0] * len(engines)

    # ---- rounds of messages

    def receive(self, message: Any) -> None:
        """Queues a message of the gateway, and schedules its handling."""
        self._inbox.append(message)
        self._schedule_round()

    def _on_landed(self, arrival: SimArrival) -> None:
        self._landed.append(arrival)
        self._schedule_round()

    def _schedule_round(self) -> None:
        """Schedules a look at new messages: at once if an engine is idle, else when the current step has ended."""
        if self._due or self._in_unit:
            # Messages are looked at when the unit of bulk work has ended.
            return
        if any(engine.run is None for engine in self.engines):
            self._due = True
            self.events.at(self.events.now_s, self._run_round, order=ORDER_STEP)
            return
        for place, engine in enumerate(self.engines):
            if (end_s := engine.cut(self.events.now_s)) is not None:
                self._await_run_end(place, end_s)

    def _await_run_end(self, place: int, at_s: float) -> None:
        self._versions[place] += 1
        self.events.at(at_s, self._end_run, place, self._versions[place], order=ORDER_STEP)

    # ---- rounds

    def _run_round(self) -> None:
        self._due = False
        if self._in_unit:
            return
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            self._handle_message(message)
        recalled = self._start_transfers()
        for place, engine in enumerate(self.engines):
            if engine.run is None:
                self._begin_step(place, engine)
        if recalled and all(engine.run is None for engine in self.engines):
            # No step is running whose end would let waiting requests see the slabs that were given back.
            self._schedule_round()
        if all(engine.run is None for engine in self.engines):
            self._begin_unit()

    def _begin_step(self, place: int, engine: SimEngine) -> None:
        now_s = self.events.now_s
        for key in engine.scheduler.expired_keys(now_s):
            seq = engine.table.drop(key)
            self._send_message(Failed(seq.id, seq.epoch, *DEADLINE_FAILURE))
        if not engine.ready:
            return
        waited_for = len(self.engines) > 1 or any(fetcher.admission.waiting for fetcher in self.fetchers)
        if self.bulk is not None and self.bulk.runs_beside_answers:
            waited_for = True
        ahead = any(fetcher.admission.has_ticketless for fetcher in self.fetchers)
        run = engine.begin_step(now_s, waited_for, ahead)
        if run is not None:
            self._announce_prefills(engine, run)
            self._emit_early(run, 0)
            self._await_run_end(place, run.ends[-1])

    def _announce_prefills(self, engine: SimEngine, run: StepRun) -> None:
        """Announces KV that is being computed, so that decode workers can fetch it early."""
        for seq, there, coming in engine.announce(run):
            hint = SimHint(self.name, seq.announced - there - coming, there, coming, run.ends[0])
            self._send_message(Staged(seq.id, seq.epoch, msgspec.msgpack.encode(hint)))

    def _end_run(self, place: int, version: int) -> None:
        """A run of steps has ended, as far as its steps have been computed."""
        if version != self._versions[place]:
            return
        engine = self.engines[place]
        run = engine.run
        assert run is not None, "nothing runs"
        if not run.over:
            first, _ = engine.extend_run()
            self._emit_early(run, first)
            self._await_run_end(place, run.ends[-1])
            return
        self._emit_outputs(engine, engine.finish(self.events.now_s))
        later, self._later[place] = self._later[place], []
        for request, epoch in later:
            self._drop_request(engine, request, epoch)
        # Sequences that have ended made room for waiting requests.
        self._start_transfers()
        if self.bulk is not None:
            self.bulk.budget.record_online(run.begun_s, self.events.now_s)
        if not self._begin_unit():
            self._run_round()

    # ---- bulk work

    def start_bulk(self) -> None:
        """Begins bulk work, if there is any for this worker."""
        if self.bulk is not None:
            self._schedule_round()

    def _begin_unit(self) -> bool:
        """Begins a unit of bulk work if there is time for it. Returns whether it did."""
        if self.bulk is None or (end_s := self.bulk.begin_unit(self.events.now_s)) is None:
            return False
        self._in_unit = True
        self.events.at(end_s, self._end_unit, order=ORDER_STEP)
        return True

    def _end_unit(self) -> None:
        assert self.bulk is not None, "a unit has begun"
        self._in_unit = False
        self.bulk.end_unit(self.events.now_s)
        self._run_round()

    def _emit_early(self, run: StepRun, first: int) -> None:
        """Sends the outputs that the relay needs during a run: first tokens, and chunks for which no room is booked."""
        if run.most == 1:
            return
        begun: dict[int, list[tuple[SimSequence, int]]] = {}
        end = len(run.ends)
        for seq in run.rows:
            known = len(seq.output)
            total = seq.size + known
            silent = seq.silent and not first
            if silent:
                begun.setdefault(0, []).append((seq, known + 1))
            if total + end <= seq.quiet:
                continue
            for step in range(first + (-total - first) % CHUNK_TOKENS, end, CHUNK_TOKENS):
                if total + step + 1 > seq.quiet and not (silent and not step):
                    begun.setdefault(step, []).append((seq, known + step + 1))
        for step, rows in begun.items():
            end_s = run.ends[step]
            outputs = [
                SimOutput(task, count) if step else make_output(task, count, end_s) for task, count in rows
            ]
            self._send_message(partial(_valid_outputs, run, step, outputs), end_s)

    # ---- messages of the gateway

    def _handle_message(self, message: Any) -> None:
        match message:
            case SimOrder(order, task):
                self._accept_order(order, task())
            case Staging():
                for fetcher in self.fetchers:
                    fetcher.hint(message)
            case Fetch():
                for fetcher in self.fetchers:
                    fetcher.fetch(message, self.events.now_s)
            case Release(request, epoch):
                self._release_lease(f"{request}#{epoch}")
            case Abort(request, epoch):
                self._abort_request(request, epoch)

    def _accept_order(self, order: OrderMessage, seq: SimSequence) -> None:
        place = min(range(len(self.engines)), key=lambda place: (self._engine_load(place), place))
        try:
            if isinstance(order, Admit):
                self.fetchers[place].admit(order, seq, self.events.now_s)
            else:
                self.engines[place].add(seq, self.events.now_s)
        except SequenceRefused as refusal:
            self._send_message(Failed(seq.id, seq.epoch, refusal.code, refusal.what))

    def _engine_load(self, place: int) -> int:
        coming = len(self.fetchers[place].admission) if self.fetchers else 0
        return coming + len(self.engines[place].scheduler)

    def _release_lease(self, key: str) -> None:
        if (engine := self.leases.pop(key, None)) is not None:
            engine.kv.release(key)

    def _abort_request(self, request: str, epoch: int) -> None:
        for place, engine in enumerate(self.engines):
            if engine.run is not None:
                # The sequence may be in the running step, so the abort waits until the step has ended.
                self._later[place].append((request, epoch))
            else:
                self._drop_request(engine, request, epoch)
        for fetcher in self.fetchers:
            fetcher.abort(request, epoch, self.events.now_s)

    def _drop_request(self, engine: SimEngine, request: str, epoch: int) -> None:
        for key in engine.table.keys_of(request, epoch):
            engine.table.drop(key)
        for number in range(epoch + 1):
            self._release_lease(f"{request}#{number}")

    def _start_transfers(self) -> bool:
        """Tends prefixes that are read back, adopts fetched requests, and starts fetches for which there is room.
        Returns whether any was recalled.
        """
        self._tend_restores()
        landed, self._landed = self._landed, []
        recalled = False
        for fetcher in self.fetchers:
            for arrival in landed:
                if fetcher.admission.moving.get(arrival.seq.key) is arrival:
                    fetcher.finish(arrival, self.events.now_s)
            recalled = fetcher.start_transfers(self.events.now_s) or recalled
        return recalled

    def _tend_restores(self) -> None:
        """Goes on with prefixes that are read back, and schedules the time at which nobody waits for them any more."""
        now_s = self.events.now_s
        ends = [end_s for engine in self.engines if (end_s := engine.restores.tend(now_s)) is not None]
        if ends and not now_s < self._tend_s <= min(ends):
            self._tend_s = min(ends)
            self.events.at(self._tend_s, self._schedule_round)

    # ---- messages to the gateway

    def _emit_outputs(self, engine: SimEngine, outputs: list[SimOutput]) -> None:
        if outputs:
            self._send_message(outputs)
        for one in outputs:
            if one.held:
                self._offer_kv(engine, one.seq)

    def _offer_kv(self, engine: SimEngine, seq: SimSequence) -> None:
        """Offers the KV of a sequence that is held; if it was evicted, without the slab of the newest tokens."""
        self.leases[seq.key] = engine
        num_tokens, bag = seq.computed, 0
        if seq.kept_slabs:
            num_tokens, bag = decision_tokens(seq.size, seq.computed), seq.kept_slabs - 1
            ring = seq.slabs.pop(seq.lead_slabs)
            engine.table.arena_of(seq).free_slabs(seq.key, [ring])
        num_slabs = len(seq.slabs)
        num_bytes = num_slabs * self.chunk_bytes[engine.limits.arena_name(seq)]
        ticket = offer_ticket(self.name, bag, seq.segments)
        self._send_message(Offer(seq.id, seq.epoch, ticket, num_tokens, num_bytes, num_slabs))

    def _send_message(self, what: Any, at_s: float | None = None) -> None:
        self._send(self.name, what, self.events.now_s if at_s is None else at_s)

    @property
    def stats(self) -> WorkerStats:
        """The statistics for a heartbeat."""
        done = [engine.done(self.events.now_s) for engine in self.engines]
        stats = WorkerStats(
            slabs_total=sum(engine.limits.num_slabs for engine in self.engines),
            slabs_used=sum(engine.kv.used for engine in self.engines),
            running=sum(engine.table.num_running for engine in self.engines),
            steps=sum(steps for steps, _, _ in done),
            step_seconds=sum(seconds for _, seconds, _ in done),
            step_tokens=sum(tokens for _, _, tokens in done),
        )
        # The batches of a pipeline share the tiers; what they looked up is told by the first one alone.
        return self.engines[0].restores.complete_stats(stats)


def _valid_outputs(run: StepRun, step: int, outputs: list[SimOutput]) -> list[SimOutput]:
    """The outputs predicted for `step`, if the run came that far; its last step sends its own outputs."""
    return outputs if step < run.most - 1 else []
