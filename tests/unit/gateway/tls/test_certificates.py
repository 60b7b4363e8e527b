"""Certificates: what is refused and why, and that a renewed one replaces the one before."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from services.gateway.metrics.metric_registry import MetricRegistry
from services.gateway.tls.certificate_watch import CertificateWatch
from services.gateway.tls.certificates import load_certificate
from services.gateway.tls.trust import trust_certificate
from tests.support.certificates import CertificateFiles, write_certificate


def refused(files: CertificateFiles) -> str:
    """The lines of the refusal: at most six, which name a file and say what to do."""
    with pytest.raises(ConfigError) as caught:
        load_certificate(files.certfile, files.keyfile)
    lines = caught.value.lines()
    assert len(lines) <= 6 and lines[-1].startswith("  fix:") and "tls." in lines[0]
    return "\n".join(lines)


@pytest.mark.parametrize("use_rsa", [False, True])
def test_a_certificate_with_its_key_is_taken(tmp_path: Path, use_rsa: bool) -> None:
    files = write_certificate(tmp_path, use_rsa=use_rsa)
    found = load_certificate(files.certfile, files.keyfile)
    assert found.context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert found.context.options & ssl.OP_NO_RENEGOTIATION


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    assert "has expired" in refused(write_certificate(tmp_path, valid_days=(-9, -1)))
    assert "is not valid yet" in refused(write_certificate(tmp_path, valid_days=(2, 9)))
    assert "is encrypted" in refused(write_certificate(tmp_path, password="secret"))
    files = write_certificate(tmp_path)
    certificate, key = files.certfile.read_bytes(), files.keyfile.read_bytes()
    write_certificate(tmp_path)
    files.certfile.write_bytes(certificate)
    assert "is not that of" in refused(files)
    files.keyfile.write_bytes(key)
    files.keyfile.chmod(0o644)
    assert "is open to other users" in refused(files)
    files.keyfile.chmod(0o600)
    load_certificate(files.certfile, files.keyfile)
    for file, wrong in ((files.certfile, key), (files.keyfile, certificate), (files.certfile, b"\xff")):
        kept = file.read_bytes()
        file.write_bytes(wrong)
        assert "is no certificate" in refused(files) or "is no key" in refused(files)
        file.write_bytes(kept)
    for file in (files.certfile, files.keyfile):
        kept = file.read_bytes()
        file.unlink()
        assert "cannot be read" in refused(files)
        file.write_bytes(kept)
        file.chmod(0o600)
    load_certificate(files.certfile, files.keyfile)


def test_a_renewed_certificate_is_taken_and_a_wrong_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, registry = write_certificate(tmp_path), MetricRegistry()
    watch = CertificateWatch(str(files.certfile), str(files.keyfile), registry)

    def expiry() -> float:
        return registry.get_sample_value("diptych:certificate_expiry_seconds") or 0.0

    async def play() -> None:
        before = watch.context
        write_certificate(tmp_path, valid_days=(-1, 60))
        await watch.look()
        assert watch.context is before, "who writes two files may not be done"
        await watch.look()
        renewed = watch.context
        assert renewed is not before and expiry() > first + 20 * 86400
        for valid_days in ((-9, -1), (3, 9)):
            write_certificate(tmp_path, valid_days=valid_days)
            caplog.clear()
            for _ in range(4):
                await watch.look()
            assert watch.context is renewed and len(caplog.records) == 1
            assert watch.report()["problem"] and "tls.crt" in watch.problem
        write_certificate(tmp_path)
        for _ in range(2):
            await watch.look()
        assert watch.context is not renewed and watch.report()["problem"] is None

    first = expiry()
    asyncio.run(play())
    assert logging.ERROR in {record.levelno for record in caplog.records} or not watch.problem


def test_a_deployment_trusts_its_own_certificate_alone(tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    context = trust_certificate(str(files.certfile))
    assert context.verify_mode is ssl.CERT_REQUIRED and len(context.get_ca_certs()) == 1
