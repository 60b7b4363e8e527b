"""Keeps the measured saturation of a model on disk, so that a worker does not measure it at every start.

    <folder>/saturation/<key>.json     {"tokens": 256}

Saturation is the number of tokens with which a prefill step keeps the device busy. `key` stands for the model and all
settings of a worker that change the speed of its steps; `folder` is the kernels' folder, one per CPU
(`diptych.kernels.cache`). A value older than `MAX_AGE_S` is measured again: the machine may have been busy when it was
measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import uuid
from pathlib import Path

import msgspec

MAX_AGE_S = 7 * 86400.0
# Version of `engine.scheduling.saturation.measure_curve`; values of other versions are not used.
METHOD_VERSION = 2

log = logging.getLogger(__name__)


class Saturation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many tokens of a prefill step keep the device busy (`engine.scheduling.saturation.saturation_length`)."""

    tokens: int


class SaturationStore:
    """The stored value for one kind of worker. Without a `folder` nothing is stored. A file error is only logged."""

    def __init__(self, folder: Path | None, *parts: object) -> None:
        """`parts`: what the saturation depends on besides the CPU, such as the model's fingerprint and the threads."""
        key = hashlib.sha256(repr((METHOD_VERSION, *parts)).encode()).hexdigest()[:16]
        self._path = folder / "saturation" / f"{key}.json" if folder is not None else None

    def read_tokens(self) -> int | None:
        """The stored number of tokens, or None if there is none that is recent enough."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                age_s = time.time() - os.fstat(file.fileno()).st_mtime
                kept = msgspec.json.decode(file.read(), type=Saturation)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the saturation is measured again: %s", error)
            return None
        return kept.tokens if 0 <= age_s < MAX_AGE_S and kept.tokens >= 0 else None

    def write_tokens(self, tokens: int) -> None:
        """Store a number of tokens that was just measured."""
        if self._path is None:
            return
        # The name is unique, since several machines may share the folder.
        fresh = self._path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            fresh.write_bytes(msgspec.json.encode(Saturation(tokens)))
            fresh.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            log.info("the saturation could not be stored: %s", error)
