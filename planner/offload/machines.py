"""The two machines that a block may run on: a device with host memory and disk behind it, and a CPU with a disk.

On a device (FlexGen, appendix A.3) five things work at once: the links in both directions, the disk in both directions,
and the computation. KV that is not on the device is attended to by the host's processor.

On a CPU the memory that computes is the memory that holds, so only the disk works beside the computation. 4-bit weights
are widened by the core that computes, so that widening adds to computing, once for each batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from diptych.chunks import CHUNK_TOKENS
from planner.offload.terms import (
    BlockCosts,
    BlockShape,
    BoundedMemory,
    OffloadModel,
    OffloadWorkload,
    ShareCosts,
    TimedResource,
    whole_chunks,
)
from planner.types import LayerTime

# The places of shares that the CPU does not use: the middle tier.
MIDDLE_SHARES = (1, 4, 7)


class OffloadMachine(Protocol):
    """A machine whose costs are linear in the shares."""

    def block_costs(self, model: OffloadModel, workload: OffloadWorkload, block: BlockShape) -> BlockCosts:
        """The costs of a block of `model`."""


@dataclass(frozen=True, slots=True)
class DeviceMachine:
    """A device, its host's memory and a disk. Rates are bytes and operations per second, memories are bytes.

    Uploads to the device come before everything else in a step if `serial_upload` is true, as in FlexGen's released
    cost model; in the paper's formula they overlap too.
    """

    device_bytes: float
    host_bytes: float
    disk_bytes: float
    upload: float
    download_kv: float
    download_hidden: float
    disk_read: float
    disk_write: float
    prefill_products: float
    decode_products: float
    prefill_attention: float
    decode_attention: float
    host_attention: float
    serial_upload: bool = True

    def block_costs(self, model: OffloadModel, workload: OffloadWorkload, block: BlockShape) -> BlockCosts:
        """The costs of a block: FlexGen, appendix A.3."""
        prefill = self._phase(model, workload, block, prompt=True)
        decode = self._phase(model, workload, block, prompt=False)
        return BlockCosts(prefill, decode, self._memories(model, workload, block))

    def _phase(
        self, model: OffloadModel, workload: OffloadWorkload, block: BlockShape, *, prompt: bool
    ) -> tuple[TimedResource, ...]:
        """The resources of one layer of the prompts' step, or of a decode step."""
        tokens = workload.prompt_tokens if prompt else 1
        weights, sequences = model.layer_bytes, block.sequences
        hidden = model.token_hidden_bytes * tokens * sequences
        kv = model.token_kv_bytes * sequences
        # In the prompts' step all KV is written, and none is read.
        read = 0.0 if prompt else kv * workload.mean_context
        written = kv * (workload.prompt_tokens + 1 if prompt else 1)
        up = _outside(weights, 0.0, hidden, self.upload)
        down = ShareCosts(
            kv=(0.0, written / self.download_kv, written / self.download_kv) if prompt else (0.0, 0.0, 0.0),
            hidden=(0.0, hidden / self.download_hidden, hidden / self.download_hidden),
        )
        disk_in = _on_disk(weights, read, hidden, self.disk_read)
        disk_out = _on_disk(0.0, written, hidden, self.disk_write)
        compute_costs = self._compute(model, workload, block, prompt=prompt)
        if not self.serial_upload:
            named = {"upload": up, "download": down, "disk read": disk_in, "disk write": disk_out}
            return tuple(
                TimedResource(name, cost) for name, cost in (named | {"compute": compute_costs}).items()
            )
        if prompt:
            chains = {"upload and disk read": up + disk_in, "download and disk write": down + disk_out}
            return tuple(
                TimedResource(name, cost) for name, cost in (chains | {"compute": compute_costs}).items()
            )
        chains = {"download": down, "disk read": disk_in, "disk write": disk_out, "compute": compute_costs}
        return tuple(TimedResource(f"upload and {name}", up + cost) for name, cost in chains.items())

    def _compute(
        self, model: OffloadModel, workload: OffloadWorkload, block: BlockShape, *, prompt: bool
    ) -> ShareCosts:
        sequences, products = block.sequences, 2 * model.layer_weights
        if prompt:
            tokens = sequences * workload.prompt_tokens
            pairs = tokens * workload.prompt_tokens * model.attention_flops
            done = tokens * products / self.prefill_products + pairs / self.prefill_attention
            return ShareCosts(constant=done)
        # Bound by reading KV: the rates count two operations per byte, as the constants were measured.
        read = model.token_kv_bytes * workload.mean_context * sequences
        host = read / self.host_attention
        return ShareCosts(
            kv=(read / self.decode_attention, host, host),
            constant=sequences * products / self.decode_products,
        )

    def _memories(
        self, model: OffloadModel, workload: OffloadWorkload, block: BlockShape
    ) -> tuple[BoundedMemory, ...]:
        weights = model.layer_bytes * model.layers
        kv = model.token_kv_bytes * workload.total_tokens * block.sequences * model.layers
        hidden = model.token_hidden_bytes * workload.prompt_tokens * block.sequences
        # What a batch needs in flight: the next layer's weights, and its activations.
        batch = model.token_hidden_bytes * workload.prompt_tokens * block.rows
        layer = model.layer_bytes
        scratch = 2 * block.rows * workload.prompt_tokens * (model.hidden + model.ffn)
        scratch = max(scratch, 8 * block.rows * workload.prompt_tokens * model.hidden)
        device = ShareCosts(
            (weights - 2 * layer, 0, 0), (kv, 0, 0), (hidden - batch, 0, 0), 2 * layer + batch + scratch
        )
        host = ShareCosts((-layer, weights, 0), (0, kv, 0), (-batch, hidden, 0), layer + batch)
        disk_costs = ShareCosts((0, 0, weights), (0, 0, kv), (0, 0, hidden))
        return (
            BoundedMemory("device memory", device, self.device_bytes),
            BoundedMemory("host memory", host, self.host_bytes),
            BoundedMemory("disk", disk_costs, self.disk_bytes),
        )


@dataclass(frozen=True, slots=True)
class HostMachine:
    """A CPU with a bounded part of its memory, and a disk. Rates are bytes per second, times are seconds.

    A layer takes `pass_s` for each batch and `row_s` for each row, both for a layer of `measured_weights` numbers;
    `widen_s` is added to each pass if weights have 4 bits. Outside the layers a step takes `end_pass_s` for each batch
    and `end_row_s` for each sequence. `attention` is the rate at which KV is attended to. Without `overlap` the disk is
    read before the computation begins.

    A machine that was measured (`planner.offload.measured`) has the times of a layer with `exact` weights, and of one
    with `int4` weights; they are used instead of `pass_s`, `row_s` and `widen_s`. `coded_attention` is the rate for KV
    of 4 bits, of which `coded_row_s` is added to each row of a prompt. What moves is copied at `copy` bytes per second
    by the core that computes, if the disk cannot be read past the page cache by itself.
    """

    memory_bytes: float
    disk_bytes: float
    disk_read: float
    disk_write: float
    measured_weights: float
    pass_s: float
    row_s: float
    attention: float
    prompt_attention: float
    widen_s: float = 0.0
    end_row_s: float = 0.0
    end_pass_s: float = 0.0
    step_tokens: int = 512
    overlap: bool = True
    exact: LayerTime | None = None
    int4: LayerTime | None = None
    coded_attention: float | None = None
    coded_row_s: float = 0.0
    copy: float = math.inf

    def layer_time(self, model: OffloadModel) -> LayerTime:
        """The time of a layer of `model`, without attention."""
        measured = self.int4 if model.weight_bytes < 1.0 else self.exact
        if measured is None:
            pass_s = self.pass_s + (self.widen_s if model.weight_bytes < 1.0 else 0.0)
            measured = LayerTime(pass_s, self.row_s, pass_s, self.row_s)
        return measured.scaled(model.layer_weights / self.measured_weights)

    def block_costs(self, model: OffloadModel, workload: OffloadWorkload, block: BlockShape) -> BlockCosts:
        """The costs of a block: appendix A.3 with two tiers, of which only the disk overlaps with computing."""
        weights, kv = model.layer_bytes, model.token_kv_bytes * block.sequences
        time, coded = self.layer_time(model), model.kv_bytes < 1.0
        tokens = workload.prompt_tokens * block.sequences
        passes = block.batches * -(-workload.prompt_tokens * block.rows // self.step_tokens)
        pairs = tokens * workload.prompt_tokens / 2 * model.attention_flops
        read = _on_disk(weights, 0.0, 0.0, self.disk_read)
        hidden = model.token_hidden_bytes * tokens
        prefill_disk = read + _on_disk(0.0, 0.0, hidden, self.disk_read)
        prefill_disk += _on_disk(0.0, kv * whole_chunks(workload.prompt_tokens), hidden, self.disk_write)
        # A step reads whole chunks, and writes the one that it adds a token to.
        token = model.token_hidden_bytes * block.sequences
        read_kv, written_kv = kv * workload.mean_read, kv * CHUNK_TOKENS
        decode_disk = read + _on_disk(0.0, read_kv, token, self.disk_read)
        decode_disk += _on_disk(0.0, written_kv, token, self.disk_write)
        rate = self.coded_attention if coded and self.coded_attention is not None else self.attention
        decode_s = (
            time.pass_s * block.batches + time.row_s * block.sequences + kv * workload.mean_context / rate
        )
        prompt_row_s = time.prompt_row_s + (self.coded_row_s if coded else 0.0)
        prompt_s = passes * time.prompt_pass_s + tokens * prompt_row_s + pairs / self.prompt_attention
        prefill_copies = _on_disk(weights, kv * whole_chunks(workload.prompt_tokens), 2 * hidden, self.copy)
        decode_copies = _on_disk(weights, read_kv + written_kv, 2 * token, self.copy)
        end_s = self.end_pass_s * block.batches + self.end_row_s * block.sequences
        return BlockCosts(
            self._resources(prefill_disk, prefill_copies + ShareCosts(constant=prompt_s)),
            self._resources(decode_disk, decode_copies + ShareCosts(constant=decode_s)),
            self._memories(model, workload, block),
            MIDDLE_SHARES,
            end_s,
            end_s,
        )

    def _resources(self, disk_costs: ShareCosts, compute_costs: ShareCosts) -> tuple[TimedResource, ...]:
        if self.overlap:
            return TimedResource("disk", disk_costs), TimedResource("compute", compute_costs)
        return (TimedResource("disk and compute", disk_costs + compute_costs),)

    def _memories(
        self, model: OffloadModel, workload: OffloadWorkload, block: BlockShape
    ) -> tuple[BoundedMemory, ...]:
        weights = model.layer_bytes * model.layers
        batch_kv = model.token_kv_bytes * whole_chunks(workload.total_tokens) * block.rows
        kv = batch_kv * block.batches * model.layers
        batch_hidden = model.token_hidden_bytes * workload.prompt_tokens * block.rows
        hidden = batch_hidden * block.batches
        # One is read while another is computed, if the disk overlaps.
        windows = 2 if self.overlap else 1
        ahead = min(windows, model.layers) * model.layer_bytes
        scratch = self.step_tokens * (5 * model.hidden + 3 * model.ffn) * model.hidden_bytes
        # The buffers for reading, of layers and of batches' KV, are there whatever the shares are.
        constant = model.end_bytes + scratch + ahead + windows * batch_kv
        memory = ShareCosts(
            (weights, 0.0, 0.0), (kv, 0.0, 0.0), (hidden, 0.0, windows * batch_hidden), constant
        )
        disk_costs = ShareCosts((0.0, 0.0, weights), (0.0, 0.0, kv), (0.0, 0.0, hidden))
        return (
            BoundedMemory("memory", memory, self.memory_bytes, "--bulk-memory"),
            BoundedMemory("disk", disk_costs, self.disk_bytes, "--bulk-disk"),
        )


def _outside(weights: float, kv: float, hidden: float, rate: float) -> ShareCosts:
    """Moving what is outside of the fastest tier."""
    w, c, h = weights / rate, kv / rate, hidden / rate
    return ShareCosts((0.0, w, w), (0.0, c, c), (0.0, h, h))


def _on_disk(weights: float, kv: float, hidden: float, rate: float) -> ShareCosts:
    """Moving what is on disk."""
    return ShareCosts((0.0, 0.0, weights / rate), (0.0, 0.0, kv / rate), (0.0, 0.0, hidden / rate))
