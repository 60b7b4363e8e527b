"""What a KV codec costs in perplexity: simulated quantisation inside the model of transformers.

Every key and value that attention reads, prompts and the token itself included, has gone through `encode_rows` and
`expand_page` of `kvcache/codecs/`. Windows of text begin at position 0, whose KV is exact (sinks).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diptych.chunks import CHUNK_TOKENS
from engine.calibration.kv_capture import key_source
from kvcache.codecs.calibration import Calibration, CodecQuality, MeasuredQuality
from kvcache.codecs.codec_id import CALIBRATED, CODE_BITS, CodecId, complete_codec_id, parse_codec_id
from kvcache.codecs.page import Codec, Floats, restore_sink
from kvcache.codecs.registry import build_codec
from kvcache.codecs.storage import mean_bits

NUM_RESAMPLES = 2000
# The name under which transformers knows attention over coded keys and values.
CODED_ATTENTION = "diptych_coded"

# (layer, keys, values), both [tokens, KV heads, head_dim] -> what a reader sees of them
CodeRows = Callable[[int, Floats, Floats], tuple[Floats, Floats]]
Losses = NDArray[np.float64]
# Token ids [tokens] -> logits [tokens, vocabulary]
Forward = Callable[[torch.Tensor], torch.Tensor]
# An attention function of transformers: (module, query, key, value, mask, **options) -> (output, weights)
Attend = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class CodingScheme:
    """How keys and values are coded, and how many bits a stored number takes on average."""

    name: str
    bits: float
    rotated_keys: bool
    code: CodeRows


def code_through_pages(codecs: Sequence[Sequence[Codec]], exact_sink: bool) -> CodeRows:
    """Rows through pages of real codecs.

    Args:
        codecs: for each layer, codecs that cover all KV heads, one after the other.
        exact_sink: whether the first token stays exact.
    """

    def code(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        seen = np.empty_like(keys), np.empty_like(values)
        for start in range(0, len(keys), CHUNK_TOKENS):
            head = 0
            for codec in codecs[layer]:
                place = (slice(start, start + CHUNK_TOKENS), slice(head, head + codec.shape.heads))
                exact, page = (keys[place], values[place]), np.zeros(codec.page_bytes, np.uint8)
                codec.encode_rows(*exact, page)
                expanded = codec.expand_page(page, len(exact[0]))
                if exact_sink:
                    restore_sink(*expanded, start, (exact[0][0], exact[1][0]))
                seen[0][place], seen[1][place] = expanded
                head += codec.shape.heads
        return seen

    return code


def build_scheme(
    codec_id: CodecId, calibration: Calibration, name: str = "", sink: bool = True
) -> CodingScheme:
    """The scheme of a codec of ours; the first token stays exact, as in a pool, unless `sink` is False.

    Args:
        codec_id: canonical.
        calibration: the shape of the model, and constants for codecs that need them.
        name: of the scheme; by default the codec's.
        sink: whether the first token stays exact.
    """
    model, codecs = calibration.model, list[list[Codec]]()
    for layer in range(model.layers):
        row, head = list[Codec](), 0
        while head < model.kv_heads:
            row.append(build_codec(codec_id, model.head_dim, calibration, layer, head))
            head += row[-1].shape.heads
        codecs.append(row)
    bits = mean_bits(codec_id, model.head_dim)
    code = code_through_pages(codecs, sink)
    return CodingScheme(name or codec_id.name, bits, codecs[0][0].codes_rotated_keys, code)


def complete_id(name: str, calibration: Calibration) -> CodecId:
    """The canonical id of a codec for the model of `calibration`, with its group."""
    model, codec_id = calibration.model, parse_codec_id(name)
    if codec_id.family == CALIBRATED:
        codec_id = parse_codec_id(f"{name}.g{calibration.group}")
    digest = calibration.digest_for(codec_id.name)
    return complete_codec_id(codec_id, model.kv_heads, model.head_dim, digest)


def rotate_keys(model: Any, keys: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Keys of a sequence as attention reads them.

    Args:
        model: a decoder of transformers.
        keys: before rotation, [1, tokens, KV heads · head_dim].
        head_dim: numbers of a head.

    Returns:
        [1, KV heads, tokens, head_dim].
    """
    rows = keys.reshape(1, keys.shape[1], -1, head_dim).transpose(1, 2)
    positions = torch.arange(keys.shape[1], device=keys.device)[None]
    cos, sin = (x[:, None] for x in model.model.rotary_emb(rows, positions))
    low, high = rows.chunk(2, dim=-1)
    rotated: torch.Tensor = rows * cos + torch.cat([-high, low], dim=-1) * sin
    return rotated


@contextmanager
def coded_attention(
    model: Any, scheme: CodingScheme, exact_tokens: int = 0, attend_rows: Attend = sdpa_attention_forward
) -> Iterator[None]:
    """Within, every layer's attention reads keys and values that went through `scheme`.

    Args:
        model: a decoder of transformers; batches have one sequence without a cache.
        scheme: how keys and values are coded.
        exact_tokens: this many first tokens attend to exact keys and values, as KVQuant prefills prompts, and later
            ones read the codes of all. Diptych never does so: 0.
        attend_rows: attends to what was coded.
    """
    exact_keys: dict[int, torch.Tensor] = {}

    def code(layer: int, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Both [1, tokens, KV heads, head_dim]."""
        rows = [x[0].float().cpu().contiguous().numpy() for x in (keys, values)]
        return [torch.from_numpy(x)[None].to(keys) for x in scheme.code(layer, rows[0], rows[1])]

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        values = value.transpose(1, 2)
        keys = key.transpose(1, 2) if scheme.rotated_keys else values
        seen = [x.transpose(1, 2) for x in code(module.layer_idx, keys, values)]
        read = seen[0] if scheme.rotated_keys else key
        out = attend_rows(module, query, read, seen[1], mask, **options)[0]
        if exact_tokens:
            exact = (
                key
                if scheme.rotated_keys
                else rotate_keys(model, exact_keys[module.layer_idx], key.shape[-1])
            )
            first = attend_rows(module, query, exact, value, mask, **options)[0]
            out = torch.cat([first[:, :exact_tokens], out[:, exact_tokens:]], dim=1)
        return out, None

    def code_keys(layer: int, head_dim: int) -> Callable[..., torch.Tensor]:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            if exact_tokens:
                exact_keys[layer] = output.reshape(1, output.shape[1], -1)
            rows = output.reshape(1, output.shape[1], -1, head_dim)
            return code(layer, rows, rows)[0].reshape(output.shape)

        return hook

    ALL_ATTENTION_FUNCTIONS[CODED_ATTENTION] = attend
    ALL_MASK_ATTENTION_FUNCTIONS[CODED_ATTENTION] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    before, model.config._attn_implementation = model.config._attn_implementation, CODED_ATTENTION
    handles = []
    if not scheme.rotated_keys:
        for layer, one in enumerate(model.model.layers):
            hook = code_keys(layer, one.self_attn.head_dim)
            handles.append(key_source(one.self_attn).register_forward_hook(hook))
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class WindowScores:
    """What a model made of windows: the mean loss of each in nats, and the most likely token at every place."""

    losses: Losses
    choices: NDArray[np.int64]


def model_forward(model: Any) -> Forward:
    """The forward pass of a decoder of transformers."""
    device = next(model.parameters()).device

    def forward(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(ids[None].to(device), use_cache=False).logits[0]
        return logits

    return forward


@torch.no_grad()
def score_windows(forward: Forward, windows: Sequence[torch.Tensor], first: int = 1) -> WindowScores:
    """Scores of windows of token ids, [tokens] each; their first `first` tokens are given."""
    losses, choices = [], []
    for window in windows:
        logits = forward(window)[first - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, window[first:].to(logits.device)).item())
        choices.append(logits.argmax(-1).cpu().numpy())
    return WindowScores(np.array(losses), np.array(choices))


def measure_losses(model: Any, windows: Sequence[torch.Tensor]) -> Losses:
    """Mean loss in nats of each window of token ids, [tokens] each; its first token is given."""
    return score_windows(model_forward(model), windows).losses


def growth_pct(more: Losses) -> float:
    """By how many percent perplexity grows with so many nats per window."""
    return 100 * math.expm1(more.mean())


def compare_losses(coded: Losses, exact: Losses) -> tuple[float, tuple[float, float]]:
    """Growth of perplexity in percent, and its 95 % interval: windows are drawn again, each with both of its losses."""
    more = coded - exact
    drawn = np.random.default_rng(0).integers(len(more), size=(NUM_RESAMPLES, len(more)))
    low, high = np.quantile([growth_pct(more[rows]) for rows in drawn], [0.025, 0.975])
    return round(growth_pct(more), 4), (round(float(low), 4), round(float(high), 4))


def measure_quality(
    model: Any,
    windows: Sequence[torch.Tensor],
    calibration: Calibration,
    progress: Callable[[str], None] | None = None,
) -> MeasuredQuality:
    """The loss of every codec but `raw` on held-out windows of token ids, all of the same length.

    `progress` is called with the name of each codec before it is measured.
    """
    exact, codecs = measure_losses(model, windows), dict[str, CodecQuality]()
    for name in CODE_BITS:
        calibrated = parse_codec_id(name).family == CALIBRATED
        if name == "raw" or (calibrated and name not in calibration.constants):
            continue
        if progress is not None:
            progress(name)
        scheme = build_scheme(complete_id(name, calibration), calibration)
        with coded_attention(model, scheme):
            coded = measure_losses(model, windows)
        codecs[name] = CodecQuality(round(scheme.bits, 4), *compare_losses(coded, exact))
    return MeasuredQuality(len(windows), len(windows[0]), round(math.exp(exact.mean()), 4), codecs)
