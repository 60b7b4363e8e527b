"""SLOs: who has which, and who meets it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from diptych.errors import ConfigError
from diptych.slo import DEFAULT_ATTAINMENT, Slo, read_limit_s, read_slo, slo_for, strictest_slo
from diptych.specs import GatewaySpec, WorkerSpec

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
    slo = read_slo(None, 50.0)
    assert slo == Slo(math.inf, 0.05, DEFAULT_ATTAINMENT) and slo.has_limits
    assert slo.limits_s() == {"ttft": None, "tpot": 0.05} and slo.is_met(1e9, 0.05)
    assert read_slo(None, None) == Slo() and not Slo().has_limits
    assert read_limit_s("--tpot-budget-ms", None) == math.inf


@pytest.mark.parametrize("value", [0.0, -3.0, math.inf, math.nan])
@pytest.mark.parametrize("flag", ["--slo-ttft-ms", "--slo-tpot-ms"])
def test_a_limit_that_cannot_be_is_refused_with_its_flag(flag: str, value: float) -> None:
    limits_ms = (value, 50.0) if flag == "--slo-ttft-ms" else (50.0, value)
    with pytest.raises(ConfigError, match=f"{flag} must be greater than 0 and finite") as caught:
        read_slo(*limits_ms)
    assert f"(got {value:g})" in caught.value.what and f"{flag} 500" in caught.value.fix
    assert caught.value.why and len(caught.value.lines()) <= 6


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, 90.0, math.nan])
def test_an_attainment_is_a_share(share: float) -> None:
    assert read_slo(1.0, 1.0, 1.0).attainment == 1.0
    with pytest.raises(ConfigError, match="--attainment must be a share"):
        read_slo(1.0, 1.0, share)


def test_specifications_give_slos_in_seconds_and_keep_milliseconds_in_json() -> None:
    places: dict[str, Any] = {"keys_dir": "keys", "model": "tiny"}
    gateway = GatewaySpec(
        host="",
        port=0,
        channel="",
        served_names=("tiny",),
        num_prefill=1,
        num_decode=1,
        slo_tpot_ms=50.0,
        **places,
    )
    again = msgspec.json.decode(msgspec.json.encode(gateway), type=GatewaySpec)
    assert again.slo == Slo(math.inf, 0.05) and again.slo_ttft_ms is None
    worker = WorkerSpec(worker="decode-0", role="decode", gateway="", bulk_tpot_ms=40.0, **places)
    assert (worker.tpot_s, worker.bulk_tpot_s) == (None, 0.04)


def test_the_strictest_has_the_lowest_limits_and_the_highest_attainment() -> None:
    assert strictest_slo([CHAT, OTHERS, Slo(2.0, 0.01, 0.5)]) == Slo(0.3, 0.01, 0.9)
