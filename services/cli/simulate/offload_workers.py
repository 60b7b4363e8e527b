"""Workers for bulk work alone in `diptych simulate`: what `diptych serve --bulk` would choose, and how fast.

Imports scipy, so it is imported only where there are such workers. Blocks take as long as the programme predicts
(`planner.offload`); nothing is simulated step by step.
"""

from __future__ import annotations

import json
from typing import Any

from diptych.errors import ConfigError
from engine.offload.policy import BlockPolicy, format_policy
from planner.costs.model import dims_on_cpu, find_model
from services.cli.plan.bulk_inputs import load_bulk_rates, read_lengths, read_size
from services.cli.plan.offload_search import RatedBlocks
from services.cli.simulate.options import SimulateOptions
from services.host.exit_codes import OK

# More disk than any block needs.
ANY_DISK = float(1 << 60)
MIB = 1 << 20


def run_bulk_workers(options: SimulateOptions, count: int) -> int:
    """Print what `count` bulk workers of one machine would do. Returns the exit status.

    Raises:
        ConfigError: a flag is missing or cannot be read, the profile has no rates of bulk work, or nothing fits.
    """
    if options.profile is None or options.bulk is None or options.bulk_memory is None:
        flag = next(
            name
            for name, value in (
                ("--profile FILE", options.profile),
                ("--bulk PROMPT:OUTPUT", options.bulk),
                ("--bulk-memory SIZE", options.bulk_memory),
            )
            if value is None
        )
        why = "bulk workers are predicted from measured rates, lengths and memory"
        raise ConfigError(f"{flag.split()[0]} is missing", why, f"add {flag}")
    work = read_lengths(options.bulk)
    memory = read_size("--bulk-memory", options.bulk_memory)
    disk = ANY_DISK if options.bulk_disk is None else read_size("--bulk-disk", options.bulk_disk)
    dims = dims_on_cpu(find_model(options.model))
    if (longest := work.prompt_tokens + work.output_tokens) > dims.max_len:
        why = f"its context is {dims.max_len:,} tokens"
        raise ConfigError(f"{dims.name} has no room for {longest:,} tokens", why, "use shorter lines: --bulk")
    rates = load_bulk_rates(options.profile, options.model)
    blocks = RatedBlocks(dims, rates, dims.max_len, memory, disk, count)
    asked = BlockPolicy(1, 1, work.prompt_tokens, work.output_tokens)
    policy, predicted = blocks.search(asked)
    per_s = predicted.tokens_per_s
    figures = {
        "placement": f"{count} × bulk",
        "line": {"prompt": work.prompt_tokens, "output": work.output_tokens},
        "policy": format_policy(policy),
        "tokens_per_s": count * per_s,
        "tokens_per_s_per_worker": per_s,
        "lines_per_hour": count * per_s / work.output_tokens * 3600,
        "waits_for": predicted.binding,
        "memory_bytes": predicted.memory["memory"],
        "disk_bytes": predicted.memory["disk"],
    }
    print(json.dumps(figures, indent=2) if options.as_json else "\n".join(_report_lines(figures, policy)))
    return OK


def _report_lines(figures: dict[str, Any], policy: BlockPolicy) -> list[str]:
    line, each = figures["line"], figures["tokens_per_s_per_worker"]
    memory, disk = figures["memory_bytes"] / MIB, figures["disk_bytes"] / MIB
    return [
        f"{figures['placement']}: {figures['tokens_per_s']:,.1f} new tokens/s, {figures['lines_per_hour']:,.0f} lines"
        f" of {line['prompt']}:{line['output']} tokens an hour, as predicted from the profile",
        f"each: {policy.batches} batches of {policy.rows} sequences, {each:,.1f} tokens/s",
        f"each needs: {memory:,.0f} MiB of memory, {disk:,.0f} MiB of disk",
        f"a decode step waits for: {figures['waits_for']}",
        f"--bulk-policy {figures['policy']}",
    ]
