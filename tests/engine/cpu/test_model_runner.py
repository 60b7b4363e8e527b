"""The runner's contract: what it returns, refuses and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diptych.errors import ModelError
from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.step_work import StepWork
from kvcache.layout import KvLayout
from kvcache.pool import KvPool
from tests.support.factories import make_folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.resolve(str(make_folder(tmp_path_factory.mktemp("runner"))))


@pytest.fixture
def runner(files: Checkpoint) -> CpuModelRunner:
    return CpuModelRunner.load(files, KvPool(files.layout(), 8), 256)


def test_rows_are_as_asked_for(runner: CpuModelRunner) -> None:
    works = [
        StepWork([5, 6, 7], 0, [0], "all"),
        StepWork([5, 6, 7], 0, [1], "none"),
        StepWork([8], 0, [2], "last"),
        StepWork([5, 6, 7], 0, [3], "last"),
    ]
    every, none, single, last = runner.run(works)
    assert [x.shape for x in (every, none, single, last)] == [(3, 300), (0, 300), (1, 300), (1, 300)]
    assert all(x.dtype == torch.float32 for x in (every, none, single, last))
    assert torch.equal(every[2], last[0])
    assert torch.equal(runner.run([works[2]])[0], single)
    assert runner.run([works[1]])[0].shape == (0, 300)
    assert runner.run([]) == []
    last[0, 0] = 1.0  # the caller may change what it got


def test_a_step_writes_its_own_rows_and_no_other(files: Checkpoint) -> None:
    pool = KvPool(files.layout(), 4)
    runner = CpuModelRunner.load(files, pool, 256)
    pool.data.fill_(7.0)
    runner.run([StepWork([5] * 66, 0, [2, 0], "none"), StepWork([9], 0, [3], "none")])
    assert (pool.data[2] != 7).all()
    assert (pool.data[0, :, :, :, :2] != 7).all() and (pool.data[0, :, :, :, 2:] == 7).all()
    assert (pool.data[3, :, :, :, :1] != 7).all() and (pool.data[3, :, :, :, 1:] == 7).all()
    assert (pool.data[1] == 7).all()


def test_layers_are_reported_when_their_kv_is_complete(files: Checkpoint) -> None:
    pool = KvPool(files.layout(), 4)
    runner = CpuModelRunner.load(files, pool, 256)
    works = [StepWork(list(range(3, 103)), 0, [0, 1], "none"), StepWork([9] * 40, 0, [2], "last")]
    seen: dict[int, torch.Tensor] = {}

    def done(layers: int) -> None:
        seen[layers] = pool.data.clone()

    _, first = runner.run(works, done)
    assert list(seen) == list(range(1, pool.layout.layers + 1))
    for layers, then in seen.items():
        assert torch.equal(then[:, :layers], pool.data[:, :layers])
        assert not then[:, layers:].any()
    _, second = runner.run(works)
    assert torch.equal(first, second)


def test_kv_moved_to_other_slabs_decodes_the_same(files: Checkpoint) -> None:
    here, there = KvPool(files.layout(), 4), KvPool(files.layout(), 4)
    first, second = CpuModelRunner.load(files, here, 256), CpuModelRunner.load(files, there, 256)
    first.run([StepWork(list(range(3, 103)), 0, [0, 1], "none")])
    for source, target in [(0, 3), (1, 2)]:
        there.slab_bytes(target)[:] = here.slab_bytes(source)
    (expected,), (found,) = (
        side.run([StepWork([9], 100, slabs, "last")]) for side, slabs in ((first, [0, 1]), (second, [3, 2]))
    )
    assert torch.equal(expected, found)


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (StepWork([], 0, [0], "last"), "positions"),
        (StepWork([5], 256, [0, 1, 2, 3, 4], "last"), "positions"),
        (StepWork([5], -1, [0], "last"), "positions"),
        (StepWork([5] * 65, 0, [0], "last"), "do not fit"),
        (StepWork([5], 64, [0], "last"), "do not fit"),
        (StepWork([5], 0, [0], "first"), "logits"),
        (StepWork([5], 0, [8], "last"), "not all in a pool"),
        (StepWork([5], 0, [-1], "last"), "not all in a pool"),
        (StepWork([300], 0, [0], "last"), "token ids"),
        (StepWork([-1], 0, [0], "last"), "token ids"),
    ],
)
def test_impossible_work_is_refused_before_anything_runs(
    runner: CpuModelRunner, work: StepWork, why: str
) -> None:
    runner._pools[0].data.fill_(7.0)
    with pytest.raises(ValueError, match=why):
        runner.run([StepWork([5, 6], 0, [7], "last"), work])
    assert (runner._pools[0].data == 7).all()


def test_warm_leaves_the_pool_as_it_was(runner: CpuModelRunner) -> None:
    runner.warm()
    assert runner._pools[0].used == 0
    runner._pools[0].check_books()


@pytest.mark.parametrize(
    "layout", [KvLayout(2, 2, 12, "float16"), KvLayout(2, 4, 12, "float32"), KvLayout(3, 2, 12, "float32")]
)
def test_a_pool_of_another_layout_is_refused(files: Checkpoint, layout: KvLayout) -> None:
    with pytest.raises(ModelError) as refused:
        CpuModelRunner.load(files, KvPool(layout, 2), 256)
    assert "pool:" in refused.value.why and "model:" in refused.value.why


def test_weights_that_do_not_match_the_config_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 80', '"intermediate_size": 96'))
    files = Checkpoint.resolve(str(tmp_path))
    with pytest.raises(ModelError, match="shape"):
        CpuModelRunner.load(files, KvPool(files.layout(), 2), 256)
