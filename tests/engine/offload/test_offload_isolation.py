"""A line of a block that fails by itself fails alone: the others have the answers that they have without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diptych.messages import Failed
from engine.model.checkpoint import Checkpoint
from engine.offload.policy import BlockPolicy
from engine.sequence import Sequence
from tests.engine.offload.offload_runs import BlockRun, ask, gather, run_resident
from tests.support.factories import make_oracle, save_model

# A token whose embedding is not finite.
BAD_TOKEN = 270


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    oracle = make_oracle(head_dim=16, num_hidden_layers=3)
    with torch.no_grad():
        oracle.model.embed_tokens.weight[BAD_TOKEN] = float("nan")
        # No answer has it.
        oracle.lm_head.weight[BAD_TOKEN] = 0.0
    return Checkpoint.resolve(str(save_model(tmp_path_factory.mktemp("model"), oracle)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


def sound_requests() -> list[Sequence]:
    """Requests with answers; the first one's prompt is scored, too."""
    return [ask(i, 20 + 17 * i, temperature=0.0, prompt_logprobs=0 if not i else None) for i in range(6)]


def bad_requests() -> list[Sequence]:
    """Requests with the bad token: first, in the middle of a long prompt, in one that is only scored, and alone."""
    asked = [ask(10, 30), ask(11, 150), ask(12, 40, prompt_logprobs=0, max_tokens=0), ask(13, 1)]
    for seq, place in zip(asked, (0, 70, 20, 0), strict=True):
        seq.prompt[place] = BAD_TOKEN
    return asked


@pytest.mark.parametrize("codec", ["", "int4"])
def test_a_line_that_is_not_finite_fails_alone(codec: str, model: Checkpoint, prepared: Path) -> None:
    expected = run_resident(model, sound_requests(), codec)
    policy = BlockPolicy(
        rows=3, batches=2, prompt_tokens=100, output_tokens=100, kv_in_memory=0.5, kv_codec=codec,
        step_tokens=64,
    )  # fmt: skip
    run = BlockRun(model, policy, prepared)
    bad, good = bad_requests(), sound_requests()
    for seq in [bad[0], good[0], bad[1], *good[1:], *bad[2:]]:
        run.engine.add(seq, 0.0)
    while run.engine.has_work:
        run.step()
    run.runner.close()
    assert sorted(one.request for one in run.failures()) == ["r10", "r11", "r12", "r13"]
    assert all(one.code == "internal_error" and "finite" in one.message for one in run.failures())
    assert gather([one for one in run.outputs if not isinstance(one.message, Failed)]) == expected
    assert run.engine.failed_steps == 0
    run.schedule.check_books()
