"""What calibration of KV codecs needs from a model: keys before rotation, values, and squared gradients of both.

The model is the one of transformers, since our own kernels compute no gradients. Squared gradients are the diagonal of
the Fisher information (KVQuant, arXiv 2401.18079, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.calibration.fitting import LayerSample
from kvcache.codecs.page import NUM_SINKS

Progress = Callable[[int], None]


def capture_layers(
    model: nn.Module,
    sequences: Sequence[torch.Tensor],
    layers: range,
    progress: Progress | None = None,
) -> list[LayerSample]:
    """Runs the model forward and backward over each sequence, and collects what the layers made of it.

    First tokens are left out, since they are stored exactly. One number takes 16 bytes in all, so 32,768 tokens of a
    layer with 1,024 channels take 512 MiB: a large model is captured a few layers at a time.

    Args:
        model: a decoder of transformers with `model.layers[i].self_attn` and `k_proj`, `v_proj` in it, in float32.
        sequences: token ids, each [tokens], at least two.
        layers: which layers to capture.
        progress: called with the number of sequences that are done.

    Returns:
        One sample per layer of `layers`; arrays are [tokens of all sequences, KV heads · head_dim].

    Raises:
        ValueError: there is nothing to capture.
    """
    if not sequences or not layers or min(map(len, sequences)) <= NUM_SINKS:
        raise ValueError("calibration needs layers, and sequences of at least two tokens")
    places = [0, *np.cumsum([len(sequence) - NUM_SINKS for sequence in sequences]).tolist()]
    samples: list[LayerSample] = []
    for number, sequence in enumerate(sequences):
        rows = slice(places[number], places[number + 1])
        with _recorded(model, layers) as recorded:
            _run_backward(model, sequence)
        for index, layer in enumerate(layers):
            found = [_to_rows(recorded[layer, side]) for side in ("keys", "values")]
            if not number:
                samples.append(_empty_sample(places[-1], found[0][0].shape[1]))
            sample = samples[index]
            sample.keys[rows], sample.key_fisher[rows] = found[0]
            sample.values[rows], sample.value_fisher[rows] = found[1]
        if progress is not None:
            progress(number + 1)
    return samples


def _run_backward(model: nn.Module, sequence: torch.Tensor) -> None:
    """The language model's loss of one sequence, and its gradients. Weights get none."""
    ids = sequence.reshape(1, -1).to(next(model.parameters()).device)
    with torch.enable_grad():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@contextmanager
def _recorded(model: Any, layers: range) -> Iterator[dict[tuple[int, str], torch.Tensor]]:
    """Collects keys and values of the layers within, by layer and side, with their gradients once there are any."""
    recorded: dict[tuple[int, str], torch.Tensor] = {}

    def record(place: tuple[int, str]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            recorded[place] = output

        return hook

    def start_graph(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.requires_grad_()

    with ExitStack() as undo:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                undo.callback(parameter.requires_grad_, True)
        handles = [model.get_input_embeddings().register_forward_hook(start_graph)]
        for layer in layers:
            attention = model.model.layers[layer].self_attn
            handles.append(key_source(attention).register_forward_hook(record((layer, "keys"))))
            handles.append(attention.v_proj.register_forward_hook(record((layer, "values"))))
        for handle in handles:
            undo.callback(handle.remove)
        yield recorded


def key_source(attention: Any) -> nn.Module:
    """The module of an attention layer whose output is keys before rotation: their norm if there is one (Qwen3)."""
    module: nn.Module = getattr(attention, "k_norm", None) or attention.k_proj
    return module


def rotary_frequencies(model: Any) -> NDArray[np.float64]:
    """Radians per token of each rotary pair of a decoder of transformers."""
    frequencies: NDArray[np.float64] = model.model.rotary_emb.inv_freq.double().cpu().numpy()
    return frequencies


def _to_rows(output: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and squared gradients without first tokens, each [tokens, channels] float32."""
    if output.grad is None:
        raise RuntimeError("a layer got no gradient")
    rows = [x.detach()[0].flatten(1)[NUM_SINKS:].float() for x in (output, output.grad)]
    return rows[0].cpu().numpy(), rows[1].square().cpu().numpy()


def _empty_sample(tokens: int, channels: int) -> LayerSample:
    return LayerSample(*(np.empty((tokens, channels), np.float32) for _ in range(4)))
