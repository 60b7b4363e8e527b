"""What reads from one source have in common, and what they have not: with an agent that is not there."""

from __future__ import annotations

import msgspec
import pytest

from diptych.errors import TransferError
from kvcache.layout import KVLayout, Shard
from kvtransfer.parts import whole
from kvtransfer.transports import nixl
from kvtransfer.turns import finish

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32")
WHOLE = Shard((0, 1), (0, 1))


class Agent:
    """Reads that are under way until a test says more."""

    def __init__(self) -> None:
        self.over: set[int] = set()
        self.broken: set[int] = set()
        self.posted, self.closed = 0, False

    def add(self, metadata: bytes) -> str:
        return "peer"

    def post(self, peer: object, segments: object) -> int:
        self.posted += 1
        return self.posted

    def done(self, handle: int) -> bool:
        if self.closed or handle in self.broken:
            raise TransferError("a NIXL read failed")
        return handle in self.over

    def close(self) -> None:
        self.closed = True


def test_a_read_that_fails_late_does_not_end_those_that_began_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    agents: list[Agent] = []

    def make(name: str, regions: object, *, serve: bool) -> Agent:
        agents.append(Agent())
        return agents[-1]

    monkeypatch.setattr(nixl, "Agent", make)
    own = whole(LAYOUT, memoryview(bytearray(4 * LAYOUT.chunk_bytes)))
    endpoint = nixl.Endpoint(b"", [(WHOLE, 4096, 4 * LAYOUT.chunk_bytes)], 0)
    lane = nixl.Lane(own, memoryview(bytearray(4096)), endpoint, lambda: 60.0)
    first, beside = lane.pull([(0, 0)], None), lane.pull([(1, 1)], None)
    next(first), next(beside)
    agents[0].broken.add(1)
    with pytest.raises(TransferError):
        next(first)
    again = lane.pull([(0, 0)], None)
    next(again)
    assert [agent.closed for agent in agents] == [True, False]
    with pytest.raises(TransferError):
        next(beside)
    assert not agents[1].closed
    agents[1].over.add(1)
    assert next(again, "over") == "over"


def test_a_source_that_claims_more_than_there_can_be_is_refused() -> None:
    own = whole(LAYOUT, memoryview(bytearray(4 * LAYOUT.chunk_bytes)))
    endpoint = nixl.Endpoint(b"", [(WHOLE, 4096, LAYOUT.chunk_bytes << 48)], 0)
    with pytest.raises(TransferError, match="no NIXL link"):
        finish(nixl.Puller(own).linking("prefill-0", "life", msgspec.msgpack.encode(endpoint)))
