"""Texts of a wanted number of tokens, for a server whose tokenizer is only seen from outside.

Short English words are one token each for almost every tokenizer, but which of them is asked, not assumed: the server
counts a few texts (`/tokenize`, or `usage` of an answer of one token), and words that cost the same are kept.
A text is then an anchor word, which may be counted together with what the server puts around a prompt, and as many
words as are wanted. Named blocks are the same words wherever they come again, so that shared prefixes stay shared.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count as numbers

from planner.types import Job

ANCHOR = "the"
WORDS = (
    "of", "and", "to", "in", "is", "was", "for", "on", "as", "with", "he", "that", "at", "by", "from", "his", "her",
    "an", "were", "are", "which", "this", "be", "had", "not", "or", "she", "one", "but", "all", "has", "their", "who",
    "they", "so", "out", "up", "into", "its", "time", "no", "if", "two", "there", "first",
    "been", "some", "more", "only", "can",
)  # fmt: skip
# Each word is counted this many times in a row, so that fractions of a token show.
REPEATS = 32
# Number of words with the same number of tokens that suffice: four words drawn from 16 hardly ever repeat.
ENOUGH_WORDS = 16
# With fewer words of one token count, texts would hardly differ.
MIN_WORDS = 4

CountTokens = Callable[[str], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words of `each` tokens, and the `base` tokens of a prompt that has none of them.

    `checked` is False when nobody counted, and a word is taken for a token.
    """

    words: tuple[str, ...]
    base: int = 1
    each: int = 1
    checked: bool = False


async def learn_vocabulary(count: CountTokens) -> Vocabulary:
    """Ask what words cost, until enough are known that cost the same. `count` gives None if the server does not say."""
    base = await count(ANCHOR)
    if base is None:
        return Vocabulary(WORDS)
    costs: dict[int, list[str]] = {}
    for word in WORDS:
        counted = await count(" ".join([ANCHOR, *[word] * REPEATS]))
        if counted is None:
            return Vocabulary(WORDS)
        if counted > base and (counted - base) % REPEATS == 0:
            same = costs.setdefault((counted - base) // REPEATS, [])
            same.append(word)
            if len(same) == ENOUGH_WORDS:
                break
    return _cheapest_words(costs, base)


def _cheapest_words(costs: dict[int, list[str]], base: int) -> Vocabulary:
    for each, words in sorted(costs.items()):
        if len(words) >= MIN_WORDS:
            return Vocabulary(tuple(words), base, each, True)
    return Vocabulary(WORDS, base)


class PromptWriter:
    """Makes the prompts of one run. Two runs with different `name`s share no text, not even blocks of the same number:
    what a server has cached in the one is of no use in the other.
    """

    def __init__(self, vocabulary: Vocabulary, name: str) -> None:
        self._vocabulary, self._name, self._numbers = vocabulary, name, numbers()
        self._block = lru_cache(maxsize=4096)(self._make_block)

    def prompt_text(self, job: Job) -> str:
        """A prompt of `job.prompt` tokens, as near as whole words come, that begins with the blocks of `job.prefix`."""
        known = self._vocabulary
        wanted = max(0, round((job.prompt - known.base) / known.each))
        size = max(1, round(job.block_tokens / known.each))
        words: list[str] = []
        for block in job.prefix:
            if len(words) >= wanted:
                break
            words += self._block(block, size)
        words = words[:wanted]
        words += self._draw_words(f"{self._name} tail {next(self._numbers)}", wanted - len(words))
        return " ".join([ANCHOR, *words])

    def _make_block(self, block: int, size: int) -> Sequence[str]:
        return self._draw_words(f"{self._name} block {block}", size)

    def _draw_words(self, seed: str, size: int) -> list[str]:
        return random.Random(seed).choices(self._vocabulary.words, k=size)
