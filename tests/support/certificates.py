"""Certificates that sign themselves, for servers on 127.0.0.1."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class CertificateFiles:
    """A certificate and its key, as files."""

    certfile: Path
    keyfile: Path

    def settings(self) -> dict[str, str]:
        """The fields of `GatewaySpec`."""
        return {"ssl_certfile": str(self.certfile), "ssl_keyfile": str(self.keyfile)}


def write_certificate(
    folder: Path,
    name: str = "server",
    valid_days: tuple[int, int] = (-1, 30),
    password: str = "",
    use_rsa: bool = False,
) -> CertificateFiles:
    """Put a new certificate in place of the one before. It is valid from and until so many days from now."""
    key = rsa.generate_private_key(65537, 2048) if use_rsa else ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now, (first, last) = datetime.datetime.now(datetime.UTC), valid_days
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + first * DAY)
        .not_valid_after(now + last * DAY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    files = CertificateFiles(folder / "tls.crt", folder / "tls.key")
    for file, content in ((files.certfile, made.public_bytes(Encoding.PEM)), (files.keyfile, private)):
        new = file.with_suffix(".new")
        new.write_bytes(content)
        new.chmod(0o600)
        new.replace(file)
    return files
