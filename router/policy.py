"""Which pair of workers a request should go to: the one that is predicted to make it wait least (pure).

    wait(p, d) = what p has yet to read, and of this prompt what p is not thought to have, at p's speed
               + the link: latency, and the bytes of KV that d is not thought to have
               + company at d: a step for each request running there, less some if d has the prefix
               + room at d: the steps until as many tokens are freed as d would be overcommitted by

A prefix that p has saves its reading. What must be read counts twice: for this request, and for whoever comes next, so
requests that arrive together with one new prefix rather queue behind it than read it on every worker. They go elsewhere
when p has more to read than others by twice the prefix. On a worker that also writes answers it counts once more if
there are any: while one that has none is idle, a prompt is better read there, though that one may have been slower
lately. A prefix that d has saves moving it, and sequences that share one are decoded together at less cost, so d is
preferred while it runs at most `AFFINITY` requests, and a quarter, more than the least busy. Both bounds shrink with
the part of the prompt that is shared: nothing in common, no preference.

All loads come from the relay's own books, which are exact at any moment; only speeds come from the workers' beats, and
are trusted within a factor of the average of their role: what a worker was given makes it look fast or slow, and must
not decide alone what it is given next. Ties are broken by name.

Whether there is room for a request at all is not asked here (`router.credits`).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from router.effects import Choice
from router.fleet import Fleet, Member
from router.prefix_index import CHUNK_TOKENS, Chunks, PrefixIndex

TOKEN_S, STEP_S = (
    1e-3,
    2e-2,
)  # to read a token, to make a step: assumed until one of the role has been measured
TRUST = 2.0  # how far, as a factor, a worker's own speed may differ from the average of its role
# Requests that a shared prefix outweighs at a decode worker: so many, and a part of what the least busy one runs.
AFFINITY, AFFINITY_PART = 2.0, 0.25
FADE = 0.95  # weight of the past in the length of answers, per answer
FIRST_ANSWER_TOKENS = 256.0  # assumed before there was one
# Why a decode worker reads a prompt: no other can, or it is predicted to be done sooner.
NO_PREFILL, NO_LINK, SOONER = "no_prefill_worker", "no_link", "sooner"

Way = tuple[str | None, str]  # a prefill and a decode worker, or one that does both


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks for: tokens to read, tokens to have room for, the fingerprint it began with, if any, and the
    names of its prompt's chunks.
    """

    prompt_tokens: int
    room_tokens: int
    fingerprint: str | None = None
    chunks: Chunks = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What was given to a worker: prompt tokens it has yet to read, requests, and tokens that need room there.

    `turn_tokens` are those to be read as well, but no prompt counts for more than `router.credits.TURN_TOKENS`.
    """

    queued_tokens: int = 0
    running: int = 0
    room_tokens: int = 0
    turn_tokens: int = 0

    def plus(self, other: Load, sign: int = 1) -> Load:
        """Both loads together, or (`sign` -1) the rest when the other is taken away."""
        return Load(
            self.queued_tokens + sign * other.queued_tokens,
            self.running + sign * other.running,
            self.room_tokens + sign * other.room_tokens,
            self.turn_tokens + sign * other.turn_tokens,
        )


IDLE = Load()


class Ledger:
    """Which worker has been given what, by request. An entry replaces what the request had before."""

    def __init__(self) -> None:
        self._shares: dict[str, dict[str, Load]] = {}  # worker -> request -> its share
        self._totals: dict[str, Load] = {}
        self._workers: dict[str, tuple[str, ...]] = {}  # request -> workers

    def book(self, request: str, shares: Mapping[str, Load]) -> None:
        """From now on the request burdens exactly these workers; none if `shares` is empty."""
        for worker in self._workers.pop(request, ()):
            share = self._shares[worker].pop(request)
            self._totals[worker] = self._totals[worker].plus(share, -1)
            if not self._shares[worker]:
                del self._shares[worker], self._totals[worker]
        for worker, share in shares.items():
            self._shares.setdefault(worker, {})[request] = share
            self._totals[worker] = self._totals.get(worker, IDLE).plus(share)
        if shares:
            self._workers[request] = tuple(shares)

    def load(self, worker: str) -> Load:
        """All that was given to a worker."""
        return self._totals.get(worker, IDLE)

    def requests(self, worker: str) -> list[str]:
        """The requests that burden a worker."""
        return list(self._shares.get(worker, ()))

    def __len__(self) -> int:
        return len(self._workers)


class Answers:
    """How long answers have lately been: a fading mean."""

    def __init__(self) -> None:
        self._mean_tokens = FIRST_ANSWER_TOKENS

    def ended(self, tokens: int) -> None:
        """An answer came to its end with so many tokens."""
        self._mean_tokens = FADE * self._mean_tokens + (1 - FADE) * tokens

    def expect(self, max_tokens: int) -> int:
        """The length of an answer that may have `max_tokens`."""
        return min(max_tokens, round(self._mean_tokens))


@dataclass(frozen=True, slots=True)
class View:
    """Everything a choice depends on.

    `split` says whether the deployment has prefill workers of its own; `local`, whether decode workers may read
    prompts while no prefill worker can; `auto`, whether they may whenever that is predicted to be better. Their steps
    are to stay within `tpot_s`, if it is given.
    """

    fleet: Fleet
    ledger: Ledger
    split: bool
    index: PrefixIndex = field(default_factory=lambda: PrefixIndex(0))
    local: bool = False
    auto: bool = False
    tpot_s: float | None = None

    def shared(self, worker: str, need: Need) -> int:
        """Tokens of the prompt whose KV the worker is thought to have; the last one is always computed."""
        if not need.chunks:
            return 0
        known = CHUNK_TOKENS * self.index.shared(worker, need.chunks)
        return min(known, max(0, need.prompt_tokens - 1))

    def members(self, role: str, need: Need) -> list[Member]:
        """Workers of a role that may serve `need`."""
        return [member for member in self.fleet.role(role) if _suits(member, need) and not member.draining]


def ways(need: Need, view: View) -> list[Way]:
    """All ways that `need` may go now: linked pairs, or decode workers alone in a colocated deployment or if they may
    read prompts themselves since no prefill worker can.
    """
    decode = view.members("decode", need)
    if not view.split:
        return [(None, member.name) for member in decode]
    prefill = view.members("prefill", need)
    pairs: list[Way] = [
        (source.name, target.name) for source in prefill for target in decode if source.name in target.ties
    ]
    if pairs or not view.local:
        return pairs
    return [
        (None, target.name)
        for target in decode
        if all(source.name in target.troubles for source in prefill)  # others may be linked any moment
    ]


def choose(need: Need, view: View, among: Iterable[Way]) -> Choice | None:
    """The way with the least predicted wait, or None if there is none. Those `among` which to choose must be there."""
    members, found = view.fleet.members, list(among)
    write_s = _write_s(_named(members, [target for _, target in found]), need, view)
    apart = _named(members, [source for source, _ in found if source])
    beside = _named(members, [target for source, target in found if not source])
    reads_s = _read_s(apart, need, view) | (_beside_s if view.auto else _mixed_s)(beside, need, view)
    waits = [
        (
            reads_s[source or target]
            + (move_s(source, target, need, view) if source else 0.0)
            + write_s[target],
            source or "",
            target,
        )
        for source, target in found
    ]
    best = min(waits, default=(math.inf, "", ""))
    return Choice(best[1] or None, best[2]) if best[0] < math.inf else None


def nearby(found: Iterable[Way]) -> list[Way]:
    """The decode workers of linked pairs, each by itself: where prompts may be read as well if that is better."""
    return [(None, name) for name in sorted({target for source, target in found if source is not None})]


def rebind(prefill: str, need: Need, view: View, barred: Container[str] = ()) -> str | None:
    """The decode worker, linked to `prefill` and not `barred`, with the least predicted wait.

    It is chosen when the KV is ready, or while it is being computed. One that is to drain is taken if there are only
    such, and if it has not been told: `prefill` is sent no prompts then, so those that may come grow fewer.
    """
    if prefill not in view.fleet.members:
        return None
    tied = [member for member in view.fleet.role("decode") if prefill in member.ties and _suits(member, need)]
    open_ = [member for member in tied if not member.draining] or [one for one in tied if one.expecting]
    decode = [member for member in open_ if member.name not in barred]
    write_s = _write_s(decode, need, view)
    targets = [(move_s(prefill, name, need, view) + write_s[name], name) for name in write_s]
    return min(targets)[1] if targets else None


def move_s(source: str, target: str, need: Need, view: View) -> float:
    """How long the KV that `target` is not thought to have takes from `source`, over their link."""
    tie = view.fleet.members[target].ties[source]
    chunks = -(-(need.prompt_tokens - view.shared(target, need)) // CHUNK_TOKENS)
    num_bytes = chunks * view.fleet.members[source].hello.chunk_bytes
    return tie.latency_us * 1e-6 + num_bytes / (max(tie.gb_per_s, 1e-3) * 1e9)


def _suits(member: Member, need: Need) -> bool:
    return need.fingerprint in (None, member.hello.fingerprint)


def _named(members: Mapping[str, Member], names: Iterable[str]) -> list[Member]:
    return [members[name] for name in sorted(set(names))]


def _read_s(members: list[Member], need: Need, view: View) -> dict[str, float]:
    token_s = _paces([(member, member.stats.step_tokens) for member in members], TOKEN_S)
    new_tokens = {name: need.prompt_tokens - view.shared(name, need) for name in token_s}
    return {
        name: (view.ledger.load(name).queued_tokens + 2 * new_tokens[name]) * token_s[name]
        for name in token_s
    }


def _mixed_s(members: list[Member], need: Need, view: View) -> dict[str, float]:
    """As `_read_s`, for workers that all read beside their answers.

    There, seconds per token read tell how much else a worker did: who is given most to read would look fastest, and be
    given yet more. So a token takes as long as on average, and on a worker with longer steps longer. Answers that are
    written there wait for what is read: it counts once for them, however many, so that a prefix still outweighs them.
    """
    tokens = sum(member.stats.step_tokens for member in members)
    token_s = sum(member.stats.step_seconds for member in members) / tokens if tokens else TOKEN_S
    steps_s = _paces([(member, member.stats.steps) for member in members], STEP_S)
    step_s = sum(steps_s.values()) / max(1, len(steps_s)) or STEP_S  # 0 if no step took any time
    waits_s: dict[str, float] = {}
    for name in steps_s:
        load, new = view.ledger.load(name), need.prompt_tokens - view.shared(name, need)
        tokens = load.queued_tokens + (2 + min(load.running, 1)) * new
        waits_s[name] = tokens * token_s * steps_s[name] / step_s
    return waits_s


def _beside_s(members: list[Member], need: Need, view: View) -> dict[str, float]:
    """As `_read_s`, for decode workers that read beside their answers, which all wait for it meanwhile.

    What a token takes is known from those that only read. Where steps are bounded, only what the answers leave of each
    is for reading; if they leave nothing, nobody reads there.
    """
    readers = [member for member in view.fleet.role("prefill") if member.stats.step_tokens] or members
    tokens = sum(member.stats.step_tokens for member in readers)
    token_s = sum(member.stats.step_seconds for member in readers) / tokens if tokens else TOKEN_S
    step_s = _paces([(member, member.stats.steps) for member in members], STEP_S)
    waits_s: dict[str, float] = {}
    for member in members:
        load, new = view.ledger.load(member.name), need.prompt_tokens - view.shared(member.name, need)
        waits_s[member.name] = (load.queued_tokens + (2 + load.running) * new) * token_s
        if view.tpot_s is not None and load.running:
            left_s = view.tpot_s - step_s[member.name]
            waits_s[member.name] = waits_s[member.name] * view.tpot_s / left_s if left_s > 0 else math.inf
    return waits_s


def _write_s(members: list[Member], need: Need, view: View) -> dict[str, float]:
    step_s = _paces([(member, member.stats.steps) for member in members], STEP_S)
    loads = {member.name: view.ledger.load(member.name) for member in members}
    most = AFFINITY + AFFINITY_PART * min([load.running for load in loads.values()], default=0)
    waits_s: dict[str, float] = {}
    for member, (name, load) in zip(members, loads.items(), strict=True):
        shared_tokens = view.shared(name, need)
        company = load.running - most * shared_tokens / max(1, need.prompt_tokens)
        lacking = load.room_tokens + need.room_tokens - shared_tokens - member.hello.num_slabs * CHUNK_TOKENS
        if lacking > 0:
            company += lacking / max(1, load.running)
        waits_s[name] = company * step_s[name]
    return waits_s


def _paces(counts: list[tuple[Member, int]], default_s: float) -> dict[str, float]:
    """Busy seconds per counted unit of each worker, within TRUST of the average of all."""
    units = sum([count for _, count in counts])
    mean_s = sum([member.stats.step_seconds for member, _ in counts]) / units if units else default_s
    least_s, most_s = mean_s / TRUST, mean_s * TRUST
    return {
        member.name: min(max(member.stats.step_seconds / count, least_s), most_s) if count else mean_s
        for member, count in counts
    }
