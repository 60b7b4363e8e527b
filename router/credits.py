"""What must be promised before a prompt is sent to be read (pure): a turn to read it, and room to write its answer.

    gateway's queue ──turn and room at p──▶ reading ──▶ lease at p ──room at d, promised before──▶ decoding

A prefill worker is a bounded queue between the pools. Whoever is sent there can be read, since its pool has room for
all prompts that it was given and that have not been fetched yet, and can be fetched, since a decode worker has
promised room. So neither pool ever waits for the other while it holds what the other needs. What has no promise waits
in the gateway, where it is ordered with all others, costs nothing to cancel, and is bound to workers late.

A worker that has nothing at all takes anything: whether it really fits is its own business to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy import Need, View, Way
from router.prefix_index import CHUNK_TOKENS

TURN_TOKENS = 512  # about a step; a longer prompt counts as one, since workers let shorter ones pass it by
MAX_TURN_TOKENS = 4 * TURN_TOKENS  # that may wait at a worker to be read, so that it never runs dry


def open_ways(found: Sequence[Way], need: Need, view: View) -> list[Way]:
    """Those of the ways `found` whose workers have credit for `need` now; each worker is looked at once."""
    tokens = whole_chunks(need.prompt_tokens)
    room = {
        target: _has_room(target, need.room_tokens - view.shared(target, need), view)
        for target in {target for _, target in found}
    }
    turn = {
        source: _has_turn(source, view) and _has_room(source, tokens, view)
        for source in {source for source, _ in found if source is not None}
    }
    return [
        (source, target)
        for source, target in found
        if room[target] and (_has_turn(target, view) if source is None else turn[source])
    ]


def whole_chunks(tokens: int) -> int:
    """The tokens that fit into as many chunks as these need."""
    return -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS


def _has_turn(worker: str, view: View) -> bool:
    return view.ledger.load(worker).turn_tokens < MAX_TURN_TOKENS


def _has_room(worker: str, tokens: int, view: View) -> bool:
    load = view.ledger.load(worker)
    capacity = view.fleet.members[worker].hello.num_slabs * CHUNK_TOKENS
    return not load.running or load.room_tokens + tokens <= capacity
