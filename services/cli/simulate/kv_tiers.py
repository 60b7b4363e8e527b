"""The tiers of KV below the pools in `diptych simulate`: what flags say of them, and how they fared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError
from diptych.stats.tier_rates import DISK, FIRST_RATES, HOST, TierRate
from planner.kv_links import parse_link
from planner.sim.exact.deployment import SimDeployment
from planner.sim.exact.simulate import ExactSimulation
from planner.sim.exact.tiers import SimTier
from services.cli.plan.bulk_inputs import read_size
from services.cli.simulate.options import SimulateOptions


def read_tiers(options: SimulateOptions) -> tuple[SimTier, ...]:
    """The tiers that flags ask for, the fastest first. A rate is that of a worker which has measured nothing yet.

    Raises:
        ConfigError: a flag cannot be used, or has no effect.
    """
    asked = {
        HOST: (options.kv_host_bytes, options.kv_host_rate),
        DISK: (options.kv_disk_bytes, options.kv_disk_rate),
    }
    for name, (size, rate) in asked.items():
        if rate is not None and size is None:
            why = "it is how fast that tier is read"
            raise ConfigError(f"--kv-{name}-rate needs --kv-{name}-bytes", why, "add it, such as 1GiB")
    if options.kv_disk_bytes is not None and options.kv_host_bytes is None:
        why = "KV goes from the pools to memory, and from there to disk"
        raise ConfigError("--kv-disk-bytes needs --kv-host-bytes", why, "add it, such as 1GiB")
    tiers = tuple(
        SimTier(name, read_size(f"--kv-{name}-bytes", size), _read_rate(name, rate))
        for name, (size, rate) in asked.items()
        if size is not None
    )
    if tiers and not options.enable_prefix_caching:
        what = "--kv-host-bytes does not go with --no-enable-prefix-caching"
        why = "KV that left the pools is read back as cached prefixes"
        raise ConfigError(what, why, "leave out one of the two")
    return tiers


def check_tier_room(deployment: SimDeployment) -> None:
    """Raises ConfigError if a tier has no room for a chunk, and would never have anything."""
    sizes = [one.token_bytes for one in deployment.kv_classes] or [deployment.token_bytes]
    chunk_bytes = round(max(sizes) * CHUNK_TOKENS)
    for tier in deployment.tiers:
        if tier.capacity_bytes < chunk_bytes:
            what = f"--kv-{tier.name}-bytes {tier.capacity_bytes:,.0f} is too small"
            raise ConfigError(what, f"a chunk of this model has {chunk_bytes:,} bytes", "give more")


def _read_rate(tier: str, text: str | None) -> TierRate:
    first = FIRST_RATES[tier]
    if text is None:
        return first
    try:
        return TierRate(first.delay_s, parse_link(text, 0.0).bytes_per_s)
    except ValueError as error:
        raise ConfigError(
            f"--kv-{tier}-rate {text} cannot be read", str(error), "write 25Gbps or 3GB/s"
        ) from error


class TierUse:
    """Adds up the runs of one deployment. Without tiers there is nothing to tell."""

    def __init__(self, deployment: SimDeployment) -> None:
        self._tiers = deployment.tiers
        self._counts: dict[str, Counter[str]] = {tier.name: Counter() for tier in self._tiers}

    def add(self, simulation: ExactSimulation) -> None:
        """Counts a run that has ended."""
        for name, stats in simulation.tier_stats.items():
            self._counts[name].update(
                stored_chunks=stats.stored_chunks, restored_chunks=stats.restored_chunks
            )

    def figures(self) -> dict[str, dict[str, Any]]:
        """The figures by tier, over all runs."""
        return {
            tier.name: {
                "capacity_bytes": round(tier.capacity_bytes),
                "read_bytes_per_s": tier.rate.bytes_per_s,
                "stored_chunks": self._counts[tier.name]["stored_chunks"],
                "restored_chunks": self._counts[tier.name]["restored_chunks"],
            }
            for tier in self._tiers
        }


def format_tier_use(tiers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each tier."""
    return [
        f"{name}: {use['stored_chunks']:,} chunks stored, {use['restored_chunks']:,} read back"
        f" at {use['read_bytes_per_s'] / 1e9:g} GB/s"
        for name, use in tiers.items()
    ]
