"""A prefill worker reduced to its memory: a second process that offers slabs over a real transport, and can spoil them.

    python -m tests.engine.transport.transport_source TRANSPORT NUM_SLABS TP PP [CODEC]

One JSON command per line on stdin, one JSON answer per line on stdout. Every injector answers whether it changed what a
decode worker would read; a test that believes it corrupted something asserts that.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvcache.layout import KvLayout, Shard, split_layout
from kvtransfer import ticket as tickets
from kvtransfer.digests import DigestContext
from kvtransfer.layer_progress import ENTRY_BYTES, LayerProgress
from kvtransfer.resharding import ShardedPool
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.transports.links import open_sources
from tests.support.warm_process import WarmProcess

KEY = b"a key for tests, long enough"
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32")
# The same KV, coded: a page has 4 bits per number, 2 outliers per row, and a scale and a zero point per row of values.
CODED_LAYOUT = replace(LAYOUT, codec="nuq4-1%.g8@0123456789abcdef")
SLAB_BYTES = LAYOUT.chunk_bytes
WORKER = "prefill-0"
WHOLE = (1, 1)


def content(seed: int, slab: int, layout: KvLayout = LAYOUT) -> bytes:
    """What an offer with `seed` puts into `slab`; the test knows it too."""
    return np.random.default_rng([seed, slab]).bytes(layout.chunk_bytes)


class SpreadChunks:
    """Chunks that lie in several ranks' memory, read and written page by page: the slow and obvious way."""

    def __init__(self, layout: KvLayout, parts: Sequence[tuple[Shard, memoryview]]) -> None:
        self.layout, self._parts = layout, parts

    def read(self, slab: int) -> bytes:
        return b"".join(bytes(page) for page in self._pages(slab))

    def write(self, slab: int, chunk: bytes) -> None:
        size = self.layout.page_bytes
        for number, page in enumerate(self._pages(slab)):
            page[:] = chunk[number * size : (number + 1) * size]

    def _pages(self, slab: int) -> Iterator[memoryview]:
        size = self.layout.page_bytes
        for layer in range(self.layout.layers):
            for head in range(0, self.layout.kv_heads, self.layout.page_heads):
                for (first, layers), (start, heads), memory in (
                    (shard.layers, shard.heads, memory) for shard, memory in self._parts
                ):
                    if first <= layer < layers and start <= head < heads:
                        place = (slab * (layers - first) + layer - first) * (heads - start) + head - start
                        here = place // self.layout.page_heads
                        yield memory[here * size : (here + 1) * size]


class TransportSource:
    """The source's memory and the commands on it."""

    def __init__(
        self, transport: str, num_slabs: int, split: tuple[int, int] = WHOLE, layout: KvLayout = LAYOUT
    ) -> None:
        held, self.layout = split_layout(layout, *split), layout
        memories = [
            (shard, SharedMemory(num_slabs * layout.shard_layout(shard).chunk_bytes)) for shard in held
        ]
        views = [(shard, memory.view) for shard, memory in memories]
        self.pool, self.spread = ShardedPool(layout, views), SpreadChunks(layout, views)
        self.incarnation = os.urandom(8).hex()
        shown = SharedMemory(num_slabs * ENTRY_BYTES)
        self.board = LayerProgress(num_slabs, shown.view)
        self.sources = open_sources([transport], memories, WORKER, shown)
        self.rng = random.Random(0)

    def hello(self) -> dict[str, Any]:
        endpoints = {name: source.endpoint().hex() for name, source in self.sources.items()}
        return {"endpoints": endpoints, "incarnation": self.incarnation, "pid": os.getpid()}

    def offer(self, request: str, epoch: int, tokens: int, slabs: list[int], seed: int) -> dict[str, Any]:
        for slab in slabs:
            self.spread.write(slab, self._content(seed, slab))
        return self.promise(request, epoch, tokens, slabs)

    def stage(self, slabs: list[int]) -> dict[str, Any]:
        """Announce slabs that are about to be computed."""
        mark = self.board.next_mark()
        self.board.stage_slabs(slabs, mark)
        return {"mark": mark}

    def compute(self, slabs: list[int], seed: int, first: int, end: int) -> dict[str, Any]:
        """Write layers `first` to `end` - 1, as a step does, and say so."""
        size = self.layout.layer_bytes
        for slab in slabs:
            self._write(slab, first * size, self._content(seed, slab)[first * size : end * size])
        self.board.advance_layers(slabs, end)
        return {}

    def promise(self, request: str, epoch: int, tokens: int, slabs: list[int]) -> dict[str, Any]:
        """The ticket for what lies in these slabs now."""
        layout = self.layout
        terms = DigestContext(
            request,
            epoch,
            tokens,
            (0, layout.layers),
            layout.dtype,
            layout.chunk_shape,
            "f" * 64,
            layout.chunk_bytes,
            layout.codec,
        )
        ticket = tickets.issue_ticket(KEY, terms, WORKER, self.incarnation, slabs, self.pool.hash_slab)
        return {"ticket": tickets.encode_ticket(ticket, KEY).hex()}

    def flip(self, slab: int) -> dict[str, Any]:
        at, bit = self.rng.randrange(self.layout.chunk_bytes), self.rng.randrange(8)
        return self._changed([slab], lambda: self._xor(slab, at, 1 << bit))

    def _xor(self, slab: int, at: int, mask: int) -> None:
        self._write(slab, at, bytes([self.spread.read(slab)[at] ^ mask]))

    def truncate(self, slab: int) -> dict[str, Any]:
        """The slab ends early, at any byte; behind it lies what an unwritten page holds."""
        size = self.layout.chunk_bytes
        at = self.rng.randrange(size)
        return self._changed([slab], lambda: self._write(slab, at, bytes(size - at)))

    def _write(self, slab: int, at: int, data: bytes) -> None:
        old = self.spread.read(slab)
        self.spread.write(slab, old[:at] + data + old[at + len(data) :])

    def swap(self, one: int, two: int) -> dict[str, Any]:
        first, second = self.spread.read(one), self.spread.read(two)

        def exchange() -> None:
            self._write(one, 0, second)
            self._write(two, 0, first)

        return self._changed([one, two], exchange)

    def layers(self, slab: int) -> dict[str, Any]:
        """The right bytes at the wrong layer."""
        half = self.layout.chunk_bytes // 2
        old = self.spread.read(slab)
        return self._changed([slab], lambda: self._write(slab, 0, old[half:] + old[:half]))

    def heads(self, slab: int) -> dict[str, Any]:
        """The right bytes at the wrong head of one layer."""
        size, layer = self.layout.page_bytes, self.rng.randrange(self.layout.layers)
        at = layer * self.layout.layer_bytes
        pages = self.spread.read(slab)[at : at + 2 * size]
        return self._changed([slab], lambda: self._write(slab, at, pages[size:] + pages[:size]))

    def replay(self, slab: int, seed: int) -> dict[str, Any]:
        """What an earlier offer (of another request or epoch) had in this very slab."""
        return self._changed([slab], lambda: self._write(slab, 0, self._content(seed, slab)))

    def nothing(self, slab: int) -> dict[str, Any]:
        """The control: an injector that misses."""
        return self._changed([slab], lambda: self._write(slab, 0, self.spread.read(slab)))

    def _content(self, seed: int, slab: int) -> bytes:
        return content(seed, slab, self.layout)

    def _changed(self, slabs: list[int], spoil: Callable[[], object]) -> dict[str, Any]:
        before = [self.spread.read(slab) for slab in slabs]
        spoil()
        after = [self.spread.read(slab) for slab in slabs]
        return {"changed": all(new != old for new, old in zip(after, before, strict=True))}


class RemoteSource:
    """The test's end: starts the process, sends commands."""

    def __init__(
        self,
        transport: str,
        num_slabs: int = 16,
        split: tuple[int, int] = WHOLE,
        layout: KvLayout = LAYOUT,
    ) -> None:
        self.layout = layout
        args = [sys.executable, "-m", "tests.engine.transport.transport_source", transport]
        args += [*map(str, (num_slabs, *split)), layout.codec]
        self.process: subprocess.Popen[str] = WarmProcess(
            args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        hello = self._answer()
        self.endpoints = {name: bytes.fromhex(raw) for name, raw in hello["endpoints"].items()}
        self.incarnation, self.pid = hello["incarnation"], hello["pid"]

    def __call__(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def offer(self, request: str, epoch: int, tokens: int, slabs: list[int], seed: int) -> tickets.Ticket:
        raw = self("offer", request=request, epoch=epoch, tokens=tokens, slabs=slabs, seed=seed)["ticket"]
        return tickets.decode_ticket(bytes.fromhex(raw), KEY)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the source process died with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    num_slabs, tp, pp = map(int, sys.argv[2:5])
    origin = TransportSource(sys.argv[1], num_slabs, (tp, pp), replace(LAYOUT, codec=sys.argv[5]))
    print(json.dumps(origin.hello()), flush=True)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        print(json.dumps(getattr(origin, command)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
