"""Prompts cut from the standard library's sources, with an exact number of tokens of the deployment's model."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import random
import textwrap

from benchmarks.load.deployment import ServedDeployment

# About 1,100 tokens.
PIECE_CHARACTERS = 4000


def library_sources() -> str:
    """The sources of some modules, one after the other."""
    modules = (argparse, contextlib, inspect, random, textwrap)
    return "\n".join(inspect.getsource(module) for module in modules)


def tokenize_text(deployment: ServedDeployment, text: str) -> list[int]:
    """The token ids of a text of any length. Raises httpx.HTTPError."""
    ids = list[int]()
    # `/tokenize` refuses a text that is longer than the model's context.
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = {"prompt": text[start : start + PIECE_CHARACTERS], "add_special_tokens": False}
        ids += deployment.post("/tokenize", piece)["tokens"]
    return ids


class PromptTokens:
    """Prompts as token ids; no two begin at the same place."""

    def __init__(self, deployment: ServedDeployment) -> None:
        self._ids = tokenize_text(deployment, library_sources())
        self._random = random.Random(0)
        self._used: set[int] = set()

    def take(self, tokens: int) -> list[int]:
        """`tokens` ids that follow one another in the sources."""
        at = self._random.randrange(len(self._ids) - tokens)
        while at in self._used:
            at = self._random.randrange(len(self._ids) - tokens)
        self._used.add(at)
        return self._ids[at : at + tokens]


class PromptTexts:
    """Prompts as text; no two begin at the same place."""

    def __init__(self, deployment: ServedDeployment) -> None:
        self._deployment, self._tokens = deployment, PromptTokens(deployment)

    def take(self, tokens: int) -> str:
        """Text that the model's tokenizer makes exactly `tokens` tokens of."""
        while True:
            text = self._deployment.post("/detokenize", {"tokens": self._tokens.take(tokens)})["prompt"]
            if len(self._deployment.post("/tokenize", {"prompt": text})["tokens"]) == tokens:
                return str(text)
