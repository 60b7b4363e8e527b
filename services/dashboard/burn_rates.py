"""How fast an error budget may burn before somebody is told: thresholds for every target. Pure numbers.

A burn rate is the share of requests that miss the SLO, over the share that may miss it (1 - target). At 1 the budget
lasts exactly as long as the period it is for; at 1 / (1 - target) all requests miss, and no rate is higher. The
thresholds of the literature (14.4, 6 and 3, Google's SRE workbook, chapter 5) are for targets of 99 % and more: at 90 %
no rate exceeds 10, and an alert at 14.4 never fires. Here they are at most a share of the highest rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BurnAlert:
    """An alert on the burn rate: it fires while the rate is above `threshold` in both windows.

    The long window shows that much of the budget is gone, and the short one that it is still burning.
    """

    name: str
    severity: str
    threshold: float
    long_window: str
    short_window: str


# Name, severity, threshold of the literature, share of the highest rate, long window, short window.
KINDS = (
    ("Fast", "page", 14.4, 0.6, "1h", "5m"),
    ("Slow", "page", 6.0, 0.3, "6h", "30m"),
    ("Ticket", "ticket", 3.0, 0.15, "1d", "2h"),
)


def max_burn_rate(target: float) -> float:
    """The burn rate if every request misses.

    Raises:
        ValueError: `target` is not between 0 and 1.
    """
    if not 0 < target < 1:
        raise ValueError(f"a target is between 0 and 1, both excluded (got {target:g})")
    return 1 / (1 - target)


def burn_alerts(target: float) -> tuple[BurnAlert, ...]:
    """The alerts for a target, the fastest first. Each threshold is at least 1 and below `max_burn_rate(target)`.

    No threshold is below 1, since below 1 the budget lasts: that is for targets under 85 %.

    Raises:
        ValueError: `target` is not between 0 and 1.
    """
    highest = max_burn_rate(target)
    return tuple(
        BurnAlert(name, severity, round(max(1.0, min(textbook, share * highest)), 6), long, short)
        for name, severity, textbook, share, long, short in KINDS
    )
