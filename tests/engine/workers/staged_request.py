"""A request whose KV is pulled while its prompt is prefilled."""

from __future__ import annotations

from diptych.messages import (
    Admit,
    Fetch,
    Prefill,
    Release,
    Staged,
    Staging,
)
from tests.engine.workers.role_steps import TOKENS, rest
from tests.engine.workers.worker_bench import VOCAB, WorkerBench, alone, sampling

LONGEST = [(5 * place + 3) % VOCAB for place in range(400)]  # 7 slabs, read in four steps


class StagedRequest:
    """One request that is staged: every message between the two workers passes through here."""

    def __init__(
        self, bench: WorkerBench, name: str, prompt: list[int], tokens: int = TOKENS, epoch: int = 0
    ) -> None:
        self.bench, self.name, self.prompt, self.tokens, self.epoch = bench, name, prompt, tokens, epoch
        self.hints = 0
        bench.prefill.line.inbox.append(Prefill(name, epoch, prompt, [], sampling(tokens), 60.0, stage=True))

    def admit(self) -> None:
        order = Admit(self.name, self.epoch, self.prompt, [], sampling(self.tokens), b"", 60.0)
        self.bench.decode.tell(order)

    def step(self) -> None:
        """One step of the prefill worker, then what it announces."""
        self.bench.prefill.shell.run_once()
        self.relay()

    def relay(self) -> None:
        """Pass on what was announced since."""
        staged = [
            message
            for message in self.bench.prefill.line.said
            if isinstance(message, Staged) and (message.request, message.epoch) == (self.name, self.epoch)
        ]
        fresh, self.hints = staged[self.hints :], len(staged)
        self.bench.decode.tell(*(Staging(self.name, self.epoch, message.hint) for message in fresh))

    def fetch(self, ticket: bytes | None = None, output: list[int] | None = None) -> None:
        if ticket is None:
            ticket = self.bench.prefill.offers(self.name)[-1].ticket
        first = self.bench.prefill.tokens(self.name, self.epoch) if output is None else output
        self.bench.decode.tell(Fetch(self.name, self.epoch, first, ticket, 60.0))

    def read(self) -> None:
        """The prefill worker to its end."""
        self.bench.prefill.work()
        self.relay()

    def written(self) -> list[int]:
        return self.bench.prefill.tokens(self.name, self.epoch) + self.bench.decode.tokens(
            self.name, self.epoch
        )


def finish(bench: WorkerBench, *ways: StagedRequest) -> None:
    """Everything to its end, and both sides at rest."""
    while bench.courier.under_way:
        bench.courier.land()
        bench.decode.work()
    bench.decode.work()
    for way in ways:
        assert way.written() == alone(way.prompt, way.tokens)
        bench.prefill.tell(Release(way.name, way.epoch))
    rest(bench)
