"""Reads prefixes back from the tiers below the pool, where that is sooner than computing or pulling them.

    a prompt comes ─▶ look up what its prefix lacks ─▶ how many chunks save time? ─▶ slabs of `restore/<n>` are filled
                                                                                    and verified ─▶ published, released

What is restored is then a cached prefix like any other. A prompt holds nothing while it waits for that, and waits for
a look-up (`MAX_LOOK_UP_S`) and for as long as computing would take at most; KV that would be pulled, as long as the
pull. The slabs count as lent: whoever needs them takes them back at once, and nobody waits for a disk, since chunks get
into them only when they are verified. Another thread, or virtual time, looks up and reads (`TierReader`): nothing here
touches a file or a clock, so that the simulator decides as the engine does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol

import msgspec

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import WorkerStats
from diptych.stats.tier_rates import FIRST_RATES, TierRate, choose_restore, group_runs, predict_restore_s
from diptych.stats.tiers import TierStats
from engine.scheduling.new_token_ratio import MeasuredRate
from engine.sequence import Sequence
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas

# The share of an arena that may be filled at a time.
MAX_RESTORE_SHARE = 0.5
# For how long a look-up, and reading what was expected to be read at once, may take at least and at most, in seconds.
MIN_WAIT_S, MAX_LOOK_UP_S = 0.02, 0.05
# The rate of pulls is measured by those of at least so many chunks. Until then, all is pulled. If it was not measured
# for so many seconds, in which so many requests were not pulled, one is.
MIN_PULL_CHUNKS, PULL_PROBE_S, MAX_UNMEASURED = 4, 10.0, 4
# Bytes of KV that are pulled per second; the first pulls measure it.
FIRST_PULL_RATE = 1e9


@dataclass(slots=True, eq=False)
class PrefixRestore:
    """The part of a prefix that is not in the pool. Sequences that wait for it share it (`Sequence.restore`).

    `keys` are the addresses of the whole prefix, of which the pool had the first `known` chunks. `tiers` are those of
    the chunks behind them as far as they are all stored. A reader's thread reports and fills; once it is stopped no
    slab is written any more.
    """

    number: int
    kv_class: str
    keys: list[bytes]
    known: int
    begun_s: float
    # The seconds that one of its chunks takes otherwise: to compute it, or to pull it.
    chunk_s: float
    # When the sequences go on without it.
    deadline_s: float
    tiers: list[str] = field(default_factory=list)
    # The slabs to fill, one per chunk from the first that the pool lacks on; none before that was decided.
    slabs: list[int] = field(default_factory=list)
    # How many of them are filled and verified.
    restored: int = 0
    # Whether the look-up is over, so that `tiers` stays.
    found: bool = False
    # Whether no slab may be filled any more.
    stopped: bool = False
    # Whether no sequence waits for it any more, and since when, in seconds.
    ready: bool = False
    ended_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def key(self) -> str:
        """The owner of its slabs."""
        return f"restore/{self.number}"

    @property
    def missing_keys(self) -> list[bytes]:
        """The addresses of the chunks that the pool lacked."""
        return self.keys[self.known :]

    def report_found(self, tiers: list[str], ends: bool) -> bool:
        """A look-up has found so much; more may come unless it `ends`. Returns whether anybody wants to know."""
        with self._lock:
            if self.found:
                return False
            self.tiers, self.found = tiers, ends
            return True

    def end_look_up(self) -> bool:
        """Do with what was found until now. False: the look-up has ended by itself, and its answer is on its way."""
        with self._lock:
            ended, self.found = self.found, True
            return not ended

    def next_in(self, tier: str) -> bytes | None:
        """The address of the chunk to read next, if it is wanted and in this tier."""
        with self._lock:
            at = self.restored
            wanted = not self.stopped and at < len(self.slabs) and self.tiers[at] == tier
            return self.missing_keys[at] if wanted else None

    def fill_next(self, fill: Callable[[int], None]) -> bool:
        """Let `fill` copy the next chunk, which is verified, into its slab; False (nothing is written) if stopped."""
        with self._lock:
            if self.stopped:
                return False
            fill(self.slabs[self.restored])
            self.restored += 1
            return True

    def stop(self) -> None:
        """No slab is written from now on. Waits for the copy of one chunk at most."""
        with self._lock:
            self.stopped = True

    @property
    def is_read(self) -> bool:
        """Whether there is nothing to read any more."""
        return self.stopped or self.restored == len(self.slabs)


class TierReader(Protocol):
    """The tiers below a pool, the fastest first. What is asked for comes back through `take_answers`."""

    def look_up(self, restore: PrefixRestore) -> None:
        """Report (`report_found`) the tiers of those leading missing chunks that are stored."""

    def read_chunks(self, restore: PrefixRestore) -> None:
        """Fill the slabs of `restore` (`fill_next`), in order, until a chunk fails or it is stopped."""

    def take_answers(self) -> list[PrefixRestore]:
        """The restores whose look-up or reading has ended since the last call."""

    def rates(self) -> Mapping[str, TierRate]:
        """How fast each tier is read now."""

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, when there are answers."""

    @property
    def stats(self) -> dict[str, TierStats]:
        """What is known of the tiers, by name."""


class NoRestores:
    """In place of `PrefixRestores` where the pool has no tiers below it."""

    is_busy = has_tiers = False

    def begin(self, seq: Sequence, now_s: float) -> None:
        """Nothing is looked for."""

    def begin_pull(self, seq: Sequence, keys: list[bytes], now_s: float) -> None:
        """Nothing is looked for."""

    def note_pull(self, kv_class: str, num_chunks: int, seconds: float, now_s: float) -> None:
        """Nobody asks how fast KV is pulled."""

    def tend(self, now_s: float) -> float | None:
        """Nothing is read."""
        return None

    def stop(self) -> None:
        """Nothing is held."""

    def notify(self, wake: Callable[[], None]) -> None:
        """Nobody is ever woken."""

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """`stats` of the engine."""
        return stats


class PrefixRestores:
    """The restores of one engine into the slabs of `kv`. `chunk_bytes` are those of a chunk by KV class.

    `note_taken` is called with slabs that are about to be written. Bulk work gives slabs back before restores do.
    """

    def __init__(
        self,
        kv: KvAllocator | KvArenas,
        reader: TierReader,
        chunk_bytes: Mapping[str, int],
        prefill_rate: MeasuredRate,
        note_taken: Callable[[list[int]], None],
    ) -> None:
        self.kv, self.reader, self._chunk_bytes = kv, reader, chunk_bytes
        self._prefill_rate, self._note_taken = prefill_rate, note_taken
        self._pull_rate = MeasuredRate(FIRST_PULL_RATE)
        # When it was measured last, or began to be measured again, in clock seconds.
        self._pull_measured_s = -inf
        # Requests since then that looked for their chunks first.
        self._num_unmeasured = 0
        # Restores that are looked up or read, by the address of the first chunk that the pool lacked, and by whether it
        # is pulled otherwise.
        self._open: dict[tuple[bytes, bool], PrefixRestore] = {}
        self._number = 0
        # Tokens that were looked up in the tiers, and those that were restored.
        self.queried_tokens = self.restored_tokens = 0
        # The time of the last call, in clock seconds.
        self._now_s = 0.0
        for arena in kv.arenas.values() if isinstance(kv, KvArenas) else (kv,):
            arena.lent_slabs.reclaim = partial(self._give_back, arena, arena.lent_slabs.reclaim)

    has_tiers = True

    @property
    def is_busy(self) -> bool:
        """Whether any slab is held. Look-ups and readers that have not come back are waited for by nobody."""
        return any(one.slabs for one in self._open.values())

    @property
    def deadline_s(self) -> float | None:
        """The next time at which sequences go on without a restore, in clock seconds."""
        return min((one.deadline_s for one in self._open.values()), default=None)

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """`stats` of the engine, with those of the tiers."""
        return msgspec.structs.replace(
            stats,
            tier_queries=self.queried_tokens,
            tier_hits=self.restored_tokens,
            tiers=self.reader.stats,
            prefill_tokens_per_s=self._prefill_rate.value,
        )

    def begin(self, seq: Sequence, now_s: float) -> None:
        """`seq` waits to be prefilled: look for what its cached prefix lacks. It is not ready until that has ended."""
        keys = seq.attachable_keys()
        known = self.kv.arena_of(seq.kv_class).count_cached(keys)
        if known < len(keys):
            chunk_s = CHUNK_TOKENS / self._prefill_rate.value
            self._wait_for(seq, keys, known, chunk_s, False, now_s)

    def begin_pull(self, seq: Sequence, keys: list[bytes], now_s: float) -> None:
        """The KV of `seq` is about to be pulled: look for those of the chunks `keys` that the pool lacks.

        All is pulled until a pull tells how long that takes, and where no tier is as fast. If that was long ago, this
        one is pulled to tell it again. Others do not join it meanwhile: where pulls are slow, it takes long.
        """
        known = self.kv.arena_of(seq.kv_class).count_cached(keys)
        if known == len(keys) or self._pull_measured_s == -inf:
            return
        is_old = now_s - self._pull_measured_s > PULL_PROBE_S and self._num_unmeasured >= MAX_UNMEASURED
        if is_old and len(keys) - known >= MIN_PULL_CHUNKS:
            self._pull_measured_s, self._num_unmeasured = now_s, 0
            return
        size = self._size_of(seq.kv_class)
        chunk_s = size / self._pull_rate.value
        if self._may_save(len(keys) - known, size, chunk_s):
            self._num_unmeasured += 1
            self._wait_for(seq, keys, known, chunk_s, True, now_s)

    def note_pull(self, kv_class: str, num_chunks: int, seconds: float, now_s: float) -> None:
        """So many chunks of a class were pulled and verified in so many seconds."""
        if num_chunks >= MIN_PULL_CHUNKS:
            self._pull_rate.add_sample(num_chunks * self._size_of(kv_class), seconds)
            self._pull_measured_s, self._num_unmeasured = now_s, 0

    def _may_save(self, num_chunks: int, size: int, chunk_s: float) -> bool:
        """Whether chunks may come sooner from the fastest tier, even if that was measured as slow: it may be fast
        again.
        """
        for name, rate in self.reader.rates().items():
            best = max(rate, FIRST_RATES.get(name, rate), key=lambda one: one.bytes_per_s)
            if choose_restore([(name, num_chunks)], size, {name: best}, chunk_s).num_chunks:
                return True
        return False

    def _wait_for(
        self, seq: Sequence, keys: list[bytes], known: int, chunk_s: float, pulled: bool, now_s: float
    ) -> None:
        """Let `seq` wait for the chunks of `keys` behind the `known` ones. They are looked up, if nobody did yet."""
        at = keys[known], pulled
        running = self._open.get(at)
        if running is None:
            self._number += 1
            wait_s = min((len(keys) - known) * chunk_s, MAX_LOOK_UP_S)
            running = self._open[at] = PrefixRestore(
                self._number, seq.kv_class, list(keys), known, now_s, chunk_s, now_s + wait_s
            )
            self.reader.look_up(running)
        self.queried_tokens += (len(keys) - known) * CHUNK_TOKENS
        seq.restore = running

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, when `tend` has something to do."""
        self.reader.notify(wake)

    def tend(self, now_s: float) -> float | None:
        """Go on with what the reader has answered, and let sequences go that have waited for long enough.

        Returns when it has to be called again (clock seconds), or None.
        """
        self._now_s = now_s
        for restore in self.reader.take_answers():
            if restore.ready:
                # It has ended without its reader.
                continue
            if restore.slabs:
                self._finish(restore, now_s)
            elif not self._start_reading(restore, now_s):
                self._end(restore, now_s)
        for restore in list(self._open.values()):
            if now_s >= restore.deadline_s:
                self._end_late(restore, now_s)
        return self.deadline_s

    def stop(self) -> None:
        """No sequence waits any more: hold no slab, whatever the tiers are at."""
        for restore in list(self._open.values()):
            self._finish(restore, self._now_s)

    def _end_late(self, restore: PrefixRestore, now_s: float) -> None:
        """Go on with what there is at the deadline: with chunks that are read, or with the tier that has answered."""
        if restore.slabs:
            self._finish(restore, now_s)
        elif restore.end_look_up() and not self._start_reading(restore, now_s):
            self._end(restore, now_s)

    def _give_back(self, arena: KvAllocator, others: Callable[[], bool] | None) -> bool:
        """Let somebody who holds lent slabs of an arena give them back: others, or a restore. False: nobody does."""
        if others is not None and others():
            return True
        held = [one for one in self._open.values() if one.slabs and self.kv.arena_of(one.kv_class) is arena]
        if held:
            self._finish(held[-1], self._now_s)
        return bool(held)

    def _size_of(self, kv_class: str) -> int:
        """Bytes of a chunk of a class; sequences of a worker with one class may name none."""
        return (
            self._chunk_bytes[kv_class]
            if len(self._chunk_bytes) > 1
            else next(iter(self._chunk_bytes.values()))
        )

    def _start_reading(self, restore: PrefixRestore, now_s: float) -> bool:
        """Take slabs for the chunks that save time, and have them read. Returns whether there are any."""
        rates, size = self.reader.rates(), self._size_of(restore.kv_class)
        arena = self.kv.arena_of(restore.kv_class)
        count = choose_restore(group_runs(restore.tiers), size, rates, restore.chunk_s).num_chunks
        if not count:
            return False
        end = restore.known + count
        held = arena.attach_prefix(restore.key, restore.keys[:end], counted=False)
        # Others may have computed some of it meanwhile, or the pool may have lost what it had.
        first = len(held)
        used = sum(len(one.slabs) for one in self._open.values() if one.kv_class == restore.kv_class)
        most = min(int(arena.num_slabs * MAX_RESTORE_SHARE) - used, arena.unused)
        count = max(0, min(end - first, most)) if first >= restore.known else 0
        if not count:
            arena.release(restore.key)
            return False
        restore.tiers = restore.tiers[first - restore.known :][:count]
        restore.known, restore.slabs = first, arena.allocate(restore.key, count)
        arena.set_lent(restore.key, True)
        self._note_taken(restore.slabs)
        wait_s = max(2 * predict_restore_s(restore.tiers, size, rates), MIN_WAIT_S)
        restore.deadline_s = now_s + min(wait_s, count * restore.chunk_s)
        self.reader.read_chunks(restore)
        return True

    def _finish(self, restore: PrefixRestore, now_s: float) -> None:
        """Publish the chunks that are verified, and let go of everything. A reader that comes later writes nothing."""
        restore.stop()
        arena, end = self.kv.arena_of(restore.kv_class), restore.known + restore.restored
        arena.set_lent(restore.key, False)
        slabs = [node.slab for node in arena.shared_nodes(restore.key)] + restore.slabs
        arena.publish(restore.key, restore.keys[:end], slabs)
        arena.release(restore.key)
        self.restored_tokens += restore.restored * CHUNK_TOKENS
        self._end(restore, now_s)

    def _end(self, restore: PrefixRestore, now_s: float) -> None:
        """The restore is over."""
        self._open = {first: one for first, one in self._open.items() if one is not restore}
        restore.found = restore.ready = True
        restore.ended_s = now_s
