"""The flags of the small commands that need no gateway: `keys`, `replay`, `version`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer


def keys(
    folder: Annotated[Path, typer.Argument(help="Folder to write them to")],
    workers: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write what workers need to this one, too", show_default=False),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Make a key for clients, unless it is there", show_default=False),
    ] = None,
    metrics_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Make a key for /metrics, unless it is there", show_default=False),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Make the admin key, unless it is there", show_default=False),
    ] = None,
) -> None:
    """Make the channel keys that a gateway and its workers share when they are started apart."""
    module = importlib.import_module("services.cli.serve.standalone")
    module.write_keys(folder, workers, api_key_file, metrics_key_file, admin_key_file)


def replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="What --replan-journal wrote")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object")] = False,
) -> None:
    """Decide again, offline, what a decision log says was decided. Exit status 1 if anything comes out differently."""
    raise typer.Exit(importlib.import_module("services.cli.replay").replay_log(log, as_json))


def version() -> None:
    """Versions of diptych and of what matters to it."""
    importlib.import_module("services.host.versions").print_versions()
