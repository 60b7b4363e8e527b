"""What all tests share: a skip is counted and says why; property tests try the same examples on every machine.

`make soak` lets them look for new ones (`HYPOTHESIS_PROFILE=explore`).
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


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
