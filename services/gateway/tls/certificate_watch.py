"""Takes a renewed certificate without a restart: new connections get it, open ones go on.

A certificate that is wrong changes nothing: its problem is logged once, and is in `/status` until it is mended.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from diptych.errors import ConfigError
from services.gateway.metrics.metric_registry import MetricRegistry
from services.gateway.tls.certificates import load_certificate
from services.host.watched_files import LOOK_S, WatchedFiles

log = logging.getLogger(__name__)

# The metric, which is there with a certificate alone: its name and what it means.
EXPIRY = "diptych:certificate_expiry_seconds", "When the certificate in use expires, in Unix seconds"


class CertificateWatch:
    """The certificate that handshakes use now, as two files say. `problem` is what is wrong with the files now."""

    def __init__(self, certfile: str, keyfile: str, registry: MetricRegistry) -> None:
        """Raises ConfigError if the certificate cannot be used."""
        self._certfile, self._keyfile, self.problem = Path(certfile), Path(keyfile), ""
        self._files = WatchedFiles(self._certfile, self._keyfile)
        self._certificate = load_certificate(self._certfile, self._keyfile)
        self._expiry: Gauge = registry.gauge(*EXPIRY)
        self._expiry.set(self._certificate.expires.timestamp())

    @property
    def context(self) -> ssl.SSLContext:
        """What the next handshake uses."""
        return self._certificate.context

    async def run_forever(self) -> None:
        """Look at the files, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take the certificate of the files, if they are others than before."""
        if not await asyncio.to_thread(self._files.have_changed):
            return
        try:
            found = await asyncio.to_thread(load_certificate, self._certfile, self._keyfile)
        except ConfigError as error:
            self.problem = " ".join(" ".join(error.lines()).split())
            log.error("the certificate stays the same: %s", self.problem)
            return
        self._certificate, self.problem = found, ""
        self._expiry.set(found.expires.timestamp())
        log.warning("the certificate was renewed: it expires %s", found.expires.isoformat())

    def report(self) -> dict[str, Any]:
        """The part of `/status` about the certificate."""
        return {"expires": self._certificate.expires.isoformat(), "problem": self.problem or None}
