"""What is shown while it runs, on standard error: one line that changes on a terminal, else a line for each run."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live as Display
from rich.table import Table

from planner.terms import Slo
from services.bench.drive import GIVEN_UP, Run
from services.bench.report import percentile

EVERY_S = 0.5  # drawing takes CPU that the server may need


class Live:
    """Shows runs. Quiet, it shows nothing."""

    def __init__(self, slo: Slo, quiet: bool = False) -> None:
        self._slo, self._quiet = slo, quiet
        self._console = Console(stderr=True, quiet=quiet)
        self._display: Display | None = None
        self._drawn_s = 0.0

    def __enter__(self) -> Live:
        if self._console.is_terminal and not self._quiet:
            self._display = Display(console=self._console, auto_refresh=False, transient=True)
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.stop()

    def watch(self, run: Run, num_open: int) -> None:
        """How far a run is; called often."""
        now_s = time.monotonic()
        if self._display is None or now_s - self._drawn_s < EVERY_S:
            return
        self._drawn_s = now_s
        table = Table.grid(padding=(0, 2))
        table.add_row(*_words(run, self._slo), f"{num_open} open", f"{run.sent} of {run.jobs} sent")
        self._display.update(table, refresh=True)

    def told(self, run: Run) -> None:
        """A run has ended."""
        if self._display is not None:
            self._display.update("", refresh=True)
        end = "given up: too few can attain" if run.hopeless else f"{len(run.seen)} requests"
        self._console.print(
            "  ".join([*_words(run, self._slo), end]), highlight=False, markup=False, soft_wrap=True
        )


def _words(run: Run, slo: Slo) -> list[str]:
    kept, of = run.attained(slo)
    told = [f"{run.rate:.3g}/s seed {run.seed}"]
    if of:
        told.append(f"attained {'≤ ' * run.hopeless}{kept / of:.1%}")
    well = [one for one in run.counted if not one.served.failed]
    if well:
        told.append(_times("TTFT", sorted(one.served.ttft_s for one in well)))
        told.append(_times("TPOT", sorted(one.served.tpot_s for one in well)))
    failed = sum(one.served.failed not in ("", GIVEN_UP) for one in run.seen)
    return told + ([f"{failed} failed"] if failed else [])


def _times(name: str, ordered: list[float]) -> str:
    return f"{name} p50 {percentile(ordered, 50) * 1e3:.3g} p90 {percentile(ordered, 90) * 1e3:.3g} ms"
