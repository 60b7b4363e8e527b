"""SHA-256 over length-prefixed, typed fields.

Plain concatenation lets two different sequences of fields hash alike; here every field carries its type and length, so
equal digests mean equal fields. Used for model fingerprints and for the content address of KV chunks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

Field = bytes | str | int | None


def digest(fields: Iterable[Field]) -> bytes:
    """32-byte SHA-256 of `fields`, each prefixed by a type byte and an 8-byte length."""
    sha = hashlib.sha256()
    for field in fields:
        tag, body = _encode(field)
        sha.update(tag + struct.pack(">Q", len(body)) + body)
    return sha.digest()


def _encode(field: Field) -> tuple[bytes, bytes]:
    if field is None:
        return b"n", b""
    if isinstance(field, bytes):
        return b"b", field
    if isinstance(field, str):
        return b"s", field.encode()
    return b"i", field.to_bytes((field.bit_length() + 8) // 8, "big", signed=True)


def fingerprint(fields: dict[str, Field]) -> str:
    """Hex digest of named fields, in the order of their names."""
    flat: list[Field] = []
    for name in sorted(fields):
        flat += [name, fields[name]]
    return digest(flat).hex()
