"""The programme with measured rates, the blocks that its search leaves out, and the policy that follows."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from engine.offload.policy import BlockPolicy, format_policy, parse_policy
from planner.costs.model import dims_on_cpu, find_model
from planner.offload.measured import (
    machine_of_policy,
    measured_machine,
    model_kinds,
    predict_policy,
    search_blocks,
    search_policy,
    to_block_policy,
)
from planner.offload.programme import search_placement, solve_shares
from planner.offload.terms import BlockShape
from planner.types import BulkRates, LayerTime
from tests.unit.planner.offload_samples import HOST, LLAMA, WORK

RATES = BulkRates(
    threads=1,
    layer_weights=float(LLAMA.layer_weights),
    exact=LayerTime(4e-3, 3e-4, 5e-3, 2e-4),
    attention=8e9,
    prompt_attention=4e10,
    end_row_s=1e-4,
    copy=5e9,
    disk_read=2e8,
    disk_write=2e8,
    int4=LayerTime(3e-3, 5e-4, 3e-3, 4e-4),
    coded_attention=1e9,
    coded_row_s=1e-5,
)
DENSE = LLAMA.with_bytes(4.5 / 8, 4.5 / 8)


def test_the_search_leaves_out_no_block_that_would_be_best() -> None:
    chance = random.Random(3)
    kinds, blocks = (
        [LLAMA, DENSE],
        [BlockShape(rows, batches) for rows in (1, 4, 16) for batches in (1, 3, 8)],
    )
    for _ in range(6):
        machine = replace(
            HOST,
            memory_bytes=chance.uniform(1.5e8, 2e9),
            disk_read=chance.uniform(5e7, 2e9),
            disk_write=chance.uniform(5e7, 2e9),
            attention=chance.uniform(1e9, 2e10),
        )
        found = search_placement(machine, kinds, WORK, blocks)
        every = [solve_shares(machine, model, WORK, block) for model in kinds for block in blocks]
        best = max(one.tokens_per_s for one in every if one is not None)
        assert found.tokens_per_s == pytest.approx(best)


def test_the_search_has_a_hundred_blocks_and_solves_few() -> None:
    assert len(search_blocks()) >= 80
    assert max(one.sequences for one in search_blocks(100)) <= 100


def test_measured_times_are_those_of_the_kind_of_weights() -> None:
    machine = measured_machine(RATES, 1e9, 1e11)
    block = BlockShape(8, 4)
    exact, dense = (machine.block_costs(one, WORK, block) for one in (LLAMA, DENSE))
    everything_here = solve_shares(replace(machine, memory_bytes=1e12), LLAMA, WORK, block)
    assert everything_here is not None and everything_here.binding == "compute"
    kv_s = LLAMA.token_kv_bytes * 32 * WORK.mean_context / 8e9
    assert exact.decode[1].seconds.constant == pytest.approx(4 * 4e-3 + 32 * 3e-4 + kv_s)
    kv_s = DENSE.token_kv_bytes * 32 * WORK.mean_context / 1e9
    assert dense.decode[1].seconds.constant == pytest.approx(4 * 3e-3 + 32 * 5e-4 + kv_s)
    assert dense.prefill[1].seconds.constant > exact.prefill[1].seconds.constant + 32 * 256 * 1e-5


def test_copies_cost_the_core_where_the_disk_is_not_direct() -> None:
    direct, cached = (
        measured_machine(replace(RATES, disk_direct=one), 1e9, 1e11).block_costs(
            LLAMA, WORK, BlockShape(8, 4)
        )
        for one in (True, False)
    )
    assert direct.decode[1].seconds.weights == (0.0, 0.0, 0.0)
    assert cached.decode[1].seconds.weights[2] == pytest.approx(LLAMA.layer_bytes / 5e9)


def test_a_given_disk_rate_takes_the_place_of_the_measured_one() -> None:
    machine = measured_machine(RATES, 1e9, 1e11, 7e8)
    assert (machine.disk_read, machine.disk_write) == (7e8, 7e8)


def test_kinds_are_those_that_the_machine_can_compute() -> None:
    dims = dims_on_cpu(find_model("Llama-3.1-8B"))
    assert len(model_kinds(dims, False)) == 1
    bits = {(one.weight_bytes * 8, one.kv_bytes * 8) for one in model_kinds(dims, True, RATES)}
    assert bits == {(16, 32), (4.5, 32), (16, 4.5), (4.5, 4.5)}
    none = replace(RATES, int4=None, coded_attention=None)
    assert len(model_kinds(dims, True, none)) == 1


def test_the_policy_keeps_whole_pieces_and_never_more_than_the_programme() -> None:
    chance = random.Random(8)
    for _ in range(8):
        machine = measured_machine(RATES, chance.uniform(2e8, 2e9), 1e11)
        found = search_placement(machine, [LLAMA, DENSE], WORK, search_blocks(64))
        policy = to_block_policy(found, WORK, machine.step_tokens)
        assert (policy.rows, policy.batches) == (found.block.rows, found.block.batches)
        assert (policy.weight_kind, policy.kv_codec) == (
            ("int4", "int4") if found.model is DENSE else ("exact", "")
        )
        layers, pairs = LLAMA.layers, LLAMA.layers * policy.batches
        for share, placed, count in (
            (policy.weights_in_memory, found.shares[0], layers),
            (policy.kv_in_memory, found.shares[3], pairs),
            (policy.hidden_in_memory, found.shares[6], policy.batches),
        ):
            assert share <= placed + 1e-6 and placed - share < 1 / count
            assert math.isclose(share * count, round(share * count))
        assert len(policy.resident_layers(layers)) == round(policy.weights_in_memory * layers)
        again = parse_policy(format_policy(policy), BlockPolicy(1, 1, 1, 1))
        assert again.resident_layers(layers) == policy.resident_layers(layers)
        assert again.kv_pairs_in_memory(layers) == policy.kv_pairs_in_memory(layers)
        assert replace(again, weights_in_memory=0, kv_in_memory=0, hidden_in_memory=0) == replace(
            policy, weights_in_memory=0, kv_in_memory=0, hidden_in_memory=0
        )


def test_a_policy_is_predicted_as_the_programme_predicts_its_shares() -> None:
    chance = random.Random(5)
    for _ in range(4):
        machine = measured_machine(RATES, chance.uniform(2e8, 2e9), 1e11)
        found = search_placement(machine, [LLAMA], WORK, search_blocks(64))
        policy = to_block_policy(found, WORK, machine.step_tokens)
        rounded = predict_policy(machine, LLAMA, policy)
        # What is rounded down lies on the disk, so that the policy is never faster, and takes no more memory.
        assert 0.8 * found.tokens_per_s < rounded.tokens_per_s <= found.tokens_per_s * 1.0001
        assert rounded.memory["memory"] <= found.memory["memory"] * 1.0001
    waiting = predict_policy(machine, LLAMA, replace(policy, overlap=False))
    assert waiting.binding == "disk and compute" and waiting.tokens_per_s <= rounded.tokens_per_s
    assert machine_of_policy(machine, replace(policy, step_tokens=64)).step_tokens == 64


def test_batches_have_room_for_the_longest_sequence() -> None:
    assert min(one.rows for one in search_blocks(fewest_rows=5)) == 8
    assert {one.rows for one in search_blocks(fewest_rows=300)} == {300}


def test_a_searched_policy_fits_in_whole_pieces() -> None:
    chance = random.Random(11)
    asked = BlockPolicy(1, 1, WORK.prompt_tokens, WORK.output_tokens, overlap=False)
    for _ in range(5):
        machine = measured_machine(RATES, chance.uniform(2e8, 2e9), 1e11)
        policy, predicted = search_policy(machine, LLAMA, asked, search_blocks(64))
        assert predicted.memory["memory"] <= machine.memory_bytes
        assert not policy.overlap and predicted.binding == "disk and compute"
        best = search_placement(replace(machine, overlap=False), [LLAMA], WORK, search_blocks(64))
        assert 0.7 * best.tokens_per_s < predicted.tokens_per_s <= best.tokens_per_s * 1.0001
