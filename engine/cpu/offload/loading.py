"""Builds the runner of a block from a checkpoint, a policy and caps, and makes the files that it reads and writes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from diptych.chunks import RAW_CLASS
from diptych.errors import StartError
from engine.cpu.coded.compiled_attention import build_angles
from engine.cpu.coded.sink_table import MIN_SLOTS, SinkTable
from engine.cpu.decoder import CpuDecoder
from engine.cpu.offload.block_kv import BlockKv, KvCoding, build_coding
from engine.cpu.offload.disk_file import DirectFile, DiskRate
from engine.cpu.offload.hidden_rooms import HiddenRooms
from engine.cpu.offload.runner import BlockTiers, CpuOffloadRunner
from engine.cpu.offload.weight_stream import WeightStream, open_index
from engine.cpu.weights.decoder_weights import (
    FIRST_SECTION,
    LAST_SECTION,
    OnPacked,
    SectionReader,
    ignore_progress,
    layer_section,
)
from engine.cpu.weights.prepared_file import PreparedIndex
from engine.cpu.weights.prepared_folder import PreparedFolder
from engine.cpu.weights.prepared_name import layer_kind
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.model.memory_plan import FLOAT_BYTES, angle_table_bytes, step_memory_bytes, token_kv_bytes
from engine.model.rope import rope_frequencies
from engine.model.weights import WeightReader
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import LOGIT_ROWS, BlockModel, batch_chunks, check_caps, round_up
from engine.sequence import num_chunks
from kvcache.codecs.calibration import Calibration
from kvcache.layout import KvLayout


@dataclass(frozen=True, slots=True)
class BlockFiles:
    """Where a block's files lie, and how much it may take.

    `prepared` is the folder of prepared weights, `scratch` that of KV and activations on disk; caps of None are none.
    `rate` holds all reading and writing to a rate.
    """

    prepared: Path
    scratch: Path
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    rate: DiskRate | None = None


def measure_model(
    checkpoint: Checkpoint, layout: KvLayout, index: PreparedIndex, policy: BlockPolicy, max_model_len: int
) -> BlockModel:
    """The sizes of a model whose weights are in a prepared file; `layout` is that of the KV of all layers."""
    sections = index.sections
    config = checkpoint.config
    tables = 2 * FLOAT_BYTES * max_model_len * config.head_dim // 2
    if layout.codec:
        tables += angle_table_bytes(layout.head_dim, max_model_len)
        tables += max(MIN_SLOTS, sink_slots(checkpoint, policy)) * token_kv_bytes(layout)
        # A prompt's KV in one layer is expanded while it is attended to.
        raw = replace(layout, codec="").layer_bytes
        tables += min(batch_chunks(policy), num_chunks(max_model_len)) * raw
    return BlockModel(
        layer_bytes=[sections[layer_section(one)].num_bytes for one in range(config.layers)],
        end_bytes=sections[FIRST_SECTION].num_bytes + sections[LAST_SECTION].num_bytes,
        chunk_bytes=round_up(layout.layer_bytes),
        hidden_bytes=config.hidden * FLOAT_BYTES,
        step_bytes=step_memory_bytes(config, tokens=policy.step_tokens, rows=LOGIT_ROWS),
        table_bytes=tables,
    )


def sink_slots(checkpoint: Checkpoint, policy: BlockPolicy) -> int:
    """How many different first tokens a step of the block may have."""
    return min(checkpoint.config.vocab, policy.sequences)


def prepare_weights(
    checkpoint: Checkpoint, kind: str, folder: Path, packed: OnPacked = ignore_progress
) -> Path:
    """The prepared file of a model's weights of a kind, which is made if there is none. `packed` is called meanwhile.

    Raises:
        ModelError: the checkpoint does not match its config.
        StartError: the file cannot be written.
    """
    try:
        with torch.no_grad(), WeightReader(checkpoint.weights) as weights:
            reader = SectionReader(checkpoint.config, weights, layer_kind=layer_kind(kind), packed=packed)
            return PreparedFolder(folder, checkpoint.packing_identity()).prepare_file(reader)
    except OSError as error:
        fix = "make room there, or set NUMBA_CACHE_DIR to a folder on another disk"
        raise StartError("the weights cannot be prepared for bulk work", str(error), fix) from error


def load_block(
    checkpoint: Checkpoint,
    policy: BlockPolicy,
    files: BlockFiles,
    max_model_len: int,
    calibration_file: str = "",
    packed: OnPacked = ignore_progress,
) -> CpuOffloadRunner:
    """Prepare the weights, check the caps, and build the runner.

    `calibration_file` is that of the policy's codec, if it takes one; empty: the one beside the model. `packed` is
    called while the weights are packed.

    Raises:
        ConfigError: a cap is too small; the error names the least. Or KV cannot be coded this way.
        ModelError: the checkpoint does not match its config, or the calibration is damaged or of another model.
        StartError: a file cannot be made.
    """
    codec, calibration = resolve_kv_codec(checkpoint, policy.kv_codec or RAW_CLASS, calibration_file)
    layout = checkpoint.layout(codec=codec)
    path = prepare_weights(checkpoint, policy.weight_kind, files.prepared, packed)
    try:
        sizes = measure_model(checkpoint, layout, open_index(path), policy, max_model_len)
        needs = check_caps(sizes, policy, files.memory_bytes, files.disk_bytes)
        with ExitStack() as opened:
            resident = policy.resident_layers(checkpoint.config.layers)
            stream = WeightStream(path, checkpoint.config, resident, overlap=policy.overlap, rate=files.rate)
            opened.callback(stream.close)
            kv_file = _make_scratch(files, needs.disk["KV"], opened)
            hidden_file = _make_scratch(files, needs.disk["activations"], opened)
            decoder = CpuDecoder(checkpoint.config, stream.ends, max_model_len)
            table, coding = _build_coding(
                decoder, layout, calibration, sink_slots(checkpoint, policy), max_model_len
            )
            kv = BlockKv(layout, decoder.heads, policy, kv_file, coding)
            hidden = HiddenRooms(checkpoint.config.hidden, checkpoint.config.layers, policy, hidden_file)
            opened.pop_all()
    except (OSError, ValueError) as error:
        fix = f"make room in {files.scratch}, or lower --bulk-disk-bytes"
        raise StartError("the files of bulk work cannot be used", str(error), fix) from error
    tiers = BlockTiers(stream, kv, hidden, table, sink_slots(checkpoint, policy))
    return CpuOffloadRunner(decoder, layout, policy, tiers, needs)


def _make_scratch(files: BlockFiles, num_bytes: int, opened: ExitStack) -> DirectFile | None:
    """A scratch file of so many bytes; None for none. Raises OSError."""
    if not num_bytes:
        return None
    made = DirectFile.create_scratch(files.scratch, num_bytes, files.rate)
    opened.callback(made.close)
    return made


def _build_coding(
    decoder: CpuDecoder, layout: KvLayout, calibration: Calibration | None, slots: int, max_model_len: int
) -> tuple[SinkTable, KvCoding | None]:
    """The table of first tokens, and the coding of KV if it has a codec. Raises ConfigError."""
    table = SinkTable(layout, slots if layout.codec else MIN_SLOTS)
    if not layout.codec:
        return table, None
    frequencies = rope_frequencies(decoder.config.rope, layout.head_dim).double().numpy()
    angles = build_angles(frequencies, max_model_len)
    return table, build_coding(layout, calibration, frequencies, angles, table)
