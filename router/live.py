"""A request that has not ended, and what its running attempt asks of workers (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.request import TERMINAL, Request, Stage
from router.effects import Choice
from router.policy import Load, Need
from router.prefix_index import CHUNK_TOKENS, Chunks


@dataclass(slots=True)
class Live:
    """`open` are the workers that hold something for it. Before the Offer `choice.decode` is only planned: it counts as
    load, but has not heard of the request.

    `chunks` name the full chunks of its prompt. `expected_tokens` is how long its answer may become, if it is as long
    as answers lately were. `unread_tokens` is what its reader has to compute; `spared_tokens` need no room of its own
    where it is written, since others hold them. Both are what was thought when its worker was chosen.
    """

    request: Request
    choice: Choice | None = None
    pinned: bool = False
    chunks: Chunks = ()
    expected_tokens: int = 0
    fingerprint: str | None = None
    attempts: int = 0
    open: set[str] = field(default_factory=set)
    unread_tokens: int = 0
    spared_tokens: int = 0
    booked_tokens: int = 0
    first_queued_s: float = 0.0
    told: set[str] = field(default_factory=set)  # durations that have been told: "first", "second"
    transfer_s: float = 0.0

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
        tokens = len(request.prompt) + max(len(request.output), self.expected_tokens)
        return -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS

    @property
    def need(self) -> Need:
        request = self.request
        total = len(request.prompt) + len(request.output)
        return Need(total, self.room_tokens, self.fingerprint, self.chunks)

    @property
    def shares(self) -> dict[str, Load]:
        """How it burdens its workers, planned ones included."""
        choice, stage = self.choice, self.request.stage
        if choice is None or stage in TERMINAL:
            return {}
        unread = self.unread_tokens if stage is Stage.QUEUED else 0
        room = max(0, self.room_tokens - self.spared_tokens)
        if choice.prefill is None:
            return {choice.decode: Load(unread, 1, room)}
        decode = {choice.decode: Load(0, 1, room)}
        return decode if stage is Stage.DECODING else {choice.prefill: Load(unread, 1, 0), **decode}
