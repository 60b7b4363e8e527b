"""Prompts of a wanted length for tokenizers of which only counts are seen."""

from __future__ import annotations

import pytest

from planner.types import Job
from services.bench.prompts import ENOUGH_WORDS, WORDS, PromptWriter, Vocabulary, learn_vocabulary


class Tokenizer:
    """Counts `costs` of words, 1 for others, and what the server puts around a prompt."""

    def __init__(self, around: int, each: int = 1, **costs: int) -> None:
        self.around, self.each, self.costs, self.asked = around, each, costs, 0

    async def count(self, text: str) -> int | None:
        self.asked += 1
        return self.tokens(text)

    def tokens(self, text: str) -> int:
        return self.around + sum(self.costs.get(word, self.each) for word in text.split())


async def test_lengths_are_exact_when_words_are_tokens() -> None:
    tokenizer = Tokenizer(around=5, to=2, and_=3, the=2)
    known = await learn_vocabulary(tokenizer.count)
    assert known.checked and len(known.words) == ENOUGH_WORDS and "to" not in known.words
    writer = PromptWriter(known, "a")
    for prompt in (8, 9, 64, 1000):
        assert tokenizer.tokens(writer.prompt_text(Job(0.0, prompt, 1))) == prompt
    assert tokenizer.asked <= 2 + len(WORDS)


async def test_words_of_two_tokens_come_within_one() -> None:
    tokenizer = Tokenizer(around=1, each=2)
    writer = PromptWriter(await learn_vocabulary(tokenizer.count), "a")
    for prompt in (10, 11, 500):
        assert abs(tokenizer.tokens(writer.prompt_text(Job(0.0, prompt, 1))) - prompt) <= 1


async def test_a_server_that_does_not_count_is_taken_to_have_a_token_a_word() -> None:
    async def nothing(text: str) -> int | None:
        return None

    known = await learn_vocabulary(nothing)
    assert not known.checked
    assert len(PromptWriter(known, "a").prompt_text(Job(0.0, 40, 1)).split()) == 40


async def test_words_that_are_not_whole_tokens_are_not_used() -> None:
    async def halves(text: str) -> int | None:
        return 3 + len(text) // 2  # by characters: no word has a price

    known = await learn_vocabulary(halves)
    assert known.checked == (len({len(word) for word in known.words}) == 1)


def prompts(jobs: list[Job], name: str = "a") -> list[list[str]]:
    writer = PromptWriter(Vocabulary(WORDS), name)
    return [writer.prompt_text(job).split() for job in jobs]


def test_blocks_of_equal_names_are_equal_text_and_the_rest_is_not() -> None:
    first, second, third = prompts(
        [Job(0.0, 100, 1, "", (1, 2), 32), Job(0.0, 100, 1, "", (1, 3), 32), Job(0.0, 100, 1, "", (1, 2), 32)]
    )
    assert first[:33] == second[:33] and first[:65] == third[:65]
    assert first[33:65] != second[33:65] and first[65:] != third[65:]


def test_a_prefix_longer_than_the_prompt_is_cut() -> None:
    (words,) = prompts([Job(0.0, 50, 1, "", (1, 2, 3), 32)])
    assert len(words) == 50


def test_runs_share_no_text() -> None:
    job = Job(0.0, 64, 1, "", (1,), 32)
    assert prompts([job], "a")[0][1:33] != prompts([job], "b")[0][1:33]


@pytest.mark.parametrize("prompt", [1, 2])
def test_the_shortest_prompts_have_a_word(prompt: int) -> None:
    assert len(prompts([Job(0.0, prompt, 1)])[0]) == prompt
