"""`diptych profile`: what this machine's workers cost, measured, as a file that the planner reads."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.chunks import RAW_CLASS
from diptych.errors import ConfigError
from diptych.extras import require_extra

HELP = """Measure this machine's workers for the planner: step costs, room for KV, and what a request costs beside.

\b
  diptych profile --out P.json                    the embedded model
  diptych profile ./my-model --out P.json --workload trace.jsonl --seconds 120
  diptych profile ./my-model --out P.json --bulk          what blocks of bulk work cost, for `diptych plan --bulk`
"""

MEASUREMENT_PANEL, BULK_PANEL = "Measurement", "Bulk work"
BULK_FLAGS = {"bulk_folder", "bulk_threads"}
# What --bulk uses of the other flags.
SHARED_FLAGS = {"model", "out", "as_json", "bulk"}

CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Their calibration, as in `serve`; default: the model's",
        rich_help_panel=MEASUREMENT_PANEL,
    ),
]

BulkFlag = Annotated[
    bool,
    typer.Option(
        "--bulk",
        help="Measure what blocks of bulk work cost, and add it to --out; nothing is served",
        rich_help_panel=BULK_PANEL,
    ),
]
BulkFolder = Annotated[
    Path | None,
    typer.Option(
        "--bulk-folder",
        metavar="FOLDER",
        help="Its disk is measured; default: the folder of --out",
        rich_help_panel=BULK_PANEL,
    ),
]
BulkThreads = Annotated[
    int, typer.Option("--bulk-threads", min=1, help="Threads that compute", rich_help_panel=BULK_PANEL)
]
Depths = Annotated[
    str,
    typer.Option(
        metavar="N,…",
        help="Requests open at a time; afterwards they come at 0.4, 0.6 and 0.8 of the best pace",
        rich_help_panel=MEASUREMENT_PANEL,
    ),
]
KvKeep = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Measure requests that evict KV at this threshold too, as in `serve`",
        rich_help_panel=MEASUREMENT_PANEL,
    ),
]
Seed = Annotated[int, typer.Option(help="Of the requests", rich_help_panel=MEASUREMENT_PANEL)]


def profile(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A folder or a hub id; default: the embedded model", show_default=False)
    ] = "",
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the profile here (JSON)")] = Path(
        "profile.json"
    ),
    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Requests to measure with, as in `diptych bench`",
            rich_help_panel=MEASUREMENT_PANEL,
        ),
    ] = "sharegpt",
    shrink: Annotated[
        float, typer.Option(min=0.001, help="Divide their lengths by this", rich_help_panel=MEASUREMENT_PANEL)
    ] = 1.0,
    colocated: Annotated[
        int,
        typer.Option(
            min=0,
            help="Measure so many workers that do both, not one of each kind",
            rich_help_panel=MEASUREMENT_PANEL,
        ),
    ] = 0,
    seconds: Annotated[
        float,
        typer.Option(min=1.0, max=86_400.0, help="Seconds of load, about", rich_help_panel=MEASUREMENT_PANEL),
    ] = 40.0,
    depths: Depths = "1,2,4,8,16",
    kv_cache_codec: Annotated[
        str,
        typer.Option(
            metavar="CODEC", help="How workers keep KV, as in `serve`", rich_help_panel=MEASUREMENT_PANEL
        ),
    ] = RAW_CLASS,
    kv_cache_calibration: CalibrationFile = None,
    kv_keep: KvKeep = 1.0,
    seed: Seed = 1,
    bulk: BulkFlag = False,
    bulk_folder: BulkFolder = None,
    bulk_threads: BulkThreads = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile's figures as JSON")] = False,
) -> None:
    """Bound in `services.cli.main`."""
    require_extra("plan", "diptych profile")
    if bulk:
        _refuse_load_flags(context)
        measure: Any = importlib.import_module("services.cli.profile.offload").run_bulk_profile
        raise typer.Exit(measure(model, out, bulk_folder or out.parent, bulk_threads, as_json))
    _refuse_bulk_flags(context)
    run: Any = importlib.import_module("services.cli.profile.command").run_profile
    load = workload, shrink, colocated, seconds, _parse_depths(depths), seed
    raise typer.Exit(run(model, out, *load, as_json, kv_cache_codec, kv_cache_calibration, kv_keep))


def _given_flags(context: typer.Context) -> set[str]:
    """The names of the parameters that were given on the command line."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {name for name, source in sources if source is not None and source.name == "COMMANDLINE"}


def _refuse_load_flags(context: typer.Context) -> None:
    """Refuse flags of a load with --bulk. Raises ConfigError."""
    if unused := sorted(_given_flags(context) - SHARED_FLAGS - BULK_FLAGS):
        raise ConfigError(
            f"--{unused[0].replace('_', '-')} has no effect with --bulk",
            "bulk work is measured without a load",
            "leave it out, or measure twice with the same --out",
        )


def _refuse_bulk_flags(context: typer.Context) -> None:
    """Refuse flags of bulk work without --bulk. Raises ConfigError."""
    if unused := sorted(_given_flags(context) & BULK_FLAGS):
        raise ConfigError(
            f"--{unused[0].replace('_', '-')} has no effect", "it is for bulk work", "add --bulk"
        )


def _parse_depths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise ConfigError(
            f"--depths {text} cannot be used", "numbers of requests, at least 1", "--depths 1,4,16"
        )
    return found
