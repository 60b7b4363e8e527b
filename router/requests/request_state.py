"""The state of a request that has not ended: the load that its attempt puts on workers, the phases of its latency."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from msgspec import structs

from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from diptych.eviction_report import KeptReport
from diptych.messages import Offer, Output
from diptych.request import SEGMENTS, TERMINAL_STAGES, Request, RequestStage
from router.effects import ChosenPair
from router.requests.continuable import NO_TRAITS, can_continue, traits_to_begin, traits_to_continue
from router.requests.failure_policy import NO_WORKERS, FailurePolicy
from router.routing.class_choice import ASKED, DEFAULT, BesideNeed, ClassDecision
from router.routing.credits import CREDIT_TOKENS_PER_PROMPT, prefill_room_tokens, round_up_to_chunks
from router.routing.eviction_estimate import KeptShares, held_tokens, kept_room_tokens, kept_tokens
from router.routing.load_ledger import WorkerLoad
from router.routing.overdraft import RunningAnswer
from router.routing.policy import RoutingNeed
from router.routing.prefix_index import ChunkNames
from router.workers.kv_classes import AnswerVersion


@dataclass(slots=True)
class ClassWish:
    """The KV class of the sequences of one HTTP request: they share one, so that they share the prompt and its name.

    `asked` is what the request says (`router.workers.kv_classes.names_class`), if anything; or, with `by_default`, what
    it needs without saying so. The `decision` for the first sequence counts for the others, as long as a sequence
    uses it: it has an attempt, or delivered tokens.

    `beside` is what all other sequences are expected to need beside the first one. `shared`: there is more than one.
    """

    asked: str | None = None
    by_default: bool = False
    decision: ClassDecision | None = None
    beside: BesideNeed = BesideNeed()
    shared: bool = False
    _used_by: set[str] = field(default_factory=set)

    def decide(self, request: str, decision: ClassDecision) -> None:
        """A sequence begins with this class."""
        self.decision = decision
        self._used_by.add(request)

    def release(self, request: str) -> None:
        """A sequence does not use the class any more."""
        self._used_by.discard(request)

    def bound_class(self, request: str) -> str | None:
        """The class that other sequences use, if any do."""
        others = len(self._used_by) > (request in self._used_by)
        return self.decision.kv_class if others and self.decision is not None else None

    @property
    def reason(self) -> str:
        """Why the sequences have the class that was decided last."""
        return DEFAULT if self.decision is None else self.decision.reason


class RequestKind(NamedTuple):
    """What the workers of a request must be able to do; requests of one kind can be served by the same pairs.

    `version` is that of its answer, if it has begun; `kv_class` the class that it needs, if any. `keep_rule`: KV is
    dropped in this class, by that rule. `bulk`: it is bulk work, which one worker does alone. `traits` are those that
    they need to serve it, or to continue its answer. `pools`: it is pooled, and has no answer.
    """

    version: AnswerVersion | None = None
    kv_class: str | None = None
    keep_rule: str = ""
    bulk: bool = False
    traits: frozenset[str] = NO_TRAITS
    pools: bool = False


@dataclass(slots=True)
class RequestState:
    """A request that has not ended.

    `holders` are the workers that hold something for the running attempt. `pair` has its workers; it is None while
    the request waits in the gateway. Until the Offer `pair.decode` may only be planned: it counts as load, but was
    sent nothing. `target` is the decode worker that the attempt was sent to.

    `chunks` name the full chunks of the prompt, `kept_chunks` what segments keep of some. `expected_tokens` is the
    expected length of the answer, from the lengths of recent answers. `prefill_kv_tokens` are the tokens whose KV the
    prefill worker will hold, in whole chunks; `unprefilled_tokens` are those that it has to compute. `shared_tokens`
    need no slabs of their own at the decode worker, since other requests hold theirs. These are the routing estimates
    from when its worker was chosen.

    `deferred`: the decode worker of the running attempt draws the first token. `continuable`: other workers can
    continue what the attempt delivers. `overdrawn`: the running attempt began before its decode worker had room, which
    it does not have yet. `cuts_kept`: its workers exchange what heads keep in segments (`diptych.request.SEGMENTS`).
    """

    request: Request
    # The number of the request in order of arrival.
    number: int
    pinned_pair: ChosenPair | None = None
    chunks: ChunkNames = ()
    kept_chunks: ChunkNames = ()
    expected_tokens: int = 0
    wish: ClassWish = field(default_factory=ClassWish)
    # What sequences that evict keep, as measured.
    kept_shares: KeptShares = field(default_factory=KeptShares)

    # Attempts that were given up because a worker was lost or had to end.
    losses: int = 0
    # Attempts that were given up for any other reason.
    failures: int = 0
    # The policy of the last failure.
    last_failure: FailurePolicy = NO_WORKERS
    # Workers that failed earlier attempts. Other workers are preferred.
    failed_workers: frozenset[str] = frozenset()
    # What the last attempt began with: the model's fingerprint, and the KV class.
    attempt_version: AnswerVersion | None = None

    pair: ChosenPair | None = None
    holders: set[str] = field(default_factory=set)
    staged: bool = False
    deferred: bool = False
    continuable: bool = True
    overdrawn: bool = False
    cuts_kept: bool = False
    # Tokens of the answer when the running attempt began to decode.
    tokens_before_decode: int = 0
    # Of a deferred attempt: the last Output of its prefill worker, and the durations until it came. Both are reported
    # with the first token.
    prefilled: Output | None = None
    prefill_seconds: dict[str, float] = field(default_factory=dict)
    target: str | None = None
    # Lives of the decode workers that this attempt was sent to. Each may be sent it once.
    contacted_lives: set[str] = field(default_factory=set)
    ticket: bytes = b""
    offered_s: float = 0.0
    prefill_kv_tokens: int = 0
    unprefilled_tokens: int = 0
    shared_tokens: int = 0
    # What the latest decision kept, if the sequence evicts; and the room that the attempt then has, in tokens.
    kept: KeptReport | None = None
    held_tokens: int = 0
    booked_tokens: int = 0

    first_queued_s: float | None = None
    # Moments whose durations have been reported: the "first" and the "second" token.
    reported_moments: set[str] = field(default_factory=set)
    transfer_s: float = 0.0

    @property
    def pinned(self) -> bool:
        """Whether this is a canary, which must use a given pair of workers."""
        return self.pinned_pair is not None

    @property
    def bulk(self) -> bool:
        """Whether this is bulk work."""
        return self.request.tenancy.bulk

    @property
    def pools(self) -> bool:
        """Whether the prompt is pooled: a prefill worker alone serves it."""
        return self.request.sampling.pooling is not None

    @property
    def source(self) -> str | None:
        """The prefill worker of the running attempt; None if its decode worker also prefills."""
        return self.pair.prefill if self.pair else None

    @property
    def room_tokens(self) -> int:
        """Tokens of KV that the request is expected to need at its end, in whole chunks: prompt and expected answer.

        `max_tokens` is not used: few answers reach it, and workers allocate memory only as answers grow. If the
        request evicts, only what it is expected to keep counts.
        """
        request, keep = self.request, self.request.keep
        tokens = len(request.prompt) + max(len(request.output), self.expected_tokens)
        if not keep.evicts:
            return round_up_to_chunks(tokens)
        return kept_room_tokens(tokens, keep.boundary, self.kept_share, self.held_tokens)

    @property
    def kept_share(self) -> float:
        """The share of its KV behind the boundary that the request keeps: its own if known, else that of others."""
        if self.kept is not None:
            return self.kept.kept_share
        kv_class = self.kv_class if self.attempt_version is None else self.attempt_version.kv_class
        return self.kept_shares.expected_share(kv_class or RAW_CLASS, self.request.keep)

    @property
    def handed_tokens(self) -> int:
        """For how many tokens of the next attempt KV is moved to a decode worker."""
        tokens, keep = len(self.request.prompt) + len(self.request.output), self.request.keep
        return kept_tokens(tokens, keep.boundary, self.kept_share) if keep.evicts else tokens

    @property
    def handed_chunks(self) -> ChunkNames:
        """The chunks of the prompt that a decode worker gets as they are, so that it can share them."""
        keep = self.request.keep
        return self.chunks[: keep.boundary_chunks] if keep.evicts else self.chunks

    @property
    def decoded_chunks(self) -> ChunkNames:
        """What its decode worker can share of the chunks of the prompt: whole ones, and those with segments."""
        return (*self.handed_chunks, *(self.kept_chunks if self.cuts_kept else ()))

    @property
    def attachable_tokens(self) -> int | None:
        """How many first tokens need not be computed where they are cached (`Sequence.attachable_keys`); None: all."""
        request = self.request
        if request.sampling.prompt_logprobs is not None and not request.output:
            return 0
        return request.keep.attachable_tokens(len(request.prompt)) if request.keep.evicts else None

    @property
    def version(self) -> AnswerVersion | None:
        """The model and KV class that must continue its answer; None if no token was delivered yet.

        Until then the client has seen nothing that another model or class would not continue in the same way.
        """
        return self.attempt_version if self.request.output else None

    @property
    def kv_class(self) -> str | None:
        """The KV class that the next attempt must have: that of its answer, or of the other sequences of its request,
        or what it asks for, if anything.
        """
        if self.version is not None:
            return self.version.kv_class
        return self.wish.bound_class(self.request.id) or self.wish.asked

    @property
    def kind(self) -> RequestKind:
        """What its workers must be able to do."""
        rule = self.request.keep.needed_rule
        return RequestKind(self.version, self.kv_class, rule, self.bulk, self.traits_to_go_on, self.pools)

    @property
    def traits_to_go_on(self) -> frozenset[str]:
        """The traits that the workers of the next attempt need; those to continue only if tokens were delivered."""
        return self._traits_needed(bool(self.request.output))

    def _traits_needed(self, continues: bool) -> frozenset[str]:
        sampling = self.request.sampling
        begins = traits_to_begin(sampling)
        return begins | traits_to_continue(sampling) if continues else begins

    @property
    def kv_reason(self) -> str:
        """Why the next attempt has its class, unless the router chooses it."""
        if self.version is not None or self.wish.bound_class(self.request.id) is not None:
            return self.wish.reason
        return DEFAULT if self.wish.asked is None or self.wish.by_default else ASKED

    @property
    def need(self) -> RoutingNeed:
        """What routing needs to know to choose workers for the next attempt: tokens, room, chunks and priority."""
        request = self.request
        total = len(request.prompt) + len(request.output)
        fingerprint = None if self.version is None else self.version.fingerprint
        bound = self.version is not None or self.wish.bound_class(request.id) is not None
        return RoutingNeed(
            total,
            self.room_tokens,
            fingerprint,
            self.chunks,
            request.tenancy.priority,
            kv_class=self.kv_class,
            whole_tokens=request.keep.boundary if request.keep.evicts else None,
            handed_tokens=self.handed_tokens if request.keep.evicts else None,
            beside=BesideNeed() if bound else self.wish.beside,
            traits=self.traits_to_go_on,
            pools=self.pools,
            attachable_tokens=self.attachable_tokens,
            kept_chunks=self.kept_chunks,
            kept_share=self.kept_share if self.kept_chunks else 1.0,
            keep_rule=request.keep.needed_rule,
        )

    @property
    def attempt_need(self) -> RoutingNeed:
        """As `need`, for the running attempt: its KV exists, or is being computed, in the class that it began with.

        Who decodes it continues what its prefill worker has drawn, or will draw.
        """
        if self.attempt_version is None:
            return self.need
        traits = self._traits_needed(not self.deferred) | frozenset([SEGMENTS] if self.cuts_kept else [])
        kept_chunks = self.kept_chunks if self.cuts_kept else ()
        kv_class = self.attempt_version.kv_class
        return replace(self.need, kv_class=kv_class, traits=traits, kept_chunks=kept_chunks)

    @property
    def shares(self) -> dict[str, WorkerLoad]:
        """The load that the request puts on each of its workers, including the planned decode worker."""
        pair, stage = self.pair, self.request.stage
        if pair is None or stage in TERMINAL_STAGES:
            return {}
        unprefilled = self.unprefilled_tokens if stage is RequestStage.QUEUED else 0
        credit = min(unprefilled, CREDIT_TOKENS_PER_PROMPT)
        if self.pools:
            return {pair.decode: WorkerLoad(unprefilled, 1, self.prefill_kv_tokens, credit)}
        room = max(0, self.room_tokens - self.shared_tokens)
        if pair.prefill is None:
            if stage is RequestStage.QUEUED:
                # Until then it has its whole prompt.
                room = max(room, self.prefill_kv_tokens - self.shared_tokens)
            return {pair.decode: WorkerLoad(unprefilled, 1, room, credit)}
        if stage is RequestStage.DECODING:
            return {pair.decode: WorkerLoad(0, 1, room)}
        moving = self.prefill_kv_tokens
        if not self.ticket:
            moving = min(moving, round_up_to_chunks(self.handed_tokens))
        moving = max(0, moving - self.shared_tokens)
        overdrawn = self.prefill_kv_tokens if self.overdrawn else 0
        return {
            pair.prefill: WorkerLoad(unprefilled, 1, self.prefill_kv_tokens, credit, moving, overdrawn),
            pair.decode: WorkerLoad(0, 1, room, moving_tokens=moving),
        }

    def running_answer(self, shared_tokens: int, now_s: float) -> RunningAnswer:
        """What is known of its end, while it decodes. `shared_tokens` of its prompt stay when it ends."""
        request = self.request
        decoded = len(request.output) - self.tokens_before_decode
        return RunningAnswer(
            max(0, self.room_tokens - max(self.shared_tokens, shared_tokens)),
            len(request.output),
            request.sampling.max_tokens,
            decoded,
            now_s - request.entered_s[RequestStage.DECODING] if decoded else 0.0,
        )

    def begin_attempt(
        self, pair: ChosenPair, version: AnswerVersion, reason: str, traits: Collection[str]
    ) -> None:
        """Begin another attempt, which no worker has been sent yet.

        `reason` is why it has its KV class; `traits` are those that all of its workers have.
        """
        self.wish.decide(self.request.id, ClassDecision(version.kv_class, reason))
        self.pair, self.attempt_version, self.staged = pair, version, False
        self.continuable = can_continue(self.request.sampling, traits)
        self.deferred = pair.prefill is not None and not self.continuable and self.decodes
        self.cuts_kept = pair.prefill is not None and self.request.keep.can_cut and SEGMENTS in traits
        self.target, self.ticket, self.contacted_lives, self.overdrawn = None, b"", set(), False
        self.prefilled, self.prefill_seconds = None, {}
        self.prefill_kv_tokens = prefill_room_tokens(self.need)

    @property
    def decodes(self) -> bool:
        """Whether a decode worker gets the KV: not if only one token is left to generate."""
        return self.request.sampling.max_tokens - len(self.request.output) > 1

    def stays_at(self, worker: str) -> bool:
        """Whether the running attempt decodes at this worker, and its answer cannot go on elsewhere."""
        return not self.continuable and self.pair is not None and worker == self.pair.decode

    def take_offer(self, offer: Offer, now_s: float) -> None:
        """The KV of the attempt is complete: from now on it counts for the slabs that it really has."""
        self.ticket, self.offered_s = offer.ticket, now_s
        if self.request.keep.evicts and offer.num_slabs:
            self.prefill_kv_tokens = offer.num_slabs * CHUNK_TOKENS
            # The decode worker needs a slab more, for the tokens since the decision.
            self.held_tokens = self.prefill_kv_tokens + CHUNK_TOKENS

    def complete_first(self, output: Output) -> Output:
        """An output of the attempt; if it has a deferred first token, with what was said of the prompt."""
        prefilled = self.prefilled
        if prefilled is None or not (output.tokens or output.finish):
            return output
        self.prefilled = None
        return structs.replace(
            output, prompt_logprobs=prefilled.prompt_logprobs, cached_tokens=prefilled.cached_tokens
        )

    def record_kept(self, report: KeptReport) -> None:
        """The request has decided what it keeps: from now on that counts."""
        if self.kept is None and self.attempt_version is not None:
            self.kept_shares.record_share(self.attempt_version.kv_class, self.request.keep, report)
        self.kept, self.held_tokens = report, held_tokens(report, self.request.keep.boundary)

    def end_attempt(self) -> None:
        """The running attempt is over, and no other has begun."""
        self.held_tokens = 0
        self.release_class()
        self.request.epoch += 1
        self.pair = self.target = None
        self.overdrawn = False

    def release_class(self) -> None:
        """Its attempt is over: it does not need its KV class any more, unless tokens were delivered."""
        if not self.request.output:
            self.wish.release(self.request.id)


def sum_beside(states: Sequence[RequestState]) -> BesideNeed:
    """What the sequences of an HTTP request need beside the first one, as it is booked when they begin together."""
    first, *others = states
    return BesideNeed(
        sum(prefill_room_tokens(state.need) for state in others),
        sum(state.room_tokens for state in others),
        sum(state.chunks == first.chunks for state in others),
    )


def total_demand(states: Sequence[RequestState]) -> tuple[int, int]:
    """Number of sequences, and of their prompt tokens."""
    return len(states), sum(len(state.request.prompt) for state in states)


def first_token_breakdown(
    state: RequestState, seconds: Mapping[str, float], now_s: float
) -> dict[str, float]:
    """Seconds per phase until the first token, which came at `now_s`.

    `seconds` are the phases as the worker measured them.
    """
    entered_s = state.request.entered_s
    queued_s = entered_s[RequestStage.QUEUED]
    begun_s = queued_s if state.first_queued_s is None else state.first_queued_s
    # Reading its prefix back from a tier, if that was done.
    restores = {name: min(seconds[name], now_s - queued_s) for name in ("restore",) if name in seconds}
    left_s = now_s - queued_s - sum(restores.values())
    queue = min(seconds.get("queue", 0.0), left_s)
    prefill = min(seconds.get("prefill", left_s), left_s - queue)
    return {
        "admission": begun_s - entered_s[RequestStage.ADMITTED],
        "retry": queued_s - begun_s,
        **restores,
        "prefill_queue": queue,
        "prefill": prefill,
        "deliver": left_s - queue - prefill,
    }


def decode_token_breakdown(state: RequestState, now_s: float) -> dict[str, float]:
    """Seconds per phase of the hand-off, until the decode worker's first token, which came at `now_s`."""
    entered_s = state.request.entered_s
    pulled_s, token_s = entered_s[RequestStage.DECODING], entered_s[RequestStage.PREFILLED]
    transfer_s = min(state.transfer_s, pulled_s - token_s)
    return {
        "decode_admission": pulled_s - token_s - transfer_s,
        "transfer": transfer_s,
        "first_decode": now_s - pulled_s,
    }
