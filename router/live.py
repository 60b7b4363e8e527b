"""A request that has not ended, and what its running attempt asks of workers (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.request import TERMINAL, Request, Stage
from router.credits import TURN_TOKENS, whole_chunks
from router.effects import Choice
from router.policy import Load, Need
from router.prefix_index import Chunks
from router.verdicts import NO_WORKERS, Verdict


@dataclass(slots=True)
class Live:
    """`open` are the workers that hold something for it. Before the Offer `choice.decode` may only be planned: it
    counts as load, but has not heard of the request; `target` is the decode worker that has. There is no `choice` while
    the request waits in the gateway.

    `chunks` name the full chunks of its prompt. `expected_tokens` is how long its answer may become, if it is as long
    as answers lately were. `read_tokens` are those whose KV its reader will hold, in whole chunks, `unread_tokens`
    those that it has to compute; `spared_tokens` need no room of its own where it is written, since others hold them.
    All are what was thought when its worker was chosen.
    """

    request: Request
    number: int  # in order of arrival
    pin: Choice | None = None
    chunks: Chunks = ()
    expected_tokens: int = 0

    losses: int = 0  # attempts that were given up for a worker that was lost or had to end
    failures: int = 0  # and for any other reason
    verdict: Verdict = NO_WORKERS  # of the last one
    avoid: frozenset[str] = frozenset()  # who failed its attempts: others are taken if there are any
    fingerprint: str | None = None  # of the models that began its answer

    choice: Choice | None = None
    open: set[str] = field(default_factory=set)
    staged: bool = False
    target: str | None = None
    heard: set[str] = field(
        default_factory=set
    )  # lives of decode workers that heard of this attempt; each does once
    ticket: bytes = b""
    offered_s: float = 0.0
    read_tokens: int = 0
    unread_tokens: int = 0
    spared_tokens: int = 0
    booked_tokens: int = 0

    first_queued_s: float | None = None
    told: set[str] = field(default_factory=set)  # durations that have been told: "first", "second"
    transfer_s: float = 0.0

    @property
    def pinned(self) -> bool:
        """A canary, which goes where it is told."""
        return self.pin is not None

    @property
    def source(self) -> str | None:
        """The prefill worker of the running attempt; None where one worker does both."""
        return self.choice.prefill if self.choice else None

    @property
    def room_tokens(self) -> int:
        """What it is likely to take in a pool, in whole chunks: what it has, or will have if it becomes a usual answer.

        Workers give out memory as answers grow, so `max_tokens`, which few answers reach, is no measure.
        """
        request = self.request
        return whole_chunks(len(request.prompt) + max(len(request.output), self.expected_tokens))

    @property
    def need(self) -> Need:
        request = self.request
        total = len(request.prompt) + len(request.output)
        begun = self.fingerprint if request.output else None  # until then any version will do
        return Need(total, self.room_tokens, begun, self.chunks)

    @property
    def shares(self) -> dict[str, Load]:
        """How it burdens its workers, planned ones included."""
        choice, stage = self.choice, self.request.stage
        if choice is None or stage in TERMINAL:
            return {}
        unread = self.unread_tokens if stage is Stage.QUEUED else 0
        turn = min(unread, TURN_TOKENS)
        room = max(0, self.room_tokens - self.spared_tokens)
        if choice.prefill is None:
            return {choice.decode: Load(unread, 1, room, turn)}
        decode = {choice.decode: Load(0, 1, room)}
        if stage is Stage.DECODING:
            return decode
        return {choice.prefill: Load(unread, 1, self.read_tokens, turn), **decode}

    def begin(self, choice: Choice, fingerprint: str, staged: bool) -> None:
        """Another attempt, of which no worker has heard yet."""
        self.choice, self.fingerprint, self.staged = choice, fingerprint, staged
        self.target, self.ticket, self.heard = None, b"", set()
        self.read_tokens = whole_chunks(self.need.prompt_tokens)

    def wait(self) -> None:
        """The running attempt is over; there is no other yet."""
        self.request.epoch += 1
        self.choice = self.target = None
