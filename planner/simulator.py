"""The real mode: the product's own decisions in virtual time, with a cost in place of the model.

    jobs ─▶ front ─▶ gate (router.relay, with its admission) ─▶ worker (engine.scheduler) ─▶ wires (kvtransfer.handoff)
              └─ as many gates as the deployment has cells

What decides is imported from the product: relay, policy, credits, admission, docket, scheduler, growth, pace, prefix
tree and the conversation of a hand-off. What is simulated: time, messages, steps, and KV on its way. So it schedules as
the engine does; `tests/unit/planner/test_same_decisions.py` holds both against each other.

Not simulated: faults, the host tier for preempted sequences (they are read again), names for the chunks of answers (a
follow-up finds the prompt cached, as far as the trace names it), the gateway's processor but where `handling` tells of
it (beats never wait for it). KV that is announced while it is computed is sent at once and is there when its step ends
at the earliest, not layer by layer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from operator import attrgetter
from typing import Protocol, TypeVar, overload

from diptych.errors import ConfigError
from engine.saturation import shortest
from engine.sequence import Limits
from kvcache.layout import CHUNK_TOKENS
from planner.cost import Rhythm
from planner.profile import Profile
from planner.sim_agenda import Agenda
from planner.sim_cores import Cores
from planner.sim_engine import Engine, Stages
from planner.sim_gate import Gate, Terms
from planner.sim_text import Names
from planner.sim_wires import Wires
from planner.sim_worker import Worker
from planner.terms import BOTH, DECODE, PREFILL, Batch, Cost, Handling, Job, Link, Placement, Pool, Served
from router.admission import Admission
from router.admission import Limits as Bounds
from router.fleet import Fleet
from router.relay import Relay

NO_BOUNDS = Bounds(max_requests=1 << 40, max_queued_tokens=1 << 50, max_wait_s=inf)
SHORTEST = 16  # tokens, where a curve for L_m begins (`engine.saturation`)
YOUNG = 50_000  # objects that are made before garbage is looked for while a simulation runs


class Counting(Protocol):
    """What takes the answers of a long run (`planner.tally.Tally`)."""

    def add(self, served: Served) -> None:
        """One more request has ended."""


T = TypeVar("T", bound=Counting)


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of instance: what its steps cost, its room for KV in tokens, and how much it takes on.

    `step_s` are seconds of each step beside the model. With a `rhythm` its steps differ from their cost as those of a
    worker did that shares its machine with the others of its cell, and each is planned by itself. For the rest see
    `engine.sequence.Limits`; a pipeline of several stages divides room and seats among as many batches as it has.
    """

    cost: Cost
    kv_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunked_prefill: bool = True
    saturation_tokens: int = 0
    tpot_s: float | None = None
    step_s: float = 0.0
    rhythm: Rhythm | None = None


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is simulated. `machines` are one for each pool of `placement`.

    The placement is that of one cell, and there are `cells` of them, each with a gateway of its own; a request goes to
    the cell that has least to do per device. Colocated pools beside others make up a cell of their own. `link` is a
    port of every instance (`planner.sim_wires`), `token_bytes` what a token's KV takes on it. `gateway_s` goes by
    before a request is with the relay, `hop_s` with each message to or from a worker. `max_tokens` is what clients ask
    for (None: exactly what they get, as a benchmark with forced lengths does). `local_prefill` is the gateway's; with
    "auto" steps of decode instances are kept within their machine's `tpot_s`. With `handling`, each gateway has a
    processor that does one thing after the other, on the same `cores` as its workers' steps (of machines with a
    rhythm and without a pipeline), and every step is planned by itself.
    """

    placement: Placement
    machines: tuple[Machine, ...]
    link: Link = field(default_factory=Link)
    token_bytes: float = 0.0
    gateway_s: float = 0.0
    hop_s: float = 0.0
    max_model_len: int = 1 << 20
    max_tokens: int | None = None
    timeout_s: float = inf
    prefix_caching: bool = False
    bounds: Bounds = NO_BOUNDS
    local_prefill: str = "fallback"
    pipelined: bool = True
    cells: int = 1
    beat_s: float = 0.25
    handling: Handling | None = None
    cores: int = 1


def deployment(
    placement: Placement, profiles: Mapping[str, Profile] | Profile, **options: object
) -> Deployment:
    """A deployment of a placement by profiles: costs, room, overheads and link, L_m where prompts alone are read.

    `profiles` are by the device that pools name. `options` are fields of `Machine`, for all pools, and of `Deployment`.

    Raises:
        ConfigError: a pool's device has no profile, or its weights leave no room for KV.
    """
    machines = []
    common = {name: options.pop(name) for name in list(options) if name in Machine.__slots__}
    used = [_profile(pool, profiles) for pool in placement.pools]
    for pool, profile in zip(placement.pools, used, strict=True):
        cost, room = profile.cost(pool.split), profile.kv_tokens(pool.split)
        if room < CHUNK_TOKENS:
            raise ConfigError(
                f"{profile.model.name} does not fit on {pool.split} of {profile.device.name}",
                f"weights leave room for {room} tokens of KV",
                "use more devices for an instance",
            )
        machine = Machine(cost, room, step_s=profile.overheads.step_s)
        machine = replace(machine, **common)  # type: ignore[arg-type]
        if pool.role == PREFILL and "saturation_tokens" not in common:
            machine = replace(machine, saturation_tokens=saturation(cost, machine.max_num_batched_tokens))
        machines.append(machine)
    overheads, shape = used[0].overheads, used[0].model
    settings: dict[str, object] = {
        "link": overheads.link,
        "token_bytes": float(shape.kv_token_bytes),
        "gateway_s": overheads.gateway_s,
        "hop_s": overheads.hop_s,
        "max_model_len": shape.max_len,
    }
    return Deployment(placement, tuple(machines), **(settings | options))  # type: ignore[arg-type]


def _profile(pool: Pool, profiles: Mapping[str, Profile] | Profile) -> Profile:
    if isinstance(profiles, Profile):
        return profiles
    if pool.device not in profiles:
        raise ConfigError(
            f"there is no profile for the device {pool.device!r}",
            f"known: {', '.join(sorted(profiles))}",
            "name one of these in the placement",
        )
    return profiles[pool.device]


def saturation(cost: Cost, longest: int) -> int:
    """L_m of a cost: the shortest prompt that is read at 90 % of the best rate (`engine.saturation.shortest`)."""
    lengths = [SHORTEST]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    curve = [(tokens, cost.stage_s(Batch(tokens, float(tokens) ** 2))) for tokens in lengths]
    return shortest([(tokens, seconds) for tokens, seconds in curve if seconds > 0])


@overload
def simulate(deployment: Deployment, jobs: Iterable[Job], *, skips: bool = True) -> list[Served]: ...
@overload
def simulate(deployment: Deployment, jobs: Iterable[Job], tally: T, *, skips: bool = True) -> T: ...
def simulate(
    deployment: Deployment, jobs: Iterable[Job], tally: T | None = None, *, skips: bool = True
) -> list[Served] | T:
    """Serve `jobs`, which come in order of their time, to the end.

    Returns how they fared, in the order in which they ended; with a `tally`, that one has counted them, and nothing is
    kept of those that have ended. Nothing is drawn: the same jobs always fare alike. Without `skips` every step is
    planned by itself, which changes nothing but the time it takes.

    Raises:
        ConfigError: the deployment has no way for a request, or its parts do not fit together.
        ValueError: a job comes before its predecessor.
    """
    served: list[Served] = []
    Simulation(deployment, served.append if tally is None else tally.add, skips).run(jobs)
    return served if tally is None else tally


class Simulation:
    """One run, of which `ended` hears how each request fared. `gates` and `wires` may be looked at when it is over."""

    def __init__(self, deployment: Deployment, ended: Callable[[Served], None], skips: bool = True) -> None:
        _check(deployment)
        self.deployment, self.skips, self._ended = deployment, skips, ended
        self.agenda = Agenda()
        self.gates: list[Gate] = []
        self.wires: list[Wires] = []

    def run(self, jobs: Iterable[Job]) -> None:
        """Serve all jobs to the end."""
        coming = iter(jobs)
        first = next(coming, None)
        if first is None:
            return
        self.agenda.now_s = min(0.0, first.at_s)
        for _ in range(self.deployment.cells):
            self._open()
        self._come(first, coming, 0)
        with _seldom_collecting():
            self.agenda.run()
        if left := sum(gate.open for gate in self.gates):
            raise RuntimeError(f"{left} requests wait for something that never happens")

    def _come(self, job: Job, coming: Iterator[Job], number: int) -> None:
        """Let `job` come, and then the one after it."""
        self.agenda.at(job.at_s, self._front, job, coming, number)

    def _front(self, job: Job, coming: Iterator[Job], number: int) -> None:
        gate = min(self.gates, key=attrgetter("load"))
        gate.coming += 1
        self.agenda.at(self.agenda.now_s + self.deployment.gateway_s, gate.arrive, job, number)
        if (following := next(coming, None)) is not None:
            self._come(following, coming, number + 1)

    # ---- what there is

    def _open(self) -> None:
        """One cell: a gate for those that hand over, another for those that do both."""
        pools = list(zip(self.deployment.placement.pools, self.deployment.machines, strict=True))
        for split in (True, False):
            part = [(pool, machine) for pool, machine in pools if (pool.role != BOTH) == split]
            if part:
                self._gate(part, split)

    def _gate(self, part: list[tuple[Pool, Machine]], split: bool) -> None:
        deployment = self.deployment
        relay = Relay(
            Fleet(lost_s=inf, stuck_s=inf),
            Admission(deployment.bounds),
            split=split,
            index=Names() if deployment.prefix_caching else None,
            pipelined=deployment.pipelined,
            recovery_s=inf,
            local_prefill=deployment.local_prefill,
            tpot_s=min((machine.tpot_s for _, machine in part if machine.tpot_s is not None), default=None),
        )
        terms = Terms(
            deployment.gateway_s,
            deployment.hop_s,
            deployment.timeout_s,
            deployment.max_tokens,
            deployment.max_model_len,
            deployment.beat_s,
            deployment.prefix_caching,
            deployment.handling,
        )
        wires, cores = Wires(self.agenda, deployment.link), Cores(deployment.cores)
        gate = Gate(self.agenda, relay, terms, sum(pool.devices for pool, _ in part), self._ended, cores)
        for pool, machine in part:
            for _ in range(pool.count):
                self._worker(gate, wires, cores, pool, machine)
        self._tie(gate)
        self.gates.append(gate)
        self.wires.append(wires)

    def _worker(self, gate: Gate, wires: Wires, cores: Cores, pool: Pool, machine: Machine) -> None:
        role = PREFILL if pool.role == PREFILL else DECODE
        name = f"{role}-{sum(worker.role == role for worker in gate.workers.values())}"
        deployment, rhythm = self.deployment, machine.rhythm
        stages = Stages(machine.cost, pool.split.pp, machine.step_s, rhythm, cores)
        limits = _limits(machine, pool.split.pp, deployment.max_model_len)
        skips = self.skips and pool.split.pp == 1 and rhythm is None and deployment.handling is None
        engines = [Engine(limits, stages, deployment.prefix_caching, skips) for _ in range(pool.split.pp)]
        chunk_bytes = round(deployment.token_bytes * CHUNK_TOKENS)
        worker = Worker(name, role, engines, self.agenda, wires, chunk_bytes, gate.hear)
        gate.meet(worker, limits.num_slabs * pool.split.pp, deployment.max_model_len)

    def _tie(self, gate: Gate) -> None:
        """Who may pull from whom: everybody, or with low affinity those of the same unit."""
        sources = [name for name, worker in gate.workers.items() if worker.role == PREFILL]
        targets = [name for name, worker in gate.workers.items() if worker.role == DECODE]
        units = min(len(sources), len(targets)) if self.deployment.placement.affinity == "low" else 1
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                if i % units == j % units:
                    gate.tie(source, target, self.deployment.link)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Nothing that ends here is part of a cycle: to look for cycles as often as usual takes a sixth of the time.

    The threshold is the whole process's, so simulations are to run one after the other.
    """
    usual = gc.get_threshold()
    gc.set_threshold(max(YOUNG, usual[0]) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _limits(machine: Machine, stages: int, max_model_len: int) -> Limits:
    """The share of one of the batches that are under way in a pipeline."""
    seats = max(1, machine.max_num_seqs // stages)
    return Limits(
        num_slabs=max(1, machine.kv_tokens // CHUNK_TOKENS // stages),
        max_model_len=max_model_len,
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, machine.max_num_batched_tokens),
        chunked_prefill=machine.chunked_prefill,
        max_waiting=1 << 40,
        max_waiting_tokens=1 << 50,
        saturation_tokens=machine.saturation_tokens,
        tpot_s=machine.tpot_s,
    )


def _check(deployment: Deployment) -> None:
    pools, machines = deployment.placement.pools, deployment.machines
    if len(pools) != len(machines):
        raise ConfigError(
            f"{len(pools)} pools and {len(machines)} kinds of machines",
            "each pool is of one kind",
            "give as many",
        )
    roles = {pool.role for pool in pools if pool.count > 0}
    if not roles or len(roles & {PREFILL, DECODE}) == 1:
        raise ConfigError(
            f"{deployment.placement or 'an empty placement'} serves nothing",
            "one pool reads prompts and another writes answers, or one does both",
            "add the pool that is missing",
        )
    if deployment.cores < 1:
        raise ConfigError(f"{deployment.cores} cores", "there is at least one", "give a positive number")
    if deployment.cells < 1 or not isfinite(deployment.token_bytes):
        raise ConfigError(f"{deployment.cells} cells", "there is at least one", "give a positive number")
