"""Pools with a codec: every reader attends to the decoded codes, and the first token stays exact.

The oracle is the model of transformers, whose keys and values go through pages of the NumPy codecs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import typeof

from engine.batching.sink_slots import SinkPlan, SinkSlots
from engine.calibration.kv_quality import CodingScheme, code_through_pages, coded_attention
from engine.cpu.coded.compiled_attention import CompiledAttention
from engine.cpu.coded.sink_table import SinkTable
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.ranks.tensor_parallel import SingleRank
from engine.model.checkpoint import Checkpoint
from engine.step_work import StepWork
from kvcache.codecs.calibration import Calibration
from kvcache.codecs.registry import build_codec
from kvcache.layout import KvLayout
from kvcache.pool import KvPool
from tests.engine.cpu.coded_runs import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    MOST_ROWS,
    SAME,
    SHAPE,
    SLABS,
    Pairs,
    calibrate,
    complete,
    typical_difference,
    with_factors,
)
from tests.support.factories import make_folder, make_oracle

# Codecs with factors (`@`) stand for those without where kernels differ in nothing else.
PLAIN_NAMES = ("fp16", "fp8", "int8", "int4@", "tq4", "tq4@", "tq-k8v4")
NAMES = (*PLAIN_NAMES, "nuq4-1%", "nuq4", "nuq3-1%", "nuq2-1%")
PROMPTS = [np.random.default_rng(seed).integers(3, 300, 150).tolist() for seed in range(3, 8)]
TOKENS = PROMPTS[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: make_folder(tmp_path_factory.mktemp(family), family, **SHAPE) for family in ("llama", "qwen3")
    }


@cache
def load(folder: Path, name: str, group: int = HEADS * HEAD_DIM) -> tuple[CpuModelRunner, Calibration]:
    files = Checkpoint.resolve(str(folder))
    calibration = with_factors(calibrate(files, group), name)
    layout = replace(files.layout(), codec=str(complete(name, calibration)) if name else "")
    return CpuModelRunner.load(files, KvPool(layout, SLABS), CONTEXT, calibration), calibration


@pytest.mark.parametrize(
    ("family", "name"),
    [*[("llama", name) for name in NAMES], ("qwen3", "int4@"), ("qwen3", "tq4"), ("qwen3", "nuq4-1%")],
)
def test_logits_are_those_of_simulated_quantisation(folders: dict[str, Path], family: str, name: str) -> None:
    runner, calibration = load(folders[family], name)
    codec_id = complete(name, calibration)
    codecs = []
    for layer in range(calibration.model.layers):
        first = build_codec(codec_id, HEAD_DIM, calibration, layer)
        heads = range(0, HEADS, first.shape.heads)
        codecs.append([build_codec(codec_id, HEAD_DIM, calibration, layer, head) for head in heads])
    scheme = CodingScheme(name, 0, codecs[0][0].codes_rotated_keys, code_through_pages(codecs, True))
    model, pairs, rounded, coded = make_oracle(family, **SHAPE), Pairs(), list[float](), list[float]()
    for tokens in PROMPTS:
        work = StepWork(tokens[:100], 0, [4, 5], "all")
        with coded_attention(model, scheme), torch.no_grad():
            expected = model(torch.tensor([tokens[:100]]), use_cache=False).logits[0]
        (found,), (exact,) = (one.run([work]) for one in (runner, load(folders[family], "")[0]))
        pairs.append((found, expected))
        rounded.append(float((found - expected).abs().mean()))
        coded.append(float((found - exact).abs().mean()))
    assert typical_difference(pairs) <= 1 - MOST_ROWS
    assert sum(rounded) <= 0.05 * sum(coded) + 1e-4 * len(PROMPTS)


@pytest.mark.parametrize("name", NAMES)
def test_where_a_prompt_is_cut_changes_no_bit(folders: dict[str, Path], name: str) -> None:
    """In chunks that cut pages, beside another sequence, over lengths at which sums would be grouped otherwise."""
    runner, _ = load(folders["llama"], name)
    prompt = np.random.default_rng(4).integers(3, 300, 240).tolist()
    (whole,) = runner.run([StepWork(prompt, 0, [4, 5, 6, 7], "all")])
    other = StepWork(prompt[7:80], 0, [9, 10], "none")
    pieces = []
    for start, end in [(0, 40), (40, 64), (64, 70), (70, 201), (201, 240)]:
        work = StepWork(prompt[start:end], start, [0, 1, 2, 3], "all", prompt[0])
        pieces.append(runner.run([other, work])[1])
    assert torch.equal(torch.cat(pieces), whole)
    pages = runner._pools[0].data
    assert torch.equal(pages[:3], pages[4:7])


@pytest.mark.parametrize("name", NAMES)
def test_single_tokens_see_what_the_whole_prompt_sees(folders: dict[str, Path], name: str) -> None:
    """Raw kernels add up in another order for single tokens; here that may flip a code."""
    (runner, _), (raw, _) = (load(folders["llama"], one) for one in (name, ""))
    pairs = Pairs()
    for tokens in PROMPTS:
        (whole,) = runner.run([StepWork(tokens, 0, [4, 5, 6], "all")])
        pieces = [runner.run([StepWork(tokens[:70], 0, [1, 2, 3], "all")])[0]]
        for at in range(70, 90):
            pieces.append(runner.run([StepWork(tokens[at : at + 1], at, [1, 2, 3], "all", tokens[0])])[0])
        pairs.append((torch.cat(pieces), whole[:90]))
        (exact,) = raw.run([StepWork(tokens, 0, [4, 5, 6], "all")])
        # Of each prompt: a flipped code is little beside what coding changes.
        apart, coded = (float((one - whole[:90]).abs().mean()) for one in (pairs[-1][0], exact[:90]))
        assert apart <= 0.1 * coded + 1e-4
    assert typical_difference(pairs) <= 1 - MOST_ROWS


def test_a_failed_pass_for_sinks_makes_all_exchanges_of_the_step(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks make them too; who skips one is out of step for ever."""
    files = Checkpoint.resolve(str(folders["llama"]))
    layout = replace(files.layout(), codec="fp16")
    runner = CpuModelRunner.load(files, KvPool(layout, 4), CONTEXT)
    steps: list[str] = []

    class Wire(SingleRank):
        def step(self, forward: Any, rows: int, wanted: int) -> Any:
            steps.append("sinks" if not wanted else "step")
            return forward()

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    runner._decoder.communicator = Wire()
    monkeypatch.setattr(runner._sinks, "write", fail)
    with pytest.raises(MemoryError, match="no room"):
        runner.run([StepWork([5, 6], 0, [0], "last")])
    assert steps == ["sinks", "step"]
    assert runner._sink_slots.plan([5]).missing  # it is computed again with the next step


def test_a_prefix_from_elsewhere_is_read_with_its_own_first_token(folders: dict[str, Path]) -> None:
    """Pages without their sink would be read wrongly: the coded first token is far from the exact one at 2 bits."""
    sender, calibration = load(folders["llama"], "nuq2-1%")
    files = Checkpoint.resolve(str(folders["llama"]))
    layout = replace(files.layout(), codec=str(complete("nuq2-1%", calibration)))
    pool = KvPool(layout, SLABS)
    receiver = CpuModelRunner.load(files, pool, CONTEXT, calibration)
    (whole,) = sender.run([StepWork(TOKENS[:100], 0, [4, 5], "last")])
    pool.data[[7, 8]] = sender._pools[0].data[[4, 5]]
    (same,) = receiver.run([StepWork(TOKENS[99:100], 99, [7, 8], "last", TOKENS[0])])
    assert (same - whole).abs().max() < SAME
    (wrong,) = receiver.run([StepWork(TOKENS[99:100], 99, [7, 8], "last", TOKENS[0] + 1)])
    assert (wrong - whole).abs().max() > 10 * SAME
    with pytest.raises(ValueError, match="first token"):
        receiver.run([StepWork(TOKENS[99:100], 99, [7, 8], "last")])


def test_a_number_that_is_not_finite_fails_its_own_request_only(folders: dict[str, Path]) -> None:
    runner, _ = load(folders["llama"], "int4@")
    weight = runner._decoder.embedding
    before = weight[299].clone()
    try:
        weight[299] = float("nan")
        with pytest.raises(ValueError, match="finite"):
            runner.run([StepWork([299, 5], 0, [0], "last")])
    finally:
        weight[299] = before
    (fine,) = runner.run([StepWork([299, 5], 0, [0], "last")])
    assert torch.isfinite(fine).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_runner_warms_up_with_every_codec_and_leaves_nothing(folders: dict[str, Path], name: str) -> None:
    runner, _ = load(folders["llama"], name)
    runner.warm()
    assert runner._pools[0].free == SLABS and runner._pools[0].used == 0


@pytest.mark.parametrize("name", ["nuq4-1%", "fp16", "int4", "tq4"])
def test_no_kernel_is_compiled_after_warming_up(folders: dict[str, Path], name: str) -> None:
    """Compiling takes seconds, in which no stream of the worker would move."""
    files = Checkpoint.resolve(str(folders["llama"]))
    calibration = calibrate(files)
    layout = replace(files.layout(), codec=str(complete(name, calibration)))
    runner = CpuModelRunner.load(files, KvPool(layout, SLABS), CONTEXT, calibration)
    runner.warm()
    pages = runner._attentions[0].attention
    assert isinstance(pages, CompiledAttention)
    made = pages._kernels
    kernels = (made.encode, made.decode, made.expand, made.shared, pages._span)

    def compiled() -> list[int]:
        return [len(kernel.signatures) for kernel in kernels]  # type: ignore[attr-defined]

    warm = compiled()
    assert min(warm) > 0
    for first in range(40):  # each sequence has another first token
        prompt = [first + 3, *TOKENS[:70]]
        runner.run([StepWork(prompt, 0, [1, 2], "last")])
        runner.run([StepWork([5], 71, [1, 2], "last", prompt[0])])
    runner.run([StepWork([5], 72, [1, 2], "last", prompt[0])] * 64)
    assert compiled() == warm


def test_ids_that_were_used_last_stay_in_the_table() -> None:
    slots = SinkSlots(3)
    first = slots.plan([7, 8, 7, 9])
    assert first == SinkPlan([0, 1, 0, 2], [(0, 7), (1, 8), (2, 9)])
    assert slots.plan([7]).missing == [(0, 7)]  # nothing was computed yet
    slots.keep(first)
    assert slots.plan([8, 7]) == SinkPlan([1, 0], [])
    third = slots.plan([5])
    assert third == SinkPlan([2], [(2, 5)])  # 9 made room
    slots.keep(third)
    assert slots.plan([9, 8, 5]) == SinkPlan([0, 1, 2], [(0, 9)])  # 7 made room
    with pytest.raises(ValueError, match="4 first tokens, and the table 3 slots"):
        slots.plan([9, 8, 7, 5])


def test_a_step_with_more_first_tokens_than_slots_computes_nothing(folders: dict[str, Path]) -> None:
    files = Checkpoint.resolve(str(folders["llama"]))
    layout = replace(files.layout(), codec="int4.g" + str(HEAD_DIM))
    runner = CpuModelRunner.load(files, KvPool(layout, SLABS), CONTEXT, sink_slots=2)
    works = [StepWork([first], 0, [slab], "last") for slab, first in enumerate((5, 6, 7))]
    with pytest.raises(ValueError, match="3 first tokens"):
        runner.run(works)
    assert [len(logits) for logits in runner.run(works[:2]) + runner.run(works[1:])] == [1] * 4


def test_the_table_takes_memory_for_what_was_written_and_is_never_moved() -> None:
    layout, slots = KvLayout(2, 4, 128, "float32", "fp16"), 32 << 10  # 256 MiB
    before = resident_bytes()
    table = SinkTable(layout, slots)
    kept = table.of_layer(1)
    rows = np.ones((2, 4, 128), np.float32)
    table.write([0, slots - 1], 1, rows, 2 * rows)
    assert resident_bytes() - before < 32 << 20
    assert table.of_layer(1).shape == (slots, 2, 4, 128) and (kept[slots - 1, 1] == 2).all()
    assert not table.of_layer(0)[slots - 1].any()


def test_kernels_are_those_of_other_ranks_on_a_rank_of_one_layer() -> None:
    kind: Callable[[Any], object] = typeof
    one, other = (kind(SinkTable(KvLayout(n, 2, 32, "float32", "fp16")).of_layer(0)) for n in (1, 2))
    assert one == other


def resident_bytes() -> int:
    """Memory that this process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))
