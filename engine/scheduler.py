"""What the next engine step works on: continuous batching under a token budget, with chunked prefill.

    add ──▶ waiting ──(slabs, a seat, budget)──▶ running ──remove──▶
    adopt ──▶ adopted ──(a seat)────────────────▶ running

`schedule` only reads: it returns a `Plan` of keys and lengths, and the caller applies it with `start`. So the same
state always gives the same plan, and the simulator schedules as the engine does. No torch, clock, I/O or logging here.

Slabs for a sequence's whole growth are reserved when it starts, so nothing is ever preempted. Who calls `start` owns
the slabs; this file only counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from diptych.errors import DiptychError
from diptych.request import Sampling
from kvcache.layout import CHUNK_TOKENS

SCORED_ROWS = (
    256  # logits are float32 rows of a whole vocabulary: a chunk whose every row is scored stays this short
)


class Refused(DiptychError):
    """The engine does not take a sequence. `code` is that of `diptych.messages.Failed`."""

    def __init__(self, code: str, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.code = code


@dataclass(slots=True)
class Sequence:
    """One attempt to continue one prompt, and how far it has come.

    `output` may come in non-empty: tokens that an earlier attempt delivered, which are part of what is read here.
    `hold` means that the sequence leaves after one token, with its slabs, for another engine to continue. Tokens 0 to
    `computed` - 1 have KV, token i in slab `slabs[i // 64]`; `target` of them is where reading ends and writing begins.
    """

    id: str
    epoch: int
    prompt: list[int]
    sampling: Sampling
    deadline_s: float  # on the clock that `now_s` is read from
    output: list[int] = field(default_factory=list)
    hold: bool = False
    slabs: list[int] = field(default_factory=list)
    computed: int = 0
    target: int = 0  # set by `add` and `adopt`, as are the moments below
    arrived_s: float = 0.0
    started_s: float | None = None

    @property
    def key(self) -> str:
        """Its name here, and the owner of its slabs in the pool."""
        return f"{self.id}#{self.epoch}"

    @property
    def total(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Tokens that are known and have no KV; 1 for a sequence that decodes."""
        return self.total - self.computed

    @property
    def decoding(self) -> bool:
        """Everything it came with has been read, and its first token here has been written."""
        return self.computed >= self.target and self.total > self.target

    def tokens(self, start: int, count: int) -> list[int]:
        """The token ids at positions `start` to `start + count - 1`, across prompt and output."""
        split, end = len(self.prompt), start + count
        return self.prompt[start:end] + self.output[max(0, start - split) : max(0, end - split)]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one engine takes on. Lengths are in tokens."""

    num_slabs: int
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512  # per step, over all sequences
    chunked_prefill: bool = True  # False: prompts whole, one longer than the budget in a step of its own size
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        # Every running sequence may decode; one token of budget each keeps a prefill beside them moving, too.
        if not 0 < self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must be positive and at most"
                f" max_num_batched_tokens ({self.max_num_batched_tokens})"
            )

    def room(self, seq: Sequence) -> int:
        """Slabs for all the KV that `seq` will ever have here.

        A sequence that is handed over, or only scored, never grows beyond what it came with.
        """
        grown = min(len(seq.prompt) + seq.sampling.max_tokens, self.max_model_len)
        tokens = seq.total if seq.hold else max(seq.total, grown)
        return -(-tokens // CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class Slice:
    """Read `count` tokens of the sequence `key`, from position `start`."""

    key: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work. `admitted` are those that start with it: (key, slabs to take)."""

    expired: tuple[str, ...] = ()
    admitted: tuple[tuple[str, int], ...] = ()
    decode: tuple[str, ...] = ()
    prefill: tuple[Slice, ...] = ()


class Scheduler:
    """The queues of one engine, first come first served."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # Insertion order is the order of service in all three.
        self.waiting: dict[str, Sequence] = {}
        self.adopted: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self.waiting_tokens = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.adopted) + len(self.running)

    def __contains__(self, key: str) -> bool:
        return key in self.running or key in self.adopted or key in self.waiting

    def sequences(self) -> Iterator[Sequence]:
        """All sequences, running ones first."""
        return chain(self.running.values(), self.adopted.values(), self.waiting.values())

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
        seq.target, seq.arrived_s = seq.total, now_s
        self.waiting[seq.key] = seq
        self.waiting_tokens += seq.total

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
        """Take over a sequence whose slabs hold the KV of all its tokens but the last. It needs a seat, but no slabs.

        Raises:
            ValueError: it is already here, its KV is not complete, it has nothing left to write, or its slabs do not
                cover its growth.
        """
        room, over = self.limits.room(seq), len(seq.output) >= seq.sampling.max_tokens
        if seq.key in self or seq.hold or seq.pending != 1 or not seq.output:
            raise ValueError(
                f"{seq.key} cannot be adopted: {seq.computed} of {seq.total} tokens have KV, {seq.hold=}"
            )
        if over or seq.total >= self.limits.max_model_len or len(seq.slabs) < room:
            raise ValueError(
                f"{seq.key} cannot be adopted: it holds {len(seq.slabs)} of {room} slabs, or is finished"
            )
        seq.target, seq.arrived_s, seq.started_s = seq.computed, now_s, None
        self.adopted[seq.key] = seq

    def start(self, key: str, slabs: list[int], now_s: float) -> Sequence:
        """Move a sequence that a plan admitted to the running ones, with the slabs taken for it."""
        if key in self.adopted:
            seq = self.adopted.pop(key)
        else:
            seq = self.waiting.pop(key)
            self.waiting_tokens -= seq.total
            seq.slabs = slabs
        seq.started_s = now_s
        self.running[key] = seq
        return seq

    def remove(self, key: str) -> Sequence:
        """Forget a sequence, wherever it is; its slabs are the caller's to free. Raises KeyError."""
        if key in self.waiting:
            self.waiting_tokens -= self.waiting[key].total
            return self.waiting.pop(key)
        return (self.adopted if key in self.adopted else self.running).pop(key)

    def ready(self, free_slabs: int) -> bool:
        """Whether a step would do anything now, deadlines aside; if not, only an event can change that."""
        head = next(iter(self.waiting.values()), None)
        return bool(self.running or self.adopted or (head and self.limits.room(head) <= free_slabs))

    def schedule(self, free_slabs: int, now_s: float) -> Plan:
        """The next step's plan. It changes nothing: apply it with `remove` and `start`, before the next call.

        Every decoding sequence gets its one token, then prompts are read in order of arrival with what budget is left.
        """
        expired = {seq.key: seq for seq in self.sequences() if seq.deadline_s <= now_s}
        free_slabs += sum(len(seq.slabs) for seq in expired.values())
        running = [seq for key, seq in self.running.items() if key not in expired]
        seats = self.limits.max_num_seqs - len(running)
        # Adopted sequences hold memory already, so they come ahead of the queue.
        handed = [seq for key, seq in self.adopted.items() if key not in expired][:seats]
        decode = [seq for seq in running if seq.decoding] + handed
        reading = [seq for seq in running if not seq.decoding]
        queue = [seq for key, seq in self.waiting.items() if key not in expired]
        desk = _Desk(
            self.limits, free_slabs, seats - len(handed), self.limits.max_num_batched_tokens - len(decode)
        )
        desk.serve(reading, queue)
        return Plan(
            expired=tuple(expired),
            admitted=tuple((seq.key, 0) for seq in handed) + tuple(desk.admitted.items()),
            decode=tuple(seq.key for seq in decode),
            prefill=tuple(desk.slices),
        )


@dataclass(slots=True)
class _Desk:
    """Hands out one step's budget to prompts; `admitted` maps the newly started to the slabs they take."""

    limits: Limits
    free_slabs: int
    seats: int
    budget: int
    admitted: dict[str, int] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)

    def serve(self, reading: list[Sequence], queue: list[Sequence]) -> None:
        """In order of arrival, as far as budget, seats and slabs go.

        The first prompt longer than what is left takes what is left, except that half of that is first offered to
        whole short prompts behind it: they need not wait for a long one to end, and it keeps at least half its pace.
        """
        order = [(seq, False) for seq in reading] + [(seq, True) for seq in queue]
        for place, (seq, new) in enumerate(order):
            want, chunked = self._want(seq), self.limits.chunked_prefill
            if self.budget <= 0 or (new and not self._seat(seq)):
                return
            if want > self.budget and self.slices and not chunked:
                return  # it waits for a step that it can begin
            if new:
                self._admit(seq)
            if want > self.budget and chunked:
                self._share(seq, order[place + 1 :])
                return
            self._grant(seq, want)

    def _share(self, long: Sequence, behind: list[tuple[Sequence, bool]]) -> None:
        spare, place = self.budget // 2, len(self.slices)
        for seq, new in behind:
            if not spare or (new and not self._seat(seq)):
                break
            want = self._want(seq)
            if want <= spare:
                if new:
                    self._admit(seq)
                self._grant(seq, want)
                spare -= want
            elif new:  # passed by, never robbed: what it needs to start stays set aside
                self.free_slabs -= self.limits.room(seq)
                self.seats -= 1
        self.slices.insert(place, Slice(long.key, long.computed, self.budget))
        self.budget = 0

    def _want(self, seq: Sequence) -> int:
        scored = self.limits.chunked_prefill and seq.sampling.prompt_logprobs is not None
        return min(seq.pending, SCORED_ROWS) if scored else seq.pending

    def _seat(self, seq: Sequence) -> bool:
        return self.seats > 0 and self.limits.room(seq) <= self.free_slabs

    def _admit(self, seq: Sequence) -> None:
        self.admitted[seq.key] = self.limits.room(seq)
        self.free_slabs -= self.admitted[seq.key]
        self.seats -= 1

    def _grant(self, seq: Sequence, count: int) -> None:
        self.slices.append(Slice(seq.key, seq.computed, count))
        self.budget -= count
