"""A request, its sampling parameters, and the only table of its legal moves.

Durations are differences of `entered_s`; nothing else keeps time stamps of a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec


class Grammar(msgspec.Struct, frozen=True):
    """Structured output: `kind` is "json_object", "json_schema", "regex" or "lark"; `text` its source."""

    kind: str
    text: str = ""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen. Everything is resolved by the gateway: a worker never fills in a default.

    `seed` is always set (drawn by the gateway when the client gave none), so that a request can be continued elsewhere
    with the same draws. `stop_token_ids` includes the model's end tokens unless the client asked to ignore them. Stop
    *strings* are not here: text belongs to the gateway.
    """

    max_tokens: int  # new tokens, >= 0 (0 only scores the prompt)
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None is off; k adds the k most likely alternatives
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """On whose behalf a request runs, as far as scheduling and sharing need to know.

    `tenant` is what fairness counts by (a digest of the API key, never the key). `scope` goes into the root of every
    chunk's address: prefixes are shared within it and nowhere else. A lower `priority` is served sooner.
    """

    tenant: str = ""
    scope: str = ""
    priority: int = 0


class Stage(Enum):
    """Where a request is. The gateway's relay owns the request and is the only one to move it."""

    ADMITTED = "admitted"  # in the gateway's queue: no worker holds anything for it
    QUEUED = "queued"  # sent to a prefill (or colocated) worker, not yet running there as far as we know
    PREFILLED = "prefilled"  # first token delivered, KV held by the prefill worker under a lease
    TRANSFERRING = "transferring"  # a decode worker was told to reserve, pull and verify
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({Stage.DONE, Stage.FAILED, Stage.CANCELLED})

NEXT: dict[Stage, frozenset[Stage]] = {
    # DONE directly: the answer's end was found in the text of an attempt that has died meanwhile.
    Stage.ADMITTED: frozenset({Stage.QUEUED, *TERMINAL}),
    # DECODING directly: one worker reads and writes. ADMITTED again, from everywhere: the attempt died, another will
    # begin as soon as there are workers for it.
    Stage.QUEUED: frozenset({Stage.ADMITTED, Stage.PREFILLED, Stage.DECODING, *TERMINAL}),
    Stage.PREFILLED: frozenset({Stage.ADMITTED, Stage.TRANSFERRING, *TERMINAL}),
    Stage.TRANSFERRING: frozenset({Stage.ADMITTED, Stage.DECODING, *TERMINAL}),
    Stage.DECODING: frozenset({Stage.ADMITTED, *TERMINAL}),
    Stage.DONE: frozenset(),
    Stage.FAILED: frozenset(),
    Stage.CANCELLED: frozenset(),
}


@dataclass(slots=True)
class Request:
    """One sequence to generate: prompt token ids, sampling, and how far it has come.

    `epoch` is the fencing number of the running attempt: it grows with every attempt, and every message carries it, so
    whatever an earlier attempt still says is recognised as late and dropped.
    """

    id: str
    prompt: list[int]
    sampling: Sampling
    deadline_s: float  # on the clock that `now_s` is read from
    output: list[int] = field(default_factory=list)
    epoch: int = 0
    stage: Stage = Stage.ADMITTED
    entered_s: dict[Stage, float] = field(default_factory=dict)
    origin: Origin = Origin()

    def move(self, stage: Stage, now_s: float) -> None:
        """Enter `stage` at `now_s`.

        Raises:
            ValueError: the move is not in `NEXT`; that is a bug, never a state to tolerate.
        """
        if stage not in NEXT[self.stage]:
            raise ValueError(f"request {self.id}: {self.stage.name} -> {stage.name} is not allowed")
        self.stage = stage
        if stage is not Stage.ADMITTED:  # which keeps the moment of its arrival, however often it waits again
            self.entered_s[stage] = now_s
