"""Chooses the pair of workers for a request: the pair with the least predicted wait (pure).

    wait(p, d) = prefill: tokens queued at p, and twice the tokens of this prompt that p has not cached, at p's speed
               + transfer: link latency, and the bytes of KV that d has not cached, less what d saves if it reads some
                 of them back from a tier below its pool
               + decode: one step of d per request running there, less a bonus if d has the prefix cached
               + memory: the steps until d has freed as many tokens as it would be overcommitted by

Tokens to prefill count twice, for this request and for the next one with the same prefix: requests that arrive together
with a new prefix then queue behind one prefill instead of repeating it on every worker. They go elsewhere when p has
more queued than others by twice the prefix. On a worker that also decodes, the tokens count once more if any request
decodes there: an idle worker is then preferred even if it was measured as slower. A prefix cached at d saves its
transfer, and sequences that share a prefix are decoded together at less cost. So d is preferred while it runs at most
`AFFINITY` requests, and `AFFINITY_PART` more, than the least busy decode worker; this bonus is scaled by the shared
part of the prompt.

Loads come from the relay's own accounting, which is exact at any moment. Speeds come from heartbeats, and are limited
to `MAX_SPEED_RATIO` times the average of the role: a worker's load affects its measured speed, which must not decide
alone where the next load goes. Ties are broken by name. Whether a pair has room is decided in `router.routing.credits`.

Only workers that hold the request's KV class are considered (`router.workers.kv_classes`), with the slabs and bytes of
their pool of this class. A request whose class is not decided yet may take any pair.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter
from typing import NamedTuple

from diptych.chunks import CHUNK_TOKENS
from diptych.request import BULK_PRIORITY, SEGMENTS
from router.effects import ChosenPair
from router.routing.class_choice import BesideNeed
from router.routing.eviction_estimate import segment_tokens
from router.routing.load_ledger import LoadLedger
from router.routing.pairs import Pair, PairList, pair_list
from router.routing.prefix_index import ChunkNames, PrefixIndex
from router.routing.tier_savings import StoredChunks, stored_chunks
from router.workers.fleet import Fleet
from router.workers.kv_classes import can_evict, decided_class, holds_class, pool_size, share_class
from router.workers.worker_state import WorkerState

# Seconds to prefill one token, and seconds per step. They are assumed until a worker of the role has been measured.
DEFAULT_TOKEN_S, DEFAULT_STEP_S = 1e-3, 2e-2
# A worker's own speed counts as at most this factor faster or slower than the average of its role.
MAX_SPEED_RATIO = 2.0
# A decode worker that has the whole prefix may run this many more requests than the least busy worker: AFFINITY, plus
# the share AFFINITY_PART of the least busy worker's requests. With a part of the prefix it is proportionally less.
AFFINITY, AFFINITY_PART = 2.0, 0.25
MissingKv = tuple[int, StoredChunks]
# Reasons for prefill on a decode worker: no prefill worker can do it, or the decode worker is predicted to be faster.
NO_PREFILL, NO_LINK, SOONER = "no_prefill_worker", "no_link", "sooner"


@dataclass(frozen=True, slots=True)
class RoutingNeed:
    """What a request asks for: tokens to prefill, tokens of KV to have room for, and its priority (lower is better).

    `fingerprint` is the model that must continue its answer, if it has begun; `chunks` name the chunks of its prompt.
    `underserved`: its tenant has fewer tokens in flight than an equal share. `kv_class` is the KV class that its answer
    must stay with, if that is decided; else the one that it asks for, as `kv_classes.names_class` takes it.
    `whole_tokens` are the first tokens of its prompt whose KV a decode worker may share, if it drops some of the
    others, and `handed_tokens` are those whose KV it then gets; None: it drops none.
    `beside` is what other sequences of its HTTP request will need in the class that it gets. `traits` are those that
    its workers need to serve it, or to continue its answer (`router.requests.continuable`). `pools`: it is pooled, by
    one worker. `attachable_tokens` are the first tokens that need not be computed where they are cached; None: all.
    `kept_chunks` name what it keeps of chunks behind the whole ones, where decode workers share that: `kept_share` of
    their rows. `keep_rule` is by what rule, if only workers that have it may serve it.
    """

    prompt_tokens: int
    room_tokens: int
    fingerprint: str | None = None
    chunks: ChunkNames = ()
    priority: int = 0
    underserved: bool = False
    kv_class: str | None = None
    whole_tokens: int | None = None
    handed_tokens: int | None = None
    beside: BesideNeed = BesideNeed()
    traits: frozenset[str] = frozenset()
    pools: bool = False
    attachable_tokens: int | None = None
    kept_chunks: ChunkNames = ()
    kept_share: float = 1.0
    keep_rule: str = ""

    @property
    def bulk(self) -> bool:
        """Whether this is bulk work, which also waits for other bulk work; online requests wait for none of it."""
        return self.priority >= BULK_PRIORITY

    @property
    def evicts(self) -> bool:
        """Whether its workers must be able to drop KV by head in its class."""
        return self.whole_tokens is not None


# Find the pairs for a request without any requirements, and for one that is pooled.
ANY_REQUEST, ANY_POOLED = RoutingNeed(0, 0), RoutingNeed(0, 0, pools=True)


@dataclass(frozen=True, slots=True)
class RoutingView:
    """Everything that a routing decision depends on.

    `split`: the deployment has prefill workers. `only_pools`: it has no others, so all requests are pooled.
    `allow_local_prefill`: decode workers may prefill while no prefill worker can. `auto_local_prefill`: decode workers
    may also prefill whenever that is predicted to be better, as long as their steps stay within `tpot_s` seconds (if
    given).
    """

    fleet: Fleet
    ledger: LoadLedger
    split: bool
    index: PrefixIndex = field(default_factory=lambda: PrefixIndex(0))
    allow_local_prefill: bool = False
    auto_local_prefill: bool = False
    tpot_s: float | None = None
    only_pools: bool = False

    def shared_tokens(self, worker: str, need: RoutingNeed) -> int:
        """Prompt tokens that the worker is assumed to have cached; at least the last token is always computed."""
        worker_state, (chunks, kv_class) = self.fleet.workers[worker], self._usable_chunks(worker, need)
        shared = self.index.count_shared(worker_state.name, chunks, kv_class) if chunks else 0
        return min(CHUNK_TOKENS * shared, max(0, need.prompt_tokens - 1))

    def spared_tokens(self, worker: str, need: RoutingNeed) -> int:
        """Prompt tokens that a worker where prompts are prefilled is assumed not to compute: those that it has cached.

        What its host stores below the pools counts by the time that reading it back saves.
        """
        shared, stats = self.shared_tokens(worker, need), self.fleet.workers[worker].stats
        token_rate = stats.prefill_tokens_per_s
        if not (token_rate and stats.tiers):
            return shared
        spared_s = self.stored_chunks(worker, need).saved_s(CHUNK_TOKENS / token_rate)
        return min(shared + int(spared_s * token_rate), max(0, need.prompt_tokens - 1))

    def stored_chunks(self, worker: str, need: RoutingNeed) -> StoredChunks:
        """What a worker is assumed to lack, and to be able to read back from the tiers below its pool."""
        worker_state, (chunks, kv_class) = self.fleet.workers[worker], self._usable_chunks(worker, need)
        return stored_chunks(worker_state, self.index, chunks, kv_class)

    def _usable_chunks(self, worker: str, need: RoutingNeed) -> tuple[ChunkNames, str]:
        """The chunks of a prompt that the worker can use where they are stored, and their class of KV there."""
        hello, chunks = self.fleet.workers[worker].hello, need.chunks
        if need.whole_tokens is not None and hello.role == "decode":
            chunks = chunks[: need.whole_tokens // CHUNK_TOKENS]
        if need.attachable_tokens is not None and (hello.role == "prefill" or not self.split):
            chunks = chunks[: need.attachable_tokens // CHUNK_TOKENS]
        return chunks, decided_class(hello, need.kv_class)

    def shared_room(self, worker: str, need: RoutingNeed) -> int:
        """Tokens of room that the request needs not for itself at the worker that decodes it: those that the worker is
        assumed to have cached, and what segments there keep of others.
        """
        tokens = self.shared_tokens(worker, need)
        if not (need.kept_chunks and self.split):
            return tokens
        hello = self.fleet.workers[worker].hello
        if SEGMENTS not in hello.traits:
            return tokens
        count = self.index.count_shared(worker, need.kept_chunks, decided_class(hello, need.kv_class))
        return tokens + segment_tokens(count, need.kept_share)

    def eligible_workers(self, role: str, need: RoutingNeed) -> list[WorkerState]:
        """Workers of a role that serve the model and hold the KV class of `need`, and do not drain."""
        return [
            worker_state
            for worker_state in self.fleet.workers_of(role)
            if _can_serve(worker_state, need) and not worker_state.draining
        ]


def find_pairs(need: RoutingNeed, view: RoutingView) -> PairList:
    """All pairs that could serve `need` now.

    These are the linked pairs; in a deployment without prefill workers, the decode workers alone, and also while no
    prefill worker can prefill and `allow_local_prefill` is set. Bulk work is always prefilled where it is decoded. What
    is pooled ends at the worker that prefills it, and is given to it as to one that does both.
    """
    if need.pools or view.only_pools:
        able = view.eligible_workers("prefill" if view.split else "decode", need)
        return PairList((None, worker_state.name) for worker_state in able if worker_state.hello.pools)
    decode = view.eligible_workers("decode", need)
    if not view.split or need.bulk:
        return PairList((None, worker_state.name) for worker_state in decode)
    prefill = [
        (worker_state.name, worker_state.hello) for worker_state in view.eligible_workers("prefill", need)
    ]
    decode_links = [(worker_state.name, worker_state.links, worker_state.hello) for worker_state in decode]
    pairs = PairList(
        (source, target)
        for source, source_hello in prefill
        for target, links, target_hello in decode_links
        if source in links
        and (need.kv_class is None or share_class(source_hello, target_hello, need.kv_class))
    )
    if pairs or not view.allow_local_prefill:
        return pairs
    return PairList(
        (None, target.name)
        for target in decode
        # Without an error for every prefill worker, a link may still come about any moment; but never without a class
        # that both have.
        if all(
            source in target.link_errors or not share_class(source_hello, target.hello, need.kv_class)
            for source, source_hello in prefill
        )
    )


class RankedPair(NamedTuple):
    """A pair with its predicted wait in seconds. The least one is the best; ties are broken by name."""

    wait_s: float
    prefill: str
    decode: str
    overdrawn: bool = False

    @property
    def pair(self) -> ChosenPair:
        """The workers; `prefill` is empty if the decode worker also prefills."""
        return ChosenPair(self.prefill or None, self.decode)


def worker_waits(
    need: RoutingNeed, view: RoutingView, pairs: PairList
) -> tuple[dict[str, float], dict[str, float]]:
    """Predicted seconds that a request waits at each worker of the pairs: to be prefilled there, and to be decoded."""
    worker_states = view.fleet.workers
    decode_s = _decode_wait_s(_workers_named(worker_states, pairs.targets), need, view)
    prefill_s = _prefill_wait_s(_workers_named(worker_states, pairs.sources), need, view) | (
        _local_prefill_wait_s
        if view.auto_local_prefill and not (need.bulk or need.pools)
        else _colocated_wait_s
    )(_workers_named(worker_states, pairs.alone), need, view)
    return prefill_s, decode_s


def choose_pair(need: RoutingNeed, view: RoutingView, among: Iterable[Pair]) -> RankedPair | None:
    """The pair with the least predicted wait among `among`, whose workers must be members; None if there is none."""
    pairs = pair_list(among)
    prefill_s, decode_s = worker_waits(need, view, pairs)
    # No transfer takes less than no time: what is worse than the best even then is never the best.
    least_s = [prefill_s[source or target] + decode_s[target] for source, target in pairs]
    best: RankedPair | None = None
    missing_of = cache(partial(_missing_kv, need=need, view=view))
    for bound_s, (source, target) in sorted(zip(least_s, pairs, strict=True), key=itemgetter(0)):
        if best is not None and bound_s > best.wait_s:
            break
        moved_s = _link_s(source, target, need, view, missing_of(target)) if source else 0.0
        wait_s = prefill_s[source or target] + moved_s + decode_s[target]
        ranked = RankedPair(wait_s, source or "", target)
        best = ranked if best is None else min(best, ranked)
    return best if best is not None and best.wait_s < math.inf else None


def choose_decode(
    prefill: str, need: RoutingNeed, view: RoutingView, barred: Container[str] = ()
) -> str | None:
    """The decode worker, linked to `prefill` and not in `barred`, with the least predicted wait for transfer and
    decode.

    It is chosen when the KV is ready, or while the KV is computed. If all linked workers drain, one that has not been
    sent its order yet may be chosen: `prefill` gets no new prompts then, so the requests for it come to an end.
    """
    if prefill not in view.fleet.workers:
        return None
    linked = [
        worker_state
        for worker_state in view.fleet.workers_of("decode")
        if prefill in worker_state.links and _can_serve(worker_state, need)
    ]
    open_ = [worker_state for worker_state in linked if not worker_state.draining] or [
        worker_state for worker_state in linked if worker_state.accepts_pending
    ]
    decode = [worker_state for worker_state in open_ if worker_state.name not in barred]
    decode_s = _decode_wait_s(decode, need, view)
    targets = [(transfer_s(prefill, name, need, view) + decode_s[name], name) for name in decode_s]
    return min(targets)[1] if targets else None


def _missing_kv(target: str, need: RoutingNeed, view: RoutingView) -> MissingKv:
    """How many chunks `target` lacks, and what it may read back of them: the same whichever link they come over."""
    tokens = need.prompt_tokens if need.handed_tokens is None else need.handed_tokens
    chunks = -(-max(0, tokens - view.shared_room(target, need)) // CHUNK_TOKENS)
    return chunks, view.stored_chunks(target, need)


def transfer_s(source: str, target: str, need: RoutingNeed, view: RoutingView) -> float:
    """Predicted seconds until `target` has the KV that it is not assumed to have, over the link from `source`."""
    return _link_s(source, target, need, view, _missing_kv(target, need, view))


def _link_s(source: str, target: str, need: RoutingNeed, view: RoutingView, missing: MissingKv) -> float:
    link, (chunks, stored) = view.fleet.workers[target].links[source], missing
    chunk_bytes = pool_size(view.fleet.workers[source].hello, need.kv_class).chunk_bytes
    chunk_s = chunk_bytes / (max(link.gb_per_s, 1e-3) * 1e9)
    moved_s = chunks * chunk_s
    return link.latency_us * 1e-6 + (moved_s - min(stored.saved_s(chunk_s), moved_s))


def _can_serve(worker_state: WorkerState, need: RoutingNeed) -> bool:
    """Whether the worker runs the model that must continue the request, if any, with the traits that this takes, holds
    its KV class, and can evict in it, by its rule, if the request needs that.
    """
    if need.evicts and not can_evict(worker_state.hello, need.kv_class, need.keep_rule):
        return False
    if need.traits and not need.traits.issubset(worker_state.hello.traits):
        return False
    return need.fingerprint in (None, worker_state.hello.fingerprint) and holds_class(
        worker_state.hello, need.kv_class
    )


def _workers_named(worker_states: Mapping[str, WorkerState], names: Iterable[str]) -> list[WorkerState]:
    return [worker_states[name] for name in sorted(names)]


def _prefill_wait_s(
    worker_states: list[WorkerState], need: RoutingNeed, view: RoutingView
) -> dict[str, float]:
    """Predicted seconds until each prefill worker has finished this prompt: its queue, and twice the new tokens."""
    token_s = seconds_per_unit(
        [(worker_state, worker_state.stats.step_tokens) for worker_state in worker_states], DEFAULT_TOKEN_S
    )
    new_tokens = {name: need.prompt_tokens - view.spared_tokens(name, need) for name in token_s}
    return {
        name: (view.ledger.load_of(name).queued_tokens + 2 * new_tokens[name]) * token_s[name]
        for name in token_s
    }


def _colocated_wait_s(
    worker_states: list[WorkerState], need: RoutingNeed, view: RoutingView
) -> dict[str, float]:
    """As `_prefill_wait_s`, for workers in a deployment where every worker both prefills and decodes.

    There, measured seconds per prefilled token also include decoding: the worker with the most prompts would look
    fastest and get yet more. So the time per token is the average of all workers, scaled by how long this worker's
    steps are. Requests that decode there wait for the prefill: the new tokens count once more if there are any, however
    many, so that a cached prefix still outweighs it.
    """
    tokens = sum(worker_state.stats.step_tokens for worker_state in worker_states)
    token_s = (
        sum(worker_state.stats.step_seconds for worker_state in worker_states) / tokens
        if tokens
        else DEFAULT_TOKEN_S
    )
    steps_s = seconds_per_unit(
        [(worker_state, worker_state.stats.steps) for worker_state in worker_states], DEFAULT_STEP_S
    )
    # The mean is 0 if no step took any time.
    step_s = sum(steps_s.values()) / max(1, len(steps_s)) or DEFAULT_STEP_S
    waits_s: dict[str, float] = {}
    for name in steps_s:
        load, new = (
            view.ledger.load_of(name, need.bulk),
            need.prompt_tokens - view.spared_tokens(name, need),
        )
        tokens = load.queued_tokens + (2 + min(load.running, 1)) * new
        waits_s[name] = tokens * token_s * steps_s[name] / step_s
    return waits_s


def _local_prefill_wait_s(
    worker_states: list[WorkerState], need: RoutingNeed, view: RoutingView
) -> dict[str, float]:
    """As `_prefill_wait_s`, for decode workers that prefill between decode steps, so that all their requests wait.

    The time per token is taken from the prefill workers, which only prefill. With `tpot_s`, only the part of each step
    that decoding leaves is used for prefill; if nothing is left, the wait is infinite.
    """
    prefill_workers = [
        worker_state for worker_state in view.fleet.workers_of("prefill") if worker_state.stats.step_tokens
    ] or worker_states
    tokens = sum(worker_state.stats.step_tokens for worker_state in prefill_workers)
    token_s = (
        sum(worker_state.stats.step_seconds for worker_state in prefill_workers) / tokens
        if tokens
        else DEFAULT_TOKEN_S
    )
    step_s = seconds_per_unit(
        [(worker_state, worker_state.stats.steps) for worker_state in worker_states], DEFAULT_STEP_S
    )
    waits_s: dict[str, float] = {}
    for worker_state in worker_states:
        load, new = (
            view.ledger.load_of(worker_state.name),
            need.prompt_tokens - view.spared_tokens(worker_state.name, need),
        )
        waits_s[worker_state.name] = (load.queued_tokens + (2 + load.running) * new) * token_s
        if view.tpot_s is not None and load.running:
            left_s = view.tpot_s - step_s[worker_state.name]
            waits_s[worker_state.name] = (
                waits_s[worker_state.name] * view.tpot_s / left_s if left_s > 0 else math.inf
            )
    return waits_s


def _decode_wait_s(
    worker_states: list[WorkerState], need: RoutingNeed, view: RoutingView
) -> dict[str, float]:
    """Predicted seconds of waiting at each decode worker: other requests there, and lack of memory, in its steps."""
    step_s = seconds_per_unit(
        [(worker_state, worker_state.stats.steps) for worker_state in worker_states], DEFAULT_STEP_S
    )
    loads = {
        worker_state.name: view.ledger.load_of(worker_state.name, need.bulk) for worker_state in worker_states
    }
    most = AFFINITY + AFFINITY_PART * min([load.running for load in loads.values()], default=0)
    waits_s: dict[str, float] = {}
    for worker_state, (name, load) in zip(worker_states, loads.items(), strict=True):
        shared_tokens = view.shared_room(name, need)
        steps = load.running - most * shared_tokens / max(1, need.prompt_tokens)
        capacity = pool_size(worker_state.hello, need.kv_class).num_slabs * CHUNK_TOKENS
        kv_class = decided_class(worker_state.hello, need.kv_class)
        booked = view.ledger.load_up_to(name, need.priority if need.bulk else None, kv_class).room_tokens
        missing_tokens = booked + need.room_tokens - shared_tokens - capacity
        if missing_tokens > 0:
            steps += missing_tokens / max(1, load.running)
        waits_s[name] = steps * step_s[name]
    return waits_s


def seconds_per_unit(worker_counts: list[tuple[WorkerState, int]], default_s: float) -> dict[str, float]:
    """Busy seconds per counted unit (token or step) of each worker, within MAX_SPEED_RATIO of the average.

    `default_s` is that of every worker if none has been measured.
    """
    units = sum([count for _, count in worker_counts])
    mean_s = (
        sum([worker_state.stats.step_seconds for worker_state, _ in worker_counts]) / units
        if units
        else default_s
    )
    least_s, most_s = mean_s / MAX_SPEED_RATIO, mean_s * MAX_SPEED_RATIO
    return {
        worker_state.name: min(max(worker_state.stats.step_seconds / count, least_s), most_s)
        if count
        else mean_s
        for worker_state, count in worker_counts
    }
