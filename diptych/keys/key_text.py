"""Which text can be an API key: one that a client can send in a header, and that nobody guesses."""

from __future__ import annotations

# Secrets with fewer characters are refused, since they can be guessed.
MIN_KEY_CHARS = 16


def check_key_text(text: str) -> str:
    """The key without the space around it. Raises ValueError with the reason if it cannot be one."""
    found = text.strip()
    if not found.isprintable():
        raise ValueError("has a line break or another control character, which no client can send")
    if "," in found:
        raise ValueError("has a comma: one value is one key, several keys go into a file, one per line")
    if len(found) < MIN_KEY_CHARS:
        raise ValueError(
            f"is too short: a key has at least {MIN_KEY_CHARS} characters (openssl rand -hex 24)"
        )
    return found
