"""Prompts of benchmarks are made by a server whose `/tokenize` takes no more than the model's context."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from benchmarks.load.deployment import ServedDeployment
from benchmarks.load.prompts import PromptTexts, PromptTokens, library_sources

CONTEXT_CHARACTERS = 6000


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> ServedDeployment:
    """A server whose tokens are characters."""

    def answer(deployment: ServedDeployment, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/detokenize":
            return {"prompt": "".join(map(chr, body["tokens"]))}
        assert path == "/tokenize" and len(body["prompt"]) <= CONTEXT_CHARACTERS
        return {"tokens": [ord(character) for character in body["prompt"]]}

    monkeypatch.setattr(ServedDeployment, "post", answer)
    process = subprocess.Popen.__new__(subprocess.Popen)
    process.returncode, process.args = 0, []
    return ServedDeployment(1, process)


def test_prompts_are_distinct_parts_of_the_sources(deployment: ServedDeployment) -> None:
    ids, texts = PromptTokens(deployment), PromptTexts(deployment)
    for taken in (
        ["".join(map(chr, ids.take(500))) for _ in range(50)],
        [texts.take(CONTEXT_CHARACTERS) for _ in range(5)],
    ):
        assert len(set(taken)) == len(taken) and len({len(prompt) for prompt in taken}) == 1
        assert all(prompt in library_sources() for prompt in taken)
