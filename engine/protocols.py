"""The protocols through which the engine loop uses the model runner, the sampler and observers; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diptych.eviction_spec import KeepSpec
from diptych.messages import Failed, Logprob, Output, WorkerStats
from diptych.request import Pooling
from engine import sequence
from engine.step_work import StepWork
from kvcache.eviction.bag_sizes import BagSizes
from kvcache.eviction.kept_segments import KeptSegment

# The runner returns logits and the sampler takes them; in production torch tensors [rows, vocab].
Logits = Any

# Called with the number of layers whose KV is complete in the slabs.
OnLayersDone = Callable[[int], None]


class StepRunner(Protocol):
    """Runs a batch of `StepWork` through the model and returns the logits. Repeating a batch does no harm.

    `done` is called with the number of layers whose KV is complete; without an error, the last call reports all layers.
    A runner may have an attribute `prepare_seconds`: the time its last run took before the model itself ran; and
    `can_evict`: whether it is an `EvictingRunner` and set up as one. Without it, it cannot evict. `can_pool`: whether
    works may ask for `engine.step_work.POOLED_ROWS`; without it they may not.
    """

    def run(self, works: list[Any], done: OnLayersDone | None = None) -> list[Any]:
        """Compute one step and return the logits of each item of `works`, in order.

        Calls `done` with the number of layers whose KV is complete.
        """


@dataclass(frozen=True, slots=True)
class EvictionOrder:
    """A sequence at a decision point: at the end of its prompt, or after each 64 tokens of its answer.

    `tokens` are all its tokens with KV, of which the first `prompt_tokens` are the prompt. At the end of the prompt
    `slabs` are those of its whole chunks; later they are as in `engine.step_work.KeptWork`. `cuts`: what is kept of its
    first chunks shall become segments, if the runner can (`kvcache.eviction.kept_segments`).
    """

    key: str
    tokens: list[int]
    prompt_tokens: int
    spec: KeepSpec
    slabs: list[int]
    cuts: bool = False


@dataclass(frozen=True, slots=True)
class EvictionReport:
    """What an eviction keeps, over all layers and heads.

    `bag_slabs` is how many slabs the kept rows need. A row is the KV of one token in one layer and KV head: of
    `all_rows` behind the boundary, `kept_rows` stay. `policies` counts heads by the name of their policy.
    `sizes` says what the bag's rows of each head and page need, however ranks split them. `segments` are those before
    the bag, of a first decision. A rank whose heads compete with those of others first reports only how many rows do,
    in `tally` (`kvcache.eviction.ada.LayerTally`).
    """

    bag_slabs: int
    kept_rows: int
    all_rows: int
    policies: Mapping[str, int]
    sizes: BagSizes = BagSizes()
    tally: bytes = b""
    segments: tuple[KeptSegment, ...] = ()


class EvictingRunner(StepRunner, Protocol):
    """A runner that can evict KV per head. Its `run` takes works with `engine.step_work.KeptWork`.

    The runner keeps the queries and the map of each such sequence by its key, until `forget_kept`.
    """

    @property
    def can_evict(self) -> bool:
        """Whether it was set up to evict; if not, everything below raises ValueError, but for `forget_kept`."""

    @property
    def keep_rules(self) -> Sequence[str]:
        """The rules by which it can evict, as `KeepSpec` names them."""

    def plan_eviction(self, order: EvictionOrder) -> EvictionReport:
        """Decide what every head keeps, and copy the kept rows aside, so that the sequence can give up its slabs.

        Slabs do not change. A repeated plan has the same result.

        Raises:
            ValueError: the sequence is at no decision point, or its last rows were not computed by this runner.
        """

    def apply_eviction(self, key: str, bag_slabs: list[int]) -> None:
        """Write the rows of the last plan into `bag_slabs`, as many as it reported, those of segments first.

        Raises:
            ValueError: there is no plan, or it needs another number of slabs.
        """

    def load_kept(
        self,
        key: str,
        boundary: int,
        length: int,
        bag_slabs: list[int],
        segments: Sequence[KeptSegment] = (),
    ) -> None:
        """Take over a bag that another runner wrote, or that was moved to other slabs: read its map.

        `boundary` and `length` are those of the sequence's last decision, in tokens. The slabs of `segments` come
        first.

        Raises:
            ValueError: the slabs do not begin with valid maps, or those are of other segments or of another decision.
        """

    def forget_kept(self, key: str) -> None:
        """Drop everything that the runner keeps of a sequence; a sequence that is unknown is no error."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token, with its log-probability if the request asks for it."""

    token: int
    logprob: Logprob | None = None


class Preparation(Protocol):
    """Something slow that sequences wait for before they start (`engine.sequence.Sequence.ready`)."""

    @property
    def ready(self) -> bool:
        """Whether nothing has to be waited for any more. It stays so."""

    def request(self) -> None:
        """A sequence needs it. Returns at once; idempotent."""

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, when it has become ready."""


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

    def pool(self, row: Logits, pooling: Pooling, num_tokens: int) -> bytes:
        """What is pooled of a prompt of `num_tokens`, as float32 numbers: a vector, or one score.

        `row` [1, …] has the logits of its last token, or the sum of the hidden states of all tokens that count.
        """


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
        """A sequence is about to release its slabs without handing them over.

        When this returns, nothing that the observer has begun reads them any more.
        """


class StepObserver(Protocol):
    """Records which sequences come to an engine and what its steps run. It changes nothing."""

    def on_sequence_arrived(self, seq: sequence.Sequence, now_s: float) -> None:
        """The engine has accepted a sequence, to prefill it or to continue from transferred KV."""

    def on_decisions(self, prompts: int, answers: int, seconds: float) -> None:
        """In the step under way, it took `seconds` to decide what sequences keep: those at the end of their prompts
        with `prompts` tokens together, and answers with `answers` tokens.
        """

    def on_step_end(
        self,
        begun_s: float,
        ended_s: float,
        works: Sequence[tuple[sequence.Sequence, StepWork]],
        messages: Sequence[Output | Failed],
    ) -> None:
        """A step has ended: the works that ran in it (possibly none), and all messages that it produced."""


class EngineOutput(Protocol):
    """The message about one sequence after a step (`engine.outputs.SequenceOutput`)."""

    @property
    def message(self) -> Output | Failed:
        """The message for the gateway."""

    @property
    def held(self) -> sequence.Sequence | None:
        """The sequence, if it leaves the engine with its slabs."""


class WorkerEngine(Protocol):
    """An engine as a worker's loop uses it: `engine.loop.Engine`, `engine.offload.engine.OffloadEngine`."""

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, whenever a sequence has become ready (`Sequence.ready`)."""

    def expect(self, seq: sequence.Sequence) -> None:
        """Announce a sequence that will be added soon, so that slow preparation can begin. Idempotent."""

    @property
    def has_work(self) -> bool:
        """Whether a step would progress now."""

    @property
    def deadline_s(self) -> float | None:
        """The earliest deadline of all sequences; a step after it reports that sequence as failed."""

    def step(self, clock: Callable[[], float]) -> Sequence[EngineOutput]:
        """Run one step, or a part of one, and return its messages."""

    def abort(self, request: str, epoch: int) -> list[sequence.Sequence]:
        """Drop the request's sequences of this epoch and older ones, and what they hold. Nothing is emitted."""

    @property
    def stats(self) -> WorkerStats:
        """The engine's part of a worker's statistics."""

    def record_send_time(self, seconds: float) -> None:
        """Record that sending messages to the gateway took `seconds`."""

    def sequences(self) -> Iterable[sequence.Sequence]:
        """All sequences of the engine."""
