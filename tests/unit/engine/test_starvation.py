"""Long prompts do not starve short ones, nor short ones long ones: in virtual time, over the real scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from diptych.request import Tenancy
from engine.scheduling import saturation
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.slab_ledger import SlabLedger
from tests.unit.engine.fakes import sampling, sequence

SLABS = 4000
SECONDS = 25.0

# What a step costs, about as the embedded model does.
STEP_S, TOKEN_S, ROW_S = 1e-3, 1.1e-4, 2e-4
L_M = saturation.saturation_length([(tokens, STEP_S + TOKEN_S * tokens) for tokens in (16, 32, 64, 128, 256)])


@dataclass(frozen=True)
class Arrival:
    at_s: float
    seq: Sequence


@dataclass
class Played:
    """Time to the first token of each, when each ended, and the steps in which somebody decoded."""

    first: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    steps_s: list[float] = field(default_factory=list)

    def p99(self, name: str) -> float:
        """Of the times to the first token of those whose names have `name` in them."""
        taken = sorted(seconds for key, seconds in self.first.items() if name in key)
        return taken[int(0.99 * (len(taken) - 1))]


def play(arrivals: list[Arrival], **limits: object) -> Played:
    """Serve them all."""
    settings: dict[str, object] = {"max_num_seqs": 64, "max_waiting": 10_000} | limits
    book = Scheduler(EngineLimits(SLABS, 8192, **settings))  # type: ignore[arg-type]
    stock = KvAllocator(SlabLedger(SLABS))
    todo, now_s = sorted(arrivals, key=lambda arrival: arrival.at_s), 0.0
    played = Played()
    while todo or len(book):
        if not len(book):
            now_s = max(now_s, todo[0].at_s)
        while todo and todo[0].at_s <= now_s:
            book.add(todo[0].seq, todo[0].at_s)
            todo.pop(0)
        plan = book.schedule(stock)
        for key in plan.admitted:
            book.start(key, now_s)
        for key, count in plan.grow:
            book.running[key].slabs += stock.allocate(key, count)
        work = [(key, 1) for key in plan.decode] + [(part.key, part.count) for part in plan.prefill]
        tokens = sum(part.count for part in plan.prefill)
        cost_s = STEP_S + TOKEN_S * tokens + ROW_S * len(plan.decode)
        now_s += cost_s
        book.record_step(len(plan.decode), tokens, cost_s)
        if plan.decode:
            played.steps_s.append(cost_s)
        for key, count in work:
            seq = book.running[key]
            seq.computed += count
            book.token_counter.charge_tokens(seq.tenancy.tenant, count)
            if seq.pending == 0:
                seq.output.append(0)
                played.first.setdefault(seq.id, now_s - seq.arrived_s)
                if seq.hold_kv or len(seq.output) >= seq.sampling.max_tokens:
                    played.ended[seq.id] = now_s
                    book.remove(key)
                    stock.release(key)
    return played


def shorts(per_s: float, tenant: str = "", hold_kv: bool = True, seed: int = 7) -> list[Arrival]:
    draw, at_s = random.Random(seed), 0.0
    arrivals: list[Arrival] = []
    while (at_s := at_s + draw.expovariate(per_s)) < SECONDS:
        name = f"short{len(arrivals)}{tenant}"
        seq = sequence(
            name, draw.randint(20, 100), sampling(16), hold_kv=hold_kv, root=b"", tenancy=Tenancy(tenant)
        )
        arrivals.append(Arrival(at_s, seq))
    return arrivals


def longs(per_s: float, tenant: str = "", hold_kv: bool = True, tokens: int = 2000) -> list[Arrival]:
    return [
        Arrival(
            0.5 + i / per_s,
            sequence(f"long{i}", tokens, sampling(16), hold_kv=hold_kv, root=b"", tenancy=Tenancy(tenant)),
        )
        for i in range(int(SECONDS * per_s))
    ]


@pytest.mark.parametrize("per_s", [5.0, 10.0, 20.0, 40.0])
def test_a_long_prompt_every_second_does_not_starve_short_ones(per_s: float) -> None:
    alone = play(shorts(per_s), saturation_tokens=L_M)
    beside = play(shorts(per_s) + longs(1.0), saturation_tokens=L_M)
    assert beside.p99("short") <= 2 * alone.p99("short")
    assert len(beside.ended) == len(alone.ended) + int(SECONDS)
    # A long one is not much slower than what the short ones leave of the machine.
    left = 1 - per_s * 60 * TOKEN_S
    assert beside.p99("long") <= 2 * 2000 * TOKEN_S / left


def test_a_flood_of_short_prompts_does_not_starve_a_long_one() -> None:
    """More arrives than can be served: the queue of short ones grows without end, long ones come through."""
    played = play(shorts(250.0) + longs(0.1), saturation_tokens=L_M)
    queued_s = max(seconds for name, seconds in played.first.items() if name.startswith("short"))
    assert queued_s > 10
    assert played.first["long0"] < 3 and played.p99("long") < queued_s


# An arrival waits for the step that runs, which is of L_m tokens: the larger that is, the longer.
@pytest.mark.parametrize(("step_tokens", "factor"), [(64, 2.5), (L_M, 2.75)])
def test_a_flood_of_one_tenant_hardly_touches_another(step_tokens: int, factor: float) -> None:
    alone = play(shorts(10.0, "quiet"), saturation_tokens=step_tokens)
    beside = play(shorts(10.0, "quiet") + longs(8.0, "loud"), saturation_tokens=step_tokens)
    assert beside.p99("quiet") <= factor * alone.p99("quiet")
    assert beside.p99("long") > 1.0  # the loud one has asked for more than there is


def prompts(per_s: float, tenant: str) -> list[Arrival]:
    """Prompts a little longer than a step, at even intervals."""
    draw = random.Random(tenant)
    return [
        Arrival(
            0.05 + i / per_s + draw.uniform(0, 0.01),
            sequence(
                f"{tenant}{i}",
                draw.randint(130, 142),
                sampling(16),
                hold_kv=True,
                root=b"",
                tenancy=Tenancy(tenant),
            ),
        )
        for i in range(int(SECONDS * per_s))
    ]


def test_a_flood_of_prompts_like_its_own_delays_a_tenant_by_a_step() -> None:
    alone = play(prompts(1.0, "quiet"), saturation_tokens=128)
    beside = play(prompts(1.0, "quiet") + prompts(100.0, "loud"), saturation_tokens=128)
    step_s = STEP_S + 128 * TOKEN_S
    # The step that runs, and that its last few tokens share.
    assert beside.p99("quiet") <= alone.p99("quiet") + 2 * step_s
    assert beside.p99("loud") > 1.0  # the loud one has asked for more than there is


def test_prompts_read_beside_decoding_keep_its_pace() -> None:
    """Colocated: a step in which somebody decodes takes hardly longer than was asked; prompts are read."""
    bound_s, both = 20e-3, shorts(5.0, hold_kv=False) + longs(1.0, hold_kv=False)
    free, bound = play(both), play(shorts(5.0, hold_kv=False) + longs(1.0, hold_kv=False), tpot_s=bound_s)
    assert len(free.ended) == len(bound.ended) == len(both)
    assert max(free.steps_s) > 2 * bound_s
    assert sorted(bound.steps_s)[int(0.99 * len(bound.steps_s))] <= 1.02 * bound_s
    assert bound.p99("long") <= 3 * free.p99("long")
