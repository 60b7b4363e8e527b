"""The planner's basic types: requests, placements, step batches and costs, and results of requests.

Plain data and protocols, without numpy, because the simulator is built from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from annotated_types import Ge, Gt, Le, Lt, Predicate

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import ADA, KeepSpec, is_keep_rule
from diptych.slo import Slo

PREFILL, DECODE, BOTH = "prefill", "decode", "both"

# Bounds of numbers that come from files. pydantic checks them where a file is read (`planner.json_file`).
MAX_NUMBER, MAX_SECONDS, MAX_SHARE = 1e18, 1e3, 10.0
# Room that kept rows take beyond their number, in tokens: half a frame of 16 for each head, and the map of the rows.
BAG_SLACK_TOKENS = 9
Count = Annotated[int, Gt(0), Le(10**18)]
CountOrZero = Annotated[int, Ge(0), Le(10**18)]
Positive = Annotated[float, Gt(0.0), Le(MAX_NUMBER)]
PositiveOrZero = Annotated[float, Ge(0.0), Le(MAX_NUMBER)]
Seconds = Annotated[float, Ge(0.0), Le(MAX_SECONDS)]
# A rate that may be negative: the difference of two times.
SignedSeconds = Annotated[float, Ge(-MAX_SECONDS), Le(MAX_SECONDS)]
# A share of a peak rate; more than 1 where the data sheet's peak is not that of the operation.
PeakShare = Annotated[float, Gt(0.0), Le(MAX_SHARE)]


@dataclass(frozen=True, slots=True, order=True)
class Parallelism:
    """How one instance is spread over devices: `tp` devices share each layer, `pp` stages follow each other."""

    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        """Devices of one instance."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP{self.tp}" if self.pp == 1 else f"TP{self.tp}PP{self.pp}"


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload: arrival time, tokens of prompt and answer, and the kind whose SLOs apply.

    `prefix` names the blocks of `block_tokens` tokens that its prompt begins with: equal names mean equal text.
    `kv_class` is the class of KV that it asks for, by any name of its codec; "": the first one of its deployment.
    """

    at_s: float
    prompt: int
    output: int
    kind: str = ""
    prefix: tuple[int, ...] = ()
    block_tokens: int = 64
    kv_class: str = ""


@dataclass(frozen=True, slots=True)
class JobResult:
    """The simulated outcome of a job. `failed` is the reason of a failure ("" for success); times are then infinite.

    `tpot_s` is 0 for an answer of one token. `parts` are seconds by stage: queue, prefill, transfer, decode, …
    `moved_bytes` of its KV went over the link.
    """

    job: Job
    ttft_s: float
    tpot_s: float
    ended_s: float
    failed: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    moved_bytes: float = 0.0

    def meets_slo(self, slo: Slo) -> bool:
        """Whether the request succeeded within both its TTFT and its TPOT SLO."""
        return not self.failed and slo.is_met(self.ttft_s, self.tpot_s)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The work of one engine step, in the numbers that its cost depends on.

    `tokens` prompt tokens are prefilled. Each prompt contributes a slice from `start` to `end`; `squares` is the sum of
    end² - start², to which attention time is proportional. `rows` sequences decode one token each; together they have
    `context` tokens before it. Numbers of tokens are whole, unless some are of a KV class whose tokens cost more or
    less (`KvClassWork`).
    """

    tokens: float = 0
    squares: float = 0.0
    rows: int = 0
    context: float = 0


class CostModel(Protocol):
    """Step times of an instance with a given split. They never fall when any number of the batch grows."""

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of a step through the whole instance, from the begin of the first stage to the end of the last."""

    def stage_s(self, batch: StepBatch) -> float:
        """Seconds for which the step occupies its slowest stage; another batch may enter after that."""


@dataclass(frozen=True, slots=True)
class KvClassWork:
    """How the work on KV of a class compares with that on KV of the codec that a profile's costs are for.

    Ratios of seconds: `token` for each prompt token (coding it is part of that), `square` for each square of prompt
    tokens, `context` for each token of context of a sequence that decodes. So a step costs what a step without this
    class costs with so many times the tokens, squares and context.
    """

    token: Positive = 1.0
    square: Positive = 1.0
    context: Positive = 1.0


@dataclass(frozen=True, slots=True)
class KvClass:
    """A class of KV for which every instance has a pool. `share` is its share of the bytes for KV, up to 1.

    A token takes `token_bytes`, stored and moved. `room` is how many tokens the pool holds for each token that the
    instance would hold in the codec of its profile.
    """

    name: str
    share: float
    token_bytes: float
    room: float
    work: KvClassWork = KvClassWork()


@dataclass(frozen=True, slots=True)
class KvKeep:
    """What eviction of KV does at a `threshold`, as measured with the requests of a workload (`diptych.eviction_spec`).

    A sequence keeps `share` of its rows. When a prompt ends, deciding what stays takes `prompt_s` seconds for each of
    its tokens; after each further 64 tokens `answer_s` for each token of prompt and answer. `work` compares steps on
    such KV with steps on all of it; its ratios are for tokens before anything is dropped. `rule` is the one by which
    rows were dropped (`diptych.eviction_spec.KeepSpec`).
    """

    threshold: Annotated[float, Gt(0.0), Lt(1.0)]
    share: Annotated[float, Gt(0.0), Le(1.0)]
    prompt_s: Seconds = 0.0
    answer_s: Seconds = 0.0
    work: KvClassWork = KvClassWork()
    rule: Annotated[str, Predicate(is_keep_rule)] = ADA

    @property
    def spec(self) -> KeepSpec:
        """What requests ask for that keep so much."""
        return KeepSpec(self.threshold, rule=self.rule)

    def bag_chunks(self, tokens: int) -> int:
        """Chunks that hold what is kept of `tokens` tokens, with the map of it."""
        return max(1, math.ceil((self.share * tokens + BAG_SLACK_TOKENS) / CHUNK_TOKENS))

    def held_tokens(self, tokens: int) -> int:
        """Tokens of room, in whole chunks, of a sequence of `tokens` that has decided what it keeps."""
        return (self.bag_chunks(tokens) + 1) * CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link that carries KV between two instances. Transfers at the same time share its bandwidth."""

    bytes_per_s: Positive = math.inf
    latency_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class GatewayCpuCost:
    """CPU seconds that the gateway spends on each worker message, on each token that it forwards, and on each request.

    Half of `request_s` is spent when the request arrives, half when it has ended.
    """

    message_s: float = 0.0
    token_s: float = 0.0
    request_s: float = 0.0


@dataclass(frozen=True, slots=True)
class InstancePool:
    """`count` equal instances. `role` is prefill, decode, or both (colocated); `device` names the hardware."""

    role: str
    parallelism: Parallelism
    count: int = 1
    device: str = ""

    @property
    def devices(self) -> int:
        """Devices of all instances in the pool."""
        return self.count * self.parallelism.devices


@dataclass(frozen=True, slots=True)
class Placement:
    """A deployment: its pools, and whether KV must stay within a node.

    `cross` > 1 is DistServe's algorithm 2 for low node affinity: each instance is cut into `cross` equal segments on
    as many nodes, and a node holds the same segment of a prefill and of a decode instance. The split of an
    `InstancePool` is that of the whole instance.
    """

    pools: tuple[InstancePool, ...]
    # "high": KV moves fast between any two nodes; "low": KV moves only within a node; "none": no KV moves.
    affinity: str = "high"
    cross: int = 1

    @property
    def devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.devices for pool in self.pools)

    @property
    def colocated(self) -> bool:
        """Whether every instance both prefills and decodes."""
        return all(pool.role == BOTH for pool in self.pools)

    def role(self, *roles: str) -> Iterator[InstancePool]:
        """The pools with one of the given roles."""
        return (pool for pool in self.pools if pool.role in roles)

    def __str__(self) -> str:
        return " + ".join(f"{pool.count} × {pool.role} {pool.parallelism}" for pool in self.pools)


def keeps_steps_within_tpot(role: str, chunked: bool, local_prefill: str) -> bool:
    """Whether the scheduler limits an instance's steps to the TPOT SLO when it prefills beside running answers.

    A decode instance does so if it may prefill locally (`local_prefill` "auto"). A colocated instance does so if it
    prefills in chunks; without chunks it prefills a whole prompt before it continues with answers.
    """
    return chunked if role == BOTH else role == DECODE and local_prefill == "auto"


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The time of a layer without attention: `pass_s` for reading its weights, and so much for each row.

    A prompt's unit of n rows takes `prompt_pass_s + n * prompt_row_s`.
    """

    pass_s: Seconds
    row_s: Seconds
    prompt_pass_s: Seconds
    prompt_row_s: Seconds

    def decode_s(self, rows: float) -> float:
        """Seconds of a pass with so many decoding rows."""
        return self.pass_s + rows * self.row_s

    def scaled(self, factor: float) -> LayerTime:
        """The time of a layer that has `factor` times as many weights."""
        times = (self.pass_s, self.row_s, self.prompt_pass_s, self.prompt_row_s)
        return LayerTime(*(factor * one for one in times))


@dataclass(frozen=True, slots=True)
class BulkRates:
    """Rates of one machine with `threads` threads, for a model whose layers have `layer_weights` numbers in matrices.

    `int4` is the layer with weights of 4 bits, `coded_attention` the attention over KV of 4 bits; None where the
    processor or the model cannot have them. Rates of attention count the bytes of KV as they are stored.
    """

    threads: Count
    layer_weights: Positive
    exact: LayerTime
    # Bytes of KV per second that decoding rows attend to, and operations per second of prompts' attention.
    attention: Positive
    prompt_attention: Positive
    # Seconds of a row outside the layers: its logits, sampling, and the engine's work for its sequence.
    end_row_s: Seconds
    # Bytes per second: copies in memory, reads and writes of the disk past the page cache.
    copy: Positive
    disk_read: Positive
    disk_write: Positive
    # Whether the disk is read and written past the page cache by itself (O_DIRECT); else bytes are copied by the core.
    disk_direct: bool = True
    int4: LayerTime | None = None
    coded_attention: Positive | None = None
    # What coding, and attending to coded KV, adds to a row of a prompt.
    coded_row_s: SignedSeconds = 0.0
    # Seconds of a batch in each step, outside the layers.
    end_pass_s: Seconds = 0.0

    @property
    def widen_s(self) -> float | None:
        """What 4 bits add to a pass, in seconds: widening, less the bytes that are not read; None without 4 bits."""
        return None if self.int4 is None else self.int4.pass_s - self.exact.pass_s
