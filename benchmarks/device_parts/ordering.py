"""Part `late`: hand-offs whose copies happen as late as their events allow, and again without each of the waits.

These are tests: the roles of both workers, their buffers and their thread, on a device of CPU tensors whose copies are
`tests/support/late_copies.py:LateCopies`. They say how many hand-offs they made and what was wrong.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.gpu_parts.check_part import PartContext

LATE_TESTS = (
    "tests/engine/workers/test_buffered_handoff.py",
    "tests/engine/workers/test_buffered_offers.py",
    "tests/engine/transport/test_buffered_links.py",
)
# In the name of a test that leaves out a wait, and passes if that is noticed.
WAIT_TEST = "needed"
# What tests report of themselves.
REPORTED = ("late_handoffs", "late_aborted", "late_wrong", "copy_flips", "copy_flips_found")


class LateCounter:
    """A plugin of pytest: counts tests, and sums up what they report (`record_property`)."""

    def __init__(self, context: PartContext) -> None:
        self._context = context
        self._sums: Counter[str] = Counter()
        self._failing: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test; one that was skipped has shown nothing."""
        name = report.nodeid.rsplit("::", 1)[-1]
        bad = report.failed or report.skipped
        if bad:
            self._failing.append(name)
        if report.when == "call" or bad:
            self._sums["late_tests"] += 1
            if WAIT_TEST in name:
                self._sums["waits"] += 1
                self._sums["waits_found"] += not bad
            for key, value in report.user_properties:
                self._sums[key] += value if key in REPORTED else 0

    def pytest_sessionfinish(self) -> None:
        """Write down what was counted."""
        self._context.record(self.figures())

    def figures(self) -> dict[str, Any]:
        """All figures; a share of nothing is 0."""
        sums = self._sums
        return {name: sums[name] for name in ("late_tests", *REPORTED, "waits")} | {
            "late_failed": len(self._failing),
            "late_failing": self._failing,
            "waits_proven": round(sums["waits_found"] / max(1, sums["waits"]), 4),
            "copy_flips_found": round(sums["copy_flips_found"] / max(1, sums["copy_flips"]), 4),
        }


def measure_late(context: PartContext) -> None:
    """Run `LATE_TESTS` in this process. Raises RuntimeError if none ran."""
    counter = LateCounter(context)
    pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *LATE_TESTS], plugins=[counter])
    if not counter.figures()["late_tests"]:
        raise RuntimeError("no test of late copies ran")
