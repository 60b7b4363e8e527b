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

from diptych.messages import Abort, Admit, Drain, Fetch, Staging, Turn
from router.effects import Began, Cancelled, Fail, Finish, Moved, Quarantined, Queued, Retried
from router.effects import Local as Locally
from tests.unit.router.stories import (
    CODES,
    DECODE,
    ENDED,
    FINISH,
    MAX_TICK_S,
    PREFILL,
    SILENT,
    TROUBLES,
    Colocated,
    Local,
    Orderly,
    Wild,
)

NORMAL = settings(
    max_examples=20,
    stateful_step_count=100,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a hundred steps takes minutes
    suppress_health_check=list(HealthCheck),
)

TestOrderly = Orderly.TestCase
TestLocal = Local.TestCase
TestColocated = Colocated.TestCase
TestWild = Wild.TestCase
TestOrderly.settings = TestLocal.settings = TestColocated.settings = TestWild.settings = NORMAL


# ---- the same stories, told fast

STEPS_PER_STORY = 250
EVERYWHERE = (Queued, Began, Retried, Finish, Fail, Cancelled, Abort, Drain, Turn)
Words = dict[str, Any]
TOLD: list[
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
        lambda r: {"name": r.choice(PREFILL + DECODE), "what": r.choice(["drain", "turn", ""])},
    ),
    (1, "end_of_drain", "drained", lambda r: {"index": r.getrandbits(16)}),
    (1, "recover", "wayless", lambda r: {"ended": r.choice(ENDED)}),
    (1, "ghost", "graves", lambda r: {"index": r.getrandbits(16)}),
    (3, "tick", "", lambda r: {"seconds": r.uniform(0.05, MAX_TICK_S), "silent": r.choice(SILENT)}),
]


def _work(r: random.Random) -> Words:
    which = {"index": r.getrandbits(16), "which": r.getrandbits(16)}
    return which | {"finish": r.choice(FINISH), "count": r.randint(1, 3), "heard": r.random() < 0.5}


def _trouble(r: random.Random) -> Words:
    return {"name": r.choice(PREFILL + DECODE), "what": r.choice(TROUBLES), "ended": r.choice(ENDED)}


def tell(story: Orderly, r: random.Random) -> int:
    """One story of so many steps; returns how many there were."""
    needs: dict[str, Callable[[], object]] = {
        "": lambda: True,
        "live": lambda: story.world.relay.live,
        "holding": story.holding,
        "talking": story.talking,
        "drained": story.drained,
        "wayless": lambda: len(story.world.relay.ways()) < (4 if story.split else 2),
        "graves": lambda: story.graves,
    }
    weights = [weight for weight, *_ in TOLD]
    steps = 0
    for _, name, need, words in r.choices(TOLD, weights, k=STEPS_PER_STORY):
        if needs[need]():
            getattr(story, name)(**words(r))
            story.check()
            steps += 1
    story.teardown()
    return steps


@pytest.mark.parametrize("kind", [Orderly, Local, Colocated])
def test_very_many_steps(kind: type[Orderly]) -> None:
    steps, seed, kept_back, seen = 0, 0, 0, Counter[type]()
    while steps < 33_400:
        story = kind()
        steps += tell(story, random.Random(f"{kind.__name__} {seed}"))
        seed, seen, kept_back = seed + 1, seen + story.world.seen, kept_back + story.kept_back
    assert min(seen[known] for known in EVERYWHERE) > 100, seen
    assert not kind.split or min(seen[known] for known in (Admit, Staging, Fetch, Moved)) > 100, seen
    assert kind.split == (kept_back > 100)
    assert (kind is Local) == (seen[Locally] > 100) and seen[Quarantined], seen
