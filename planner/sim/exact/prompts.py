"""Replaces token lists in simulations: a prompt is its length, and names for the chunks that it shares with others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import repeat

from diptych.chunks import CHUNK_TOKENS
from planner.types import Job
from router.routing.prefix_index import ChunkNames, PrefixIndex

NAME_BYTES = 8


class SimPrompt:
    """A list of `count` zeros in constant memory, with the methods of a list that the relay uses."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return repeat(0, self.count)

    def __getitem__(self, part: slice) -> SimPrompt:
        return SimPrompt(len(range(*part.indices(self.count))))

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends as many zeros as there are `tokens`."""
        self.count += len(tokens)


class SimPrefixIndex(PrefixIndex):
    """The relay's prefix index for simulations: requests bring their chunks' names, and nothing is hashed."""

    def extend_names(
        self, known: ChunkNames, prompt: Sequence[int], output: Sequence[int], scope: str
    ) -> ChunkNames:
        """The names of the prompt's chunks: nothing is known of the answer's text."""
        return known


def chunk_names(job: Job, number: int) -> ChunkNames:
    """A name for each full chunk of 64 tokens of a prompt; equal prefixes get equal names.

    A chunk within the blocks `job.prefix` is named after that block and all blocks before it. Later chunks are shared
    with no other job: they are named after `number`, which is unique.
    """
    names: list[bytes] = []
    name, full = b"", job.prompt // CHUNK_TOKENS
    for end in range(CHUNK_TOKENS, full * CHUNK_TOKENS + 1, CHUNK_TOKENS):
        first, last = (end - CHUNK_TOKENS) // job.block_tokens, -(-end // job.block_tokens)
        if last > len(job.prefix):
            break
        text = repr((end % job.block_tokens, job.prefix[first:last])).encode()
        name = blake2b(name + text, digest_size=NAME_BYTES).digest()
        names.append(name)
    names += [b"%d:%d" % (number, place) for place in range(len(names), full)]
    return tuple(names)
