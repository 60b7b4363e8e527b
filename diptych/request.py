"""A request, its sampling parameters, and the table of its legal stage changes.

Durations are differences of times in `entered_s`; no other time stamps of a request are kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from diptych.eviction_spec import KEEP_ALL, KeepSpec

# The size of a token id where many are kept or moved: that of a C unsigned int.
TOKEN_BYTES = array("I").itemsize


class GrammarGate(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where in an answer a grammar binds; elsewhere tokens are free.

    An answer that `is_free` begins without the grammar. `frees` is a token that may come first instead of what the
    grammar allows, and leaves the answer free. It is bound behind each sequence of `binds`. With `repeats` it is free
    again when the grammar is complete. `may_end`: it may end while it is free. It is bound from one of the tokens
    `starts` on, too, which is the first one of the grammar.
    """

    binds: tuple[tuple[int, ...], ...]
    is_free: bool = True
    frees: int | None = None
    repeats: bool = False
    may_end: bool = False
    starts: tuple[int, ...] = ()


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """Structured output: `kind` is "json_object", "json_schema", "regex", "choice" (`text` is a JSON list of texts),
    "lark" or "tools"; `text` is its source.

    Without a `gate` it binds the whole answer.
    """

    kind: str
    text: str = ""
    gate: GrammarGate | None = None


class ThoughtBudget(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many tokens of an answer may be thoughts, which begin behind the tokens `begin` and end with one of `ends`.

    `is_open`: the prompt has begun one. When `tokens` are used, the first of `ends` must follow.
    """

    tokens: int
    begin: tuple[int, ...]
    ends: tuple[int, ...]
    is_open: bool = False


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is computed of a prompt in place of an answer: a vector, or a score.

    `kind` says of which tokens the last hidden states are the vector: "last", "cls" (the first one), or "mean". It is
    cut to its first `dimensions`, unless these are 0, and has length 1 with `normalize`. "score" is the logistic
    function of the next token's logit for the last of `tokens`, less that for the one before it if there is one.
    """

    kind: str
    normalize: bool = False
    dimensions: int = 0
    tokens: tuple[int, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are sampled. The gateway resolves all values: a worker never fills in a default.

    `seed` is always set (random if the client gave none), so that another worker can continue the request with the same
    draws. `stop_token_ids` includes the model's end tokens, unless the client asked to ignore them. Stop *strings* are
    not here: only the gateway handles text.
    """

    # Most new tokens, at least 0; with 0 only the prompt is scored.
    max_tokens: int
    seed: int
    min_tokens: int = 0
    # 0 means greedy.
    temperature: float = 1.0
    top_p: float = 1.0
    # 0 means no limit.
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    # If there are any, only these tokens are chosen.
    allowed_token_ids: tuple[int, ...] = ()
    # Tokens that must not follow each other in the output: the last one of each is not chosen behind the others.
    bad_words: tuple[tuple[int, ...], ...] = ()
    # None means no log-probabilities; k adds the k most likely alternatives to each token.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    thought: ThoughtBudget | None = None
    # Whether the client gave the seed. If not, any other noise is as good.
    seeded: bool = True
    # Of a prompt that is pooled: nothing is sampled.
    pooling: Pooling | None = None


# What a worker may be able to continue exactly where another one stopped (`diptych.messages.Hello.traits`): a grammar
# and a budget of thoughts, penalties and bad words that look at the tokens of the answer, and the noise of a seed.
GRAMMAR, PENALTIES, SEED = CONTINUED = ("grammar", "penalties", "seed")
# What a worker may know of requests at all: tokens that are named (allowed ones, bad words, a choice). Workers of
# before do not say so, and would pass them over.
BANS = "bans"
TRAITS = (*CONTINUED, BANS)
# Of workers that exchange what heads keep in segments (`kvcache.eviction.kept_segments`): on the CPU, with one rank,
# weights for the rule `zap`, and no sliding windows.
SEGMENTS = "segments"

# The priorities that a client may ask for; lower ones are served sooner.
MIN_PRIORITY, MAX_PRIORITY = -10, 10
# The priority of bulk work, such as the lines of a batch: below every priority that a client may ask for.
BULK_PRIORITY = 1000


class Tenancy(msgspec.Struct, frozen=True, array_like=True):
    """On whose behalf a request runs, for scheduling and for prefix sharing.

    `tenant` identifies who shares resources fairly (a digest of the API key, never the key). `scope` is part of every
    chunk's address: prefixes are shared within a scope only. A lower `priority` is served sooner. `client_id` is the id
    that the client gave its HTTP request, for logs alone. A `canary` is a test of the gateway: no client waits for it.
    """

    tenant: str = ""
    scope: str = ""
    priority: int = 0
    client_id: str = ""
    canary: bool = False

    @property
    def bulk(self) -> bool:
        """Whether this is bulk work: it gets only the time and memory that online requests leave."""
        return self.priority >= BULK_PRIORITY


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as C unsigned ints; those of a long prompt are copied, not counted one by one."""
    return tokens.tobytes() if isinstance(tokens, memoryview) else array("I", tokens).tobytes()


class RequestStage(Enum):
    """Where a request is. The gateway's relay owns the request, and only the relay changes its stage."""

    # In the gateway's queue: no worker holds anything for it.
    ADMITTED = "admitted"
    # Sent to a prefill (or colocated) worker, which has not sent a token yet.
    QUEUED = "queued"
    # The first token was delivered, or is deferred (`diptych.messages.Prefill`). The prefill worker holds the KV, under
    # a lease once it has offered it.
    PREFILLED = "prefilled"
    # A decode worker was sent the ticket, to reserve slabs, pull the KV and verify it.
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL_STAGES = frozenset({RequestStage.DONE, RequestStage.FAILED, RequestStage.CANCELLED})

LEGAL_MOVES: dict[RequestStage, frozenset[RequestStage]] = {
    # The direct move to DONE: the attempt failed, and then a stop string was found in the text that it had produced.
    RequestStage.ADMITTED: frozenset({RequestStage.QUEUED, *TERMINAL_STAGES}),
    # The direct move to DECODING: one worker prefills and decodes. Every stage may return to ADMITTED: the attempt
    # failed, and the request waits for another one.
    RequestStage.QUEUED: frozenset(
        {RequestStage.ADMITTED, RequestStage.PREFILLED, RequestStage.DECODING, *TERMINAL_STAGES}
    ),
    RequestStage.PREFILLED: frozenset({RequestStage.ADMITTED, RequestStage.TRANSFERRING, *TERMINAL_STAGES}),
    RequestStage.TRANSFERRING: frozenset({RequestStage.ADMITTED, RequestStage.DECODING, *TERMINAL_STAGES}),
    RequestStage.DECODING: frozenset({RequestStage.ADMITTED, *TERMINAL_STAGES}),
    RequestStage.DONE: frozenset(),
    RequestStage.FAILED: frozenset(),
    RequestStage.CANCELLED: frozenset(),
}


@dataclass(slots=True)
class Request:
    """One sequence to generate: prompt token ids, sampling parameters, and its progress.

    `epoch` is the number of the running attempt. It grows with every attempt, and every message carries it, so messages
    of an earlier attempt are recognised as late and dropped (fencing).
    """

    id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    # Latest time at which the request may end, in seconds on the clock of `now_s`.
    deadline_s: float
    output: list[int] = field(default_factory=list)
    epoch: int = 0
    stage: RequestStage = RequestStage.ADMITTED
    entered_s: dict[RequestStage, float] = field(default_factory=dict)
    tenancy: Tenancy = Tenancy()
    # The KV class that it asks for (`diptych.messages.Hello.kv_classes`): its id, its codec's name, or `AUTO_CLASS`.
    # None: that of the workers.
    kv_class: str | None = None
    # It does not ask for `kv_class`, but needs it.
    default_class: bool = False
    # What may be dropped of its KV.
    keep: KeepSpec = KEEP_ALL
    # The names of the prompt's chunks (`router.routing.prefix_index.name_chunks`); None: they are not known yet.
    chunks: tuple[bytes, ...] | None = None

    def enter_stage(self, stage: RequestStage, now_s: float) -> None:
        """Enter `stage` at `now_s`.

        Raises:
            ValueError: the move is not in `LEGAL_MOVES`, which is always a bug.
        """
        if stage not in LEGAL_MOVES[self.stage]:
            raise ValueError(f"request {self.id}: {self.stage.name} -> {stage.name} is not allowed")
        self.stage = stage
        # ADMITTED keeps the time of arrival, however often the request returns to the queue.
        if stage is not RequestStage.ADMITTED:
            self.entered_s[stage] = now_s
