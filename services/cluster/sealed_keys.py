"""Encrypts a worker's keys for one process on its node, so that they may travel through Ray without TLS.

The process makes an X25519 key pair and gives away the public half; `diptych serve` seals the keys for it. Nobody who
reads along learns them from that. It does not protect from those who can run programs on the nodes: those who have
Ray's token, which Ray without TLS sends in plain text, or everybody where it has neither. Nor from those who can change
what Ray carries, and put another key pair in the place of a node's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from diptych.errors import ConfigError

KEY_BYTES = 32
# Each sealing derives a key of its own, which encrypts once.
NONCE = bytes(12)
PURPOSE = b"diptych worker keys, version 1"


def seal_keys(keys: Mapping[str, bytes], public: bytes, context: str) -> bytes:
    """Encrypt `keys` for the owner of the `public` key (32 bytes); `context` must be the same when they are opened.

    The result is an ephemeral public key (32 bytes) and the ciphertext.

    Raises:
        ConfigError: `public` is no public key.
    """
    own = X25519PrivateKey.generate()
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ConfigError(
            "keys cannot be sealed for a node", f"its public key is not valid: {error}"
        ) from None
    ephemeral = own.public_key().public_bytes_raw()
    cipher = ChaCha20Poly1305(_derive_key(shared, ephemeral, public))
    return ephemeral + cipher.encrypt(NONCE, msgspec.msgpack.encode(dict(keys)), context.encode())


def open_keys(sealed: bytes, private: X25519PrivateKey, context: str) -> dict[str, bytes]:
    """Decrypt what `seal_keys` made for this key pair and `context`.

    Raises:
        ConfigError: it was made for another key or context, or was changed.
    """
    ephemeral, text = sealed[:KEY_BYTES], sealed[KEY_BYTES:]
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(ephemeral))
        key = _derive_key(shared, ephemeral, private.public_key().public_bytes_raw())
        return msgspec.msgpack.decode(
            ChaCha20Poly1305(key).decrypt(NONCE, text, context.encode()), type=dict[str, bytes]
        )
    except (ValueError, InvalidTag, msgspec.MsgspecError):
        raise ConfigError(
            "the keys of this deployment cannot be opened", "they were sealed for another process or changed"
        ) from None


def _derive_key(shared: bytes, ephemeral: bytes, public: bytes) -> bytes:
    """The key of one sealing, bound to both public keys."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=PURPOSE + ephemeral + public).derive(shared)
