"""Workers with a toy in vLLM's place, in virtual time: the product's engine, roles and copies over `ToyPort`.

The toy's tokens are hashes of the KV that it reads, so KV that is missing, foreign or torn changes the answer. Blocks
and the transfer buffer are scarce; the thread that offers KV runs while a step computes.
"""

from __future__ import annotations

from random import Random

import msgspec

from diptych.chunks import RAW_CLASS
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.request import SamplingParams
from engine.sequence import Sequence
from kvtransfer.leases import LeaseLedger
from kvtransfer.transfer_buffer import TransferBuffer
from prefill_worker.worker import TicketIssuer
from tests.simulation.channel import LEASE_S
from tests.simulation.process import KEY, MODEL_LEN, ProcessWorld, VirtualProcess
from tests.simulation.transport import VirtualKvFetcher, VirtualTaskThread
from tests.simulation.virtual_model import FINGERPRINT, LAYERS, POISON, ProcessCrash
from tests.simulation.world import VirtualWorld
from tests.support.toy_port import ToyPort, answer_alone
from vllm_worker.buffer import open_buffer
from vllm_worker.decode_role import VllmDecodeRole
from vllm_worker.engine import VllmEngine
from vllm_worker.port import PortOutput
from vllm_worker.prefill_role import VllmPrefillRole
from vllm_worker.roles import VllmBooks
from worker.loop import WorkerRole

# So many slabs of a transfer buffer: not even two of the longest requests fit.
BUFFER_SLABS = 9
# The chance of a load to fail.
FAILING_LOADS = 0.05


class VirtualPort(ToyPort):
    """A toy whose steps take time, in which others read and write the buffer."""

    def __init__(self, process: VllmProcess, num_blocks: int, rng: Random) -> None:
        super().__init__(
            num_blocks=num_blocks,
            max_model_len=MODEL_LEN,
            max_num_seqs=6,
            step_tokens=96,
            fails=lambda: rng.random() < FAILING_LOADS,
        )
        self._process = process

    def step(self) -> list[PortOutput]:
        """A step; a prompt with poison ends the process."""
        if any(POISON in one.request.prompt for one in self._running):
            raise ProcessCrash("poison")
        begun = self.counts.step_tokens
        outputs = super().step()
        self._process.spend_tokens(max(begun, self.counts.step_tokens))
        return outputs

    def _run(self, one: object, tokens: int, invalid: set[int]) -> PortOutput | None:
        self._process.spend_tokens(tokens)
        return super()._run(one, tokens, invalid)  # type: ignore[arg-type]


class BufferMemory:
    """A buffer as wires carry it: each slab in as many pieces as a chunk of other workers has layers."""

    def __init__(self, buffer: TransferBuffer) -> None:
        self.num_slabs, self.layout, self._view = buffer.num_slabs, buffer.layout, buffer.memory.view

    def layer_bytes(self, slab: int, layer: int) -> memoryview:
        size = self.layout.chunk_bytes // LAYERS
        begin = slab * self.layout.chunk_bytes + layer * size
        return self._view[begin : begin + size]


class VllmProcess(VirtualProcess):
    """A process of a vLLM worker."""

    does_bulk = False

    def _build(self, world: ProcessWorld) -> None:
        """The port, the buffer and the engine."""
        self.kv_class, self.chooses = RAW_CLASS, False
        seed = f"{world.pipes.rng.random()} {self.name} {self.number}"
        self.port = VirtualPort(self, world.num_slabs, Random(seed))
        self.num_slabs = self.port.facts.num_blocks
        self.buffer = open_buffer(self.port.facts, BUFFER_SLABS * self.port.facts.slab_bytes)
        self.port.attach_buffer(self.buffer)
        self.parts = self.buffer.pool
        self.memories = {RAW_CLASS: BufferMemory(self.buffer)}  # type: ignore[dict-item]
        self.board_memory = memoryview(bytearray())
        self.engine = VllmEngine(self.port, self.clock)  # type: ignore[assignment]
        self.holdings = VllmBooks(self.port, self.buffer)  # type: ignore[assignment]
        self._offering: VirtualTaskThread | None = None

    def sequences(self) -> list[Sequence]:
        return list(self.engine.sequences())

    @property
    def keep_classes(self) -> list[str]:
        return []

    def count_held(self) -> dict[str, int]:
        return {"copies": self.buffer.copying, "leased": self.buffer.leased, "work": self.port.has_work}

    def memory_at(self, slab: int) -> BufferMemory | None:  # type: ignore[override]
        return self.memories[RAW_CLASS] if 0 <= slab < self.buffer.num_slabs else None  # type: ignore[return-value]

    def spend_tokens(self, tokens: int) -> None:
        """Half a step passes."""
        self._spend(tokens)

    def _prefiller(self) -> WorkerRole:
        issuer = TicketIssuer(KEY, self.name, self.incarnation, FINGERPRINT, "xxh3")
        self.ledger = LeaseLedger(LEASE_S)
        self._offering = VirtualTaskThread(self.world.pipes, self, "offer")
        return VllmPrefillRole(
            self.line,
            self.engine,  # type: ignore[arg-type]
            self.port.exchange,
            self.buffer,
            self.ledger,
            issuer,
            clock=self.clock,
            tasks=self._offering,  # type: ignore[arg-type]
        )

    def _decoder(self) -> WorkerRole:
        self.courier = VirtualKvFetcher(self.world.pipes, self, self.line.send, self.line.wake_poll)
        return VllmDecodeRole(
            self.line,
            self.engine,  # type: ignore[arg-type]
            self.buffer,
            self.courier,
            KEY,
            FINGERPRINT,
            clock=self.clock,
        )

    def _close_role(self) -> None:
        assert isinstance(self.role, VllmPrefillRole | VllmDecodeRole)
        self.role.close()

    def end(self, how: str) -> None:
        if self.alive and self._offering is not None:
            self._offering.end()
        super().end(how)


class VllmWorld(VirtualWorld):
    """A deployment of such workers."""

    processes = VllmProcess

    def wanted_answer(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        kv_class: str = RAW_CLASS,
        keep: KeepSpec = KEEP_ALL,
    ) -> tuple[list[int], str]:
        """What a toy answers alone."""
        key = msgspec.msgpack.encode((prompt, sampling))
        if key not in self._wanted:
            answer: tuple[list[int], str] = ([], "")
            if POISON not in prompt:
                tokens = answer_alone(prompt, sampling, MODEL_LEN)
                stopped = bool(tokens) and tokens[-1] in sampling.stop_token_ids
                answer = tokens, "stop" if stopped else "length"
            self._wanted[key] = answer
        return self._wanted[key]
