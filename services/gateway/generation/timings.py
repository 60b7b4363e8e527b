"""Says where a request's time went, for clients that ask for it (`X-Diptych-Timings: 1`).

The figures are those of the metrics and of traces. They are rounded to microseconds first and added up then, so the
stages that a client reads sum to the TTFT that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET

from services.gateway.generation.generation import SequenceStream
from services.gateway.metrics.prometheus import ttft_breakdown
from services.gateway.openai.schemas.response_schema import SequenceTimings, TransferTimings

SERVER_TIMING_HEADER = "server-timing"


def describe_timings(streams: Sequence[SequenceStream], now_s: float) -> list[SequenceTimings]:
    """The timings of each sequence that has a first token, at `now_s` (monotonic seconds)."""
    return [
        _sequence_timings(index, stream, now_s)
        for index, stream in enumerate(streams)
        if stream.record.first_written_s is not None
    ]


def _sequence_timings(index: int, stream: SequenceStream, now_s: float) -> SequenceTimings:
    record, timeline = stream.record, stream.timeline
    stages, handoff, moved = _to_ms(ttft_breakdown(record)), _to_ms(timeline.handoff_stages), timeline.moved
    return SequenceTimings(
        index=index,
        attempts=max(1, len(timeline.attempts)),
        ttft_ms=_sum_ms(stages),
        ttft_stages_ms=stages,
        handoff_ms=_sum_ms(handoff) if handoff else UNSET,
        handoff_stages_ms=handoff or UNSET,
        transfer=TransferTimings(
            hidden_ms=round(moved.hidden_s * 1e3, 3),
            exposed_ms=round(moved.exposed_s * 1e3, 3),
            num_bytes=moved.num_bytes,
        )
        if moved is not None
        else UNSET,
        total_ms=round((now_s - record.arrived_s) * 1e3, 3),
    )


def server_timing(timings: Sequence[SequenceTimings]) -> bytes:
    """The value of the `Server-Timing` header: the first sequence, in milliseconds."""
    if not timings:
        return b""
    first = timings[0]
    entries = {"ttft": first.ttft_ms, **first.ttft_stages_ms}
    if first.handoff_stages_ms is not UNSET:
        entries |= first.handoff_stages_ms
    if first.transfer is not UNSET:
        entries |= {
            "transfer_hidden": first.transfer.hidden_ms,
            "transfer_exposed": first.transfer.exposed_ms,
        }
    entries["total"] = first.total_ms
    return ", ".join(f"{name};dur={value:.3f}" for name, value in entries.items()).encode()


def _to_ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value * 1e3, 3) for name, value in seconds.items()}


def _sum_ms(stages: Mapping[str, float]) -> float:
    return round(sum(stages.values()), 3)
