"""Options that cannot be, or would have no effect, are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from diptych.errors import ConfigError
from diptych.slo import Slo
from services.bench.options import BenchOptions


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"endpoint": "embeddings"}, "no endpoint"),
        ({"arrivals": "uniform"}, "arrivals"),
        ({"rate": 0.0}, "above 0"),
        ({"rates": "1,-2"}, "above 0"),
        ({"rates": "1,two"}, "list of numbers"),
        ({"rates": "1,2", "rate": 3.0}, "two ways"),
        ({"rates": "1,2", "search": True, "slo_ttft_ms": 1.0}, "two ways"),
        ({"search": True}, "nothing to search for"),
        ({"max_rate": 5.0}, "nothing is searched"),
        ({"width": 5.0}, "nothing is searched"),
        ({"arrivals": "gamma"}, "go together"),
        ({"cv": 2.0}, "go together"),
        ({"arrivals": "replay", "seeds": 2}, "no seeds"),
        ({"arrivals": "replay", "fit": True}, "--fit has no effect"),
        ({"duration_s": 9.0, "num_requests": 5}, "--duration has no effect"),
        ({"attainment": 90.0}, "share"),
        ({"save": Path("/no/where/rows")}, "--save cannot be written"),
        ({"plot": Path("/no/where/plot.png")}, "--plot cannot be written"),
        ({"plot": Path(".")}, "--plot cannot be written"),
        ({"plot": Path("/tmp")}, "--plot cannot be written"),
        ({"save": Path("/tmp")}, "--save cannot be written"),
        ({"duration_s": math.inf}, "--duration is a number"),
        ({"shrink": math.nan}, "--shrink is a number"),
        ({"warmup_s": math.nan}, "--warmup is a number"),
        ({"slo_ttft_ms": 0.0}, "--slo-ttft-ms must be greater than 0 and finite"),
        ({"slo_tpot_ms": math.inf, "search": True}, "--slo-tpot-ms must be greater than 0 and finite"),
        ({"cv": math.inf, "arrivals": "gamma"}, "--cv is a number"),
        ({"api_key": "ключ"}, "no bearer key"),
    ],
)
def test_refusals_say_what_to_do(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        BenchOptions(**given)
    assert caught.value.why and caught.value.fix and len(caught.value.lines()) <= 6


def test_what_is_read() -> None:
    options = BenchOptions(rates="1, 2.5", slo_ttft_ms=250.0, attainment=0.95)
    assert options.rate_list == (1.0, 2.5)
    assert options.slo == Slo(0.25, math.inf, 0.95)


def test_a_run_is_a_minute_of_what_is_drawn_and_all_of_what_is_replayed() -> None:
    assert BenchOptions().seconds == BenchOptions().report_fields()["duration_s"] == 60.0
    assert BenchOptions(duration_s=5.0).seconds == 5.0
    assert BenchOptions(num_requests=9).seconds is None
    assert BenchOptions(arrivals="replay").seconds is None
    assert BenchOptions(arrivals="replay", duration_s=5.0).report_fields()["duration_s"] == 5.0


def test_a_report_has_no_secrets() -> None:
    fields = BenchOptions(api_key="secret", url="http://h").report_fields()
    assert fields["workload"] == "sharegpt" and "secret" not in str(fields) and "url" not in fields
