"""The planner's words: what is asked for, what may be deployed, what a step costs, and how requests fared.

Plain data and protocols, without numpy: the simulator is built from these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

PREFILL, DECODE, BOTH = "prefill", "decode", "both"


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """How one instance is spread over devices: `tp` devices share each layer, `pp` stages follow each other."""

    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP{self.tp}" if self.pp == 1 else f"TP{self.tp}PP{self.pp}"


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request of one kind is promised, in seconds, and how many of them must get it.

    TTFT ends with the first token; TPOT is what follows, divided by the tokens after the first (DistServe section 2).
    A request attains its objective if it keeps both: joint attainment, not two quantiles.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    attainment: float = 0.9


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a workload: when it comes, tokens of its prompt and answer, and whose promise it is under.

    `prefix` names the blocks that its prompt begins with, of `block_tokens` each: equal names are equal text.
    """

    at_s: float
    prompt: int
    output: int
    kind: str = ""
    prefix: tuple[int, ...] = ()
    block_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Served:
    """How a job fared. `failed` is why it got no answer, and then the times are infinite.

    `tpot_s` is 0 for an answer of one token. `parts` are seconds by stage: queue, prefill, transfer, decode, …
    """

    job: Job
    ttft_s: float
    tpot_s: float
    ended_s: float
    failed: str = ""
    parts: dict[str, float] = field(default_factory=dict)

    def attains(self, slo: Slo) -> bool:
        return not self.failed and self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes.

    `tokens` of prompts, whose slices from `start` to `end` add up to `squares` = sum of end² - start² (the attention's
    share: whole prompts give sum of length²); `rows` that write one token each, with `context` tokens before them.
    """

    tokens: int = 0
    squares: float = 0.0
    rows: int = 0
    context: int = 0


class Cost(Protocol):
    """Seconds of work, of an instance with a given split. Never falls when any number of a batch grows."""

    def step_s(self, batch: Batch) -> float:
        """A step through the whole instance: with several stages, from the first one's begin to the last one's end."""

    def stage_s(self, batch: Batch) -> float:
        """The time for which the step occupies its slowest stage; another batch may enter after that."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way for KV between two instances, shared by those that use it at one time."""

    bytes_per_s: float = math.inf
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Handling:
    """Seconds of its processor that a gateway spends on each message of a worker, on each token that it passes on, and
    on each request beside that: half when it comes, half when it has ended.
    """

    message_s: float = 0.0
    token_s: float = 0.0
    request_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pool:
    """`count` equal instances. `role` is prefill, decode, or both (colocated). `device` names the hardware."""

    role: str
    split: Split
    count: int = 1
    device: str = ""

    @property
    def devices(self) -> int:
        return self.count * self.split.devices


@dataclass(frozen=True, slots=True)
class Placement:
    """What is deployed: pools, and whether KV stays within a node.

    `cross` > 1 (low node affinity, DistServe algorithm 2): each instance is cut into that many equal segments, one a
    node, and a node holds the same segment of a prefill and of a decode instance. A `Pool`'s split is the whole's.
    """

    pools: tuple[Pool, ...]
    affinity: str = "high"  # "high": KV goes anywhere fast; "low": only within a node; "none": nothing moves
    cross: int = 1

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    @property
    def colocated(self) -> bool:
        return all(pool.role == BOTH for pool in self.pools)

    def role(self, *roles: str) -> Iterator[Pool]:
        return (pool for pool in self.pools if pool.role in roles)

    def __str__(self) -> str:
        return " + ".join(f"{pool.count} × {pool.role} {pool.split}" for pool in self.pools)


def within_tpot(role: str, chunked: bool, local_prefill: str) -> bool:
    """Whether an instance's steps are kept within the TPOT objective, as it may read prompts beside answers: slices of
    them, or where that is sooner than elsewhere (`local_prefill` "auto"). An instance that does both and reads prompts
    whole reads them before it goes on with answers, however long that takes.
    """
    return chunked if role == BOTH else role == DECODE and local_prefill == "auto"
