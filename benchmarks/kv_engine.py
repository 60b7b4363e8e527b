"""The product's own kernels for `benchmarks.kv_quality`: a model in the CPU engine, with a pool of one codec."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.step_work import StepWork
from kvcache.codecs.calibration import Calibration
from kvcache.pool import KvPool
from models.recall import RecallSeries


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """New tokens as strings, and their log-probabilities."""

    tokens: list[str]
    logprobs: list[float]


class EngineModel:
    """A model that computes whole sequences, one at a time, through a pool of one codec.

    Args:
        folder: of the model.
        codec: canonical id; empty: no codec.
        calibration: the one that the id names, if it names one.
    """

    def __init__(self, folder: Path, codec: str, calibration: Calibration | None) -> None:
        checkpoint = Checkpoint.resolve(str(folder))
        layout, context = checkpoint.layout(codec=codec), checkpoint.shape.context
        pool = KvPool(layout, layout.num_chunks(context))
        self._slabs = list(range(pool.num_slabs))
        self._runner = CpuModelRunner.load(checkpoint, pool, context, calibration)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of every token of a sequence, as one prefill: [tokens] -> [tokens, vocabulary]."""
        return self._run(ids.tolist(), 0, int(ids[0]), "all")

    def count_answers(self, series: RecallSeries) -> tuple[int, int]:
        """How many of the first question, and of the later ones, are answered exactly.

        Questions are prefilled behind what is in the pool, and answers decoded token by token. After a wrong token the
        true one follows, so that later questions see the same text.
        """
        right, place, ids = list[bool](), 0, series.ids
        for start, stop in series.answers:
            logits = self._run(ids[place:start], place, ids[0], "last")
            found = []
            for index in range(start, stop):
                found.append(int(logits[0].argmax()) == ids[index])
                logits = self._run([ids[index]], index, ids[0], "last")
            right.append(all(found))
            place = stop
        return int(right[0]), sum(right[1:])

    def answer_greedily(
        self, prompt: list[int], num_tokens: int, decode: Callable[[list[int]], str]
    ) -> GreedyAnswer:
        """The prompt is prefilled at once, and `num_tokens` tokens are decoded; `decode` makes text of a token."""
        answer, place = GreedyAnswer([], []), len(prompt)
        logits = self._run(prompt, 0, prompt[0], "last")
        while True:
            scores = torch.log_softmax(logits[0], dim=0)
            token = int(scores.argmax())
            answer.tokens.append(decode([token]))
            answer.logprobs.append(float(scores[token]))
            if len(answer.tokens) == num_tokens:
                return answer
            logits = self._run([token], place, prompt[0], "last")
            place += 1

    def _run(self, ids: list[int], start: int, first: int, logits: str) -> torch.Tensor:
        return self._runner.run([StepWork(ids, start, self._slabs, logits, first)])[0]


def save_folder(model: Any, source: Path, folder: Path) -> Path:
    """A model of transformers as a folder that the engine reads, with the tokenizer of `source`."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return folder
