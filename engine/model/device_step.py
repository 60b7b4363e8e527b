"""The memory that the largest steps take on a device beside weights and pool, by arithmetic. Imports no torch.

    step = graphs + max(prefill, logits + drawing of tokens)

Graphs keep their memory for good, since it is theirs alone: that of the largest one, into which all others fit. Steps
with prompts and the drawing of tokens take turns. `engine.gpu.largest_step` measures the same on a GPU.
"""

from __future__ import annotations

from diptych.chunks import CHUNK_TOKENS
from engine.model.architecture import ModelConfig
from kvcache.layout import DTYPE_BYTES, KvLayout

FLOAT_BYTES, INT_BYTES = 4, 4
# Numbers to which the number of shared items of a step is padded. A step with more items is launched without a graph.
PADDED_ITEMS = (0, 64, 512)
# Most shared parts per row. Runs that lie deeper in the prefix tree are read by each row alone.
MAX_PARTS = 32
# Logits that are drawn from at a time on a GPU, in whole rows, and how many arrays of 8 bytes each of them takes.
SAMPLED_LOGITS = 1 << 22
SAMPLER_ARRAYS = 8


def pad_rows(rows: int) -> int:
    """The rows of the graph that a decode step of `rows` sequences replays."""
    step = 1 << max(0, rows - 1).bit_length() if rows <= 8 else 8 if rows <= 64 else 32
    return -(-rows // step) * step


def list_graph_rows(max_seqs: int) -> list[int]:
    """The rows of all graphs that decode steps of up to `max_seqs` sequences replay: what is captured before a worker
    is ready."""
    return sorted({pad_rows(rows) for rows in range(1, max_seqs + 1)})


def device_step_bytes(
    config: ModelConfig, layout: KvLayout, max_model_len: int, *, tokens: int, rows: int
) -> int:
    """The peak of steps with up to `tokens` tokens, and logits for up to `rows` of them, in bytes.

    Args:
        config: the model.
        layout: of the pool; with a codec the chunks of a prompt are expanded, a layer at a time.
        max_model_len: most tokens of a sequence.
        tokens: most tokens of a step.
        rows: most sequences of a step.
    """
    prefill = forward_bytes(config, layout.dtype, tokens, rows)
    if layout.codec:
        numbers = 2 * layout.kv_heads * layout.head_dim
        prefill += layout.num_chunks(max_model_len) * CHUNK_TOKENS * numbers * DTYPE_BYTES[layout.dtype]
    drawn = rows * config.vocab * FLOAT_BYTES + sampler_bytes(config.vocab)
    return graph_bytes(config, layout, max_model_len, rows) + max(prefill, drawn)


def forward_bytes(config: ModelConfig, dtype: str, tokens: int, wanted: int, parts: int = 0) -> int:
    """The peak of `engine.gpu.decoder.GpuDecoder.forward` over `tokens` rows, of which `wanted` need logits.

    The residual stream is float32, all else has `dtype`. The peak is in attention (queries, keys, values, the result,
    and `parts` bytes of partial results), in the MLP (both halves and their product), or where logits are computed.
    """
    size = DTYPE_BYTES[dtype]
    # The residual stream, what is added to it, and the normed rows.
    row = config.hidden * (FLOAT_BYTES + 2 * size)
    attention = tokens * (2 * config.heads + 2 * config.kv_heads) * config.head_dim * size + parts
    mlp = tokens * 3 * config.mlp * size
    widened = size if size < FLOAT_BYTES else 0
    logits = wanted * (row + config.vocab * (FLOAT_BYTES + widened)) + tokens * config.hidden * size
    return max(tokens * row + max(attention, mlp), logits)


def graph_bytes(config: ModelConfig, layout: KvLayout, max_model_len: int, rows: int) -> int:
    """The memory of all graphs of decode steps of up to `rows` sequences, logits and integers included."""
    most = pad_rows(rows)
    parts = most * (1 + MAX_PARTS) * config.heads * (config.head_dim + 1) * FLOAT_BYTES
    kept = most * config.vocab * FLOAT_BYTES
    integers = len(PADDED_ITEMS) * sum(list_graph_rows(rows)) * layout.num_chunks(max_model_len)
    return forward_bytes(config, layout.dtype, most, most, parts) + kept + integers * INT_BYTES


def sampler_bytes(vocab: int) -> int:
    """What `engine.gpu.sampler.DeviceSampler` takes of a GPU, beside the logits."""
    return SAMPLER_ARRAYS * 8 * max(SAMPLED_LOGITS, vocab) + 8 * vocab
