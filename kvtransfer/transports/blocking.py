"""Blocking calls of a puller, for callers with nothing else to do meanwhile: measurements and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtransfer.cooperative import CoopPuller, run_to_end


class BlockingPuller:
    """Adds a blocking version of each task of a `CoopPuller`, which runs on the calling thread."""

    def link(self: CoopPuller, worker: str, incarnation: str, endpoint: bytes) -> None:
        """Blocks; see `CoopPuller.link_task`."""
        run_to_end(self.link_task(worker, incarnation, endpoint))

    def pull(
        self: CoopPuller,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> list[bytes]:
        """Blocks; see `CoopPuller.pull_task`."""
        return run_to_end(self.pull_task(worker, incarnation, pairs, stop))

    def measure(self: CoopPuller, worker: str) -> tuple[float, float]:
        """Blocks; see `CoopPuller.measure_task`."""
        return run_to_end(self.measure_task(worker))
