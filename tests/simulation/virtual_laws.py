"""What holds whatever happens: some of it after every step, the rest when the world has come to rest.

    I1 nothing is held at rest         I5 no more is given out than there is room    I8 no KV of others is decoded
    I2 tokens are exactly those of     I6 nothing lives beyond its deadline          I9 an old life changes nothing
       an undisturbed run              I7 a failure is that of one request          I12 no request waits for ever
    I4 one end for each request, and nothing after it                                I13 no attempt crosses KV classes
    I14 only an answer that has begun, and that no worker can continue, is cut; its client may come again

I2 implies I8 and I9 here: the toy model's answer depends on every byte of KV, and is compared token by token.
"""

from __future__ import annotations

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import SILENCE_S
from diptych.request import TERMINAL_STAGES
from router.requests.continuable import can_continue
from router.requests.request_state import RequestState
from router.workers.kv_classes import holds_class
from tests.simulation.event_queue import VirtualEventQueue
from tests.simulation.gateway import TICK_S, VirtualClient
from tests.simulation.process import VirtualProcess
from tests.simulation.virtual_model import POISON
from tests.simulation.world import VirtualWorld

MAX_LATE_S = (
    2 * TICK_S + 0.2
)  # an end may come so long after its deadline: ticks are coarse, channels are slow
MAX_FREE_S = 1.0  # after the last end everything is free, if nothing is broken
MAX_ORPHAN_S = (
    SILENCE_S + 1.0
)  # a worker works no longer than this for a request that has moved on, or whose gateway is gone
CHECK_BOOKS_EVERY = 50  # steps between two looks through all books, which take long
DONE = ("stop", "length")
# How a request may fail when workers and wires do: nothing else is an answer.
EXCUSES = frozenset(
    {
        "gateway",
        "deadline_exceeded",
        "worker_lost",
        "no_workers",
        "kv_transfer_failed",
        "out_of_memory",
        "overloaded",
        "request_quarantined",
        "queue_too_long",
        "not_continuable",
    }
)


class InvariantBroken(AssertionError):
    """A law does not hold."""


class InvariantChecker:
    """Looks at one world."""

    def __init__(self, world: VirtualWorld) -> None:
        self.world = world
        self._compared: dict[str, int] = {}  # tokens of each client that were found right
        self._closed = 0  # how many of those that have ended were looked at
        self._last = 0  # steps when the books were gone through
        self._orphans: dict[tuple[str, str], float] = {}  # by process and attempt: since when
        self.ends: dict[str, str] = {}

    # ---- after every step

    def check_running(self) -> None:
        """Raises Broken."""
        world = self.world
        if world.gate is not None and not world.gate.blocked:
            for client in world.gate.clients.values():
                self._compare(client)
                if world.agenda.now_s > max(client.deadline_s, world.gate.went_on_s) + MAX_LATE_S:
                    raise InvariantBroken(f"{client.name} lives {MAX_LATE_S} s after its deadline")
        while self._closed < len(world.over):
            self._close(world.over[self._closed])
            self._closed += 1
        if world.agenda.steps - self._last >= CHECK_BOOKS_EVERY:
            self._last = world.agenda.steps
            self.check_books()

    def _compare(self, client: VirtualClient) -> None:
        """I2."""
        got, wanted = client.got, client.wanted[0]
        at = self._compared.get(client.name, 0)
        if len(got) > at:
            if got[at:] != wanted[at : len(got)]:
                raise InvariantBroken(
                    f"{client.name} has got {got[at:]} at {at}, not {wanted[at : len(got)]}"
                )
            self._compared[client.name] = len(got)

    def _close(self, client: VirtualClient) -> None:
        """I2, I4."""
        self._compare(client)
        assert client.end is not None
        self.ends[client.name] = client.end
        if client.end in DONE:
            if (client.got, client.end) != client.wanted:
                raise InvariantBroken(f"{client.name} ended as {client.end} after {len(client.got)} tokens")
        elif client.end not in EXCUSES | {"gone"}:
            raise InvariantBroken(f"{client.name} failed with {client.end}")
        if client.end == "not_continuable":
            self._check_cut(client)
        if client.end == "request_quarantined" and POISON not in client.prompt:
            raise InvariantBroken(f"{client.name} was quarantined, and is innocent")

    def _check_cut(self, client: VirtualClient) -> None:
        """I14."""
        if can_continue(client.sampling, self.world.traits):
            raise InvariantBroken(f"{client.name} was cut, and could have gone on")
        if not client.got or not client.retry or not client.retry_after_s:
            raise InvariantBroken(
                f"{client.name} was cut after {len(client.got)} tokens: {client.retry_after_s}"
            )

    def check_books(self) -> None:
        """Pools, trees and the relay's ledgers add up."""
        for process in self.world.living():
            process.holdings.check_books()
        self._adopt()
        if self.world.gate is None or self.world.gate.blocked:
            return
        self._credit()
        relay, clients = self.world.relay, self.world.gate.clients
        astray = [name for name in clients if name not in relay.live]
        if astray:
            raise InvariantBroken(f"nobody works on {astray}, and nobody has ended them")
        for name, state in relay.live.items():
            if state.request.stage in TERMINAL_STAGES:
                raise InvariantBroken(f"{name} lives on as {state.request.stage}")
            if not state.holders <= set(relay.fleet.workers):
                raise InvariantBroken(f"{name} is open at {state.holders}, not all of whom are there")
            self._stay(state)

    def _stay(self, state: RequestState) -> None:
        """I13: all workers of an attempt have the KV class that it began with."""
        for worker in state.holders:
            hello = self.world.relay.fleet.workers[worker].hello
            if state.attempt_version is None or not holds_class(hello, state.attempt_version.kv_class):
                raise InvariantBroken(
                    f"{state.request.id} began with {state.attempt_version} and is open at {worker}"
                )

    def _credit(self) -> None:
        """I5: a prefill worker is given no more prompts than it has room for, until they are fetched."""
        relay = self.world.relay
        for member in relay.fleet.workers_of("prefill"):
            load, capacity = relay.ledger.load_of(member.name), member.hello.num_slabs * CHUNK_TOKENS
            if load.running > 1 and load.room_tokens > capacity:
                raise InvariantBroken(
                    f"{member.name} was given {load.room_tokens} tokens, with room for {capacity}"
                )

    def _adopt(self) -> None:
        """I12, I9: nobody works for long on what the gateway has given up, or for a gateway that is gone."""
        world, found = self.world, set[tuple[str, str]]()
        live = world.relay.live if world.gate is not None else {}
        for process in world.living():
            if process.stopped:
                continue
            for seq in process.sequences():
                known = live.get(seq.id)
                if known is None or known.request.epoch != seq.epoch:
                    found.add((process.incarnation, seq.key))
        now_s = world.agenda.now_s
        self._orphans = {orphan: self._orphans.get(orphan, now_s) for orphan in found}
        if old := [orphan for orphan, since_s in self._orphans.items() if now_s - since_s > MAX_ORPHAN_S]:
            raise InvariantBroken(f"for {MAX_ORPHAN_S} s there are orphans: {old}")

    # ---- at rest

    def check_at_rest(self) -> None:
        """Everybody has ended, nothing is broken any more, and time has passed: nothing is left (I1)."""
        world, gate = self.world, self.world.gate
        self.check_books()
        if waiting := [client.name for client in world.clients if client.end is None]:
            raise InvariantBroken(f"{waiting} have not ended")
        if gate is None:
            raise InvariantBroken("there is no gateway")
        relay = gate.relay
        kept = (
            len(relay.live),
            len(relay.ledger),
            relay.admission.in_flight,
            relay.admission.queued_tokens,
        )
        if any(kept):
            raise InvariantBroken(f"the relay keeps {kept}: live, ledger, in flight, queued tokens")
        for process in world.living():
            self._empty(process)
        if world.pipes.moving:
            raise InvariantBroken(f"{world.pipes.moving} transfers go on for nobody")

    def _empty(self, process: VirtualProcess) -> None:
        stats = process.shell.role.complete_stats(process.engine.stats)
        held = {
            "slabs": process.holdings.used,
            "leases": stats.leases,
            "staging": stats.staging_bytes,
            "running": stats.running,
            "waiting": stats.waiting,
            "attempts": process.shell.is_busy,
            **process.count_held(),
        }
        if any(held.values()):
            owners = process.holdings.owners()
            raise InvariantBroken(f"{process.name} holds {held} at rest, for {owners}")


def settle_world(world: VirtualWorld, laws: InvariantChecker, patience_s: float = 90.0) -> None:
    """Let every fault pass and every request end, then see that nothing is left. Raises Broken."""
    agenda: VirtualEventQueue = world.agenda

    def calm() -> bool:
        return len(world.over) == len(world.clients) and world.whole and not world.hurt

    if not world.run(calm, patience_s, laws.check_running):
        waiting = [client.name for client in world.clients if client.end is None]
        raise InvariantBroken(f"after {patience_s} s {waiting} still wait, whole: {world.whole}")
    free_s = agenda.now_s + MAX_FREE_S
    world.run(lambda: agenda.now_s >= free_s, MAX_FREE_S + 1.0, laws.check_running)
    laws.check_at_rest()
