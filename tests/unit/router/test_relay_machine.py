"""The random stories of `stories.py`: Hypothesis tells them, and remembers those that went wrong; a plain driver with
fixed seeds tells very many more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from diptych.messages import Abort, Admit, Drain, Fetch, Staging, SwitchRole
from router.effects import (
    AttemptBegan,
    AttemptRetried,
    FailRequest,
    FinishRequest,
    KvMoved,
    OverdraftSettled,
    RequestCancelled,
    RequestQuarantined,
    RequestQueued,
)
from router.effects import PrefilledLocally as Locally
from tests.unit.router.relay_machines import (
    CODES,
    DECODE,
    ENDED,
    FINISH,
    MAX_TICK_S,
    PREFILL,
    SILENT,
    WORKER_TROUBLES,
    ColocatedMachine,
    LimitedRelayMachine,
    LocalPrefillMachine,
    OverdrawingMachine,
    RelayMachine,
    WildRelayMachine,
)

NORMAL = settings(
    max_examples=20,
    stateful_step_count=100,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a hundred steps takes minutes
    suppress_health_check=list(HealthCheck),
)

TestOrderly = RelayMachine.TestCase
TestLocal = LocalPrefillMachine.TestCase
TestColocated = ColocatedMachine.TestCase
TestWild = WildRelayMachine.TestCase
TestLimited = LimitedRelayMachine.TestCase
TestOverdrawing = OverdrawingMachine.TestCase
TestOrderly.settings = TestLocal.settings = TestColocated.settings = TestWild.settings = NORMAL
TestLimited.settings = TestOverdrawing.settings = NORMAL


# ---- the same stories, played fast

STEPS_PER_STORY = 250
EVERYWHERE = (
    RequestQueued,
    AttemptBegan,
    AttemptRetried,
    FinishRequest,
    FailRequest,
    RequestCancelled,
    Abort,
    Drain,
    SwitchRole,
)
Words = dict[str, Any]
REPLAYED: list[
    tuple[int, str, str, Callable[[random.Random], Words]]
] = [  # weight, rule, what it needs, its arguments
    (
        3,
        "arrive",
        "",
        lambda r: {"prompt": r.randint(1, 600), "limit_s": r.choice([2.0, 99.0, 999.0]), "pinned": 0},
    ),
    (1, "arrive", "", lambda r: {"prompt": r.randint(1, 9), "limit_s": 9.0, "pinned": 1}),
    (1, "leave", "live", lambda r: {"index": r.getrandbits(16), "stops": r.random() < 0.5}),
    (12, "work", "holding", lambda r: _work(r)),
    (
        1,
        "fail",
        "holding",
        lambda r: {"index": r.getrandbits(16), "which": r.getrandbits(16), "code": r.choice(CODES)},
    ),
    (6, "hear", "talking", lambda r: {"index": r.getrandbits(16), "count": r.randint(1, 4)}),
    (2, "trouble", "", lambda r: _trouble(r)),
    (
        1,
        "command",
        "",
        lambda r: {"name": r.choice(PREFILL + DECODE), "what": r.choice(["drain", "switch_role", ""])},
    ),
    (1, "end_of_drain", "drained", lambda r: {"index": r.getrandbits(16)}),
    (1, "recover", "wayless", lambda r: {"ended": r.choice(ENDED)}),
    (1, "ghost", "graves", lambda r: {"index": r.getrandbits(16)}),
    (3, "tick", "", lambda r: {"seconds": r.uniform(0.05, MAX_TICK_S), "silent": r.choice(SILENT)}),
]


def _work(r: random.Random) -> Words:
    which = {"index": r.getrandbits(16), "which": r.getrandbits(16)}
    return which | {"finish": r.choice(FINISH), "count": r.randint(1, 3), "delivered": r.random() < 0.5}


def _trouble(r: random.Random) -> Words:
    return {"name": r.choice(PREFILL + DECODE), "what": r.choice(WORKER_TROUBLES), "ended": r.choice(ENDED)}


def tell(story: RelayMachine, r: random.Random) -> int:
    """One story of so many steps; returns how many there were."""
    needs: dict[str, Callable[[], object]] = {
        "": lambda: True,
        "live": lambda: story.world.relay.live,
        "holding": story.holding,
        "talking": story.talking,
        "drained": story.drained,
        "wayless": lambda: len(story.world.relay.find_pairs()) < (4 if story.split else 2),
        "graves": lambda: story.graves,
    }
    weights = [weight for weight, *_ in REPLAYED]
    steps = 0
    for _, name, need, words in r.choices(REPLAYED, weights, k=STEPS_PER_STORY):
        if needs[need]():
            getattr(story, name)(**words(r))
            story.check()
            steps += 1
    story.teardown()
    return steps


@pytest.mark.parametrize("wanted", [8_000, pytest.param(33_400, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [RelayMachine, LocalPrefillMachine, ColocatedMachine, LimitedRelayMachine, OverdrawingMachine]
)
def test_very_many_steps(kind: type[RelayMachine], wanted: int) -> None:
    steps, seed, kept_back, seen, often = 0, 0, 0, Counter[type](), wanted // 400
    deferred = cut = 0
    while steps < wanted:
        story = kind()
        steps += tell(story, random.Random(f"{kind.__name__} {seed}"))
        seed, seen, kept_back = seed + 1, seen + story.world.seen, kept_back + story.kept_back
        deferred, ends = deferred + story.world.num_deferred, story.world.terminal.values()
        cut += sum(isinstance(end, FailRequest) and end.failure.code == "not_continuable" for end in ends)
    assert min(seen[known] for known in EVERYWHERE) > often, seen
    assert not kind.split or min(seen[known] for known in (Admit, Staging, Fetch, KvMoved)) > often, seen
    assert kind.split == (kept_back > often)
    assert kind.overdraft == (seen[OverdraftSettled] > 0), seen
    assert (kind is LimitedRelayMachine) == (min(deferred, cut) > often) and (not kind.traits or not cut)
    assert (kind.local_prefill == "fallback") == (seen[Locally] > often) and seen[RequestQuarantined], seen
