"""The emulated device: attention in torch against the plain reference, and its runner against the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cpu.model_runner import CpuModelRunner
from engine.gpu.emulated.attention import TorchAttention
from engine.gpu.emulated.codec_pages import CodecPages
from engine.gpu.model_runner import GpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.model.device_step import list_graph_rows
from engine.model.weights import WeightReader
from engine.step_work import StepWork
from kvcache.codecs.calibration import Calibration
from kvcache.layout import KvLayout
from kvcache.pool import KvPool
from tests.engine.cpu.coded_pages import make_codec
from tests.engine.cpu.coded_runs import CONTEXT, SHAPE, Pairs, calibrate, complete, typical_difference
from tests.engine.gpu.attention_bench import EDGES, SPANS, TREES, AttentionBench
from tests.support.factories import make_folder, make_oracle, save_model

TINY = Path(__file__).parents[3] / "models" / "tiny"


@pytest.mark.parametrize("width", [32, 80, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_decode_matches_reference(width: int, group: int) -> None:
    AttentionBench(TorchAttention, width, 2, group, [*EDGES, 200]).check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode_in_half_precision(dtype: str) -> None:
    AttentionBench(TorchAttention, 64, 2, 4, [1, 64, 129, 700], {3: (2, 2)}, dtype).check()


@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 128, 1000])
def test_decode_honours_the_window(window: int) -> None:
    AttentionBench(TorchAttention, 32, 1, 2, [1, 64, 65, 129, 300, 310], {5: (4, 4)}).check(window)


@pytest.mark.parametrize("name", TREES)
def test_shared_prefixes_stay_exact(name: str) -> None:
    lengths, shared = TREES[name]
    AttentionBench(TorchAttention, 32, 1, 3, list(lengths), shared).check()


def test_rows_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.gpu.emulated.attention.BLOCK_NUMBERS", 1 << 14)
    AttentionBench(TorchAttention, 32, 1, 2, [1, 300, 65, 200, 500]).check()


@pytest.mark.parametrize("window", [0, 1, 50, 64])
@pytest.mark.parametrize(("width", "group"), [(32, 3), (128, 4)])
def test_prefill_matches_reference(width: int, group: int, window: int) -> None:
    lengths = [start + count for start, count in SPANS]
    AttentionBench(TorchAttention, width, 2, group, lengths).check_prefill(SPANS, window)


@pytest.mark.parametrize("normed", [False, True])
def test_write_rotates_and_stores_only_its_own_rows(normed: bool) -> None:
    AttentionBench(TorchAttention, 80, 2, 2, [130]).check_write(normed)


def test_a_pool_of_another_type_is_refused() -> None:
    layout = KvLayout(1, 1, 32, "float16")
    with pytest.raises(ValueError, match="float16"):
        TorchAttention(layout, torch.zeros(1, *layout.chunk_shape), 1)


@pytest.mark.parametrize(
    "name", ["nuq4-1%", "nuq3-1%", "nuq2", "int8", "int4", "tq4", "tq-k8v4", "fp16", "bf16"]
)
def test_pages_are_those_of_the_codec(name: str) -> None:
    """Tokens of several pages that are coded and expanded together, and rows that changed in between."""
    codec, rng = make_codec(name, 2, 16), np.random.default_rng(3)
    pages = 2 // codec.shape.heads
    layout = KvLayout(1, 2, 16, "float32", str(codec.codec_id))
    data = torch.full((3, 1, pages, layout.page_bytes), 255, dtype=torch.uint8)
    expected = data.numpy().copy()
    ours = CodecPages(layout, data, ((codec,) * pages,)).layers[0]
    counts = np.array([64, 9, 30])
    for _ in range(2):
        slabs, rows = np.repeat(np.arange(3), counts), np.concatenate([np.arange(count) for count in counts])
        order = rng.permutation(len(rows))
        slabs, rows = slabs[order], rows[order]
        keys, values = rng.standard_normal((2, len(rows), 2, 16), np.float32)
        ours.encode(slabs, rows, keys, values)
        for slab, row, key, value in zip(slabs, rows, keys, values, strict=True):
            for page in range(pages):
                part = slice(page * codec.shape.heads, (page + 1) * codec.shape.heads)
                codec.encode_rows(key[None, part], value[None, part], expected[slab, 0, page], row)
        assert np.array_equal(data.numpy(), expected)
        found = ours.expand(np.array([2, 0, 1]), counts[[2, 0, 1]])
        for n, place in enumerate((2, 0, 1)):
            for page in range(pages):
                part = slice(page * codec.shape.heads, (page + 1) * codec.shape.heads)
                for side, numbers in enumerate(codec.expand_page(expected[place, 0, page], counts[place])):
                    assert np.array_equal(found[n, part, side, : counts[place]], numbers.swapaxes(0, 1))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 50}),
    "qwen3-tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


def open_device(
    path: Path,
    dtype: str = "float32",
    codec: str = "",
    calibration: Calibration | None = None,
    slabs: int = 16,
) -> GpuModelRunner:
    """The runner on the emulated device; whatever is read before it was written shows."""
    files = Checkpoint.resolve(str(path))
    with WeightReader(files.weights) as weights:
        runner = GpuModelRunner.load(
            files.config, weights, slabs, files.config.context, "cpu", dtype, codec=codec, calibration=calibration,
            emulated=True,
        )  # fmt: skip
    runner.data.fill_(255 if codec else float("nan"))
    return runner


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def steps(seed: int = 1) -> list[list[StepWork]]:
    """Four sequences, of which two share two chunks and one the first; prompts in pieces beside decodes."""
    prompt = random_tokens(140, seed)
    first = prompt[0]
    return [
        [StepWork(prompt[:130], 0, [0, 1, 2], "last"), StepWork(prompt[:20], 0, [3], "all")],
        [StepWork([5], 130, [0, 1, 2], "last", first), StepWork([6, 7, 8], 128, [0, 1, 4], "last", first),
         StepWork([9], 20, [3], "last", first)],
        *([StepWork([7 + n], 131 + n, [0, 1, 2], "last", first), StepWork([8 + n], 131 + n, [0, 1, 4], "last", first),
           StepWork([4 + n], 21 + n, [3], "last", first)] for n in range(3)),
        [StepWork([3], 134, [0, 1, 2], "last", first), StepWork([6], 64, [0, 5], "last", first),
         StepWork(prompt[:1], 0, [6], "last"), StepWork([3], 134, [0, 1, 4], "none", first)],
    ]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    path = save_model(tmp_path, make_oracle(family, **changes))
    device, files = open_device(path), Checkpoint.resolve(str(path))
    cpu = CpuModelRunner.load(files, KvPool(files.layout(), 16), files.config.context)
    for works in steps():
        for found, expected in zip(device.run(works), cpu.run(works), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5)
    assert device.guessed == 3


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    path = save_model(tmp_path, make_oracle("llama"))
    exact, half = open_device(path), open_device(path, "bfloat16")
    for works in steps():
        for found, expected in zip(half.run(works), exact.run(works), strict=True):
            assert (found - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("name", ["nuq4-1%", "nuq3-1%", "tq4", "int4", "bf16"])
def test_coded_steps_equal_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path, "llama", **SHAPE)
    files = Checkpoint.resolve(str(path))
    calibration = calibrate(files)
    codec, pairs = str(complete(name, calibration)), Pairs()
    for seed in (1, 2, 3):
        device = open_device(path, codec=codec, calibration=calibration)
        pool = KvPool(replace(files.layout(), codec=codec), 16)
        cpu = CpuModelRunner.load(files, pool, CONTEXT, calibration)
        pool.data[:] = 255
        found, expected = [], []
        for works in steps(seed):
            found += device.run(works)
            expected += cpu.run(works)
        pairs.append((torch.cat(found), torch.cat(expected)))
        assert (device.data.numpy() == pool.data.numpy()).mean() >= 0.995
        assert (device.data[7:] == 255).all()
    # Numbers on the edge of a code may move to the next one, since sums round otherwise.
    assert typical_difference(pairs) <= 0.1


def test_numbers_that_are_not_finite_fail_their_step_alone(tmp_path: Path) -> None:
    path = make_folder(tmp_path, "llama", **SHAPE)
    device = open_device(path, codec=str(complete("int8", calibrate(Checkpoint.resolve(str(path))))))
    weight = device._decoder.layers[0].qkv.weight
    kept = weight.clone()
    weight[-1] = float("inf")
    with pytest.raises(ValueError, match="finite"):
        device.run([StepWork([5, 6], 0, [7], "last")])
    weight.copy_(kept)
    assert torch.isfinite(device.run([StepWork([5, 6], 0, [7], "last")])[0]).all()


def test_greedy_tokens_of_the_embedded_model_are_those_of_the_cpu() -> None:
    """Sequences of many lengths, a third of which begin alike; where the CPU's two best tokens are nearly equal, either
    is right."""
    device, files = open_device(TINY, slabs=120), Checkpoint.resolve(str(TINY))
    cpu = CpuModelRunner.load(files, KvPool(files.layout(), 120), files.config.context)
    prefix, slabs, prompts = random_tokens(128, 5), iter(range(120)), []
    shared = [next(slabs), next(slabs)]
    for n in range(18):
        own = random_tokens(1 + 17 * n, n)
        held = shared if n % 3 == 0 else []
        size = -(-(len(own) + 32) // 64)
        prompts.append((prefix[: 64 * len(held)] + own, held + [next(slabs) for _ in range(size)]))
    rows: list[list[int]] = [[] for _ in prompts]
    works = [StepWork(tokens, 0, row, "last") for tokens, row in prompts]
    unexplained = 0
    for _ in range(32):
        for row, found, expected in zip(rows, device.run(works), cpu.run(works), strict=True):
            best = expected[0].log_softmax(-1).topk(2).values
            near = float(best[0] - best[1]) < 1e-3
            unexplained += int(found.argmax()) != int(expected.argmax()) and not near
            row.append(int(expected.argmax()))
        works = [
            StepWork(row[-1:], len(tokens) + len(row) - 1, held, "last")
            for row, (tokens, held) in zip(rows, prompts, strict=True)
        ]
    assert unexplained == 0
    assert len({tuple(row) for row in rows}) > 9


def test_the_next_step_leaves_earlier_logits_as_they_are(tmp_path: Path) -> None:
    """A failed step is repeated work by work: each one's logits must outlive the replay of the same graph."""
    device = open_device(save_model(tmp_path, make_oracle("llama")))
    works = [StepWork([5], 0, [0], "last"), StepWork([6], 0, [1], "last")]
    together = [logits.clone() for logits in device.run(works)]
    alone = [device.run([work])[0] for work in works]
    for found, expected in zip(alone, together, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5)
    # The sampler reads the logits of a step as one array.
    first, second = device.run(works)
    assert second.data_ptr() - first.data_ptr() == first.nbytes


def test_all_graphs_are_captured_before_the_first_step(tmp_path: Path) -> None:
    device = open_device(save_model(tmp_path, make_oracle("llama")))
    assert list_graph_rows(70) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96]
    device.warm(list_graph_rows(14))
    assert torch.isnan(device.data).all()
    captured = set(device._graphs)
    for rows in range(1, 15):
        device.run([StepWork([5], 0, [slab], "last") for slab in range(rows)])
    assert set(device._graphs) == captured
    assert {len(graph._logits) for graph in device._graphs.values()} == {1, 2, 4, 8, 16}
