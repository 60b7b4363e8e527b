"""What `benchmarks.kv_bytes` reads of a deployment that evicts."""

from __future__ import annotations

from typing import cast

from benchmarks.kv_bytes import keep_flags, kept_bytes, text_prompts
from benchmarks.load.deployment import ServedDeployment

METRICS = """# HELP diptych:kv_pruned_bytes_total Bytes of KV of sequences that evict: kept, or dropped
# TYPE diptych:kv_pruned_bytes_total counter
diptych:kv_pruned_bytes_total{outcome="kept"} 3072.0
diptych:kv_pruned_bytes_total{outcome="dropped"} 1024.0
diptych:kv_pruned_bytes_created{outcome="kept"} 1.7e+09
diptych:kv_pruned_freed_bytes_total 512.0
"""


class FakeDeployment:
    """A deployment with these metrics."""

    def metrics(self) -> str:
        return METRICS


def test_kept_bytes_are_counted_apart_from_dropped_ones() -> None:
    assert kept_bytes(cast(ServedDeployment, FakeDeployment())) == (3072.0, 4096.0)


def test_without_a_threshold_nothing_is_said_about_eviction() -> None:
    assert keep_flags(1.0) == () and keep_flags(0.95) == ("--kv-keep", "0.95")


def test_no_two_prompts_of_text_begin_alike() -> None:
    prompts = text_prompts(150, 960)
    assert {len(prompt) for prompt in prompts} == {960}
    assert len({tuple(prompt[:64]) for prompt in prompts}) == len(prompts)
