"""The latest errors with their request ids, and the latest changes of the fleet, for `/status`.

Memory is bounded. No entry holds a prompt, a key, or a text that a client sent: the gateway's log has the cause of an
error under its id. Pure: time is an argument.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from diptych.failure_statuses import RequestFailure
from diptych.logs.shown_text import shorten_text

# Errors that are kept of each code, so that frequent errors do not displace rare ones.
MAX_ERRORS_PER_CODE = 8
MAX_ERRORS_SHOWN = 40
MAX_FLEET_EVENTS = 40
MAX_REASON_CHARS = 300


class RecentErrors:
    """The latest errors of each code. The codes are a closed list, so memory is bounded."""

    def __init__(self) -> None:
        self._by_code: dict[str, deque[tuple[float, dict[str, Any]]]] = {}

    def add_error(
        self, now_s: float, failure: RequestFailure, request_id: str, route: str, generation: str = ""
    ) -> None:
        """Keep an error. `generation` is the name under which workers know the request, if it has one."""
        # The text of a client error may quote its request, and is left out.
        is_ours = failure.status >= 500 or failure.status == 429
        entry = {
            "request_id": request_id,
            "generation": generation,
            "route": route,
            "status": failure.status,
            "code": failure.code,
            "message": failure.message if is_ours else "",
        }
        kept = self._by_code.setdefault(failure.code, deque(maxlen=MAX_ERRORS_PER_CODE))
        kept.append((now_s, entry))

    def report(self, now_s: float) -> list[dict[str, Any]]:
        """The latest errors, the newest first, each with its age in seconds."""
        every = sorted(
            (pair for kept in self._by_code.values() for pair in kept),
            key=lambda pair: pair[0],
            reverse=True,
        )
        return [{"age_s": _age(now_s, at_s), **entry} for at_s, entry in every[:MAX_ERRORS_SHOWN]]


class FleetEvents:
    """The latest workers that came up, were lost, or cannot serve with the others."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, dict[str, str]]] = deque(maxlen=MAX_FLEET_EVENTS)
        # The role of every worker that is up.
        self._roles: dict[str, str] = {}

    def add_up(self, now_s: float, worker: str, role: str) -> None:
        """A worker has joined."""
        self._roles[worker] = role
        self._append_event(now_s, "up", worker, role, "")

    def add_lost(self, now_s: float, worker: str, reason: str) -> None:
        """A worker is gone."""
        self._append_event(now_s, "lost", worker, self._roles.pop(worker, ""), reason)

    def add_unfit(self, now_s: float, worker: str, reason: str) -> None:
        """A worker cannot serve with the others."""
        self._append_event(now_s, "unfit", worker, self._roles.get(worker, ""), reason)

    def report(self, now_s: float) -> list[dict[str, Any]]:
        """The latest events, the newest first, each with its age in seconds."""
        return [{"age_s": _age(now_s, at_s), **entry} for at_s, entry in reversed(self._events)]

    def _append_event(self, now_s: float, what: str, worker: str, role: str, reason: str) -> None:
        entry = {
            "what": what,
            "worker": worker,
            "role": role,
            "reason": shorten_text(reason, MAX_REASON_CHARS),
        }
        self._events.append((now_s, entry))


def _age(now_s: float, at_s: float) -> float:
    return round(max(0.0, now_s - at_s), 1)
