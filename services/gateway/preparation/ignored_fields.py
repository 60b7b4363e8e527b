"""Counts the fields of bodies that were passed over, and says in the log when one comes for the first time.

Clients choose the names, so only so many are kept apart, and each is shortened.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from diptych.logs.shown_text import quote_text, shorten_text
from services.gateway.metrics.metric_registry import MetricRegistry

MAX_NAMES, MAX_NAME_CHARS = 64, 64
# The label of all names beyond `MAX_NAMES`.
OTHERS = "(others)"

log = logging.getLogger(__name__)


class IgnoredFields:
    """The counter of requests by the unknown fields that they had."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._counter = registry.counter(
            "diptych:ignored_fields", "Requests with an unknown field, with --unknown-fields ignore", "field"
        )
        self._known: set[str] = set()

    def count_fields(self, fields: Iterable[str]) -> None:
        """Count the unknown fields of a request, by their paths."""
        for field in fields:
            name = shorten_text(field, MAX_NAME_CHARS)
            if name not in self._known:
                if len(self._known) == MAX_NAMES:
                    name = OTHERS
                else:
                    self._known.add(name)
                    log.warning("requests have the unknown field %s, which is ignored", quote_text(name))
            self._counter.labels(name).inc()
