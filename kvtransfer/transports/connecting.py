"""Connects to a peer in a thread of its own, because over a dead link the call blocks until the link is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from diptych.errors import TransferError
from kvtransfer.cooperative import CoopTask

# Seconds between two checks whether the thread is done.
POLL_S = 1e-3
T = TypeVar("T")


class PeerConnector(Generic[T]):
    """Calls `make` and then `join` with its result, in a thread. The thread is never stopped; only waits time out."""

    def __init__(self, make: Callable[[], T], join: Callable[[T], object]) -> None:
        self.peer: object = None
        self._made: T | None = None
        self._error: Exception | None = None
        # Time at which `join` was called.
        self._since_s: float | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run_connect, args=(make, join), name="joining", daemon=True).start()

    def wait_task(self, most_s: float) -> CoopTask[T]:
        """The result of `make`, after `join`.

        Raises TransferError if `join` takes over `most_s` seconds, or any error.
        """
        while not self._done.is_set():
            if self._since_s is not None and time.monotonic() - self._since_s > most_s:
                raise TransferError("a KV link stands still", f"no connection within {most_s:.1f} s")
            yield POLL_S
        if self._error is not None:
            raise self._error
        assert self._made is not None, "the thread has ended without an error"
        return self._made

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended, with a result or an error."""
        return self._done.is_set()

    def _run_connect(self, make: Callable[[], T], join: Callable[[T], object]) -> None:
        """The thread: make the connection, join the peer, and keep the result or the error."""
        try:
            made = make()
            self._since_s = time.monotonic()
            self.peer = join(made)
            self._made = made
        except Exception as error:
            self._error = error
        self._done.set()
