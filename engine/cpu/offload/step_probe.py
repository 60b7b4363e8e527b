"""Steps of a block that is wholly in memory, for measuring: what a unit takes in a layer, and what a step takes beside.

Runner and engine are the product's. The layers are copies of one layer, taken in turn, so that each comes from memory
and not from the cache; embedding and logits have random weights.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.request import SamplingParams
from engine.batching.batch import ForwardBatch
from engine.cpu.attention import PagedAttention
from engine.cpu.coded.sink_table import SinkTable
from engine.cpu.decoder import CpuDecoder
from engine.cpu.linear import PackedLinear
from engine.cpu.offload.block_kv import BlockKv
from engine.cpu.offload.hidden_rooms import HiddenRooms
from engine.cpu.offload.runner import BlockTiers, CpuOffloadRunner
from engine.cpu.offload.weight_stream import WeightStream
from engine.cpu.weights.decoder_weights import CpuLayer, DecoderWeights
from engine.model.checkpoint import Checkpoint
from engine.offload.block_admission import BlockAdmission
from engine.offload.engine import OffloadEngine
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import BlockNeeds
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.step_work import StepWork

# Layers of the block. The first one's units include packing the step, and the last one's the logits.
LAYERS = 4
# Tokens of the prompts of which a unit of many rows consists.
UNIT_PROMPT_TOKENS = CHUNK_TOKENS
# (sequences of a batch, batches) of the steps whose cost beside the layers is measured, and their number.
STEP_SHAPES, STEPS = ((1, 1), (8, 1), (1, 8), (16, 2)), 6
# The vocabulary of the logits, at most.
MAX_OUTPUTS = 8192
FIRST_TOKENS = 4


class _ProbeDecoder(CpuDecoder):
    """A decoder with a random embedding and product to logits. Without `computes` its layers do nothing."""

    def __init__(self, checkpoint: Checkpoint, context: int) -> None:
        super().__init__(checkpoint.config, DecoderWeights((), None, None, None), context)
        self.outputs, self.computes = min(checkpoint.config.vocab, MAX_OUTPUTS), True
        self._table = torch.randn(self.outputs, checkpoint.config.hidden)
        self._product = PackedLinear.pack(self._table.to(torch.bfloat16).to(torch.float32))

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the random embedding."""
        return self._table.index_select(0, tokens)

    def compute_layer(
        self,
        index: int,
        layer: CpuLayer,
        x: torch.Tensor,
        delta: torch.Tensor,
        batch: ForwardBatch,
        attention: PagedAttention,
        done: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """As of any decoder, if this one computes."""
        return (
            super().compute_layer(index, layer, x, delta, batch, attention, done) if self.computes else delta
        )

    def compute_logits(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Random logits, for as long as real ones take."""
        return self._product(x.add_(delta))


class _CycledLayers:
    """Layers in memory, one after the other, whichever is asked for."""

    file = SimpleNamespace(num_moves=0)

    def __init__(self, layers: Iterable[CpuLayer]) -> None:
        self._layers = itertools.cycle(layers)

    def enter_layer(self, index: int, last: bool = False) -> CpuLayer:
        return next(self._layers)

    def close(self) -> None:
        """Nothing."""


class StepProbe:
    """Measures steps of a model with `clock`: medians of `rounds` or more. No sequence is longer than `context`."""

    def __init__(self, checkpoint: Checkpoint, context: int, clock: Callable[[], float], rounds: int) -> None:
        self._checkpoint, self._clock, self._rounds = checkpoint, clock, rounds
        self._decoder = _ProbeDecoder(checkpoint, context)
        self._prompt = min(UNIT_PROMPT_TOKENS, context - 1)

    @property
    def outputs(self) -> int:
        """The rows of the product to logits that is measured."""
        return self._decoder.outputs

    def measure_decode(self, layers: Iterable[CpuLayer], rows: int) -> float:
        """Seconds of a unit of `rows` decoding rows in one layer, at a context of a few tokens."""
        works = [StepWork([1], FIRST_TOKENS, [row], "none", 1) for row in range(rows)]
        before = [StepWork([1] * FIRST_TOKENS, 0, [row], "none") for row in range(rows)]
        return self._measure_unit(
            layers, BlockPolicy(rows, 1, FIRST_TOKENS, 1, step_tokens=1 << 30), works, before
        )

    def measure_prompts(self, layers: Iterable[CpuLayer], rows: int) -> float:
        """Seconds of a unit of `rows` rows of prompts in one layer, with their attention to `UNIT_PROMPT_TOKENS`."""
        whole, rest = divmod(rows, self._prompt)
        lengths = [self._prompt] * whole + ([rest] if rest else [])
        works = [StepWork([1] * count, 0, [2 * row], "none") for row, count in enumerate(lengths)]
        policy = BlockPolicy(len(works), 1, self._prompt, 1, step_tokens=1 << 30)
        return self._measure_unit(layers, policy, works)

    def _measure_unit(
        self,
        layers: Iterable[CpuLayer],
        policy: BlockPolicy,
        works: list[StepWork],
        before: list[StepWork] | None = None,
    ) -> float:
        """Seconds of a unit of `works`, which follow on `before`."""
        runner, found = self._build_runner(layers, policy, LAYERS), list[float]()
        for _ in runner.run_step({0: before or works}, False):
            pass
        for _ in range(self._rounds):
            begun_s, units = None, 0
            for _ in runner.run_step({0: works}, False):
                now_s = self._clock()
                if begun_s is not None and units < LAYERS - 2:
                    found.append(now_s - begun_s)
                    units += 1
                begun_s = self._clock()
        return max(median(found), 1e-9)

    def measure_steps(self) -> list[tuple[int, int, float]]:
        """(batches, sequences, seconds) of decode steps, without their layers: the engine, sampling, and logits."""
        found = []
        self._decoder.computes = False
        try:
            for rows, batches in STEP_SHAPES:
                policy = BlockPolicy(rows, batches, FIRST_TOKENS, STEPS + 2)
                found.append((batches, policy.sequences, self._measure_step(policy)))
        finally:
            self._decoder.computes = True
        return found

    def _measure_step(self, policy: BlockPolicy) -> float:
        """Seconds of a decode step of all sequences of a policy; the first step reads the prompts."""
        runner, found = self._build_runner([cast(CpuLayer, None)], policy, 1), list[float]()
        outputs = self._decoder.outputs
        for attempt in range(self._rounds):
            schedule = BlockAdmission(policy, policy.sequence_tokens, max_waiting=policy.sequences)
            engine = OffloadEngine(runner, schedule, Sampler(outputs), outputs, 0.0)
            for number in range(policy.sequences):
                asked = SamplingParams(STEPS + 1, 0, temperature=0.0)
                name = f"{attempt}-{number}"
                engine.add(Sequence(name, 1, [1] * FIRST_TOKENS, asked, math.inf), time.monotonic())
            while engine.steps < 1 or engine.tokens < policy.sequences * FIRST_TOKENS:
                engine.step(time.monotonic)
            begun_s, steps = self._clock(), engine.steps
            while engine.has_work:
                engine.step(time.monotonic)
            found.append((self._clock() - begun_s) / max(1, engine.steps - steps))
        return median(found)

    def _build_runner(self, layers: Iterable[CpuLayer], policy: BlockPolicy, count: int) -> CpuOffloadRunner:
        """A runner of `count` layers in memory."""
        layout = replace(self._checkpoint.layout(), layers=count)
        weights = cast(WeightStream, _CycledLayers(layers))
        kv = BlockKv(layout, self._decoder.heads, policy, None)
        hidden = HiddenRooms(self._checkpoint.config.hidden, count, policy, None)
        tiers = BlockTiers(weights, kv, hidden, SinkTable(layout), 1)
        needs: Any = BlockNeeds({}, {})
        return CpuOffloadRunner(self._decoder, layout, policy, tiers, needs)
