"""A deployment in virtual time: gateway, workers, network, clients, and everything that may happen to them.

The decisions are the product's own code (relay, fleet, admission, leases, hand-off, loop, scheduler, roles, holdings);
what is simulated is time, the channel, the transports, processes and the model. One seed makes one run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from decode_worker.worker import DecodeWorker
from diptych.chunks import RAW_CLASS
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.messages import Drain, SwitchRole
from diptych.request import TRAITS, Grammar, SamplingParams, Tenancy
from prefill_worker.worker import PrefillWorker
from router.effects import WorkerCommand
from router.requests.admission import Admission, AdmissionLimits
from router.requests.relay import Relay
from router.routing.prefix_index import PrefixIndex
from router.workers.fleet import Fleet
from tests.simulation.channel import LEASE_S, VirtualNetwork
from tests.simulation.dropping_model import undisturbed_kept_answer
from tests.simulation.event_queue import VirtualEventQueue
from tests.simulation.gateway import VirtualClient, VirtualGateway
from tests.simulation.process import MODEL_LEN, VirtualProcess, VirtualSupervisor
from tests.simulation.transport import VirtualPipes
from tests.simulation.virtual_model import POISON, VirtualRunner, undisturbed_answer

PATIENCE_S = 60.0  # the deadline of an ordinary request
RESTART_S = 0.5


class VirtualWorld:
    """`prefill` and `decode` are numbers of workers; without any prefill worker the deployment is colocated."""

    processes: type[VirtualProcess] = VirtualProcess

    def __init__(
        self,
        seed: int,
        prefill: int = 2,
        decode: int = 2,
        *,
        num_slabs: int = 24,
        shared: bool = True,
        relays: type[Relay] = Relay,
        local_prefill: str = "fallback",
        writers: type[DecodeWorker] = DecodeWorker,
        readers: type[PrefillWorker] = PrefillWorker,
        runners: type[VirtualRunner] = VirtualRunner,
        kv_classes: dict[str, str] | None = None,
        kv_class: str = RAW_CLASS,
        traits: tuple[str, ...] = TRAITS,
    ) -> None:
        """`traits` are those of all workers. `kv_class` is that of those that `kv_classes` does not name; several are
        joined by commas.
        """
        self.seed, self.rng = seed, Random(seed)
        self.agenda = VirtualEventQueue()
        self.network = VirtualNetwork(self.agenda)
        self.pipes = VirtualPipes(self.agenda, Random(seed + 1), shared)
        self.num_slabs, self.split, self.local_prefill = num_slabs, prefill > 0, local_prefill
        self.relays, self.writers, self.readers = relays, writers, readers
        self.runners, self.kv_class, self.traits = runners, kv_class, traits
        self.clients: list[VirtualClient] = []
        self.over: list[VirtualClient] = []  # as they ended
        self.faults: Counter[str] = Counter()
        self.crashes: list[str] = []
        self._wanted: dict[bytes, tuple[list[int], str]] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self.network.frames = self._note
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        self.kv_classes = dict.fromkeys(names, kv_class) | (kv_classes or {})
        self.posts = {name: VirtualSupervisor(self, name, name.partition("-")[0]) for name in names}
        self.gate: VirtualGateway | None = None
        self.open()

    def _note(self, name: str, payload: bytes) -> None:
        self._digest.update(b"%.9f %s " % (self.agenda.now_s, name.encode()) + payload)

    @property
    def trace(self) -> str:
        """A digest of every frame that a worker has got, and when."""
        return self._digest.hexdigest()

    # ---- the gateway

    def open(self) -> None:
        """A gateway starts."""
        self.gate = VirtualGateway(
            self.agenda, self.network, self.make_relay(), self.over, self.wanted_answer
        )

    def make_relay(self) -> Relay:
        limits = AdmissionLimits(max_requests=200, max_queued_tokens=100_000, max_wait_s=PATIENCE_S)
        return self.relays(
            Fleet(),
            Admission(limits),
            split=self.split,
            lease_s=LEASE_S,
            index=PrefixIndex(),
            local_prefill=self.local_prefill,
        )

    @property
    def relay(self) -> Relay:
        assert self.gate is not None
        return self.gate.relay

    # ---- clients

    def ask(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        origin: Tenancy,
        patience_s: float,
        kv_class: str | None = None,
        keep: KeepSpec = KEEP_ALL,
    ) -> VirtualClient:
        """A request; without a gateway it has ended at once."""
        now_s = self.agenda.now_s
        name = f"r{len(self.clients)}"
        wanted, deadline_s = self.wanted_answer(prompt, sampling, keep=keep), now_s + patience_s
        client = VirtualClient(
            name, prompt, sampling, origin, deadline_s, wanted, now_s, asked_class=kv_class, keep=keep
        )
        self.clients.append(client)
        if self.gate is None:
            client.end, client.ended_s = "gateway", now_s
            self.over.append(client)
        else:
            self.gate.ask(client)
        return client

    def wanted_answer(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        kv_class: str = RAW_CLASS,
        keep: KeepSpec = KEEP_ALL,
    ) -> tuple[list[int], str]:
        """What an undisturbed run would answer with KV of this class, of which heads drop rows if `keep` says so."""
        key = msgspec.msgpack.encode((prompt, sampling, kv_class, keep))
        if key not in self._wanted:
            if POISON in prompt:
                self._wanted[key] = [], ""
            elif keep.evicts:
                self._wanted[key] = undisturbed_kept_answer(prompt, sampling, MODEL_LEN, keep)
            else:
                self._wanted[key] = undisturbed_answer(prompt, sampling, MODEL_LEN, kv_class, self.runners)
        return self._wanted[key]

    def leave(self, client: VirtualClient) -> None:
        if client.end is None and self.gate is not None:
            self.gate.leave(client.name)

    # ---- what may happen

    def living(self, role: str = "") -> list[VirtualProcess]:
        found = [post.process for post in self.posts.values() if post.process is not None]
        return [one for one in found if one.alive and role in ("", one.kind)]

    def ended(self, process: VirtualProcess, how: str) -> None:
        """A process is over: its connection closes, its supervisor starts another."""
        if how == "crashed":
            self.crashes.append(process.name)
        gate = self.gate
        if gate is not None and not self.network.wires(process.name)[0].cut:
            self.agenda.schedule_after(0.002, partial(self._hang_up, gate, process), "hang up")
        self.posts[process.name].again(RESTART_S, how)

    def _hang_up(self, gate: VirtualGateway, process: VirtualProcess) -> None:
        line = self.network.lines.get(process.name)
        if line is None or line is process.line:  # else the next one is connected already
            gate.exchange.hang_up(process.name)

    def kill(self, name: str) -> None:
        if (process := self.posts[name].process) is not None:
            self.faults["kill"] += 1
            process.end("killed")

    def stop(self, name: str, for_s: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        process = self.posts[name].process
        if process is None or process.stopped:
            return
        self.faults["stop"] += 1
        process.stop()
        first = self.rng.random() < 0.5
        self.agenda.schedule_after(for_s, partial(process.cont, first), "continue")

    def cut(self, name: str, for_s: float) -> None:
        """A silent partition between the gateway and a worker."""
        if not self.network.wires(name)[0].cut:
            self.faults["cut"] += 1
            self.network.cut(name)
            self.agenda.schedule_after(for_s, partial(self.network.heal, name), "heal")

    def slow(self, name: str, delay_s: float, for_s: float) -> None:
        self.faults["slow"] += 1
        self.network.slow(name, delay_s)
        self.agenda.schedule_after(for_s, partial(self.network.slow, name, 0.0005), "heal")

    def reset(self, name: str) -> None:
        """The worker's session breaks, for instance since frames were lost."""
        if (line := self.network.lines.get(name)) is not None:
            self.faults["reset"] += 1
            line.end_session()

    def stall(self, source: str, target: str, for_s: float) -> None:
        """Nothing moves between two workers."""
        pipe = self.pipes.pipe(source, target)
        if not pipe.stalled:
            self.faults["stall"] += 1
            pipe.stalled = True
            self.agenda.schedule_after(for_s, lambda: setattr(pipe, "stalled", False), "heal")

    def throttle(self, source: str, target: str, rate: float, for_s: float) -> None:
        pipe = self.pipes.pipe(source, target)
        self.faults["throttle"] += 1
        pipe.rate, usual = rate, 2e6
        self.agenda.schedule_after(for_s, lambda: setattr(pipe, "rate", usual), "heal")

    def corrupt(self, source: str, target: str, chance: float, for_s: float) -> None:
        pipe = self.pipes.pipe(source, target)
        self.faults["corrupt"] += 1
        pipe.corrupt = chance
        self.agenda.schedule_after(for_s, lambda: setattr(pipe, "corrupt", 0.0), "heal")

    def drain(self, name: str) -> None:
        """SIGTERM; the supervisor starts another one."""
        process = self.posts[name].process
        if process is not None and not process.stopped:
            self.faults["drain"] += 1
            process.term()

    def upgrade(self, name: str, kv_class: str) -> None:
        """A worker is asked to end, and its next process has another KV class."""
        self.kv_classes[name] = kv_class
        process = self.posts[name].process
        if process is not None and process.stopped:
            # It takes the signal when it goes on.
            self.agenda.schedule_after(0.5, partial(self.upgrade, name, kv_class), "upgrade")
        else:
            self.drain(name)

    def command(self, name: str) -> None:
        """The gateway tells a worker to drain."""
        if self.gate is not None and name in self.relay.fleet.workers:
            self.faults["command"] += 1
            self.gate.handle(WorkerCommand(name, Drain()))

    def switch_role(self, name: str) -> None:
        """The gateway tells a worker to change its pool, if that is not the last of its own."""
        process = self.posts[name].process
        if self.gate is None or process is None:
            return
        staying = {one.name for one in self.living(process.kind) if not one.shell.next_role}
        staying &= {
            member.name for member in self.relay.fleet.workers_of(process.kind) if not member.draining
        }
        if len(staying) < 2:
            return
        if self.split and name in self.relay.fleet.workers:
            self.faults["switch_role"] += 1
            role = "decode" if process.kind == "prefill" else "prefill"
            self.gate.handle(WorkerCommand(name, SwitchRole(role)))

    def kill_gateway(self, for_s: float) -> None:
        gate = self.gate
        if gate is not None:
            self.faults["gateway"] += 1
            gate.die()
            self.gate = self.network.exchange = None
            self.agenda.schedule_after(for_s, self.open, "start")

    def stop_gateway(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        if self.gate is not None and not self.gate.blocked:
            self.faults["stop gateway"] += 1
            self.gate.stop(for_s)

    def block_gateway(self, for_s: float) -> None:
        """The gateway's event loop stands still; its other threads do not."""
        if self.gate is not None and not self.gate.blocked:
            self.faults["block gateway"] += 1
            self.gate.block(for_s)

    # ---- running

    @property
    def whole(self) -> bool:
        """Everybody lives, and is linked to everybody."""
        living = [one for one in self.living() if not one.stopped]
        if self.gate is None or self.gate.blocked or len(living) < len(self.posts):
            return False
        fleet = self.relay.fleet
        sources, targets = len(self.living("prefill")), len(self.living("decode"))
        linked = not self.split or len(fleet.linked_pairs()) == sources * targets
        return len(fleet.workers) == len(living) and linked

    @property
    def hurt(self) -> bool:
        """Is any wire cut, or stands still?"""
        cut = any(self.network.wires(name)[0].cut for name in self.posts)
        return cut or self.pipes.hurt

    def run(self, until: Callable[[], bool], limit_s: float, each: Callable[[], None] | None = None) -> bool:
        """Let things happen until `until()`, for at most `limit_s`; did it come to that? `each` after every step."""
        end_s = self.agenda.now_s + limit_s
        while not until():
            if self.agenda.now_s > end_s:
                return False
            assert self.agenda.run_next()
            if each is not None:
                each()
        return True


def random_sampling(rng: Random, max_tokens: int) -> SamplingParams:
    """Any way of choosing tokens that the toy model knows."""
    grammar = Grammar("lark", str(rng.choice([7, 23]))) if rng.random() < 0.2 else None
    stops = tuple(rng.sample(range(POISON), 2)) if rng.random() < 0.5 else ()
    return SamplingParams(
        max_tokens=max_tokens,
        seed=rng.randrange(1 << 30),
        stop_token_ids=stops,
        grammar=grammar,
        frequency_penalty=0.5,
    )
