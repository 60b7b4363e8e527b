"""The product and the simulator drive the same code, and neither decides by itself what that code decides."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

# Of the hand-off's admission (`engine.scheduling.kv_admission`): what both must call, and what only it may.
ADMISSION_CALLS = {"enqueue", "find_expecting", "find_request", "expired", "departures", "withdraw"} | {
    *("must_abort", "commit", "finish", "update_sequence"),
}
ADMISSION_ONLY = {"sorted", "sort", "priority", "served_tokens", "enter_tenant", "leave_tenant", "admits"} | {
    *("count_cached", "count_unheld", "attach_prefix", "publish", "max_waiting", "max_slabs", "RemainingKv"),
}


def names_in(path: str) -> set[str]:
    """All names and attributes that a file uses."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in nodes if isinstance(node, ast.Name)}


@pytest.mark.parametrize("path", ["decode_worker/worker.py", "planner/sim/exact/handoff.py"])
def test_who_departs_is_decided_by_the_admission_alone(path: str) -> None:
    used = names_in(path)
    assert {"KvAdmission", "perform_departures"} | ADMISSION_CALLS <= used, "it drives the admission"
    assert not used & ADMISSION_ONLY, "it decides by itself"


# Of what a step changes (`engine.sequence_table`).
TABLE_CALLS = {"plan_step", "make_room", "preempt", "take_slabs", "start", "select_work", "record_steps"} | {
    *("advance", "finish_reason", "settle_output", "drop", "keys_of", "first_output_seconds"),
}
TABLE_ONLY = {
    "next_plan",
    "schedule",
    "victim_for",
    "attach_prefix",
    "attachable_keys",
    "publish",
    "shared",
} | {
    *(
        "charge_tokens",
        "remove",
        "max_model_len",
        "started_s",
        "cached",
        "grow",
        "admitted",
        "prefill",
        "decode",
    ),
}


def test_what_a_step_changes_is_decided_by_the_table_alone() -> None:
    product = names_in("engine/loop.py") | names_in("engine/outputs.py")
    simulator = names_in("planner/sim/exact/engine.py")
    assert product >= TABLE_CALLS, "the engine drives the table"
    assert simulator | names_in("planner/sim/exact/worker.py") >= TABLE_CALLS, "the simulator drives it, too"
    # The engine hands the number of cached chunks of an admission on to the host tier.
    assert not product & TABLE_ONLY - {"cached"} and not simulator & TABLE_ONLY, (
        "one of them decides by itself"
    )
