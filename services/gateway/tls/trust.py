"""How the parts of a deployment trust their own gateway."""

from __future__ import annotations

import ssl


def trust_certificate(certfile: str) -> ssl.SSLContext:
    """What trusts exactly the certificate of a file, under any name: a deployment asks its own gateway."""
    context = ssl.create_default_context(cafile=certfile)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
