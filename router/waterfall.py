"""Where the time of a request went, from the moments at which it entered its stages (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from diptych.request import Stage
from router.live import Live


def first(live: Live, seconds: Mapping[str, float], now_s: float) -> dict[str, float]:
    """What goes with the first token, which came at `now_s`; `seconds` is what its worker says of itself."""
    entered_s = live.request.entered_s
    queued_s = entered_s[Stage.QUEUED]
    begun_s = queued_s if live.first_queued_s is None else live.first_queued_s
    queue = min(seconds.get("queue", 0.0), now_s - queued_s)
    prefill = min(seconds.get("prefill", now_s - queued_s), now_s - queued_s - queue)
    return {
        "admission": begun_s - entered_s[Stage.ADMITTED],
        "retry": queued_s - begun_s,
        "prefill_queue": queue,
        "prefill": prefill,
        "deliver": now_s - queued_s - queue - prefill,
    }


def second(live: Live, now_s: float) -> dict[str, float]:
    """What goes with the first token of the decode worker, which came at `now_s`."""
    entered_s = live.request.entered_s
    pulled_s, token_s = entered_s[Stage.DECODING], entered_s[Stage.PREFILLED]
    transfer_s = min(live.transfer_s, pulled_s - token_s)
    return {
        "decode_admission": pulled_s - token_s - transfer_s,
        "transfer": transfer_s,
        "first_decode": now_s - pulled_s,
    }
