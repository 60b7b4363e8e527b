"""Eviction of KV per head on the CPU: records queries, decides what heads keep, and moves the kept rows.

    run        the queries of the last 64 rows are recorded: of the prompt, later of each block of the answer; rule
               `fastgen` adds up the attention of all rows of the prompt, and `zap` needs nothing
    mark       rule `ada` only: rows are marked, and counted for other ranks
    plan       it is decided what heads keep, by the rule; kept rows are copied into scratch memory
    apply      the scratch memory is written into the slabs of the sequence's bag, its map first

What is recorded depends only on positions: computing a row again, or cutting a prompt elsewhere, changes nothing. Pools
are of raw float32, or have a codec. Each rank of a worker has an evictor of its own layers and heads, whose bag is in
its part of the sequence's slabs: they are as many as the rank with the most rows needs, so others leave some unused.

Memory beside the pool is counted by `engine.eviction.memory`: queries and map of every sequence that the engine
holds, parked ones included, until `forget_sequence`; and the kept rows of the last plan, of which there is one at a
time. `kvcache.eviction.policies` decides, and `kvcache.eviction.kept_rows` says where rows lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import ADA, FASTGEN, PROFILE_ROWS, ZAP, decision_tokens
from engine.cpu.attention import PagedAttention
from engine.cpu.eviction.decision import ColumnSource, DecisionPoint, HeadColumns, HeadDecider
from engine.cpu.eviction.evicted_works import EvictedWork, KeptBag
from engine.cpu.eviction.head_competition import HeadCompetition
from engine.cpu.eviction.head_profile import list_profile_kernels
from engine.cpu.eviction.kept_sequences import BagMemory, KeptSequence
from engine.cpu.eviction.ragged_attention import KeptStore
from engine.cpu.eviction.row_kernels import list_score_kernels
from engine.cpu.eviction.segment_cuts import PackedRows, RowCutter, describe_segment
from engine.cpu.eviction.step_records import PromptSums, QueryRecord, StepRecord, SumRecord
from engine.cpu.eviction.surrogate_decision import SurrogateDecider
from engine.protocols import EvictionOrder, EvictionReport
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.ada import Marks
from kvcache.eviction.kept_rows import KeptRows
from kvcache.eviction.kept_segments import KeptSegment, count_segment_slabs
from kvcache.eviction.policies import KeepRule, name_policy
from kvcache.eviction.rank_bags import measure_bag
from kvcache.eviction.zap import KeepSurrogate
from kvcache.layout import Shard
from kvcache.pool import KvPool

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EvictionSetup:
    """What a runner needs to evict KV: the kind of each token of the vocabulary, and what the policies are made of.

    `kinds` are bits, `kvcache.eviction.policies.SPECIAL_KIND` and `PUNCT_KIND`, [vocab] uint8. `surrogate` has the
    weights of the rule `zap`, of all layers and heads of the model; None: there is no such rule.
    """

    kinds: NDArray[np.uint8]
    rule: KeepRule = KeepRule()
    surrogate: KeepSurrogate | None = None

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules by which KV can be evicted, as `diptych.eviction_spec.KeepSpec` names them."""
        return (ADA, FASTGEN) if self.surrogate is None else (ADA, FASTGEN, self.surrogate.rule)


class CpuEvictor:
    """Evicts KV of one pool.

    Args:
        pool: of float32, or with a codec.
        store: finds and moves its rows.
        heads: query heads.
        windows: the sliding window of each layer; 0: none.
        setup: kinds of tokens and the rule of policies.
        alone: whether the pool is that of a whole model, not that of one rank of several.
        shard: the layers and heads of the model that the pool has; None: all.
        frequencies: of the model's rotation, [head_dim / 2], for `zap`.
    """

    def __init__(
        self,
        pool: KvPool,
        store: KeptStore,
        heads: int,
        windows: Sequence[int],
        setup: EvictionSetup,
        alone: bool = True,
        shard: Shard | None = None,
        frequencies: NDArray[np.float64] | None = None,
    ) -> None:
        self.pool, self._store, self._heads, self._alone = pool, store, heads, alone
        shard = shard or Shard((0, pool.layout.layers), (0, pool.layout.kv_heads))
        self._first_layer = shard.layers[0]
        self._kinds, self._rule, self._group = setup.kinds, setup.rule, heads // pool.layout.kv_heads
        self._layout, self._windows = pool.layout, list(windows)
        self._bags = BagMemory(pool, store)
        self._decider = HeadDecider(self._layout, self._group, windows, setup.rule)
        self._competition = HeadCompetition(self._layout, self._group, windows)
        self._surrogate: SurrogateDecider | None = None
        if setup.surrogate is not None and frequencies is not None:
            part = setup.surrogate.take_shard(shard)
            self._surrogate = SurrogateDecider(self._layout, windows, part, frequencies)
        self.rules = setup.rules
        self._sequences: dict[str, KeptSequence] = {}
        # The last plan: its sequence, and the rows and frames of new segments, and of the bag.
        self._plan: tuple[str, list[PackedRows]] | None = None
        self._cutter = RowCutter(self._layout, store)
        # The last rows that were marked: their sequence, its tokens, and the marks of each head.
        self._marked: tuple[str, int, list[Marks]] | None = None

    @property
    def cuts_kept(self) -> bool:
        """Whether what is kept of whole chunks can become segments: it depends on nothing but them, and one rank has
        all of it.
        """
        return self._alone and self._surrogate is not None and not any(self._windows)

    @property
    def recorded_bytes(self) -> int:
        """Bytes of all recorded queries, and of sums of attention."""
        sums = [one.sums.sums.nbytes for one in self._sequences.values() if one.sums is not None]
        return sum(sums) + sum(sequence.queries.nbytes for sequence in self._sequences.values())

    @property
    def held_bytes(self) -> int:
        """Bytes beside the pool: recorded queries, maps, and the plan's copy of kept rows."""
        sequences = self._sequences.values()
        bags = [bag for one in sequences for bag in (*one.segments, one.bag) if bag is not None]
        maps = sum(bag.tokens.nbytes + bag.kept.positions.nbytes for bag in bags)
        marks = [] if self._marked is None else self._marked[2]
        plan = sum(frames.nbytes for _, frames in self._plan[1]) if self._plan is not None else 0
        return self.recorded_bytes + maps + plan + sum(one.nbytes for one in marks)

    def list_kernels(self) -> list[Any]:
        """The kernels that nothing but eviction uses."""
        width = self._layout.head_dim
        judges = list_score_kernels(width) if self._surrogate is not None else []
        return [*self._store.list_kernels(self.cuts_kept), *list_profile_kernels(width), *judges]

    def check_work(self, work: StepWork, kept: KeptWork) -> None:
        """Check that a work, with slabs numbered within the pool, fits what is known of its sequence.

        Raises:
            ValueError: it has been evicted, but its bag is unknown, or another one.
        """
        if not kept.evicted:
            return
        sequence = self._sequences.get(kept.key)
        bag = None if sequence is None else sequence.bag
        if bag is None:
            raise ValueError(f"the kept rows of {kept.key} are unknown: load them first")
        assert sequence is not None
        decided = decision_tokens(kept.prompt_tokens, work.start)
        first = (*sequence.segments, bag)[0].kept
        if (first.boundary, bag.kept.length) != (kept.spec.boundary, decided):
            raise ValueError(
                f"the kept rows of {kept.key} are those of {bag.kept.length} tokens from {first.boundary} on,"
                f" not of {decided} from {kept.spec.boundary} on"
            )
        sequence.check_slabs(kept.key, work.slabs[kept.spec.boundary_chunks :])

    def attend_to(self, works: Sequence[StepWork], sinks: Sequence[int]) -> PagedAttention:
        """The attention of a step of `works` in the pool, at least one of them with `kept`.

        `sinks` are the places of their first tokens among the sinks, if the pool has a codec.
        """
        records, evicted, row = list[StepRecord](), list[EvictedWork](), 0
        for number, work in enumerate(works):
            if work.kept is not None:
                sink = sinks[number] if sinks else 0
                records += self._record_rows(row, work, work.kept, sink)
                if work.kept.evicted:
                    mine = self._sequences[work.kept.key]
                    assert mine.bag is not None
                    evicted.append(EvictedWork(row, work, work.kept, mine.bag, sink, mine.segments))
            row += len(work.tokens)
        return self._store.attend_to(evicted, records)

    def mark_rows(self, order: EvictionOrder, slabs: list[int], sink: int = 0) -> bytes:
        """Mark the rows of a sequence whose heads compete, for `plan_eviction`. Arguments and errors are the same.

        Returns:
            How many rows of each layer compete (`kvcache.eviction.ada.LayerTally.encode`).
        """
        point, bag = self._find_point(order, slabs, sink)
        policies = self._competition.choose_policies(point) if bag is None else bag.kept.policies
        marks, tally = self._competition.mark_heads(point, policies)
        self._marked = order.key, len(order.tokens), marks
        return tally.encode()

    def plan_eviction(
        self, order: EvictionOrder, slabs: list[int], sink: int = 0, cuts: Sequence[int] = ()
    ) -> EvictionReport:
        """Decide what is kept of the sequence of `order`, whose slabs within the pool are `slabs`, and copy it aside.

        `sink` is the place of its first token among the sinks, if the pool has a codec. `cuts` has the lowest mark that
        stays in each layer of the model, if heads compete.

        Raises:
            ValueError: the sequence is at no decision point, the boundary is behind its prompt, the queries of its last
                rows are missing, or its rows were not marked.
        """
        point, bag = self._find_point(order, slabs, sink)
        policies, kept = self._decide(order, point, bag, cuts)
        # The plan before it, if it was not applied, goes first.
        self._plan = None
        pieces, begin = list[PackedRows](), point.spec.boundary
        if order.cuts and bag is None and self.cuts_kept and order.spec.rule == self.rules[-1]:
            # Rows of the newest 64 tokens are not judged yet.
            last = (point.length - CHUNK_TOKENS) // CHUNK_TOKENS
            pieces = self._cutter.cut_segments(policies, kept, point.source, begin // CHUNK_TOKENS, last)
            begin = pieces[-1][0].length if pieces else begin
        pieces.append(self._cutter.pack_rows(policies, kept, point.source, begin, point.length))
        self._plan = order.key, pieces
        *segments, kept_rows = [packed for packed, _ in pieces]
        known = [one.kept for one in self._sequences[order.key].segments] if bag is not None else []
        names = Counter(name_policy(policy, self._rule) for policy in policies.reshape(-1).tolist())
        return EvictionReport(
            kept_rows.num_slabs,
            sum(one.num_rows for one in (*known, *segments, kept_rows)),
            sum(one.all_rows for one in (*known, *segments, kept_rows)),
            dict(names),
            measure_bag(kept_rows),
            segments=tuple(map(describe_segment, segments)),
        )

    def _decide(
        self, order: EvictionOrder, point: DecisionPoint, bag: KeptBag | None, cuts: Sequence[int]
    ) -> tuple[NDArray[np.uint8], list[HeadColumns]]:
        """The policies, and what each head keeps behind the boundary, those of layer 0 first."""
        if order.spec.rule == ADA:
            if self._marked is None or self._marked[:2] != (order.key, point.length):
                raise ValueError(f"the rows of {order.key} at {point.length} tokens were not marked")
            (_, _, marks), self._marked = self._marked, None
            policies = self._competition.choose_policies(point) if bag is None else bag.kept.policies
            return policies, self._competition.keep_marked(point, marks, cuts[self._first_layer :])
        if order.spec.needs_weights:
            decider = self._surrogate
            if decider is None or order.spec.rule not in (ZAP, self.rules[-1]):
                raise ValueError(
                    f"no KV is evicted here by {order.spec.rule}, only by {' and '.join(self.rules)}"
                )
            policies = decider.choose_policies(point) if bag is None else bag.kept.policies
            return policies, decider.keep_rows(point, policies)
        if bag is None:
            sums = self._sequences[order.key].sums
            assert sums is not None, order.key
            return self._decider.profile_prompt(point, sums.sums)
        return bag.kept.policies, self._decider.apply_policies(point, bag.kept.policies)

    def _find_point(
        self, order: EvictionOrder, slabs: list[int], sink: int
    ) -> tuple[DecisionPoint, KeptBag | None]:
        """What a decision is made from; and the bag of the one before, None at the end of the prompt.

        Raises ValueError as `plan_eviction`.
        """
        length, prompt, spec = len(order.tokens), order.prompt_tokens, order.spec
        if not 0 < prompt <= length == decision_tokens(prompt, length) or spec.boundary > prompt:
            raise ValueError(
                f"nothing is evicted at {length} tokens, with a prompt of {prompt} and a boundary of {spec.boundary}"
            )
        sequence = self._open_sequence(order.key) if spec.needs_weights else self._sequences.get(order.key)
        if sequence is None:
            raise ValueError(f"nothing of {order.key} was recorded")
        rows = np.zeros(0, np.int64)
        if spec.needs_weights:
            pass
        elif length > prompt or spec.rule != FASTGEN:
            rows = sequence.last_rows(length, min(PROFILE_ROWS, prompt) if length == prompt else PROFILE_ROWS)
        elif sequence.sums is None:
            raise ValueError(f"no attention of {order.key} was recorded")
        else:
            sequence.sums.require_complete(order.key)
        kinds = self._kinds[np.asarray(order.tokens)]
        source, bag = self._find_source(order, slabs, sequence, sink)
        if bag is not None:
            # What is in segments stays as it is.
            spec = structs.replace(spec, boundary=bag.kept.boundary)
        return DecisionPoint(prompt, spec, kinds, rows, sequence.queries, source), bag

    def apply_eviction(self, key: str, slabs: list[int]) -> None:
        """Write the planned rows of a sequence into `slabs` of the pool. Raises ValueError without a plan for them."""
        if self._plan is None or self._plan[0] != key:
            raise ValueError(f"no eviction of {key} was planned")
        *segments, (kept, frames) = self._plan[1]
        counts = [0, *accumulate(packed.num_slabs for packed, _ in segments)]
        self._check_room(key, kept, slabs[counts[-1] :])
        sequence, self._plan = self._open_sequence(key), None
        opened = [
            self._bags.write_frames(*packed, slabs[slice(*places)])
            for packed, places in zip(segments, pairwise(counts), strict=True)
        ]
        # A later decision leaves the segments as they are.
        if not (sequence.segments and sequence.segments[-1].kept.length == kept.boundary):
            sequence.segments = opened
        sequence.bag, sequence.sums = self._bags.write_frames(kept, frames, slabs[counts[-1] :]), None

    def load_kept(
        self, key: str, boundary: int, length: int, slabs: list[int], expected: Sequence[KeptSegment] = ()
    ) -> None:
        """Read the maps of the segments `expected` and of a bag in `slabs` of the pool.

        Raises ValueError if there are none, or those of other segments, or of another decision than the one at `length`
        tokens with this `boundary`.
        """
        if not slabs or min(slabs) < 0 or max(slabs) >= self.pool.num_slabs:
            raise ValueError(f"slabs {slabs} are not all in a pool of {self.pool.num_slabs}")
        if expected and not self.cuts_kept:
            raise ValueError(f"segments of {key} cannot be read here")
        segments = self._bags.read_segments(boundary, expected, slabs)
        slabs = slabs[count_segment_slabs(expected) :]
        begin = segments[-1].kept.length if segments else boundary
        kept = self._bags.read_bag(key, begin, length, slabs)
        self._check_room(key, kept, slabs)
        kept.require_full_heads(self._windows)
        sequence = self._open_sequence(key)
        sequence.segments, sequence.bag = segments, self._store.open_bag(kept, slabs)

    def _check_room(self, key: str, kept: KeptRows, slabs: list[int]) -> None:
        """Raises ValueError unless the slabs of a bag are as many as it needs; more, if other ranks may need them."""
        need = kept.num_slabs
        if len(slabs) < need or (self._alone and len(slabs) > need):
            raise ValueError(f"the kept rows of {key} need {need} slabs, not {len(slabs)}")

    def repeat_bag(self, key: str) -> int:
        """Let the bag of a sequence stand for a segment, too, so that the kernels of segments are compiled.

        Returns how many slabs it has, which come before the ring from now on.
        """
        sequence = self._sequences[key]
        assert sequence.bag is not None
        sequence.segments = [sequence.bag]
        return len(sequence.bag.slabs)

    def forget_sequence(self, key: str) -> None:
        """Drop all that is known of a sequence, if anything is."""
        self._sequences.pop(key, None)
        if self._plan is not None and self._plan[0] == key:
            self._plan = None
        if self._marked is not None and self._marked[0] == key:
            self._marked = None

    def _open_sequence(self, key: str) -> KeptSequence:
        """The sequence, new if it is unknown."""
        if key not in self._sequences:
            none = np.zeros((self._layout.layers, 0, 0), np.float32)
            self._sequences[key] = KeptSequence(none, np.full(PROFILE_ROWS, -1, np.int64))
        return self._sequences[key]

    def _find_source(
        self, order: EvictionOrder, slabs: list[int], sequence: KeptSequence, sink: int
    ) -> tuple[ColumnSource, KeptBag | None]:
        """What the heads of a sequence have; and its bag, None at the end of the prompt. Raises ValueError if `slabs`
        are others.
        """
        length, spec, layout = len(order.tokens), order.spec, self._layout
        if length == order.prompt_tokens:
            if len(slabs) < layout.num_chunks(length):
                raise ValueError(f"{length} tokens are not in {len(slabs)} slabs")
            return self._store.prompt_columns(slabs, length, sink), None
        chunks, bag = spec.boundary_chunks, sequence.bag
        before, segments = length - CHUNK_TOKENS, sequence.segments
        if bag is None or ((*segments, bag)[0].kept.boundary, bag.kept.length) != (spec.boundary, before):
            raise ValueError(
                f"the rows that {order.key} kept at {before} tokens are unknown: load them first"
            )
        sequence.check_slabs(order.key, slabs[chunks:])
        ring = slabs[chunks + len(sequence.segment_slabs)]
        return self._store.answer_columns(bag, slabs[:chunks], ring, sink), bag

    def _record_rows(self, row: int, work: StepWork, kept: KeptWork, sink: int) -> list[StepRecord]:
        """What is recorded of a work's rows, of which the first is `row` of the step."""
        tokens = np.arange(work.start, work.start + len(work.tokens))
        if kept.spec.needs_weights:
            return []
        if not kept.evicted and kept.spec.rule == FASTGEN:
            return self._sum_rows(row + np.arange(len(tokens)), tokens, work, kept, sink)
        if not kept.evicted:
            tokens = tokens[tokens >= kept.prompt_tokens - PROFILE_ROWS]
        if not len(tokens):
            return []
        sequence = self._open_sequence(kept.key)
        if not sequence.queries.size:
            shape = self._layout.layers, PROFILE_ROWS, self._heads * self._layout.head_dim
            sequence.queries = np.zeros(shape, np.float32)
        return [QueryRecord(sequence.queries, sequence.positions, row + tokens - work.start, tokens)]

    def _sum_rows(
        self, rows: Ints, tokens: Ints, work: StepWork, kept: KeptWork, sink: int
    ) -> list[StepRecord]:
        """The record of all rows of a work of a prompt."""
        sequence = self._open_sequence(kept.key)
        if sequence.sums is None:
            sequence.sums = PromptSums(self._layout, kept.prompt_tokens)
        source = self._store.prompt_columns(work.slabs, int(tokens[-1]) + 1, sink)
        near = self._rule.window_tokens(kept.prompt_tokens, kept.spec.boundary)
        return [SumRecord(sequence.sums, source, self._group, self._windows, near, rows, tokens)]
