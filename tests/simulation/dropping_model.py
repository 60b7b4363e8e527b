"""The toy model with heads that drop rows: real keep sets, maps and bags, over rows that are hashes.

Behind a decision point a layer's row is a hash of the token, the row below it, and the row before it; for the first
one the row before it is a hash of all rows that the layer's head has kept. The next token is a hash of all rows of all
layers that are left. So an answer depends on what was kept, on when it was decided, and on every byte that was moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from diptych.eviction_spec import KEEP_ALL, PROFILE_ROWS, KeepSpec, decision_tokens
from diptych.request import SamplingParams
from engine.protocols import EvictionOrder, EvictionReport
from engine.sequence import num_chunks
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.kept_rows import FRAME_TOKENS, KeptRows, frame_bytes, frames_per_slab, map_frames
from kvcache.eviction.policies import PUNCT_KIND, SPECIAL_KIND, KeepRule, choose_policies, kept_mask
from tests.simulation.virtual_model import (
    LAYERS,
    VOCAB,
    VirtualMemory,
    VirtualRunner,
    VirtualSamplerRow,
)

RULE = KeepRule()
KINDS = np.array(
    [SPECIAL_KIND * (token % 37 == 0) | PUNCT_KIND * (token % 5 == 0) for token in range(VOCAB)], np.uint8
)
Rows = dict[int, bytes]


@dataclass(slots=True)
class KeptState:
    """What the runner has of one sequence: recorded rows by layer and position, its map, and where its bag is."""

    recorded: dict[tuple[int, int], bytes] = field(default_factory=dict)
    kept: KeptRows | None = None
    slabs: list[int] = field(default_factory=list)
    plan: tuple[KeptRows, list[Rows]] | None = None


class DroppingRunner(VirtualRunner):
    """`engine.protocols.EvictingRunner`; its heads are its layers."""

    can_evict = True

    def __init__(self, memory: VirtualMemory, spend: Callable[[int], None] = lambda tokens: None) -> None:
        super().__init__(memory, spend)
        self.states: dict[str, KeptState] = {}
        self._frame, self._frames = frame_bytes(memory.layout), frames_per_slab(memory.layout)

    # ---- steps

    def compute_layer(self, work: StepWork, layer: int, below: list[bytes]) -> list[bytes]:
        if work.kept is None:
            return super().compute_layer(work, layer, below)
        state = self.states.setdefault(work.kept.key, KeptState())
        end = work.start + len(work.tokens)
        if work.kept.evicted:
            rows = self._compute_behind(work, work.kept, layer, below)
        else:
            assert end <= work.kept.prompt_tokens, "a step goes across a decision point"
            rows = super().compute_layer(work, layer, below)
        for position, row in zip(range(work.start, end), rows, strict=True):
            if position >= work.kept.prompt_tokens - PROFILE_ROWS:
                state.recorded[layer, position] = row
        return rows

    def _compute_behind(self, work: StepWork, kept: KeptWork, layer: int, below: list[bytes]) -> list[bytes]:
        state = self.states[kept.key]
        assert state.kept is not None and work.slabs[kept.spec.boundary_chunks + 1 :] == state.slabs
        length, end = state.kept.length, work.start + len(work.tokens)
        assert length <= work.start < end <= length + CHUNK_TOKENS, "a step goes across a decision point"
        before = (
            self._load_row(work, layer, work.start - 1)
            if work.start > length
            else self._kept_digest(work, layer)
        )
        rows = []
        for position, (token, under) in enumerate(zip(work.tokens, below, strict=True), work.start):
            before = self._exact_row(layer, before, under, token)
            self._store_row(work, layer, position, before)
            rows.append(before)
        return rows

    def _kept_digest(self, work: StepWork, layer: int) -> bytes:
        """All rows that a layer has kept, those below the boundary included."""
        assert work.kept is not None
        rows = self._kept_rows(work.kept.key, layer)
        whole = b"".join(self._load_row(work, layer, position) for position in range(work.kept.spec.boundary))
        return xxhash.xxh3_128_digest(whole + b"".join(rows[position] for position in sorted(rows)))

    def _place(self, work: StepWork, layer: int, position: int) -> int:
        """Behind the boundary an evicted sequence has only its ring."""
        if work.kept is None or not work.kept.evicted or position < work.kept.spec.boundary:
            return super()._place(work, layer, position)
        return self._locate(work.slabs[work.kept.spec.boundary_chunks], layer, position)

    def _locate(self, slab: int, layer: int, position: int) -> int:
        row = position % CHUNK_TOKENS * self._row_bytes
        return (slab - self._memory.first) * self._slab + layer * 2 * self._half + row

    def read_rows(self, work: StepWork) -> bytes:
        if work.kept is None or not work.kept.evicted:
            return super().read_rows(work)
        state, end, digest = self.states[work.kept.key], work.start + len(work.tokens), xxhash.xxh3_64()
        assert state.kept is not None
        for slab in work.slabs[: work.kept.spec.boundary_chunks] + state.slabs:
            digest.update(self._memory.slab_bytes(slab))
        for layer in range(LAYERS):
            for position in range(state.kept.length, end):
                digest.update(self._load_row(work, layer, position))
        return digest.digest()

    # ---- decisions

    def plan_eviction(self, order: EvictionOrder) -> EvictionReport:
        state, spec = self.states[order.key], order.spec
        kept = self._choose(order, state)
        rows = [self._gather(order, state, kept, layer) for layer in range(LAYERS)]
        state.plan = kept, rows
        names, counts = np.unique(kept.policies, return_counts=True)
        policies = {RULE.policy_names[name]: int(count) for name, count in zip(names, counts, strict=True)}
        assert kept.boundary == spec.boundary
        return EvictionReport(kept.num_slabs, kept.num_rows, kept.all_rows, policies)

    def _choose(self, order: EvictionOrder, state: KeptState) -> KeptRows:
        """The rows to keep, with scores that are hashes of the recorded rows."""
        tokens, length, spec = np.array(order.tokens), len(order.tokens), order.spec
        first = length == order.prompt_tokens
        last = range(max(0 if first else order.prompt_tokens, length - PROFILE_ROWS), length)
        policies, positions = np.zeros((LAYERS, 1), np.uint8), list[NDArray[np.int32]]()
        for layer in range(LAYERS):
            seen = b"".join(state.recorded[layer, position] for position in last)
            there = self._positions(order, state, layer)
            if first:
                masses = np.sort(_draw(seen + b"masses", 4))
                policies[layer] = choose_policies(masses[None], spec.threshold, order.prompt_tokens)
            else:
                assert state.kept is not None
                policies[layer] = state.kept.policies[layer]
            mask = kept_mask(
                int(policies[layer, 0]), KINDS[tokens[there]], there, _draw(seen, length)[there], length,
                order.prompt_tokens, spec.boundary, RULE,
            )  # fmt: skip
            positions.append(there[mask])
        return KeptRows.from_heads(self._memory.layout, spec.boundary, length, policies, positions)

    def _positions(self, order: EvictionOrder, state: KeptState, layer: int) -> NDArray[np.int32]:
        """Behind the boundary, the rows that a layer still has."""
        length = len(order.tokens)
        if length == order.prompt_tokens:
            return np.arange(order.spec.boundary, length, dtype=np.int32)
        assert state.kept is not None and state.kept.length == length - CHUNK_TOKENS
        ring = np.arange(state.kept.length, length, dtype=np.int32)
        return np.concatenate([state.kept.head_positions(layer, 0), ring])

    def _gather(self, order: EvictionOrder, state: KeptState, kept: KeptRows, layer: int) -> Rows:
        there: Rows = {}
        if len(order.tokens) > order.prompt_tokens:
            there = self._kept_rows(order.key, layer)
            ring = order.slabs[order.spec.boundary_chunks]
            assert state.kept is not None
            fresh = dict.fromkeys(range(state.kept.length, len(order.tokens)), ring)
        else:
            behind = range(order.spec.boundary, len(order.tokens))
            fresh = {position: order.slabs[position // CHUNK_TOKENS] for position in behind}
        for position, slab in fresh.items():
            at = self._locate(slab, layer, position)
            there[position] = self._row_at(at, at + self._half)
        return {int(position): there[int(position)] for position in kept.head_positions(layer, 0)}

    def apply_eviction(self, key: str, bag_slabs: list[int]) -> None:
        state = self.states[key]
        assert state.plan is not None and len(bag_slabs) == state.plan[0].num_slabs
        (kept, rows), state.plan = state.plan, None
        for slab in bag_slabs:
            self._memory.slab_bytes(slab)[:] = bytes(self._slab)
        head = kept.encode()
        for frame in range(kept.lead):
            at = self._frame_at(bag_slabs, frame)
            self._memory.bytes[at : at + self._frame] = head[frame * self._frame : (frame + 1) * self._frame]
        state.kept, state.slabs = kept, list(bag_slabs)
        for layer in range(LAYERS):
            for place, position in enumerate(sorted(rows[layer])):
                row = rows[layer][position]
                for at, part in zip(self._row_places(state, layer, place), (row[:8], row[8:]), strict=True):
                    self._memory.bytes[at : at + self._row_bytes] = part

    def load_kept(self, key: str, boundary: int, length: int, bag_slabs: list[int], *_: object) -> None:
        first = self._memory.slab_bytes(bag_slabs[0])[: self._frame]
        lead = map_frames(first, self._memory.layout, len(bag_slabs))
        starts = [self._frame_at(bag_slabs, frame) for frame in range(lead)]
        head = b"".join(bytes(self._memory.bytes[at : at + self._frame]) for at in starts)
        kept = KeptRows.decode(head, self._memory.layout)
        if (kept.num_slabs, kept.boundary, kept.length) != (len(bag_slabs), boundary, length):
            raise ValueError("the map of kept rows is not of this bag")
        state = self.states.setdefault(key, KeptState())
        state.kept, state.slabs = kept, list(bag_slabs)

    def forget_kept(self, key: str) -> None:
        self.states.pop(key, None)

    # ---- bags

    def _kept_rows(self, key: str, layer: int) -> Rows:
        state = self.states[key]
        assert state.kept is not None
        positions = state.kept.head_positions(layer, 0)
        return {
            int(position): self._row_at(*self._row_places(state, layer, place))
            for place, position in enumerate(positions)
        }

    def _row_places(self, state: KeptState, layer: int, place: int) -> tuple[int, int]:
        """Where the keys and the values of a layer's row number `place` lie."""
        assert state.kept is not None
        at = self._frame_at(state.slabs, state.kept.first_frame(layer, 0) + place // FRAME_TOKENS)
        at += place % FRAME_TOKENS * self._row_bytes
        return at, at + FRAME_TOKENS * self._row_bytes

    def _frame_at(self, slabs: list[int], frame: int) -> int:
        return (
            slabs[frame // self._frames] - self._memory.first
        ) * self._slab + frame % self._frames * self._frame

    def _row_at(self, keys: int, values: int) -> bytes:
        memory, size = self._memory.bytes, self._row_bytes
        return bytes(memory[keys : keys + size]) + bytes(memory[values : values + size])


def _draw(seed: bytes, count: int) -> NDArray[np.float64]:
    """So many numbers of [0, 1) that follow from `seed`."""
    return np.random.default_rng(xxhash.xxh3_64_intdigest(seed)).random(count)


def undisturbed_kept_answer(
    prompt: Sequence[int], sampling: SamplingParams, max_model_len: int, keep: KeepSpec = KEEP_ALL
) -> tuple[list[int], str]:
    """The answer of one undisturbed run whose heads drop rows, and how it ends: "stop" or "length"."""
    most = num_chunks(min(len(prompt) + sampling.max_tokens, max_model_len))
    runner = DroppingRunner(VirtualMemory(2 * most + 3, RAW_CLASS))
    row, slabs = VirtualSamplerRow(sampling, ()), list(range(most))
    tokens, output, evicted = list(prompt), list[int](), False
    while True:
        start = len(prompt) + max(0, len(output) - 1) if output else 0
        work = StepWork(tokens, start, slabs, "last", prompt[0], KeptWork("it", len(prompt), keep, evicted))
        [logits] = runner.run([work])
        known = [*prompt, *output]
        if decision_tokens(len(prompt), len(known)) == len(known):
            order = EvictionOrder("it", known, len(prompt), keep, slabs)
            bag = list(range(most + 1, most + 1 + runner.plan_eviction(order).bag_slabs))
            runner.apply_eviction("it", bag)
            slabs, evicted = [*slabs[: keep.boundary_chunks], most, *bag], True
        tokens = [row.pick(logits[-1])]
        output += tokens
        if tokens[0] in sampling.stop_token_ids:
            return output, "stop"
        row.push(tokens[0])
        if row.done:
            return output, "stop"
        if len(output) >= sampling.max_tokens or len(prompt) + len(output) >= max_model_len:
            return output, "length"
