"""Whether the workers of a deployment yield in prompts, by its settings and the machine's cores."""

from __future__ import annotations

import os

import pytest

from diptych.config.load import load_config
from services.cli.serve.specs import prefill_slice_ms
from services.worker.prefill_priority import YIELDING_SLICE_MS

REPLANNED = {"replan": True, "slo_ttft_ms": "500", "slo_tpot_ms": "50", "replan_budget": "6"}


def find_slice_ms(command: str = "serve", /, **given: object) -> float:
    return prefill_slice_ms(load_config(command, {"prefill_yields": "auto", **given}, {}).config)


@pytest.mark.parametrize(
    ("given", "cores", "slice_ms"),
    [
        ({}, 2, YIELDING_SLICE_MS),
        ({}, 3, 0),
        ({"decode": "2"}, 3, YIELDING_SLICE_MS),
        (REPLANNED, 6, YIELDING_SLICE_MS),
        (REPLANNED, 7, 0),
        ({"prefill_yields": "never"}, 2, 0),
        ({"prefill_yields": "always"}, 64, YIELDING_SLICE_MS),
        ({"threads": "2"}, 2, 0),
        ({"prefill_tp": "2"}, 2, 0),
        ({"device": "emulated"}, 2, 0),
        ({"ray_address": "auto"}, 2, 0),
    ],
)
def test_prompts_yield_where_workers_and_gateway_share_cores(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, object], cores: int, slice_ms: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert find_slice_ms(**given) == slice_ms


def test_prompts_do_not_yield_unless_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert prefill_slice_ms(load_config("serve", {}, {}).config) == 0


def test_a_worker_by_itself_yields_to_the_workers_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    alone = {"role": "prefill", "channel": "tcp://127.0.0.1:1", "keys_dir": "/keys"}
    assert find_slice_ms("worker", **alone) == 0
    assert find_slice_ms("worker", **alone, host_workers="2") == 0
    assert find_slice_ms("worker", **alone, host_workers="3") == YIELDING_SLICE_MS
