"""The files that say who may ask, and how clients connect: named keys, and the certificate. Both may change."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diptych.specs import GatewaySpec
from services.gateway.keys.key_watch import KeyFileWatch, open_named_keys
from services.gateway.keys.named_keys import NamedKeys
from services.gateway.metrics.metric_registry import MetricRegistry

if TYPE_CHECKING:
    from services.gateway.tls.certificate_watch import CertificateWatch


@dataclass(frozen=True, slots=True)
class AccessFiles:
    """What watches these files; None: there is no such file."""

    key_watch: KeyFileWatch | None = None
    certificates: CertificateWatch | None = None

    @property
    def named_keys(self) -> NamedKeys | None:
        """The API keys, if some of them have names."""
        return None if self.key_watch is None else self.key_watch.keys

    def watch_files(self) -> list[Coroutine[Any, Any, None]]:
        """What looks at the files until it is cancelled."""
        return [one.run_forever() for one in (self.key_watch, self.certificates) if one is not None]

    def report(self, with_names: bool, now_s: float) -> dict[str, Any]:
        """The part of `/status` about the files that there are. Names of keys are in it only `with_names`."""
        report: dict[str, Any] = {}
        if self.key_watch is not None:
            report["keys"] = self.key_watch.report(with_names, now_s)
        if self.certificates is not None:
            report["certificate"] = self.certificates.report()
        return report


def open_access_files(spec: GatewaySpec, registry: MetricRegistry) -> AccessFiles:
    """Read the files of `spec`, and define their metrics. Raises ConfigError if one of them is wrong."""
    key_watch = open_named_keys(spec.keys_file, spec.api_keys) if spec.keys_file else None
    if spec.ssl_certfile is None or spec.ssl_keyfile is None:
        return AccessFiles(key_watch)
    # Imported only here, since it imports cryptography, which plain HTTP does not need.
    from services.gateway.tls.certificate_watch import CertificateWatch

    return AccessFiles(key_watch, CertificateWatch(spec.ssl_certfile, spec.ssl_keyfile, registry))
