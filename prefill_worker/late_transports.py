"""Opens a transport of a prefill worker while it serves, because a decode worker has asked for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from diptych.errors import TransferError
from diptych.messages import Opened, ToGateway

log = logging.getLogger(__name__)


class LateTransports:
    """`open_transport` opens a transport and returns its endpoint; None if this worker opens none.

    It and `send` are called from threads of this class.
    """

    def __init__(
        self, open_transport: Callable[[str], bytes] | None, send: Callable[[ToGateway], None]
    ) -> None:
        self._open_transport, self._send = open_transport, send

    def start_opening(self, transport: str) -> None:
        """Open `transport` in a thread of its own, since it takes long: libraries are loaded and memory registered."""
        threading.Thread(
            target=self._open_and_report, args=(transport,), name="open transport", daemon=True
        ).start()

    def _open_and_report(self, transport: str) -> None:
        """Open a transport and send its endpoint, or the error, to the gateway as `Opened`."""
        try:
            if self._open_transport is None:
                raise TransferError("this worker opens no transports")
            opened = Opened(transport, self._open_transport(transport))
        except TransferError as error:
            opened = Opened(transport, b"", "; ".join(part for part in (error.what, error.why) if part))
        # A library may raise anything. Without a report the decode worker would ask again and again.
        except Exception as error:
            log.exception("transport %s could not be opened", transport)
            opened = Opened(transport, b"", repr(error))
        self._send(opened)
