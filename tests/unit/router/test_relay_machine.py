"""Random stories: workers come, die, stall and return, messages are late, doubled and reordered, clients leave.

`Orderly` keeps what the channel promises (each link in order, nothing twice), so the tokens themselves are checked as
well. `Wild` breaks every promise: no token order then, but still one end for each request, and nothing left behind.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.messages import Beat, Pulled, Stats, Step, ToGateway
from diptych.request import Stage
from router.admission import Admission, Limits
from router.effects import ClientGone, Stop, Tick
from router.relay import MAX_ATTEMPTS, WAITING
from tests.unit.router.world import LEASE_S, World

PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
MAX_TICK_S = 0.5
CODES = st.sampled_from(
    ["transfer_failed", "kv_corrupt", "overloaded", "stale_ticket", "internal_error", "draining"]
)
FINISH = st.sampled_from([None, None, None, None, "stop"])
TROUBLES = ["dies", "cannot be reached", "restarts", "relinks"]
ANYONE = st.sampled_from(PREFILL + DECODE)
pick = st.integers(0, 1 << 16)


class Orderly(RuleBasedStateMachine):
    split = True

    def __init__(self) -> None:
        super().__init__()
        self.world = World(*(PREFILL if self.split else ()), *DECODE, split=self.split)
        self.world.relay.admission = Admission(Limits(max_requests=12, max_queued_tokens=100))
        self.graves: list[tuple[str, ToGateway]] = []  # said by lives and links that are known to be over
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
        prompt=st.integers(1, 30),
        limit_s=st.sampled_from([2.0, 1000.0, 1000.0]),
        pinned=st.sampled_from([0, 0, 0, 1]),
    )
    def arrive(self, prompt: int, limit_s: float, pinned: int) -> None:
        name = f"r{len(self.world.arrived)}"
        if pinned:
            self.world.canary(
                name, self.one([*PREFILL], prompt) if self.split else None, self.one([*DECODE], prompt)
            )
        else:
            self.world.arrive(name, prompt, deadline_s=self.world.now_s + limit_s)

    @precondition(lambda self: self.world.relay.live)
    @rule(index=pick, stops=st.booleans())
    def leave(self, index: int, stops: bool) -> None:
        name = self.one(self.world.arrived, index)
        self.world.do(Stop(name) if stops else ClientGone(name))

    # ---- workers do what they were told

    @precondition(lambda self: self.holding())
    @rule(index=pick, which=pick, finish=FINISH, count=st.integers(1, 3), heard=st.booleans())
    def work(self, index: int, which: int, finish: str | None, count: int, heard: bool) -> None:
        name = self.one(self.holding(), index)
        worker = self.world.workers[name]
        key = self.some(name, which)
        if name in PREFILL:
            if key not in worker.read:
                self.world.first(name, key, finish)
        elif self.split and key not in worker.pulled:
            self.world.pull(name, key)
        else:
            self.world.decode(name, key, finish, count)
        if heard:
            self.hear(index=0, count=9, name=name)

    @precondition(lambda self: self.holding())
    @rule(index=pick, which=pick, code=CODES)
    def fail(self, index: int, which: int, code: str) -> None:
        name = self.one(self.holding(), index)
        self.world.fail(name, self.some(name, which), code)

    def some(self, name: str, which: int) -> tuple[str, int]:
        keys = sorted(self.world.workers[name].held)
        return keys[which % len(keys)]

    @precondition(lambda self: self.talking())
    @rule(index=pick, count=st.integers(1, 4))
    def hear(self, index: int, count: int, name: str | None = None) -> None:
        name = name or self.one(self.talking(), index)
        outbox = self.world.workers[name].outbox
        for _ in range(min(count, len(outbox))):
            if outbox:  # what was heard may have ended the session
                self.world.say(name, outbox.pop(0))

    # ---- workers come and go

    @rule(name=ANYONE, what=st.sampled_from([*TROUBLES, *[""] * 6]))
    def trouble(self, name: str, what: str) -> None:
        worker = self.world.workers.get(name)
        if worker is None or not what:
            return
        if what == "dies":
            worker.alive = False
        elif what == "cannot be reached":
            self.world.lost(name)
            self.bury(name)
        else:
            self.bury(name)
            self.world.join(name) if what == "restarts" or not worker.alive else self.world.relink(name)

    @precondition(lambda self: len(self.world.relay.fleet.pairs()) < (4 if self.split else 9))
    @rule()
    def recover(self) -> None:
        """Every worker that the gateway has lost is back and linked."""
        for name, worker in self.world.workers.items():
            if not worker.alive or name not in self.world.relay.fleet.members:
                self.bury(name)
                self.world.relink(name) if worker.alive else self.world.join(name)
        for name in DECODE:
            self.hear(index=0, count=99, name=name)

    def bury(self, name: str) -> None:
        self.graves += [(name, message) for message in self.world.workers[name].outbox]
        self.world.workers[name].outbox.clear()

    @precondition(lambda self: self.graves)
    @rule(index=pick)
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

    @rule(seconds=st.floats(0.05, MAX_TICK_S), silent=st.sampled_from([*PREFILL, *DECODE, "", "", "", ""]))
    def tick(self, seconds: float, silent: str) -> None:
        self.world.now_s += seconds
        for name, worker in self.world.workers.items():
            if worker.alive and name != silent:
                self.world.say(name, Beat(name, worker.hello.incarnation, Stats()))
        self.world.do(Tick())
        for name, worker in self.world.workers.items():
            if name not in self.world.relay.fleet.members:
                self.bury(name)
            elif worker.alive:
                self.leases_are_fresh(name)
        for live in self.world.relay.live.values():
            assert live.request.deadline_s > self.world.now_s

    def leases_are_fresh(self, name: str) -> None:
        for live in self.world.relay.live.values():
            request = live.request
            if live.source == name and request.stage in WAITING:
                since_s = self.world.workers[name].renewed_s.get((request.id, request.epoch), 0.0)
                since_s = max(since_s, request.entered_s[Stage.PREFILLED])
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
            if not worker.alive or name not in self.world.relay.fleet.members:
                continue
            for request, epoch in worker.held:
                live = self.world.relay.live.get(request)
                assert live is not None and live.request.epoch == epoch and name in live.open, (
                    name,
                    request,
                    epoch,
                )

    @invariant()
    def the_books_are_those_of_the_living(self) -> None:
        relay = self.world.relay
        assert len(relay.ledger) == len(relay.live)
        for name in [*PREFILL, *DECODE]:
            assert sorted(relay.ledger.requests(name)) == sorted(
                request for request, live in relay.live.items() if name in live.shares
            )
            assert relay.ledger.load(name).running == len(relay.ledger.requests(name))
        for request, live in relay.live.items():
            assert live.attempts <= MAX_ATTEMPTS and live.open <= set(relay.fleet.members), request
        queued = sum(
            len(live.request.prompt)
            for live in relay.live.values()
            if live.request.stage is Stage.QUEUED and not live.request.output and not live.pinned
        )
        assert relay.admission.queued_tokens == queued

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
        assert not relay.live and not len(relay.ledger)
        assert (relay.admission.in_flight, relay.admission.queued_tokens) == (0, 0)


class Colocated(Orderly):
    split = False


class Wild(Orderly):
    @precondition(lambda self: self.talking())
    @rule(index=pick, which=pick, keep=st.booleans())
    def hear_out_of_order(self, index: int, which: int, keep: bool) -> None:
        name = self.one(self.talking(), index)
        outbox = self.world.workers[name].outbox
        at = which % len(outbox)
        self.world.say(name, outbox[at] if keep else outbox.pop(at))

    @precondition(lambda self: self.talking())
    @rule(index=pick, speaker=st.sampled_from(PREFILL + DECODE))
    def hear_from_another(self, index: int, speaker: str) -> None:
        """A worker speaks of what it was never told to do."""
        message = self.world.workers[self.one(self.talking(), index)].outbox[0]
        held = (
            {request for request, _ in self.world.workers[speaker].held}
            if speaker in self.world.workers
            else set()
        )
        if not held & {
            part.request for part in getattr(message, "outputs", [message]) if hasattr(part, "request")
        }:
            self.world.say(speaker, message)

    def ghost(self, index: int) -> None:
        """Any message of any life, at any time."""
        name, message = self.graves.pop(index % len(self.graves))
        self.world.say(name, message)

    ghost = precondition(lambda self: self.graves)(rule(index=pick)(ghost))

    def tokens_are_in_order(self) -> None:
        """Not promised here."""


NORMAL = settings(
    max_examples=40,
    stateful_step_count=100,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a hundred steps takes minutes
    suppress_health_check=list(HealthCheck),
)

TestOrderly = Orderly.TestCase
TestColocated = Colocated.TestCase
TestWild = Wild.TestCase
TestOrderly.settings = TestColocated.settings = TestWild.settings = NORMAL
