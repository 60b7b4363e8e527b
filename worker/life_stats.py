"""The statistics of one life of a worker: one engine serves several roles, each with counts of its own."""

from __future__ import annotations

import msgspec

from diptych.messages import WorkerStats


def stats_since(now: WorkerStats, then: WorkerStats) -> WorkerStats:
    """`now`, with the counters counted from `then` on: one engine serves several roles, each with its own counts."""
    if not (then.steps or then.prefix_queries or then.bulk_units):
        return now
    return msgspec.structs.replace(
        now,
        steps=now.steps - then.steps,
        step_seconds=now.step_seconds - then.step_seconds,
        step_tokens=now.step_tokens - then.step_tokens,
        prefix_queries=now.prefix_queries - then.prefix_queries,
        prefix_hits=now.prefix_hits - then.prefix_hits,
        preemptions={kind: count - then.preemptions.get(kind, 0) for kind, count in now.preemptions.items()},
        seat_pauses=now.seat_pauses - then.seat_pauses,
        bulk_units=now.bulk_units - then.bulk_units,
        bulk_seconds=now.bulk_seconds - then.bulk_seconds,
        bulk_tokens=now.bulk_tokens - then.bulk_tokens,
        bulk_preemptions=now.bulk_preemptions - then.bulk_preemptions,
        step_parts={part: spent - then.step_parts.get(part, 0.0) for part, spent in now.step_parts.items()},
    )
