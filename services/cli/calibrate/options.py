"""The options of `diptych calibrate`, declared once: the command line is made from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.config.fields import option_field

MEASUREMENT = "Measurement"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """How `diptych calibrate` was called. None: the default, which depends on the model."""

    model: str = option_field(
        "tiny", "A folder or a hub id; default: the embedded model", flag="", show_default=False
    )
    revision: str | None = option_field(None, "Branch, tag or commit of a hub model")
    text: Path | None = option_field(
        None,
        "Text like what the model will serve: plain text, or .jsonl whose lines have a field `text`. The embedded model"
        " brings its own",
        metavar="FILE",
    )
    out: Path | None = option_field(
        None,
        "Write the constants here, those of evictions beside it; default: kvquant.safetensors beside the model",
        metavar="FILE",
    )
    force: bool = option_field(False, "Replace the file if there is one")
    samples: int = option_field(16, "Sequences of text", min=1, max=4096)
    tokens: int | None = option_field(
        None, "Tokens of a sequence; default: 2,048, or the model's context", min=16
    )
    group: int | None = option_field(
        None,
        "Values that share a scale; with tensor parallelism, at most those of one rank. Default: all KV heads",
        min=1,
    )
    device: str = option_field(
        "auto", "Where the model runs; auto: a GPU if there is one", metavar="auto|cpu|cuda"
    )
    windows: int = option_field(
        24, "Windows of held-out text to measure quality on", MEASUREMENT, min=1, max=4096
    )
    no_quality: bool = option_field(False, "Do not measure quality", MEASUREMENT)
    as_json: bool = option_field(False, "Print the figures as JSON", flag="--json")
