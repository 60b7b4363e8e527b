"""Chooses the link over which KV moves between two instances, and parses link speeds such as 25Gbps or 50GB/s."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from diptych.errors import ConfigError
from planner.hardware import NodeSpec
from planner.types import InstancePool, LinkSpec

# "Gb" means gigabits, "GB" gigabytes.
LINK_PATTERN = re.compile(r"([0-9.]+)\s*[Gg](i?)(b|B|[Bb]it|[Bb]yte)(?:ps|/s)$")


def choose_kv_link(
    moving_pools: Sequence[tuple[InstancePool, NodeSpec]],
    measured_link: LinkSpec,
    within: bool,
    asked_link: LinkSpec | None = None,
) -> LinkSpec:
    """Chooses the link that carries KV from a prefill to a decode instance.

    Within a node each device of an instance sends over its own link, so their bandwidths add up. Between nodes an
    instance has one link: `asked_link`, else that of the slowest node. Without `asked_link`, `measured_link` is used
    if its bandwidth is finite.

    Args:
        moving_pools: the pools that hand KV over, each with the node type that it runs on.
        measured_link: the link in the cost profile; infinite bandwidth means not measured.
        within: whether KV stays within a node.
        asked_link: the link that the user has set.
    """
    if not moving_pools:
        return LinkSpec()
    if asked_link is not None and not within:
        return asked_link
    if math.isfinite(measured_link.bytes_per_s):
        return measured_link
    nodes = [node for _, node in moving_pools]
    if within:
        lanes = min(pool.parallelism.devices for pool, _ in moving_pools)
        return LinkSpec(nodes[0].intra.bytes_per_s * lanes, nodes[0].intra.latency_s)
    return LinkSpec(min(one.inter.bytes_per_s for one in nodes), max(one.inter.latency_s for one in nodes))


def parse_link(text: str, latency_s: float) -> LinkSpec:
    """Parses a link speed such as 25Gbps or 50GB/s. Raises ValueError if `text` is no link speed."""
    found = LINK_PATTERN.match(text.strip())
    if found is None or not float(found[1]) > 0.0:
        raise ValueError(f"a link speed is a positive number with Gbps or GB/s (got {text!r})")
    bits = found[3] == "b" or found[3].lower() == "bit"
    return LinkSpec(float(found[1]) * (float(1 << 30) if found[2] else 1e9) / (8 if bits else 1), latency_s)


def parse_link_flag(text: str | None, latency_s: float) -> LinkSpec | None:
    """Parses the value of --link; None if the flag was not given.

    Raises:
        ConfigError: the value is no link speed.
    """
    if text is None:
        return None
    try:
        return parse_link(text, latency_s)
    except ValueError as error:
        raise ConfigError(f"--link {text} cannot be read", str(error), "write 25Gbps or 50GB/s") from error
