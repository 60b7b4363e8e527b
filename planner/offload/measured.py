"""The machine of the programme from measured rates, and the policy of a block from the programme's answer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from diptych.chunks import RAW_CLASS
from diptych.errors import ConfigError
from engine.offload.policy import BlockPolicy
from planner.costs.kv.codec import is_same_codec, with_kv_codec
from planner.costs.model import ModelDims
from planner.offload.machines import HostMachine
from planner.offload.programme import OffloadPlacement, evaluate_shares, search_placement
from planner.offload.terms import BlockShape, OffloadModel, OffloadWorkload
from planner.types import BulkRates

# What the search tries: sequences per batch, and batches per block.
ROWS, BATCHES = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Bytes per number of weights in groups of 64 with 4 bits each, a scale and a minimum.
FOUR_BIT_BYTES = 4.5 / 8
FOUR_BIT_WEIGHTS, FOUR_BIT_CODEC = "int4", "int4"
# Most searches for whole pieces that fit.
SEARCHES = 4
# Shares that are nearly whole count as whole: they come from floats.
ROUNDING = 1e-6


def measured_machine(
    rates: BulkRates, memory_bytes: float, disk_bytes: float, disk_rate: float | None = None
) -> HostMachine:
    """The machine with these rates; `disk_rate` (bytes per second) takes the place of the measured disk."""
    return HostMachine(
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        disk_read=disk_rate or rates.disk_read,
        disk_write=disk_rate or rates.disk_write,
        measured_weights=rates.layer_weights,
        pass_s=rates.exact.pass_s,
        row_s=rates.exact.row_s,
        attention=rates.attention,
        prompt_attention=rates.prompt_attention,
        widen_s=rates.widen_s or 0.0,
        end_row_s=rates.end_row_s,
        end_pass_s=rates.end_pass_s,
        exact=rates.exact,
        int4=rates.int4,
        coded_attention=rates.coded_attention,
        coded_row_s=rates.coded_row_s,
        copy=math.inf if rates.disk_direct else rates.copy,
    )


def model_kinds(dims: ModelDims, four_bits: bool, rates: BulkRates | None = None) -> list[OffloadModel]:
    """The model as it is and, with `four_bits`, with 4 bits per number of weights, of KV, and of both.

    Of a machine that was measured, only those kinds that it can compute.
    """
    exact = OffloadModel.from_dims(dims)
    weights, kv = [exact.weight_bytes], [exact.kv_bytes]
    if four_bits and (rates is None or rates.int4 is not None):
        weights.append(FOUR_BIT_BYTES)
    if four_bits and (rates is None or rates.coded_attention is not None):
        kv.append(with_kv_codec(dims, FOUR_BIT_CODEC).kv_bytes)
    return [exact.with_bytes(one, other) for one in weights for other in kv]


def model_of_policy(dims: ModelDims, policy: BlockPolicy, rates: BulkRates) -> OffloadModel:
    """The model with the kinds of weights and KV of a policy.

    Raises:
        ConfigError: the rates do not say what such weights or such KV cost.
    """
    exact = OffloadModel.from_dims(dims)
    weight_bytes, kv_bytes = exact.weight_bytes, exact.kv_bytes
    if policy.weight_kind != "exact":
        if rates.int4 is None:
            raise _not_measured(f"weights of kind {policy.weight_kind}")
        weight_bytes = FOUR_BIT_BYTES
    codec = policy.kv_codec or RAW_CLASS
    if not is_same_codec(dims, codec, RAW_CLASS):
        if rates.coded_attention is None or not is_same_codec(dims, codec, FOUR_BIT_CODEC):
            raise _not_measured(f"KV in {codec}")
        kv_bytes = with_kv_codec(dims, FOUR_BIT_CODEC).kv_bytes
    return exact.with_bytes(weight_bytes, kv_bytes)


def _not_measured(what: str) -> ConfigError:
    return ConfigError(
        f"the profile does not say what {what} cost",
        "measured are weights as they are and of 4 bits, and KV as it is and in int4, where the processor has them",
        "use other kinds in --bulk-policy, or leave out --bulk-profile",
    )


def search_blocks(most: int | None = None, fewest_rows: int = 1) -> list[BlockShape]:
    """The blocks that the search tries, of at most `most` sequences and at least `fewest_rows` in a batch."""
    rows = [one for one in ROWS if one >= fewest_rows] or [fewest_rows]
    every = (BlockShape(one, batches) for one in rows for batches in BATCHES)
    return [block for block in every if most is None or block.sequences <= most]


def predict_policy(machine: HostMachine, model: OffloadModel, policy: BlockPolicy) -> OffloadPlacement:
    """What a policy is predicted to take on a machine, whether or not it fits."""
    workload, block = policy_work(policy), BlockShape(policy.rows, policy.batches)
    pieces = (
        (policy.weights_in_memory, model.layers),
        (policy.kv_in_memory, model.layers * policy.batches),
        (policy.hidden_in_memory, policy.batches),
    )
    here = [round(share * count) / count for share, count in pieces]
    shares = np.array([part for share in here for part in (share, 0.0, 1.0 - share)])
    costs = machine_of_policy(machine, policy).block_costs(model, workload, block)
    return evaluate_shares(costs, model, workload, block, shares)


def search_policy(
    machine: HostMachine, model: OffloadModel, policy: BlockPolicy, blocks: list[BlockShape]
) -> tuple[BlockPolicy, OffloadPlacement]:
    """The policy with the most tokens per second in whole pieces, and its prediction.

    Lengths, kinds, units and overlap are those of `policy`; but if no block fits with room for reading ahead, nothing
    is read ahead. Activations of a batch that is not wholly in memory need windows there. So whole pieces can take more
    memory than the shares, and the search is repeated with less of it. The policy may still take a little too much.

    Raises:
        ConfigError: not even the smallest block fits.
    """
    try:
        return _search_whole(machine, model, policy, blocks)
    except ConfigError:
        if not policy.overlap:
            raise
    return _search_whole(machine, model, replace(policy, overlap=False), blocks)


def _search_whole(
    machine: HostMachine, model: OffloadModel, asked_policy: BlockPolicy, blocks: list[BlockShape]
) -> tuple[BlockPolicy, OffloadPlacement]:
    """`search_policy` with the overlap of `asked_policy`. Raises ConfigError."""
    workload, limited = policy_work(asked_policy), machine_of_policy(machine, asked_policy)
    kinds = {name: getattr(asked_policy, name) for name in ("weight_kind", "kv_codec", "overlap")}
    best_placement: tuple[BlockPolicy, OffloadPlacement] | None = None
    for _ in range(SEARCHES):
        try:
            placement = search_placement(limited, [model], workload, blocks)
        except ConfigError:
            if best_placement is None:
                raise
            break
        policy = replace(to_block_policy(placement, workload, asked_policy.step_tokens), **kinds)
        predicted = predict_policy(machine, model, policy)
        best_placement = policy, predicted
        over = predicted.memory["memory"] - machine.memory_bytes
        if over <= 0.0:
            break
        limited = replace(limited, memory_bytes=max(limited.memory_bytes - over, limited.memory_bytes / 2))
    assert best_placement is not None
    return best_placement


def machine_of_policy(machine: HostMachine, policy: BlockPolicy) -> HostMachine:
    """The machine, computing in units as large as the policy's, and reading ahead if the policy does."""
    return replace(machine, overlap=policy.overlap, step_tokens=policy.step_tokens)


def policy_work(policy: BlockPolicy) -> OffloadWorkload:
    """The lengths for which a policy has room."""
    return OffloadWorkload(policy.prompt_tokens, policy.output_tokens)


def to_block_policy(placement: OffloadPlacement, workload: OffloadWorkload, step_tokens: int) -> BlockPolicy:
    """The policy with which the engine computes a block as the programme has placed it.

    The programme's shares are of numbers; the engine keeps whole layers, whole rooms of a layer and a batch, and whole
    batches of activations. So shares are rounded down, and what is left of memory is not used.
    """
    model, block = placement.model, placement.block
    weights, kv, hidden = (float(placement.shares[3 * kind]) for kind in range(3))
    return BlockPolicy(
        rows=block.rows,
        batches=block.batches,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        weights_in_memory=_whole_pieces(weights, model.layers),
        kv_in_memory=_whole_pieces(kv, model.layers * block.batches),
        hidden_in_memory=_whole_pieces(hidden, block.batches),
        weight_kind=FOUR_BIT_WEIGHTS if model.weight_bytes < 1.0 else "exact",
        kv_codec=FOUR_BIT_CODEC if model.kv_bytes < 1.0 else "",
        step_tokens=step_tokens,
    )


def _whole_pieces(share: float, count: int) -> float:
    """The share that is a whole number of `count` pieces, rounded down."""
    return max(0, min(count, math.floor(share * count + ROUNDING))) / count
