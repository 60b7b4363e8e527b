"""Steps of a request that drops KV through both roles of a `WorkerBench`."""

from __future__ import annotations

from diptych.eviction_spec import KeepSpec
from diptych.messages import Admit, Failed, Prefill
from tests.engine.workers.kept_bench import KeptBench, count_bag_slabs
from tests.engine.workers.worker_bench import (
    VOCAB,
    BenchWorker,
    sampling,
)

PROMPT = [(7 * place) % VOCAB for place in range(300)]
WHOLE = KeepSpec(0.95, 128)  # 2 whole chunks
TOKENS = 200
BAG = count_bag_slabs(len(PROMPT), WHOLE)


def prefill(
    bench: KeptBench,
    name: str,
    delivered: list[int],
    tokens: int = TOKENS,
    prompt: list[int] = PROMPT,
    keep: KeepSpec = WHOLE,
    epoch: int = 0,
) -> bytes:
    """Let the prefill worker read a prompt, and tokens that were delivered before; returns the ticket it offers."""
    order = Prefill(name, epoch, prompt, delivered, sampling(tokens), 60.0, keep=keep)
    bench.prefill.tell(order)
    bench.prefill.work()
    return bench.prefill.offers(name)[-1].ticket


def admit(
    bench: KeptBench,
    name: str,
    ticket: bytes,
    delivered: list[int],
    tokens: int = TOKENS,
    prompt: list[int] = PROMPT,
    keep: KeepSpec = WHOLE,
    epoch: int = 0,
) -> None:
    output = delivered + bench.prefill.tokens(name, epoch)
    bench.decode.tell(Admit(name, epoch, prompt, output, sampling(tokens), ticket, 60.0, keep=keep))


def moving(bench: KeptBench, name: str = "a") -> None:
    """A request whose KV is on its way, and stays there."""
    admit(bench, name, prefill(bench, name, []), [])
    assert len(bench.courier.under_way) == 1


def failures(half: BenchWorker, name: str) -> list[Failed]:
    return [one for one in half.line.said if isinstance(one, Failed) and one.request == name]
