"""What is counted of the KV of answers: its class and why, what a codec saved, and what eviction kept."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Counter

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_report import KeptReport
from services.gateway.outcomes import KvClassRecord


class KvCounters:
    """Counters of the KV of answered sequences. `counter` makes one from its name, help text and labels."""

    def __init__(self, counter: Callable[..., Counter]) -> None:
        self.class_requests = counter(
            "diptych:kv_class_requests",
            "Answered sequences by KV class; reason: asked, default, quality, pool, link, prefix",
            "kv_class",
            "reason",
        )
        self.saved_bytes = counter(
            "diptych:kv_saved_bytes",
            "Bytes saved by codecs: pool (answered sequences), transfer (with canaries)",
            "kv_class",
            "where",
        )
        self.pruned_heads = counter(
            "diptych:kv_pruned_heads",
            "Heads of answered sequences that evict, by their policy or rule",
            "policy",
        )
        self.pruned_bytes = counter(
            "diptych:kv_pruned_bytes", "Bytes of KV of sequences that evict: kept, or dropped", "outcome"
        )
        self.freed_bytes = counter(
            "diptych:kv_pruned_freed_bytes", "Bytes by which sequences that evict took less of the pool"
        )

    def count_answer(self, record: KvClassRecord, num_tokens: int) -> None:
        """Count the KV of a sequence that was answered, of `num_tokens` tokens with its prompt."""
        self.class_requests.labels(record.kv_class, record.reason).inc()
        if record.saved_bytes_per_token:
            saved_bytes = num_tokens * record.saved_bytes_per_token
            self.saved_bytes.labels(record.kv_class, "pool").inc(saved_bytes)
        if record.kept is not None:
            self._count_kept(record.kept, record.bytes_per_token)

    def _count_kept(self, kept: KeptReport, bytes_per_token: int) -> None:
        """Count what was kept as it was last reported; `bytes_per_token` are those over all heads."""
        for policy, count in kept.policies.items():
            self.pruned_heads.labels(policy).inc(count)
        row_bytes = bytes_per_token / max(1, sum(kept.policies.values()))
        self.pruned_bytes.labels("kept").inc(kept.kept_rows * row_bytes)
        self.pruned_bytes.labels("dropped").inc(kept.pruned_rows * row_bytes)
        self.freed_bytes.inc(kept.freed_slabs * bytes_per_token * CHUNK_TOKENS)
