"""What a runner is asked to do for one sequence in one step. No torch here: the simulator's runner takes it as well."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.layout import KVLayout


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

    @property
    def wanted(self) -> int:
        """How many rows of logits come back."""
        return {"last": 1, "all": len(self.tokens), "none": 0}[self.logits]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a runner can take."""

    layout: KVLayout
    num_slabs: int
    max_model_len: int
    vocab_size: int

    def check(self, work: Work) -> None:
        """Raises ValueError if `work` is empty, too long, has too few slabs, or names what is not there."""
        end = work.start + len(work.tokens)
        if not work.tokens or work.start < 0 or end > self.max_model_len:
            raise ValueError(f"positions {work.start}..{end - 1} are not within 0..{self.max_model_len - 1}")
        if self.layout.num_chunks(end) > len(work.slabs):
            raise ValueError(f"{end} tokens do not fit into {len(work.slabs)} slabs")
        if work.logits not in ("last", "all", "none"):
            raise ValueError(f"logits are 'last', 'all' or 'none', not {work.logits!r}")
        if min(work.slabs) < 0 or max(work.slabs) >= self.num_slabs:
            raise ValueError(f"slabs {work.slabs} are not all in a pool of {self.num_slabs}")
        if min(work.tokens) < 0 or max(work.tokens) >= self.vocab_size:
            raise ValueError(f"token ids are not all within 0..{self.vocab_size - 1}")
