"""What the loop asks of others: protocols the size of a sentence, with neither torch nor memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diptych.messages import Logprob
from engine import sequence

Logits = (
    Any  # whatever the runner returns and the sampler takes; torch tensors [rows, vocab] in the real ones
)

LayersDone = Callable[[int], None]  # told how many layers of a step have all their KV in the slabs


class StepRunner(Protocol):
    """Runs a batch of `Work` through the model, and returns each one's logits. Running a batch again does no harm.

    `done` is told how far the batch has come; at the end, if nothing raises, that all layers are through. One that has
    an attribute `prepare_seconds` says there what of its last run went before the model itself.
    """

    def run(self, batch: list[Any], done: LayersDone | None = None) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Picked:
    """One sampled token, with its log-probability when the request asked for that."""

    token: int
    logprob: Logprob | None = None


class Row(Protocol):
    """What sampling has to remember of one sequence; it is told of every token."""

    @property
    def done(self) -> bool:
        """The grammar is complete: nothing can follow."""

    def push(self, token: int) -> None: ...


class StepSampler(Protocol):
    """Chooses one token for each row of logits [1, vocab]. `open` and `push` raise GrammarError."""

    def open(self, seq: sequence.Sequence) -> Any: ...

    def sample(self, logits: list[Any], rows: list[Any]) -> list[Picked | Exception]: ...

    def score(self, logits: Any, tokens: list[int], top: int) -> list[Logprob]: ...


class Follower(Protocol):
    """Follows held sequences through the steps, so that their KV can be fetched while it is computed."""

    def took(self, slabs: Sequence[int]) -> None:
        """These slabs were idle or cached, and may be written to from now on: whatever was said of them is over."""

    def begin(self, parts: Sequence[tuple[sequence.Sequence, int]]) -> LayersDone | None:
        """A step is about to compute each of these held sequences from `computed` up to that many tokens."""

    def dropped(self, key: str) -> None:
        """A sequence has let go of its slabs, which were not handed over."""
