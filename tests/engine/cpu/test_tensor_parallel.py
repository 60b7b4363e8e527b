"""Models that are spread over several ranks, in real processes, against the same model whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace

from diptych.errors import DiptychError, StartError
from engine.cpu.attention import CpuAttention
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.ranks.tensor_parallel import RankGroup, RankPlacement
from engine.model.checkpoint import Checkpoint
from engine.step_work import POOLED_ROWS, StepWork
from kvcache.pool import KvPool
from kvtransfer.shared_memory import SharedMemory
from tests.engine.cpu.spread_model import CONTEXT, SLABS, SpreadModel, orders, spread
from tests.support.factories import make_folder
from worker.ranks import RankProcesses

WAIT_S = 120.0


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def steps(runner: CpuModelRunner) -> list[torch.Tensor]:
    """Prompts in chunks, in company and alone, then decoding; every logit on the way."""
    a, b = random_tokens(150), random_tokens(70, seed=2)
    found = runner.run([StepWork(a[:64], 0, [3, 5, 1], "all"), StepWork(b[:3], 0, [2, 7], "last")])
    found += runner.run([StepWork(a[64:130], 64, [3, 5, 1], "last"), StepWork(b[3:64], 3, [2, 7], "none")])
    found += runner.run([StepWork(b[64:66], 64, [2, 7], "none")])
    pooled = [StepWork(b[:63], 0, [2, 7], kind) for kind in POOLED_ROWS]
    found += runner.run([pooled[0], StepWork(a[:64], 0, [3, 5, 1], "last"), *pooled[1:]])
    for n in range(4):
        found += runner.run(
            [
                StepWork([a[130 + n]], 130 + n, [3, 5, 1], "last"),
                StepWork([b[66 + n]], 66 + n, [2, 7], "last"),
            ]
        )
    return found


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4, "num_attention_heads": 8, "num_hidden_layers": 3, "head_dim": 12},
    "biases": {
        "num_key_value_heads": 4, "num_attention_heads": 4, "num_hidden_layers": 3, "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": True, "intermediate_size": 81, "vocab_size": 301,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_folder(tmp_path_factory.mktemp(name), **changes) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def whole(folders: dict[str, Path]) -> dict[str, tuple[list[torch.Tensor], KvPool]]:
    """All logits and the pool afterwards, of the models in one piece."""
    found = {}
    for name, folder in folders.items():
        files = Checkpoint.resolve(str(folder))
        pool = KvPool(files.layout(), SLABS)
        found[name] = (steps(CpuModelRunner.load(files, pool, CONTEXT)), pool)
    return found


def assert_company_does_not_matter(runner: CpuModelRunner) -> None:
    """A row is the same to the last bit whatever shares its step: partial sums are added in the order of the ranks."""
    works = [StepWork(random_tokens(20, seed), 0, [seed], "all") for seed in range(5)]
    for together, work in zip(runner.run(works), works, strict=True):
        (alone,) = runner.run([work])
        assert torch.equal(together, alone)


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for have, want in zip(found, wanted, strict=True):
        assert have.shape == want.shape
        assert not len(want) or (have - want).abs().max() <= 1e-4


def assert_whole(made: SpreadModel, logits: list[torch.Tensor], pool: KvPool) -> None:
    """All that the ranks compute together is what the model in one piece does."""
    assert_same(steps(made.runner), logits)
    for shard, part in made.pools:  # this process sees what the others have written
        mine = pool.data[:, slice(*shard.layers), slice(*shard.heads)]
        assert (part.data - mine).abs().max() <= 1e-4
    assert_company_does_not_matter(made.runner)
    assert made.lost.empty()


@pytest.mark.parametrize(("tp", "pp", "name"), [(4, 1, "biases"), (2, 2, "llama")])
def test_logits_and_kv_are_those_of_the_whole_model(
    tp: int,
    pp: int,
    name: str,
    folders: dict[str, Path],
    whole: dict[str, tuple[list[torch.Tensor], KvPool]],
) -> None:
    with spread(folders[name], tp, pp) as made:
        assert len(made.ranks.pids) == tp * pp - 1
        assert_whole(made, *whole[name])


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_rank_that_fails_in_a_step_fails_only_that_step(
    tp: int, pp: int, folders: dict[str, Path], whole: dict[str, tuple[list[torch.Tensor], KvPool]]
) -> None:
    with spread(folders["llama"], tp, pp, module="tests.engine.cpu.faulty_rank") as made:
        if pp == 2:  # its stage has one layer, so its fourth sum is the second of its second step
            made.runner.run([StepWork([5], 0, [0], "last")])
        with pytest.raises(MemoryError, match="rank 1: MemoryError: no memory for activations"):
            made.runner.run([StepWork([5, 6, 7], 0, [0], "all")])
        assert_same(steps(made.runner), whole["llama"][0])
        assert made.lost.empty()


def test_a_killed_rank_ends_the_worker(folders: dict[str, Path]) -> None:
    """At once, while nothing runs, and in one line that says why."""
    with spread(folders["llama"], 2, 1) as made:
        os.kill(made.ranks.pids[0], signal.SIGKILL)
        error = made.lost.get(timeout=WAIT_S)
        assert (error.what, error.why) == ("rank 1 of test has ended", "killed by SIGKILL")
        with pytest.raises(DiptychError, match="rank 1 of test has ended"):
            made.runner.run([StepWork([5], 0, [0], "last")])
        assert made.lost.empty()  # said once


def test_a_rank_that_hangs_ends_the_worker(folders: dict[str, Path]) -> None:
    with spread(folders["llama"], 2, 1, stall_s=2.0) as made:
        (pid,) = made.ranks.pids
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(DiptychError, match="an exchange failed"):
                made.runner.run([StepWork([5], 0, [0], "last")])
            assert made.lost.get(timeout=WAIT_S).why
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_rank_that_does_not_take_a_long_step_ends_the_worker(folders: dict[str, Path]) -> None:
    """A step of many long prompts is more than a socket takes at once."""
    with spread(folders["llama"], 2, 1, stall_s=1.0) as made:
        (pid,) = made.ranks.pids
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(DiptychError, match="rank 1 does not listen"):
                made.ranks.send_order(bytes(4 << 20))
            assert made.lost.get(timeout=WAIT_S).why
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_rank_that_cannot_load_reports_why(folders: dict[str, Path]) -> None:
    files = Checkpoint.resolve(str(folders["llama"]))
    first = orders(files, 2, 1)
    missing = dict.fromkeys(first.weights, "/nowhere/model.safetensors")
    second = replace(first, placement=RankPlacement(1, 2, 1), shard=files.split(2, 1)[1], weights=missing)
    memory = SharedMemory(SLABS * files.layout().shard_layout(second.shard).chunk_bytes)
    ranks = RankProcesses("test", lambda error: pytest.fail(str(error)))
    try:
        ranks.start_ranks([second], [memory])
        group = RankGroup(first.placement, first.config, first.shard, lambda error: pytest.fail(str(error)))
        with pytest.raises(StartError, match="/nowhere/model.safetensors cannot be read"):
            ranks.join_ranks(group)
    finally:
        ranks.close()
        memory.close()


def test_ranks_end_when_rank_0_closes(folders: dict[str, Path]) -> None:
    with spread(folders["llama"], 1, 2) as made:
        processes = [psutil.Process(pid) for pid in made.ranks.pids]
        listening = [one.laddr.ip for one in processes[0].net_connections() if one.status == "LISTEN"]
        assert set(listening) <= {"127.0.0.1"}  # nobody outside this machine can reach a rank
    assert not any(process.is_running() for process in processes)
    assert made.lost.empty()


# ---- two ranks that stay: last, since there is one group of ranks in a process at a time


@pytest.fixture(scope="module", params=[(2, 1, "llama"), (1, 2, "biases")], ids=["tp", "pp"])
def pair(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    whole: dict[str, tuple[list[torch.Tensor], KvPool]],
) -> Iterator[tuple[SpreadModel, list[torch.Tensor], KvPool]]:
    """Two ranks, for the tests that leave them whole; what they should compute, and the pool afterwards."""
    tp, pp, name = request.param
    with spread(folders[name], tp, pp) as made:
        assert len(made.ranks.pids) == 1
        yield made, *whole[name]


def test_logits_and_kv_of_two_ranks_are_those_of_the_whole_model(
    pair: tuple[SpreadModel, list[torch.Tensor], KvPool],
) -> None:
    assert_whole(*pair)


def test_rank_0_that_fails_in_a_step_leaves_the_others_in_step(
    pair: tuple[SpreadModel, list[torch.Tensor], KvPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, logits, _ = pair
    with monkeypatch.context() as patch:
        patch.setattr(CpuAttention, "decode", lambda *_: (_ for _ in ()).throw(MemoryError("here")))
        with pytest.raises(MemoryError, match="^here$"):
            made.runner.run([StepWork([5, 6, 7], 0, [0], "last"), StepWork([8], 0, [1], "last")])
    assert_same(steps(made.runner), logits)
    assert made.lost.empty()
