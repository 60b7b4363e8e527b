"""Mean TTFT of prefill instances in closed form, and where stages in a row become better than devices side by side.

Source: DistServe section 3.1, equations 1 to 3. M/D/1: arrivals are Poisson, all prompts equally long, first come first
served, no batching, since one prompt fills the device. Times in seconds, rates in requests per second.
"""

from __future__ import annotations

from math import inf


def mean_ttft_single(rate: float, service_s: float) -> float:
    """Equation 1: D + R D² / (2 (1 - R D)); infinite from R D = 1 on."""
    load = rate * service_s
    return service_s + rate * service_s**2 / (2 * (1 - load)) if load < 1 else inf


def mean_ttft_replicas(rate: float, service_s: float, count: int) -> float:
    """Equation 1 with the rate shared evenly at random by `count` instances."""
    return mean_ttft_single(rate / count, service_s)


def mean_ttft_inter_op(rate: float, service_s: float, stages: int = 2) -> float:
    """Equation 2 for any number of stages: queueing is that of a stage, the latency that of them all.

    Of two stages: D + R D² / (4 (2 - R D)).
    """
    stage_s = service_s / stages
    return service_s + mean_ttft_single(rate, stage_s) - stage_s


def mean_ttft_intra_op(rate: float, service_s: float, speedup: float) -> float:
    """Equation 3: one instance that is `speedup` (K) times as fast: D/K + R D² / (2 K (K - R D))."""
    return mean_ttft_single(rate, service_s / speedup)


def crossing_load(speedup: float, stages: int = 2) -> float:
    """The load R D above which stages give the lower mean TTFT, for a `speedup` between 1 and `stages`.

    Raises:
        ValueError: the speed-up is not between these: then one of them is better at any load.
    """
    if not 1 < speedup < stages:
        raise ValueError(
            f"{stages} devices side by side are between 1 and {stages} times as fast, not {speedup}"
        )
    low, high = 0.0, speedup
    while high - low > 1e-9:
        load = (low + high) / 2
        if mean_ttft_intra_op(load, 1.0, speedup) > mean_ttft_inter_op(load, 1.0, stages):
            high = load
        else:
            low = load
    return high
