"""Finding a peer, in a thread of its own: over a link that is dead that call returns when the link is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from diptych.errors import TransferError
from kvtransfer.turns import Turns

PAUSE_S = 1e-3  # between two looks
T = TypeVar("T")


class Joining(Generic[T]):
    """`make` and then `join` what was made. Nothing is given up: who waits does so only for so long."""

    def __init__(self, make: Callable[[], T], join: Callable[[T], object]) -> None:
        self.peer: object = None
        self._made: T | None = None
        self._error: Exception | None = None
        self._since_s: float | None = None  # that it has been joining
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(make, join), name="joining", daemon=True).start()

    def wait(self, most_s: float) -> Turns[T]:
        """What was made, joined. Raises TransferError if that takes longer, and whatever went wrong."""
        while not self._done.is_set():
            if self._since_s is not None and time.monotonic() - self._since_s > most_s:
                raise TransferError("a KV link stands still", f"no connection within {most_s:.1f} s")
            yield PAUSE_S
        if self._error is not None:
            raise self._error
        assert self._made is not None, "it is done, without an error"
        return self._made

    @property
    def done(self) -> bool:
        """Is there anything to be had, an error or not?"""
        return self._done.is_set()

    def _run(self, make: Callable[[], T], join: Callable[[T], object]) -> None:
        try:
            made = make()
            self._since_s = time.monotonic()
            self.peer = join(made)
            self._made = made
        except Exception as error:
            self._error = error
        self._done.set()
