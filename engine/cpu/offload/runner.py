"""Computes the steps of a block on the CPU: layer by layer, batch after batch, whatever lies on disk.

    for layer in layers:                 its weights were read while the layer before was computed
        for batch in batches:            so were this batch's KV and activations
            for piece in batch:          a unit: at most `policy.step_tokens` tokens; the caller may pause here

This is FlexGen's zig-zag schedule (Sheng et al. 2023, algorithm 1). Weights are read once for each step, whatever the
number of batches is. Rows do not depend on each other, so tokens are those of the resident engine.
"""

from __future__ import annotations

import resource
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.batching.batch import ForwardBatch, pack_batch
from engine.batching.sink_slots import SinkPlan, SinkSlots
from engine.cpu.attention import PagedAttention
from engine.cpu.coded.attention import SinkRecorder
from engine.cpu.coded.sink_table import SinkTable
from engine.cpu.decoder import CpuDecoder
from engine.cpu.offload.block_kv import BlockKv
from engine.cpu.offload.hidden_rooms import HiddenRooms
from engine.cpu.offload.weight_stream import WeightStream
from engine.cpu.weights.decoder_weights import CpuLayer
from engine.isolation import NonFiniteKv
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import LOGIT_ROWS, BlockNeeds
from engine.offload.units import PieceWork, UnitResult, WorkFailure, WorkLogits, cut_works
from engine.step_work import StepWork
from kvcache.layout import KvLayout


@dataclass(frozen=True, slots=True)
class BlockTiers:
    """Where everything lies that a block computes with. `sinks` are used if KV has a codec."""

    weights: WeightStream
    kv: BlockKv
    hidden: HiddenRooms
    sinks: SinkTable
    sink_slots: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A packed unit of a batch: rows `first` to `end` of its activations."""

    first: int
    end: int
    parts: list[PieceWork]
    batch: ForwardBatch

    def find_parts(self, rows: Sequence[int]) -> list[tuple[int, slice]]:
        """The works that have some of `rows` of the piece: the number of each in its batch, and its rows here."""
        found, first = [], 0
        for part in self.parts:
            end = first + len(part.work.tokens)
            if any(first <= row < end for row in rows):
                found.append((part.index, slice(first, end)))
            first = end
        return found


class CpuOffloadRunner:
    """Computes the steps of one block; only one thread may use it. `needs` is what was predicted for it."""

    def __init__(
        self, decoder: CpuDecoder, layout: KvLayout, policy: BlockPolicy, tiers: BlockTiers, needs: BlockNeeds
    ) -> None:
        self.policy, self.layout, self.needs, self.tiers = policy, layout, needs, tiers
        self.vocab_size = decoder.config.vocab
        self._decoder, self._sinks = decoder, SinkSlots(tiers.sink_slots)
        # Steps that were begun.
        self.steps = 0

    @property
    def progress(self) -> int:
        """A number that grows while a unit reads or writes, be it slowly: read by another thread (`EngineWatchdog`).

        That thread's own page faults do not count: without memory it has some whenever it looks.
        """
        tiers = self.tiers
        moves = tiers.weights.file.num_moves + tiers.kv.num_moves + tiers.hidden.num_moves
        # Weights that stay in memory are mapped: they are read by page faults.
        faults, own = (
            resource.getrusage(who).ru_majflt for who in (resource.RUSAGE_SELF, resource.RUSAGE_THREAD)
        )
        return moves + faults - own

    def run_step(self, works: dict[int, list[StepWork]], last: bool) -> Generator[Sequence[UnitResult]]:
        """As `engine.offload.units.OffloadRunner.run_step`."""
        self.steps += 1
        sinks = self._plan_sinks(works)
        pieces = self._pack_pieces(works, sinks)
        rows = {batch: mine[-1].end for batch, mine in pieces.items()}
        tiers, finished = self.tiers, False
        try:
            tiers.kv.begin_step(works)
            tiers.hidden.begin_step(rows)
            with torch.no_grad():
                yield from self._run_layers(pieces, rows, sinks, last)
                tiers.kv.end_step()
                tiers.hidden.end_step()
            finished = True
            self._sinks.keep(sinks)
        finally:
            if not finished:
                tiers.kv.abandon_step()
                tiers.hidden.abandon_step()

    def _run_layers(
        self, pieces: dict[int, list[_Piece]], rows: dict[int, int], sinks: SinkPlan, last: bool
    ) -> Iterator[Sequence[UnitResult]]:
        decoder, tiers, layers = self._decoder, self.tiers, self.layout.layers
        sink_rows = self._embed_sinks(sinks)
        for index in range(layers):
            layer = tiers.weights.enter_layer(index, last)
            if sink_rows is not None:
                sink_rows = self._compute_sinks(index, layer, sink_rows, sinks)
            for batch, mine in pieces.items():
                attention = tiers.kv.enter(index, batch)
                hidden = tiers.hidden.enter(batch, rows[batch])
                for piece in mine:
                    x = hidden[piece.first : piece.end]
                    if index == 0:
                        x.copy_(decoder.embed_tokens(piece.batch.tokens))
                    delta, failed = self._compute_piece(layer, x, piece, attention)
                    failures = [WorkFailure(batch, work, error) for work, error in failed]
                    if index < layers - 1:
                        x.add_(delta)
                        yield failures
                    else:
                        if failures:
                            yield failures
                        yield from self._compute_logits(batch, piece, x, delta)
                tiers.kv.leave((index, batch))
                tiers.hidden.leave(batch)

    def _compute_piece(
        self, layer: CpuLayer, x: torch.Tensor, piece: _Piece, attention: PagedAttention
    ) -> tuple[torch.Tensor, list[tuple[int, Exception]]]:
        """One layer for the rows `x` of a piece: the change still to be added, and the works that failed.

        A work whose keys or values are not finite goes on with zeros, so that the others need not be computed again.
        Raises NonFiniteKv if that does not help.
        """
        failed: list[tuple[int, Exception]] = []
        while True:
            try:
                delta = self._decoder.compute_layer(0, layer, x, torch.zeros_like(x), piece.batch, attention)
            except NonFiniteKv as error:
                found = piece.find_parts(error.rows)
                if not any(x[rows].any() for _, rows in found):
                    raise
                for index, rows in found:
                    x[rows] = 0.0
                    failed.append((index, error))
            else:
                return delta, failed

    def _compute_logits(
        self, batch: int, piece: _Piece, x: torch.Tensor, delta: torch.Tensor
    ) -> Iterator[Sequence[WorkLogits]]:
        """The logits of a piece behind the last layer, a few rows at a time."""
        wanted = piece.batch.wanted
        places = [(part.index, part.row + i) for part in piece.parts for i in range(part.work.wanted)]
        if not places:
            yield ()
        for start in range(0, len(places), LOGIT_ROWS):
            chosen = wanted[start : start + LOGIT_ROWS]
            logits = self._decoder.compute_logits(x.index_select(0, chosen), delta.index_select(0, chosen))
            yield [
                WorkLogits(batch, index, row, logits[i : i + 1])
                for i, (index, row) in enumerate(places[start : start + LOGIT_ROWS])
            ]

    def _pack_pieces(self, works: dict[int, list[StepWork]], sinks: SinkPlan) -> dict[int, list[_Piece]]:
        """The units of each batch."""
        slots = iter(sinks.slots)
        packed: dict[int, list[_Piece]] = {}
        for batch, mine in works.items():
            places = [next(slots) for _ in mine] if sinks.slots else [0] * len(mine)
            packed[batch], first = [], 0
            for parts in cut_works(mine, self.policy.step_tokens):
                count = sum(len(part.work.tokens) for part in parts)
                batched = pack_batch([part.work for part in parts], [places[part.index] for part in parts])
                packed[batch].append(_Piece(first, first + count, parts, batched))
                first += count
        return packed

    # ---- first tokens, whose KV a codec keeps exactly

    def _plan_sinks(self, works: dict[int, list[StepWork]]) -> SinkPlan:
        """The sinks of all works, batch after batch; none without a codec."""
        if not self.layout.codec:
            return SinkPlan()
        return self._sinks.plan([work.sink_token or 0 for mine in works.values() for work in mine])

    def _embed_sinks(self, sinks: SinkPlan) -> torch.Tensor | None:
        if not sinks.missing:
            return None
        return self._decoder.embed_tokens(torch.tensor([token for _, token in sinks.missing]))

    def _compute_sinks(self, index: int, layer: CpuLayer, x: torch.Tensor, sinks: SinkPlan) -> torch.Tensor:
        """One layer for first tokens that are not known yet. Returns their activations behind it."""
        slots = [slot for slot, _ in sinks.missing]
        batch = pack_batch([StepWork([token], 0, [0], "none") for _, token in sinks.missing])
        table = self.tiers.sinks.view_layer(index)
        recorder: PagedAttention = SinkRecorder(self.layout, self._decoder.heads, table, slots)
        return x.add_(self._decoder.compute_layer(0, layer, x, torch.zeros_like(x), batch, recorder))

    def close(self) -> None:
        """End the threads, and close the files."""
        for one in (self.tiers.weights, self.tiers.kv, self.tiers.hidden):
            one.close()
