"""What all tests share: a skip is counted and says why; property tests try the same examples on every machine; files
that take long begin first.

`make soak` lets them look for new ones (`HYPOTHESIS_PROFILE=explore`).
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

TESTS = Path(__file__).parent
# Half a minute and more, the longest first: two files run at a time, and no long one should be left alone at the end.
LONG = (
    "system/test_tokens.py", "system/test_serve.py", "system/test_parallel.py", "engine/test_parallel.py",
    "system/test_workers.py", "system/test_prefix.py", "faults/test_migrated.py", "system/test_death.py",
    "system/test_migration.py", "faults/test_matrix.py", "faults/test_partition.py", "system/test_bad_input.py",
    "faults/test_chaos.py", "system/test_vanish.py", "engine/test_transport.py", "engine/test_transport_split.py",
    "system/test_turn.py", "system/test_survival.py", "system/test_local_prefill.py", "faults/test_phases.py",
    "engine/test_corruption.py", "engine/test_triton.py", "engine/test_transport_early.py",
    "engine/test_triton_runner.py", "system/test_replan.py", "system/test_profile.py", "system/test_serve_plan.py",
    "system/test_bench.py", "system/test_plan.py", "unit/planner/test_placement.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order within a file stays. `make tests` has them given out in this order."""
    place = {TESTS / name: number for number, name in enumerate(LONG)}
    assert all(file.exists() for file in place)
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


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
