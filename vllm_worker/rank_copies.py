"""A rank's part of a step's plan: copies between its blocks and the transfer buffer. Raises nothing.

An error in vLLM's connector would end the step of every request with blocks still held. So whatever fails here fails
only the save or load that it concerns: its blocks become zero, so that no bytes of another request and no number that
is not finite stay in them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from vllm_worker.blocks import BlockRegion, RankBlocks
from vllm_worker.buffer import MappedBuffer
from vllm_worker.exchange import BlockCopies, CopyPlan, StepResults

log = logging.getLogger(__name__)


class FailedCopies:
    """A rank that knows no blocks: every save and load fails, and is reported so."""

    def __init__(self) -> None:
        self._failed: set[int] = set()
        self._invalid: set[int] = set()
        self._ended: set[str] = set()

    def begin_step(self, plan: CopyPlan) -> None:
        """Fail all that `plan` asks for."""
        for copies in (*plan.saves, *plan.loads):
            self._failed.add(copies.number)
        self._invalid.update(block for copies in plan.loads for block in copies.blocks)
        self._ended.update(plan.dropped, (copies.request for copies in plan.saves))

    def load(self) -> None:
        """Nothing: all loads have failed."""

    def take_ended(self) -> set[str]:
        """The requests whose blocks this rank needs no more, since the last call."""
        ended, self._ended = self._ended, set()
        return ended

    def take_invalid(self) -> set[int]:
        """The blocks that were not loaded, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_results(self) -> StepResults | None:
        """The copies that failed since the last call, None without any."""
        failed, self._failed = self._failed, set()
        return StepResults(frozenset(failed)) if failed else None


class RankCopies(FailedCopies):
    """The copies of rank `rank`, whose KV is in the backing allocation of `cache`. Used on the rank's main thread."""

    def __init__(
        self, cache: torch.Tensor, regions: Sequence[BlockRegion], num_blocks: int, rank: int
    ) -> None:
        super().__init__()
        self._make_blocks: Callable[[torch.Tensor], RankBlocks] = lambda slabs: RankBlocks(
            cache, regions, num_blocks, slabs, rank
        )
        # Works without the buffer, so that blocks can be zeroed even if it cannot be opened.
        part_bytes = sum(region.block_bytes for region in regions)
        self._blocks = self._make_blocks(torch.empty((0, (rank + 1) * part_bytes), dtype=torch.uint8))
        self._mapped: MappedBuffer | None = None
        self._rank, self._device = rank, cache.device
        self._plan = CopyPlan()

    def begin_step(self, plan: CopyPlan) -> None:
        """Zero blocks and make the saves of `plan`, before anything of its step is computed."""
        self._plan = plan
        if plan.buffer is not None:
            self._attempt("open the buffer", lambda: self._map(plan))
        self._attempt("zero blocks", lambda: self._blocks.zero(plan.zeroed))
        for copies in plan.saves:
            self._save(copies)
        self._ended.update(plan.dropped, (copies.request for copies in plan.saves))

    def load(self) -> None:
        """Make the loads of the step's plan; repeated calls do nothing."""
        loads, self._plan = self._plan.loads, CopyPlan()
        for copies in loads:
            if not self._attempt("load KV", lambda one=copies: self._load(one)):  # type: ignore[misc]
                self._failed.add(copies.number)
                self._invalid.update(copies.blocks)
                self._attempt("zero blocks", lambda one=copies: self._blocks.zero(one.blocks))  # type: ignore[misc]

    def _map(self, plan: CopyPlan) -> None:
        """Open the buffer, if it is not the one that is open. Raises OSError or ValueError."""
        address = plan.buffer
        if address is None or (self._mapped is not None and self._mapped.address == address):
            return
        mapped = MappedBuffer(address)
        slabs = torch.frombuffer(mapped.slabs, dtype=torch.uint8).view(address.num_slabs, address.slab_bytes)
        self._blocks = self._make_blocks(slabs)
        self._mapped = mapped
        if self._device.type == "cuda":
            # Without it copies are slow, but right.
            self._attempt("page-lock the buffer", lambda: self._lock_pages(slabs))

    def _lock_pages(self, slabs: torch.Tensor) -> None:
        """Let the device copy without the host's help. Raises OSError."""
        # Imported only here: a rank on the CPU needs no device.
        from kvcache.device.page_lock import PageLock, report_nothing

        self._page_lock = PageLock(slabs, self._device, report_nothing)

    def _save(self, copies: BlockCopies) -> None:
        """Make the copies of one save, and mark them made or failed."""
        made = self._attempt("save KV", lambda: self._blocks.save(copies.blocks, copies.slabs))
        if not made:
            self._failed.add(copies.number)
        if self._mapped is not None:
            marks = self._mapped.marks
            self._attempt(
                "mark a save",
                lambda: marks.write(list(copies.slabs), self._rank, copies.number, failed=not made),
            )

    def _load(self, copies: BlockCopies) -> None:
        """Make the copies of one load. Raises as `RankBlocks.load`."""
        self._blocks.load(copies.blocks, copies.slabs)

    def _attempt(self, what: str, act: Callable[[], None]) -> bool:
        """Call `act`; returns whether it raised nothing. An error is logged."""
        try:
            act()
        except Exception:
            log.exception("rank %d could not %s", self._rank, what)
            return False
        return True
