"""How long requests wait for workers that are not there (pure)."""

from __future__ import annotations

from collections.abc import Iterable


class Recovery:
    """When a way for requests last existed, by fingerprint. Who has never had one has nothing to wait for."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._seen_s: dict[str, float] = {}

    def seen(self, fingerprints: Iterable[str], now_s: float) -> None:
        """There are ways for these now."""
        self._seen_s.update(dict.fromkeys(fingerprints, now_s))
        for name in [name for name, seen_s in self._seen_s.items() if now_s - seen_s > self.patience_s]:
            del self._seen_s[name]

    def hopes(self, fingerprint: str | None, now_s: float) -> bool:
        """Whether a request, of this fingerprint if any, should go on waiting for a way."""
        seen_s = (
            self._seen_s.values() if fingerprint is None else [self._seen_s.get(fingerprint, float("-inf"))]
        )
        return any(now_s - moment_s <= self.patience_s for moment_s in seen_s)
