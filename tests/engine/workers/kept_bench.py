"""The byte model of `worker_bench`, whose heads drop tokens: what follows depends on what was kept, and when.

At a decision point the chain of hashes goes on from a hash of the last link, of the number of tokens, and of the
`KeepSpec`. It is the map at the beginning of the bag; the other slabs of the bag follow from it, and are all read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from engine.protocols import EvictionOrder, EvictionReport
from engine.step_work import StepWork
from kvcache.pool import KvPool
from tests.engine.workers.worker_bench import VOCAB, ByteRunner, WorkerBench, chain_links

MAGIC = b"BAG!"
PROFILE_ROWS = 64


def decide(link: bytes, num_tokens: int, keep: KeepSpec) -> bytes:
    """What the chain goes on from behind a decision point."""
    spec = f"{num_tokens} {keep.threshold} {keep.boundary}".encode()
    return hashlib.blake2b(link + spec, digest_size=8).digest()


def count_bag_slabs(num_tokens: int, keep: KeepSpec) -> int:
    """The bag's slabs: for half of the tokens behind the boundary, and the map."""
    return 1 + (num_tokens - keep.boundary) // (2 * CHUNK_TOKENS)


def kept_alone(prompt: Sequence[int], max_tokens: int, keep: KeepSpec = KEEP_ALL) -> list[int]:
    """What it writes after a prompt, undisturbed."""
    link, output = chain_links(prompt)[-1], list[int]()
    while True:
        output.append(link[0] % VOCAB)
        if len(output) == max_tokens:
            return output
        num_tokens = len(prompt) + len(output) - 1
        if keep.evicts and (num_tokens - len(prompt)) % CHUNK_TOKENS == 0:
            link = decide(link, num_tokens, keep)
        [link] = chain_links(output[-1:], link)


@dataclass
class KeptMap:
    """A map, and the slabs of its bag."""

    link: bytes
    num_tokens: int
    slabs: list[int]


class KeptByteRunner(ByteRunner):
    """`spoil` changes the bytes of a map before they are written; `kept` are the maps that it has, by sequence."""

    can_evict = True

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self._pool = pool
        self.kept: dict[str, KeptMap] = {}
        self.spoil: Callable[[bytes], bytes] = bytes
        self._plans: dict[str, KeptMap] = {}
        # Positions of each sequence that were computed here.
        self._computed: dict[str, set[int]] = {}

    def _one(self, work: StepWork) -> list[bytes]:
        if work.kept is None:
            return super()._one(work)
        end = work.start + len(work.tokens)
        self._computed.setdefault(work.kept.key, set()).update(range(work.start, end))
        if not work.kept.evicted:
            assert end <= work.kept.prompt_tokens
            return super()._one(work)
        known, place = self.kept[work.kept.key], work.kept.spec.boundary_chunks
        assert work.slabs[place + 1 :] == known.slabs
        self._read_bag(known.slabs, work.kept.prompt_tokens)
        assert known.num_tokens <= work.start < end <= known.num_tokens + CHUNK_TOKENS
        ring = self._rows[work.slabs[place]]
        before = known.link if work.start == known.num_tokens else ring[(work.start - 1) % CHUNK_TOKENS, :8]
        links = chain_links(work.tokens, bytes(before))
        for position, link in enumerate(links, work.start):
            ring[position % CHUNK_TOKENS, :8] = np.frombuffer(link, np.uint8)
        return links[-1:]

    def plan_eviction(self, order: EvictionOrder) -> EvictionReport:
        count, keep = len(order.tokens), order.spec
        first = max(0 if count == order.prompt_tokens else order.prompt_tokens, count - PROFILE_ROWS)
        assert self._computed[order.key] >= set(range(first, count)), "the last rows were not computed here"
        chunk = (count - 1) // CHUNK_TOKENS if count == order.prompt_tokens else keep.boundary_chunks
        link = self._rows[order.slabs[chunk], (count - 1) % CHUNK_TOKENS, :8].tobytes()
        self._plans[order.key] = KeptMap(decide(link, count, keep), count, [])
        return EvictionReport(count_bag_slabs(count, keep), count // 2, count, {"full": 1})

    def apply_eviction(self, key: str, bag_slabs: list[int]) -> None:
        plan = self._plans.pop(key)
        plan.slabs = list(bag_slabs)
        head = MAGIC + plan.num_tokens.to_bytes(4, "little") + plan.link
        for slab, content in zip(
            bag_slabs, [self.spoil(head), *_rest_of_bag(plan, len(bag_slabs))], strict=True
        ):
            self._pool.slab_bytes(slab)[: len(content)] = content
        self.kept[key] = plan

    def load_kept(self, key: str, boundary: int, length: int, bag_slabs: list[int], *_: object) -> None:
        found = self._read_bag(bag_slabs, length)
        if found.num_tokens != length:
            raise ValueError(f"the map is that of {found.num_tokens} tokens, not of {length}")
        self.kept[key] = found

    def forget_kept(self, key: str) -> None:
        for known in (self.kept, self._plans, self._computed):
            known.pop(key, None)

    def write_rest(self, slabs: list[int]) -> None:
        """Write what follows a map that is in the first of `slabs`, as if its bag had as many."""
        head = bytes(self._pool.slab_bytes(slabs[0])[:16])
        known = KeptMap(head[8:], int.from_bytes(head[4:8], "little"), slabs)
        for slab, content in zip(slabs[1:], _rest_of_bag(known, len(slabs)), strict=True):
            self._pool.slab_bytes(slab)[: len(content)] = content

    def _read_bag(self, slabs: list[int], prompt_tokens: int) -> KeptMap:
        head = bytes(self._pool.slab_bytes(slabs[0])[:16])
        found = KeptMap(head[8:], int.from_bytes(head[4:8], "little"), list(slabs))
        if head[:4] != MAGIC or (found.num_tokens - prompt_tokens) % CHUNK_TOKENS:
            raise ValueError("the slabs do not begin with a map")
        for slab, content in zip(slabs[1:], _rest_of_bag(found, len(slabs)), strict=True):
            assert bytes(self._pool.slab_bytes(slab)[:8]) == content, "the bag is not the one of its map"
        return found


def _rest_of_bag(known: KeptMap, count: int) -> list[bytes]:
    return [decide(known.link, place, KEEP_ALL) for place in range(1, count)]


class KeptBench(WorkerBench):
    """A prefill and a decode worker whose models can drop tokens."""

    runner = KeptByteRunner

    @property
    def prefiller(self) -> KeptByteRunner:
        assert isinstance(self.prefill.runner, KeptByteRunner)
        return self.prefill.runner

    @property
    def decoder(self) -> KeptByteRunner:
        assert isinstance(self.decode.runner, KeptByteRunner)
        return self.decode.runner

    def check_rest(self) -> None:
        """Nothing is held anywhere, and nothing is remembered of any sequence."""
        for half, runner in ((self.prefill, self.prefiller), (self.decode, self.decoder)):
            half.shell.run_once()
            half.holdings.check_books()
            assert half.pool.used == half.holdings.cached == half.stats.slabs_cached
            stats = half.stats
            used = stats.slabs_used, stats.leases, stats.staging_bytes, stats.running, stats.waiting
            assert used == (0,) * 5
            assert not (runner.kept or runner._plans or runner._computed)
