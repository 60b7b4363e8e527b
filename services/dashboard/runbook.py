"""Writes the runbook in docs/dashboards.md from the alerts themselves: `python -m services.dashboard.runbook`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from diptych.slo import DEFAULT_ATTAINMENT
from services.dashboard.rules import AlertSpec, alerts

BLOCK = re.compile(r"(?<=<!-- table: runbook -->\n).*?(?=<!-- end -->)", re.DOTALL)
# How the value and the labels of a firing alert are written in a summary.
PLACEHOLDER = re.compile(r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}")


def render_runbook(page: str) -> str:
    """The text of `page` with a section for each alert between its markers; values and labels are in capitals."""
    sections = "\n".join(map(_alert_section, alerts(DEFAULT_ATTAINMENT)))
    return BLOCK.sub(lambda _: f"\n{sections}\n", page)


def _alert_section(alert: AlertSpec) -> str:
    wait = "at once" if alert.wait == "0s" else f"after {alert.wait}"
    summary = PLACEHOLDER.sub(lambda found: found[1].upper(), alert.summary)
    return f"### {alert.name}\n\n{alert.severity}, {wait}. {summary}. {alert.action.rstrip('.')}.\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(render_runbook(path.read_text(encoding="utf-8")), encoding="utf-8")
