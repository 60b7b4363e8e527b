"""What a deployment is asked, and what `transformers` says on the same weights."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, NamedTuple

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.deployment import Served

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
NEW_TOKENS = 12


class TokenAnswer(NamedTuple):
    """One answer: its tokens as strings, and how many of the prompt's tokens were cached."""

    tokens: list[str]
    cached: int


def read_text() -> list[int]:
    """Real text, as token ids."""
    tokens: list[int] = AutoTokenizer.from_pretrained(TINY).encode(Path(random.__file__).read_text() * 2)
    return tokens


class Oracle:
    """`transformers` on the same weights, on one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._tokenizer: Any = AutoTokenizer.from_pretrained(TINY)

    def go_on(self, prompts: list[list[int]], num_tokens: int = NEW_TOKENS) -> list[list[str]]:
        """What it continues prompts of one length with, as the strings of the tokens."""
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return [[self._tokenizer.decode([token]) for token in row] for row in out[:, ids.shape[1] :].tolist()]


async def ask(
    served: Served, prompts: list[list[int]], at_once: int, num_tokens: int = NEW_TOKENS, **sampling: Any
) -> list[TokenAnswer]:
    """The answers to all prompts; at most `at_once` requests are open at a time."""
    gate = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as client:

        async def one(prompt: list[int]) -> TokenAnswer:
            async with gate:
                done = await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=num_tokens, logprobs=0,
                    extra_body={"ignore_eos": True, "skip_special_tokens": False}, **sampling,
                )  # fmt: skip
            choice = done.choices[0]
            assert choice.logprobs is not None and choice.logprobs.tokens is not None
            assert done.usage is not None and done.usage.completion_tokens == num_tokens
            assert done.usage.prompt_tokens_details is not None
            return TokenAnswer(
                list(choice.logprobs.tokens), done.usage.prompt_tokens_details.cached_tokens or 0
            )

        return list(await asyncio.gather(*map(one, prompts)))


def complete(served: Served, prompts: list[list[int]], at_once: int, **more: Any) -> list[list[str]]:
    """The new tokens of each prompt, as strings."""
    return [answer.tokens for answer in asyncio.run(ask(served, prompts, at_once, **more))]
