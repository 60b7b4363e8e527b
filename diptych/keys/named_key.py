"""An API key with a name, and what belongs to the name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamedKey:
    """An entry of the file. `digest` is the SHA-256 of the key. A limit of None is none.

    `priority` is the best, so the lowest, that its requests may have. If it is above 0, they have it by default.
    """

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 0


def digest_key(key: str) -> bytes:
    """The digest by which a key is known."""
    return hashlib.sha256(key.encode()).digest()
