"""`diptych calibrate`: the constants that `nuq*` KV codecs need of a model, as a file beside it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from services.cli.calibrate.options import CalibrateOptions

HELP = """Fit the KV codecs nuq4, nuq3 and nuq2 to a model, and measure what each codec costs in quality.

\b
  diptych calibrate ./my-model --text sample.txt
  diptych calibrate Qwen/Qwen2.5-0.5B-Instruct --text chats.jsonl --out kvquant.safetensors
"""

MEASUREMENT_PANEL = "Measurement"


TextOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Text like what the model will serve: plain text, or .jsonl whose lines have a field `text`. The embedded "
        "model brings its own",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the constants here; default: kvquant.safetensors beside the model",
        show_default=False,
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        min=16, help="Tokens of a sequence; default: 2,048, or the model's context", show_default=False
    ),
]
GroupOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Values that share a scale; with tensor parallelism, at most those of one rank. Default: all KV heads",
        show_default=False,
    ),
]
WindowsOption = Annotated[
    int,
    typer.Option(
        min=1,
        max=4096,
        help="Windows of held-out text to measure quality on",
        rich_help_panel=MEASUREMENT_PANEL,
    ),
]


def calibrate(
    model: Annotated[
        str, typer.Argument(help="A folder or a hub id; default: the embedded model", show_default=False)
    ] = "tiny",
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model", show_default=False)
    ] = None,
    text: TextOption = None,
    out: OutOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one")] = False,
    samples: Annotated[int, typer.Option(min=1, max=4096, help="Sequences of text")] = 16,
    tokens: TokensOption = None,
    group: GroupOption = None,
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="Where the model runs; auto: a GPU if there is one")
    ] = "auto",
    windows: WindowsOption = 24,
    no_quality: Annotated[
        bool,
        typer.Option("--no-quality", help="Do not measure quality", rich_help_panel=MEASUREMENT_PANEL),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON")] = False,
) -> None:
    """Bound in `services.cli.main`."""
    options = CalibrateOptions(
        model, revision, text, out, force, samples, tokens, group, device, windows, not no_quality, as_json
    )
    raise typer.Exit(importlib.import_module("services.cli.calibrate.command").run_calibration(options))
