"""`diptych dashboards`: Grafana dashboards, and Prometheus' rules and alerts, for a deployment's own SLOs."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.config.load import check_slo_target, load_config
from diptych.extras import require_extra
from diptych.slo import DEFAULT_ATTAINMENT

HELP = """Write Grafana dashboards, and Prometheus' rules and alerts, for a deployment's SLOs.

\b
  diptych dashboards --out monitoring --slo-ttft-ms 500 --slo-tpot-ms 50 --slo-target 0.99
  diptych dashboards --out monitoring --config deployment.yaml
"""


def dashboards(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write them to")],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The deployment's settings (YAML)", show_default=False),
    ] = None,
    slo_ttft_ms: Annotated[
        str | None, typer.Option(metavar="MS", help="As in `diptych serve`", show_default=False)
    ] = None,
    slo_tpot_ms: Annotated[
        str | None, typer.Option(metavar="MS", help="As in `diptych serve`", show_default=False)
    ] = None,
    slo_target: Annotated[
        str | None, typer.Option(metavar="SHARE", help="As in `diptych serve` (0.9)", show_default=False)
    ] = None,
) -> None:
    """Write the files and say where they are. Without SLOs, also in the deployment's plan, they are for both."""
    require_extra("dashboards", "diptych dashboards")
    given: dict[str, Any] = {
        "slo_ttft_ms": slo_ttft_ms,
        "slo_tpot_ms": slo_tpot_ms,
        "slo_target": slo_target,
    }
    settled = load_config("dashboards", given, os.environ, config)
    if settled.config.plan is not None:
        settled = importlib.import_module("services.cli.serve.from_plan").apply_plan_slos(settled)
    check_slo_target(settled)
    loaded = settled.config
    limits = {"ttft": loaded.slo_ttft_ms, "tpot": loaded.slo_tpot_ms}
    named = [name for name, limit_ms in limits.items() if limit_ms is not None] or list(limits)
    writer = importlib.import_module("services.dashboard.write")
    files = writer.render_files(loaded.slo_target or DEFAULT_ATTAINMENT, (*named, "all"))
    for path in writer.write_files(out, files):
        print(path)
