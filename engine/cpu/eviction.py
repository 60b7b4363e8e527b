"""Eviction of KV per head on the CPU (FastGen): records queries, decides what heads keep, and moves the kept rows.

    run        the queries of the last 64 rows are recorded: of the prompt, later of each block of the answer
    plan       heads are profiled, or their policies applied again; kept rows are copied into scratch memory
    apply      the scratch memory is written into the slabs of the sequence's bag, its map first

What is recorded depends only on positions: computing a row again, or cutting a prompt elsewhere, changes nothing. Only
pools of raw float32 on workers of one rank can evict.

Memory beside the pool: `query_record_bytes` for every sequence that the engine holds, parked ones included, until
`forget_sequence`; and between plan and apply the kept rows of that sequence. `kvcache.keep` decides, and
`kvcache.kept_rows` says where rows lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from diptych.keep_spec import PROFILE_ROWS, decision_tokens
from engine.cpu.attention import CpuAttention, PagedAttention
from engine.cpu.keep_decision import (
    ROWS_PER_FRAME,
    BagColumns,
    ChunkColumns,
    ColumnSource,
    DecisionPoint,
    HeadColumns,
    HeadDecider,
)
from engine.cpu.ragged_attention import QueryRecord, RaggedAttention, RaggedRows
from engine.protocols import EvictionOrder, EvictionReport
from engine.step_work import KeptWork, StepWork
from kvcache.keep import KeepRule
from kvcache.kept_rows import FRAME_TOKENS, KeptRows, frame_bytes, frames_per_slab, map_frames
from kvcache.layout import KvLayout
from kvcache.pool import KvPool

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def query_record_bytes(layout: KvLayout, heads: int) -> int:
    """Bytes of the recorded queries of one sequence, with `heads` query heads: 64 rows of every layer, as float32."""
    return 4 * layout.layers * PROFILE_ROWS * heads * layout.head_dim


@dataclass(frozen=True, slots=True)
class EvictionSetup:
    """What a runner needs to evict KV: the kind of each token of the vocabulary, and what the policies are made of.

    `kinds` are bits, `kvcache.keep.SPECIAL_KIND` and `PUNCT_KIND`, [vocab] uint8.
    """

    kinds: NDArray[np.uint8]
    rule: KeepRule = KeepRule()


@dataclass(slots=True)
class KeptBag:
    """The kept rows of a sequence, and the slabs of the pool that they are in."""

    kept: KeptRows
    slabs: list[int]
    # [layers, kv_heads]
    counts: Ints = field(init=False)
    frames: Ints = field(init=False)
    # [kept rows], ascending: position + head · 2**32, heads numbered through over all layers.
    keys: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.counts, self.frames = self.kept.counts.astype(np.int64), self.kept.first_frames
        heads = np.repeat(np.arange(self.counts.size), self.counts.reshape(-1))
        self.keys = self.kept.positions + (heads << 32)

    def count_before(self, position: int) -> Ints:
        """How many kept rows of each head are at positions below `position`, [layers, kv_heads]."""
        counts = self.counts.reshape(-1)
        heads = np.arange(len(counts))
        found = np.searchsorted(self.keys, (heads << 32) + position) - (np.cumsum(counts) - counts)
        return found.reshape(self.counts.shape)


@dataclass(slots=True)
class KeptSequence:
    """What the evictor has of one sequence."""

    # [layers, 64, heads * head_dim]: the query of position p is in row p % 64; the positions, -1 without a query.
    queries: Floats
    positions: Ints
    bag: KeptBag | None = None
    # The last plan: the rows that are kept, and the bag's frames, [frames * 32, head_dim].
    plan: tuple[KeptRows, Floats] | None = None

    def last_rows(self, length: int, count: int) -> Ints:
        """The positions of the last `count` of `length` tokens. Raises ValueError if a query of theirs is missing."""
        rows = np.arange(length - count, length)
        missing = rows[self.positions[rows % PROFILE_ROWS] != rows]
        if len(missing):
            raise ValueError(
                f"an eviction at {length} tokens needs the queries of position {missing[0]}, which was not computed"
            )
        return rows


class CpuEvictor:
    """Evicts KV of one raw pool.

    Args:
        pool: of float32.
        pages: the pool's attention.
        windows: the sliding window of each layer; 0: none.
        setup: kinds of tokens and the rule of policies.
    """

    def __init__(
        self, pool: KvPool, pages: CpuAttention, windows: Sequence[int], setup: EvictionSetup
    ) -> None:
        self._pool, self._pages, self._windows = pool, pages, list(windows)
        self._kinds, self._rule = setup.kinds, setup.rule
        self._layout = pool.layout
        # [rows, head_dim]: every key and value of the pool.
        self._rows = pool.data.view(-1, self._layout.head_dim).numpy()
        group = pages.heads // self._layout.kv_heads
        self._decider = HeadDecider(self._layout, self._rows, group, windows, setup.rule)
        self._sequences: dict[str, KeptSequence] = {}

    @property
    def recorded_bytes(self) -> int:
        """Bytes of all recorded queries."""
        return sum(sequence.queries.nbytes for sequence in self._sequences.values())

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
        decided = decision_tokens(kept.prompt_tokens, work.start)
        if (bag.kept.boundary, bag.kept.length) != (kept.spec.boundary, decided):
            raise ValueError(
                f"the kept rows of {kept.key} are those of {bag.kept.length} tokens from {bag.kept.boundary} on,"
                f" not of {decided} from {kept.spec.boundary} on"
            )
        if work.slabs[kept.spec.boundary_chunks + 1 :] != bag.slabs:
            raise ValueError(f"the kept rows of {kept.key} are in other slabs: load them first")

    def attend_to(self, works: Sequence[StepWork], pages: CpuAttention) -> PagedAttention:
        """The attention of a step of `works` in the pool, at least one of them with `kept`."""
        records, evicted, row = list[QueryRecord](), list[tuple[int, StepWork, KeptWork]](), 0
        for work in works:
            if work.kept is not None:
                records += self._record_queries(row, work, work.kept)
                if work.kept.evicted:
                    evicted.append((row, work, work.kept))
            row += len(work.tokens)
        return RaggedAttention(pages, self._pack_rows(evicted) if evicted else None, records)

    def plan_eviction(self, order: EvictionOrder, slabs: list[int]) -> EvictionReport:
        """Decide what is kept of the sequence of `order`, whose slabs within the pool are `slabs`, and copy it aside.

        Raises:
            ValueError: the sequence is at no decision point, the boundary is behind its prompt, or the queries of its
                last rows are missing.
        """
        length, prompt, spec = len(order.tokens), order.prompt_tokens, order.spec
        if not 0 < prompt <= length == decision_tokens(prompt, length) or spec.boundary > prompt:
            raise ValueError(
                f"nothing is evicted at {length} tokens, with a prompt of {prompt} and a boundary of {spec.boundary}"
            )
        sequence = self._sequences.get(order.key)
        if sequence is None:
            raise ValueError(f"no queries of {order.key} were recorded")
        rows = sequence.last_rows(length, min(PROFILE_ROWS, prompt) if length == prompt else PROFILE_ROWS)
        kinds = self._kinds[np.asarray(order.tokens)]
        source, bag = self._find_source(order, slabs, sequence.bag)
        point = DecisionPoint(prompt, spec, kinds, rows, sequence.queries, source)
        if bag is None:
            policies, kept = self._decider.profile_prompt(point)
        else:
            policies = bag.kept.policies
            kept = self._decider.apply_policies(point, policies)
        planned = KeptRows.from_heads(
            self._layout, spec.boundary, length, policies, [one.positions.astype(np.int32) for one in kept]
        )
        sequence.plan = planned, self._copy_rows(planned, kept)
        names = Counter(self._rule.policy_names[policy] for policy in policies.reshape(-1))
        return EvictionReport(planned.num_slabs, planned.num_rows, planned.all_rows, dict(names))

    def apply_eviction(self, key: str, slabs: list[int]) -> None:
        """Write the planned rows of a sequence into `slabs` of the pool. Raises ValueError without a plan for them."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.plan is None:
            raise ValueError(f"no eviction of {key} was planned")
        kept, scratch = sequence.plan
        if len(slabs) != kept.num_slabs:
            raise ValueError(f"the kept rows of {key} need {kept.num_slabs} slabs, not {len(slabs)}")
        size = frames_per_slab(self._layout) * ROWS_PER_FRAME
        for index, slab in enumerate(slabs):
            part = scratch[index * size : (index + 1) * size]
            self._rows[slab * size : slab * size + len(part)] = part
        sequence.bag, sequence.plan = KeptBag(kept, list(slabs)), None

    def load_kept(self, key: str, boundary: int, length: int, slabs: list[int]) -> None:
        """Read the map of a bag in `slabs` of the pool. Raises ValueError if it is none, or that of another decision
        than the one at `length` tokens with this `boundary`.
        """
        if not slabs or min(slabs) < 0 or max(slabs) >= self._pool.num_slabs:
            raise ValueError(f"slabs {slabs} are not all in a pool of {self._pool.num_slabs}")
        frame, size = frame_bytes(self._layout), frames_per_slab(self._layout) * ROWS_PER_FRAME
        memory = self._rows.reshape(self._pool.num_slabs, size, -1)
        lead = map_frames(memory[slabs[0], :ROWS_PER_FRAME].tobytes(), self._layout, len(slabs))
        used = -(-lead // frames_per_slab(self._layout))
        data = b"".join(memory[slab].tobytes() for slab in slabs[:used])[: lead * frame]
        kept = KeptRows.decode(data, self._layout)
        if kept.num_slabs != len(slabs):
            raise ValueError(f"the kept rows of {key} need {kept.num_slabs} slabs, not {len(slabs)}")
        if (kept.boundary, kept.length) != (boundary, length):
            raise ValueError(
                f"the kept rows of {key} are those of {kept.length} tokens from {kept.boundary} on,"
                f" not of {length} from {boundary} on"
            )
        self._open_sequence(key).bag = KeptBag(kept, list(slabs))

    def forget_sequence(self, key: str) -> None:
        """Drop all that is known of a sequence, if anything is."""
        self._sequences.pop(key, None)

    def _open_sequence(self, key: str) -> KeptSequence:
        """The sequence, new if it is unknown."""
        if key not in self._sequences:
            width = self._pages.heads * self._layout.head_dim
            self._sequences[key] = KeptSequence(
                np.zeros((self._layout.layers, PROFILE_ROWS, width), np.float32),
                np.full(PROFILE_ROWS, -1, np.int64),
            )
        return self._sequences[key]

    def _find_source(
        self, order: EvictionOrder, slabs: list[int], bag: KeptBag | None
    ) -> tuple[ColumnSource, KeptBag | None]:
        """What the heads of a sequence have; and its bag, None at the end of the prompt. Raises ValueError if `slabs`
        are others.
        """
        length, spec, layout = len(order.tokens), order.spec, self._layout
        if length == order.prompt_tokens:
            if len(slabs) < layout.num_chunks(length):
                raise ValueError(f"{length} tokens are not in {len(slabs)} slabs")
            return ChunkColumns.of_prompt(layout, slabs, length), None
        chunks = spec.boundary_chunks
        before = length - CHUNK_TOKENS
        if bag is None or (bag.kept.boundary, bag.kept.length) != (spec.boundary, before):
            raise ValueError(
                f"the rows that {order.key} kept at {before} tokens are unknown: load them first"
            )
        if slabs[chunks + 1 :] != bag.slabs:
            raise ValueError(f"the kept rows of {order.key} are in other slabs: load them first")
        newest = np.arange(before, length)
        ring = ChunkColumns(layout, np.full(CHUNK_TOKENS, slabs[chunks], np.int64), newest)
        prefix = ChunkColumns.of_prompt(layout, slabs[:chunks], spec.boundary)
        return BagColumns(prefix, bag.kept, bag.slabs, ring), bag

    def _copy_rows(self, planned: KeptRows, kept: Sequence[HeadColumns]) -> Floats:
        """The frames of a bag, [frames * 32, head_dim]: the map, and a copy of the rows that each head keeps."""
        scratch = np.zeros((planned.num_frames * ROWS_PER_FRAME, self._layout.head_dim), np.float32)
        scratch[: planned.lead * ROWS_PER_FRAME].view(np.uint8).reshape(-1)[:] = np.frombuffer(
            planned.encode(), np.uint8
        )
        for first, columns in zip(planned.first_frames.reshape(-1), kept, strict=True):
            places = np.arange(len(columns.positions))
            rows = (first + places // FRAME_TOKENS) * ROWS_PER_FRAME + places % FRAME_TOKENS
            scratch[rows], scratch[rows + FRAME_TOKENS] = self._rows[columns.keys], self._rows[columns.values]
        return scratch

    def _record_queries(self, row: int, work: StepWork, kept: KeptWork) -> list[QueryRecord]:
        """Where the queries of a work's rows are recorded; its first is `row` of the step."""
        tokens = np.arange(work.start, work.start + len(work.tokens))
        if not kept.evicted:
            tokens = tokens[tokens >= kept.prompt_tokens - PROFILE_ROWS]
        if not len(tokens):
            return []
        sequence = self._open_sequence(kept.key)
        return [QueryRecord(sequence.queries, sequence.positions, row + tokens - work.start, tokens)]

    def _pack_rows(self, evicted: Sequence[tuple[int, StepWork, KeptWork]]) -> RaggedRows:
        """The ragged rows of a step: of each work, whose first row is given."""
        bags = [self._bag_of(kept.key) for _, _, kept in evicted]
        prefixes = [kept.spec.boundary_chunks for _, _, kept in evicted]
        counts = [len(work.tokens) for _, work, _ in evicted]
        positions = np.concatenate(
            [np.arange(work.start, work.start + len(work.tokens)) for _, work, _ in evicted]
        )
        owners = np.repeat(np.arange(len(evicted)), counts)
        skips = np.zeros((len(positions), *bags[0].counts.shape), np.int64)
        for layer, window in enumerate(self._windows):
            for n, position in enumerate(positions if window else ()):
                skips[n, layer] = bags[owners[n]].count_before(position + 1 - window)[layer]
        return RaggedRows(
            rows=np.concatenate([row + np.arange(len(work.tokens)) for row, work, _ in evicted]),
            positions=positions,
            owners=owners,
            starts=np.array([bag.kept.length for bag in bags], np.int64),
            prefixes=np.array(prefixes, np.int64),
            rings=np.array(
                [work.slabs[count] for (_, work, _), count in zip(evicted, prefixes, strict=True)], np.int64
            ),
            chunks=_pad_table(
                [work.slabs[:count] for (_, work, _), count in zip(evicted, prefixes, strict=True)]
            ),
            bags=_pad_table([bag.slabs for bag in bags]),
            counts=np.stack([bag.counts for bag in bags]),
            frames=np.stack([bag.frames for bag in bags]),
            skips=skips,
        )

    def _bag_of(self, key: str) -> KeptBag:
        bag = self._sequences[key].bag
        assert bag is not None
        return bag


def _pad_table(lists: Sequence[list[int]]) -> Ints:
    """[lists, longest], padded with 0."""
    table = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for line, values in zip(table, lists, strict=True):
        line[: len(values)] = values
    return table
