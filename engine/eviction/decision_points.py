"""Lets the heads of sequences at a decision point drop KV, so that slabs go back to the pool while they decode.

    rows computed ─▶ plan: rows to keep are copied aside ─▶ slabs released ─▶ bag and ring taken ─▶ rows written

When there is a decision point: `diptych.eviction_spec`. What a head keeps: `kvcache.eviction.policies`. The runner
decides and copies (`engine.protocols.EvictingRunner`); this moves the slabs, and finds the sequence that pays if
there are too few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import CorruptChunk
from diptych.eviction_report import KeptReport
from diptych.eviction_spec import decision_tokens
from engine.protocols import EvictingRunner, EvictionOrder, Preparation, StepRunner
from engine.sequence import Sequence, SequenceRefused
from engine.sequence_table import SequenceTable


class DecisionPoints:
    """What the runner keeps of the sequences of `table` that evict: the queries of the last rows, the maps of bags.

    Its `evict` and `load` may be called only if the runner is an `engine.protocols.EvictingRunner`.
    """

    def __init__(self, runner: StepRunner, table: SequenceTable) -> None:
        self._runner, self._table = cast(EvictingRunner, runner), table
        # What sequences that evict wait for; None: nothing.
        self.preparation: Preparation | None = None
        # Keys of the sequences that the runner was given.
        self._known: set[str] = set()
        # Keys of the sequences whose latest decision no output has reported.
        self._unsent: set[str] = set()

    def check_runner(self, seq: Sequence) -> None:
        """Raises SequenceRefused if `seq` evicts or pools, and the runner does not."""
        if seq.keep.evicts and not getattr(self._runner, "can_evict", False):
            raise SequenceRefused("internal_error", "the runner of this worker cannot evict KV")
        rules = getattr(self._runner, "keep_rules", None)
        if seq.keep.evicts and rules is not None and not any(map(seq.keep.fits_rule, rules)):
            why = f"it can by {' and '.join(rules)}, and the request asks for {seq.keep.rule}"
            raise SequenceRefused("internal_error", "this worker cannot evict KV by the request's rule", why)
        if seq.sampling.pooling is not None and not getattr(self._runner, "can_pool", False):
            raise SequenceRefused("internal_error", "the runner of this worker cannot pool")

    def expect(self, seq: Sequence) -> None:
        """`seq` will come soon. If it evicts, it is not ready before the kernels are. Idempotent."""
        if seq.keep.evicts and self.preparation is not None:
            self.preparation.request()
            seq.kernels = self.preparation

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, when the kernels are ready."""
        if self.preparation is not None:
            self.preparation.notify(wake)

    def note_run(self, seq: Sequence) -> None:
        """The runner is given work of `seq`."""
        if seq.keep.evicts:
            self._known.add(seq.key)

    def evict(
        self,
        seq: Sequence,
        preempt: Callable[[Sequence], None],
        on_taken: Callable[[list[int]], None],
    ) -> None:
        """Let the heads of `seq`, which has come to a decision point, drop KV.

        While there are too few slabs for its bag, `preempt` takes the memory of the sequence with the worst precedence
        in the arena. If that is `seq` itself, nothing is decided; it still has all its KV then, so that may be parked.
        `on_taken` is given the slabs that `seq` has taken, before anything is written to them. A failure of the runner
        is raised.
        """
        tokens = seq.tokens(0, seq.computed)
        order = EvictionOrder(seq.key, tokens, len(seq.prompt), seq.keep, list(seq.slabs), seq.cuts_kept)
        seq.eviction = report = self._runner.plan_eviction(order)
        while not self._table.has_room_for_bag(seq, report.bag_slabs, report.segments):
            victim = self._table.scheduler.worst_holder(seq)
            preempt(victim)
            if victim is seq:
                return
        self._table.release_undecided(seq)
        begun = bool(seq.kept_slabs)
        taken = self._table.take_bag(seq, report.bag_slabs, report.segments)
        assert taken is not None, seq.key
        on_taken(taken)
        self._runner.apply_eviction(seq.key, seq.bag_slabs if begun else seq.kept_rows_slabs)
        self._unsent.add(seq.key)

    def take_report(self, seq: Sequence) -> KeptReport | None:
        """What the latest decision about `seq` kept, for its next output; None if that has been sent already."""
        if seq.key not in self._unsent:
            return None
        self._unsent.discard(seq.key)
        report = seq.eviction
        freed = -(-seq.computed // CHUNK_TOKENS) - len(seq.slabs)
        return KeptReport(report.kept_rows, report.all_rows, dict(report.policies), max(0, freed))

    def load(self, seq: Sequence) -> None:
        """Let the runner read the maps of segments and of a bag that came from elsewhere, or are in other slabs now.

        Queries of `seq` that the runner has stay. Raises ValueError if there are no valid maps, or those of other
        segments than `seq` has, or of another decision.
        """
        self._known.add(seq.key)
        decided = decision_tokens(len(seq.prompt), seq.computed)
        self._runner.load_kept(seq.key, seq.keep.boundary, decided, seq.kept_rows_slabs, seq.segments)

    def load_restored(self, seq: Sequence) -> None:
        """As `load`, for a sequence whose bag is in other slabs now. Its segments are shared again: equal ones that
        others have replace them.
        """
        self.load(seq)
        if self._table.share_restored(seq):
            self.load(seq)

    def load_adopted(self, seq: Sequence) -> None:
        """As `load`, for a sequence that is being adopted: nothing is kept of it if that fails.

        Raises:
            CorruptChunk: its maps are not valid, or those of other segments or of another decision.
            Exception: the runner could not read the map for want of memory, for example.
        """
        try:
            self.load(seq)
        except Exception as error:
            self.forget(seq.key)
            if isinstance(error, ValueError):
                what = f"KV of request {seq.id} does not say what its heads kept"
                raise CorruptChunk(what, str(error)) from error
            raise

    def forget(self, key: str) -> None:
        """The runner keeps nothing of a sequence any more. It hears of it once, and only if it was given any."""
        self._unsent.discard(key)
        if key in self._known:
            self._known.discard(key)
            self._runner.forget_kept(key)
