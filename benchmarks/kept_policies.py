"""Whether the engine's heads choose the policies of `fastgen` that float64 says: `same` of `benchmarks.kv_eviction`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.keep_simulation import compute_prompt, profile_prompt
from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import FASTGEN, KeepSpec
from engine.calibration.keep_fit import own_attention
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.protocols import EvictionOrder
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.policies import KeepRule, choose_policies
from kvcache.pool import KvPool

PROMPTS, TOKENS, STEP_TOKENS = 50, 512, 200
# Thresholds that the prompts have in turn.
THRESHOLDS = (0.98, 0.95, 0.91, 0.85, 0.75)


def measure_same(
    folder: Path, model: Any, kinds: NDArray[np.uint8], stream: Sequence[int], count: int = PROMPTS
) -> float:
    """The share of prompts all of whose heads have the same policy in both.

    Args:
        folder: of the model, for the engine.
        model: the same of transformers, in float32.
        kinds: the kind of each token of the vocabulary.
        stream: held-out text, from which prompts are cut at equal distances.
        count: how many.
    """
    checkpoint = Checkpoint.resolve(str(folder))
    pool = KvPool(checkpoint.layout(), TOKENS // CHUNK_TOKENS)
    runner = CpuModelRunner.load(checkpoint, pool, TOKENS, eviction=EvictionSetup(kinds))
    evictor = runner._attentions[0].evictor
    assert evictor is not None
    same, install = 0, partial(own_attention, model)
    for number, start in enumerate(np.linspace(0, len(stream) - TOKENS, count).astype(int)):
        tokens = [*stream[start : start + TOKENS - number % CHUNK_TOKENS]]
        spec = KeepSpec(THRESHOLDS[number % len(THRESHOLDS)], rule=FASTGEN)
        kept = KeptWork("a", len(tokens), spec, False)
        slabs = [*range(pool.layout.num_chunks(len(tokens)))]
        for at in range(0, len(tokens), STEP_TOKENS):
            runner.run([StepWork(tokens[at : at + STEP_TOKENS], at, slabs, "none", tokens[0], kept)])
        runner.plan_eviction(EvictionOrder("a", tokens, len(tokens), spec, slabs))
        assert evictor._plan is not None
        found = evictor._plan[1][-1][0].policies
        runner.forget_kept("a")
        prompt = compute_prompt(model, torch.tensor(tokens), kinds[tokens], install)
        profile = profile_prompt(prompt, 0, KeepRule())
        same += bool((choose_policies(profile.masses, spec.threshold, len(tokens)) == found).all())
    return same / count
