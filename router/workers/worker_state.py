"""One living worker as the gateway knows it, and its links (plain data)."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.messages import Hello, WorkerStats


@dataclass(frozen=True, slots=True)
class KvLink:
    """A decode worker's measured link to one life of a prefill worker."""

    incarnation: str
    transport: str
    gb_per_s: float
    latency_us: float


@dataclass(slots=True)
class WorkerState:
    """One living worker. `links` (of decode workers) are by prefill worker.

    `link_errors` say why a link could not be made, `link_retry_s` when it is tried again. `ended` is how the worker's
    previous life ended, if known: "crashed", "killed", "alive" (the process is the same), or "".

    No request starts at a worker that is `draining`. While it also `accepts_pending`, the order to drain has not been
    sent (`router.requests.draining`): requests that are on their way to it may still arrive.
    """

    hello: Hello
    seen_s: float
    stats: WorkerStats = field(init=False)
    ended: str = ""
    draining: bool = False
    accepts_pending: bool = False
    links: dict[str, KvLink] = field(default_factory=dict)
    link_errors: dict[str, str] = field(default_factory=dict)
    link_retry_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Until the first heartbeat: the pool's size is known, and nothing is held.
        self.stats = WorkerStats(slabs_total=self.hello.num_slabs)

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.hello.worker

    @property
    def role(self) -> str:
        """Its role in this life: "prefill" or "decode"."""
        return self.hello.role
