"""One HTTP request to a gateway with the standard library alone, and readable errors when it fails."""

from __future__ import annotations

import json
import ssl
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from diptych.errors import ConfigError, StartError

CONNECT_TIMEOUT_S = 5.0
SCHEMES = ("http", "https")


def bearer_header(key: str | None) -> dict[bytes, bytes]:
    """The Authorization header for an API key.

    Raises:
        ConfigError: no header can hold it.
    """
    if not key:
        return {}
    if not key.isprintable():
        raise ConfigError(
            "the key cannot be sent", "it has a line break or another control character", "one line, no tabs"
        )
    return {b"Authorization": f"Bearer {key}".encode()}


def base_url(url: str) -> str:
    """Where a gateway's routes begin; people also give the address that clients of OpenAI's API take."""
    return url.rstrip("/").removesuffix("/v1")


def get_route(
    url: str,
    key: str | None,
    path: str,
    timeout_s: float = CONNECT_TIMEOUT_S,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    """The body of a route of the gateway at `url`. Proxies of the environment are not asked.

    It blocks: `timeout_s` to connect, and as long for each piece of the answer. `tls` says which certificates are
    trusted; None: those that this machine trusts, or the file that `SSL_CERT_FILE` names.

    Raises:
        ConfigError: no header can hold the key.
        StartError: nothing answers there, or it refuses.
    """
    headers = {name.decode(): value.decode("latin-1") for name, value in bearer_header(key).items()}
    try:
        where = urlsplit(base_url(url))
        if where.scheme not in SCHEMES or not where.hostname:
            raise ValueError("it begins with neither http:// nor https://")
        connection = (
            HTTPSConnection(where.hostname, where.port, timeout=timeout_s, context=tls)
            if where.scheme == "https"
            else HTTPConnection(where.hostname, where.port, timeout=timeout_s)
        )
        try:
            connection.request("GET", f"{where.path}{path}", headers=headers)
            answer = connection.getresponse()
            content: bytes = answer.read()
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError) as error:
        raise unreachable_error(url, error) from None
    if answer.status != 200:
        raise refused_error(answer.status, content)
    return content


def unreachable_error(url: str, error: Exception) -> StartError:
    """The error for a gateway that does not answer."""
    why = str(error) or type(error).__name__
    if "certificate verify failed" in why:
        fix = "SSL_CERT_FILE=FILE in the environment names a certificate to trust"
        return StartError(f"the certificate of {url} is not trusted", why, fix)
    return StartError(
        f"no gateway answers at {url}", why, "start one with `diptych serve`, or name another with --url"
    )


def refused_error(status: int, content: bytes) -> StartError:
    """The error for a refusal, with the gateway's words if the body is OpenAI's error body."""
    try:
        why = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        why = content.decode("utf-8", "replace")[:300]
    fix = "--api-key KEY, or DIPTYCH_API_KEY in the environment" if status == 401 else ""
    return StartError(f"the gateway answered {status}", why, fix)
