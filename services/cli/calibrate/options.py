"""What `diptych calibrate` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What was asked for. None: the default, which depends on the model."""

    model: str
    revision: str | None
    text: Path | None
    out: Path | None
    force: bool
    samples: int
    tokens: int | None
    group: int | None
    device: str
    windows: int
    quality: bool
    as_json: bool
