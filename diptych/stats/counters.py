"""Which of a worker's statistics only grow."""

from __future__ import annotations

# The fields of `diptych.messages.WorkerStats` that are numbers and only grow.
WORKER_COUNTERS = (
    *("steps", "step_seconds", "step_tokens", "prefix_queries", "prefix_hits", "seat_pauses"),
    *("bulk_units", "bulk_seconds", "bulk_tokens", "bulk_preemptions", "tier_queries", "tier_hits"),
)
