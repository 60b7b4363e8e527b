"""What reads from one source have in common, and what they have not: with an agent that is not there."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest

from diptych.errors import TransferError
from kvcache.layout import KvLayout, Shard
from kvtransfer.cooperative import CoopTask, run_to_end
from kvtransfer.resharding import unsharded_pool
from kvtransfer.transports import nixl

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32")
WHOLE = Shard((0, 1), (0, 1))
PATIENCE_S = 60.0


class FakeNixlAgent:
    """Reads that are under way until a test says more."""

    def __init__(self) -> None:
        self.over: set[int] = set()
        self.broken: set[int] = set()
        self.posted, self.closed = 0, False

    def add_peer(self, metadata: bytes) -> str:
        return "peer"

    def post_read(self, peer: object, segments: object) -> int:
        self.posted += 1
        return self.posted

    def is_done(self, handle: int) -> bool:
        if self.closed or handle in self.broken:
            raise TransferError("a NIXL read failed")
        return handle in self.over

    def close(self) -> None:
        self.closed = True


def run_until(task: CoopTask[None], condition: Callable[[], bool]) -> None:
    """Run a read until `condition` holds. It waits for its agent first, which connects in a thread of its own."""
    ends_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(next(task))


def test_a_read_that_fails_late_does_not_end_those_that_began_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    agents: list[FakeNixlAgent] = []

    def make(name: str, regions: object, *, serve: bool) -> FakeNixlAgent:
        agents.append(FakeNixlAgent())
        return agents[-1]

    monkeypatch.setattr(nixl, "NixlAgent", make)
    own = unsharded_pool(LAYOUT, memoryview(bytearray(4 * LAYOUT.chunk_bytes)))
    endpoint = nixl.NixlEndpoint(b"", [(WHOLE, 4096, 4 * LAYOUT.chunk_bytes)], 0)
    lane = nixl.NixlConnection(own, memoryview(bytearray(4096)), endpoint, lambda: 60.0)
    first, beside = lane.pull_chunks([(0, 0)], None), lane.pull_chunks([(1, 1)], None)
    run_until(first, lambda: len(agents) == 1 and agents[0].posted == 1)
    run_until(beside, lambda: agents[0].posted == 2)
    agents[0].broken.add(1)
    with pytest.raises(TransferError):
        next(first)
    again = lane.pull_chunks([(0, 0)], None)
    run_until(again, lambda: len(agents) == 2 and agents[1].posted == 1)
    assert [agent.closed for agent in agents] == [True, False]
    with pytest.raises(TransferError):
        next(beside)
    assert not agents[1].closed
    agents[1].over.add(1)
    assert next(again, "over") == "over"


def test_a_source_that_claims_more_than_there_can_be_is_refused() -> None:
    own = unsharded_pool(LAYOUT, memoryview(bytearray(4 * LAYOUT.chunk_bytes)))
    endpoint = nixl.NixlEndpoint(b"", [(WHOLE, 4096, LAYOUT.chunk_bytes << 48)], 0)
    with pytest.raises(TransferError, match="no NIXL link"):
        run_to_end(nixl.NixlPuller(own).link_task("prefill-0", "life", msgspec.msgpack.encode(endpoint)))
