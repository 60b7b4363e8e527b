"""The way that KV takes between two instances, and links as people write them: 25Gbps, 50GB/s."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from diptych.errors import ConfigError
from planner.hardware import Node
from planner.terms import Link, Pool

# A small b is a bit, a large one a byte.
WRITTEN = re.compile(r"([0-9.]+)\s*[Gg](i?)(b|B|[Bb]it|[Bb]yte)(?:ps|/s)$")


def way(moving: Sequence[tuple[Pool, Node]], measured: Link, within: bool, asked: Link | None = None) -> Link:
    """The way from one instance to another, of pools that hand KV over, each with the nodes that it is on.

    Within a node each device sends over its own link; between nodes an instance has one: the `asked` one, or that of
    the slowest node. A link that the profile `measured` is taken as it is, wherever none was asked for.
    """
    if not moving:
        return Link()
    if asked is not None and not within:
        return asked
    if math.isfinite(measured.bytes_per_s):
        return measured
    nodes = [node for _, node in moving]
    if within:
        lanes = min(pool.split.devices for pool, _ in moving)
        return Link(nodes[0].intra.bytes_per_s * lanes, nodes[0].intra.latency_s)
    return Link(min(one.inter.bytes_per_s for one in nodes), max(one.inter.latency_s for one in nodes))


def link(text: str, latency_s: float) -> Link:
    """A link from words: 25Gbps, 50GB/s. Raises ValueError."""
    found = WRITTEN.match(text.strip())
    if found is None or not float(found[1]) > 0.0:
        raise ValueError(f"a link is a number with Gbps or GB/s, and this is {text!r}")
    bits = found[3] == "b" or found[3].lower() == "bit"
    return Link(float(found[1]) * (float(1 << 30) if found[2] else 1e9) / (8 if bits else 1), latency_s)


def wanted(text: str | None, latency_s: float) -> Link | None:
    """What --link says, if it is given.

    Raises:
        ConfigError: it is not a link.
    """
    if text is None:
        return None
    try:
        return link(text, latency_s)
    except ValueError as error:
        raise ConfigError(f"--link {text} cannot be read", str(error), "write 25Gbps or 50GB/s") from error
