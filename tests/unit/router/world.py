"""A gateway's surroundings without any I/O: workers that hold what they were told to, and clients that count."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from diptych.messages import (
    Abort,
    Admit,
    Failed,
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
    Step,
    ToGateway,
    ToWorker,
)
from diptych.request import Origin, Request, Sampling
from router.effects import (
    Arrive,
    Cancelled,
    Choice,
    Deliver,
    Down,
    Effect,
    Event,
    Fail,
    Finish,
    FromWorker,
    Send,
    WorkerLost,
)
from router.prefix_index import PrefixIndex
from router.relay import Relay

LEASE_S = 3.0
PAIR = ("prefill-0", "decode-0")


def hello(worker: str, life: int = 1, link: str = "", fingerprint: str = "f", **identity: str) -> Hello:
    """The introduction of "prefill-…" or "decode-…" in its `life`-th life."""
    role = worker.partition("-")[0]
    incarnation = f"{worker}/{life}"
    return Hello(
        worker, role, incarnation, fingerprint, identity, "host", 1, 64, 1 << 20, 2048, {"shm": b"x"}, link
    )


def request(name: str, prompt: int = 10, max_tokens: int = 8, deadline_s: float = 1e9) -> Request:
    sampling = Sampling(max_tokens=max_tokens, seed=1)
    return Request(name, list(range(prompt)), sampling, deadline_s, origin=origin_of(name))


def origin_of(name: str) -> Origin:
    """Every request's own tenant and priority, so that a mistaken one is seen; all share one scope."""
    return Origin(f"tenant of {name}", "scope", len(name))


@dataclass
class SimWorker:
    """Holds (request, epoch) -> next output position; `outbox` is what it has said and nobody has heard yet."""

    name: str
    life: int = 1
    links: int = 1
    alive: bool = True
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    pulled: set[tuple[str, int]] = field(default_factory=set)  # a decode worker's that may decode
    read: set[tuple[str, int]] = field(default_factory=set)  # a prefill worker's that wait for release
    renewed_s: dict[tuple[str, int], float] = field(default_factory=dict)
    outbox: list[ToGateway] = field(default_factory=list)

    @property
    def hello(self) -> Hello:
        return hello(self.name, self.life, f"{self.life}.{self.links}")

    def free(self, request: str, epoch: int) -> None:
        for key in [key for key in self.held if key[0] == request and key[1] <= epoch]:
            del self.held[key]

    def forget(self) -> None:
        """A new life or a new link: nothing of before is held, nothing said before arrives."""
        for kept in (self.held, self.pulled, self.read, self.renewed_s, self.outbox):
            kept.clear()


class World:
    """A relay, its workers, and what every client has got."""

    def __init__(
        self, *workers: str, split: bool = True, lease_s: float = LEASE_S, linked: bool = True
    ) -> None:
        self.relay = Relay(split=split, lease_s=lease_s, index=PrefixIndex())
        self.now_s = 0.0
        self.workers: dict[str, SimWorker] = {}
        self.arrived: list[str] = []
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.terminal: dict[str, Finish | Fail | Cancelled] = {}
        self.auto_link = linked
        self.orders: set[tuple[type, str, int]] = set()
        for name in workers:
            self.join(name)

    # ---- what may happen

    def do(self, event: Event) -> list[Effect]:
        """Let the event happen and its effects take place; returns them."""
        if isinstance(event, Arrive):
            self.arrived.append(event.request.id)
        effects = self.relay.handle(event, self.now_s)
        for effect in effects:
            self.apply(effect)
        return effects

    def arrive(
        self, name: str, prompt: int = 10, max_tokens: int = 8, deadline_s: float = 1e9
    ) -> list[Effect]:
        return self.do(Arrive(request(name, prompt, max_tokens, deadline_s)))

    def canary(self, name: str, prefill: str | None, decode: str) -> list[Effect]:
        return self.do(Arrive(request(name, 4, 2), pin=Choice(prefill, decode)))

    def say(self, worker: str, message: ToGateway) -> list[Effect]:
        return self.do(FromWorker(worker, message))

    def join(self, name: str) -> list[Effect]:
        """A worker starts, or starts again."""
        before = self.workers.get(name)
        self.workers[name] = SimWorker(name, before.life + 1 if before else 1)
        return self.say(name, self.workers[name].hello)

    def relink(self, name: str) -> list[Effect]:
        """A worker that lives on introduces itself over a new link, having aborted what it held."""
        self.workers[name].forget()
        self.workers[name].links += 1
        return self.say(name, self.workers[name].hello)

    def flush(self, name: str) -> list[Effect]:
        """Everything a worker has said arrives, in order."""
        outbox = self.workers[name].outbox
        return [effect for _ in range(len(outbox)) for effect in self.say(name, outbox.pop(0))]

    def link(self, target: str, source: str, gb_per_s: float = 10.0) -> None:
        member = self.relay.fleet.members[source]
        self.say(target, Linked(source, member.hello.incarnation, "shm", gb_per_s, 5.0))

    # ---- what workers do with what they hold; all of it goes to their outbox

    def first(self, name: str, key: tuple[str, int], finish: str | None = None, offer: bool = True) -> None:
        """A prefill worker has read a prompt."""
        worker = self.workers[name]
        position = worker.held[key]
        worker.outbox.append(
            Step([Output(*key, [position], finish=finish, seconds={"queue": 0.0, "prefill": 0.0})])
        )
        if finish:
            del worker.held[key]
        elif offer:
            worker.read.add(key)
            worker.outbox.append(Offer(*key, b"ticket", 10, 100))

    def pull(self, name: str, key: tuple[str, int]) -> None:
        """A decode worker has got the KV."""
        self.workers[name].pulled.add(key)
        self.workers[name].outbox.append(Pulled(*key, "shm", 100, {"transfer": 0.0}))

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

    def apply(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._sent(effect.worker, effect.message)
        elif isinstance(effect, Deliver):
            assert effect.request not in self.terminal, f"{effect} after the end"
            self.tokens[effect.request] += effect.output.tokens
        elif isinstance(effect, Finish | Fail | Cancelled):
            assert effect.request in self.arrived
            assert effect.request not in self.terminal, f"{effect} is a second end"
            self.terminal[effect.request] = effect
        elif isinstance(effect, Down) and effect.worker in self.workers:
            worker = self.workers[effect.worker]
            if worker.alive and worker.hello.incarnation == effect.incarnation:
                worker.outbox.clear()  # its session is over: what it has said arrives no more

    def _sent(self, name: str, message: ToWorker) -> None:
        worker = self.workers[name]
        if isinstance(message, Prefill | Generate | Admit):
            assert message.request not in self.terminal, f"{message} after the end"
            assert message.remaining_s > 0
            assert message.origin == origin_of(message.request)
            order = (type(message), message.request, message.epoch)
            assert order not in self.orders, "an epoch begins once"
            self.orders.add(order)
        if not worker.alive:
            return
        if isinstance(message, Prefill | Generate | Admit):
            assert not any(key[0] == message.request for key in worker.held), "two attempts at one worker"
            worker.held[message.request, message.epoch] = len(message.output)
        elif isinstance(message, Release | Abort):
            worker.free(message.request, message.epoch)
        elif isinstance(message, Renew):
            worker.renewed_s.update(dict.fromkeys(message.leases, self.now_s))
        elif isinstance(message, Peer) and self.auto_link:
            linked = Linked(message.worker, message.incarnation, "shm", 10.0, 5.0)
            worker.outbox.append(linked) if name in self.relay.fleet.members else None

    def lost(self, name: str) -> list[Effect]:
        """The gateway finds that a worker cannot be reached."""
        return self.do(WorkerLost(name, self.workers[name].hello.incarnation))


def linked(*workers: str, split: bool = True) -> World:
    world = World(*workers, split=split)
    for worker in workers:
        world.flush(worker)
    return world


def sent(effects: list[Effect], worker: str) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, Send) and effect.worker == worker]


def at_transfer(world: World, name: str = "r") -> tuple[str, int]:
    """Bring a new request to the point where its decode worker has been told to pull."""
    world.arrive(name)
    key = (name, 0)
    for worker in list(world.workers):
        if key in world.workers[worker].held:
            world.first(worker, key)
            world.flush(worker)
            return key
    raise AssertionError("no worker was given the request")


def at_decode(world: World, name: str = "r") -> tuple[str, int]:
    key = at_transfer(world, name)
    target = world.relay.live[name].choice
    assert target is not None
    world.pull(target.decode, key)
    world.flush(target.decode)
    return key


def at_rest(world: World) -> bool:
    relay = world.relay
    held = [worker.name for worker in world.workers.values() if worker.alive and worker.held]
    return not relay.live and not len(relay.ledger) and not relay.admission.in_flight and not held
