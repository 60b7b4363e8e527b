"""Reads the server's certificate and its key, and says what is wrong with them before a client finds out."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from diptych.errors import ConfigError
from diptych.keys.private_file import read_private_file

# The server speaks HTTP/1.1 alone.
PROTOCOLS = ["http/1.1"]


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A certificate that was checked, ready for handshakes, and when it expires."""

    context: ssl.SSLContext
    expires: datetime


def load_certificate(certfile: Path, keyfile: Path, now: datetime | None = None) -> ServerCertificate:
    """The certificate of a server, with its chain, and its key. `now` replaces the time.

    Raises:
        ConfigError: a file cannot be read, the key is encrypted, open to others or of another certificate, or the
            certificate has expired or is not valid yet.
    """
    leaf = _read_leaf(certfile)
    now = now or datetime.now(UTC)
    if not leaf.not_valid_before_utc <= now <= leaf.not_valid_after_utc:
        is_late = now > leaf.not_valid_after_utc
        day = leaf.not_valid_after_utc if is_late else leaf.not_valid_before_utc
        raise ConfigError(
            f"the certificate {certfile} {'has expired' if is_late else 'is not valid yet'}",
            f"it is valid {'until' if is_late else 'from'} {day:%Y-%m-%d %H:%M} UTC, and now is {now:%Y-%m-%d %H:%M}",
            "renew it" if is_late else "check this machine's clock",
        )
    _check_key(leaf, certfile, keyfile)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Clients would have the server compute as often as they like.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(PROTOCOLS)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"the certificate {certfile} cannot be used", str(why), "see the two files"
        ) from None
    return ServerCertificate(context, leaf.not_valid_after_utc)


def _read_leaf(certfile: Path) -> x509.Certificate:
    """The first certificate of a file, which is the server's own. Raises ConfigError if there is none."""
    try:
        return x509.load_pem_x509_certificates(certfile.read_bytes())[0]
    except OSError as error:
        raise ConfigError(
            f"the certificate {certfile} cannot be read", error.strerror or str(error), "--ssl-certfile FILE"
        ) from None
    except ValueError:
        raise ConfigError(
            f"{certfile} is no certificate",
            "it has no readable '-----BEGIN CERTIFICATE-----' block",
            "PEM, the server's own certificate first",
        ) from None


def _check_key(leaf: x509.Certificate, certfile: Path, keyfile: Path) -> None:
    """Raises ConfigError unless the file has the key of this certificate."""
    content = read_private_file(keyfile, "--ssl-keyfile", "--ssl-keyfile FILE, the key of the certificate")
    try:
        key = load_pem_private_key(content.encode(), None)
    except TypeError:
        raise ConfigError(
            f"the key {keyfile} is encrypted",
            "nobody is there to type its password when it is renewed",
            f"openssl pkey -in {keyfile} -out plain.pem, readable by its owner alone",
        ) from None
    except ValueError:
        raise ConfigError(
            f"{keyfile} is no key", "it has no readable '-----BEGIN PRIVATE KEY-----' block", "PEM"
        ) from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise ConfigError(
            f"the key {keyfile} is not that of {certfile}",
            "their public keys differ",
            "the two files have to come from one request for a certificate, the server's own certificate first",
        )
