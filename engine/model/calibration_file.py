"""Finds the calibration files of a model beside its weights, or where they are named: `kvquant.safetensors`, which
codecs need, and `kvquant.zap`, by which evictions decide."""

from __future__ import annotations

from pathlib import Path

from engine.model.checkpoint import Checkpoint
from kvcache.codecs.calibration import FILE_NAME, CalibratedModel, Calibration, read_calibration
from kvcache.eviction import zap


def identify_model(checkpoint: Checkpoint) -> CalibratedModel:
    """What a calibration file says of its model. The same weights in another folder are the same model."""
    config = checkpoint.config
    return CalibratedModel(checkpoint.hash_weights(), config.layers, config.kv_heads, config.head_dim)


def calibration_path(checkpoint: Checkpoint, path: str = "") -> Path:
    """Where a model's calibration is: the file that was named, or `kvquant.safetensors` in the model's folder."""
    return Path(path).expanduser() if path else checkpoint.path / FILE_NAME


def load_calibration(checkpoint: Checkpoint, path: str = "") -> Calibration | None:
    """The calibration of a model.

    Args:
        checkpoint: of the model that it must belong to.
        path: a file; empty: `kvquant.safetensors` in the model's folder.

    Returns:
        None if no file was named and the model's folder has none.

    Raises:
        ModelError: the file is not there, too large, damaged, of another model, or holds numbers that cannot be right.
    """
    file = calibration_path(checkpoint, path)
    if not path and not file.is_file():
        return None
    return read_calibration(file, identify_model(checkpoint))


def load_surrogate(checkpoint: Checkpoint, path: str = "") -> zap.KeepSurrogate | None:
    """What the eviction rule `zap` needs of a model; None if there is no such file.

    Args:
        checkpoint: of the model that it must belong to.
        path: the file of its codecs' calibration, if one was named: this one is beside it.

    Raises:
        ModelError: the file cannot be read, is damaged, of another model, or holds numbers that cannot be right.
    """
    file = zap.surrogate_path(calibration_path(checkpoint, path))
    return zap.read_surrogate(file, identify_model(checkpoint)) if file.is_file() else None
