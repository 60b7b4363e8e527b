"""Which of two KV classes a request gets, by what binds and what did before: a table, and a story in virtual time."""

from __future__ import annotations

import pytest

from router.routing.class_choice import (
    LINK,
    LINK_BINDS,
    LINK_IS_FREE,
    POOL,
    POOL_BINDS,
    POOL_IS_FREE,
    PREFIX,
    QUALITY,
    RETURN_S,
    ClassDecision,
    ClassEstimate,
    ClassMode,
    choose_class,
    next_mode,
)

BETTER, LIGHTER = "raw", "nuq4-1%.g128@aaaaaaaaaaaaaaaa"
NOW_S = 100.0


def better(pool_share: float = 0.1, prefill_s: float = 1.0, move_s: float = 0.1) -> ClassEstimate:
    return ClassEstimate(BETTER, pool_share, prefill_s, move_s)


def lighter(pool_share: float = 0.1, prefill_s: float = 1.0, move_s: float = 0.02) -> ClassEstimate:
    return ClassEstimate(LIGHTER, pool_share, prefill_s, move_s)


FREE, BY_POOL, BY_LINK = ClassMode(), ClassMode(POOL, 90.0, 95.0), ClassMode(LINK, 90.0, 95.0)
ONLY_RAW_FITS = [(LIGHTER, POOL), (BETTER, QUALITY)]
TABLE = {
    "nothing binds": (better(), lighter(), FREE, [(BETTER, QUALITY), (LIGHTER, POOL)]),
    "the pool binds": (better(pool_share=0.95), lighter(), FREE, ONLY_RAW_FITS),
    "the pool is closed": (better(pool_share=float("inf")), lighter(), FREE, ONLY_RAW_FITS),
    "the link binds": (better(move_s=3.0), lighter(move_s=0.5), FREE, [(LIGHTER, LINK)]),
    "both bind": (better(pool_share=0.95, move_s=3.0), lighter(), FREE, [(LIGHTER, LINK)]),
    "a long move hides behind a long prefill": (
        better(prefill_s=4.0, move_s=3.0),
        lighter(prefill_s=4.0),
        FREE,
        [(BETTER, QUALITY), (LIGHTER, POOL)],
    ),
    "a moment is not noticed": (
        better(prefill_s=0.01, move_s=0.04),
        lighter(prefill_s=0.01),
        FREE,
        [(BETTER, QUALITY), (LIGHTER, POOL)],
    ),
    "it bound lately": (better(), lighter(), BY_LINK, [(LIGHTER, LINK)]),
    "the pool bound lately": (better(), lighter(), BY_POOL, ONLY_RAW_FITS),
    "the prompt is cached in the better class": (
        better(prefill_s=0.1, move_s=0.3),
        lighter(move_s=0.5),
        BY_LINK,
        [(BETTER, PREFIX), (LIGHTER, LINK)],
    ),
    "it is cached, but there is no room": (
        better(pool_share=0.95, prefill_s=0.1),
        lighter(),
        BY_POOL,
        ONLY_RAW_FITS,
    ),
    "it is cached, but the rest takes longer to move": (
        better(prefill_s=0.1, move_s=1.2),
        lighter(move_s=0.5),
        BY_LINK,
        [(LIGHTER, LINK)],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_table(case: str) -> None:
    heavy, light, mode, expected = TABLE[case]
    decisions, _ = choose_class(heavy, light, 0.05, mode, NOW_S)
    assert decisions == [ClassDecision(*one) for one in expected]


@pytest.mark.parametrize(
    ("estimate", "reason"),
    [
        (better(pool_share=POOL_BINDS), None),
        (better(pool_share=POOL_BINDS + 0.01), POOL),
        (better(prefill_s=1.0, move_s=LINK_BINDS * 1.5), None),
        (better(prefill_s=1.0, move_s=LINK_BINDS * 1.5 + 0.01), LINK),
        (better(prefill_s=0.0, move_s=0.0), None),
    ],
)
def test_bounds_of_binding(estimate: ClassEstimate, reason: str | None) -> None:
    assert next_mode(estimate, 0.5, FREE, NOW_S).reason == reason


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(FREE, ONLY_RAW_FITS), (BY_POOL, ONLY_RAW_FITS), (BY_LINK, [(LIGHTER, LINK)])],
)
def test_room_for_other_sequences_counts_for_this_request_only(
    mode: ClassMode, expected: list[tuple[str, str]]
) -> None:
    heavy = better(prefill_s=0.1, move_s=0.01)._replace(group_share=POOL_BINDS + 0.01)
    decisions, then = choose_class(heavy, lighter(), 0.05, mode, NOW_S)
    assert decisions == [ClassDecision(*one) for one in expected]
    assert (then.reason, then.near_s) == (mode.reason, mode.near_s)


def test_without_any_time_to_spare_every_move_binds() -> None:
    assert next_mode(better(prefill_s=0.0, move_s=0.001), 0.0, FREE, NOW_S).reason == LINK


@pytest.mark.parametrize(
    ("estimate", "is_near"),
    [
        (better(pool_share=POOL_IS_FREE), False),
        (better(pool_share=POOL_IS_FREE + 0.01), True),
        (better(move_s=LINK_IS_FREE), False),
        (better(move_s=LINK_IS_FREE + 0.01), True),
    ],
)
def test_what_is_near_binding_defers_the_return(estimate: ClassEstimate, is_near: bool) -> None:
    mode = next_mode(estimate, 0.0, BY_LINK, NOW_S)
    assert mode == (BY_LINK._replace(near_s=NOW_S) if is_near else BY_LINK)


def test_the_choice_changes_slowly() -> None:
    """Requests once a second; the link binds for a moment every 20 s, and then not any more."""
    mode, changes = ClassMode(), list[tuple[int, str | None]]()
    for second in range(200):
        binds = second < 100 and second % 20 == 10
        before, mode = mode.reason, next_mode(better(move_s=3.0 if binds else 0.1), 0.0, mode, float(second))
        if mode.reason != before:
            changes.append((second, mode.reason))
    assert changes == [(10, LINK), (90 + int(RETURN_S), None)], "at once there, and back only once"


def test_the_reason_is_the_latest_and_each_has_its_own_beginning() -> None:
    mode = next_mode(better(move_s=3.0), 0.0, ClassMode(), 1.0)
    mode = next_mode(better(move_s=3.0), 0.0, mode, 2.0)
    assert mode == ClassMode(LINK, 1.0, 2.0)
    assert next_mode(better(pool_share=1.0), 0.0, mode, 3.0) == ClassMode(POOL, 3.0, 3.0)
