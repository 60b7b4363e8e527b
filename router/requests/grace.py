"""Decides whether queued requests wait for lost workers to come back, or fail (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from router.routing.kv_classes import AnswerVersion, names_class


class WorkerGrace:
    """Remembers when answers of each version (model, KV class) could last be served. Never: no reason to wait."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._seen_s: dict[AnswerVersion, float] = {}

    def note_served(self, versions: Iterable[AnswerVersion], now_s: float) -> None:
        """Answers of these versions can be served at `now_s`."""
        self._seen_s.update(dict.fromkeys(versions, now_s))
        for name in [name for name, seen_s in self._seen_s.items() if now_s - seen_s > self.patience_s]:
            del self._seen_s[name]

    def should_wait(self, version: AnswerVersion | None, now_s: float, kv_class: str | None = None) -> bool:
        """Whether a request should go on waiting for workers: True if a pair was there within the last `patience_s`.

        With a version, only pairs that can continue an answer of that version count; else, with a `kv_class`, only
        pairs that have a class which it names.
        """
        return any(
            now_s - moment_s <= self.patience_s
            for seen, moment_s in self._seen_s.items()
            if version in (None, seen) and (kv_class is None or names_class(kv_class, seen.kv_class))
        )
