"""Measures how late the gateway's event loop runs, for `/metrics`.

The lag is the delay that one request's work on the loop causes for all others.
"""

from __future__ import annotations

import asyncio
import time

from services.gateway.metrics.prometheus import GatewayMetrics

SAMPLE_INTERVAL_S = 0.02


async def observe_loop_lag(metrics: GatewayMetrics) -> None:
    """Measure the lag every `SAMPLE_INTERVAL_S` until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s, used_s = loop.time() + SAMPLE_INTERVAL_S, time.thread_time()
        await asyncio.sleep(SAMPLE_INTERVAL_S)
        lag_s = max(0.0, loop.time() - due_s)
        metrics.loop_lag.observe(lag_s)
        metrics.loop_work.observe(min(lag_s, time.thread_time() - used_s))
