"""The protocols through which the engine loop uses the model runner, the sampler and observers; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diptych.messages import Failed, Logprob, Output
from engine import sequence
from engine.step_work import StepWork

# The runner returns logits and the sampler takes them; in production torch tensors [rows, vocab].
Logits = Any

# Called with the number of layers whose KV is complete in the slabs.
OnLayersDone = Callable[[int], None]


class StepRunner(Protocol):
    """Runs a batch of `StepWork` through the model and returns the logits. Repeating a batch does no harm.

    `done` is called with the number of layers whose KV is complete; without an error, the last call reports all layers.
    A runner may have an attribute `prepare_seconds`: the time its last run took before the model itself ran.
    """

    def run(self, batch: list[Any], done: OnLayersDone | None = None) -> list[Any]:
        """Compute one step and return the logits of each item of `batch`, in order.

        Calls `done` with the number of layers whose KV is complete.
        """


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token, with its log-probability if the request asks for it."""

    token: int
    logprob: Logprob | None = None


class SamplingState(Protocol):
    """The sampling state of one sequence. `push` gets every token of the output."""

    @property
    def cost_s(self) -> float:
        """Expected seconds to process the next logits of this sequence (grammar mask, penalties)."""

    @property
    def done(self) -> bool:
        """Whether the grammar is complete, so that no token can follow."""

    def push(self, token: int) -> None:
        """Record `token` as the next one of the output. Raises GrammarError if the grammar does not allow it."""


class StepSampler(Protocol):
    """Chooses one token for each row of logits [1, vocab]. `open` and `push` raise GrammarError."""

    def expect(self, seq: sequence.Sequence) -> None:
        """Announces a sequence: slow preparation starts now, in the background (see `Sequence.ready`)."""

    def notify(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, from another thread, whenever an announced sequence has become ready."""

    def open(self, seq: sequence.Sequence) -> Any:
        """Creates the sampling state of `seq` (`SamplingState`). Raises GrammarError if its grammar is refused."""

    def sample(self, logits: list[Any], rows: list[Any]) -> list[SampledToken | Exception]:
        """Chooses one token per row.

        `logits` are [1, vocab] each, `rows` their states from `open`. A row that fails gets its exception instead of a
        token; the others are not affected.
        """

    def score(self, logits: Any, tokens: list[int], top: int) -> list[Logprob]:
        """Log-probabilities of `tokens`, one per row of `logits`, each with the `top` most likely alternatives."""


class KvObserver(Protocol):
    """Observes held sequences in every step, so that their KV can be transferred while it is computed."""

    def on_slabs_taken(self, slabs: Sequence[int]) -> None:
        """These slabs, idle or cached before, may be overwritten from now on: earlier announcements of them are
        void.
        """

    def on_step_begin(self, parts: Sequence[tuple[sequence.Sequence, int]]) -> OnLayersDone | None:
        """A step is about to compute each held sequence in `parts` up to the given number of tokens.

        Returns a function to call after layers are done, or None.
        """

    def on_sequence_dropped(self, key: str) -> None:
        """A sequence has released its slabs without handing them over."""


class StepObserver(Protocol):
    """Records which sequences come to an engine and what its steps run. It changes nothing."""

    def on_sequence_arrived(self, seq: sequence.Sequence, now_s: float) -> None:
        """The engine has accepted a sequence, to prefill it or to continue from transferred KV."""

    def on_step_end(
        self,
        begun_s: float,
        ended_s: float,
        ran: Sequence[tuple[sequence.Sequence, StepWork]],
        messages: Sequence[Output | Failed],
    ) -> None:
        """A step has ended: the works that ran in it (possibly none), and all messages that it produced."""
