"""Random stories: workers come, die, stall, crash, drain, change pools and return, KV is announced early, hand-offs
fail, messages are late, doubled and reordered, pools are too small for all, clients leave.

`RelayMachine` keeps what the channel promises (each link in order, nothing twice), so the tokens themselves
are checked as well. `WildRelayMachine` breaks every promise: no token order then, but still one end for each
request, and nothing left behind.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import (
    Drain,
    Failed,
    Heartbeat,
    Offer,
    Output,
    Pulled,
    Staged,
    Step,
    SwitchRole,
    ToGateway,
    WorkerStats,
)
from diptych.request import TRAITS, RequestStage
from router.effects import ClientGone, ClockTick, StopFound, WorkerCommand
from router.requests.admission import AdmissionLimits
from router.requests.attempts import MAX_FAILURES, MAX_LOSSES
from router.requests.continuable import can_continue
from router.requests.timers import LEASED_STAGES
from router.routing.overdraft import MAX_HELD_SHARE
from tests.unit.router.fake_deployment import LEASE_S, FakeDeployment
from tests.unit.router.fleet_views import assert_up_to_date

PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
MAX_TICK_S, PATIENCE_S = 0.5, 1.0
CODES = [
    "transfer_failed",
    "kv_corrupt",
    "overloaded",
    "stale_ticket",
    "internal_error",
    "draining",
    "out_of_memory",
]
FINISH = [None, None, None, None, "stop"]
WORKER_TROUBLES = ["dies", "cannot be reached", "restarts", "relinks", *[""] * 6]
ENDED = ["", "crashed", "killed"]
SILENT = [*PREFILL, *DECODE, "", "", "", ""]
PICK = st.integers(0, 1 << 16)
any_of = st.sampled_from


class RelayMachine(RuleBasedStateMachine):
    """2 + 2 workers with pools of eight slabs, over links so slow that whatever can be staged is."""

    split, local_prefill, overdraft = True, "never", False
    traits: tuple[str, ...] = TRAITS

    def __init__(self) -> None:
        super().__init__()
        self.world = FakeDeployment(
            *(PREFILL if self.split else ()),
            *DECODE,
            split=self.split,
            slabs=8,
            limits=AdmissionLimits(max_requests=12, max_queued_tokens=3000),
            local_prefill=self.local_prefill,
            recovery_s=PATIENCE_S,
            gb_per_s=0.01,
            traits=self.traits,
            overdraft=self.overdraft,
        )
        self.graves: list[tuple[str, ToGateway]] = []  # said by lives and links that are known to be over
        self.given: dict[str, int] = {}  # orders to drain or to change pools: to which life of whom
        self.kept_back = 0  # moments at which such an order had to wait
        self.way_s = 0.0  # when there was a way, as of the last step
        for name in self.world.workers:
            self.world.flush(name)

    def one(self, names: list[str], index: int) -> str:
        return names[index % len(names)]

    def holding(self) -> list[str]:
        return [name for name, worker in self.world.workers.items() if worker.alive and worker.held]

    def talking(self) -> list[str]:
        return [name for name, worker in self.world.workers.items() if worker.outbox]

    # ---- clients

    @initialize(prompts=st.lists(st.integers(1, 9), min_size=2, max_size=6))
    def begin(self, prompts: list[int]) -> None:
        for prompt in prompts:
            self.arrive(prompt, 1000.0, 0)

    @rule(
        prompt=st.integers(1, 600),
        limit_s=any_of([2.0, 1000.0, 1000.0]),
        pinned=any_of([0, 0, 0, 1]),
    )
    def arrive(self, prompt: int, limit_s: float, pinned: int) -> None:
        name = f"r{len(self.world.arrived)}"
        if pinned:
            source = self.one([*PREFILL], prompt) if self.split else None
            self.world.canary(name, source, self.one([*DECODE], prompt))
        else:
            # One in two is greedy, so that any worker can continue it.
            self.world.arrive(
                name, prompt, deadline_s=self.world.now_s + limit_s, temperature=float(prompt % 2)
            )

    @precondition(lambda self: self.world.relay.live)
    @rule(index=PICK, stops=st.booleans())
    def leave(self, index: int, stops: bool) -> None:
        name = self.one(self.world.arrived, index)
        self.world.do(StopFound(name) if stops else ClientGone(name))

    # ---- workers do what they were asked to

    @precondition(lambda self: self.holding())
    @rule(index=PICK, which=PICK, finish=any_of(FINISH), count=st.integers(1, 3), delivered=st.booleans())
    def work(self, index: int, which: int, finish: str | None, count: int, delivered: bool) -> None:
        name = self.one(self.holding(), index)
        worker = self.world.workers[name]
        key = self.some(name, which)
        if worker.reads:
            self.read(name, key, finish, count)
        elif key in worker.local or key in worker.pulled:
            self.world.decode(name, key, finish, count)
        elif key not in worker.early:
            self.world.pull(name, key)
        if delivered:
            self.hear(index=0, count=9, name=name)

    def read(self, name: str, key: tuple[str, int], finish: str | None, count: int) -> None:
        """A step of a prefill worker: it announces, perhaps, and perhaps comes to the end."""
        worker = self.world.workers[name]
        if key in worker.read:
            return
        if key in worker.staged and count > 1:
            self.world.stage(name, key)
        if count < 3:
            self.world.first(name, key, finish)

    @precondition(lambda self: self.holding())
    @rule(index=PICK, which=PICK, code=any_of(CODES))
    def fail(self, index: int, which: int, code: str) -> None:
        name = self.one(self.holding(), index)
        self.world.fail(name, self.some(name, which), code)

    def some(self, name: str, which: int) -> tuple[str, int]:
        keys = sorted(self.world.workers[name].held)
        return keys[which % len(keys)]

    @precondition(lambda self: self.talking())
    @rule(index=PICK, count=st.integers(1, 4))
    def hear(self, index: int, count: int, name: str | None = None) -> None:
        name = name or self.one(self.talking(), index)
        outbox = self.world.workers[name].outbox
        for _ in range(min(count, len(outbox))):
            self.world.say(name, outbox.pop(0))

    # ---- workers come and go

    @rule(name=any_of(PREFILL + DECODE), what=any_of(WORKER_TROUBLES), ended=any_of(ENDED))
    def trouble(self, name: str, what: str, ended: str) -> None:
        worker = self.world.workers.get(name)
        if worker is None or not what:
            return
        if what == "dies":
            worker.alive = False
        elif what == "cannot be reached":
            self.world.lost(name)
            self.bury(name)
        elif what == "restarts" or not worker.alive:
            self.bury(name)
            self.world.join(name, ended)
        else:
            self.bury(name)
            self.world.relink(name)

    @rule(name=any_of(PREFILL + DECODE), what=any_of(["drain", "switch_role", "", ""]))
    def command(self, name: str, what: str) -> None:
        if what and name in self.world.workers:
            reads = self.world.workers[name].reads
            self.world.do(
                WorkerCommand(
                    name, SwitchRole("decode" if reads else "prefill") if what == "switch_role" else Drain()
                )
            )
            if name in self.world.relay.fleet.workers:
                self.given[name] = self.world.workers[name].life

    @precondition(lambda self: self.drained())
    @rule(index=PICK)
    def end_of_drain(self, index: int) -> None:
        """A worker that was asked to end, or to change pools, and holds nothing any more."""
        name = self.one(self.drained(), index)
        next_role = self.world.workers[name].next_role
        self.hear(index=0, count=99, name=name)
        if not self.world.workers[name].held:
            self.bury(name)
            self.world.switch_role(name, next_role) if next_role else self.world.join(name)

    def drained(self) -> list[str]:
        members, workers = self.world.relay.fleet.workers, self.world.workers
        return [
            name
            for name, member in members.items()
            if member.draining
            and not member.accepts_pending
            and workers[name].alive
            and not workers[name].held
        ]

    @precondition(lambda self: len(self.world.relay.find_pairs()) < (4 if self.split else 2))
    @rule(ended=any_of(ENDED))
    def recover(self, ended: str) -> None:
        """Every worker that the gateway has lost is back, and all are linked."""
        for name, worker in self.world.workers.items():
            if not worker.alive or name not in self.world.relay.fleet.workers:
                self.bury(name)
                self.world.relink(name) if worker.alive else self.world.join(name, ended)
        for name in [name for name, worker in self.world.workers.items() if not worker.reads]:
            self.hear(index=0, count=99, name=name)

    def bury(self, name: str) -> None:
        self.graves += [(name, message) for message in self.world.workers[name].outbox]
        self.world.workers[name].outbox.clear()

    @precondition(lambda self: self.graves)
    @rule(index=PICK)
    def ghost(self, index: int) -> None:
        """Something an earlier life said arrives after all. Its attempt is over, so nothing may come of it."""
        name, message = self.graves.pop(index % len(self.graves))
        before = {key: list(tokens) for key, tokens in self.world.tokens.items()}
        live = set(self.world.relay.live)
        if isinstance(message, Step | Pulled):
            self.world.say(name, message)
            assert {key: list(tokens) for key, tokens in self.world.tokens.items()} == before
            assert set(self.world.relay.live) == live

    # ---- time

    @rule(seconds=st.floats(0.05, MAX_TICK_S), silent=any_of(SILENT))
    def tick(self, seconds: float, silent: str) -> None:
        self.world.now_s += seconds
        for name, worker in self.world.workers.items():
            if worker.alive and name != silent:
                self.world.say(name, Heartbeat(name, worker.hello.incarnation, WorkerStats()))
        self.world.do(ClockTick())
        for name, worker in self.world.workers.items():
            if name not in self.world.relay.fleet.workers:
                self.bury(name)
            elif worker.alive:
                self.leases_are_fresh(name)
        for live in self.world.relay.live.values():
            assert live.request.deadline_s > self.world.now_s
        self.nobody_waits_without_reason()

    def nobody_waits_without_reason(self) -> None:
        """With a way, and nobody suspected or quiet, the first in the queue goes if nobody else is on the way."""
        relay = self.world.relay
        if len(relay.queue) and relay.find_pairs() and not len(relay.quarantine) and not relay.fleet.quiet:
            assert any(live.pair is not None for live in relay.live.values())
        assert self.world.now_s - self.way_s <= PATIENCE_S + MAX_TICK_S or not len(relay.queue), (
            "there is no hope"
        )

    def leases_are_fresh(self, name: str) -> None:
        for live in self.world.relay.live.values():
            request = live.request
            if live.source == name and request.stage in LEASED_STAGES:
                since_s = self.world.workers[name].renewed_s.get((request.id, request.epoch), 0.0)
                since_s = max(since_s, request.entered_s[RequestStage.PREFILLED])
                assert self.world.now_s - since_s <= LEASE_S / 3 + MAX_TICK_S

    # ---- what holds at every moment

    @invariant()
    def every_request_lives_or_has_ended_once(self) -> None:
        world = self.world
        assert set(world.arrived) == set(world.relay.live) | set(world.terminal)
        assert not set(world.relay.live) & set(world.terminal)

    @invariant()
    def nobody_holds_what_the_relay_has_forgotten(self) -> None:
        for name, worker in self.world.workers.items():
            if not worker.alive or name not in self.world.relay.fleet.workers:
                continue
            for request, epoch in worker.held:
                live = self.world.relay.live.get(request)
                known = live is not None and live.request.epoch == epoch and name in live.holders
                assert known, (name, request, epoch)

    @invariant()
    def who_waits_holds_nothing(self) -> None:
        relay = self.world.relay
        if not len(relay.queue) or relay.find_pairs():
            self.way_s = self.world.now_s
        for name, live in relay.live.items():
            waits = live.request.stage is RequestStage.ADMITTED
            assert waits == (name in relay.queue) == (live.pair is None) == (name in self.world.waiting), name
            assert not (waits and live.holders), name

    @invariant()
    def what_is_remembered_of_the_fleet_is_true(self) -> None:
        assert_up_to_date(self.world.relay)

    @invariant()
    def the_books_are_those_of_the_living(self) -> None:
        relay = self.world.relay
        assert len(relay.ledger) + len(relay.queue) == len(relay.live)
        burdens = {request: live.shares for request, live in relay.live.items()}
        for name in [*PREFILL, *DECODE]:
            known = sorted(relay.ledger.requests_at(name))
            assert known == sorted(request for request, shares in burdens.items() if name in shares)
            assert relay.ledger.load_of(name).running == len(known)
        for request, live in relay.live.items():
            assert live.losses <= MAX_LOSSES and live.failures <= MAX_FAILURES, request
            assert live.holders <= set(relay.fleet.workers), request
        unprefilled = (RequestStage.ADMITTED, RequestStage.QUEUED)
        queued = sum(
            len(live.request.prompt)
            for live in relay.live.values()
            if live.request.stage in unprefilled
            and not (live.request.output or live.request.id in self.world.prefilled or live.pinned)
        )
        assert relay.admission.queued_tokens == queued

    @invariant()
    def drain_orders_are_sent_when_all_have_come(self) -> None:
        """And as often as it takes: an order may be lost with a link."""
        relay = self.world.relay
        for name, life in self.given.items():
            worker, member = self.world.workers[name], relay.fleet.workers.get(name)
            if not worker.alive or worker.life != life or member is None:
                continue
            on_the_way = [
                one
                for one in relay.ledger.requests_at(name)
                if name not in relay.live[one].holders or relay.live[one].stays_at(name)
            ]
            assert member.draining and (worker.must_drain or on_the_way), name
            self.kept_back += not worker.must_drain

    @invariant()
    def what_was_sent_to_be_read_fits(self) -> None:
        """The prompts at a prefill worker, leased ones included, never ask for more than its pool; or there is one."""
        relay = self.world.relay
        for name, worker in self.world.workers.items():
            states = [relay.live[request] for request in relay.ledger.requests_at(name)]
            reading = [live.prefill_kv_tokens for live in states if live.source == name and not live.pinned]
            assert len(reading) < 2 or sum(reading) <= worker.slabs * CHUNK_TOKENS, name

    @invariant()
    def who_cannot_be_continued_has_one_worker(self) -> None:
        """Its tokens are those of one attempt; and nobody continues what was not drawn by him."""
        for request, epochs in self.world.spoke.items():
            state = self.world.relay.live.get(request)
            if state is not None and not can_continue(state.request.sampling, self.traits):
                assert len(epochs) == 1, request

    @invariant()
    def tokens_are_in_order(self) -> None:
        for request, tokens in self.world.tokens.items():
            assert tokens == list(range(len(tokens))), (request, tokens)

    def teardown(self) -> None:
        """Whatever has happened: when the clients leave, nothing is held anywhere."""
        for name in list(self.world.relay.live):
            self.world.do(ClientGone(name))
        self.nobody_holds_what_the_relay_has_forgotten()
        self.every_request_lives_or_has_ended_once()
        relay = self.world.relay
        assert not relay.live and not len(relay.ledger) and not len(relay.queue) and not len(relay.quarantine)
        assert (relay.admission.in_flight, relay.admission.queued_tokens) == (0, 0)

    def check(self) -> None:
        """All invariants."""
        self.every_request_lives_or_has_ended_once()
        self.nobody_holds_what_the_relay_has_forgotten()
        self.who_waits_holds_nothing()
        self.the_books_are_those_of_the_living()
        self.drain_orders_are_sent_when_all_have_come()
        self.what_was_sent_to_be_read_fits()
        self.tokens_are_in_order()


class LocalPrefillMachine(RelayMachine):
    local_prefill = "fallback"


class OverdrawingMachine(RelayMachine):
    """Prompts begin before their decode room is free; workers are measured as so fast that it always may be."""

    overdraft = True

    def check(self) -> None:
        for worker in self.world.relay.fleet.workers.values():
            prefill = worker.role == "prefill"
            worker.stats = WorkerStats(
                steps=100, step_seconds=100.0 if prefill else 1e-3, step_tokens=100 if prefill else 100
            )
        super().check()
        self.the_overdraft_is_bounded()

    def the_overdraft_is_bounded(self) -> None:
        relay = self.world.relay
        assert relay.pairs.num_overdrawn == sum(state.overdrawn for state in relay.live.values())
        for name, worker in relay.fleet.workers.items():
            capacity = worker.hello.num_slabs * CHUNK_TOKENS
            load = relay.ledger.load_of(name)
            assert load.overdrawn_tokens <= MAX_HELD_SHARE * capacity


class ColocatedMachine(RelayMachine):
    split = False


class LimitedRelayMachine(RelayMachine):
    """No worker can continue what another one has begun, unless it is greedy."""

    local_prefill = "fallback"
    traits = ()


class WildRelayMachine(RelayMachine):
    local_prefill = "auto"

    @precondition(lambda self: self.talking())
    @rule(index=PICK, which=PICK, keep=st.booleans())
    def hear_out_of_order(self, index: int, which: int, keep: bool) -> None:
        name = self.one(self.talking(), index)
        outbox = self.world.workers[name].outbox
        at = which % len(outbox)
        self.world.say(name, outbox[at] if keep else outbox.pop(at))

    @precondition(lambda self: self.talking())
    @rule(index=PICK, speaker=any_of(PREFILL + DECODE))
    def hear_from_another(self, index: int, speaker: str) -> None:
        """A worker speaks of what it was never asked to do."""
        message = self.world.workers[self.one(self.talking(), index)].outbox[0]
        worker = self.world.workers.get(speaker)
        held = {request for request, _ in worker.held} if worker else set()
        parts = message.outputs if isinstance(message, Step) else [message]
        spoken = {
            part.request for part in parts if isinstance(part, Output | Staged | Offer | Pulled | Failed)
        }
        if not held & spoken:
            self.world.say(speaker, message)

    def ghost(self, index: int) -> None:
        """Any message of any life, at any time."""
        name, message = self.graves.pop(index % len(self.graves))
        self.world.say(name, message)

    ghost = precondition(lambda self: self.graves)(rule(index=PICK)(ghost))

    def tokens_are_in_order(self) -> None:
        """Not promised here."""
