"""How prepared files are named, and how much of the disk is free beside them. No torch, so that `serve` can ask."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from diptych.hashing import hash_fields
from engine.cpu.matmul import LANES, PANEL_OUTPUTS
from engine.model.architecture import ModelConfig
from engine.model.checkpoint import Checkpoint
from kvcache.layout import Shard

# Raised when the meaning of a file changes.
MAGIC = b"diptych weights 1\n"
# Characters of a digest in a file's name.
KEY_CHARS = 32
# How the name of a file ends that is being made, after its key.
FRESH_SUFFIX = ".fresh"
# Bytes of a block of `st_blocks`.
STAT_BLOCK = 512


def prepared_key(
    identity: str,
    config: ModelConfig,
    shard: Shard,
    lane: tuple[int, int],
    ends: tuple[bool, bool],
    layer_kind: str | None,
) -> str:
    """The name of the file of a rank's weights.

    Args:
        identity: of the weights (`Checkpoint.packing_identity`).
        shape: of the model.
        shard: the layers and KV heads that the rank has.
        lane: the rank's index among those of its stage, and their number.
        ends: whether the rank is in the first stage, and in the last one.
        layer_kind: as for `engine.cpu.weights.decoder_weights.SectionReader`.
    """
    rank = repr((config, shard, *lane, *ends, layer_kind))
    return hash_fields([MAGIC, identity, LANES, PANEL_OUTPUTS, rank]).hex()[:KEY_CHARS]


def prepared_path(folder: Path, key: str) -> Path:
    """Where the prepared file of this key lies in the kernels' folder."""
    return folder / "weights" / f"{key}.packed"


def layer_kind(weight_kind: str) -> str | None:
    """The kind of layers of a block's weights: as `SectionReader` takes it, from that of the policy."""
    return None if weight_kind == "exact" else weight_kind


def free_disk_bytes(folder: Path, checkpoint: Checkpoint, weight_kind: str) -> int:
    """The disk that a block of the whole `checkpoint` may take: what is free, and what its prepared file has already.

    A file that is being made counts as well, and so does what a killed process has left of one.

    Raises:
        OSError: the folder, or the model's files, cannot be looked at.
    """
    config = checkpoint.config
    whole = Shard((0, config.layers), (0, config.kv_heads))
    key = prepared_key(
        checkpoint.packing_identity(), config, whole, (0, 1), (True, True), layer_kind(weight_kind)
    )
    free, whole_file = shutil.disk_usage(folder).free, prepared_path(folder, key)
    for file in (whole_file, *whole_file.parent.glob(f"{key}.*{FRESH_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):
            free += file.stat().st_blocks * STAT_BLOCK
    return free
