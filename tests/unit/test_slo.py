"""SLOs: who has which, and who meets it."""

from __future__ import annotations

import math

import pytest

from diptych.slo import DEFAULT_ATTAINMENT, Slo, slo_for, strictest_slo

CHAT, OTHERS = Slo(0.3, 0.05), Slo(1.0, 0.1, 0.8)


def test_a_kind_has_its_own_slo_else_the_default() -> None:
    slos = {"chat": CHAT, "": OTHERS}
    assert (slo_for(slos, "chat"), slo_for(slos, "batch"), slo_for(slos, "")) == (CHAT, OTHERS, OTHERS)


def test_a_kind_without_any_slo_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(KeyError):
        slo_for({"chat": CHAT}, "batch")


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "met"),
    [
        (0.3, 0.05, True),
        (0.31, 0.05, False),
        (0.3, 0.051, False),
        (0.3, None, True),
        (None, 0.051, False),
        (None, None, True),
        (math.inf, 0.0, False),
    ],
)
def test_both_limits_have_to_be_met_and_a_time_that_is_not_there_meets_its_limit(
    ttft_s: float | None, tpot_s: float | None, met: bool
) -> None:
    assert CHAT.is_met(ttft_s, tpot_s) is met


def test_flags_that_are_not_given_are_no_limits() -> None:
    slo = Slo.from_ms(None, 50.0)
    assert slo == Slo(math.inf, 0.05, DEFAULT_ATTAINMENT)
    assert slo.limits_s() == {"ttft": None, "tpot": 0.05} and slo.is_met(1e9, 0.05)


def test_the_strictest_has_the_lowest_limits_and_the_highest_attainment() -> None:
    assert strictest_slo([CHAT, OTHERS, Slo(2.0, 0.01, 0.5)]) == Slo(0.3, 0.01, 0.9)
