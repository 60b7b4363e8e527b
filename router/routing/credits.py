"""Credits: what must be free before a prompt is sent to a prefill worker (pure).

    gateway's queue ──prefill credit and room at p──▶ prefilling ──▶ lease at p ──room at d, reserved before──▶ decoding

A prefill worker is a bounded queue between the two pools. A prompt that is sent there can be prefilled, since the pool
has room for all prompts that it was sent and that have not been fetched yet. Its KV can be fetched, since room at a
decode worker was reserved. So neither pool ever waits for the other while it holds what the other needs. A request
without credit waits in the gateway, where it is ordered with all others, costs nothing to cancel, and gets its workers
as late as possible.

Where an overdraft is allowed (`router.routing.overdraft`), a prompt may also begin before its room at d is free.

Room is counted for each KV class of a worker by itself, since each has a pool of its own. A pool without any load
accepts every request; the worker itself checks whether it fits. At the decode worker,
requests of a worse priority do not count as load, since the worker preempts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import RING_AND_MAP_TOKENS
from router.routing.overdraft import (
    MAX_HELD_SHARE,
    MAX_MISSING_SHARE,
    AnswerEnds,
    RunningAnswer,
    frees_in_time,
    predicted_steps,
)
from router.routing.pairs import Pair, PairList, pair_list
from router.routing.policy import DEFAULT_STEP_S, RoutingNeed, RoutingView, seconds_per_unit
from router.workers.kv_classes import decided_class, pool_size

# Most tokens that one prompt counts for: about one step. Workers let shorter prompts pass a longer one.
CREDIT_TOKENS_PER_PROMPT = 512
# Most prompt tokens that may wait at a worker. They suffice for it to always have a next step.
MAX_CREDIT_TOKENS = 4 * CREDIT_TOKENS_PER_PROMPT
# The same limit for requests of tenants that have less in flight than their share.
MAX_CREDIT_TOKENS_UNDERSERVED = 6 * CREDIT_TOKENS_PER_PROMPT


def pairs_with_credit(found: Sequence[Pair], need: RoutingNeed, view: RoutingView) -> list[Pair]:
    """The pairs of `found` whose workers have credit for `need` now; each worker is examined once."""
    tokens, pairs = prefill_room_tokens(need), pair_list(found)
    if need.pools:
        # Its worker is to it what a prefill worker is to other prompts.
        return [
            (source, target)
            for source, target in pairs
            if _has_prefill_credit(target, view, need) and _has_kv_room(target, tokens, need, view)
        ]
    sources = {
        source
        for source in pairs.sources
        if _has_prefill_credit(source, view, need) and _has_kv_room(source, tokens, need, view)
    }
    # A worker that also prefills has the whole prompt, before any of it is dropped.
    alone = {
        target
        for target in pairs.alone
        if _has_prefill_credit(target, view, need)
        and (tokens <= need.room_tokens or _has_decode_room(target, tokens, need, view))
    }
    if not (sources or alone):
        return []
    full = {target for target in pairs.targets if not _has_decode_room(target, need.room_tokens, need, view)}
    return PairList(
        (source, target)
        for source, target in pairs
        if target not in full and (target in alone if source is None else source in sources)
    )


def pairs_with_overdraft(
    found: Sequence[Pair],
    need: RoutingNeed,
    view: RoutingView,
    answers_at: Callable[[str], Sequence[RunningAnswer]],
    ends: AnswerEnds,
    patience: float,
) -> list[Pair]:
    """The pairs of `found`, none of which has credit, where `need` may begin before its room at the decode worker is
    free.

    Only prompts that a prefill worker computes may. Both workers must have been measured.

    Args:
        found: the pairs; `view` has their workers.
        need: what the request asks for.
        view: the fleet, and its load.
        answers_at: what decodes at a worker in the pool that `need` takes room in, and counts as its load.
        ends: how long answers are.
        patience: the share of the prompt's time within which its room must be free.
    """
    tokens, worker_states = prefill_room_tokens(need), view.fleet.workers
    sources = {
        source: _has_prefill_credit(source, view, need)
        and _has_kv_room(source, tokens, need, view)
        and _may_hold(source, tokens, need, view)
        for source in sorted({source for source, _ in found if source is not None})
    }
    measured = [worker_states[source] for source, fits in sources.items() if fits]
    token_s = seconds_per_unit(
        [(one, one.stats.step_tokens) for one in measured if one.stats.step_tokens], 0.0
    )
    targets = [
        worker_states[target] for target in sorted({target for source, target in found if source in token_s})
    ]
    step_s = seconds_per_unit([(one, one.stats.steps) for one in targets if one.stats.steps], DEFAULT_STEP_S)
    allowed = list[Pair]()
    missing = {
        target: missing_room(target, need, view, need.room_tokens - view.shared_room(target, need))
        for target in step_s
    }
    answers = {
        target: answers_at(target)
        for target, tokens in missing.items()
        if _may_lack(target, need, view, tokens)
    }
    for source, target in found:
        if source is None or source not in token_s or target not in answers:
            continue
        new_tokens = need.prompt_tokens - view.spared_tokens(source, need)
        steps = predicted_steps(patience * new_tokens * token_s[source], step_s[target], answers[target])
        if frees_in_time(missing[target], answers[target], ends, steps):
            allowed.append((source, target))
    return allowed


def missing_room(worker: str, need: RoutingNeed, view: RoutingView, tokens: int) -> int:
    """Tokens of room that a decode worker lacks for what is booked there in the class of `need`, and for `tokens`."""
    hello = view.fleet.workers[worker].hello
    load = view.ledger.load_up_to(worker, need.priority, decided_class(hello, need.kv_class))
    return load.room_tokens + tokens - pool_size(hello, need.kv_class).num_slabs * CHUNK_TOKENS


def _may_lack(worker: str, need: RoutingNeed, view: RoutingView, tokens: int) -> bool:
    """Whether so much room may be missing at a decode worker."""
    pool = pool_size(view.fleet.workers[worker].hello, need.kv_class)
    return tokens <= MAX_MISSING_SHARE * pool.num_slabs * CHUNK_TOKENS


def _may_hold(worker: str, tokens: int, need: RoutingNeed, view: RoutingView) -> bool:
    """Whether a prefill worker may hold the KV of another overdrawn prompt until it has room."""
    hello = view.fleet.workers[worker].hello
    held = view.ledger.load_up_to(worker, None, decided_class(hello, need.kv_class)).overdrawn_tokens
    return held + tokens <= MAX_HELD_SHARE * pool_size(hello, need.kv_class).num_slabs * CHUNK_TOKENS


def prefill_room_tokens(need: RoutingNeed) -> int:
    """Tokens of room that a prompt needs at its prefill worker until its KV is offered."""
    extra = 0 if need.whole_tokens is None else RING_AND_MAP_TOKENS
    return round_up_to_chunks(need.prompt_tokens) + extra


def round_up_to_chunks(tokens: int) -> int:
    """`tokens`, rounded up to a multiple of the chunk size."""
    return -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS


def _has_prefill_credit(worker: str, view: RoutingView, need: RoutingNeed) -> bool:
    """Whether the worker has prefill credit left; some is kept for tenants that have had less than their share."""
    most = MAX_CREDIT_TOKENS_UNDERSERVED if need.underserved else MAX_CREDIT_TOKENS
    # A step of a block, or of a GPU, is large, and is to be full.
    most = max(most, view.fleet.workers[worker].hello.block_tokens)
    return view.ledger.load_of(worker, need.bulk).credit_tokens < most


def _has_decode_room(worker: str, tokens: int, need: RoutingNeed, view: RoutingView) -> bool:
    """Whether a decode worker has room for `tokens` of the request, those that others hold there included."""
    free = _free_tokens(worker, need, view, need.priority)
    # How much others hold there is looked up only where that decides.
    if tokens <= free or tokens - max(0, need.prompt_tokens - 1) > free:
        return tokens <= free
    return tokens - view.shared_room(worker, need) <= free


def _has_kv_room(worker: str, tokens: int, need: RoutingNeed, view: RoutingView) -> bool:
    """Whether the pool of the class of `need` has room for `tokens` more, whoever holds the others."""
    return tokens <= _free_tokens(worker, need, view)


def _free_tokens(worker: str, need: RoutingNeed, view: RoutingView, priority: int | None = None) -> float:
    """The tokens that are free in the pool of the class of `need`; infinite if nothing loads it.

    With a `priority`, requests of a worse one do not count.
    """
    hello = view.fleet.workers[worker].hello
    load = view.ledger.load_up_to(worker, priority, decided_class(hello, need.kv_class))
    capacity = pool_size(hello, need.kv_class).num_slabs * CHUNK_TOKENS
    return capacity - load.room_tokens if load.running else math.inf
