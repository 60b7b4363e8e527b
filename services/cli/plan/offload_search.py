"""The policy of a bulk worker by measured rates: what `diptych serve --bulk-profile` chooses and predicts.

Imports scipy, so it is imported only where there are rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from diptych.chunks import CHUNK_TOKENS
from engine.model.memory_plan import FLOAT_BYTES, angle_table_bytes
from engine.offload.policy import BlockPolicy
from engine.sequence import num_chunks
from planner.costs.model import ModelDims
from planner.offload.machines import HostMachine
from planner.offload.measured import (
    measured_machine,
    model_of_policy,
    predict_policy,
    search_blocks,
    search_policy,
)
from planner.offload.programme import OffloadPlacement
from planner.offload.terms import OffloadModel
from planner.types import BulkRates


@dataclass(frozen=True, slots=True)
class RatedBlocks:
    """The blocks of a model on a machine with measured rates, of which `workers` share the disk.

    `memory_bytes` and `disk_bytes` are the caps of one worker. No sequence is longer than `max_model_len`.
    """

    dims: ModelDims
    rates: BulkRates
    max_model_len: int
    memory_bytes: float
    disk_bytes: float
    workers: int = 1

    @property
    def machine(self) -> HostMachine:
        """One worker's part of the machine."""
        found = measured_machine(self.rates, self.memory_bytes, self.disk_bytes)
        return replace(
            found, disk_read=found.disk_read / self.workers, disk_write=found.disk_write / self.workers
        )

    def predict(self, policy: BlockPolicy) -> OffloadPlacement:
        """What a policy is predicted to take, whether or not it fits.

        Raises:
            ConfigError: the rates do not say what the policy's kinds cost.
        """
        return predict_policy(self.machine, self._offload_model(policy), policy)

    def search(
        self, policy: BlockPolicy, max_sequences: int | None = None
    ) -> tuple[BlockPolicy, OffloadPlacement]:
        """The policy with the most tokens per second for the lengths and kinds of `policy`, and its prediction.

        It has at most `max_sequences` sequences, and each batch has room for the longest one.

        Raises:
            ConfigError: the rates do not say what the policy's kinds cost, or no block is predicted to fit.
        """
        fewest = math.ceil(self.max_model_len / policy.sequence_tokens)
        blocks = search_blocks(max_sequences, fewest)
        return search_policy(self.machine, self._offload_model(policy), policy, blocks)

    def _offload_model(self, policy: BlockPolicy) -> OffloadModel:
        found, dims = model_of_policy(self.dims, policy, self.rates), self.dims
        tables = table_bytes(dims.kv_heads, dims.head_dim, self.max_model_len, bool(policy.kv_codec))
        return replace(found, end_bytes=found.end_bytes + tables)


def table_bytes(kv_heads: int, head_dim: int, max_model_len: int, coded: bool) -> int:
    """The memory beside weights and KV that grows with the longest sequence: angles, and for coded KV further angles
    and a layer's KV of a prompt as it is expanded (`engine.cpu.offload.loading.measure_model`).
    """
    angles = FLOAT_BYTES * max_model_len * head_dim
    if not coded:
        return angles
    expanded = num_chunks(max_model_len) * CHUNK_TOKENS * 2 * kv_heads * head_dim * FLOAT_BYTES
    return angles + angle_table_bytes(head_dim, max_model_len) + expanded
