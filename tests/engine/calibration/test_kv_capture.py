"""Captured keys, values and gradients are those of the model, and its twin computes the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine.calibration.kv_capture import capture_layers, key_source
from models.twin import KEY_FACTOR, PAIR, make_twin

TINY = Path(__file__).parents[3] / "models" / "tiny"


def load_tiny() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    return model.eval()


def draw_sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(300, 4096, (tokens,), generator=generator) for tokens in (12, 20)]


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_tiny()


def test_samples_are_what_the_layers_computed(tiny: Any) -> None:
    sequences, done = draw_sequences(), list[int]()
    samples = capture_layers(tiny, sequences, range(2, 4), done.append)
    assert len(samples) == 2 and done == [1, 2]
    assert all(array.shape == (30, 128) for array in (samples[0].keys, samples[1].value_fisher))
    with torch.no_grad():
        hidden = tiny(sequences[1][None], output_hidden_states=True).hidden_states[2]
        layer = tiny.model.layers[2]
        values = layer.self_attn.v_proj(layer.input_layernorm(hidden))[0, 1:].numpy()
    assert np.allclose(samples[0].values[11:], values, atol=1e-5)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in tiny.parameters())
    assert not tiny.model.layers[2].self_attn.v_proj._forward_hooks


def test_fisher_is_the_squared_gradient_of_the_loss(tiny: Any) -> None:
    """A small push on one value changes the loss by its gradient."""
    (sequence, _), row, channel = draw_sequences(), 4, 9
    (sample,) = capture_layers(tiny, [sequence], range(3, 4))
    strongest = np.unravel_index(sample.value_fisher.argmax(), sample.value_fisher.shape)
    row, channel = int(strongest[0]), int(strongest[1])
    losses = []
    for push in (-0.02, 0.02):

        def shift(module: Any, inputs: Any, output: torch.Tensor, push: float = push) -> torch.Tensor:
            moved = output.clone()
            moved[0, row + 1, channel] += push
            return moved

        handle = tiny.model.layers[3].self_attn.v_proj.register_forward_hook(shift)
        with torch.no_grad():
            losses.append(tiny(input_ids=sequence[None], labels=sequence[None]).loss.item())
        handle.remove()
    assert ((losses[1] - losses[0]) / 0.04) ** 2 == pytest.approx(
        sample.value_fisher[row, channel].item(), rel=0.05
    )


def test_keys_of_a_model_with_norms_are_taken_behind_them() -> None:
    torch.manual_seed(0)
    config: Any = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config)
    assert key_source(model.model.layers[0].self_attn) is model.model.layers[0].self_attn.k_norm
    (sample,) = capture_layers(model, [torch.arange(10)], range(1))
    assert sample.keys.shape == (9, 32)
    assert np.allclose(np.square(sample.keys.reshape(-1, 16)).mean(axis=-1), 1, atol=1e-3)


def test_nothing_to_capture_is_refused(tiny: Any) -> None:
    for sequences, layers in (([], range(1)), (draw_sequences(), range(0)), ([torch.arange(1)], range(1))):
        with pytest.raises(ValueError, match="at least two tokens"):
            capture_layers(tiny, sequences, layers)


def test_the_twin_computes_the_same_to_the_bit(tiny: Any) -> None:
    twin, ids = load_tiny(), draw_sequences()[1][None]
    make_twin(twin, head_dim=32)
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, tiny(ids).logits)
    keys, wide = (capture_layers(model, [ids[0]], range(1))[0].keys for model in (tiny, twin))
    assert np.array_equal(wide.reshape(-1, 4, 32)[..., PAIR], keys.reshape(-1, 4, 32)[..., PAIR] * KEY_FACTOR)
    with pytest.raises(ValueError, match="float32"):
        make_twin(load_tiny().half(), head_dim=32)
