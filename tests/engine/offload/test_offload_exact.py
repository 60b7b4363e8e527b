"""Where a block's weights, KV and activations lie, and whether reading overlaps, changes no answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.model.checkpoint import Checkpoint
from engine.offload.policy import BlockPolicy
from engine.sequence import Sequence
from tests.engine.offload.offload_runs import Answer, BlockRun, ask, run_resident, some_requests
from tests.support.factories import make_folder

LOGPROB_ERROR = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.resolve(str(make_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=4)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="module")
def expected(model: Checkpoint) -> dict[str, Answer]:
    return run_resident(model, some_requests())


def random_policy(seed: int, overlap: bool) -> BlockPolicy:
    """Shares between nothing and all of each kind, and blocks of several shapes, some too small for all requests."""
    draw = random.Random(seed)
    return BlockPolicy(
        rows=draw.choice((1, 2, 4)),
        batches=draw.choice((1, 2, 3)),
        prompt_tokens=draw.choice((80, 160)),
        output_tokens=160,
        weights_in_memory=draw.choice((0.0, 0.25, 0.5, 1.0)),
        kv_in_memory=draw.choice((0.0, 0.4, 1.0)),
        hidden_in_memory=draw.choice((0.0, 0.5, 1.0)),
        overlap=overlap,
        step_tokens=draw.choice((24, 96, 512)),
    )


def assert_equal(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert found.keys() == expected.keys()
    for name, (tokens, scores, prompt, finish) in expected.items():
        assert found[name][0] == tokens, name
        assert found[name][3] == finish, name
        assert found[name][1] == pytest.approx(scores, abs=LOGPROB_ERROR), name
        assert found[name][2] == pytest.approx(prompt, abs=LOGPROB_ERROR), name


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_the_resident_engine(
    seed: int, overlap: bool, model: Checkpoint, expected: dict[str, Answer], prepared: Path
) -> None:
    run = BlockRun(model, random_policy(seed, overlap), prepared)
    assert_equal(run.run(some_requests()), expected)
    run.runner.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_answers_that_outgrow_their_rooms_are_the_same(
    share: float, model: Checkpoint, prepared: Path
) -> None:
    def long_requests() -> list[Sequence]:
        kinds: tuple[dict[str, Any], ...] = ({"temperature": 0.0, "prompt_logprobs": 0}, {"temperature": 0.9})
        return [ask(i, 50, max_tokens=60, stop_token_ids=(), **kinds[i % 2]) for i in range(6)]

    policy = BlockPolicy(rows=4, batches=1, prompt_tokens=56, output_tokens=8, kv_in_memory=share)
    run = BlockRun(model, policy, prepared)
    assert_equal(run.run(long_requests()), run_resident(model, long_requests()))
    assert run.schedule.preemptions > 0 == run.engine.failed_steps
    assert run.engine.stats.bulk_preemptions == run.schedule.preemptions
    run.runner.close()


@pytest.mark.parametrize("codec", ["int4", "int8", "tq4"])
def test_coded_kv_is_that_of_the_resident_engine(codec: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", head_dim=16, num_hidden_layers=3)
    model = Checkpoint.resolve(str(folder))
    expected = run_resident(model, some_requests(), codec)
    for share in (0.0, 1.0):
        policy = BlockPolicy(
            rows=3, batches=2, prompt_tokens=160, output_tokens=64, kv_in_memory=share, kv_codec=codec
        )
        run = BlockRun(model, policy, tmp_path / "files")
        assert_equal(run.run(some_requests()), expected)
        run.runner.close()
