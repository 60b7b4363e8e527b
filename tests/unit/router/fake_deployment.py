"""A gateway's surroundings without any I/O: workers that hold what they were asked to, and clients that count."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from msgspec import structs

from diptych.eviction_spec import ADA, FASTGEN
from diptych.messages import (
    Abort,
    Admit,
    Drain,
    Failed,
    Fetch,
    Generate,
    Hello,
    Linked,
    Offer,
    Output,
    Peer,
    Prefill,
    Pulled,
    Release,
    Renew,
    Staged,
    Staging,
    Step,
    SwitchRole,
    ToGateway,
    ToWorker,
)
from diptych.request import TRAITS, Request, RequestStage, SamplingParams, Tenancy
from router.effects import (
    AttemptBegan,
    ChosenPair,
    DeliverTokens,
    FailRequest,
    FinishRequest,
    RelayEffect,
    RelayEvent,
    RequestArrived,
    RequestCancelled,
    RequestQueued,
    SendMessage,
    StageEntered,
    WorkerDown,
    WorkerLost,
    WorkerSaid,
)
from router.requests.admission import Admission, AdmissionLimits
from router.requests.relay import Relay
from router.routing.prefix_index import PrefixIndex

LEASE_S, RECOVERY_S = 3.0, 5.0
KEEP_RULES = ADA, FASTGEN, "zap@0123456789abcdef"
PAIR = ("prefill-0", "decode-0")


def make_hello(
    worker: str,
    life: int = 1,
    link: str = "",
    fingerprint: str = "f",
    *,
    role: str = "",
    pid: int = 1,
    ended: str = "",
    slabs: int = 64,
    kv_class: str = "",
    **identity: str,
) -> Hello:
    """The introduction of "prefill-…" or "decode-…" in its `life`-th life. It tells no classes without `kv_class`."""
    role = role or worker.partition("-")[0]
    name = f"{worker}/{life}"
    where = "host", pid, slabs, 1 << 20, 2048
    classes = {kv_class: (slabs, 1 << 20)} if kv_class else {}
    return Hello(worker, role, name, fingerprint, identity, *where, {"shm": b"x"}, link, ended, classes)


def make_request(
    name: str, prompt: int = 10, max_tokens: int = 8, deadline_s: float = 1e9, temperature: float = 1.0
) -> Request:
    """A request with a seed: workers without that trait cannot continue it, unless it is greedy."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=temperature)
    return Request(name, list(range(prompt)), sampling, deadline_s, tenancy=tenancy_of(name))


def tenancy_of(name: str) -> Tenancy:
    """Every request's own tenant and priority, so that a mistaken one is seen; all share one scope."""
    return Tenancy(f"tenant of {name}", "scope", len(name))


@dataclass
class WorldWorker:
    """Holds (request, epoch) -> next output position; `outbox` is what it has said and nobody has received yet."""

    name: str
    life: int = 1
    links: int = 1
    alive: bool = True
    role: str = ""
    pid: int = 1
    ended: str = ""
    slabs: int = 64
    kv_class: str = ""
    keep_classes: tuple[str, ...] = ("raw",)
    traits: tuple[str, ...] = TRAITS
    keep_rules: tuple[str, ...] = KEEP_RULES
    must_drain: bool = False  # to drain
    next_role: str = ""  # the role it is to have next
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    pulled: set[tuple[str, int]] = field(default_factory=set)  # a decode worker's that may decode
    early: set[tuple[str, int]] = field(default_factory=set)  # a decode worker's that have no ticket yet
    staged: set[tuple[str, int]] = field(default_factory=set)  # a prefill worker's that it may announce
    local: set[tuple[str, int]] = field(default_factory=set)  # a decode worker's that it reads itself
    read: set[tuple[str, int]] = field(default_factory=set)  # a prefill worker's that wait for release
    deferred: set[tuple[str, int]] = field(
        default_factory=set
    )  # a prefill worker's that it draws no token for
    renewed_s: dict[tuple[str, int], float] = field(default_factory=dict)
    outbox: list[ToGateway] = field(default_factory=list)

    @property
    def hello(self) -> Hello:
        link, changes = f"{self.life}.{self.links}", {"role": self.role, "ended": self.ended}
        hello = make_hello(
            self.name, self.life, link, pid=self.pid, slabs=self.slabs, kv_class=self.kv_class, **changes
        )
        keep = list(self.keep_classes) if set(TRAITS).issubset(self.traits) else []
        return structs.replace(hello, keep_classes=keep, traits=self.traits, keep_rules=self.keep_rules)

    @property
    def reads(self) -> bool:
        """Whether it is a prefill worker at present."""
        return (self.role or self.name).startswith("prefill")

    def free(self, request: str, epoch: int) -> None:
        for key in [key for key in self.held if key[0] == request and key[1] <= epoch]:
            del self.held[key]

    def forget(self) -> None:
        """A new life or a new link: nothing of before is held, nothing said before arrives, in either direction."""
        self.must_drain, self.next_role = False, ""
        known = self.held, self.pulled, self.read, self.early, self.staged, self.local, self.deferred
        for kept in (*known, self.renewed_s, self.outbox):
            kept.clear()


class FakeDeployment:
    """A relay, its workers, and what every client has got."""

    def __init__(
        self,
        *workers: str,
        split: bool = True,
        linked: bool = True,
        slabs: int = 64,
        limits: AdmissionLimits | None = None,
        local_prefill: str = "never",
        recovery_s: float = RECOVERY_S,
        gb_per_s: float = 1e6,
        traits: tuple[str, ...] = TRAITS,
        overdraft: bool = False,
    ) -> None:
        """`slabs` of each pool. At `gb_per_s` of links the default moves KV in no time: nothing is staged. `traits` are
        those of all workers.
        """
        self.relay = Relay(
            admission=Admission(limits),
            split=split,
            lease_s=LEASE_S,
            index=PrefixIndex(),
            recovery_s=recovery_s,
            local_prefill=local_prefill,
            overdraft=overdraft,
        )
        self.slabs, self.gb_per_s, self.traits = slabs, gb_per_s, traits
        self.now_s = 0.0
        self.workers: dict[str, WorldWorker] = {}
        self.arrived: list[str] = []
        self.origins: dict[str, Tenancy] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.terminal: dict[str, FinishRequest | FailRequest | RequestCancelled] = {}
        self.auto_link = linked
        self.seen: Counter[type] = Counter()  # effects, and messages sent
        self.waiting: set[str] = set()  # that were reported to be in the queue
        self.orders: set[tuple[type, str, int, str]] = set()
        self.spoke: dict[str, set[int]] = defaultdict(set)  # the attempts that delivered tokens
        self.prefilled: set[str] = set()  # whose prompt was computed once
        self.num_deferred = 0  # first tokens that a decode worker was left to draw
        for name in workers:
            self.join(name)

    # ---- what may happen

    def do(self, event: RelayEvent) -> list[RelayEffect]:
        """Let the event happen and its effects take place; returns them."""
        if isinstance(event, RequestArrived):
            for one in event.requests:
                self.arrived.append(one.id)
                self.origins[one.id] = one.tenancy
        effects = self.relay.handle_event(event, self.now_s)
        for effect in effects:
            self.apply(effect)
        return effects

    def arrive(
        self,
        name: str,
        prompt: int = 10,
        max_tokens: int = 8,
        deadline_s: float = 1e9,
        temperature: float = 1.0,
    ) -> list[RelayEffect]:
        return self.do(RequestArrived(make_request(name, prompt, max_tokens, deadline_s, temperature)))

    def canary(self, name: str, prefill: str | None, decode: str) -> list[RelayEffect]:
        return self.do(RequestArrived(make_request(name, 4, 2), pinned_pair=ChosenPair(prefill, decode)))

    def say(self, worker: str, message: ToGateway) -> list[RelayEffect]:
        return self.do(WorkerSaid(worker, message))

    def join(
        self,
        name: str,
        ended: str = "",
        kv_class: str = "",
        keep_classes: tuple[str, ...] = ("raw",),
        traits: tuple[str, ...] | None = None,
        keep_rules: tuple[str, ...] = KEEP_RULES,
    ) -> list[RelayEffect]:
        """A worker starts with a pool of `kv_class`, or starts again; then `ended` is how it ended before.

        Without that word it is the closed connection of the process before that tells that it is over.
        """
        before = self.workers.get(name)
        over = self.lost(name) if before and not ended else []
        life = before.life + 1 if before else 1
        role = before.role if before else ""
        self.workers[name] = WorldWorker(
            name,
            life,
            role=role,
            pid=life,
            ended=ended,
            slabs=self.slabs,
            kv_class=kv_class,
            keep_classes=keep_classes,
            traits=self.traits if traits is None else traits,
            keep_rules=keep_rules,
        )
        return over + self.say(name, self.workers[name].hello)

    def switch_role(self, name: str, role: str) -> list[RelayEffect]:
        """A worker that holds nothing more begins a new life in `role`, as the same process."""
        worker = self.workers[name]
        worker.forget()
        worker.life, worker.role = worker.life + 1, role
        return self.say(name, worker.hello)

    def relink(self, name: str) -> list[RelayEffect]:
        """A worker that lives on introduces itself over a new link, having aborted what it held."""
        self.workers[name].forget()
        self.workers[name].links += 1
        return self.say(name, self.workers[name].hello)

    def flush(self, name: str) -> list[RelayEffect]:
        """Everything a worker has said arrives, in order."""
        outbox = self.workers[name].outbox
        return [effect for _ in range(len(outbox)) for effect in self.say(name, outbox.pop(0))]

    def link(self, target: str, source: str, gb_per_s: float = 10.0) -> None:
        member = self.relay.fleet.workers[source]
        self.say(target, Linked(source, member.hello.incarnation, "shm", gb_per_s, 5.0))

    # ---- what workers do with what they hold; all of it goes to their outbox

    def first(self, name: str, key: tuple[str, int], finish: str | None = None, offer: bool = True) -> None:
        """A prefill worker has read a prompt. It draws no token that is deferred."""
        worker = self.workers[name]
        tokens, finish = ([], None) if key in worker.deferred else ([worker.held[key]], finish)
        worker.outbox.append(
            Step([Output(*key, tokens, finish=finish, seconds={"queue": 0.0, "prefill": 0.0})])
        )
        if finish:
            del worker.held[key]
        elif offer:
            worker.read.add(key)
            worker.outbox.append(Offer(*key, b"ticket", 10, 100))

    def stage(self, name: str, key: tuple[str, int]) -> None:
        """A prefill worker announces what it is about to compute."""
        assert key in self.workers[name].staged
        self.workers[name].outbox.append(Staged(*key, b"hint"))

    def pull(self, name: str, key: tuple[str, int]) -> None:
        """A decode worker has got the KV."""
        assert key not in self.workers[name].early, "there is no ticket yet"
        self.workers[name].pulled.add(key)
        seconds = {"transfer": 0.0, "hidden": 0.25, "exposed": 0.5}
        self.workers[name].outbox.append(Pulled(*key, "shm", 100, seconds))

    def decode(self, name: str, key: tuple[str, int], finish: str | None = None, count: int = 1) -> None:
        """A decode (or colocated) worker has made tokens."""
        worker = self.workers[name]
        position = worker.held[key]
        worker.outbox.append(Step([Output(*key, list(range(position, position + count)), finish=finish)]))
        worker.held[key] = position + count
        if finish:
            del worker.held[key]

    def fail(self, name: str, key: tuple[str, int], code: str) -> None:
        """A worker gives up an attempt."""
        del self.workers[name].held[key]
        self.workers[name].outbox.append(Failed(*key, code, f"{code} at {name}"))

    # ---- what effects do

    def apply(self, effect: RelayEffect) -> None:
        self.seen[type(effect.message if isinstance(effect, SendMessage) else effect)] += 1
        if isinstance(effect, SendMessage):
            self._sent(effect.worker, effect.message)
        elif isinstance(effect, DeliverTokens):
            assert effect.request not in self.terminal, f"{effect} after the end"
            self.tokens[effect.request] += effect.output.tokens
            if effect.output.tokens:
                self.spoke[effect.request].add(effect.output.epoch)
        elif isinstance(effect, StageEntered) and effect.stage is RequestStage.PREFILLED:
            self.prefilled.add(effect.request)
        elif isinstance(effect, RequestQueued):
            self.waiting.add(effect.request)
        elif isinstance(effect, AttemptBegan):
            self.waiting.discard(effect.request)
        elif isinstance(effect, FinishRequest | FailRequest | RequestCancelled):
            self.waiting.discard(effect.request)
            assert effect.request in self.arrived
            assert effect.request not in self.terminal, f"{effect} is a second end"
            self.terminal[effect.request] = effect
        elif isinstance(effect, WorkerDown) and effect.worker in self.workers:
            worker = self.workers[effect.worker]
            if worker.alive and worker.hello.incarnation == effect.incarnation:
                worker.outbox.clear()  # its session is over: what it has said arrives no more

    def _sent(self, name: str, message: ToWorker) -> None:
        worker = self.workers[name]
        if isinstance(message, Prefill | Generate | Admit):
            assert message.request not in self.terminal, f"{message} after the end"
            assert message.remaining_s > 0
            assert message.tenancy == self.origins[message.request]
            order = type(message), message.request, message.epoch, worker.hello.incarnation
            assert order not in self.orders, "an attempt begins once at a worker"
            self.orders.add(order)
        if not worker.alive:
            return
        if isinstance(message, Prefill | Generate | Admit):
            assert not worker.must_drain, f"{message} for one that was asked to drain"
            assert not any(key[0] == message.request for key in worker.held), "two attempts at one worker"
            self._order(worker, message)
        elif isinstance(message, Staging | Fetch):
            key = message.request, message.epoch
            assert key not in worker.held or key in worker.early, f"{message} without an early Admit"
            if isinstance(message, Fetch) and key in worker.held:
                assert len(message.output) == worker.held[key] + 1, "the ticket comes with one token more"
                worker.early.discard(key)
                worker.held[key] = len(message.output)
        elif isinstance(message, Drain | SwitchRole):
            worker.must_drain, worker.next_role = (
                True,
                message.role if isinstance(message, SwitchRole) else "",
            )
        elif isinstance(message, Release | Abort):
            worker.free(message.request, message.epoch)
        elif isinstance(message, Renew):
            worker.renewed_s.update(dict.fromkeys(message.leases, self.now_s))
        elif isinstance(message, Peer) and self.auto_link:
            linked = Linked(message.worker, message.incarnation, "shm", self.gb_per_s, 5.0)
            worker.outbox.append(linked) if name in self.relay.fleet.workers else None

    def _order(self, worker: WorldWorker, order: Prefill | Generate | Admit) -> None:
        key = order.request, order.epoch
        assert worker.reads == isinstance(order, Prefill), f"{order} for a {worker.role or worker.name}"
        worker.held[key] = len(order.output)
        if isinstance(order, Generate):
            worker.local.add(key)
        elif isinstance(order, Prefill):
            assert not (order.defer_first and (order.stage or order.output)), order
            if order.stage:
                worker.staged.add(key)
            if order.defer_first:
                worker.deferred.add(key)
                self.num_deferred += 1
        elif isinstance(order, Admit) and not order.ticket:
            worker.early.add(key)

    def lost(self, name: str) -> list[RelayEffect]:
        """The gateway finds that a worker cannot be reached."""
        return self.do(WorkerLost(name, self.workers[name].hello.incarnation))


def linked_deployment(
    *workers: str,
    split: bool = True,
    slabs: int = 64,
    limits: AdmissionLimits | None = None,
    local_prefill: str = "never",
    gb_per_s: float = 1e6,
    traits: tuple[str, ...] = TRAITS,
    overdraft: bool = False,
) -> FakeDeployment:
    """A world in which all workers are up and linked."""
    world = FakeDeployment(
        *workers,
        split=split,
        slabs=slabs,
        limits=limits,
        local_prefill=local_prefill,
        gb_per_s=gb_per_s,
        traits=traits,
        overdraft=overdraft,
    )
    for worker in workers:
        world.flush(worker)
    return world


def messages_to(effects: list[RelayEffect], worker: str) -> list[object]:
    return [
        effect.message for effect in effects if isinstance(effect, SendMessage) and effect.worker == worker
    ]


def bring_to_transfer(world: FakeDeployment, name: str = "r") -> tuple[str, int]:
    """Bring a new request to the point where its decode worker has been asked to pull."""
    world.arrive(name)
    key = (name, 0)
    for worker in list(world.workers):
        if key in world.workers[worker].held:
            world.first(worker, key)
            world.flush(worker)
            return key
    raise AssertionError("no worker was given the request")


def bring_to_decode(world: FakeDeployment, name: str = "r") -> tuple[str, int]:
    key = bring_to_transfer(world, name)
    target = world.relay.live[name].pair
    assert target is not None
    world.pull(target.decode, key)
    world.flush(target.decode)
    return key


def is_at_rest(world: FakeDeployment) -> bool:
    relay = world.relay
    held = [worker.name for worker in world.workers.values() if worker.alive and worker.held]
    books = len(relay.ledger), relay.admission.in_flight, len(relay.queue), len(relay.quarantine)
    return not relay.live and not any(books) and not held
