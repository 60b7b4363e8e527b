"""Cuts a batch's work of a step into units of bounded size, and says what its runner has to do. No torch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.step_work import StepWork


@dataclass(frozen=True, slots=True)
class WorkLogits:
    """Logits [rows, vocab] of a work of a batch: of its rows from `row` on, counted from the first that needs them."""

    batch: int
    index: int
    row: int
    logits: Any


@dataclass(frozen=True, slots=True)
class WorkFailure:
    """A work of a batch failed by itself; the others of the step go on. What it gives afterwards means nothing."""

    batch: int
    index: int
    error: Exception


UnitResult = WorkLogits | WorkFailure


class OffloadRunner(Protocol):
    """Computes the steps of a block, in units (`engine.cpu.offload.runner.CpuOffloadRunner`)."""

    def run_step(self, works: dict[int, list[StepWork]], last: bool) -> Generator[Sequence[UnitResult]]:
        """Compute a step of `works` by batch; slabs are numbered within each batch's room for KV.

        Each item is one unit, with the logits that it gave, and the works that failed in it. `last` says that no other
        step is expected, so that nothing is read ahead for one. After an error, or if it is closed early, what the step
        wrote of the KV is undefined.

        Raises:
            OSError: a disk failed.
            ValueError: keys or values are not finite whatever the work is, or a work is not within the model's bounds.
        """


@dataclass(frozen=True, slots=True)
class PieceWork:
    """A part of a work: the piece's share of its tokens. `row` is how many rows with logits came before it."""

    index: int
    row: int
    work: StepWork


def cut_works(works: Sequence[StepWork], most: int) -> list[list[PieceWork]]:
    """Cut a batch's works, in order, into pieces of at most `most` tokens. A long work lies in several pieces."""
    pieces: list[list[PieceWork]] = [[]]
    left = most
    for index, work in enumerate(works):
        begin, row, size = 0, 0, len(work.tokens)
        while begin < size:
            if not left:
                pieces.append([])
                left = most
            count = min(left, size - begin)
            ends = begin + count == size
            logits = work.logits if work.logits != "last" or ends else "none"
            part = replace(
                work,
                tokens=work.tokens[begin : begin + count],
                start=work.start + begin,
                logits=logits,
                first_token=work.sink_token,
            )
            pieces[-1].append(PieceWork(index, row, part))
            row += part.wanted
            begin, left = begin + count, left - count
    return pieces
