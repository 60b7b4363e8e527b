"""What vLLM's scheduler, the ranks and the worker's role tell each other about KV, once per step; pure accounting.

    finish ─▶ queue ─room in the buffer─▶ plan_step ─▶ ranks copy, forward ─▶ end_step: blocks are free
                                            └─▶ on_save_begun: the role hashes and offers once the ranks have copied
    expect ─▶ missing_tokens ─▶ begin_load ─▶ plan_step ─▶ ranks copy, forward ─▶ end_step: slabs are free

Saves take slabs of the buffer in the order in which their requests finished; while there is no room, the first one
waits, its blocks stay held, and so prompts wait in vLLM's queue. Loads are copied before the forward of the step that
first runs the request, so vLLM never waits for one. The connector and the toy port of the tests drive it; everything
runs on the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from diptych.chunks import CHUNK_TOKENS
from kvtransfer.transfer_buffer import TransferBuffer
from vllm_worker.buffer import BufferAddress, SharedMarks
from vllm_worker.port import LoadPlan, SavedKv


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies between blocks and slabs, one each; `number` identifies them, `request` is vLLM's id of the request."""

    number: int
    request: str
    blocks: tuple[int, ...]
    slabs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What each rank does in one step: `zeroed` blocks and saves first, then loads, then the forward.

    `dropped` are requests whose KV is not saved after all, so that their blocks are free.
    """

    buffer: BufferAddress | None = None
    zeroed: tuple[int, ...] = ()
    saves: tuple[BlockCopies, ...] = ()
    loads: tuple[BlockCopies, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResults:
    """The numbers of the copies that a rank could not make in a step."""

    failed: frozenset[int] = frozenset()


@dataclass(slots=True)
class KvRequest:
    """A request as vLLM's scheduler has it: `num_tokens` are known at its start; `load` is not consumed yet."""

    request: str
    key: str
    num_tokens: int
    save: bool
    load: LoadPlan | None

    @property
    def loadable_tokens(self) -> int:
        """How many of its first tokens need not be computed. The last one must be, for its logits."""
        return 0 if self.load is None else min(self.load.num_tokens, self.num_tokens - 1)

    @property
    def partial_block(self) -> int | None:
        """The index of its last block, if its tokens do not fill it."""
        return self.num_tokens // CHUNK_TOKENS if self.num_tokens % CHUNK_TOKENS else None


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """A request that the step computes: `count` tokens from `start` on. `blocks` are all that it has."""

    request: str
    start: int
    count: int
    blocks: Sequence[int]


# Called with a save whose copies are about to be made, and its number.
OnSaveBegun = Callable[[SavedKv, int], None]


def ignore_save(saved: SavedKv, number: int) -> None:
    """The default for `KvExchange.on_save_begun`: `take_saved` is enough."""


@dataclass(slots=True)
class _StepState:
    """What was planned for the step that runs."""

    saves: dict[str, tuple[SavedKv, int]] = field(default_factory=dict)
    loads: dict[int, str] = field(default_factory=dict)


class KvExchange:
    """The saves and loads of one engine. Without a buffer nothing is saved or loaded."""

    def __init__(self) -> None:
        self.on_save_begun: OnSaveBegun = ignore_save
        # The first error of a hook in vLLM's scheduler.
        self._error: Exception | None = None
        self.buffer: TransferBuffer | None = None
        self._marks: SharedMarks | None = None
        self._address: BufferAddress | None = None
        self._requests: dict[str, KvRequest] = {}
        # Finished requests that wait for room, with the blocks that they hold.
        self._waiting_requests: deque[tuple[KvRequest, tuple[int, ...]]] = deque()
        self._dropped: list[str] = []
        self._load_copies: list[BlockCopies] = []
        self._step = _StepState()
        self._number = 0
        self._saved: list[SavedKv] = []
        self._loaded: list[str] = []
        self._failed_loads: list[str] = []

    def attach_buffer(self, buffer: TransferBuffer, ranks: int) -> None:
        """From now on KV is saved to `buffer` and loaded from it. Its slabs have the parts of `ranks` ranks."""
        self.buffer = buffer
        self._marks = SharedMarks(buffer.num_slabs, ranks)
        self._address = BufferAddress(
            buffer.memory.address(),
            self._marks.memory.address(),
            buffer.num_slabs,
            buffer.layout.chunk_bytes,
            ranks,
        )

    def close(self) -> None:
        """No rank can open the marks any more. Idempotent."""
        if self._marks is not None:
            self._marks.close()

    def keep_error(self, error: Exception) -> None:
        """A hook in vLLM's scheduler has failed: what it was to say of a request's KV was not said."""
        self._error = self._error or error

    def raise_error(self) -> None:
        """Raises RuntimeError if a hook has failed. No output of that step may be used: its KV may be missing."""
        if self._error is not None:
            raise RuntimeError("the connector has failed in vLLM's scheduler") from self._error

    def is_saved(self, slabs: Sequence[int], number: int) -> bool | None:
        """Whether all ranks have made the copies of save `number`; None: not yet. Any thread may ask."""
        assert self._marks is not None, "nothing was saved without a buffer"
        return self._marks.marks.read(list(slabs), number)

    # ---- requests

    def expect(
        self, request: str, key: str, num_tokens: int, save: bool, load: LoadPlan | None = None
    ) -> None:
        """vLLM has got a request of `num_tokens` tokens. Its KV is saved when it ends, or a prefix is loaded."""
        self._requests[request] = KvRequest(request, key, num_tokens, save, load)

    def missing_tokens(self, request: str, computed: int) -> int:
        """How many tokens' KV the buffer has beyond the first `computed`, which vLLM has cached. Changes nothing."""
        known = self._requests.get(request)
        if known is None or self._address is None:
            return 0
        return max(0, known.loadable_tokens - computed)

    def begin_load(self, request: str, blocks: Sequence[int], num_tokens: int) -> None:
        """vLLM has given `blocks` to a request, and expects the KV of so many tokens, as `missing_tokens` said.

        Without tokens nothing is loaded. The plan is consumed: a request that is preempted computes its KV again.
        """
        known = self._requests.get(request)
        if known is None or known.load is None:
            return
        end_tokens, plan = known.loadable_tokens, known.load
        known.load = None
        if num_tokens <= 0:
            self._loaded.append(known.key)
            return
        first, end = (end_tokens - num_tokens) // CHUNK_TOKENS, -(-end_tokens // CHUNK_TOKENS)
        # If the counts differ the load fails on each rank, and vLLM computes the blocks again.
        copies = BlockCopies(
            self._next_number(), request, tuple(blocks[first:end]), tuple(plan.slabs[first:end])
        )
        self._load_copies.append(copies)
        self._step.loads[copies.number] = known.key

    def finish(self, request: str, blocks: Sequence[int], complete: bool) -> bool:
        """A request has ended; returns whether vLLM must hold `blocks` until `plan_step` or a drop frees them.

        `complete`: it was neither aborted nor stopped, so its KV is wanted.
        """
        known = self._requests.pop(request, None)
        if known is None:
            return False
        if known.load is not None:
            self._loaded.append(known.key)
        if not (known.save and complete):
            return False
        needed = -(-known.num_tokens // CHUNK_TOKENS)
        if self.buffer is None or needed > min(len(blocks), self.buffer.num_slabs):
            self._saved.append(SavedKv(known.key, (), 0))
            return False
        self._waiting_requests.append((known, tuple(blocks[:needed])))
        return True

    def abort_saves(self, keys: Iterable[str]) -> None:
        """Drop the saves of these requests that still wait for room. Unknown keys are no error."""
        ended = set(keys)
        self._dropped += [known.request for known, _ in self._waiting_requests if known.key in ended]
        self._waiting_requests = deque(entry for entry in self._waiting_requests if entry[0].key not in ended)

    # ---- steps

    def plan_step(self, scheduled: Iterable[ScheduledTokens] = ()) -> CopyPlan:
        """What the ranks do in the step that runs `scheduled`. Saves that fit take their slabs, first come first."""
        zeroed = tuple(block for tokens in scheduled for block in self._new_partial_block(tokens))
        saves = []
        while self._waiting_requests and (copies := self._begin_save(*self._waiting_requests[0])) is not None:
            saves.append(copies)
            self._waiting_requests.popleft()
        loads, self._load_copies = tuple(self._load_copies), []
        dropped, self._dropped = tuple(self._dropped), []
        return CopyPlan(self._address, zeroed, tuple(saves), loads, dropped)

    def _new_partial_block(self, tokens: ScheduledTokens) -> Iterable[int]:
        """The block that a step begins to fill and that its request will never fill, if its KV will be saved.

        It still has what others left in it. Zeroed now, its unused part is zero when it travels.
        """
        known = self._requests.get(tokens.request)
        if known is None or not known.save or (index := known.partial_block) is None:
            return ()
        begins = tokens.start <= index * CHUNK_TOKENS < tokens.start + tokens.count
        return (tokens.blocks[index],) if begins else ()

    def _begin_save(self, request: KvRequest, blocks: tuple[int, ...]) -> BlockCopies | None:
        """The copies of a finished request, whose slabs are taken for its key; None without room."""
        assert self.buffer is not None
        if self.buffer.free < len(blocks):
            return None
        slabs = tuple(self.buffer.take_free(len(blocks), request.key))
        copies = BlockCopies(self._next_number(), request.request, blocks, slabs)
        saved = SavedKv(request.key, slabs, request.num_tokens)
        self._step.saves[request.request] = (saved, copies.number)
        self.on_save_begun(saved, copies.number)
        return copies

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def end_step(self, freed: Iterable[str], results: StepResults | None) -> None:
        """A step has ended on all ranks: vLLM frees the blocks of the requests `freed`. `results` say what failed."""
        failed = results.failed if results is not None else frozenset()
        for request in freed:
            if (entry := self._step.saves.pop(request, None)) is not None:
                saved, number = entry
                self._saved.append(saved if number not in failed else replace(saved, num_tokens=0))
        for number, key in self._step.loads.items():
            self._loaded.append(key)
            if number in failed:
                self._failed_loads.append(key)
        self._step.loads.clear()

    # ---- for the port

    def take_saved(self) -> list[SavedKv]:
        """See `vllm_worker.port.EnginePort.saved`. Without tokens the KV could not be saved."""
        saved, self._saved = self._saved, []
        return saved

    def take_loaded(self) -> list[str]:
        """See `vllm_worker.port.EnginePort.loaded`."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def take_failed_loads(self) -> list[str]:
        """See `vllm_worker.port.EnginePort.failed_loads`."""
        failed, self._failed_loads = self._failed_loads, []
        return failed

    @property
    def num_waiting(self) -> int:
        """Finished requests whose blocks are held because the buffer has no room for them."""
        return len(self._waiting_requests)

    @property
    def can_progress(self) -> bool:
        """Whether a step would copy or free anything. Any thread may ask, of which one changes the queue."""
        try:
            blocks = self._waiting_requests[0][1]
        except IndexError:
            first_fits = False
        else:
            first_fits = self.buffer is not None and self.buffer.free >= len(blocks)
        return bool(first_fits or self._dropped or self._load_copies or self._step.saves)
