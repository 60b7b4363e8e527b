"""Prompts without tokens: their length, and names for the chunks that requests may have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import repeat
from typing import Any

from kvcache.layout import CHUNK_TOKENS
from planner.terms import Job
from router.prefix_index import Chunks, PrefixIndex

NAME_BYTES = 8


class Text:
    """So many tokens, all of them 0, whose full chunks are called `names`; what a list is to the relay."""

    __slots__ = ("count", "names")

    def __init__(self, count: int, names: Chunks = ()) -> None:
        self.count, self.names = count, names

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return repeat(0, self.count)

    def __getitem__(self, part: slice) -> Text:
        return Text(len(range(*part.indices(self.count))))

    def __add__(self, other: Text) -> Text:
        return Text(self.count + other.count, self.names)

    def extend(self, tokens: Sequence[int]) -> None:
        """As many more."""
        self.count += len(tokens)


class Names(PrefixIndex):
    """The relay's guess at who has which prefix, by the names that a `Text` brings. Answers have none."""

    def cut(self, tokens: Any, scope: str, known: Chunks = ()) -> Chunks:
        """The names of a prompt's chunks, of which `known` are the first."""
        return known or (tokens.names if self.max_chunks else ())


def names(job: Job, number: int) -> Chunks:
    """A name for each full chunk of 64 tokens of a prompt.

    Equal prefixes have equal names: a chunk that lies in the blocks `job.prefix` is called after these and all before
    them. What follows is nobody else's, and is called after `number`, which no other job has.
    """
    told: list[bytes] = []
    name, full = b"", job.prompt // CHUNK_TOKENS
    for end in range(CHUNK_TOKENS, full * CHUNK_TOKENS + 1, CHUNK_TOKENS):
        first, last = (end - CHUNK_TOKENS) // job.block_tokens, -(-end // job.block_tokens)
        if last > len(job.prefix):
            break
        text = repr((end % job.block_tokens, job.prefix[first:last])).encode()
        name = blake2b(name + text, digest_size=NAME_BYTES).digest()
        told.append(name)
    told += [b"%d:%d" % (number, place) for place in range(len(told), full)]
    return tuple(told)
