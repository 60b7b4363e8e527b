"""A puller for callers that have nothing else to do meanwhile: measurements, tests, a pull by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtransfer.turns import Pulling, finish


class Blocking:
    """The same three, done on the calling thread."""

    def link(self: Pulling, worker: str, incarnation: str, endpoint: bytes) -> None:
        """See `linking`."""
        finish(self.linking(worker, incarnation, endpoint))

    def pull(
        self: Pulling,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> list[bytes]:
        """See `pulling`."""
        return finish(self.pulling(worker, incarnation, pairs, stop))

    def measure(self: Pulling, worker: str) -> tuple[float, float]:
        """See `measuring`."""
        return finish(self.measuring(worker))
