"""A prefill worker reduced to its memory: a second process that offers slabs over a real transport, and can spoil them.

    python -m tests.engine.transport_source TRANSPORT NUM_SLABS TP PP

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
from typing import Any

import numpy as np

from kvcache.layout import KVLayout, Shard, shards
from kvtransfer import ticket as tickets
from kvtransfer.board import ENTRY_BYTES, Board
from kvtransfer.digests import Terms
from kvtransfer.links import open_sources
from kvtransfer.memory import SharedMemory
from kvtransfer.parts import Parts

KEY = b"a key for tests, long enough"
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32")
SHAPE, SLAB_BYTES = LAYOUT.chunk_shape, LAYOUT.chunk_bytes
WORKER = "prefill-0"
WHOLE = (1, 1)


def content(seed: int, slab: int) -> bytes:
    """What an offer with `seed` puts into `slab`; the test knows it too."""
    return np.random.default_rng([seed, slab]).bytes(SLAB_BYTES)


class Spread:
    """Chunks that lie in several ranks' memory, read and written page by page: the slow and obvious way."""

    def __init__(self, layout: KVLayout, parts: Sequence[tuple[Shard, memoryview]]) -> None:
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
            for head in range(self.layout.kv_heads):
                for (first, layers), (start, heads), memory in (
                    (shard.layers, shard.heads, memory) for shard, memory in self._parts
                ):
                    if first <= layer < layers and start <= head < heads:
                        here = (slab * (layers - first) + layer - first) * (heads - start) + head - start
                        yield memory[here * size : (here + 1) * size]


class Origin:
    """The source's memory and the commands on it."""

    def __init__(self, transport: str, num_slabs: int, split: tuple[int, int] = WHOLE) -> None:
        held = shards(LAYOUT, *split)
        memories = [(shard, SharedMemory(num_slabs * LAYOUT.part(shard).chunk_bytes)) for shard in held]
        views = [(shard, memory.view) for shard, memory in memories]
        self.pool, self.spread = Parts(LAYOUT, views), Spread(LAYOUT, views)
        self.incarnation = os.urandom(8).hex()
        shown = SharedMemory(num_slabs * ENTRY_BYTES)
        self.board = Board(num_slabs, shown.view)
        self.sources = open_sources([transport], memories, WORKER, shown)
        self.rng = random.Random(0)

    def hello(self) -> dict[str, Any]:
        endpoints = {name: source.endpoint().hex() for name, source in self.sources.items()}
        return {"endpoints": endpoints, "incarnation": self.incarnation, "pid": os.getpid()}

    def offer(self, request: str, epoch: int, tokens: int, slabs: list[int], seed: int) -> dict[str, Any]:
        for slab in slabs:
            self.spread.write(slab, content(seed, slab))
        return self.promise(request, epoch, tokens, slabs)

    def stage(self, slabs: list[int]) -> dict[str, Any]:
        """Announce slabs that are about to be computed."""
        mark = self.board.mark()
        self.board.stage(slabs, mark)
        return {"mark": mark}

    def compute(self, slabs: list[int], seed: int, first: int, end: int) -> dict[str, Any]:
        """Write layers `first` to `end` - 1, as a step does, and say so."""
        size = LAYOUT.layer_bytes
        for slab in slabs:
            self._write(slab, first * size, content(seed, slab)[first * size : end * size])
        self.board.advance(slabs, end)
        return {}

    def promise(self, request: str, epoch: int, tokens: int, slabs: list[int]) -> dict[str, Any]:
        """The ticket for what lies in these slabs now."""
        terms = Terms(request, epoch, tokens, (0, SHAPE[0]), "float32", SHAPE, "f" * 64)
        ticket = tickets.write(KEY, terms, WORKER, self.incarnation, slabs, self.pool.payload)
        return {"ticket": tickets.encode(ticket, KEY).hex()}

    def flip(self, slab: int) -> dict[str, Any]:
        at, bit = self.rng.randrange(SLAB_BYTES), self.rng.randrange(8)
        return self._changed([slab], lambda: self._xor(slab, at, 1 << bit))

    def _xor(self, slab: int, at: int, mask: int) -> None:
        self._write(slab, at, bytes([self.spread.read(slab)[at] ^ mask]))

    def truncate(self, slab: int) -> dict[str, Any]:
        """The slab ends early, at any byte; behind it lies what an unwritten page holds."""
        at = self.rng.randrange(SLAB_BYTES)
        return self._changed([slab], lambda: self._write(slab, at, bytes(SLAB_BYTES - at)))

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
        half = SLAB_BYTES // 2
        old = self.spread.read(slab)
        return self._changed([slab], lambda: self._write(slab, 0, old[half:] + old[:half]))

    def heads(self, slab: int) -> dict[str, Any]:
        """The right bytes at the wrong head of one layer."""
        size, layer = LAYOUT.page_bytes, self.rng.randrange(LAYOUT.layers)
        at = layer * LAYOUT.layer_bytes
        pages = self.spread.read(slab)[at : at + 2 * size]
        return self._changed([slab], lambda: self._write(slab, at, pages[size:] + pages[:size]))

    def replay(self, slab: int, seed: int) -> dict[str, Any]:
        """What an earlier offer (of another request or epoch) had in this very slab."""
        return self._changed([slab], lambda: self._write(slab, 0, content(seed, slab)))

    def nothing(self, slab: int) -> dict[str, Any]:
        """The control: an injector that misses."""
        return self._changed([slab], lambda: self._write(slab, 0, self.spread.read(slab)))

    def _changed(self, slabs: list[int], spoil: Callable[[], object]) -> dict[str, Any]:
        before = [self.spread.read(slab) for slab in slabs]
        spoil()
        after = [self.spread.read(slab) for slab in slabs]
        return {"changed": all(new != old for new, old in zip(after, before, strict=True))}


class Remote:
    """The test's end: starts the process, sends commands."""

    def __init__(self, transport: str, num_slabs: int = 16, split: tuple[int, int] = WHOLE) -> None:
        args = [sys.executable, "-m", "tests.engine.transport_source", transport]
        args += map(str, (num_slabs, *split))
        self.process = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
        return tickets.decode(bytes.fromhex(raw), KEY)

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
    num_slabs, tp, pp = map(int, sys.argv[2:])
    origin = Origin(sys.argv[1], num_slabs, (tp, pp))
    print(json.dumps(origin.hello()), flush=True)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        print(json.dumps(getattr(origin, command)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
