"""What is shown while it runs, on standard error: one line that changes on a terminal, else a line for each run."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live as Display
from rich.table import Table

from diptych.slo import Slo
from services.bench.load_generator import GIVEN_UP, LoadRun
from services.bench.report import percentile

# Seconds between two redraws. Drawing takes CPU time that the server may need.
REDRAW_INTERVAL_S = 0.5


class BenchProgress:
    """Shows the progress of runs. If quiet, it shows nothing."""

    def __init__(self, slo: Slo, quiet: bool = False) -> None:
        self._slo, self._quiet = slo, quiet
        self._console = Console(stderr=True, quiet=quiet)
        self._display: Display | None = None
        self._drawn_s = 0.0

    def __enter__(self) -> BenchProgress:
        if self._console.is_terminal and not self._quiet:
            self._display = Display(console=self._console, auto_refresh=False, transient=True)
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.stop()

    def show_progress(self, run: LoadRun, num_open: int) -> None:
        """How far a run is; called often."""
        now_s = time.monotonic()
        if self._display is None or now_s - self._drawn_s < REDRAW_INTERVAL_S:
            return
        self._drawn_s = now_s
        table = Table.grid(padding=(0, 2))
        table.add_row(
            *_run_words(run, self._slo), f"{num_open} open", f"{run.num_sent} of {run.num_jobs} sent"
        )
        self._display.update(table, refresh=True)

    def run_ended(self, run: LoadRun) -> None:
        """A run has ended."""
        if self._display is not None:
            self._display.update("", refresh=True)
        end = "given up: too few can attain" if run.given_up else f"{len(run.records)} requests"
        self._console.print(
            "  ".join([*_run_words(run, self._slo), end]), highlight=False, markup=False, soft_wrap=True
        )


def _run_words(run: LoadRun, slo: Slo) -> list[str]:
    attained, of = run.count_attained(slo)
    words = [f"{run.rate:.3g}/s seed {run.seed}"]
    if of:
        words.append(f"attained {'≤ ' * run.given_up}{attained / of:.1%}")
    answered_records = [one for one in run.counted_records if not one.result.failed]
    if answered_records:
        words.append(_time_percentiles("TTFT", sorted(one.result.ttft_s for one in answered_records)))
        words.append(_time_percentiles("TPOT", sorted(one.result.tpot_s for one in answered_records)))
    failed = sum(one.result.failed not in ("", GIVEN_UP) for one in run.records)
    return words + ([f"{failed} failed"] if failed else [])


def _time_percentiles(name: str, ordered: list[float]) -> str:
    return f"{name} p50 {percentile(ordered, 50) * 1e3:.3g} p90 {percentile(ordered, 90) * 1e3:.3g} ms"
