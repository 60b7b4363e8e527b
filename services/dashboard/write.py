"""Writes the dashboards and the rules of a deployment: `diptych dashboards`, and the files of deploy/grafana/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from diptych.errors import ConfigError
from diptych.slo import DEFAULT_ATTAINMENT
from services.dashboard.grafana_json import dashboard_json
from services.dashboard.panels import DashboardSpec
from services.dashboard.rules import OBJECTIVES, rule_file
from services.dashboard.serving_rows import faults_row, gateway_row, handoff_row, planner_row, pools_row
from services.dashboard.slo_rows import admission_row, clients_row, slo_row, time_row

RULES_FILE = "diptych-rules.yml"
HEADER = (
    "# Written by `diptych dashboards`, for a target of {target:.12g}. Change the settings, not this file.\n"
)


def list_dashboards(target: float = DEFAULT_ATTAINMENT) -> tuple[DashboardSpec, ...]:
    """All dashboards, for a deployment with this target (a share between 0 and 1)."""
    return (
        DashboardSpec(
            "diptych-slo", "Diptych: SLOs", "Whether clients get what they were promised, and where the time goes.",
            (slo_row(target), clients_row(), time_row(), admission_row()),
        ),
        DashboardSpec(
            "diptych-serving", "Diptych: serving", "Hand-off, workers, faults and the planner.",
            (handoff_row(), pools_row(), faults_row(), planner_row(), gateway_row()),
        ),
    )  # fmt: skip


def render_files(
    target: float = DEFAULT_ATTAINMENT, objectives: Sequence[str] = OBJECTIVES
) -> dict[str, str]:
    """All files by name: a JSON file for each dashboard, and the rules.

    Raises:
        ValueError: `target` is not between 0 and 1.
    """
    rules = yaml.safe_dump(rule_file(target, objectives), sort_keys=False, width=120, allow_unicode=True)
    boards = {f"{spec.uid}.json": dashboard_json(spec) for spec in list_dashboards(target)}
    return boards | {RULES_FILE: HEADER.format(target=target) + rules}


def write_files(folder: Path, files: dict[str, str]) -> list[Path]:
    """Write `files` (text by name) into `folder`, which is made. Returns their paths.

    Raises:
        ConfigError: the folder cannot be made, or a file cannot be written.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            written.append(folder / name)
            written[-1].write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the dashboards cannot be written to {folder}",
            error.strerror or str(error),
            "name a folder that can be written to: --out DIR",
        ) from None
    return written
