"""The roles of a vLLM worker, as `services.worker.role_lifecycle` asks for them, and the books of what they hold."""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.kv_fetcher import KvFetcher
from diptych.messages import Hello
from diptych.request import BANS, SEED
from diptych.specs import WorkerSpec
from kvtransfer.leases import LeaseLedger
from kvtransfer.transfer_buffer import TransferBuffer
from kvtransfer.transports.links import OfferedTransports, TransportLinks
from prefill_worker.worker import TicketIssuer
from vllm_worker.decode_role import VllmDecodeRole
from vllm_worker.engine import VllmEngine
from vllm_worker.exchange import KvExchange
from vllm_worker.port import EnginePort
from vllm_worker.prefill_role import VllmPrefillRole
from worker.loop import GatewayLink, WorkerRole

# So much is pulled and verified in a few milliseconds.
SMALL_PULL_BYTES = 16 << 20


class VllmBooks:
    """The accounts of a vLLM worker (`worker.loop.SlabBooks`): vLLM's blocks and the slabs of the transfer buffer."""

    def __init__(self, port: EnginePort, buffer: TransferBuffer) -> None:
        self._port, self._buffer = port, buffer

    @property
    def used(self) -> int:
        """Blocks that vLLM holds, and slabs that are used; 0 at rest, when no copy runs either."""
        return self._port.held_blocks + max(self._buffer.used, self._buffer.copying)

    def owners(self) -> dict[str, int]:
        """Number of blocks and slabs by owner; vLLM's blocks have one owner."""
        owners = {f"buffer: {owner}": count for owner, count in self._buffer.owners().items()}
        return owners | {"vLLM": self._port.held_blocks, "copies": self._buffer.copying}

    def check_books(self) -> None:
        """Check the accounts of the buffer; those of its blocks are vLLM's. Raises AssertionError."""
        self._buffer.check_books()


class VllmRoles:
    """Makes the roles of a worker whose `engine` hands KV over through `buffer`.

    `key` is the deployment's transfer key. Raises ValueError if the engine was opened without a connector.
    """

    def __init__(
        self, spec: WorkerSpec, engine: VllmEngine, buffer: TransferBuffer, key: bytes, fingerprint: str
    ) -> None:
        self._spec, self._engine, self._buffer = spec, engine, buffer
        self._key, self._fingerprint = key, fingerprint
        # A port need not have one: it is the connector's, which plain data knows nothing of.
        exchange = getattr(engine.port, "exchange", None)
        if not isinstance(exchange, KvExchange):
            raise ValueError("the engine was opened without a connector")
        self._exchange = exchange
        self.books = VllmBooks(engine.port, buffer)

    @property
    def num_slabs(self) -> int:
        """How many blocks vLLM has for KV."""
        return self._engine.port.facts.num_blocks

    @property
    def traits(self) -> tuple[str, ...]:
        """What the worker continues exactly where another one stopped, or knows at all (`diptych.request.TRAITS`).

        vLLM begins the state of grammars and penalties anew with each request.
        """
        return (SEED, BANS) if self._engine.port.facts.seeds_by_position else (BANS,)

    def make_prefill(
        self, link: GatewayLink, hello: Hello, sources: OfferedTransports
    ) -> tuple[WorkerRole, Callable[[], None]]:
        """The prefill role, and the function that closes it."""
        spec = self._spec
        issuer = TicketIssuer(self._key, hello.worker, hello.incarnation, hello.fingerprint, spec.digest)
        role = VllmPrefillRole(
            link,
            self._engine,
            self._exchange,
            self._buffer,
            LeaseLedger(spec.lease_s),
            issuer,
            sources.open_transport,
        )
        return role, role.close

    def make_decode(self, link: GatewayLink) -> tuple[WorkerRole, Callable[[], None]]:
        """The decode role, whose threads run, and the function that closes it."""
        spec = self._spec
        links = TransportLinks(spec.transports, self._buffer.pool, spec.digest)
        fetcher = KvFetcher(links, link.send, link.wake_poll)
        role = VllmDecodeRole(
            link,
            self._engine,
            self._buffer,
            fetcher,
            self._key,
            self._fingerprint,
            small_bytes=SMALL_PULL_BYTES,
        )
        fetcher.open()
        return role, role.close
