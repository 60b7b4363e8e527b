"""Service level objectives (SLOs): the type, which SLO a request has, and whether the request met it.

Every part of Diptych that sets, looks up or checks SLOs uses this module: gateway metrics, load generator, both
simulators, the planner and the replanner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from diptych.errors import ConfigError

DEFAULT_ATTAINMENT = 0.9


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of TTFT and TPOT in seconds, infinite where there is no limit, and the share of requests to meet both.

    TTFT ends with the first token. TPOT is the time after it, divided by the number of tokens after the first
    (DistServe section 2). Attainment is joint: a request must meet both limits.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    attainment: float = DEFAULT_ATTAINMENT

    @property
    def has_limits(self) -> bool:
        """Whether there is a limit at all; without one every request meets the SLO."""
        return min(self.ttft_s, self.tpot_s) < math.inf

    def is_met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Whether these times are within the limits. None means that the request has no such time: it meets every
        limit.

        An answer of one token has no TPOT. To check one limit alone, pass None for the other time.
        """
        return (ttft_s is None or ttft_s <= self.ttft_s) and (tpot_s is None or tpot_s <= self.tpot_s)

    def limits_s(self) -> dict[str, float | None]:
        """The limits by name, "ttft" and "tpot", with None where there is no limit, as JSON needs it."""
        limits = {"ttft": self.ttft_s, "tpot": self.tpot_s}
        return {name: limit_s if math.isfinite(limit_s) else None for name, limit_s in limits.items()}


# SLOs by kind of request; "" is the default, for all kinds that are not named.
Slos = Mapping[str, Slo]


def slo_for(slos: Slos, kind: str) -> Slo:
    """The SLO of a kind of request: its own, else the default (kind "").

    Raises:
        KeyError: the kind has no SLO of its own and there is no default.
    """
    own = slos.get(kind)
    return slos[""] if own is None else own


def strictest_slo(slos: Iterable[Slo]) -> Slo:
    """The lowest limits and the highest attainment of `slos` (at least one): meeting the result meets each of them."""
    every = list(slos)
    return Slo(
        min(slo.ttft_s for slo in every),
        min(slo.tpot_s for slo in every),
        max(slo.attainment for slo in every),
    )


def read_slo(ttft_ms: float | None, tpot_ms: float | None, attainment: float = DEFAULT_ATTAINMENT) -> Slo:
    """The SLO that the flags --slo-ttft-ms, --slo-tpot-ms and --attainment give; None: not given, so there is no limit.

    Raises:
        ConfigError: a value is out of its range.
    """
    if not 0.0 < attainment <= 1.0:
        raise ConfigError(
            f"--attainment must be a share above 0 and at most 1 (got {attainment:g})",
            "it is a share of the requests",
            "for example --attainment 0.9",
        )
    return Slo(read_limit_s("--slo-ttft-ms", ttft_ms), read_limit_s("--slo-tpot-ms", tpot_ms), attainment)


def read_limit_s(flag: str, limit_ms: float | None) -> float:
    """The limit in seconds that the value of `flag` gives; infinite if it is not given (None).

    Raises:
        ConfigError: it is not above 0, or infinite.
    """
    if limit_ms is None:
        return math.inf
    if not 0.0 < limit_ms < math.inf:
        raise ConfigError(
            f"{flag} must be greater than 0 and finite (got {limit_ms:g})",
            "it is a number of milliseconds",
            f"for example {flag} 500, or leave it out",
        )
    return limit_ms / 1e3
