"""Steps of a request through both roles of a `WorkerBench`."""

from __future__ import annotations

from diptych.messages import (
    Admit,
    Prefill,
)
from diptych.request import Tenancy
from tests.engine.workers.worker_bench import LAYOUT, VOCAB, WorkerBench, sampling

PROMPT = [(7 * place) % VOCAB for place in range(150)]  # 3 slabs
LONG = [(3 * place + 2) % VOCAB for place in range(200)]  # 4 slabs
OTHER = [(11 * place + 1) % VOCAB for place in range(150)]
TOKENS = 10
CHUNK_BYTES = LAYOUT.chunk_bytes
ANYBODY = Tenancy()


def offered(
    bench: WorkerBench,
    name: str,
    prompt: list[int] = PROMPT,
    tokens: int = TOKENS,
    epoch: int = 0,
    origin: Tenancy = ANYBODY,
) -> bytes:
    """Let the prefill worker read a prompt; returns the ticket it offers."""
    bench.prefill.tell(Prefill(name, epoch, prompt, [], sampling(tokens), 60.0, origin))
    bench.prefill.work()
    return bench.prefill.offers(name)[-1].ticket


def admit(
    bench: WorkerBench,
    name: str,
    ticket: bytes,
    prompt: list[int] = PROMPT,
    tokens: int = TOKENS,
    epoch: int = 0,
    remaining_s: float = 60.0,
    origin: Tenancy = ANYBODY,
) -> None:
    first = bench.prefill.tokens(name, epoch)
    bench.decode.tell(Admit(name, epoch, prompt, first, sampling(tokens), ticket, remaining_s, origin))


def moving(bench: WorkerBench, name: str = "a", remaining_s: float = 60.0) -> None:
    """A request whose KV is on its way, and stays there."""
    admit(bench, name, offered(bench, name), remaining_s=remaining_s)
    assert len(bench.courier.under_way) == 1


def rest(bench: WorkerBench) -> None:
    for half in (bench.prefill, bench.decode):
        half.shell.run_once()
        half.holdings.check_books()
        assert half.pool.used == half.holdings.cached == half.stats.slabs_cached
        stats = half.stats
        used = (
            stats.slabs_used,
            stats.leases,
            stats.staging_bytes,
            stats.running,
            stats.waiting,
            stats.waiting_tokens,
        )
        assert used == (0,) * 6
