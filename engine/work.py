"""What a runner is asked to do for one sequence in one step. No torch here: the simulator's runner takes it as well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Run `tokens` at positions `start` to `start + len(tokens) - 1`.

    `slabs` cover at least `start + len(tokens)` tokens, and the KV of positions 0 to `start - 1` is in them. `logits`
    says which rows of logits come back: those of the "last" token, of "all" of them, or "none".
    """

    tokens: list[int]
    start: int
    slabs: list[int]
    logits: str
