"""Which prefixes a worker was recently sent (pure): an estimate of what its prefix cache holds, never a guarantee.

A prompt is cut as the workers cut it, into chunks of 64 tokens. Each chunk is named by a digest of itself and all
chunks before it, so equal names mean equal prefixes of one scope. Per worker and KV class the names are kept in order
of use, at most one per slab: a name that was pushed out here was most likely evicted there. A wrong estimate costs time
and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from diptych.eviction_spec import KeepSpec
from diptych.request import TOKEN_BYTES, token_bytes

# Most chunks that are remembered per worker, however large its pool is.
MAX_CHUNKS = 65_536
NAME_BYTES = 8

ChunkNames = tuple[bytes, ...]


def name_chunks(tokens: Sequence[int], scope: str) -> ChunkNames:
    """The names of all full chunks of a prompt.

    Takes some microseconds per chunk: the gateway names the chunks of a long prompt outside of its event loop, once.
    """
    return tuple(_iter_names(tokens, blake2b(scope.encode(), digest_size=NAME_BYTES).digest()))


def _iter_names(tokens: Sequence[int], name: bytes) -> Iterator[bytes]:
    """The name of each full chunk of `tokens`; `name` is that of the chunk before them, or of their scope."""
    body = memoryview(token_bytes(tokens))
    step = CHUNK_TOKENS * TOKEN_BYTES
    for start in range(0, len(body) - step + 1, step):
        name = blake2b(name + body[start : start + step], digest_size=NAME_BYTES).digest()
        yield name


def name_kept(chunks: ChunkNames, prompt_tokens: int, keep: KeepSpec) -> ChunkNames:
    """The names of what a prompt keeps of its `chunks` that can be in segments; none if its rule makes none.

    A worker that has these has not the chunks. Rows of the newest 64 tokens are in no segment.
    """
    if not keep.can_cut:
        return ()
    text = f"{keep.rule} {keep.threshold!r} {keep.boundary}"
    mark = blake2b(text.encode(), digest_size=NAME_BYTES).digest()
    end = max(0, prompt_tokens - CHUNK_TOKENS) // CHUNK_TOKENS
    return tuple([name + mark for name in chunks[keep.boundary_chunks : end]])


class PrefixIndex:
    """Names of the chunks that each worker was sent, least recently used first. `max_chunks` 0 turns it off.

    A worker cannot use KV of one class for another, so the names of each class are kept apart.
    """

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self.max_chunks = max_chunks
        # Worker -> KV class -> names.
        self._held: dict[str, dict[str, OrderedDict[bytes, None]]] = {}

    def name_chunks(self, tokens: Sequence[int], scope: str) -> ChunkNames:
        """The names of all full chunks of a prompt; none if the index is off."""
        return name_chunks(tokens, scope) if self.max_chunks else ()

    def extend_names(
        self, known: ChunkNames, prompt: Sequence[int], output: Sequence[int], scope: str
    ) -> ChunkNames:
        """The names of all full chunks of a prompt with its answer. `known` are those of the prompt.

        Only what follows the known chunks is hashed.
        """
        tail = [*prompt[len(known) * CHUNK_TOKENS :], *output]
        if not known:
            return self.name_chunks(tail, scope)
        return (*known, *_iter_names(tail, known[-1]))

    def record_sent(self, worker: str, chunks: ChunkNames, num_slabs: int, kv_class: str = RAW_CLASS) -> None:
        """Record that a worker with a pool of `num_slabs` slabs of `kv_class` has these chunks there now, or soon."""
        held = self._held.setdefault(worker, {}).setdefault(kv_class, OrderedDict())
        # Reversed, so that a chunk is always more recent than the chunks after it.
        for name in reversed(chunks):
            held[name] = None
            held.move_to_end(name)
        for _ in range(len(held) - min(self.max_chunks, num_slabs)):
            held.popitem(last=False)

    def count_shared(self, worker: str, chunks: ChunkNames, kv_class: str = RAW_CLASS) -> int:
        """How many of the leading chunks the worker is assumed to have cached in its pool of `kv_class`."""
        held = self._held.get(worker, {}).get(kv_class)
        # Who has a chunk has all before it, which are more recent: the first one that is missing is searched by halves.
        return bisect_left(chunks, True, key=lambda name: name not in held) if held else 0

    def forget_worker(self, worker: str) -> None:
        """The worker's life is over, and its cache is gone with it."""
        self._held.pop(worker, None)

    def holders(self) -> list[str]:
        """The names of all that are assumed to have chunks."""
        return list(self._held)

    def __len__(self) -> int:
        return sum(len(names) for classes in self._held.values() for names in classes.values())
