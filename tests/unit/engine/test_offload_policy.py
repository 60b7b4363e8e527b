"""The policy of a block: its ranges, what it places where, and its text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.errors import ConfigError
from engine.offload.policy import BlockPolicy, names_shape, parse_policy
from engine.offload.sizes import BlockModel, check_caps, fit_policy, predict_needs, trim_policy

POLICY = BlockPolicy(rows=4, batches=3, prompt_tokens=64, output_tokens=16)


def test_shares_are_spread_evenly_and_rounded() -> None:
    policy = parse_policy("weights_in_memory=0.5, kv_in_memory=0.25, hidden_in_memory=0.34", POLICY)
    assert policy.resident_layers(8) == {1, 3, 5, 7}
    assert policy.kv_pairs_in_memory(4) == {(1, 0), (2, 1), (3, 2)}
    assert policy.hidden_batches_in_memory() == {2}
    assert POLICY.resident_layers(5) == set(range(5))
    assert parse_policy("weights_in_memory=0", POLICY).resident_layers(5) == set()


def test_text_overrides_what_it_names() -> None:
    policy = parse_policy("rows=16,weight_kind=int4,overlap=off,kv_codec=int4", POLICY)
    assert (policy.rows, policy.batches, policy.weight_kind, policy.overlap) == (16, 3, "int4", False)
    assert policy.kv_codec == "int4"
    assert parse_policy("", POLICY) == POLICY


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rows=0", "rows must be at least 1 (got 0)"),
        ("rows=many", "rows must be a whole number (got 'many')"),
        ("kv_in_memory=1.5", "kv_in_memory must be between 0 and 1 (got 1.5)"),
        ("kv_in_memory=nan", "kv_in_memory must be between 0 and 1 (got nan)"),
        ("overlap=maybe", "overlap must be on or off (got 'maybe')"),
        ("weight_kind=int3", "weight_kind must be exact or int4 (got int3)"),
        ("colour=red", "'colour=red' is not one of rows, "),
        ("rows", "'rows' is not one of rows, "),
    ],
)
def test_bad_text_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match="the policy of bulk work is wrong") as caught:
        parse_policy(text, POLICY)
    assert why in caught.value.why


def test_shares_need_a_shape() -> None:
    assert names_shape("rows=4,weights_in_memory=0.5") and names_shape("kv_codec=int4, batches=2")
    assert not names_shape("") and not names_shape("weight_kind=int4")
    with pytest.raises(ConfigError) as caught:
        names_shape("weight_kind=int4,kv_in_memory=0.5")
    assert "kv_in_memory has no effect without rows and batches" in caught.value.why


MODEL = BlockModel([1 << 20] * 8, 1 << 18, 1 << 14, 1024, 1 << 20, 0)


def trimmed(planned: BlockPolicy, memory: int, longest: int = 80) -> BlockPolicy:
    return trim_policy(lambda _: MODEL, planned, memory, 1 << 40, longest)


def test_a_planned_policy_is_trimmed_only_as_far_as_it_must() -> None:
    planned = replace(POLICY, rows=8, batches=4)
    need = predict_needs(MODEL, planned).memory_bytes
    assert trimmed(planned, need) == planned
    less = trimmed(planned, need * 4 // 5)
    assert less.kv_in_memory < 1 and (less.weights_in_memory, less.hidden_in_memory) == (1, 1)
    assert need * 3 // 5 < predict_needs(MODEL, less).memory_bytes <= need * 4 // 5
    on_disk = replace(planned, weights_in_memory=0.0, kv_in_memory=0.0, hidden_in_memory=0.0)
    least = predict_needs(MODEL, on_disk).memory_bytes
    assert trimmed(planned, least).rows == 8
    halved = trimmed(planned, least - 1)
    assert (halved.rows, halved.batches) == (4, 8)
    # A batch keeps room for the longest sequence, so it cannot be halved here.
    assert trimmed(planned, least - 1, 640) == fit_policy(lambda _: MODEL, planned, least - 1, 1 << 40, 640)


def test_the_least_disk_is_what_memory_does_not_hold() -> None:
    policy = replace(POLICY, weights_in_memory=0.0, kv_in_memory=0.0, hidden_in_memory=0.0)
    need = predict_needs(MODEL, policy)
    # Half of the eight layers stay in memory, and all KV and activations of one sequence.
    memory = 4 * (1 << 20) + (1 << 18) + (2 << 20) + 8 * 2 * (1 << 14) + 64 * 1024
    with pytest.raises(ConfigError) as caught:
        check_caps(MODEL, policy, memory, need.disk_bytes - 1)
    assert caught.value.why.endswith("one sequence at a time, is 4.0 MiB of disk")
    with pytest.raises(ConfigError) as caught:
        check_caps(MODEL, policy, None, need.disk_bytes - 1)
    assert caught.value.why.endswith("one sequence at a time, is 0.0 MiB of disk")


def test_a_block_fits_with_weights_and_kv_in_memory_that_does_not_fit_with_one_of_them() -> None:
    base = replace(POLICY, overlap=False)
    whole = predict_needs(MODEL, replace(base, rows=32, batches=16))
    found = fit_policy(lambda _: MODEL, base, whole.memory_bytes, 0, 80)
    assert (found.rows, found.batches) == (32, 16) and predict_needs(MODEL, found).disk_bytes == 0
    small = predict_needs(MODEL, replace(base, rows=1, batches=1))
    found = fit_policy(lambda _: MODEL, base, small.memory_bytes, 0, 80)
    assert found.sequences == 1 and predict_needs(MODEL, found).disk_bytes == 0
    with pytest.raises(ConfigError) as caught:
        fit_policy(lambda _: MODEL, base, small.memory_bytes - 1, 0, 80)
    assert "of disk, and may take 0.0 MiB" in caught.value.what
