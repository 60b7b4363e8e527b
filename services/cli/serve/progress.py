"""What a person sees while a deployment starts and runs: phases with progress, one box, then only what changes.

On a terminal the phases are bars that fill; elsewhere each is one line when it is done.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from diptych.errors import DiptychError
from services.host.supervision.supervisor import ChildStatus

# The phases that a worker reports, in their order.
PHASE_ORDER = ("", "load", "warm", "link", "ready")
PHASE_WIDTH = 9


class ElapsedColumn(ProgressColumn):
    """Seconds with one decimal, standing still once a phase is done."""

    def render(self, task: Task) -> Text:
        """The seconds that `task` has taken so far, or took."""
        return Text(f"{task.finished_time or task.elapsed or 0.0:6.1f} s", style="dim")


@dataclass
class StartProgress:
    """Phases in order; `num_workers` shares the bars of load and warm-up among the workers."""

    console: Console
    num_workers: int
    up: bool = False
    _began_s: dict[str, float] = field(default_factory=dict)
    _rows: dict[str, TaskID] = field(default_factory=dict)
    _workers: dict[str, ChildStatus] = field(default_factory=dict)
    _states: dict[str, str] = field(default_factory=dict)
    _ends: dict[str, int] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _progress: Progress | None = None

    def begin_phase(self, phase: str) -> None:
        """Show that `phase` is under way."""
        if phase in self._began_s:
            return
        self._began_s[phase] = time.monotonic()
        if self.console.is_terminal:
            if self._progress is None:
                self._progress = _make_bars(self.console)
                self._progress.start()
            self._rows[phase] = self._progress.add_task(phase.ljust(PHASE_WIDTH), total=1.0, remark="")

    def show_fraction(self, phase: str, fraction: float) -> None:
        """Show how far `phase` is, from 0 to 1."""
        if self._progress is not None and phase in self._rows:
            self._progress.update(self._rows[phase], completed=min(fraction, 0.999))

    def end_phase(self, phase: str, remark: str = "") -> None:
        """Mark `phase` as complete, with a short `remark` on its result. Only the first call prints it."""
        if phase in self._done:
            return
        self.begin_phase(phase)
        self._done.add(phase)
        if self._progress is not None:
            self._progress.update(self._rows[phase], completed=1.0, remark=remark)
        else:
            took_s = time.monotonic() - self._began_s[phase]
            self.print_line(f"{phase.ljust(PHASE_WIDTH)} {took_s:6.1f} s  {remark}".rstrip())

    def on_status(self, status: ChildStatus) -> None:
        """Show the new status of a child: its progress during the start, and a line for each problem later."""
        if status.name != "gateway":
            self._workers[status.name] = status
            if not self.up:
                self._advance_phases()
        if self.up:
            self._report_change(status)
        self._states[status.name] = status.state

    @property
    def workers_ready(self) -> bool:
        """Whether as many workers as are started have reported that they are ready; adopted ones may be more."""
        ready = [name for name, one in self._workers.items() if one.state == "ready"]
        return len(ready) >= self.num_workers

    def _advance_phases(self) -> None:
        """Bars of what the workers do at the same time; each ends when the last worker is through."""
        for phase, word, following in (("load", "load", "warm-up"), ("warm-up", "warm", "canary")):
            fraction = sum(_phase_fraction(one, word) for one in self._workers.values()) / self.num_workers
            if fraction >= 1.0:
                self.end_phase(phase)
                self.begin_phase(following)
            elif fraction > 0:
                self.begin_phase(phase)
                self.show_fraction(phase, fraction)

    def _report_change(self, status: ChildStatus) -> None:
        # A restart is recognised by the number of ends, not by the states seen: a quick restart may be over before
        # the state is looked at.
        ends = status.restarts
        ended = ends > self._ends.get(status.name, 0)
        self._ends[status.name] = ends
        why = f": {status.error.what}" if status.error else ""
        if ended:
            loop = (
                f"; {status.crashes} times in a row, trying on" if status.looping else ", starting it again"
            )
            self.print_line(f"{status.name} ended ({status.ended}{why}){loop}")
        if status.state == "failed" and self._states.get(status.name) != "failed":
            self.print_line(f"{status.name} has failed, and is not started again{why}")
        if status.state == "retired":
            self.print_line(f"{status.name} was drained, and is not started again")
        if (
            status.state == "ready"
            and status.restarts
            and (ended or self._states.get(status.name) != "ready")
        ):
            self.print_line(f"{status.name} is back (start {status.restarts + 1})")

    def print_line(self, text: str) -> None:
        """Print one line above the bars; nothing in it is taken for markup."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def print_box(self, title: str, content: str) -> None:
        """The last word of a start. Rules above and below only, so that commands can be copied whole."""
        self.close()
        self.console.rule(title, style="green")
        self.print_line(content)
        self.console.rule(style="green")

    def close(self) -> None:
        """Leave the bars as they are and give the terminal back. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def print_error(self, error: DiptychError) -> None:
        """Print an error to standard error, after what was shown so far."""
        self.close()
        print("\n".join(error.lines()), file=sys.stderr, flush=True)


def _phase_fraction(status: ChildStatus, phase: str) -> float:
    if status.phase not in PHASE_ORDER or PHASE_ORDER.index(status.phase) < PHASE_ORDER.index(phase):
        return 0.0
    if status.phase != phase:
        return 1.0
    return min(1.0, status.done / status.total) if status.total else 0.0


def _make_bars(console: Console) -> Progress:
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        ElapsedColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    # Output is not redirected: Ray would keep rich's replacement of standard output, and fail on it when the process
    # ends.
    return Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
