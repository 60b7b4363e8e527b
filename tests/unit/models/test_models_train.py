"""Two steps of training on a toy, enough to see that it learns, saves and resumes."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models import data
from models.evaluate import nats
from models.llama import Llama, LlamaConfig, OutputLoss, load_model, save_model
from models.optim import orthogonalize
from models.tokenizer import load_tokenizer
from models.train import (
    PHASES,
    Corpus,
    Trainer,
    TrainingOptions,
    TrainingPhase,
    learning_rate_scale,
    phase_at,
)

TINY = Path(__file__).parents[3] / "models" / "tiny"
TOY = LlamaConfig(layers=1, hidden=32, heads=2, kv_heads=1, mlp=64)
SHORT = TrainingPhase(1.01, 48, 4, 0.5, 0.2, 0.2)


def make_trainer(folder: Path) -> Trainer:
    modules = [data.SourceModule("a.py", "def name(value):\n    return value\n" * 400)]
    corpus = Corpus(load_tokenizer(TINY), modules, [data.ChatExchange("What is a?", "A module.")])
    return Trainer(TrainingOptions(folder, folder / "toy.pt", 1.0, 0, 60.0, 1), TOY, corpus, [0, 5], 6)


def test_two_steps_lower_the_loss_and_survive_a_resume(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    ids, weights, kinds = trainer.corpus.batch(random.Random(0), SHORT)
    assert ids.shape == weights.shape == (4, 49)
    assert len(kinds) == 4
    before = trainer.model.loss(ids, weights)[0].item()
    for _ in range(2):
        trainer.step(SHORT, 1.0)
    after = trainer.model.loss(ids, weights)[0].item()
    assert after < before
    trainer.options = replace(trainer.options, minutes=1e9)
    trainer.save()
    resumed = make_trainer(tmp_path)
    resumed.resume()
    assert resumed.at.step == 2
    for one in (trainer, resumed):
        one.step(SHORT, 1.0)
    assert resumed.model.loss(ids, weights)[0].item() == pytest.approx(
        trainer.model.loss(ids, weights)[0].item(), rel=1e-3
    )


def test_saved_weights_load_with_their_shape(tmp_path: Path) -> None:
    model = Llama(TOY)
    save_model(model, tmp_path, [0, 5], 6)
    loaded = load_model(tmp_path)
    assert loaded.shape == TOY
    assert not list(tmp_path.glob("*.partial"))
    ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded(ids), model(ids), atol=2e-2, rtol=2e-2)


def test_output_loss_has_the_gradient_of_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden, table = torch.randn(40, 16), torch.randn(32, 16)
    targets, weights = torch.randint(0, 32, (40,)), torch.rand(40)
    ours = [hidden.clone().requires_grad_(), table.clone().requires_grad_()]
    loss, each = OutputLoss.apply(*ours, targets, weights)  # type: ignore[no-untyped-call]
    loss.backward()
    theirs = [hidden.clone().requires_grad_(), table.clone().requires_grad_()]
    expected = torch.nn.functional.cross_entropy(theirs[0] @ theirs[1].T, targets, reduction="none")
    mean = (expected * weights).sum() / weights.sum()
    mean.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(each, expected.detach(), atol=0.1, rtol=0.02)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, reference.grad, atol=2e-3, rtol=0.1)


def test_muon_updates_are_nearly_orthogonal() -> None:
    for shape in ((3, 16, 48), (3, 48, 16)):
        values = torch.linalg.svdvals(
            orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        )
        assert 0.5 < values.min() < values.max() < 1.5


def test_windows_count_every_token_once() -> None:
    class Uniform(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*ids.shape, 8)

    for length in (2, 9, 16, 17, 18, 33, 50):
        total = nats(Uniform(), [index % 8 for index in range(length)], 16, 8)
        assert total == pytest.approx((length - 1) * torch.log(torch.tensor(8.0)).item(), rel=1e-5)


def test_the_schedule_lengthens_rows_and_ends_low() -> None:
    assert [phase.tokens for phase in PHASES] == sorted(phase.tokens for phase in PHASES)
    assert (phase_at(0.0).tokens, phase_at(1.0).tokens) == (256, 2048)
    assert learning_rate_scale(0, 0.0) < learning_rate_scale(1000, 0.3) == 1.0
    assert learning_rate_scale(10000, 1.0) == 0.02
