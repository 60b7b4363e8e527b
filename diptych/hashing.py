"""SHA-256 over typed, length-prefixed fields.

Plain concatenation can give two different lists of fields the same hash. Here every field carries its type and length,
so equal digests mean equal fields. Used for model fingerprints and for the addresses of KV chunks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

HashField = bytes | str | int | None


def hash_fields(fields: Iterable[HashField]) -> bytes:
    """32-byte SHA-256 of `fields`, each prefixed by a type byte and an 8-byte length."""
    sha = hashlib.sha256()
    for field in fields:
        tag, body = _encode_field(field)
        sha.update(tag + struct.pack(">Q", len(body)) + body)
    return sha.digest()


def _encode_field(field: HashField) -> tuple[bytes, bytes]:
    """The type byte and the body of one field."""
    if field is None:
        return b"n", b""
    if isinstance(field, bytes):
        return b"b", field
    if isinstance(field, str):
        return b"s", field.encode()
    return b"i", field.to_bytes((field.bit_length() + 8) // 8, "big", signed=True)


def fingerprint_fields(fields: dict[str, HashField]) -> str:
    """Hex digest of named fields, independent of their order."""
    flat: list[HashField] = []
    for name in sorted(fields):
        flat += [name, fields[name]]
    return hash_fields(flat).hex()
