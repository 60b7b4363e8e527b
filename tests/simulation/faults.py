"""Seeded schedules: who asks for what and when, and what breaks meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from msgspec import structs

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.request import BULK_PRIORITY, TRAITS, Pooling, SamplingParams, Tenancy
from tests.simulation.gateway import VirtualClient
from tests.simulation.process import MODEL_LEN
from tests.simulation.virtual_model import POISON
from tests.simulation.world import PATIENCE_S, VirtualWorld, random_sampling


@dataclass(frozen=True, slots=True)
class ClientMix:
    """Requests per second, and how likely a client has little time, leaves, brings what kills a worker, lets heads
    drop KV, asks for bulk work, or for what is pooled.
    """

    rate: float = 12.0
    hurried: float = 0.05
    leaving: float = 0.1
    poisonous: float = 0.0
    dropping: float = 0.0
    bulk: float = 0.0
    pooled: float = 0.0


class ClientLoad:
    """Asks, for as long as it is asked to. Prompts begin alike within a family, and tenants share nothing."""

    def __init__(self, world: VirtualWorld, rng: Random, crowd: ClientMix, until_s: float) -> None:
        self.world, self.rng, self.crowd, self.until_s = world, rng, crowd, until_s
        self.families = [[rng.randrange(POISON) for _ in range(MODEL_LEN)] for _ in range(2)]
        self._next()

    def _next(self) -> None:
        if self.world.agenda.now_s < self.until_s:
            self.world.agenda.schedule_after(self.rng.expovariate(self.crowd.rate), self._ask, "arrival")

    def _ask(self) -> None:
        if self.world.agenda.now_s >= self.until_s:
            return
        client = self.one()
        if self.rng.random() < self.crowd.leaving:
            self.world.agenda.schedule_after(
                self.rng.expovariate(4.0), lambda: self.world.leave(client), "departure"
            )
        self._next()

    def one(self) -> VirtualClient:
        """One more request."""
        rng = self.rng
        length = rng.choice([3, 20, 63, 64, 65, 100, 128, 150, 192, 230])
        common = rng.choice([0, 0, 64, 128, 100])
        prompt = rng.choice(self.families)[: min(length, common)]
        prompt += [rng.randrange(POISON) for _ in range(length - len(prompt))]
        if rng.random() < self.crowd.poisonous:
            prompt[rng.randrange(len(prompt))] = POISON
        tenant = rng.choice("abc")
        origin = Tenancy(tenant, rng.choice(["", tenant]), rng.choice([0, 0, 0, 1, -1]))
        if self.crowd.bulk and rng.random() < self.crowd.bulk:
            origin = Tenancy(tenant, origin.scope, BULK_PRIORITY)
        patience_s = rng.choice([0.05, 0.3, 1.0]) if rng.random() < self.crowd.hurried else PATIENCE_S
        asked = random_sampling(rng, rng.choice([1, 2, 8, 30, 60, 80]))
        if self.world.traits != TRAITS:
            # All needs, each alone and with others.
            asked = structs.replace(
                asked,
                temperature=rng.choice([0.0, 1.0]),
                frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            )
        classes = self.world.kv_class.split(",")
        # One in three leaves the choice to the workers.
        kv_class = rng.choice([None, *classes]) if len(classes) > 1 else None
        keep = KEEP_ALL
        if self.crowd.dropping and rng.random() < self.crowd.dropping:
            keep = KeepSpec(rng.choice([0.95, 0.5]), rng.choice([0, length // CHUNK_TOKENS]) * CHUNK_TOKENS)
        if self.crowd.pooled and rng.random() < self.crowd.pooled:
            asked, keep = SamplingParams(0, 0, temperature=0.0, pooling=Pooling("last")), KEEP_ALL
        return self.world.ask(prompt, asked, origin, patience_s, kv_class, keep)


InjectFault = Callable[[VirtualWorld, Random], None]


def _pick_worker(world: VirtualWorld, rng: Random) -> str:
    return rng.choice(sorted(world.posts))


def _pick_pair(world: VirtualWorld, rng: Random) -> tuple[str, str]:
    names = sorted(world.posts)
    sources = [name for name in names if name.startswith("prefill")] or names
    return rng.choice(sources), rng.choice([name for name in names if name.startswith("decode")])


FAULTS: dict[str, InjectFault] = {
    "kill": lambda world, rng: world.kill(_pick_worker(world, rng)),
    "stop": lambda world, rng: world.stop(_pick_worker(world, rng), rng.choice([0.3, 1.0, 6.0, 14.0])),
    "cut": lambda world, rng: world.cut(_pick_worker(world, rng), rng.choice([0.3, 1.0, 6.0, 14.0])),
    "slow": lambda world, rng: world.slow(_pick_worker(world, rng), rng.choice([0.01, 0.1, 0.4]), 2.0),
    "reset": lambda world, rng: world.reset(_pick_worker(world, rng)),
    "stall": lambda world, rng: world.stall(*_pick_pair(world, rng), rng.choice([0.5, 2.0, 5.0])),
    "throttle": lambda world, rng: world.throttle(*_pick_pair(world, rng), rng.choice([2e4, 2e5]), 3.0),
    "corrupt": lambda world, rng: world.corrupt(*_pick_pair(world, rng), rng.choice([0.02, 0.5, 1.0]), 2.0),
    "drain": lambda world, rng: world.drain(_pick_worker(world, rng)),
    "command": lambda world, rng: world.command(_pick_worker(world, rng)),
    "switch_role": lambda world, rng: world.switch_role(_pick_worker(world, rng)),
    "stop gateway": lambda world, rng: world.stop_gateway(rng.choice([0.3, 2.0, 8.0, 30.0])),
    "block gateway": lambda world, rng: world.block_gateway(rng.choice([0.3, 2.0, 8.0, 30.0])),
    "gateway": lambda world, rng: world.kill_gateway(rng.choice([0.2, 1.0, 3.0])),
}


class FaultStorm:
    """Blows at random moments, `rate` of them per second, of these `kinds`."""

    def __init__(
        self, world: VirtualWorld, rng: Random, rate: float, until_s: float, kinds: Sequence[str]
    ) -> None:
        self.world, self.rng, self.rate, self.until_s, self.kinds = world, rng, rate, until_s, kinds
        self._next()

    def _next(self) -> None:
        if self.world.agenda.now_s < self.until_s:
            self.world.agenda.schedule_after(self.rng.expovariate(self.rate), self._strike, "blow")

    def _strike(self) -> None:
        if self.world.agenda.now_s < self.until_s:
            FAULTS[self.rng.choice(list(self.kinds))](self.world, self.rng)
            self._next()


class FaultSequence(FaultStorm):
    """One blow at a time: the next falls when everybody is back."""

    def _strike(self) -> None:
        if self.world.agenda.now_s < self.until_s:
            FAULTS[self.rng.choice(list(self.kinds))](self.world, self.rng)
            self._watch()

    def _watch(self) -> None:
        if self.world.whole and not self.world.hurt:
            self._next()
        else:
            self.world.agenda.schedule_after(0.1, self._watch, "watch")
