"""`diptych plan --bulk`: how bulk work on a model that does not fit would use memory and disk, and how fast.

The rates come from a profile that `diptych profile --bulk` has measured. Without one, those of the core come from the
data sheet of the device `cpu`, and that of the disk from the command line.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from diptych.errors import ConfigError
from engine.offload.policy import format_policy
from planner.costs.model import dims_on_cpu, find_model
from planner.hardware import CPU, find_device
from planner.kv_links import parse_link
from planner.offload.machines import HostMachine
from planner.offload.measured import measured_machine, model_kinds, search_blocks, to_block_policy
from planner.offload.programme import OffloadPlacement, search_placement
from planner.types import BulkRates
from services.cli.option_fields import refuse_flags
from services.cli.plan.bulk_inputs import load_bulk_rates, read_lengths, read_size
from services.cli.plan.options import BULK, PlanOptions
from services.host.exit_codes import OK

GIB, GB = 1 << 30, 1e9
# The flags that a plan of bulk work uses.
USED = {
    "model", "device", "as_json", "profile", "bulk", "bulk_memory", "bulk_disk", "bulk_disk_rate", "bulk_int4",
}  # fmt: skip


def run_bulk_plan(options: PlanOptions) -> int:
    """Find the placement with the most tokens per second, and print it. Returns the exit status.

    Raises:
        ConfigError: a flag cannot be used, or the model does not fit into memory and disk.
    """
    _refuse_others(options)
    work, rates = read_lengths(options.bulk), _read_rates(options)
    machine = _data_sheet_machine(options) if rates is None else _read_machine(options, rates)
    kinds = model_kinds(dims_on_cpu(find_model(options.model)), options.bulk_int4, rates)
    blocks = search_blocks()

    def search(changed_machine: HostMachine) -> OffloadPlacement:
        return search_placement(changed_machine, kinds, work, blocks)

    begun_s = time.perf_counter()
    placement = search(machine)
    search_s = time.perf_counter() - begun_s
    more = {
        "one more GiB of memory": search(replace(machine, memory_bytes=machine.memory_bytes + GIB)),
        "one more GB/s of disk": search(
            replace(machine, disk_read=machine.disk_read + GB, disk_write=machine.disk_write + GB)
        ),
    }
    gains = {name: one.tokens_per_s / placement.tokens_per_s for name, one in more.items()}
    found = _as_json(placement, gains) | {
        "policy": format_policy(to_block_policy(placement, work, machine.step_tokens)),
        "rates": "data sheet" if rates is None else "measured",
        "search_s": search_s,
    }
    print(json.dumps(found) if options.as_json else "\n".join(_as_lines(found)))
    return OK


def _refuse_others(options: PlanOptions) -> None:
    """Refuse flags that a plan of bulk work does not use. Raises ConfigError."""
    refuse_flags(options, options.given - USED, " with --bulk", "bulk work has no SLO", "leave it out")
    if options.device is not None and options.device.lower() != CPU:
        raise ConfigError(
            f"--bulk cannot plan for {options.device}", "blocks are computed on the CPU", "use --device cpu"
        )


def _read_rates(options: PlanOptions) -> BulkRates | None:
    """The measured rates; None without a profile. Raises ConfigError: it is of another model, or has none."""
    if options.profile is None:
        return None
    return load_bulk_rates(options.profile, options.model)


def _read_machine(options: PlanOptions, rates: BulkRates) -> HostMachine:
    """The machine that was measured, with the memories of the flags. Raises ConfigError."""
    disk_rate = _read_rate(options) if "bulk_disk_rate" in options.given else None
    memory, disk = _read_memories(options)
    return measured_machine(rates, memory, disk, disk_rate)


def _data_sheet_machine(options: PlanOptions) -> HostMachine:
    """The machine of the data sheet and the flags. Raises ConfigError."""
    core = find_device(CPU)
    products = core.flops * core.gets.flops
    memory_rate, disk = core.bytes_per_s * core.gets.bytes, _read_rate(options)
    memory_bytes, disk_bytes = _read_memories(options)
    # Per weight: a pass reads two bytes of it, and a row is two operations.
    return HostMachine(
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        disk_read=disk,
        disk_write=disk,
        measured_weights=1.0,
        pass_s=2.0 / memory_rate,
        row_s=2.0 / products,
        attention=memory_rate,
        prompt_attention=core.flops * core.gets.attention,
    )


def _read_rate(options: PlanOptions) -> float:
    """Bytes per second of the disk. Raises ConfigError."""
    try:
        return parse_link(options.bulk_disk_rate, 0.0).bytes_per_s
    except ValueError as error:
        text = f"--bulk-disk-rate {options.bulk_disk_rate} cannot be read"
        raise ConfigError(text, str(error), "write 2GB/s") from error


def _read_memories(options: PlanOptions) -> tuple[float, float]:
    """Bytes of memory and of disk. Raises ConfigError."""
    memory = read_size("--bulk-memory", options.bulk_memory)
    return memory, read_size("--bulk-disk", options.bulk_disk)


def _as_json(placement: OffloadPlacement, gains: dict[str, float]) -> dict[str, Any]:
    weights, _, weights_on_disk, kv, _, kv_on_disk, hidden, _, _ = map(float, placement.shares)
    return {
        "rows": placement.block.rows,
        "batches": placement.block.batches,
        "weight_bits": placement.model.weight_bytes * 8,
        "kv_bits": placement.model.kv_bytes * 8,
        "weights_in_memory": weights,
        "weights_on_disk": weights_on_disk,
        "kv_in_memory": kv,
        "kv_on_disk": kv_on_disk,
        "activations_in_memory": hidden,
        "memory_bytes": placement.memory["memory"],
        "disk_bytes": placement.memory["disk"],
        "block_s": placement.seconds,
        "tokens_per_s": placement.tokens_per_s,
        "waits_for": placement.binding,
        "gains": gains,
    }


def _as_lines(found: dict[str, Any]) -> list[str]:
    return [
        f"{BULK}: {found['batches']} batches of {found['rows']} sequences, {found['tokens_per_s']:.2f} tokens/s",
        f"weights: {found['weight_bits']:g} bits, {found['weights_in_memory']:.0%} in memory, the rest on disk",
        f"KV: {found['kv_bits']:g} bits, {found['kv_in_memory']:.0%} in memory, the rest on disk",
        f"needs: {found['memory_bytes'] / GIB:.2f} GiB of memory, {found['disk_bytes'] / GIB:.2f} GiB of disk",
        f"a decode step waits for: {found['waits_for']}",
        *(f"{name}: {gain:.2f} times the tokens/s" for name, gain in found["gains"].items()),
        f"rates: {found['rates']}; searched in {found['search_s']:.1f} s",
        f"--bulk-policy {found['policy']}",
    ]
