"""Layers with a sliding window drop what no token can see any more, without loss, beside what policies drop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.eviction_spec import KeepSpec
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.model.calibration_file import identify_model
from engine.model.checkpoint import Checkpoint
from engine.step_work import StepWork
from kvcache.eviction.kept_rows import KeptRows, count_frames
from kvcache.eviction.policies import FULL
from kvcache.eviction.zap import KeepSurrogate
from kvcache.pool import KvPool
from tests.engine.cpu.eviction.evicted_runs import SETUP, EvictedRun
from tests.support.factories import make_oracle, save_model

WINDOW, PROMPT, ANSWER = 70, 300, 150
COUNTS = [PROMPT, 1, 30, 33, 64, 22]
# Nothing but what no token can see is dropped: no policy reaches this.
ALL = 1 - 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers and two KV heads, the second of which has a window."""
    oracle = make_oracle("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    return save_model(tmp_path_factory.mktemp("window"), oracle)


def open_runner(folder: Path, setup: EvictionSetup = SETUP) -> tuple[CpuModelRunner, KvPool]:
    files = Checkpoint.resolve(str(folder))
    pool = KvPool(files.layout(), 24)
    pool.data.fill_(float("nan"))
    return CpuModelRunner.load(files, pool, files.config.context, eviction=setup), pool


def run(
    folder: Path, spec: KeepSpec, setup: EvictionSetup = SETUP
) -> tuple[EvictedRun, torch.Tensor, torch.Tensor]:
    """A run with eviction, its logits, and those without eviction."""
    runner, pool = open_runner(folder, setup)
    tokens = torch.randint(3, 300, (PROMPT + ANSWER,), generator=torch.Generator().manual_seed(5)).tolist()
    slabs = pool.take_slabs(pool.layout.num_chunks(len(tokens)), "plain")
    (plain,) = runner.run([StepWork(tokens, 0, slabs, "all")])
    evicted = EvictedRun(runner, pool, tokens, PROMPT, spec)
    return evicted, evicted.run(COUNTS), plain.clone()


def behind(kept: KeptRows, layer: int) -> list[list[int]]:
    """The kept positions of each head of a layer."""
    return [kept.head_positions(layer, head).tolist() for head in range(kept.layout.kv_heads)]


@pytest.mark.parametrize("boundary", [0, 64, 256])
def test_what_has_left_the_window_is_dropped_without_loss(folder: Path, boundary: int) -> None:
    evicted, logits, plain = run(folder, KeepSpec(ALL, boundary))
    assert [kept.length for kept in evicted.maps] == [PROMPT, PROMPT + 64, PROMPT + 128]
    for kept in evicted.maps:
        first = max(boundary, kept.length - WINDOW + 1)
        assert behind(kept, 0) == [list(range(boundary, kept.length))] * kept.layout.kv_heads
        assert behind(kept, 1) == [list(range(first, kept.length))] * kept.layout.kv_heads
    of_layers = [PROMPT - boundary, min(PROMPT - boundary, WINDOW - 1)]
    assert evicted.reports[0].sizes.head_frames == tuple(
        count_frames(rows) for rows in of_layers for _ in range(2)
    )
    assert (logits - plain).abs().max() < 1e-4


def test_policies_drop_more_and_windows_drop_what_policies_keep(folder: Path) -> None:
    evicted, logits, plain = run(folder, KeepSpec(0.4, 64))
    dropped = False
    for kept in evicted.maps:
        for layer, window in enumerate((0, WINDOW)):
            for positions in behind(kept, layer):
                assert positions and min(positions) > (kept.length - window if window else 63)
                dropped |= not window and len(positions) < kept.length - 64
    assert dropped and np.isfinite(logits.numpy()).all()
    assert (logits - plain)[:PROMPT].abs().max() < 1e-4 < (logits - plain)[PROMPT:].abs().max()


@pytest.mark.parametrize("window", [2, 40, 64])
def test_rows_that_have_left_a_small_window_have_no_score(tmp_path: Path, window: int) -> None:
    oracle = make_oracle("qwen2", use_sliding_window=True, sliding_window=window, max_window_layers=1)
    folder = save_model(tmp_path, oracle)
    model = identify_model(Checkpoint.resolve(str(folder)))
    shape = model.layers, model.kv_heads, 2 * model.head_dim + 3
    weights = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    surrogate = KeepSurrogate(model, weights, np.linspace(3, -3, 99, dtype=np.float32))
    spec = KeepSpec(0.5, 64, surrogate.rule)
    evicted, logits, _ = run(folder, spec, replace(SETUP, surrogate=surrogate))
    assert [kept.length for kept in evicted.maps] == [PROMPT, PROMPT + 64, PROMPT + 128]
    for kept in evicted.maps:
        for positions in behind(kept, 1):
            assert positions == list(range(kept.length - window + 1, kept.length))
    assert np.isfinite(logits.numpy()).all()


def test_a_map_is_loaded_only_with_the_rows_that_layers_see(folder: Path) -> None:
    evicted, _, _ = run(folder, KeepSpec(ALL, 64))
    kept, bag = evicted.maps[-1], evicted.slabs[2:]
    evicted.runner.load_kept("b", 64, kept.length, bag)
    heads = [kept.head_positions(layer, head) for layer, head in np.ndindex(kept.counts.shape)]
    heads[-1] = heads[-1][1:]
    full = np.full_like(kept.policies, FULL)
    lacking = KeptRows.from_heads(kept.layout, 64, kept.length, full, heads)
    data = lacking.encode()
    evicted.pool.slab_bytes(bag[0])[: len(data)] = memoryview(data)
    with pytest.raises(ValueError, match="has not the rows that its layer sees"):
        evicted.runner.load_kept("b", 64, kept.length, bag)
