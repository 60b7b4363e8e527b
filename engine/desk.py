"""Hands out one step's budget to prompts: who reads how much, and who starts.

    line (priority, tenant): those that read already, then those that wait, each in order of arrival
    served: best priority first, then the tenant with the least service, until budget, memory or lines end

A prompt longer than what is left takes what is left, but three quarters of that are first offered to shorter ones
behind it in its line, the shortest first, and half to other lines of its priority: they need not wait for a long one to
end. While any of them ends its reading in this step, the long one adds a quarter at most, so that they are not held up
either; and while others came by not long ago (`gentle`), it takes half a step even alone: the next is served sooner.
Whoever is next and does not fit closes the door for all new ones: nobody is overtaken for ever for being large.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Keys
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from engine.fairness import Service
from engine.sequence import Limits, Sequence, chunks
from kvcache.layout import CHUNK_TOKENS

SCORED_ROWS = (
    256  # logits are float32 rows of a whole vocabulary: a chunk whose every row is scored stays this short
)
WINDOW = (
    64  # prompts behind a long one that are looked at, and waiting ones per step whose prefix is looked up
)

Line = tuple[int, str]  # priority, tenant


class Stock(Protocol):
    """Slabs to be had and prefixes that are known (`kvcache.holdings.Holdings`). Looking changes nothing."""

    @property
    def free(self) -> int: ...

    def look(self, keys: Keys[bytes]) -> int: ...

    def look_free(self, keys: Keys[bytes]) -> int: ...


class Aside:
    """A stock, less the slabs that are set `aside` for sequences that do not take them yet; so many were `passed`."""

    def __init__(self, stock: Stock) -> None:
        self.stock, self.aside, self.passed = stock, 0, 0

    @property
    def free(self) -> int:
        return self.stock.free - self.aside

    def pass_by(self, need: int) -> None:
        """Set `need` slabs aside for one that does not take them yet."""
        self.aside += need
        self.passed += 1

    def look(self, keys: Keys[bytes]) -> int:
        return self.stock.look(keys)

    def look_free(self, keys: Keys[bytes]) -> int:
        return self.stock.look_free(keys)


@dataclass(frozen=True, slots=True)
class Slice:
    """Read `count` tokens of the sequence `key`, from position `start`."""

    key: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Found:
    """What the prefix tree has of a sequence that does not run: chunks, and how many of them nobody holds."""

    chunks: int
    unheld: int

    def cost(self, tokens: int) -> int:
        """Free slabs that `tokens` tokens take, the found ones included."""
        return chunks(tokens) - self.chunks + self.unheld


def find(seq: Sequence, stock: Stock) -> Found:
    """Look a waiting sequence's prefix up."""
    keys = seq.attachable()
    return Found(stock.look(keys), stock.look_free(keys)) if keys else Found(0, 0)


@dataclass(slots=True)
class Desk:
    """One step. `free` slabs can be taken in it; `left` are those that nobody is expected to take later."""

    limits: Limits
    stock: Stock
    service: Service
    running: Mapping[str, Sequence]
    ratio: float
    free: int
    left: int
    seats: int
    budget: int
    gentle: bool  # others started beside a long prompt not long ago
    alone: bool  # nobody holds memory: the first may start if it fits, whatever it may grow to
    admitted: list[str] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    grow: list[tuple[str, int]] = field(default_factory=list)
    _closed: bool = False
    _keep: int = 1  # what a long prompt gets of the step whatever else there is, in tokens
    _long: Sequence | None = None  # the first that is longer than what was left
    _rest: int = 0  # what is kept for it: tokens, and slabs
    _aside: int = 0
    _ending: bool = False  # somebody's reading ends in this step
    _found: dict[str, Found] = field(default_factory=dict)
    _computing: dict[bytes, int] | None = None  # chunks that are being computed: best priority of who does it

    def serve(self, lines: dict[Line, Iterator[Sequence]]) -> None:
        """Line after line, one prompt at a time. What a tenant gets in this step counts at once."""
        given: Counter[str] = Counter()
        limit = self.budget
        self._keep, half = max(1, limit // 4), max(1, limit // 2)
        while lines and self.budget > 0:
            line = min(lines, key=lambda line: (line[0], self.service.of(line[1]) + given[line[1]], line[1]))
            if self._long is not None and line[0] > self._long.origin.priority:
                break
            before = self.budget
            if not self._next(lines[line]):
                del lines[line]
            given[line[1]] += before - self.budget
        if self._long is not None:
            self.free += self._aside
            most = self._keep if self._ending else half if self.gentle else limit
            self._grant(self._long, min(self.budget + self._rest, most))

    def _next(self, line: Iterator[Sequence]) -> bool:
        """Serve the next of a line; False: it has none."""
        for seq in line:
            if self._shut(seq):
                return False
            if self._awaits(seq):
                continue
            want, whole = self._want(seq), not self.limits.chunked_prefill
            if want > self.budget and whole and self.slices:
                self.budget = 0  # it waits for a step that it can begin
                return False
            if not self._enter(seq):
                return False
            if want > self.budget and not whole and self._long is None:
                self._share(seq, want, line)
                return False
            if self._grant(seq, want if whole else min(want, self.budget)):
                return True  # else it has to wait for memory, and those behind it go on
        return False

    def _share(self, long: Sequence, want: int, line: Iterator[Sequence]) -> None:
        """Offer the budget to shorter ones behind `long`, then to other lines; the rest is set aside for it."""
        keep, budget = min(self._keep, self.budget), self.budget
        self._aside = min(self.free, max(0, chunks(self._start(long) + keep) - self._have(long)))
        self.free -= self._aside
        behind = [seq for seq in islice(line, WINDOW) if self._want(seq) < want and not self._awaits(seq)]
        spare = budget - keep
        for seq in sorted(behind, key=lambda seq: (self._want(seq), seq.number)):
            if spare <= 0:
                break
            if not self._shut(seq) and not self._awaits(seq) and self._enter(seq):
                spare -= self._grant(seq, min(self._want(seq), spare))
        left, others = self.budget, max(0, budget // 2 - (budget - self.budget))
        self._long, self._rest, self.budget = long, left - others, others

    def _grant(self, seq: Sequence, count: int) -> int:
        """Tokens that `seq` reads in this step: `count`, or what slabs can be had for."""
        start, have = self._start(seq), self._have(seq)
        need = max(0, chunks(start + count) - have)
        if need > self.free:
            if not self.limits.chunked_prefill:
                return 0
            need, count = self.free, (have + self.free) * CHUNK_TOKENS - start
        if count <= 0:
            return 0
        self.slices.append(Slice(seq.key, start, count))
        self._ending = self._ending or start + count >= seq.total
        if need:
            self.grow.append((seq.key, need))
        self.free -= need
        self.budget -= count
        return count

    def _want(self, seq: Sequence) -> int:
        pending = seq.total - self._start(seq)
        scored = self.limits.chunked_prefill and seq.scored
        return min(pending, SCORED_ROWS) if scored else pending

    def _start(self, seq: Sequence) -> int:
        if seq.key in self.running or seq.parked:
            return seq.computed
        return self._look(seq).chunks * CHUNK_TOKENS

    def _have(self, seq: Sequence) -> int:
        return len(seq.slabs) if seq.key in self.running else self._look(seq).chunks

    def _look(self, seq: Sequence) -> Found:
        found = self._found.get(seq.key)
        if found is None:
            found = self._found[seq.key] = find(seq, self.stock)
        return found

    def _shut(self, seq: Sequence) -> bool:
        """It is new, and no new ones are let in, or too many were looked at already in this step."""
        if seq.key in self.running:
            return False
        self._closed = self._closed or self.seats <= 0 or len(self._found) > 2 * WINDOW
        return self._closed

    def _awaits(self, seq: Sequence) -> bool:
        """The next chunk that it would have to compute is being computed, and will be shared: better to wait.

        Not for one that is served later than itself.
        """
        if seq.key in self.running or seq.parked or seq.scored:
            return False
        at, keys = self._look(seq).chunks, seq.attachable()
        if at >= len(keys):
            return False
        return self._claims().get(keys[at], seq.origin.priority + 1) <= seq.origin.priority

    def _claims(self) -> dict[bytes, int]:
        if self._computing is None:
            self._computing = {}
            for seq in self.running.values():
                if not seq.decoding:
                    self._claim(seq, seq.computed)
        return self._computing

    def _claim(self, seq: Sequence, start: int) -> None:
        claims, priority = self._claims(), seq.origin.priority
        for key in seq.keys[start // CHUNK_TOKENS : seq.target // CHUNK_TOKENS]:
            claims[key] = min(claims.get(key, priority), priority)

    def _enter(self, seq: Sequence) -> bool:
        """Let a new one start, if it fits; one that runs is in already."""
        if seq.key in self.running:
            return True
        found, whole = self._look(seq), self.limits.grown(seq, self.ratio)
        alone = self.alone and not self.admitted
        if found.cost(seq.total) > self.free or (not alone and found.cost(whole) > self.left):
            self._closed = True
            return False
        self.admitted.append(seq.key)
        self.seats -= 1
        self.free -= found.unheld
        self.left -= found.cost(whole)
        self._claim(seq, self._start(seq))
        return True
