"""What vLLM's NIXL connector counts about hand-offs, with its names and its buckets, so that its dashboards work."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

NIXL = "nixl"
# vLLM's bounds: seconds, and bytes from 2 KiB to 8 GiB.
SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
BYTES_BUCKETS = tuple(2.0**power for power in range(11, 34, 2))


class NixlHistograms:
    """Time and size of each hand-off that NIXL moved; `diptych:transfer_seconds` has those over shared memory too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "vllm:nixl_xfer_time_seconds",
            "Moving and verifying a request's KV over NIXL",
            registry=registry,
            buckets=SECONDS_BUCKETS,
        )
        self.num_bytes = Histogram(
            "vllm:nixl_bytes_transferred",
            "Bytes of KV per hand-off over NIXL",
            registry=registry,
            buckets=BYTES_BUCKETS,
        )

    def observe_transfer(self, transport: str, seconds: float, num_bytes: int) -> None:
        """Count one hand-off of `num_bytes` bytes that took `seconds`, if its `transport` is NIXL."""
        if transport == NIXL:
            self.seconds.observe(seconds)
            self.num_bytes.observe(num_bytes)
