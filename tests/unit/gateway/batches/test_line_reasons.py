"""A line that found no room waits until its batch expires: what admission refuses does not count as an attempt."""

from __future__ import annotations

import ast
from pathlib import Path

from diptych.failure_statuses import RULES, FailureReason
from router.requests import admission
from services.gateway.batches.line_attempts import UNCOUNTED


def test_no_refusal_of_admission_counts_as_an_attempt_of_a_line() -> None:
    tree = ast.parse(Path(admission.__file__).read_text(encoding="utf-8"))
    given = {
        FailureReason[node.attr]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "FailureReason"
    }
    assert FailureReason.TENANT_QUEUE_FULL in given
    assert given - UNCOUNTED == set()
    # Each of them says that the client may come again.
    assert all(RULES[reason].retry_after_s is not None for reason in given)
