"""What all tests share: a skip is counted and says why."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """At the end of a run: every reason for which something was skipped, and how often."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(_reason(report) for report in skipped)
    terminalreporter.write_line(f"skipped: {len(skipped)}")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"  {count} × {reason}")


def _reason(report: pytest.TestReport) -> str:
    told = report.longrepr
    return str(told[2]).removeprefix("Skipped: ") if isinstance(told, tuple) else str(told)
