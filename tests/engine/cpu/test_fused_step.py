"""A fused step gives the layered path's logits and KV to the bit, and takes only the steps that it can compute."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from diptych.kernels.addresses import kernel_address
from engine.cpu import fused_step, model_runner
from engine.cpu.decoder import CpuDecoder
from engine.cpu.fused_step import FusedStep, can_fuse, run_step
from engine.cpu.jit import jit
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.native_calls import call_kernel
from engine.cpu.weights.decoder_weights import SectionReader, read_weights
from engine.model.checkpoint import Checkpoint
from engine.model.memory_plan import fused_step_bytes
from engine.model.weights import WeightReader
from engine.step_work import MAX_FUSED_ROWS, SUMMED_ROWS, StepWork
from kvcache.codecs.codec_id import complete_codec_id, parse_codec_id
from kvcache.pool import KvPool
from tests.support.factories import make_folder, make_oracle, save_model

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200)
SEQUENCES, SLABS = 64, 5
# Widths that are no multiple of a vector, so that every kernel has a tail.
ODD = {"hidden_size": 104, "intermediate_size": 202, "head_dim": 26, "vocab_size": 301}


class Watched:
    """A runner that counts steps that were one call, and that can be told to take the layered path."""

    def __init__(self, runner: CpuModelRunner, pool: KvPool) -> None:
        self.runner, self.pool = runner, pool
        self.fused, self.num_whole = runner.fused_step, 0
        if self.fused is not None:
            whole = self.fused.step_arguments

            def count(*arguments: Any) -> Any:
                self.num_whole += 1
                return whole(*arguments)

            self.fused.step_arguments = count  # type: ignore[method-assign,assignment]

    def fill(self, shared: int = 0) -> list[StepWork]:
        """Sequences of all lengths, of which some share their first `shared` chunks; the next decode of each."""
        rng, works = random.Random(5), []
        prefix = self.pool.take_slabs(max(1, shared), "prefix")
        first = [rng.randrange(300) for _ in range(64 * shared)]
        if shared:
            self.runner.run([StepWork(first, 0, prefix, "none")])
        for index in range(SEQUENCES):
            length = LENGTHS[index % len(LENGTHS)]
            slabs = self.pool.take_slabs(SLABS - shared, f"s{index}")
            start = 64 * shared if index % 3 else 0
            slabs = [*prefix, *slabs] if start else slabs
            length = min(length, 64 * (SLABS - shared) - 1)
            tokens = [rng.randrange(300) for _ in range(length)]
            sink = first[0] if start else tokens[0]
            self.runner.run([StepWork(tokens, start, slabs, "none", sink)])
            works.append(StepWork([rng.randrange(300)], start + length, slabs, "last", sink))
        return works

    def run(self, works: list[StepWork], fuse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of a step, and all KV behind it; that of before is put back."""
        before = self.pool.data.clone()
        self.runner.fused_step = self.fused if fuse else None
        logits = torch.cat([one.flatten() for one in self.runner.run(works)])
        after = self.pool.data.clone()
        self.pool.data.copy_(before)
        return logits, after

    def check_bits(self, works: list[StepWork]) -> None:
        """Both paths give the same."""
        fused, layered = self.run(works, True), self.run(works, False)
        assert torch.equal(fused[0], layered[0]) and torch.equal(fused[1], layered[1]), len(works)


def watch(folder: Path, prepared: Path | None = None, codec: str = "") -> Watched:
    files = Checkpoint.resolve(str(folder))
    pool = KvPool(files.layout(codec=codec), SEQUENCES * SLABS + 8)
    pool.data.zero_()
    return Watched(CpuModelRunner.load(files, pool, files.config.context, prepared=prepared), pool)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "odd": {"family": "llama", **ODD},
    "norms of heads": {"family": "qwen3", **ODD},
    "biases": {"family": "qwen2"},
    "windows": {"family": "mistral", "sliding_window": 70},
}


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_the_layered_path(name: str, shared: int, tmp_path: Path) -> None:
    watched = watch(make_folder(tmp_path, **MODELS[name]))
    works, rng = watched.fill(shared), random.Random(6)
    for rows in (1, 2, 3, 4, 7, 8, 15, 16, 17, 33, SEQUENCES):
        chosen = rng.sample(works, rows)
        num_before = watched.num_whole
        watched.check_bits(chosen)
        assert watched.num_whole == num_before + 1


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "mapped", "int4"])
def test_weights_of_any_kind_give_the_same_bits(kind: str, tmp_path: Path) -> None:
    dtype = getattr(torch, kind) if "float" in kind else torch.float32
    folder = save_model(tmp_path / "model", make_oracle("llama"), dtype)
    if kind == "int4":
        files = Checkpoint.resolve(str(folder))
        with torch.no_grad(), WeightReader(files.weights) as weights:
            packed = read_weights(SectionReader(files.config, weights, layer_kind=kind))
        pool = KvPool(files.layout(), SEQUENCES * SLABS + 8)
        pool.data.zero_()
        watched = Watched(CpuModelRunner(CpuDecoder(files.config, packed, 512), pool, 512), pool)
    else:
        watched = watch(folder, tmp_path / "prepared" if kind == "mapped" else None)
    works = watched.fill()
    for rows in (1, 5, 20):
        watched.check_bits(works[:rows])
    assert watched.num_whole == 3


def test_logits_are_the_callers_own(tmp_path: Path) -> None:
    watched = watch(make_folder(tmp_path))
    works = watched.fill()[:2]
    first, second = torch.cat(watched.runner.run(works)), torch.cat(watched.runner.run(works))
    kept = second.clone()
    first.zero_()
    watched.runner.run(works[::-1])
    assert torch.equal(second, kept)


@pytest.mark.parametrize("codec", ["", "int8", "tq4", "fp8"])
def test_other_steps_are_fused_between_attentions(codec: str, tmp_path: Path) -> None:
    """Prompts beside decodes, rows without logits, all logits, sums of hidden states, and KV in codes."""
    known = str(complete_codec_id(parse_codec_id(codec), 2, 32)) if codec else ""
    watched = watch(make_folder(tmp_path, "qwen3", head_dim=32), codec=known)
    works = watched.fill()[:7]
    prompt, slabs = [7, 9, 8, 7, 1], watched.pool.take_slabs(1, "more")
    for more in (
        [StepWork(prompt, 0, slabs, "last")],
        [StepWork(prompt[:1], 0, slabs, "none")],
        [StepWork(prompt, 0, slabs, "all")],
        [StepWork(prompt, 0, slabs, SUMMED_ROWS)],
    ):
        watched.check_bits([*works, *more])
        watched.check_bits([*more])
    assert watched.num_whole == 0
    watched.check_bits(works)
    assert watched.num_whole == (not codec)
    done: list[int] = []
    watched.runner.fused_step = watched.fused
    watched.runner.run(works, done.append)
    assert done == ([1, 2] if codec else [2])


def test_what_stays_from_step_to_step_is_planned(tmp_path: Path) -> None:
    watched = watch(make_folder(tmp_path))
    fused = watched.fused
    assert fused is not None and MAX_FUSED_ROWS in LENGTHS
    watched.fill()
    held = sum(array.nbytes for array in fused._scratch.arrays)
    assert held == fused_step_bytes(watched.runner._decoder.config, tokens=2 * MAX_FUSED_ROWS)


def test_steps_with_many_rows_take_the_layered_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(make_folder(tmp_path))
    works = watched.fill()
    monkeypatch.setattr(model_runner, "MAX_FUSED_ROWS", 3)
    watched.runner.run(works[:4])
    assert watched.num_whole == 0
    watched.runner.run(works[:3])
    assert watched.num_whole == 1


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_several_threads_are_not_fused_and_several_windows_only_in_part(
    tmp_path: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = make_folder(tmp_path / "threads", hidden_size=512, intermediate_size=512)
    assert watch(large).fused is None
    torch.set_num_threads(1)
    mixed = {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}
    watched = watch(make_folder(tmp_path / "windows", "qwen2", **mixed))
    watched.check_bits(watched.fill()[:5])
    assert watched.num_whole == 0
    watched = watch(make_folder(tmp_path / "plain"))
    assert watched.fused is not None
    monkeypatch.setattr(fused_step, "add_rms_norm", lambda *arguments: None)
    assert not can_fuse(watched.runner._decoder), "Python's own functions have no address"


def test_one_version_of_the_step_serves_all(tmp_path: Path) -> None:
    """Another one would be compiled while the worker serves, and every request would wait for it."""
    watched = watch(make_folder(tmp_path, "qwen3"), tmp_path / "prepared")
    watched.runner.warm()
    compiled = list(run_step.signatures)  # type: ignore[attr-defined]
    works = watched.fill(2)
    for rows in (1, 2, 20, SEQUENCES):
        watched.runner.run(works[:rows])
    assert list(run_step.signatures) == compiled and watched.num_whole > 4  # type: ignore[attr-defined]


def test_an_error_of_a_kernel_reaches_its_caller() -> None:
    @jit
    def fails(x: Any) -> None:
        if x[0] > 0:
            raise ValueError("too large")

    @numba.njit
    def passes_on(address: int, x: Any) -> None:
        call_kernel(address, (x,))

    x = torch.zeros(1).numpy()
    address = kernel_address(fails, (x,))
    passes_on(address, x)
    x[0] = 1
    with pytest.raises(ValueError, match="too large"):
        passes_on(address, x)


def test_a_step_over_another_pool_is_not_one_call(tmp_path: Path) -> None:
    watched = watch(make_folder(tmp_path))
    assert isinstance(watched.fused, FusedStep)
    works = watched.fill()[:1]
    packed, attention = watched.runner._pack_works(works, [0], watched.runner._plan_sinks(works, [0]))
    assert watched.fused.fits_one_call(packed, attention)
    other = watch(make_folder(tmp_path / "other"))
    assert not watched.fused.fits_one_call(packed, other.runner._attentions[0].attention)
