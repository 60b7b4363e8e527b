"""What the next engine step works on: continuous batching under a token budget, with chunked prefill.

    add ──▶ waiting ──(slabs, a seat, budget)──▶ running ──remove──▶
               ▲──────────────preempt──────────────┤
    adopt ──▶ adopted ──(a seat)───────────────────┘

`schedule` only reads: it returns a `Plan` of keys and lengths, and the caller applies it. So the same state always
gives the same plan, and the simulator schedules as the engine does. No torch, clock, I/O or logging here.

Slabs are taken as a sequence grows. Who is admitted is reckoned to grow by a part of what it may (`engine.growth`), so
that those admitted together do not all run out together. When a step's growth does not fit even so, the least
deserving sequence gives up its memory and waits again; the most deserving never does, so something always ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

from engine.desk import Desk, Line, Slice, Stock, find
from engine.fairness import Service
from engine.growth import Ratio
from engine.pace import Pace
from engine.sequence import Limits, Refused, Sequence, chunks
from kvcache.layout import CHUNK_TOKENS

__all__ = ["Limits", "Plan", "Refused", "Scheduler", "Sequence", "Slice", "Stock"]

COMPANY_STEPS = (
    64  # after the last prompt that started beside a longer one, more are to be expected for so long
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work: who starts, who takes how many slabs, who writes, and who reads how much.

    If `preempted` is set, that is all there is: take its memory away, and plan again.
    """

    preempted: str | None = None
    admitted: tuple[str, ...] = ()
    grow: tuple[tuple[str, int], ...] = ()
    decode: tuple[str, ...] = ()
    prefill: tuple[Slice, ...] = ()


class Scheduler:
    """The queues of one engine: by priority, then fair among tenants, then first come first served."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: dict[str, Sequence] = {}
        self.adopted: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self.waiting_tokens = 0
        self._pending: dict[str, int] = {}  # what each that waits counts for there
        self.service, self.ratio, self.pace = Service(), Ratio(), Pace()
        self._lines: dict[Line, dict[str, Sequence]] = {}  # those that wait, in order of arrival
        self._preempted: set[str] = set()  # those that wait and did run before
        self._deadlines: list[tuple[float, str]] = []  # a heap; some of these are gone already
        self._arrivals = 0
        self._company = 0  # steps for which a long prompt goes gently

    def __len__(self) -> int:
        return len(self.waiting) + len(self.adopted) + len(self.running)

    def __contains__(self, key: str) -> bool:
        return key in self.running or key in self.adopted or key in self.waiting

    def sequences(self) -> Iterator[Sequence]:
        """All sequences, running ones first."""
        return chain(self.running.values(), self.adopted.values(), self.waiting.values())

    def find(self, key: str) -> Sequence | None:
        """The sequence of this key, wherever it is."""
        return self.running.get(key) or self.adopted.get(key) or self.waiting.get(key)

    # ---- in

    def add(self, seq: Sequence, now_s: float) -> None:
        """Queue a sequence that has no KV yet.

        Raises:
            Refused: the queue is full ("overloaded"), or the sequence can never run here ("out_of_memory",
                "internal_error").
            ValueError: it is already here, or half computed.
        """
        if seq.key in self or seq.computed or seq.slabs:
            raise ValueError(f"{seq.key} is already here or already has KV")
        self._refuse(seq)
        seq.address()
        seq.target = seq.total
        self._arrive(seq, now_s)
        self._queue(seq)

    def _refuse(self, seq: Sequence) -> None:
        limits, need = self.limits, self.limits.room(seq)
        if not 0 < seq.total <= limits.max_model_len:
            raise Refused("internal_error", f"{seq.total} tokens are not within 1 to {limits.max_model_len}")
        if need > limits.num_slabs:
            raise Refused(
                "out_of_memory", f"it needs {need} KV slabs, and this worker has {limits.num_slabs} in all"
            )
        if (
            len(self.waiting) >= limits.max_waiting
            or self.waiting_tokens + seq.total > limits.max_waiting_tokens
        ):
            why = f"{len(self.waiting)} sequences with {self.waiting_tokens} tokens are waiting"
            raise Refused("overloaded", "the worker's queue is full", why)

    def adopt(self, seq: Sequence, now_s: float) -> None:
        """Take over a sequence whose slabs hold the KV of all its tokens but the last. It needs a seat.

        Raises:
            ValueError: it is already here, its KV is not complete, it has nothing left to write, or it can never run
                here to its end.
        """
        over = len(seq.output) >= seq.sampling.max_tokens or seq.total >= self.limits.max_model_len
        if seq.key in self or seq.hold or seq.pending != 1 or not seq.output:
            raise ValueError(
                f"{seq.key} cannot be adopted: {seq.computed} of {seq.total} tokens have KV, {seq.hold=}"
            )
        if over or len(seq.slabs) < chunks(seq.computed) or self.limits.room(seq) > self.limits.num_slabs:
            raise ValueError(
                f"{seq.key} cannot be adopted: it holds {len(seq.slabs)} slabs, and {chunks(seq.computed)} have its"
                " KV; or it is finished, or will not fit"
            )
        seq.target, seq.started_s = seq.computed, None
        self._arrive(seq, now_s)
        self.adopted[seq.key] = seq

    def _arrive(self, seq: Sequence, now_s: float) -> None:
        self._arrivals += 1
        seq.number, seq.arrived_s = self._arrivals, now_s
        self.service.enter(seq.origin.tenant)
        if seq.deadline_s < float("inf"):
            heappush(self._deadlines, (seq.deadline_s, seq.key))

    def _queue(self, seq: Sequence) -> None:
        self.waiting[seq.key] = seq
        self._pending[seq.key] = seq.pending
        self.waiting_tokens += seq.unread
        name = (seq.origin.priority, seq.origin.tenant)
        line = self._lines.setdefault(name, {})
        late = not line or next(reversed(line.values())).number < seq.number
        line[seq.key] = seq
        if not late:  # it waited before: back to its place
            self._lines[name] = {
                other.key: other for other in sorted(line.values(), key=lambda seq: seq.number)
            }

    # ---- from here to there

    def start(self, key: str, now_s: float) -> Sequence:
        """Move a sequence that a plan admitted to the running ones."""
        seq = self.adopted.pop(key) if key in self.adopted else self._unqueue(key)
        seq.parked = False
        pending = seq.pending
        if any(other.pending > pending and not other.decoding for other in self.running.values()):
            self._company = COMPANY_STEPS
        seq.started_s = now_s if seq.started_s is None else seq.started_s
        self.running[key] = seq
        return seq

    def preempt(self, key: str, parked: bool) -> Sequence:
        """Back to its place in the queue, without its slabs, which are the caller's to free; its output stays.

        `parked` says that its KV was copied, so that `computed` still counts. Raises KeyError if it holds no memory.
        """
        seq = (self.running if key in self.running else self.adopted).pop(key)
        seq.slabs, seq.parked, seq.shared = [], parked, 0
        if not parked:
            seq.computed, seq.target = 0, seq.total
        seq.address()
        self._preempted.add(key)
        self._queue(seq)
        self.ratio.tight()
        return seq

    def remove(self, key: str) -> Sequence:
        """Forget a sequence, wherever it is; its slabs are the caller's to free. Raises KeyError."""
        if key in self.waiting:
            seq = self._unqueue(key)
        else:
            seq = (self.adopted if key in self.adopted else self.running).pop(key)
        self.service.leave(seq.origin.tenant)
        if len(self._deadlines) > 2 * len(self) + 64:
            self._deadlines = [item for item in self._deadlines if item[1] in self]
            heapify(self._deadlines)
        return seq

    def _unqueue(self, key: str) -> Sequence:
        seq = self.waiting.pop(key)
        self.waiting_tokens -= self._pending.pop(key)
        self._preempted.discard(key)
        name = (seq.origin.priority, seq.origin.tenant)
        del self._lines[name][key]
        if not self._lines[name]:
            del self._lines[name]
        return seq

    def account(self, rows: int, tokens: int, seconds: float) -> None:
        """A step with `rows` decode rows and `tokens` prompt tokens took `seconds`."""
        self._company = max(0, self._company - 1)
        if rows:
            self.ratio.calm()
        if self.limits.tpot_s is not None:
            self.pace.note(rows, tokens, seconds)

    # ---- deadlines

    @property
    def deadline_s(self) -> float | None:
        """The earliest deadline of all sequences here."""
        while self._deadlines:
            deadline_s, key = self._deadlines[0]
            seq = self.find(key)
            if seq is not None and seq.deadline_s == deadline_s:
                return deadline_s
            heappop(self._deadlines)
        return None

    def expired(self, now_s: float) -> list[str]:
        """Keys of the sequences whose time is up."""
        if (first := self.deadline_s) is None or first > now_s:
            return []
        return [seq.key for seq in self.sequences() if seq.deadline_s <= now_s]

    # ---- decisions

    def ready(self, stock: Stock) -> bool:
        """Whether a step would do anything now, deadlines aside; if not, only an event can change that."""
        if self.running or self.adopted:
            if len(self.running) + len(self.adopted) > 1:
                return True  # if nobody can go on, the least deserving makes room
            return any(self._need(seq) <= stock.free for seq in self._holders())
        head = next(chain.from_iterable(self._lines[name].values() for name in self._order()), None)
        return head is not None and find(head, stock).cost(head.total) <= stock.free

    def admits(self, seq: Sequence, stock: Stock, moving: Iterable[Sequence] = ()) -> bool:
        """Whether a sequence whose KV is to come from elsewhere may take slabs now: `chunks(seq.total)` in all.

        There must be room for it and its expected growth beside that of all who hold memory here; of those, `moving`
        are not in the scheduler, since their KV is on the way. Whoever was preempted here comes back first, unless its
        priority is worse. Whether the prefix of `seq` is attached already makes no difference.
        """
        if any(self.waiting[key].origin.priority <= seq.origin.priority for key in self._preempted):
            return False
        seq.address()
        found = find(seq, stock)
        coming = list(moving)
        if not (self.running or self.adopted or coming):
            return found.cost(seq.total) <= stock.free
        on_the_way = sum(chunks(self._grown(other)) - chunks(other.total) for other in coming)
        return found.cost(self._grown(seq)) <= stock.free - on_the_way - self._promised()

    def schedule(self, stock: Stock) -> Plan:
        """The next step's plan. It changes nothing: apply it before the next call.

        Every decoding sequence gets its one token, then prompts are read with what budget is left.
        """
        handed = self._handed()
        decode = [seq for seq in self.running.values() if seq.decoding] + handed
        grow = [(seq.key, 1) for seq in decode if seq.computed // CHUNK_TOKENS >= len(seq.slabs)]
        short = (grow or len(decode) < len(self.running) + len(handed)) and (
            len(grow) + self._reading_need() > stock.free
        )
        if short and len(self.running) + len(self.adopted) > 1:
            return Plan(preempted=max(self._holders(), key=lambda seq: seq.rank).key)
        if short:
            decode, grow = [seq for seq in decode if (seq.key, 1) not in grow], []
        if len(decode) == len(self.running) + len(handed) and not self.waiting:
            return Plan(
                admitted=tuple([seq.key for seq in handed]),
                grow=tuple(grow),
                decode=tuple([seq.key for seq in decode]),
            )
        desk = self._desk(stock, len(decode), len(grow), len(handed))
        desk.serve(self._open_lines())
        return Plan(
            admitted=tuple(seq.key for seq in handed) + tuple(desk.admitted),
            grow=tuple(grow + desk.grow),
            decode=tuple(seq.key for seq in decode),
            prefill=tuple(desk.slices),
        )

    def _holders(self) -> Iterator[Sequence]:
        return chain(self.running.values(), self.adopted.values())

    def _handed(self) -> list[Sequence]:
        """Adopted ones hold memory already, so they come ahead of the queue."""
        seats = self.limits.max_num_seqs - len(self.running)
        if not self.adopted or seats <= 0:
            return []
        waiting = self.adopted.values()
        order = sorted(
            waiting,
            key=lambda seq: (seq.origin.priority, self.service.of(seq.origin.tenant), seq.number),
        )
        return order[:seats]

    def _reading_need(self) -> int:
        """Slabs without which the most deserving of all cannot go on, if it still reads."""
        head = min(self._holders(), key=lambda seq: seq.rank)
        return 0 if head.decoding else self._need(head)

    def _need(self, seq: Sequence) -> int:
        """Slabs that one who runs must take for its next step."""
        ahead = 1 if seq.decoding or self.limits.chunked_prefill else seq.pending
        return max(0, chunks(seq.computed + ahead) - len(seq.slabs))

    def _grown(self, seq: Sequence) -> int:
        return self.limits.grown(seq, self.ratio.value)

    def _promised(self) -> int:
        """Slabs that those who hold memory are expected to take yet."""
        grown, ratio = self.limits.grown, self.ratio.value
        return sum([max(0, chunks(grown(seq, ratio)) - len(seq.slabs)) for seq in self._holders()])

    def _desk(self, stock: Stock, rows: int, growing: int, handed: int) -> Desk:
        limits, free = self.limits, stock.free
        seats = limits.max_num_seqs - len(self.running) - handed
        budget = limits.max_num_batched_tokens - rows
        if rows and limits.tpot_s is not None:
            budget = min(budget, self.pace.budget(rows, limits.tpot_s))
        if not rows and limits.saturation_tokens:
            budget = min(budget, limits.saturation_tokens)
        return Desk(
            limits=limits,
            stock=stock,
            service=self.service,
            running=self.running,
            ratio=self.ratio.value,
            free=free - growing,
            left=free - self._promised() if self.waiting and seats > 0 else 0,
            seats=seats,
            budget=budget,
            gentle=self._company > 0,
            alone=not self.running and not self.adopted,
        )

    def _open_lines(self) -> dict[Line, Iterator[Sequence]]:
        """Those that read, then those that wait, by line."""
        reading: dict[Line, list[Sequence]] = {}
        for seq in self.running.values():
            if not seq.decoding:
                reading.setdefault((seq.origin.priority, seq.origin.tenant), []).append(seq)
        lines: dict[Line, Iterator[Sequence]] = {}
        for name in {**reading, **self._lines}:
            first = sorted(reading.get(name, ()), key=lambda seq: seq.number)
            lines[name] = chain(first, self._lines.get(name, {}).values())
        return lines

    def _order(self) -> list[Line]:
        return sorted(self._lines, key=lambda line: (line[0], self.service.of(line[1]), line[1]))
