"""Splits the latency of a request into phases, from the times at which it entered its stages (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from diptych.request import RequestStage
from router.requests.request_state import RequestState


def first_token_breakdown(
    state: RequestState, seconds: Mapping[str, float], now_s: float
) -> dict[str, float]:
    """Seconds per phase until the first token, which came at `now_s`.

    `seconds` are the phases as the worker measured them.
    """
    entered_s = state.request.entered_s
    queued_s = entered_s[RequestStage.QUEUED]
    begun_s = queued_s if state.first_queued_s is None else state.first_queued_s
    queue = min(seconds.get("queue", 0.0), now_s - queued_s)
    prefill = min(seconds.get("prefill", now_s - queued_s), now_s - queued_s - queue)
    return {
        "admission": begun_s - entered_s[RequestStage.ADMITTED],
        "retry": queued_s - begun_s,
        "prefill_queue": queue,
        "prefill": prefill,
        "deliver": now_s - queued_s - queue - prefill,
    }


def decode_token_breakdown(state: RequestState, now_s: float) -> dict[str, float]:
    """Seconds per phase of the hand-off, until the decode worker's first token, which came at `now_s`."""
    entered_s = state.request.entered_s
    pulled_s, token_s = entered_s[RequestStage.DECODING], entered_s[RequestStage.PREFILLED]
    transfer_s = min(state.transfer_s, pulled_s - token_s)
    return {
        "decode_admission": pulled_s - token_s - transfer_s,
        "transfer": transfer_s,
        "first_decode": now_s - pulled_s,
    }
