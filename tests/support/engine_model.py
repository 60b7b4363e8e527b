"""The product's own kernels for `benchmarks.kv_quality` and `benchmarks.kv_agreement`: a model in the CPU engine.

It computes one sequence at a time, in a pool of one codec.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from diptych.eviction_spec import KEEP_ALL, ZAP, KeepSpec, decision_tokens
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.protocols import EvictionOrder
from engine.step_work import KeptWork, StepWork
from kvcache.codecs.calibration import Calibration
from kvcache.eviction.kept_rows import most_extra_slabs
from kvcache.eviction.kept_segments import count_segment_slabs
from kvcache.pool import KvPool
from models.recall import RecallSeries

# The name of the sequence, of which there is one at a time.
KEY = "alone"


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
        eviction: what it takes to evict; None: everything is kept.
    """

    def __init__(
        self,
        folder: Path,
        codec: str,
        calibration: Calibration | None,
        eviction: EvictionSetup | None = None,
    ) -> None:
        checkpoint = Checkpoint.resolve(str(folder))
        layout, context = checkpoint.layout(codec=codec), checkpoint.config.context
        pool = KvPool(layout, layout.num_chunks(context) + most_extra_slabs(layout, context))
        self._slabs = list(range(pool.num_slabs))
        self._runner = CpuModelRunner.load(checkpoint, pool, context, calibration, eviction=eviction)

    def name_weights(self, keep: KeepSpec) -> KeepSpec:
        """The same, but its rule `zap` names the weights of this model: only then segments are cut."""
        return structs.replace(keep, rule=self._runner.keep_rules[-1]) if keep.rule == ZAP else keep

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
        self,
        prompt: list[int],
        num_tokens: int,
        decode: Callable[[list[int]], str],
        keep: KeepSpec = KEEP_ALL,
        cuts: bool = False,
    ) -> GreedyAnswer:
        """The prompt is prefilled at once, and `num_tokens` tokens are decoded; `decode` makes text of a token.

        At decision points heads drop what `keep` lets them drop. `cuts`: what they keep of the prompt is in segments,
        as where a decode worker has it from a prefill worker. They are read in another order, so codes of later rows
        may round differently.
        """
        answer, tokens, start = GreedyAnswer([], []), list(prompt), 0
        slabs, evicted, cut_slabs = self._slabs, False, 0
        while True:
            kept = KeptWork(KEY, len(prompt), keep, evicted, cut_slabs) if keep.evicts else None
            work = StepWork(tokens[start:], start, slabs, "last", prompt[0], kept)
            scores = torch.log_softmax(self._runner.run([work])[0][0], dim=0)
            start, token = len(tokens), int(scores.argmax())
            answer.tokens.append(decode([token]))
            answer.logprobs.append(float(scores[token]))
            if len(answer.tokens) == num_tokens:
                self._runner.forget_kept(KEY)
                return answer
            if keep.evicts and decision_tokens(len(prompt), start) == start:
                order = EvictionOrder(KEY, tokens, len(prompt), keep, slabs, cuts)
                slabs, cut_slabs = self._evict(order, evicted, cut_slabs)
                evicted = True
            tokens.append(token)

    def _evict(self, order: EvictionOrder, evicted: bool, cut_slabs: int) -> tuple[list[int], int]:
        """The slabs of a sequence behind a decision point, and how many of them have segments.

        They are those before the boundary, of segments, the ring and the bag. Before, `cut_slabs` had segments.
        """
        report, first = self._runner.plan_eviction(order), order.spec.boundary_chunks
        cut_slabs = cut_slabs if evicted else count_segment_slabs(report.segments)
        ring = first + cut_slabs
        slabs = self._slabs[: ring + 1 + report.bag_slabs]
        self._runner.apply_eviction(order.key, [*([] if evicted else slabs[first:ring]), *slabs[ring + 1 :]])
        return slabs, cut_slabs

    def _run(self, ids: list[int], start: int, first: int, logits: str) -> torch.Tensor:
        return self._runner.run([StepWork(ids, start, self._slabs, logits, first)])[0]


def save_folder(model: Any, source: Path, folder: Path) -> Path:
    """A model of transformers as a folder that the engine reads, with the tokenizer of `source`."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return folder
